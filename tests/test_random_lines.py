"""Checks that the lines of ``why`` free what they say and drop nothing else, for random graphs.

A failure shows the wrong lines and the code that builds the graph. Shrink it with
``python -m tests.random_lines SEED --shrink``.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.answering import Answerer
from tests.process_memory import QUIET, linux
from tests.random_lines import plain_graph

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

FEW, ALL = 8, 400

Answer = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """Return a function that returns the number of lines, and the seeds that fail."""
    process = Answerer("-m", "tests.random_lines", env=os.environ | QUIET)
    yield process.run_main
    process.close()


@linux
@pytest.mark.parametrize(
    ("first", "stop"), [(0, FEW), pytest.param(FEW, ALL, marks=pytest.mark.thorough)]
)
def test_lines_of_why_free_all_and_drop_nothing_else(first: int, stop: int, answer: Answer) -> None:
    outcome = answer(first, stop)
    assert outcome["failures"] == {}, "\n\n".join(outcome["failures"].values())
    assert outcome["lines"] > 5 * (stop - first)


@linux
def test_a_line_without_a_statement_leaves_memory(answer: Answer) -> None:
    outcome = answer(2, 4, "--spoil", "statement")
    assert len(outcome["failures"]) == 2, outcome
    assert all(": leaves n" in text for text in outcome["failures"].values()), outcome


@linux
def test_a_line_without_its_remark_drops_other_data(answer: Answer) -> None:
    outcome = answer(15, 17, "--spoil", "remark")
    assert outcome["failures"], outcome
    assert all("of other data" in text for text in outcome["failures"].values()), outcome


def test_a_seed_stands_for_one_graph() -> None:
    codes = [plain_graph(seed).code for seed in (1, 2, 1)]
    assert codes[0] == codes[2] != codes[1]
