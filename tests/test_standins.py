"""Stand-ins for tracebacks, at the edges: code that has no lines."""

from __future__ import annotations

import traceback
from types import FunctionType, TracebackType

import pytest

from ipygpumem.standins import stand_in_for


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
    made = stand_in_for(traceback_of(without_lines))
    assert made is not None
    assert (made.tb_frame.f_code.co_name, made.tb_lineno) == ("fail", 1)
    assert traceback.format_tb(made)


def test_an_entry_that_was_made_by_hand_gets_a_stand_in() -> None:
    assert isinstance(fail, FunctionType)
    real = traceback_of(fail)
    made = stand_in_for(TracebackType(None, real.tb_frame, -1, 7))
    assert made is not None
    assert (made.tb_frame.f_code.co_name, made.tb_lineno) == ("fail", 7)
