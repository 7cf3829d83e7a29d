"""Finds the cell of some code, by its file name or by a name that it binds."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import threading
from collections.abc import Container, Iterator, Mapping
from traceback import walk_stack
from types import MappingProxyType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from ipygpumem.scope.bindings import bindings_of
from ipygpumem.shell.ipython.rewriting import REWRITTEN, is_first_line

_NUMBERED = re.compile(r"<ipython-input-(\d+)-")
_RUN_CODE = ("time", "capture", "prun", *REWRITTEN)
"""Magics whose code binds names of the notebook; the code of %timeit runs in a function."""
_ASSIGNMENTS = ast.Assign, ast.AugAssign, ast.AnnAssign


def cell_of_file(shell: Any, filename: str) -> int | None:
    """Return the number of the cell whose code was compiled under ``filename``; None for a module's
    file.
    """
    known = getattr(shell.compile, "_filename_map", None)  # private; from IPython 8 on
    if type(known) is dict and filename in known:
        return int(known[filename])
    numbered = _NUMBERED.match(filename)
    if numbered:
        return int(numbered[1])
    if "ipykernel_" not in filename:
        return None
    # IPython 7 in a kernel: the file is named by a hash, and its text is the cell's.
    text = "".join(linecache.getlines(filename)).strip()
    return next(
        (number for number, source in _cells(shell) if text and source.strip() == text), None
    )


def running_cell(shell: Any) -> int:
    """Return the number of the running cell's input; ``execution_count`` may be the next one's
    already.
    """
    return len(shell.history_manager.input_hist_parsed) - 1


def number_of_input(shell: Any, raw: str) -> int | None:
    """Return the number of the last cell with this source; subshells may run several at once."""
    inputs, wanted = shell.history_manager.input_hist_raw, raw.rstrip("\n")
    return next(
        (number for number in range(len(inputs) - 1, 0, -1) if inputs[number] == wanted), None
    )


def cell_that_bound(
    shell: Any,
    name: str,
    without: Container[int | None] = (),
    failed_at: Mapping[int | None, int] = MappingProxyType({}),
) -> int | None:
    """Return the last cell whose own code binds ``name``, ignoring the cells in ``without``.

    ``failed_at`` has the lines at which cells have failed: the statements from there on have bound
    nothing.
    """
    for number, source in _cells(shell):
        if (
            name in source
            and number not in without
            and name in _bound(source, failed_at.get(number))
        ):
            return number
    return None


def _cells(shell: Any) -> list[tuple[int, str]]:
    """Return the numbers and Python sources of the cells run so far, last one first."""
    sources = shell.history_manager.input_hist_parsed
    return [(number, sources[number]) for number in range(len(sources) - 1, 0, -1)]


def _bound(source: str, end: int | None = None) -> set[str]:
    try:
        tree = ast.parse(source)
        if end is not None:  # loops and other blocks may have bound names before they failed
            ended = [
                node
                for node in tree.body
                if not isinstance(node, _ASSIGNMENTS) or (node.end_lineno or end) < end
            ]
            tree.body = [node for node in ended if node.lineno <= end]
        found = bindings_of(tree)
        inside = [TransformerManager().transform_cell(code) for code in _code_in_magics(tree)]
    except (SyntaxError, ValueError, RecursionError):  # a cell that never compiled
        return set()
    return (found.bound | found.shared).union(*map(_bound, inside))


def _code_in_magics(tree: ast.AST) -> Iterator[str]:
    """Yield the code inside calls such as ``run_cell_magic("time", "", code)``, which IPython makes
    of magics.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            if (
                node.func.attr in ("run_cell_magic", "run_line_magic")
                and len(words) == len(node.args) > 1
                and words[0] in _RUN_CODE
                and type(words[-1]) is str
                and not is_first_line(words[-1])
            ):
                yield words[-1]


def is_in_cell() -> bool:
    """Return True if IPython runs a cell in this thread, and no silent request, for which it calls
    no hooks.
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
    return kind is not None and any(type(thread) is kind for thread in threading.enumerate())
