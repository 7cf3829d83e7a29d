"""Scopes over a plain dictionary, held against Python's own functions by random programs."""

from __future__ import annotations

import ast
import builtins
import gc
import json
import textwrap
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipygpumem.scopes.bindings import bindings_of
from ipygpumem.scopes.instrumenting import LISTENER, instrument
from ipygpumem.scopes.scope import Scope, note_lookup, settle


class Thing:
    """An object that weak references can watch."""


class Listener(dict[str, None]):
    """What instrumented code looks names up in, as in a notebook."""

    def __init__(self, scopes: list[Scope]) -> None:
        super().__init__()
        self.scopes = scopes

    def __missing__(self, key: str) -> None:
        note_lookup(self.scopes, key)


def run(
    scope: Scope, namespace: dict[str, Any], source: str, outer: tuple[Scope, ...] = (), *, tells: bool = True
) -> None:
    """Run ``source`` as a cell of ``scope`` (and of the scopes around it), as the session does."""
    tree, scopes = ast.parse(source), [*outer, scope]
    bindings = bindings_of(tree)
    for each in scopes:
        each.share(bindings.shared)
    scope.note(bindings)
    if tells:
        instrument(tree, frozenset((bindings.bound | bindings.deleted) - bindings.shared))
        namespace["__builtins__"] = {**vars(builtins), LISTENER: Listener(scopes)}
    else:
        scope.save(bindings.bound)
    try:
        exec(compile(tree, "cell", "exec"), namespace)
    except ZeroDivisionError:
        assert "1 / 0" in source
    finally:
        settle(scopes)


def visible(namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if name not in ("__builtins__", "__annotations__")}


def after(source: str, **names: Any) -> dict[str, Any]:
    """Return the names that are visible after ``source`` ran as one scope over ``names``."""
    namespace: dict[str, Any] = {"__builtins__": builtins, **names}
    scope = Scope(namespace)
    run(scope, namespace, source)
    scope.close(None)
    return visible(namespace)


@pytest.mark.parametrize(
    ("source", "names", "left"),
    [
        ("x = x + 1\nassert x == 2", {"x": 1}, {"x": 1}),
        ("exec('y = 1'); globals()['z'] = 2; from string import *", {"x": 1}, {"x": 1}),
        ("import json", {"json": "mine"}, {"json": "mine"}),
        ("try: import json\nexcept ImportError: json = [0]", {}, {"json": json}),
        ("try: import none_such\nexcept ImportError: none_such = [0]", {}, {}),
        ("1 / 0\ndel x\nx = 2", {"x": 1}, {"x": 1}),
        ("x = 2; del x", {"x": 1}, {"x": 1}),
    ],
)
def test_what_no_function_does_in_this_way(source: str, names: dict[str, Any], left: dict[str, Any]) -> None:
    assert after(source, **names) == left


def test_a_conditional_that_binds_nothing_saves_nothing() -> None:
    namespace: dict[str, Any] = {"x": 1}
    scope = Scope(namespace)
    run(scope, namespace, "if False: x = 2")
    assert scope.waiting == {}


def test_deleting_an_old_name_lets_the_object_die_at_once() -> None:
    namespace: dict[str, Any] = {"x": Thing(), "y": Thing()}
    references = [weakref.ref(namespace[name]) for name in "xy"]
    scope = Scope(namespace)
    run(scope, namespace, "del x\ndel y\nassert True\ny = 1")
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    scope.close(None)
    assert visible(namespace) == {}


def test_the_last_old_names_that_went_and_came_back_in_order_are_the_scopes() -> None:
    # Seen: "x = 1", then "with experiment(...): del x; x = 2" in one cell left x = 2 behind.
    namespace: dict[str, Any] = {"__builtins__": {}, "x": 1, "y": 1}
    scope = Scope(namespace)
    run(scope, namespace, "del x, y\nx = 2\ny = 2")
    assert scope.close(None).deleted == ["x", "y"]
    assert visible(namespace) == {}


