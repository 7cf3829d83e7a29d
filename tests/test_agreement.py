"""All commands say the same about one object: its size, and the place that holds it."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.agreement import Answer, Question, questions
from tests.answering import Answerer
from tests.kinds import MIB
from tests.process_memory import QUIET, linux

Answers = list[Answer]
WITHIN = 0.05
"""Largest relative difference between two commands' figures."""
SMALL_BYTES = 1 << 16
"""Bytes of containers and names, which one command counts and another does not."""

GRAPH = "top does not read autograd graphs; why of an expression counts the model's memory, too"
GROWTH = "an experiment looks for new untracked objects only within reach of a name"

KNOWN_SIZES: dict[str, str] = {
    "left torch: losses": GRAPH,
    "left torch: a sum of losses": GRAPH,
    "left torch: one loss": GRAPH,
    "place : a handler of logging": GROWTH,
}
"""Questions to which commands give different sizes today, with the reason."""
KNOWN_HOLDERS: dict[str, str] = {
    "left torch: losses": GRAPH,
    "left torch: a sum of losses": GRAPH,
    "left torch: one loss": GRAPH,
}
"""Questions to which commands name different holders today, with the reason."""
if sys.version_info < (3, 11):
    KNOWN_SIZES["place : a suspended generator"] = GROWTH
NEVER_FREED = {
    "named numpy: an object in a cycle through an array",
    "left numpy: an object in a cycle through an array",
    "named pandas: a frame that refers to itself",
    "left pandas: a frame that refers to itself",
}
"""Questions about objects that ``del`` does not free, which only ``why`` says."""
UNSEEN = {
    "named : a compressor",
    "left : a compressor",
    "named polars: a lazy frame",
    "left polars: a lazy frame",
    "named polars: a lazy frame of a query",
    "left polars: a lazy frame of a query",
    "named tokenizers: encodings of tokenizers",
    "left tokenizers: encodings of tokenizers",
}
"""Questions about memory of which no command names a MiB: libraries keep it, and ``top`` and
``why`` say "at least".
"""
LEFT_BY_DEFAULT = {
    "texts",
    "user's objects",
    "a closure",
    "an array",
    "views",
    "a trainer",
    "a class with arrays",
}
"""Kinds of objects that experiments leave behind in the tests that `make test` runs."""
SLOW = {"many lists", "a tree of XML", "groups", "user's empty objects", "a tee"}
"""Kinds of so many objects that the commands take seconds."""


ALIKE = {
    *(
        "long texts",
        "wide texts",
        "numbers",
        "floats",
        "times",
        "bytes",
        "a bytearray",
        "a dict",
        "a counter",
        "a tree",
    ),
    *(
        "tuples",
        "a set",
        "named tuples",
        "user's lists",
        "user's dicts",
        "user's objects with slots",
        "a BytesIO",
    ),
    *(
        "a memoryview",
        "texts of StringDType",
        "parsed JSON",
        "a bound method",
        "a chain map",
        "a mapping proxy",
    ),
    *(
        "a partial",
        "a C queue",
        "a namespace",
        "a data class",
        "an iterator",
        "a generator",
        "an executor's future",
    ),
    *(
        "a masked array",
        "a view of few rows",
        "a class of runpy",
        "an object of runpy",
        "a list of the stack",
    ),
    *(
        "an item of a list",
        "an item of a list in a dict",
        "a deque",
        "a slot",
        "a queue",
        "a thread's local",
    ),
}
"""Kinds of objects and places like another one, which `make test` leaves out."""


def is_quick(name: str, question: Question) -> bool:
    """Return True for a question that `make test` asks."""
    situation = name.partition(" ")[0]
    kind = name.partition(": ")[2]
    if question.library not in ("", "numpy") or kind in SLOW | ALIKE:
        return False
    if situation == "left":
        return kind in LEFT_BY_DEFAULT
    return situation == "named" or not question.library


def question_cases(known: dict[str, str]) -> list[Any]:
    """Return all questions as parameters, those of ``known`` contradictions as
    expected failures.
    """
    cases = []
    for name, question in questions().items():
        package = question.library.partition(".")[0] or "json"
        marks = [
            pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
        ]
        if name in known:
            marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason=known[name]))
        if not is_quick(name, question):
            marks.append(pytest.mark.thorough)
        cases.append(pytest.param(name, marks=marks))
    return cases


@pytest.fixture(scope="module")
def answers_to() -> Iterator[Callable[[str], Answers]]:
    """Return a function that returns the answers to a question.

    All questions about a library have one process, because the import of some takes seconds.
    """
    processes = dict[str, Answerer]()

    @functools.cache
    def answers(name: str) -> Answers:
        library = questions()[name].library
        if library not in processes:
            processes[library] = Answerer("-m", "tests.agreement", library, env=os.environ | QUIET)
        reply = processes[library].ask(name)
        if type(reply) is not list:
            pytest.fail(f"{name}: {reply}")
        return [Answer(**answer) for answer in reply]

    yield answers
    for process in processes.values():
        process.close()


@linux
@pytest.mark.parametrize("question", question_cases(KNOWN_SIZES))
def test_commands_name_the_same_size(question: str, answers_to: Callable[[str], Answers]) -> None:
    answers = answers_to(question)
    largest = max(answer.size_bytes for answer in answers)
    least = (1 - WITHIN) * largest - SMALL_BYTES
    exact = [answer for answer in answers if not answer.is_at_least]
    if question in NEVER_FREED:
        exact = [answer for answer in exact if not answer.command.startswith("why: del")]
    assert {
        answer.command: answer.size_bytes for answer in exact if answer.size_bytes < least
    } == {}, answers
    assert (largest < MIB) is (question in UNSEEN), answers
    if question in UNSEEN:
        of_names = [answer for answer in answers if answer.command in ("top", "why x")]
        assert all(answer.is_at_least for answer in of_names), answers


@linux
@pytest.mark.parametrize("question", question_cases(KNOWN_HOLDERS))
def test_commands_name_the_same_holder(question: str, answers_to: Callable[[str], Answers]) -> None:
    expression = questions()[question].expression
    is_left = questions()[question].is_left
    commands = ("survivors", "leaks", f"why {expression}") if is_left else ("leaks",)
    holders = {
        answer.command: answer.holder
        for answer in answers_to(question)
        if answer.command in commands
    }
    holders = {command: holder for command, holder in holders.items() if holder}
    if not is_left:
        path = re.compile(rf"(notebook variable |hook on )?{expression}\b")
        assert all(map(path.match, holders.values())), holders
        return
    of_why = holders.pop(f"why {expression}", "")
    # ``why`` has a row for each place, and the rest one for all. They may say in which kind of
    # container an array is: ``outer["x"] (in an array of objects)``.
    holders = {
        command: holder.partition(", ")[0].partition(" (in ")[0]
        for command, holder in holders.items()
    }
    # A row may be about a container in which nothing else is.
    assert all(of_why.startswith(holder) for holder in holders.values()), (of_why, holders)
    assert len(set(holders.values())) <= 1, holders
