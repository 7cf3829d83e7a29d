"""Each line that a report prints to free memory can be pasted, and frees its row."""

import os
from collections.abc import Iterator

import pytest

from tests.answering import Answerer
from tests.remedies import Outcome
from tests.remedy_cases import CASES
from tests.steps import needs
from tests.test_sizes import QUIET, linux

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

SIZE_BYTES = 40 << 20
QUESTIONS = [f"{name}: {kind}" for name, case in CASES.items() for kind in case.kinds]


@pytest.fixture(scope="module")
def answerer() -> Iterator[Answerer]:
    """A process in which each question has a forked process of its own."""
    answerer = Answerer("-m", "tests.remedies", env=os.environ | QUIET)
    yield answerer
    answerer.close()


@pytest.fixture(scope="module")
def answerer_with_torch() -> Iterator[Answerer]:
    """The same with torch."""
    answerer = Answerer("-m", "tests.remedies", "torch", env=os.environ | QUIET)
    yield answerer
    answerer.close()


@linux
@pytest.mark.parametrize("sees_all", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_printed_line_frees_its_row(
    question: str, sees_all: bool, request: pytest.FixtureRequest
) -> None:
    name, _, kind = question.partition(": ")
    setup = CASES[name].setup
    for library in ("pandas", "torch", "matplotlib"):
        if f"import {library}" in setup and f"install('{library}')" not in setup:
            needs(library)
    if "import torch" in setup:
        answerer: Answerer = request.getfixturevalue("answerer_with_torch")
    else:
        answerer = request.getfixturevalue("answerer")
    found = answerer.ask([name, kind, sees_all])
    assert type(found) is dict, found
    outcome = Outcome(**found)
    case = CASES[name]
    if not (case.is_out_of_reach and kind == "object"):
        assert [row[2] for row in outcome.survivors] == [row[2] for row in outcome.rows]
    assert outcome.failures == []
    assert sum(row[0] for row in outcome.rows) == pytest.approx(SIZE_BYTES, rel=0.1)
    assert all(advice for _, _, advice in outcome.rows)
    if case.sentences:
        assert all(sentence.startswith(case.sentences) for sentence in outcome.sentences), (
            outcome.sentences
        )
        assert outcome.sentences
        return
    assert outcome.sentences == []
    assert outcome.alive == 0, outcome.rows
    assert outcome.after == "", outcome.rows
