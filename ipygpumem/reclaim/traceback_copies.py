"""Makes stand-ins for tracebacks, which show the same lines and keep nothing alive.

Clearing a frame's locals does not free everything that a traceback keeps alive: from Python 3.11
on, a frame refers to its function, and so to its closure, such as the model that a nested
``step()`` uses. Hence each entry is replaced by one with the same file, function and position,
whose frame belongs to a generator that never starts. Such a frame has no callers; any other would
keep the frames that made it alive, and with them the real traceback.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple

from ipygpumem.heap.knowledge.frames import steps


def copy_without_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that shows the same entries as ``traceback`` and refers to none of its
    frames.
    """
    # The code of each different entry: a recursion has a thousand equal ones.
    codes: dict[tuple[int, int, int], CodeType] = {}
    copy: TracebackType | None = None
    for entry in reversed(list(steps(traceback))):
        code = entry.tb_frame.f_code
        position = _position(entry)
        key = (id(code), entry.tb_lasti, position.line)
        if key not in codes:
            codes[key] = _code_that_fails_at(position, code)
        generator = FunctionType(codes[key], _names_for_debuggers(entry.tb_frame))()
        copy = TracebackType(copy, generator.gi_frame, _FAILING, position.line)
    return copy


def _names_for_debuggers(frame: FrameType) -> dict[str, Any]:
    """Return the module's name and file, by which debuggers tell whose code it is."""
    texts = dict[str, Any]()
    for name in ("__name__", "__file__"):
        value = frame.f_globals.get(name)
        if type(value) is str:
            texts[name] = value
    return texts


# -- the position that a stand-in shows ---------------------------------------------------------


class _Position(NamedTuple):
    """The position of an expression, as far as known."""

    line: int
    end_line: int | None = None
    column: int | None = None
    end_column: int | None = None


def _position(traceback: TracebackType) -> _Position:
    """Return the position of the expression that failed in a traceback's entry: with columns from
    Python 3.11 on, else only the line.
    """
    positions = getattr(traceback.tb_frame.f_code, "co_positions", None)  # Python 3.11
    if positions is not None and traceback.tb_lasti >= 0:
        instruction = traceback.tb_lasti // 2  # each takes two bytes
        for line, *columns in itertools.islice(positions(), instruction, instruction + 1):
            if line is not None and line == traceback.tb_lineno:
                return _Position(line, *columns)
    return _Position(max(traceback.tb_lineno or 1, 1))  # generated code may have no lines


# -- code that never starts ---------------------------------------------------------------------


def _never_starts() -> Iterator[None]:
    """Stand for a function of a traceback: the generator is never asked for an item."""
    yield


_NEVER_STARTS = _never_starts.__code__
_FAILING = len(_NEVER_STARTS.co_code)
"""Offset of the instruction that a stand-in shows as the failing one; it does nothing."""


def _code_that_fails_at(position: _Position, code: CodeType) -> CodeType:
    """Return code that does nothing, for a frame that never starts. A traceback shows it with the
    file and name of ``code``, at ``position``.
    """
    instructions = _NEVER_STARTS.co_code + bytes([dis.opmap["NOP"], 0])
    first_line = position.line
    fields_since_3_11: dict[str, Any] = {}
    if hasattr(code, "co_qualname"):  # Python 3.11
        first_line = code.co_firstlineno
        # Before Python 3.11, a frame that never starts is on its code's first line; since then a
        # table has the position of each instruction.
        later_instructions = len(instructions) // 2 - 1
        table = _table_entry(first_line, position)
        table += _table_entry(position.line, position) * later_instructions
        fields_since_3_11 = {
            "co_qualname": code.co_qualname,
            "co_exceptiontable": b"",
            "co_linetable": table,
        }
    return _NEVER_STARTS.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_firstlineno=first_line,
        co_code=instructions,
        **fields_since_3_11,
    )


_NO_COLUMNS, _LONG = 13, 14
"""Kinds of entries in CPython's location tables (its locations.md)."""


def _table_entry(line_before: int, position: _Position) -> bytes:
    """Return the bytes of CPython's location table for an instruction at ``position``.

    ``line_before`` is the line of the instruction before, from which lines are counted.
    """
    line, end_line, column, end_column = position
    step = _signed_number(line - line_before)
    if end_line is None or column is None or end_column is None:
        return bytes([0x80 | _NO_COLUMNS << 3, *step])
    entry = [0x80 | _LONG << 3, *step]
    for number in (end_line - line, column + 1, end_column + 1):
        entry += _six_bit_groups(number)
    return bytes(entry)


def _signed_number(value: int) -> list[int]:
    """Return the table's bytes for a number that may be negative: its lowest bit is the sign."""
    if value < 0:
        return _six_bit_groups(-value << 1 | 1)
    return _six_bit_groups(value << 1)


def _six_bit_groups(value: int) -> list[int]:
    """Return the table's bytes for a number from 0 on: six bits in each, the lowest first; 0x40
    marks a byte that another one follows.
    """
    if value < 64:
        return [value]
    return [0x40 | value & 63, *_six_bit_groups(value >> 6)]
