"""Checks that ``why`` and ``top`` promise of ``del`` what dies, for random graphs of objects of
many kinds.

A failure shows the wrong figures and the code that builds the graph. Paste it into a notebook, or
shrink it with ``python -m tests.random_graphs why SEED --shrink``.
"""

import json
import os

import pytest

from tests.alone import printed
from tests.graph_kinds import CONTAINERS, KNOWN_WRONG
from tests.random_graphs import random_graph

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="each graph is built and deleted in a forked process"
)
FEW, ALL = 30, 1000
PARTS = [(0, FEW)]
PARTS += [
    pytest.param(first, first + 94, marks=pytest.mark.thorough) for first in range(FEW, ALL, 94)
]


def failures(*arguments: object) -> dict[str, str]:
    """Return the wrong figures, with the code of each graph, by its title."""
    # Python warns of forks next to threads
    settings = {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    text = printed("-m", "tests.random_graphs", *arguments, env=os.environ | settings)
    return dict(json.loads(text.splitlines()[-1]))


def readable(found: dict[str, str]) -> str:
    """Return the failures as a text that can be read and pasted."""
    return "\n\n".join(f"# {title}\n{text}" for title, text in found.items())


@pytest.mark.parametrize("look", ["why", "top"])
@pytest.mark.parametrize(("first", "stop"), PARTS)
def test_promised_objects_die_in_random_graphs(look: str, first: int, stop: int) -> None:
    wrong_graphs = failures(look, first, stop)
    assert not wrong_graphs, readable(wrong_graphs)


@pytest.mark.parametrize(("look", "turn"), [("why", 0), ("top", 1)])
def test_promised_objects_die_with_each_kind_of_holder(look: str, turn: int) -> None:
    wrong_graphs = failures(look, "each", turn)
    assert not wrong_graphs, readable(wrong_graphs)


@pytest.mark.thorough
@pytest.mark.parametrize("look", ["why", "top"])
def test_promised_objects_die_in_each_graph_of_each_kind(look: str) -> None:
    wrong_graphs = failures(look, "each")
    assert not wrong_graphs, readable(wrong_graphs)


def test_a_wrong_search_fails_in_most_graphs() -> None:
    wrong_graphs = failures("nothing", 0, 10)
    # Of ten.
    assert len(wrong_graphs) > 5
    assert all("said 0.0 KiB, frees" in text for text in wrong_graphs.values())


def test_a_seed_stands_for_one_graph() -> None:
    codes = [random_graph(seed).code for seed in (1, 2, 1)]
    assert codes[0] == codes[2] != codes[1]


def test_most_kinds_of_holders_are_compared() -> None:
    compared = [kind for kind in CONTAINERS if kind.name not in KNOWN_WRONG]
    # Else too many are known to be wrong.
    assert len(compared) > 100


def test_shrinking_leaves_the_one_object_that_fails() -> None:
    text = printed("-m", "tests.random_graphs", "nothing", 0, 6, "--shrink")
    programs = text.split("# seed")[1:]
    assert programs
    for program in programs:
        made = [line for line in program.splitlines() if " = Load(" in line]
        assert len(made) == 1, text
