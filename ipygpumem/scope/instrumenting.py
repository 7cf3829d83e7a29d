"""Instruments code so that it reports bindings and deletions of names as they happen.

A shadowed object must be saved just before its name is rebound: a saved object stays alive although
the cell may be about to delete it, and a called function may rebind the name first. So each
statement that binds or deletes a name gets look-ups without other effects, at the same position, so
that line numbers, tracebacks and the debugger show the original code.

A binding that is certain gets one look-up before it (``BINDS``). Any other gets one before
(``MAY_BIND``), and one after it (``HAS_BOUND``), which is reached only if the name was bound::

    x = f()             x = (f(), __ipygpumem_names__["binds x"])[0]

    def x(): ...        __ipygpumem_names__["may bind x"]
                        def x(): ...
                        __ipygpumem_names__["has bound x"]

After an import, the word is ``HAS_IMPORTED``, because modules may stay when a scope ends, and after
``del x``, it is ``HAS_DELETED``. A statement that may bind some names before it fails gets
``HAS_ENDED`` in a ``finally``: the objects of the names then show what it has bound.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ipygpumem.scope.bindings import bindings_of, parts_of

BINDING_RECORDER = "__ipygpumem_names__"
"""Name of the mapping in which code looks up events by texts such as ``"binds x"``; see
``Scope.record_event``.
"""
BINDS = "binds "
"""The code binds a name next, without anything that may fail before."""
MAY_BIND = "may bind "
"""The code binds a name later, or fails before."""
HAS_BOUND = "has bound "
"""The code has bound a name."""
HAS_IMPORTED = "has imported "
"""An import has bound a name."""
HAS_DELETED = "deletes "
"""The code has deleted a name."""
HAS_ENDED = "has ended "
"""Code that may have bound a name has ended; the name's current object shows whether it did."""
BINDING_WORDS = frozenset([BINDS, HAS_BOUND, HAS_IMPORTED, HAS_ENDED])
"""Events after which a name is, or may be, bound."""


def split_event(event: str) -> tuple[str, str]:
    """Return the word of an event, such as ``BINDS``, and the name that it is about."""
    word, name = event.rsplit(" ", 1)
    return f"{word} ", name


class BindingRecorder(dict[str, None]):
    """The mapping in which code looks up events, which records them.

    It contains the *settled* events: repetitions of these change nothing. Looking one up is an
    ordinary look-up in a dict, and only a missing event calls ``__missing__``, which makes loops
    faster.

    Args:
        record: records an event; returns True if it is settled.
    """

    def __init__(self, record: Callable[[str], bool]) -> None:
        super().__init__()
        self.record = record
        self._number_of_resets = 0

    def __missing__(self, event: str) -> None:
        """Record an event that is not settled, which code has looked up."""
        __tracebackhide__ = True  # a Ctrl-C may arrive here
        if event.startswith(HAS_IMPORTED):
            self.forget_settled()  # after another statement the name may no longer be an import
        number_of_resets = self._number_of_resets
        is_settled = self.record(event)
        # Another thread's cell may have begun during the call; then the event must be recorded
        # again.
        if is_settled and self._number_of_resets == number_of_resets:
            self[event] = None

    def forget_settled(self) -> None:
        """Record each event again from now on, because the scopes have changed or another cell
        begins.
        """
        self._number_of_resets += 1
        self.clear()

    def record_loop(self, names: list[str]) -> bool:
        """Record that a loop may bind ``names``; return True if it need not report its bindings,
        because their older objects are saved now, or there are none.

        Instrumented code calls it before a loop (``_in_two_forms``).
        """
        __tracebackhide__ = True
        events = [MAY_BIND + name for name in names]
        for event in events:
            self[event]  # records it, unless it is settled
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
    if not tree.body:  # only comments
        return
    last = tree.body[-1]
    # No recursion: each "elif" is a statement nested in the previous one.
    waiting = [_Block(tree, "body", set())]
    while waiting:
        block = waiting.pop()
        statements: list[ast.stmt] = getattr(block.owner, block.field)
        new_statements = _lookups(statements[0], HAS_BOUND, block.bound & names)
        for statement in statements:
            original_loop = _copy_of(statement) if _is_plain_loop(statement) else None
            waiting += _blocks(statement)
            with_lookups = _with_own_lookups(statement, names, shown=statement is last)
            if original_loop is not None:
                with_lookups = _in_two_forms(original_loop, with_lookups, names)
            new_statements += with_lookups
        setattr(block.owner, block.field, new_statements)