def test_what_an_inner_scope_keeps_is_the_outer_ones_which_restores_what_was_there() -> None:
    namespace: dict[str, Any] = {"x": 0}
    outer = Scope(namespace)
    inner = Scope(namespace, keep=["x", "new"])
    run(inner, namespace, "x = 1; new = 2; gone = 3", (outer,))
    assert inner.close(outer).kept == ["x", "new"]
    assert (namespace["x"], namespace["new"], "gone" in namespace) == (1, 2, False)
    outcome = outer.close(None)
    assert (outcome.restored, outcome.deleted) == (["x"], ["new"])
    assert namespace["x"] == 0


def test_what_an_inner_scope_keeps_does_not_take_a_shared_name_from_the_notebook() -> None:
    namespace: dict[str, Any] = {"x": 0}
    outer = Scope(namespace)
    run(outer, namespace, "global x\nx = 1")
    inner = Scope(namespace, keep=["x"])
    run(inner, namespace, "x = 2", (outer,))
    inner.close(outer)
    outer.close(None)
    assert namespace["x"] == 2


def test_code_that_was_not_seen_may_have_bound_any_name() -> None:
    namespace: dict[str, Any] = {"x": 1, "y": 2}
    scope = Scope(namespace)
    scope.save_all()
    namespace.update(x=5, z=6)
    settle([scope])
    assert set(scope.waiting) == {"x"}
    scope.close(None)
    assert namespace == {"x": 1, "y": 2}


def test_an_interrupted_close_goes_on_where_it_stopped() -> None:
    class Interrupting(dict[str, Any]):
        pops = 0

        def pop(self, *arguments: Any) -> Any:
            self.pops += 1
            if self.pops == 2:
                raise KeyboardInterrupt
            return super().pop(*arguments)

    namespace = Interrupting(x=0)
    scope = Scope(namespace)
    scope.save(["x", "a", "b", "c"])
    namespace.update(x=1, a=2, b=2, c=2)
    settle([scope])
    try:
        scope.close(None)
    except KeyboardInterrupt:
        assert set(namespace) - {"x"}
    outcome = scope.close(None)
    assert dict(namespace) == {"x": 0}
    assert set(outcome.deleted) == {"a", "b", "c"}
    assert outcome.restored == ["x"]


def test_ipythons_front_ends_and_compilers_names_are_never_a_scopes() -> None:
    own = dict.fromkeys(["In", "Out", "_", "__", "_i", "_i7", "_7", "_oh", "exit", "_exit_code", "_VSCODE_x"], 1)
    namespace: dict[str, Any] = {}
    scope = Scope(namespace)
    compilers = {"__compiled_fn_1": 2, "stream_139876_c0/1": 3}
    scope.note(bindings_of(ast.parse("__mine = 1")))
    namespace.update(own | compilers, _mine=1, __mine=1)
    scope.close(None)
    assert namespace == own | compilers


def test_keep_takes_globs_and_names_what_it_did_not_find() -> None:
    namespace: dict[str, Any] = {}
    scope = Scope(namespace, keep=["loss*", "model", "nothing"])
    run(scope, namespace, "loss_a = 1; loss_b = 2; model = 3; x = 4")
    outcome = scope.close(None)
    assert sorted(outcome.kept) == ["loss_a", "loss_b", "model"]
    assert scope.unmatched_keep() == ["nothing"]


