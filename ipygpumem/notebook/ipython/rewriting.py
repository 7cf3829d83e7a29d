"""Makes ``%%experiment``, ``%%memlines`` and ``%%autofit`` feel like no wrappers at all.

A cell magic gets its body as text and must run it itself, at the cost of wrong line numbers, no ``Out`` and no
top-level ``await``. So a cell that begins with ``%%experiment`` is rewritten before IPython parses it: its first
line becomes a call that opens the scope, and the scope closes when the cell ends. ``%%memlines`` begins and ends in
the same way. The first line of ``%%autofit`` becomes a call as well; the loop around the body is made in the syntax
tree (see loops.py).
"""

from __future__ import annotations

import ast
import re
from typing import Any

from IPython.core.inputtransformer2 import cell_magic

from ipygpumem.notebook.registry import REWRITTEN

_FIRST_LINE = re.compile(rf"%%({'|'.join(REWRITTEN)})(?:[ \t]+(.*?))?[ \t]*\r?\n?", re.DOTALL)
_ON = re.compile(r"(?:^|\s)--on(?:[\s=]|$)")
"""Its cell is for the engines of a cluster: it stays a text."""
_MARK = "%%"
"""Begins the argument of such a call: a line that somebody writes has no reason to begin so."""


def rewrite_cell(lines: list[str]) -> list[str]:
    """Return ``lines`` with a first line such as ``%%experiment ARGS`` turned into a call; else unchanged.

    A body that is itself a cell magic keeps working: it is turned into its call here, since IPython only looks
    for a cell magic in the first line of a cell.
    """
    match = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if match is None or (match[2] or "").endswith("?") or is_for_engines(match[2] or ""):
        return lines
    call = f"get_ipython().run_line_magic({match[1]!r}, {_MARK + ' ' + (match[2] or '')!r})\n"
    return [call, *cell_magic(rewrite_cell(lines[1:]))]


def our_magic(statement: ast.stmt) -> str | None:
    """Return which of our cell magics a statement is the first line of."""
    call: Any = getattr(statement, "value", None)
    if type(call) is not ast.Call or getattr(call.func, "attr", "") != "run_line_magic" or len(call.args) != 2:
        return None
    name, line = (getattr(argument, "value", None) for argument in call.args)
    return name if name in REWRITTEN and type(line) is str and is_first_line(line) else None


def is_for_engines(line: str) -> bool:
    """Whether the words of a magic name engines that are to do it."""
    return _ON.search(line) is not None


def is_first_line(line: str) -> bool:
    """Whether a line magic was called with ``line`` by a cell's first line."""
    return line.partition(" ")[0] == _MARK


def words_of(line: str) -> str:
    """Return what the user wrote in such a first line."""
    return line.partition(" ")[2]


def first_lines(source: str) -> tuple[list[str], str]:
    """Return the names of our magics at the top of a cell, and its source without their lines."""
    lines, names = source.lstrip().splitlines(keepends=True), []
    while lines and (match := _FIRST_LINE.fullmatch(lines[0])):
        names.append(match[1])
        lines.pop(0)
    return names, "".join(lines)
