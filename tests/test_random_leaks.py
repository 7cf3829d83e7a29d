"""Checks that the lines printed for random leaks free all of them, and nothing else.

A failure shows the experiment's code and the printed lines. Shrink it with
``python -m tests.random_leaks SEED --shrink``.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.answering import Answerer
from tests.process_memory import QUIET, linux
from tests.random_leaks import program
from tests.steps import needs

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

FEW, ALL = 16, 400


Failures = Callable[..., list[object]]


@pytest.fixture(scope="module")
def failures() -> Iterator[Failures]:
    """Return a function that returns the seeds that fail, each with its program and what is wrong.

    All questions have one process, because its imports take a second.
    """
    process = Answerer("-m", "tests.random_leaks", env=os.environ | QUIET)
    yield process.run_main
    process.close()


@linux
@pytest.mark.parametrize(
    ("first", "stop"), [(0, FEW), pytest.param(FEW, ALL, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("order", ["together", "stepwise"])
def test_printed_lines_free_all_random_leaks(
    first: int, stop: int, order: str, failures: Failures
) -> None:
    options = ["--stepwise"] if order == "stepwise" else []
    if options and stop == FEW:
        stop = FEW // 2
    assert failures(first, stop, *options) == []


@linux
@pytest.mark.parametrize(
    ("first", "stop"), [(0, FEW // 2), pytest.param(FEW // 2, ALL, marks=pytest.mark.thorough)]
)
def test_printed_lines_free_random_leaks_of_torch(
    first: int, stop: int, failures: Failures
) -> None:
    needs("torch")
    assert failures(first, stop, "--torch") == []


@linux
@pytest.mark.parametrize(
    ("first", "stop"), [(0, FEW), pytest.param(FEW, ALL, marks=pytest.mark.thorough)]
)
def test_the_lines_of_a_report_say_if_they_drop_older_objects(
    first: int, stop: int, failures: Failures
) -> None:
    assert failures(first, stop, "--older") == []


@linux
@pytest.mark.parametrize("seed", [6015, 7021])
def test_an_object_that_a_look_gives_a_dict_is_a_holder(seed: int, failures: Failures) -> None:
    """The heap was listed before that look: "something that cannot be seen from Python"."""
    assert failures(seed, seed + 1, "--older") == []


@linux
@pytest.mark.parametrize(
    ("first", "stop"), [(0, FEW), pytest.param(FEW, ALL, marks=pytest.mark.thorough)]
)
def test_arrays_are_named_in_random_older_containers(
    first: int, stop: int, failures: Failures
) -> None:
    assert failures(first, stop, "--places") == []


@linux
@pytest.mark.parametrize(
    ("part", "mistake"),
    [("statement", " alive"), ("remark", "0 alive"), ("size", "rows have 0 of ")],
)
def test_a_row_without_one_of_its_parts_fails(part: str, mistake: str, failures: Failures) -> None:
    mistakes: list[Any] = failures(5, 7, "--places", "--spoil", part)
    assert mistakes
    assert all(mistake in text for _, _, text in mistakes), mistakes


@linux
def test_a_line_that_frees_nothing_fails(failures: Failures) -> None:
    mistakes = failures(0, 3, "--lines", "pass")
    assert len(mistakes) == 3, mistakes


def test_a_seed_stands_for_one_program() -> None:
    assert program(1) == program(1) != program(2)
