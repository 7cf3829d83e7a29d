"""Errors, texts and results that come back from a forked child: they are as they would be here, and no more comes."""

from __future__ import annotations

import os
import random
import sys
import traceback
import warnings

import pytest

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.child import Front, UnfitError, run
from ipygpumem.estimating.packing import packed, unpacked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class ChosenError(ValueError):
    """An error of the user's with more arguments than its base."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


class StrangeError(Exception):
    """An error of the user's whose text needs what cannot be carried."""

    def __str__(self) -> str:
        return f"strange {self.args[0].__name__}"


def no_probe() -> None:
    """Find the child fit."""


def apart(work: object, **options: float) -> object:
    return run(work, no_probe, timeout_seconds=options.get("timeout", 30), front=Front())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        SyntaxError("wrong", ("file", 1, 2, "text")),
        ImportError("none", name="it"),
        KeyError("a key"),
        StopIteration(3),
        SystemExit(3),
        ChosenError("chosen", 3),
        EstimateError("one line"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_carried_with_its_class_text_and_attributes(error: BaseException) -> None:
    found = unpacked(packed(error) or {})
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    assert getattr(found, "filename", None) == getattr(error, "filename", None)
    assert getattr(found, "name", None) == getattr(error, "name", None)


def test_an_error_that_cannot_be_made_again_keeps_its_name_and_text() -> None:
    found = unpacked(packed(StrangeError(int)) or {})
    assert (type(found).__name__, str(found), isinstance(found, Exception)) == ("StrangeError", "strange int", True)


def fail() -> None:
    try:
        {}["key"]
    except KeyError as error:
        raise ChosenError("chosen", 3) from error


def test_an_error_of_a_child_is_raised_here_with_its_lines_and_cause() -> None:
    with pytest.raises(ChosenError, match="chosen") as caught:
        apart(fail)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "fail", 'raise ChosenError("chosen", 3) from error')
    assert type(caught.value.__cause__) is KeyError


def test_a_result_comes_back_and_nothing_else() -> None:
    seen: list[int] = []

    def work() -> object:
        seen.append(1)
        return {"numbers": (1, 2.5), "text": "x"}

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of forks in a process with threads
        assert apart(work) == {"numbers": (1, 2.5), "text": "x"}
    assert seen == []


def test_what_a_child_prints_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("out")
        print("err", file=sys.stderr)

    apart(work)
    assert capsys.readouterr() == ("out\n", "err\n")


def test_random_numbers_in_a_child_are_the_next() -> None:
    random.seed(5)
    assert apart(random.random) == random.random()


def test_a_child_is_unfit_if_the_probe_says_so() -> None:
    def refuse() -> None:
        raise RuntimeError("not here\nat all")

    with pytest.raises(UnfitError, match=r"^not here$"):
        run(fail, refuse, timeout_seconds=30, front=Front())


def test_a_child_that_does_not_end_is_stopped_and_its_line_named() -> None:
    def wait() -> None:
        while True:
            pass

    with pytest.raises(EstimateError, match=r"stopped after 3 s in test_packing.py, line \d+: (while True:|pass)"):
        apart(wait, timeout=3)


def test_no_child_is_left() -> None:
    apart(lambda: None)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
