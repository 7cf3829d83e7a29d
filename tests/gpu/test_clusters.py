"""Engines of a cluster on cards: each is measured on its own, and one that runs out of memory is
named.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests.clusters import ID, last_record, on_engines, start_cluster
from tests.gpu.support import started_kernel
from tests.steps import run_quietly

pytest.importorskip("ipyparallel")

PIN_ENGINES_TO_CARDS = f"""
import os
os.environ['CUDA_VISIBLE_DEVICES'] = str({ID} % 2)
import torch
_ = torch.ones(1, device='cuda')
"""
"""Gives each engine a card of its own, as jobs do: it is cuda:0 there."""


@pytest.fixture
def cluster(machine: Callable[..., None], tmp_path: Path) -> Iterator[Kernel]:
    """Four engines on two simulated cards of 8 GiB, two on each."""
    machine(cards=2, gib=8)
    with started_kernel() as kernel:
        start_cluster(kernel, tmp_path)
        run_quietly(kernel, f"%%px\n{PIN_ENGINES_TO_CARDS}")
        yield kernel
        kernel.run("cluster.stop_cluster_sync()")


@pytest.mark.simulated
def test_each_engines_card_is_measured_and_an_oom_is_given_back(cluster: Kernel) -> None:
    source = f"x = torch.empty({64 * MIB}, dtype=torch.uint8, device='cuda')\n"
    source += f"if {ID} == 2: torch.empty(2**50, device='cuda')"
    reply = cluster.run(f"%%experiment cards --on all\n{source}")
    assert reply.status == "error"

    # The sums over the engines.
    experiment = last_record(cluster)
    assert [engine["error"] for engine in experiment["engines"]] == ["", "", "OutOfMemoryError", ""]
    assert experiment["ooms"] == 1
    assert experiment["consumed"]["cuda"] == 4 * 64 * MIB
    assert experiment["freed"]["cuda"] == 4 * 64 * MIB, "the failed engine's, too"

    # The figures of each engine.
    for engine in experiment["engines"]:
        (usage,) = [usage for usage in engine["record"]["usages"] if usage["device"] == "cuda:0"]
        assert usage["peak_bytes"] - usage["before_bytes"] == 64 * MIB
        assert list(engine["cards"]) == ["cuda:0"]
        assert 0 < engine["free"]["cuda:0"] < 8 * 1024 * MIB
    (text,) = reply.reports("engines")
    assert "): OutOfMemoryError" in text
    assert on_engines(cluster, "torch.cuda.memory_allocated()") == [512] * 4