class _Block(NamedTuple):
    """A list of statements: the body of a module, a loop, a branch."""

    owner: Any
    """The node that has it."""
    field: str
    """The node's field, such as ``orelse``."""
    bound: set[str]
    """Names that are bound when it begins."""


def _with_own_lookups(statement: Any, names: frozenset[str], *, shown: bool) -> list[ast.stmt]:
    """Return ``statement`` with look-ups for the names that it binds itself, as one or several
    statements.

    Args:
        statement: the statement, which is changed; the statements in its blocks are not.
        names: the names whose bindings are reported.
        shown: True for the cell's last statement, whose value IPython may display.
    """
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return _imports(statement, names)
    if isinstance(statement, ast.Delete):
        return _deletions(statement, names)
    _report_walruses(statement, names)
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return _assignment(statement, names, shown=shown)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return _with_statement(statement, names)
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return _for_loop(statement, names)
    _report_handlers(statement, names)
    if isinstance(statement, ast.Match):
        _report_patterns(statement, names)
        return [statement]
    return _definition(statement, names)


def _report_walruses(statement: ast.stmt, names: frozenset[str]) -> None:
    """Report the names that expressions of the statement itself bind, as in ``(x := 1)``."""
    for node in list(parts_of(statement, blocks=False)):
        if isinstance(node, ast.NamedExpr) and node.target.id in names:
            node.value = _with_lookups_after(node.value, BINDS, {node.target.id})


def _report_handlers(statement: Any, names: frozenset[str]) -> None:
    """Report the names that each ``except`` may bind, before its type is compared."""
    for handler in getattr(statement, "handlers", ()):
        if handler.name in names:
            handler.type = _with_lookups_after(handler.type, MAY_BIND, {handler.name})


def _report_patterns(statement: ast.Match, names: frozenset[str]) -> None:
    """Report the names that a ``match`` may bind before it tests the patterns."""
    bound = set[str]()
    for case in statement.cases:
        bound_by_case = bindings_of(case.pattern).bound & names
        bound |= bound_by_case
        if case.guard is not None:
            case.guard = _with_lookups_before(case.guard, bound_by_case)
    statement.subject = _with_lookups_after(statement.subject, MAY_BIND, bound)


