"""Each line that a report prints to free memory can be pasted, and frees its row."""

import json
import os
from typing import Any

import pytest

from tests.alone import printed
from tests.remedies import Outcome
from tests.remedy_cases import CASES
from tests.test_sizes import QUIET, linux

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

SIZE_BYTES = 40 << 20
PASSES = [
    pytest.param([], id="own objects"),
    pytest.param(["--all"], id="all objects", marks=pytest.mark.thorough),
]
QUESTIONS = [f"{name}: {kind}" for name, case in CASES.items() for kind in case.kinds]


@pytest.fixture(scope="module", params=PASSES)
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the outcomes of all questions, each of which has a process of its own."""
    text = printed("-m", "tests.remedies", *request.param, env=os.environ | QUIET)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@linux
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_printed_line_frees_its_row(question: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[question]
    assert type(found) is dict, found
    outcome = Outcome(**found)
    case = CASES[question.partition(":")[0]]
    if not (case.is_out_of_reach and question.endswith("object")):
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
