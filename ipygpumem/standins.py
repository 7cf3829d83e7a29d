"""Tracebacks that show the same lines as the real ones and hold nothing.

Clearing a frame's locals does not free all that a traceback pins: from Python 3.11 on a frame keeps its function too,
and that its closure, so the model that a nested ``step()`` uses would stay. Hence the traceback is replaced: each
entry by one with the same file, function and position, made by letting a tiny function fail there. Template engines
show their users' lines in tracebacks in this way. It happens in a thread of its own, since a frame also keeps its
callers, which here would be our own frames with the real traceback in their hands.
"""

from __future__ import annotations

import ast
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any


@dataclass(frozen=True)
class _Entry:
    """What one entry of a traceback shows."""

    filename: str
    function: str
    qualified: str
    line: int
    end_line: int | None
    column: int | None
    end_column: int | None
    texts: dict[str, Any]
    """The module's ``__name__`` and ``__file__``, by which debuggers tell whose code it is."""


class _StandInError(Exception):
    """Raised in a stand-in to get its traceback; nobody sees it."""


def stand_in_for(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that shows what ``traceback`` shows and refers to none of its frames."""
    entries = []
    while traceback is not None:
        entries.append(_describe(traceback))
        traceback = traceback.tb_next
    if not entries:
        return None
    with ThreadPoolExecutor(1, thread_name_prefix="ipygpumem-standins") as thread:
        return thread.submit(_build, entries).result()


def _describe(traceback: TracebackType) -> _Entry:
    frame = traceback.tb_frame
    code = frame.f_code
    names = {name: frame.f_globals.get(name) for name in ("__name__", "__file__")}
    return _Entry(
        code.co_filename,
        code.co_name,
        getattr(code, "co_qualname", code.co_name),
        *_position(traceback),
        texts={name: value for name, value in names.items() if type(value) is str},
    )


def _position(traceback: TracebackType) -> tuple[int, int | None, int | None, int | None]:
    """Return line, end line, column and end column of the expression that failed, as far as they are known."""
    positions = getattr(traceback.tb_frame.f_code, "co_positions", None)  # Python 3.11
    if positions is not None and traceback.tb_lasti >= 0:
        line, *rest = next(itertools.islice(positions(), traceback.tb_lasti // 2, None), (None, None, None, None))
        if line is not None and line == traceback.tb_lineno:
            return (line, *rest)
    return traceback.tb_lineno or 1, None, None, None  # generated code may have no lines


def _build(entries: list[_Entry]) -> TracebackType:
    made = [_fail(entry) for entry in entries]
    for entry, following in itertools.pairwise(made):
        entry.tb_next = following
    return made[0]


def _fail(entry: _Entry) -> TracebackType:
    function = FunctionType(_code(entry), {**entry.texts, "error": _StandInError()})
    try:
        function()
    except _StandInError as error:
        made = error.__traceback__
    if made is None or made.tb_next is None:
        raise AssertionError("a function that fails has a traceback of two entries")
    return made.tb_next


def _code(entry: _Entry) -> CodeType:
    """Return the code of a function that fails at the entry's position and bears its name."""
    tree = ast.parse("def stand_in():\n    raise error")
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno, node.end_lineno = entry.line, entry.end_line or entry.line
            node.col_offset, node.end_col_offset = entry.column or 0, entry.end_column
    module = compile(tree, entry.filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    code = code.replace(co_name=entry.function)
    return code.replace(co_qualname=entry.qualified) if hasattr(code, "co_qualname") else code
