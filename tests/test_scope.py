"""Scopes over a plain dictionary; tests/test_random_scopes.py holds them against a model."""

from __future__ import annotations

import ast
import builtins
import json
from typing import Any

import pytest

from ipygpumem.scopes.bindings import bindings_of
from ipygpumem.scopes.instrumenting import LISTENER, instrument
from ipygpumem.scopes.scope import Scope, note_lookup, settle


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


def test_keep_takes_globs_and_names_what_it_did_not_find() -> None:
    namespace: dict[str, Any] = {}
    scope = Scope(namespace, keep=["loss*", "model", "nothing"])
    run(scope, namespace, "loss_a = 1; loss_b = 2; model = 3; x = 4")
    outcome = scope.close(None)
    assert sorted(outcome.kept) == ["loss_a", "loss_b", "model"]
    assert scope.unmatched_keep() == ["nothing"]
