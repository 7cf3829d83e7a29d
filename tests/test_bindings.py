"""What a cell binds, statement by statement."""

from __future__ import annotations

import ast
import sys

import pytest

from ipygpumem.scopes.bindings import Bindings, bindings_of


def found(source: str) -> Bindings:
    return bindings_of(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1", "x"),
        ("x, (y, *z) = 1, (2, 3)", "x y z"),
        ("a.x = 1; b[0] = 2; c.d[e] += 1", ""),
        ("x += 1", "x"),
        ("x: int = 1", "x"),
        ("x: int", ""),
        ("(x): int", ""),
        ("for x, y in z: pass\nelse: w = 1", "w x y"),
        ("async def f():\n  async for x in y: pass", "f"),
        ("with a as x, b as (y, z): pass", "x y z"),
        ("def f(a, b=(x := 1)): c = 2", "f x"),
        ("@(d := deco)\ndef f(): pass", "d f"),
        ("async def f(a): b = 1", "f"),
        ("class C(B, metaclass=(m := type)): x = 1", "C m"),
        ("lambda a=(x := 1): (y := 2)", "x"),
        ("[a for b in c if (x := b)]", "x"),
        ("{(k := a): (v := b) for a, b in c}", "k v"),
        ("list((x := a) for a in b)", "x"),
        ("[[(x := a) for a in b] for b in c]", "x"),
        ("while (x := f()): y = 1", "x y"),
        ("try: x = 1\nexcept E as e: y = 2\nfinally: z = 3", "e x y z"),
        ("match a:\n  case {'k': x, **rest}: pass\n  case [y, *z]: pass\n  case C(w) as v: pass", "rest v w x y z"),
        ("if a: x = 1\nelse: y = 2", "x y"),
        ("f(x=1)", ""),
        ("print(x)", ""),
        ("del x", ""),
        ("_ = 1; _private = 2", "_ _private"),
    ],
)
def test_assigned_names(source: str, names: str) -> None:
    assert found(source).assigned == set(names.split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement is new in Python 3.12")
def test_a_type_alias_binds_its_name_only() -> None:
    assert found("type X[T] = list[T]").assigned == {"X"}


def test_an_exception_group_handler_binds_its_name() -> None:
    if sys.version_info >= (3, 11):
        assert found("try: pass\nexcept* E as e: pass").assigned == {"e"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a", "a"),
        ("import a.b.c", "a"),
        ("import a.b as c", "c"),
        ("from a import b, c as d", "b d"),
        ("from a import *", ""),
        ("def f(): import a", ""),
        ("try: import a\nexcept ImportError: a = None", "a"),
    ],
)
def test_imported_names(source: str, names: str) -> None:
    assert found(source).imported == set(names.split())


def test_global_at_the_top_level_makes_a_name_the_notebooks() -> None:
    bindings = found("if a:\n  global x, y\nx = 1; z = 2")
    assert bindings.shared == {"x", "y"}
    assert bindings.bound == {"z"}


def test_global_inside_a_function_says_nothing_about_the_cell() -> None:
    assert found("def f():\n  global x\n  x = 1").shared == set()


@pytest.mark.parametrize(
    ("source", "names"),
    [("del x", "x"), ("del x, (y, [z])", "x y z"), ("del a.x, b[0]", ""), ("if a: del x", "x"), ("def f(): del x", "")],
)
def test_names_that_are_deleted(source: str, names: str) -> None:
    assert found(source).deleted == set(names.split())


def test_the_blocks_of_a_compound_statement_can_be_left_out() -> None:
    (statement,) = ast.parse("for i in (n := a):\n    x = 1\nelse:\n    del y").body
    own = bindings_of(statement, blocks=False)
    assert (own.assigned, own.deleted) == ({"i", "n"}, set())
