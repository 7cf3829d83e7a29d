"""Reads the source of cells: which cell has bound a name, which ones have only our commands."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Container, Iterator, Mapping
from traceback import walk_stack
from types import MappingProxyType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from ipygpumem.introspect import code_lines
from ipygpumem.notebook import sources_of_cells
from ipygpumem.scope.bindings import bindings_of
from ipygpumem.shell.ipython.rewriting import (
    LINE_MAGICS,
    NEED_A_CELL,
    REWRITTEN,
    first_lines,
    is_first_line,
    runs_no_code,
)

_OUR_COMMAND = re.compile(
    r"(?!.*[{$])"  # ``{name}`` and ``$name`` run code of the user
    rf"(?:%(?:{LINE_MAGICS})(?:\s|\?|$)|%(?:re|un)?load_ext ipygpumem\b"
    rf"|%(?:{NEED_A_CELL})(?:\s|$)|%gpumemit$"  # which say how to write it
    r"|%config IPyGpuMem(?:\.\w+ *= *(?:\w+|[\d.]+|'[^']*'|\"[^\"]*\"))? *$"
    r"|%%?(?:gpumem\w*|experiment)\?"
    # without a sign, as IPython allows it; ``gpumem in names`` is Python
    rf"|(?:{LINE_MAGICS}) +(?!(?:and|if|in|is|not|or)\b)[a-z])"
)
"""Matches a line with one of our commands that runs no code of the user."""
MAY_RUN_NO_CODE = re.compile(rf"[%#]|{LINE_MAGICS}|\A\s*\Z")
"""Matches somewhere in each cell with one of our commands, and in each without code."""
_RUN_CODE = ("time", "capture", "prun", *REWRITTEN)
"""Magics whose code binds names of the notebook; the code of %timeit runs in a function."""
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def has_only_our_commands(source: str) -> bool:
    """Return True if a cell runs no code of the user.

    Each line is then a line magic of ipygpumem, a comment or blank; or the cell is a cell magic of
    ipygpumem that has no body or asks for help.
    """
    if runs_no_code(source):
        return True
    if first_lines(source)[0]:
        return False
    # A backslash at the end of a comment continues nothing: ``# path C:\``.
    code = [line for line in code_lines(source) if not line.lstrip().startswith("#")]
    lines = code_lines("\n".join(code).replace("\\\n", " "))
    lines = [line.strip() for line in lines if line.strip()]
    return bool(lines) and all(map(_OUR_COMMAND.match, lines))


def has_only_comments(source: str) -> bool:
    """Return True if each line of a cell is blank or a comment."""
    lines = [line.lstrip() for line in code_lines(source)]
    return all(line.startswith("#") for line in lines if line)


def number_of_input(shell: Any, raw: str) -> int | None:
    """Return the number of the last cell with this source; subshells may run several at once."""
    inputs = shell.history_manager.input_hist_raw
    source = raw.rstrip("\n")
    for number in range(len(inputs) - 1, 0, -1):
        if inputs[number] == source:
            return number
    return None


def cell_that_bound(
    shell: Any,
    name: str,
    without: Container[int | None] = (),
    failed_at: Mapping[int | None, int] = MappingProxyType({}),
) -> int | None:
    """Return the number of the last cell whose own code binds ``name``; None if there is none.

    Args:
        shell: IPython's shell.
        name: the name.
        without: numbers of cells to ignore.
        failed_at: the lines at which cells have failed, by number: the statements from there on
            have bound nothing.
    """
    for number, source in sources_of_cells(shell):
        if name not in source or number in without:
            continue
        if name in _names_bound_by(source, failed_at.get(number)):
            return number
    return None


def running_cell_deletes(shell: Any, name: str) -> bool:
    """Return True if the code of the running cell has a ``del`` statement for ``name``."""
    sources = sources_of_cells(shell)
    if not sources:
        return False
    _, source = sources[0]  # the last one is first
    if "del" not in source or name not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a cell that never compiled
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del) and node.id == name:
            return True
    return False


def _names_bound_by(source: str, failed_line: int | None = None) -> set[str]:
    """Return the names that a cell's Python code binds in the notebook; none if it is no Python.

    Args:
        source: the code, in which magics are calls already.
        failed_line: the line in which the cell failed; None if it did not.
    """
    try:
        tree = ast.parse(source)
        if failed_line is not None:
            tree.body = [node for node in tree.body if _has_begun_to_bind(node, failed_line)]
        bindings = bindings_of(tree)
        codes = [TransformerManager().transform_cell(code) for code in _code_in_magics(tree)]
    except (SyntaxError, ValueError, RecursionError):  # a cell that never compiled
        return set()
    names = bindings.bound | bindings.shared
    return names.union(*map(_names_bound_by, codes))


def bound_names(shell: Any, cell: str) -> set[str]:
    """Return the names that a cell, as the user has written it, binds in the notebook."""
    return _names_bound_by(shell.transform_cell(cell))


def _has_begun_to_bind(statement: ast.stmt, failed_line: int) -> bool:
    """Return True if a statement may have bound names before line ``failed_line`` failed: an
    assignment binds at its end, a loop or another block before that.
    """
    if isinstance(statement, _ASSIGNMENTS) and (statement.end_lineno or failed_line) >= failed_line:
        return False
    return statement.lineno <= failed_line


def _code_in_magics(tree: ast.AST) -> Iterator[str]:
    """Yield the code inside calls such as ``run_cell_magic("time", "", code)``, which IPython makes
    of magics.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in ("run_cell_magic", "run_line_magic") or len(node.args) < 2:
            continue
        words = [word.value for word in node.args if isinstance(word, ast.Constant)]
        if len(words) < len(node.args) or words[0] not in _RUN_CODE:
            continue
        code = words[-1]
        if type(code) is str and not is_first_line(code):
            yield code


def is_in_cell() -> bool:
    """Return True if IPython runs a cell in this thread. A silent request of a front-end, for which
    IPython calls no hooks, is none.
    """
    for frame, _ in walk_stack(None):
        if frame.f_code.co_name == "run_cell_async" and not frame.f_locals.get("silent"):
            return True
    return False


def has_subshells() -> bool:
    """Return True if the kernel has subshells, which run cells in threads of their own; from
    ipykernel 7 on.
    """
    kind: Any = getattr(sys.modules.get("ipykernel.subshell"), "SubshellThread", None)
    if kind is None:
        return False
    return any(type(thread) is kind for thread in threading.enumerate())