def _definition(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    """Return a function, a class, or ``type X = ...`` (Python 3.12) with its look-ups; any other
    statement as it is.
    """
    name = getattr(statement, "name", "")
    bound = {getattr(name, "id", name)} & names
    before = _lookups(statement, MAY_BIND, bound)
    return [*before, statement, *_lookups(statement, HAS_BOUND, bound)]


def _blocks(statement: ast.stmt) -> Iterator[_Block]:
    """Yield a compound statement's blocks in the same scope."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        if getattr(owner, "body", None):
            yield _Block(owner, "body", _bound_at_start(owner))
        for field in ("orelse", "finalbody"):
            if getattr(owner, field, None):
                yield _Block(owner, field, set())


def _bound_at_start(owner: Any) -> set[str]:
    """Return the names that are bound when the body of ``owner`` begins."""
    if isinstance(owner, ast.ExceptHandler):
        return {owner.name} if owner.name else set()
    if isinstance(owner, ast.match_case):
        return bindings_of(owner.pattern).bound
    if isinstance(owner, (ast.With, ast.AsyncWith)):
        return _bound_by([owner.items[-1].optional_vars])
    return _bound_by([getattr(owner, "target", None)])


def _bound_by(targets: Iterable[ast.expr | None]) -> set[str]:
    """Return the names that assigning to the targets binds."""
    bound = set[str]()
    for target in targets:
        if target is not None:
            bound |= bindings_of(target).bound
    return bound


def _assignment(statement: Any, names: frozenset[str], *, shown: bool) -> list[ast.stmt]:
    """Return an assignment with its look-ups."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    bound = _bound_by(targets) & names
    if not bound or statement.value is None:
        return [statement]
    # ``x += y`` may fail after ``y`` is evaluated, and then has not bound ``x``. The look-up after
    # it, which tells, would be the last statement of a cell: IPython would not display ``x``.
    operator_may_fail = isinstance(statement, ast.AugAssign) and not shown
    binds_only_names = all(isinstance(target, ast.Name) for target in targets)
    if binds_only_names and not operator_may_fail:
        statement.value = _with_lookups_after(statement.value, BINDS, bound)
        return [statement]
    certainly_bound = _certainly_bound(statement) & bound
    maybe_bound = bound - certainly_bound
    statement.value = _with_lookups_after(statement.value, BINDS, certainly_bound)
    statement.value = _with_lookups_after(statement.value, MAY_BIND, maybe_bound)
    _report_targets(targets, maybe_bound)
    lookups_after = _lookups(statement, HAS_BOUND, maybe_bound)
    if not _may_bind_in_part(targets):
        return [statement, *lookups_after]
    return _with_check_at_end(statement, maybe_bound, lookups_after)


def _certainly_bound(statement: Any) -> set[str]:
    """Return the names that an assignment binds before one of its targets can fail: in
    ``a = b, c = rows``, only ``a``, because ``rows`` may not have two items.
    """
    names = set[str]()
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if not isinstance(target, ast.Name):
                break
            names.add(target.id)
    return names


def _for_loop(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    """Return a ``for`` loop with its look-ups."""
    bound = bindings_of(statement.target).bound & names
    statement.iter = _with_lookups_after(statement.iter, MAY_BIND, bound)
    _report_targets([statement.target], bound)
    if not _may_bind_in_part([statement.target]):
        return [statement]
    return _with_check_at_end(statement, bound)


def _with_statement(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    """Return a ``with`` statement with its look-ups."""
    bound_by_item: set[str] = set()
    bound_in_part: set[str] = set()
    for item in statement.items:
        # The previous item's name is bound by now.
        item.context_expr = _with_lookups_before(item.context_expr, bound_by_item)
        bound_by_item = _bound_by([item.optional_vars]) & names
        item.context_expr = _with_lookups_after(item.context_expr, MAY_BIND, bound_by_item)
        _report_targets([item.optional_vars], bound_by_item)
        if bound_by_item and _may_bind_in_part([item.optional_vars]):
            bound_in_part |= bound_by_item
    return _with_check_at_end(statement, bound_in_part)


def _report_targets(targets: Iterable[ast.expr | None], names: set[str]) -> None:
    """Report the ``names`` that are bound by the time an attribute or an item is assigned, in the
    expression whose attribute it is.

    Assigning it may fail: ``a = fixed.x = 1`` has bound ``a`` then, even if to the object that it
    has already. Python evaluates ``fixed`` after it has bound ``a``, so that is the place.
    """
    bound = set[str]()
    waiting = list(targets)
    while waiting:
        target = waiting.pop(0)
        if isinstance(target, ast.Name):
            bound |= {target.id} & names
        elif isinstance(target, ast.Starred):
            waiting.insert(0, target.value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            waiting[:0] = target.elts
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            target.value = _with_lookups_before(target.value, bound)


def _may_bind_in_part(targets: list[Any]) -> bool:
    """Return True if assigning to ``targets`` may fail after some names were bound, as in
    ``a, b.attribute = 1, 2``.
    """
    parts = targets
    if len(targets) == 1 and isinstance(targets[0], (ast.Tuple, ast.List)):
        parts = targets[0].elts
    for part in parts:
        target = part.value if isinstance(part, ast.Starred) else part
        if not isinstance(target, ast.Name):
            return True
    return False


def _in_two_forms(
    loop: ast.stmt, with_lookups: list[ast.stmt], names: frozenset[str]
) -> list[ast.stmt]:
    """Return a statement that runs a loop as it was written if its bindings need no record, else in
    its form ``with_lookups``.

    Look-ups would take as long as ``total += x`` itself. In most loops the names that are bound
    again and again have been bound before, as by ``total = 0``. The statement is::

        if __ipygpumem_names__.record_loop(["total", "x"]):
            for x in rows: total += x
        else:
            for x in rows: ...  # with look-ups
    """
    bound = bindings_of(loop).bound & names
    if not bound:
        return with_lookups
    choice: Any = _statement_at(
        loop, f"if {BINDING_RECORDER}.record_loop({sorted(bound)}): pass\nelse: pass"
    )
    choice.body = [loop]
    choice.orelse = with_lookups
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
                part = _shallow_copy(value)
                waiting.append(part)
                setattr(node, name, part)
            elif isinstance(value, list):
                items = [_shallow_copy(item) for item in value]
                waiting += [item for item in items if isinstance(item, ast.AST)]
                setattr(node, name, items)
    return root


def _shallow_copy(node: Any) -> Any:
    """Return a new node with the same fields and the same position; any other object as it is."""
    if not isinstance(node, ast.AST):
        return node
    fields = dict[str, Any]()
    for name in (*node._fields, *node._attributes):
        if hasattr(node, name):
            fields[name] = getattr(node, name)
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
        return _is_list_or_range(statement.iter) and not any(map(_may_run_code, parts))
    return isinstance(statement, ast.While) and not _may_run_code(statement)


def _may_run_code(tree: ast.AST) -> bool:
    """Return True if a part of a loop may run other code or delete names."""
    for node in ast.walk(tree):
        if isinstance(node, _MAY_RUN_CODE):
            return True
        if isinstance(node, (ast.For, ast.comprehension)) and not _is_list_or_range(node.iter):
            return True
    return False


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


def _with_check_at_end(
    statement: ast.stmt, names: set[str], after: Iterable[ast.stmt] = ()
) -> list[ast.stmt]:
    """Return ``statement`` and the statements ``after`` it, then a look-up of ``names`` even if one
    of them fails: it may have bound some of the names by then.
    """
    if not names:
        return [statement, *after]
    block: Any = _statement_at(statement, "try: pass\nfinally: pass")
    block.body = [statement, *after]
    block.finalbody = _lookups(statement, HAS_ENDED, names)
    return [block]


def _imports(statement: Any, names: frozenset[str]) -> list[ast.stmt]:
    """Return an import split into one per module or name, because a later one may fail: ``import a,
    b`` becomes ``import a`` and ``import b``, each with its look-ups.
    """
    if getattr(statement, "module", "") == "__future__":
        return [statement]
    if not bindings_of(statement).bound & names:
        return [statement]
    statements: list[ast.stmt] = []
    for alias in statement.names:
        of_alias = _shallow_copy(statement)
        of_alias.names = [alias]
        bound = bindings_of(of_alias).bound & names
        statements += _lookups(of_alias, MAY_BIND, bound)
        statements.append(of_alias)
        statements += _lookups(of_alias, HAS_IMPORTED, bound)
    return statements


def _deletions(statement: ast.Delete, names: frozenset[str]) -> list[ast.stmt]:
    """Return a ``del`` statement split into one per target, each followed by its look-up."""
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
    """Return the statements that look up an event for each name, at the position of ``place``."""
    return [_statement_at(place, f"{BINDING_RECORDER}[{word + name!r}]") for name in sorted(names)]


def _with_lookups_after(value: ast.expr, word: str, names: set[str]) -> ast.expr:
    """Return an expression that evaluates ``value``, then looks up an event for each name, and has
    the result of ``value``: ``(value, look-up)[0]``.
    """
    if not names:
        return value
    return _tuple_item(value, [value, *_lookup_expressions(value, word, names)], index=0)


def _with_lookups_before(value: ast.expr, names: set[str]) -> ast.expr:
    """Return an expression that reports that names are bound, then evaluates ``value``, and has its
    result: ``(look-up, value)[-1]``.
    """
    if not names:
        return value
    return _tuple_item(value, [*_lookup_expressions(value, HAS_BOUND, names), value], index=-1)


def _lookup_expressions(place: ast.expr, word: str, names: set[str]) -> list[ast.expr]:
    """Return the expressions that look up an event for each name."""
    return [statement.value for statement in _lookups(place, word, names)]  # type: ignore[attr-defined]


def _tuple_item(place: ast.expr, items: list[ast.expr], index: int) -> ast.expr:
    """Return an expression that evaluates all ``items`` of a tuple and has the value of one of
    them: ``(value, look-up)[0]``.

    Args:
        place: the expression at whose position the tuple is.
        items: the items.
        index: the number of the item.
    """
    statement: Any = _statement_at(place, f"(None, None)[{index}]")
    item_of_tuple = statement.value
    item_of_tuple.value.elts = items  # instead of the two None
    return item_of_tuple  # type: ignore[no-any-return]  # of the parsed statement


def _statement_at(place: ast.stmt | ast.expr, code: str) -> ast.stmt:
    """Return the statement ``code``, at the position where ``place`` begins."""
    (statement,) = ast.parse(code).body
    decorators = getattr(place, "decorator_list", ())
    beginning = decorators[0] if decorators else place
    for node in ast.walk(statement):
        ast.copy_location(node, beginning)
    return statement
