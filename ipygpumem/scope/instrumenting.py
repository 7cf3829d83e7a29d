"""Instruments code so that it reports bindings and deletions of names as they happen.

A shadowed object must be saved just before its name is rebound: a saved object stays alive although
the cell may be about to delete it, and a called function may rebind the name first. So each
statement that binds or deletes a name gets look-ups without other effects, at the same position, so
that line numbers, tracebacks and the debugger show the original code.

A binding that is certain gets one look-up before it (``BINDS``). Any other gets one before
(``MAY_BIND``), and one after it (``HAS_BOUND``), which is reached only if the name was bound.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ipygpumem.scope.bindings import bindings_of, parts_of

BINDING_RECORDER = "__ipygpumem_names__"
"""Name of the mapping in which code looks up events by texts such as ``"binds x"``; see
``scope.note_event``.
"""
BINDS, MAY_BIND, HAS_BOUND, HAS_IMPORTED, HAS_DELETED = (
    "binds ",
    "may bind ",
    "has bound ",
    "has imported ",
    "deletes ",
)
HAS_ENDED = "has ended "
"""Code that may have bound a name has ended; the name's current object shows whether it did."""
BINDING_WORDS = frozenset([BINDS, HAS_BOUND, HAS_IMPORTED, HAS_ENDED])
"""Events after which a name is, or may be, bound."""


def split_event(event: str) -> tuple[str, str]:
    """Return an event's word, such as ``BINDS``, and its name."""
    word, name = event.rsplit(" ", 1)
    return f"{word} ", name


class BindingRecorder(dict[str, None]):
    """The mapping in which code looks up events; it contains those whose repetitions need no
    record.

    Args:
        note: records an event; returns True if its repetitions need no record.
    """

    def __init__(self, note: Callable[[str], bool]) -> None:
        super().__init__()
        self.note = note
        self._times_forgotten = 0

    def __missing__(self, key: str) -> None:
        __tracebackhide__ = True  # a Ctrl-C may strike here
        if key.startswith(HAS_IMPORTED):
            self.forget()  # after another statement the name may no longer be an import
        times_forgotten = self._times_forgotten
        needs_no_repetition = self.note(key)
        # Another thread's cell may have begun during the call; then the key must be looked up
        # again.
        if needs_no_repetition and self._times_forgotten == times_forgotten:
            self[key] = None

    def forget(self) -> None:
        """Record each event again from now on, because the scopes have changed or another cell
        begins.
        """
        self._times_forgotten += 1
        self.clear()

    def needs_no(self, names: list[str]) -> bool:
        """Return True if bindings of ``names`` need no record now: their older objects are saved,
        or there are none.
        """
        __tracebackhide__ = True
        events = [MAY_BIND + name for name in names]
        for event in events:
            self[event]
        return all(map(self.__contains__, events))


_MAY_RUN_CODE = (
    ast.Call,
    ast.Await,
    ast.With,
    ast.AsyncWith,
    ast.AsyncFor,
    ast.Delete,
    ast.Import,
    ast.ImportFrom,
)
"""Nodes that may run other code, which may rebind or delete names, or open a scope."""


def instrument(tree: ast.Module, names: frozenset[str]) -> None:
    """Change ``tree`` so that its code reports bindings and deletions of ``names``."""
    last = tree.body[-1] if tree.body else None
    # No recursion: each "elif" is a statement nested in the previous one.
    waiting: list[tuple[Any, str, set[str]]] = [(tree, "body", set())]
    while waiting:
        owner, field, bound = waiting.pop()
        old: list[ast.stmt] = getattr(owner, field)
        block = _lookups(old[0], HAS_BOUND, bound & names)
        for statement in old:
            loop = _copy_of(statement) if _is_plain_loop(statement) else None
            waiting += _blocks(statement)
            instrumented = _instrumented(statement, names, shown=statement is last)
            block += instrumented if loop is None else _in_two_forms(loop, instrumented, names)
        setattr(owner, field, block)