# -- random programs ------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
TEMPLATES = [
    "{x} = {n}",
    "{x}, {y} = {n}, {n}",
    "{x}: int = {n}",
    "{x}: int",
    "for {x} in range({n} % 3): {y} = {n}",
    "for {x} in []: {y} = {n}",
    "if {n} % 2: {x} = {n}",
    "while False: {x} = 1",
    "with context({n}) as {x}: {y} = 2",
    "try:\n    {x} = [][{n}]\nexcept IndexError as {y}:\n    {z} = {n}",
    "try:\n    {x} = {n}\nfinally:\n    {y} = {n}",
    "def {x}({y}={n}): {z} = 1",
    "class {x}:\n    {y} = {n}",
    "({x} := {n})",
    "[{x} for {x} in range(3)]",
    "[({y} := {x}) for {x} in range({n} % 3)]",
    "(lambda {x}=({y} := {n}): {x})()",
    "match [{n}, 2]:\n    case [{x}, 3]: pass\n    case [{y}, *{z}] if False: pass\n    case {{}}: pass",
    "{x} = {n}\ndel {x}",
    "{x} = {n}\n{x} += 1",
    "import string as {x}\n{x} = {n}",
    "box.append({n})",
]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Return the cells of a program, and the names that it declares global first."""
    shared = draw(st.lists(NAMES, unique=True, max_size=2))
    cells = []
    for _ in range(draw(st.integers(1, 4))):
        statements = []
        for _ in range(draw(st.integers(1, 4))):
            template = draw(st.sampled_from(TEMPLATES))
            # Patterns may bind a name once, and a parameter must not be global.
            x, y, z = draw(st.permutations(["a", "b", "c", "d", "e"]))[:3]
            statements.append(template.format(x=x, y=y, z=z, n=draw(st.integers(0, 9))))
        cells.append("\n".join(statements))
    return cells, shared


class Context:
    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *details: object) -> None:
        return None


def namespace_with(names: dict[str, int]) -> dict[str, Any]:
    return {"__builtins__": builtins, "context": Context, "box": [], **names}


def comparable(namespace: dict[str, Any]) -> dict[str, Any]:
    return {n: v.__name__ if isinstance(v, type) or callable(v) else v for n, v in visible(namespace).items()}


def is_valid(source: str) -> bool:
    try:
        compile(source, "function", "exec")
    except SyntaxError:  # such as an annotation of a global name
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(programs(), st.dictionaries(NAMES, st.integers(100, 199)), st.booleans())
def test_after_a_scope_the_same_names_are_visible_as_after_a_function(
    program: tuple[list[str], list[str]], names: dict[str, int], tells: bool
) -> None:
    cells, shared = program
    first = [f"global {', '.join(shared)}"] if shared else []
    body = "\n".join([*first, *cells])
    function = "def scope():\n" + textwrap.indent(body, "    ") + "\nscope()\ndel scope"
    if not is_valid(function) or not all(is_valid(cell) for cell in [body, *cells]):
        return
    expected = namespace_with(names)
    exec(function, expected)

    seen = namespace_with(names)
    scope = Scope(seen)
    for cell in ["\n".join([*first, cells[0]]), *cells[1:]]:
        run(scope, seen, cell, tells=tells)
    scope.close(None)
    assert comparable(seen) == comparable(expected)
    assert scope.waiting == {}


@settings(max_examples=200, deadline=None)
@given(programs(), programs(), st.dictionaries(NAMES, st.integers(100, 199)))
def test_nested_scopes_end_as_nested_functions_do(
    outer_program: tuple[list[str], list[str]], inner_program: tuple[list[str], list[str]], names: dict[str, int]
) -> None:
    outer_body, inner_body = "\n".join(outer_program[0]), "\n".join(inner_program[0])
    inner_function = "def inner():\n" + textwrap.indent(inner_body, "    ") + "\ninner()\ndel inner\n"
    # The inner function's names are its own and never the enclosing one's, as for scopes.
    function = "def outer():\n" + textwrap.indent(outer_body + "\n" + inner_function, "    ") + "\nouter()\ndel outer"
    if not all(is_valid(source) for source in (function, outer_body, inner_body)):
        return
    expected = namespace_with(names)
    exec(function, expected)

    seen = namespace_with(names)
    outer = Scope(seen)
    run(outer, seen, outer_body)
    at_inner_start = comparable(seen)
    inner = Scope(seen)
    run(inner, seen, inner_body, (outer,))
    inner.close(outer)
    assert comparable(seen) == at_inner_start
    outer.close(None)
    assert comparable(seen) == comparable(expected)
