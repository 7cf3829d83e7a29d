"""Makes ``%%experiment``, ``%%memlines`` and ``%%autofit`` feel like no wrappers at all.

A cell magic gets its body as text and must run it itself, at the cost of wrong line numbers, no ``Out`` and no
top-level ``await``. So a cell that begins with ``%%experiment`` is rewritten before IPython parses it: its first
line becomes a call that opens the scope, and the scope closes when the cell ends. ``%%memlines`` begins and ends in
the same way. The first line of ``%%autofit`` becomes a call as well; the loop around the body is made in the syntax
tree (see loops.py).
"""

from __future__ import annotations

import re

from IPython.core.inputtransformer2 import cell_magic

_FIRST_LINE = re.compile(r"%%(experiment|memlines|autofit)(?:[ \t]+(.*?))?[ \t]*\r?\n?", re.DOTALL)


def rewrite_cell(lines: list[str]) -> list[str]:
    """Return ``lines`` with a first line such as ``%%experiment ARGS`` turned into a line magic; else unchanged.

    A body that is itself a cell magic keeps working: it is turned into its call here, since IPython only looks
    for a cell magic in the first line of a cell.
    """
    match = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if match is None or (match[2] or "").endswith("?"):
        return lines
    call = f"get_ipython().run_line_magic({match[1]!r}, {'cell ' + (match[2] or '')!r})\n"
    return [call, *cell_magic(rewrite_cell(lines[1:]))]