def _instrumented(statement: Any, names: frozenset[str], *, shown: bool) -> list[ast.stmt]:
    """Return ``statement`` with look-ups for ``names``; ``shown``: the last one, whose value
    IPython may display.
    """
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return _imports(statement, names)
    if isinstance(statement, ast.Delete):
        return _deletions(statement, names)
    for node in list(parts_of(statement, blocks=False)):
        if isinstance(node, ast.NamedExpr) and node.target.id in names:
            node.value = _followed(node.value, BINDS, {node.target.id})
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return _assignment(statement, names, shown=shown)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return _with(statement, names)
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        bound = bindings_of(statement.target).bound & names
        statement.iter = _followed(statement.iter, MAY_BIND, bound)
        return _checked(statement, bound if _may_bind_in_part([statement.target]) else set())
    _branches(statement, names)
    name = getattr(statement, "name", "")  # of a function, a class, or "type X = ..." (Python 3.12)
    bound = {getattr(name, "id", name)} & set(names)
    return [
        *_lookups(statement, MAY_BIND, bound),
        statement,
        *_lookups(statement, HAS_BOUND, bound),
    ]


def _branches(statement: Any, names: frozenset[str]) -> None:
    """Report the names that a ``match`` or an ``except`` may bind before it tests the patterns."""
    for handler in getattr(statement, "handlers", ()):
        if handler.name in names:
            handler.type = _followed(handler.type, MAY_BIND, {handler.name})
    if isinstance(statement, ast.Match):
        bound = set[str]()
        for case in statement.cases:
            own = bindings_of(case.pattern).bound & names
            bound |= own
            if case.guard is not None:
                case.guard = _preceded(case.guard, HAS_BOUND, own)
        statement.subject = _followed(statement.subject, MAY_BIND, bound)


def _blocks(statement: ast.stmt) -> Iterator[tuple[Any, str, set[str]]]:
    """Yield a compound statement's blocks in the same scope, each with the names bound at its
    start.
    """
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if getattr(owner, field, None):
                yield owner, field, _bound_at_start(owner) if field == "body" else set()


def _bound_at_start(owner: Any) -> set[str]:
    """Return the names that are bound when the body of ``owner`` begins."""
    if isinstance(owner, ast.ExceptHandler):
        return {owner.name} if owner.name else set()
    if isinstance(owner, ast.match_case):
        return bindings_of(owner.pattern).bound
    target = (
        owner.items[-1].optional_vars if hasattr(owner, "items") else getattr(owner, "target", None)
    )
    return set() if target is None else bindings_of(target).bound


def _assignment(statement: Any, names: frozenset[str], *, shown: bool) -> list[ast.stmt]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    bound = set[str]().union(*(bindings_of(target).bound for target in targets)) & names
    if not bound or statement.value is None:
        return [statement]
    in_place = isinstance(statement, ast.AugAssign) and not shown  # the operator may fail
    if all(isinstance(target, ast.Name) for target in targets) and not in_place:
        statement.value = _followed(statement.value, BINDS, bound)
        return [statement]
    statement.value = _followed(statement.value, MAY_BIND, bound)
    after = _lookups(statement, HAS_BOUND, bound)
    return _checked(statement, bound if _may_bind_in_part(targets) else set(), after)


def _with(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    entered: set[str] = set()
    targets = []
    for item in statement.items:
        item.context_expr = _preceded(item.context_expr, HAS_BOUND, entered)
        target = item.optional_vars
        entered = bindings_of(target).bound & names if target is not None else set()
        item.context_expr = _followed(item.context_expr, MAY_BIND, entered)
        targets += [target] if entered else []
    in_part = [target for target in targets if _may_bind_in_part([target])]
    return _checked(
        statement, set[str]().union(*(bindings_of(target).bound for target in in_part)) & names
    )


def _may_bind_in_part(targets: list[Any]) -> bool:
    """Return True if assigning to ``targets`` may fail after some names were bound."""
    (first, *rest) = targets
    parts = first.elts if isinstance(first, (ast.Tuple, ast.List)) and not rest else targets
    plain = [part.value if isinstance(part, ast.Starred) else part for part in parts]
    return not all(isinstance(part, ast.Name) for part in plain)


def _in_two_forms(
    loop: ast.stmt, instrumented: list[ast.stmt], names: frozenset[str]
) -> list[ast.stmt]:
    """Return a loop that runs as it was written where its bindings need no record, else in its
    instrumented form.

    Look-ups would take as long as ``total += x`` itself. In most loops the names that are bound
    again and again have been bound before, as by ``total = 0``.
    """
    bound = bindings_of(loop).bound & names
    if not bound:
        return instrumented
    choice: Any = _at(loop, f"if {BINDING_RECORDER}.needs_no({sorted(bound)}): pass\nelse: pass")
    choice.body, choice.orelse = [loop], instrumented
    return [choice]


def _copy_of(tree: ast.AST) -> Any:
    """Return a copy of a tree; without recursion, because ``a + b + c + ...`` may nest deeper than
    Python allows.
    """
    root = _shallow_copy(tree)
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                copied: Any = _shallow_copy(value)
                waiting.append(copied)
            elif isinstance(value, list):
                copied = [
                    _shallow_copy(item) if isinstance(item, ast.AST) else item for item in value
                ]
                waiting += [item for item in copied if isinstance(item, ast.AST)]
            else:
                continue
            setattr(node, name, copied)
    return root


def _shallow_copy(node: ast.AST) -> ast.AST:
    """Return a new node with the same fields and the same position."""
    fields = {
        name: getattr(node, name)
        for name in (*node._fields, *node._attributes)
        if hasattr(node, name)
    }
    return type(node)(**fields)


def _is_plain_loop(statement: ast.stmt) -> bool:
    """Return True for a loop that runs no other code and deletes no names, so that nothing but its
    bindings matters.

    Operators and attributes of the user's own classes are not counted as other code: every loop has
    some.
    """
    if isinstance(statement, ast.For):
        # The items are made before the first turn, where calls do no harm.
        parts: list[ast.AST] = [statement.target, *statement.body, *statement.orelse]
        if not _is_list_or_range(statement.iter):
            return False
    elif isinstance(statement, ast.While):
        parts = [statement]
    else:
        return False
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, _MAY_RUN_CODE):
                return False
            if isinstance(node, (ast.For, ast.comprehension)) and not _is_list_or_range(node.iter):
                return False
    return True


