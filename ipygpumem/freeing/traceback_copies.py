"""Copies tracebacks: the copies show the same lines as the real ones, and hold nothing.

Clearing a frame's locals does not free all that a traceback pins: from Python 3.11 on a frame keeps its function too,
and that its closure, so the model that a nested ``step()`` uses would stay. Hence the traceback is replaced: each
entry by one with the same file, function and position, whose frame is that of a generator which never starts. Such a
frame has no callers; every other would keep those that made it, with the real traceback in their hands.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from types import CodeType, FunctionType, TracebackType
from typing import Any

from ipygpumem.objects.holders.frames import steps

_Position = tuple[int, int | None, int | None, int | None]
"""Line, end line, column and end column of an expression, as far as they are known."""


def _never_starts() -> Iterator[None]:
    yield


_NEVER_STARTS = _never_starts.__code__
_FAILING = len(_NEVER_STARTS.co_code)
"""Where the instruction is that a stand-in shows as the one that failed; it does nothing."""


def copy_without_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that shows what ``traceback`` shows and refers to none of its frames."""
    codes: dict[tuple[int, int, int], CodeType] = {}  # a recursion has a thousand entries that are alike
    made: TracebackType | None = None
    for entry in reversed(list(steps(traceback))):
        frame, position = entry.tb_frame, _position(entry)
        key = (id(frame.f_code), entry.tb_lasti, position[0])
        if key not in codes:
            codes[key] = _like(frame.f_code, position)
        # The module's name and file are those by which debuggers tell whose code it is.
        names = {name: frame.f_globals.get(name) for name in ("__name__", "__file__")}
        texts = {name: value for name, value in names.items() if type(value) is str}
        generator = FunctionType(codes[key], texts)()
        made = TracebackType(made, generator.gi_frame, _FAILING, position[0])
    return made


def _position(traceback: TracebackType) -> _Position:
    """Return the position of the expression that failed."""
    positions = getattr(traceback.tb_frame.f_code, "co_positions", None)  # Python 3.11
    if positions is not None and traceback.tb_lasti >= 0:
        line, *rest = next(itertools.islice(positions(), traceback.tb_lasti // 2, None), (None, None, None, None))
        if line is not None and line == traceback.tb_lineno:
            return (line, *rest)
    return max(traceback.tb_lineno or 1, 1), None, None, None  # generated code may have no lines


def _like(code: CodeType, position: _Position) -> CodeType:
    """Return code that bears the name of ``code``, stands at ``position``, and does nothing."""
    instructions = _NEVER_STARTS.co_code + bytes([dis.opmap["NOP"], 0])
    first = position[0]
    newer: dict[str, Any] = {}
    if hasattr(code, "co_qualname"):  # Python 3.11; before, a frame that never starts stands on its first line
        first = code.co_firstlineno
        table = _location(first, *position) + _location(position[0], *position) * (len(instructions) // 2 - 1)
        newer = {"co_qualname": code.co_qualname, "co_exceptiontable": b"", "co_linetable": table}
    return _NEVER_STARTS.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=first, co_code=instructions, **newer
    )


def _location(before: int, line: int, end_line: int | None, column: int | None, end_column: int | None) -> bytes:
    """Return what a table of locations (CPython's locations.md) has for an instruction after one on line ``before``."""
    step = (line - before) << 1 if line >= before else (before - line) << 1 | 1
    if end_line is None or column is None or end_column is None:
        return bytes([0x80 | 13 << 3, *_number(step)])
    span = (step, end_line - line, column + 1, end_column + 1)
    return bytes([0x80 | 14 << 3, *(byte for value in span for byte in _number(value))])


def _number(value: int) -> list[int]:
    """Return ``value`` in groups of six bits, the lowest first."""
    return [value] if value < 64 else [0x40 | value & 63, *_number(value >> 6)]
