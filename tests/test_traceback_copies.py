"""Stand-ins for tracebacks: what they show, what they need, and code that has no lines."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, TracebackType

import pytest

from ipygpumem.freeing.tracebacks import copy_without_frames


def fail() -> None:
    raise ValueError


def traceback_of(function: FunctionType) -> TracebackType:
    with pytest.raises(ValueError) as caught:  # it has no message
        function()
    found = caught.tb.tb_next
    assert found is not None
    return found


def test_generated_code_without_lines_gets_a_stand_in() -> None:
    assert isinstance(fail, FunctionType)
    without_lines = FunctionType(fail.__code__.replace(co_linetable=b""), {"ValueError": ValueError})
    made = copy_without_frames(traceback_of(without_lines))
    assert made is not None
    assert (made.tb_frame.f_code.co_name, made.tb_lineno) == ("fail", 1)
    assert traceback.format_tb(made)


SOURCE = """
def inner(x, *, y=1, **more):
    z = [1, 2]

    def deep(a):
        return x[a] + (lambda: z[a +   1 * 5] + len('äöü'))()
    return [deep(i) for i in range(1)]

def gen():
    yield 1
    for i in range(3):
        w = inner(
            [1], y="ä", much=__________________________________________________________________________________________
        ) ; w = 3

class A:
    list(gen())
"""


def entries(made: TracebackType | None) -> Iterator[TracebackType]:
    while made is not None:
        yield made
        made = made.tb_next


def test_a_stand_in_shows_what_the_real_one_shows_and_refers_to_no_frame_of_it(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(SOURCE)
    with pytest.raises(IndexError) as caught:
        exec(compile(SOURCE, str(file), "exec"), {"__name__": "failing", "_" * 90: 0})
    real, made = caught.tb.tb_next, copy_without_frames(caught.tb.tb_next)
    assert traceback.format_tb(made) == traceback.format_tb(real)
    for entry, shown in zip(entries(made), entries(real), strict=True):
        frame, real_frame = entry.tb_frame, shown.tb_frame
        assert frame.f_lineno == entry.tb_lineno == shown.tb_lineno  # some show the one, some the other
        assert frame.f_globals.keys() <= {"__name__"}
        assert (frame.f_back, dict(frame.f_locals)) == (None, {})
        if sys.version_info >= (3, 11):
            assert frame.f_code.co_qualname == real_frame.f_code.co_qualname
            assert frame.f_code.co_firstlineno == real_frame.f_code.co_firstlineno