def _is_list_or_range(items: ast.expr) -> bool:
    """Return True for the items of a loop that run no code; a generator may do anything between two
    items.
    """
    if isinstance(items, (ast.List, ast.Tuple, ast.Constant)):
        return True
    return (
        isinstance(items, ast.Call)
        and isinstance(items.func, ast.Name)
        and items.func.id == "range"
    )


def _checked(
    statement: ast.stmt, names: set[str], after: Iterable[ast.stmt] = ()
) -> list[ast.stmt]:
    """Return ``statement`` and the statements ``after`` it, with a check of
    ``names`` if it fails.
    """
    if not names:
        return [statement, *after]
    block: Any = _at(statement, "try: pass\nfinally: pass")
    block.body, block.finalbody = [statement, *after], _lookups(statement, HAS_ENDED, names)
    return [block]


def _imports(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    """Return ``statement`` split into one per module or name, because a later one may fail."""
    if not bindings_of(statement).bound & names or getattr(statement, "module", "") == "__future__":
        return [statement]
    statements: list[ast.stmt] = []
    for alias in statement.names:
        (*rest,) = ast.iter_fields(statement)
        one = ast.copy_location(type(statement)(**{**dict(rest), "names": [alias]}), statement)
        bound = bindings_of(one).bound & names
        statements += [*_lookups(one, MAY_BIND, bound), one, *_lookups(one, HAS_IMPORTED, bound)]
    return statements


def _deletions(statement: ast.Delete, names: frozenset[str]) -> list[ast.stmt]:
    """Return ``statement`` split into one per target, each followed by its look-up."""
    if not bindings_of(statement).deleted & names:
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


def _lookups(place: ast.stmt | ast.expr, word: str, names: Iterable[str]) -> list[ast.stmt]:
    return [_at(place, f"{BINDING_RECORDER}[{word + name!r}]") for name in sorted(names)]


def _followed(value: ast.expr, word: str, names: set[str]) -> ast.expr:
    """Return an expression that evaluates to ``value``, then looks ``names`` up."""
    return _element(value, [value, *_keys(value, word, names)], 0) if names else value


def _preceded(value: ast.expr, word: str, names: set[str]) -> ast.expr:
    """Return an expression that looks ``names`` up, then evaluates to ``value``."""
    return _element(value, [*_keys(value, word, names), value], -1) if names else value


def _keys(place: ast.expr, word: str, names: set[str]) -> list[ast.expr]:
    return [statement.value for statement in _lookups(place, word, names)]  # type: ignore[attr-defined]


def _element(value: ast.expr, parts: list[ast.expr], index: int) -> ast.expr:
    wrapped: Any = _at(value, f"(None, None)[{index}]")
    wrapped.value.value.elts = parts
    return wrapped.value  # type: ignore[no-any-return]  # of the parsed statement


def _at(place: ast.stmt | ast.expr, code: str) -> ast.stmt:
    """Return the statement ``code``, at the position where ``place`` begins."""
    (statement,) = ast.parse(code).body
    for node in ast.walk(statement):
        ast.copy_location(node, next(iter(getattr(place, "decorator_list", ())), place))
    return statement
