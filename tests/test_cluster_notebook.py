"""examples/cluster.ipynb runs on a cluster of four engines that it starts itself, and what its prose says is so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ipygpumem.units import MIB
from tests.tutorials import Tutorial

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not find_spec("ipyparallel"), reason="the notebook needs ipyparallel"),
]


@pytest.fixture(scope="module")
def cluster() -> Tutorial:
    return Tutorial("cluster")


def test_each_engine_needs_as_much_as_its_width_says(cluster: Tutorial) -> None:
    experiment = cluster.experiments["widths"]
    peaks = [engine.record.usages[0].peak_delta_bytes / MIB for engine in experiment.engines if engine.record]
    # Weights and their product's left side grow by 24 MiB with each width; the product has 16.
    assert peaks == pytest.approx([16 + 24 * number for number in (1, 2, 3, 4)], abs=12)
    assert (experiment.deleted, experiment.kept) == (("width", "weights", "hidden"), ("error",))
    assert "whose" in cluster.text("widths")
    assert cluster.replies["record"].result is not None
    assert cluster.replies["record"].result.count("('error',)") == 4


def test_a_span_has_two_cells_on_each_engine(cluster: Tutorial) -> None:
    experiment = cluster.experiments["sums"]
    assert [len(engine.record.cells) for engine in experiment.engines if engine.record] == [2] * 4
    assert experiment.parameters == {"rows": 4096}


def test_an_engine_that_fails_is_named_and_the_others_are_kept(cluster: Tutorial) -> None:
    experiment = cluster.experiments["failing"]
    assert [engine.error for engine in experiment.engines] == ["", "ValueError", "", ""]
    assert "engine 1 (" in cluster.text("failing")
    assert "%gpumem free on 2 engines" in cluster.text("free")
