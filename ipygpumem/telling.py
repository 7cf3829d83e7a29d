"""Lets code tell of the names that it is about to bind or to delete.

What a scope shadows must be kept before it is bound, and no earlier: an object that waits to be restored stays alive,
although the cell may be about to delete it, and a function that the cell calls may change it first. So a look-up that
does nothing else goes into the cell's tree, before the statement that binds or deletes. It stands at that statement's
place, and line numbers, tracebacks and the debugger show the code as it was written.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.bindings import bindings_of

LISTENER = "__ipygpumem_names__"
"""What the code looks up in: ``LISTENER["x"]`` before it binds ``x``, ``LISTENER["del x"]`` before it deletes it."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def let_tell(tree: ast.Module, names: frozenset[str]) -> None:
    """Change ``tree`` so that its code tells of ``names``."""
    # No recursion: each "elif" is a statement inside the one before it.
    waiting: list[tuple[ast.AST, str, frozenset[str]]] = [(tree, "body", names)]
    while waiting:
        owner, field, told = waiting.pop()
        block: list[ast.stmt] = []
        for statement in getattr(owner, field):
            block += [*_lookups_before(statement, told), statement]
            waiting += [(part, name, _told_inside(statement, told)) for part, name in _blocks(statement)]
        setattr(owner, field, block)


def _lookups_before(statement: ast.stmt, names: frozenset[str]) -> list[ast.stmt]:
    """Return what is to be looked up before ``statement``; an assignment may get some into its value."""
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return []  # must stay the first of all
    own = bindings_of(statement, blocks=False)
    bound, deleted = own.bound & names, own.deleted & names
    if isinstance(statement, _LOOPS):
        bound |= bindings_of(statement).bound & names - _told_inside(statement, names)
    late = _bound_after_calls(statement) & bound
    if late:
        assignment: Any = statement
        assignment.value = _with_lookups(assignment.value, late)
    return [_at(statement, f"{LISTENER}[{key!r}]") for key in (*(bound - late), *(f"del {name}" for name in deleted))]


def _told_inside(statement: ast.stmt, names: frozenset[str]) -> frozenset[str]:
    """Return which of ``names`` are told where they are bound in the blocks of ``statement``.

    A loop tells once, before it begins, so that it takes no longer; but where it also deletes, after the deletion.
    """
    return names & bindings_of(statement).deleted if isinstance(statement, _LOOPS) else names


def _blocks(statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    """Yield the blocks of a compound statement that run in its own scope."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if getattr(owner, field, None):
                yield owner, field


def _bound_after_calls(statement: ast.stmt) -> set[str]:
    """Return the names that an assignment binds once it has called something, which may change or delete them."""
    if not isinstance(statement, _ASSIGNMENTS) or statement.value is None or sys.version_info < (3, 11):
        return set()  # up to 3.10 tracebacks find the failing part by the code's shape, which must not change
    if not any(isinstance(node, (ast.Call, ast.Await)) for node in ast.walk(statement.value)):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    bound = set().union(*(bindings_of(target).bound for target in targets))
    return bound - bindings_of(statement.value).bound


def _with_lookups(value: ast.expr, names: set[str]) -> ast.expr:
    """Return an expression that gives ``value``, and looks ``names`` up once it is known."""
    lookups = ", ".join(f"{LISTENER}[{name!r}]" for name in names)
    wrapped: Any = _at(value, f"(None, {lookups})[0]")
    wrapped.value.value.elts[0] = value
    return wrapped.value  # type: ignore[no-any-return]  # of the statement that was parsed


def _at(place: ast.stmt | ast.expr, code: str) -> ast.stmt:
    """Return the statement ``code``, as if it stood where ``place`` begins to run."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        ast.copy_location(node, next(iter(getattr(place, "decorator_list", ())), place))
    return statement
