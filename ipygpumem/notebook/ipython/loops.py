"""The loop that ``%%autofit`` puts around the body of its cell.

The cell must feel like a plain one, so its code is not run by us: its syntax tree gets a loop around the body, and
IPython runs that as it runs any cell, with its outputs, ``await`` and tracebacks.
"""

from __future__ import annotations

import ast
from typing import Any

from ipygpumem.notebook.ipython.rewriting import our_magic

FITS_NAME = "__ipygpumem_fits__"
"""The built-in in which the loop finds the fit of its cell, as long as the cell runs."""
_FIT = f"{FITS_NAME}.fit"
_LOOP = f"while {_FIT}.again():\n    with {_FIT}:\n        pass\n"


class LoopOfCell:
    """What the loop around a cell's body asks, if there is one."""

    fit: Any = None


def loop_over_body(tree: Any, interactivity: str) -> None:
    """Put a loop around the body of a cell that begins with ``%%autofit``; leave every other tree as it is.

    Args:
        tree: a cell's; changed in place.
        interactivity: IPython's ``ast_node_interactivity``, which says what a cell displays.
    """
    if type(tree) is not ast.Module or not (start := _start_of_body(tree)):
        return
    body = tree.body[start:]
    while body and type(body[0]) is ast.ImportFrom and body[0].module == "__future__":
        body.pop(0)  # stays where it is, before the loop
    if not body or getattr(body[0], "ipygpumem_loop", False) or not _compiles(body):
        return
    loop: Any = _at(_LOOP, body[0])
    loop.ipygpumem_loop = True
    after: list[ast.stmt] = []
    last: Any = body[-1]
    if interactivity in ("last_expr", "last_expr_or_assign", "last", "all") and type(last) is ast.Expr:
        keep: Any = _at(f"{_FIT}.keep(None)", last)
        keep.value.args[0] = last.value
        body[-1] = keep
        after = [_at(f"{_FIT}.take()", last)]
    elif interactivity == "last_expr_or_assign" and type(last) is ast.Assign and type(last.targets[0]) is ast.Name:
        after = [_at(last.targets[0].id, last)]
    loop.body[0].body = body
    tree.body[len(tree.body) - len(body) :] = [loop, *after]


def _start_of_body(tree: ast.Module) -> int:
    """Return where the body begins of a cell whose first lines are ours, with %%autofit among them; else 0."""
    names = []
    for statement in tree.body:
        name = our_magic(statement)
        if name is None:
            break
        names.append(name)
    return names.index("autofit") + 1 if "autofit" in names else 0


def _compiles(body: list[ast.stmt]) -> bool:
    """Whether the body is a cell by itself: inside a loop ``break`` would be allowed, too."""
    try:
        compile(ast.Module(body, []), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):  # IPython says it better
        return False
    return True


def _at(code: str, place: ast.stmt) -> ast.stmt:
    """Return the statement ``code``, as if it stood at ``place``."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        ast.copy_location(node, place)
    return statement
