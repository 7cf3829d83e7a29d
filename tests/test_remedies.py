"""Each line that a report prints to free memory can be pasted, and frees its row."""

import os
from collections.abc import Iterator

import pytest

from tests.answering import Answerer
from tests.process_memory import QUIET, linux
from tests.remedies import Outcome
from tests.remedy_cases import CASES
from tests.steps import needs

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

SIZE_BYTES = 40 << 20
_LIBRARIES = ("torch", "xarray", "pandas", "matplotlib")
"""Libraries that a forked process would take a second to import."""


def questions() -> list[object]:
    """Return each case with each kind of object as a parameter.

    ``make test`` asks about every case, and about each kind in half of the cases that have both: a
    line depends on the place, and the search for the row on the kind.
    """
    parameters = list[object]()
    number_of_pairs = 0
    for name, case in CASES.items():
        daily = set(case.kinds)
        is_usual = not (case.sentences or case.is_out_of_reach)
        if is_usual and case.kinds == ("array", "object"):
            daily = {case.kinds[number_of_pairs % 2]}
            number_of_pairs += 1
        for kind in case.kinds:
            marks = () if kind in daily else (pytest.mark.thorough,)
            parameters.append(pytest.param(f"{name}: {kind}", marks=marks))
    return parameters


class Answerers:
    """Processes in which each question has a forked process of its own, by the library that they
    have imported; empty for none.
    """

    def __init__(self) -> None:
        self._by_library: dict[str, Answerer] = {}

    def with_library(self, library: str) -> Answerer:
        """Return the process with a library, which begins with its first question."""
        if library not in self._by_library:
            arguments = (library,) if library else ()
            self._by_library[library] = Answerer(
                "-m", "tests.remedies", *arguments, env=os.environ | QUIET
            )
        return self._by_library[library]

    def close(self) -> None:
        for answerer in self._by_library.values():
            answerer.close()


@pytest.fixture(scope="module")
def answerers() -> Iterator[Answerers]:
    """The processes of this module's tests."""
    answerers = Answerers()
    yield answerers
    answerers.close()


@linux
@pytest.mark.parametrize("sees_all", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("question", questions())
def test_a_printed_line_frees_its_row(question: str, sees_all: bool, answerers: Answerers) -> None:
    name, _, kind = question.partition(": ")
    setup = CASES[name].setup
    imported = ""
    for library in _LIBRARIES:
        if f"import {library}" in setup and f"install('{library}')" not in setup:
            needs(library)
            imported = imported or library

    # The case runs in a kernel that has imported its library, and none but that.
    reply = answerers.with_library(imported).ask([name, kind, sees_all])
    assert type(reply) is dict, reply
    outcome = Outcome.from_json(reply)

    # What the report names.
    case = CASES[name]
    if not (case.is_out_of_reach and kind == "object"):
        assert [row.advice for row in outcome.survivors] == [row.advice for row in outcome.rows]
    assert outcome.failures == []
    assert sum(row.size_bytes for row in outcome.rows) == pytest.approx(SIZE_BYTES, rel=0.1)
    assert all(row.advice for row in outcome.rows)

    # Cases without a line have a sentence.
    if case.sentences:
        assert outcome.sentences
        for sentence in outcome.sentences:
            assert sentence.startswith(case.sentences), outcome.sentences
        return

    # In all other cases the lines free everything.
    assert outcome.sentences == []
    assert outcome.alive == 0, outcome.rows
    assert outcome.after == "", outcome.rows
