"""Puts look-ups into code: they report what it does to names, at the moment when it does it.

What a scope shadows must be kept before it is bound, and no earlier: an object that waits to be restored stays alive,
although the cell may be about to delete it, and a function that the cell calls may change it first. So look-ups that
do nothing else go into the cell's tree, beside what binds or deletes. They stand at its place, and line numbers,
tracebacks and the debugger show the code as it was written.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ipygpumem.scopes.bindings import bindings_of, parts_of

LISTENER = "__ipygpumem_names__"
"""What the code looks words up in, such as ``LISTENER["binds x"]``; ``scope.note_lookup`` takes them."""
BINDS, MAY_BIND, HAS_BOUND, HAS_DELETED = "binds ", "may bind ", "has bound ", "has deleted "

_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)
_LETS_OTHERS_IN = (ast.Call, ast.Await, ast.With, ast.AsyncWith, ast.AsyncFor, ast.Delete, ast.Import, ast.ImportFrom)
"""What may run other code, which may change or delete names, or open a scope."""
_KEEPS_SHAPE = sys.version_info >= (3, 11)
"""Whether tracebacks find the part that failed by its position: earlier ones do by the shape of the code."""


def instrument(tree: ast.Module, names: frozenset[str]) -> None:
    """Change ``tree`` so that its code reports what it does to ``names``."""
    last = tree.body[-1] if tree.body else None
    # No recursion: each "elif" is a statement inside the one before it.
    waiting: list[tuple[Any, str, frozenset[str], set[str]]] = [(tree, "body", names, set())]
    while waiting:
        owner, field, watched, bound = waiting.pop()
        old: list[ast.stmt] = getattr(owner, field)
        block = _lookups(old[0], HAS_BOUND, bound)
        for statement in old:
            inside = frozenset[str]() if _is_plain_loop(statement) else watched
            waiting += [(*place, inside, _bound_by(place[0], statement) & inside) for place in _blocks(statement)]
            block += _instrumented(statement, watched, shown=statement is last)
        setattr(owner, field, block)


def _instrumented(statement: ast.stmt, names: frozenset[str], *, shown: bool) -> list[ast.stmt]:
    """Return ``statement`` with look-ups that report on ``names``; ``shown``: IPython may display its value."""
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return [statement]  # must stay the first of all
    own = bindings_of(statement, blocks=_is_plain_loop(statement))
    bound = own.bound & names
    if isinstance(statement, ast.Delete):
        return _deletions(statement, own.deleted & names)
    if not bound:
        return [statement]
    sure, perhaps = (
        _instrument_values(statement, names) if _KEEPS_SHAPE and not _is_plain_loop(statement) else (set(), set())
    )
    # Blocks report once they are reached; and what comes last may be displayed.
    ends = not any(_blocks(statement)) and not isinstance(statement, ast.Expr)
    after = bound.difference(sure) if ends and not (shown and isinstance(statement, _ASSIGNMENTS)) else set()
    before = bound.difference(sure, perhaps)
    return [*_lookups(statement, MAY_BIND, before), statement, *_lookups(statement, HAS_BOUND, after)]


def _is_plain_loop(statement: ast.stmt) -> bool:
    """Whether a loop runs no other code: it reports once, before it begins, so that it takes no longer."""
    if isinstance(statement, ast.For):
        items: Any = statement.iter
        is_known = isinstance(items, (ast.List, ast.Tuple, ast.Constant))
        if not is_known and not (isinstance(items, ast.Call) and getattr(items.func, "id", "") == "range"):
            return False  # a generator may do anything between two items
        parts: list[ast.AST] = [*statement.body, *statement.orelse]
    elif isinstance(statement, ast.While):
        parts = [statement]
    else:
        return False
    return not any(isinstance(node, _LETS_OTHERS_IN) for part in parts for node in ast.walk(part))


def _blocks(statement: ast.stmt) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a compound statement that run in its own scope."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if getattr(owner, field, None):
                yield owner, field


def _bound_by(owner: Any, statement: ast.stmt) -> set[str]:
    """Return the names that are surely bound when the first block of ``owner`` begins."""
    if isinstance(owner, ast.ExceptHandler):
        return {owner.name} if owner.name else set()
    if isinstance(owner, ast.match_case):
        return bindings_of(owner.pattern).bound
    # Not those of a loop, which would take longer.
    targets = [item.optional_vars for item in getattr(statement, "items", ())]
    return set().union(*(bindings_of(target).bound for target in targets if target is not None))


def _instrument_values(statement: ast.stmt, names: frozenset[str]) -> tuple[set[str], set[str]]:
    """Put look-ups into values: they report what is about to be bound, once the value is known.

    Returns:
        The names that are bound next for sure, and those that perhaps are.
    """
    sure: set[str] = set()
    if not _KEEPS_SHAPE:
        return sure, set()
    for node in list(parts_of(statement, blocks=False)):
        if isinstance(node, ast.NamedExpr) and node.target.id in names:
            node.value = _with_lookups(node.value, BINDS, {node.target.id})
            sure.add(node.target.id)
    if not isinstance(statement, _ASSIGNMENTS) or statement.value is None:
        return sure, set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    bound = set().union(*(bindings_of(target).bound for target in targets)) & names - sure
    if not bound:
        return sure, set()
    # Unpacking may fail, or the object of which an attribute is set.
    is_sure = all(isinstance(target, ast.Name) for target in targets)
    statement.value = _with_lookups(statement.value, BINDS if is_sure else MAY_BIND, bound)
    return (sure | bound, set()) if is_sure else (sure, bound)


def _deletions(statement: ast.Delete, names: set[str]) -> list[ast.stmt]:
    """Return ``statement`` as one for each of its targets, each followed by its look-up."""
    if not names:
        return [statement]
    statements: list[ast.stmt] = []
    waiting = statement.targets[::-1]
    while waiting:
        target = waiting.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            waiting += target.elts[::-1]
            continue
        statements.append(ast.copy_location(ast.Delete([target]), statement))
        if isinstance(target, ast.Name):
            statements += _lookups(statement, HAS_DELETED, {target.id} & names)
    return statements


def _lookups(place: ast.stmt, word: str, names: Iterable[str]) -> list[ast.stmt]:
    return [_at(place, f"{LISTENER}[{word + name!r}]") for name in sorted(names)]


def _with_lookups(value: ast.expr, word: str, names: Iterable[str]) -> ast.expr:
    """Return an expression that gives ``value``, and looks ``names`` up once it is known."""
    lookups = ", ".join(f"{LISTENER}[{word + name!r}]" for name in sorted(names))
    wrapped: Any = _at(value, f"(None, {lookups})[0]")
    wrapped.value.value.elts[0] = value
    return wrapped.value  # type: ignore[no-any-return]  # of the statement that was parsed


def _at(place: ast.stmt | ast.expr, code: str) -> ast.stmt:
    """Return the statement ``code``, as if it stood where ``place`` begins to run."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        ast.copy_location(node, next(iter(getattr(place, "decorator_list", ())), place))
    return statement
