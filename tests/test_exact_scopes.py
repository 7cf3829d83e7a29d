"""Scopes held against Python itself: the same code, with a mapping that sees each binding; then in
a real kernel.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.reclaim.name_snapshot import NameSnapshot
from ipygpumem.scope.bindings import bindings_of
from ipygpumem.scope.instrumenting import (
    BINDING_RECORDER,
    BINDS,
    MAY_BIND,
    BindingRecorder,
    instrument,
)
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.scope.scope import Scope, forget_needless_saves
from tests.steps import run_quietly, tidied_kernel

HELPERS = """
class Failure(Exception): pass
class Target: pass
class Refuses:
    def __setattr__(self, name, value): raise Failure
class Manager:
    def __init__(self, value, fails=''): self.value, self.fails = value, fails
    def __enter__(self):
        if self.fails == 'enter': raise Failure
        return self.value
    def __exit__(self, *error):
        if self.fails == 'exit': raise Failure
def fail(*arguments): raise Failure
def change(name, value):
    if name in globals(): globals()[name] = value
def drop(name): globals().pop(name, None)
def same(value): return value
class Changing:
    def __iter__(self):
        change('b', 77)
        yield -1
        drop('c')
target, refuses, changing = Target(), Refuses(), Changing()
"""
NAMES = "class Mine: pass\na, b, c = 1, [2], Mine()"


class Recorder(dict[str, Any]):
    """The locals of the reference: each store and each deletion of a scope's own code passes
    through it.

    Args:
        namespace: the notebook's names.
        scopes: the open scopes, innermost last.
    """

    def __init__(self, namespace: dict[str, Any], scopes: list[Recorder] | None = None) -> None:
        super().__init__()
        self.namespace = namespace
        self.scopes = [self] if scopes is None else scopes
        self.outer = set(namespace)
        self.saved: dict[str, Any] = {}
        self.imports: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.forget_deleted()
        if name in self.outer and name in self.namespace:
            self.saved.setdefault(name, self.namespace[name])
        self.namespace[name] = value
        self.imports.discard(name)
        if value is json or value is math.pi:
            self.imports.add(name)

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)  # then Python looks into the globals

    def __delitem__(self, name: str) -> None:
        del self.namespace[name]
        self.forget_deleted()

    def forget_deleted(self) -> None:
        """A name that was deleted is new when it comes back, unless a scope inside has it back at
        its end.
        """
        there = set(self.namespace)
        for scope in reversed(self.scopes):
            there |= scope.saved.keys()
            scope.outer &= there
            scope.imports &= there

    def owns(self, name: str) -> bool:
        return name not in self.outer or name in self.saved

    def receive(self, kept: set[str], shadowed: dict[str, Any]) -> None:
        """Take over names that a scope inside has kept, with the objects that it has shadowed."""
        for name, value in shadowed.items():
            if name in self.outer:
                self.saved.setdefault(name, value)
        self.imports -= kept

    def left(self) -> dict[str, Any]:
        """Return the names after the scope."""
        self.forget_deleted()
        return {
            name: value
            for name, value in self.namespace.items()
            if name in self.outer | self.imports
        } | self.saved


def run(scope: Scope, namespace: dict[str, Any], source: str) -> None:
    """Run ``source`` as a cell of ``scope``, as the session does."""
    tree = ast.parse(source)
    bindings = bindings_of(tree)
    names = frozenset(bindings.bound | bindings.deleted)
    scope.expect_bindings(bindings, names)
    instrument(tree, names)
    namespace["__builtins__"] = {
        **vars(builtins),
        BINDING_RECORDER: BindingRecorder(lambda e: scope.record_event(e, [scope])),
    }
    exec(compile(tree, "cell", "exec"), namespace)
    forget_needless_saves([scope])


def visible(namespace: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in namespace.items()
        if name not in ("__builtins__", "__annotations__")
    }


def notebook(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the names after ``source`` was a scope, and those that Python's own bindings leave."""
    ours = started()
    namespace = started()
    scope = Scope(ours)
    recorder = Recorder(namespace)
    run(scope, ours, source)
    scope.close(None)
    exec(compile(source, "cell", "exec"), namespace, recorder)
    return plain(visible(ours)), plain(visible(recorder.left()))


def started() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__builtins__": builtins}
    exec(HELPERS + NAMES, namespace)
    return namespace


def plain(names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if type(value) in (int, list, str) else type(value).__name__
        for name, value in names.items()
    }


IN_LOOPS = [
    "for c in [1, 2]: a = 1",
    "for c in [1, 2]:\n    if {bit}: a = 1\n    elif {bit}: b = {v}",
    "while True:\n    a = 1\n    break",
    "while {bit}:\n    a = b = 1\n    break",
    "for c in [1]:\n    for target.x in range({bit}): a, b = 1, 1",
    "for c in [1]:\n    for target.x in range({bit}): a: int = 1\n    else: b = 1",
    "for a in [1, 1]: pass",
    "for c in [{v}]: c = c",
    """
for c in range(2):
    try: 1 / 0
    except ZeroDivisionError as a: pass
""",
    """
for a in [{v}]:
    try: b = 1 / {bit}
    except ZeroDivisionError as a: b = {w}
""",
    """
for b in [{v}, {w}]:
    try: 1 / {bit}
    except ZeroDivisionError as a: a = b
    else: a = {v}
""",
    """
for b in [{v}]:
    try: 1 / 0
    except ZeroDivisionError as a: raise
""",
    """
for b in [{v}]:
    try: 1 / 0
    except ZeroDivisionError as a: 1 / 0
    finally: b = {w}
""",
    """
for b in [{v}]:
    try: 1 / 0
    except (ValueError, ZeroDivisionError) as a: break
else:
    try: 1 / 0
    except ZeroDivisionError as c: pass
""",
    """
for b in [{v}]: pass
else:
    try: 1 / 0
    except ZeroDivisionError as a: pass
""",
    """
while True:
    try: [][0]
    except IndexError as a: break
""",
    """
while {bit}:
    try: [][0]
    except IndexError as a: b = {v}; break
    finally: c = {w}
""",
    """
for a in [{v}, {w}]:
    for b in (1, 2):
        try: 1 / 0
        except ZeroDivisionError as c: continue
""",
    """
for a in [{v}]:
    try:
        try: 1 / 0
        except ZeroDivisionError as b: [][0]
    except IndexError as b: pass
""",
    """
for a in [{v}]:
    try: none_such_name
    except NameError as b:
        try: 1 / 0
        except ZeroDivisionError as c: c = b
""",
    """
with Manager({v}) as a:
    for c in [{v}]:
        try: 1 / 0
        except ZeroDivisionError as b: pass
""",
    """
for a in [{v}]:
    [c for c in (1, 2)]
    del b
""",
    """
for a in [{v}]:
    if {bit}: del a
    b = {w}
""",
    """
for a in [{v}]:
    match [a, {w}]:
        case [b, c] if c == 1: pass
        case [c, int()] if {bit}: pass
""",
    """
for a in [{v}]:
    with Manager({w}, 'enter') as b: c = 1
""",
    """
while True:
    with Manager({w}, 'exit') as b: del a
""",
    """
for a in [{v}]:
    for target.x in changing: b = {w}
""",
    """
for a in [{v}]:
    b = [a for a in changing]
""",
    """
while {bit}:
    b = {{a for c in (1, 2) for a in changing}}
    break
""",
]
"""Loops that are not instrumented, and statements in them that unbind names or run other code."""
if sys.version_info >= (3, 11):
    IN_LOOPS += [
        """
for b in [{v}]:
    try: 1 / {bit}
    except* ZeroDivisionError as a: pass
""",
        """
while True:
    try: 1 / 0
    except* ZeroDivisionError as a: b = {v}
    try: [][0]
    except* IndexError as a: c = {w}
    1 / 0
""",
    ]

FORMS = [
    "a = {v}",
    "a = b = {v}",
    "a, b = {v}, {w}",
    "a, *b = {v}, {w}",
    "[a, [b]] = {v}, [{w}]",
    "[a, [b]] = {v}, {w}",
    "a, b = fail()",
    "a, b = {v},",
    "a = b, c = {v}",
    "a = refuses.x = {v}",
    "a, refuses.x = {v}, {w}",
    "refuses.x, a = {v}, {w}",
    "a, target.x = {v}, {w}",
    "a = {v} or (b := {w})",
    "a = {v} or (a := {w})",
    "a = 0 and (a := {w})",
    "a = ({v} if {bit} else (b := {w}))",
    "same((b := {w})) if {bit} else 0",
    "a = fail() or (b := {w})",
    "a: int = {v}",
    "a: fail() = {v}",
    "a: int",
    "a += {v}",
    "a += ''",
    "a += (a := {v})",
    "target.x = (a := {v})",
    "assert (a := {v}) < 0, (b := {w})",
    "assert (a := {v}) > 0, (b := {w})",
    "for a in (): b = {v}",
    "for a in range({bit}): b = {w}",
    "for a in range(fail()): b = {w}",
    "for a in [same({v})]: b = {w}",
    "for a in same([{v}] * {bit}): same(b)",
    "for a, refuses.x in [({v}, {w})]: pass",
    "for a, target.x in same([({v}, {w})]): same(b)",
    "for a in [(b := {v})] * {bit}: pass",
    "for a in [{v}]:\n    if {bit}: b = {w}",
    "for a in [{v}]:\n    b = 1 / {bit}",
    "for a in [{v}]: break\nelse: b = {w}",
    """\
for a in [{v}, {w}]:
    same(a)
    if {bit}: continue
    b = a""",
    """\
while {bit}:
    a = {v}
    break
else: b = {w}""",
    "while (a := {v}) and same({bit}):\n    b = {w}\n    break",
    "while True:\n    a = {v}\n    fail()",
    "with Manager({v}) as a: pass",
    "with Manager({v}, 'enter') as a: b = {w}",
    "with Manager({v}, 'exit') as a: b = {w}",
    "with Manager({v}) as a, Manager({w}, 'enter') as b: pass",
    "with Manager({v}) as a, Manager(same(a)) as b: pass",
    "with Manager(({v}, {w})) as (a, b): fail()",
    "with Manager(({v}, {w})) as (a, refuses.x): pass",
    "with Manager({v}) as a, fail() as b: pass",
    "try: {x}\nexcept Failure as a: b = {v}",
    """\
try: fail()
except ValueError as a: pass
except Failure as b: same(b)
else: a = {v}""",
    """\
try: same(1)
except Failure as a: pass
else: b = {v}
finally: same(2)""",
    "try: a = fail()\nexcept (ValueError, Failure) as b: a = {v}; raise",
    "def a(x=(b := {v})): c = 1",
    "@fail\ndef a(): pass",
    "@fail\nclass a: pass",
    "class a: b = {v}",
    "class a(metaclass=fail): pass",
    "class a(object, metaclass=(b := type)): fail()",
    "class a(object, metaclass=(b := type)): same(1)",
    "lambda x=(a := {v}): (b := {w})",
    "match {v}:\n    case int() as a if {bit}: pass\n    case b: pass",
    "match [{v}, {w}]:\n    case [a, str()]: pass\n    case [a, *_] if fail(): pass",
    "match [{v}, {w}]:\n    case [a, b]: c = {v}",
    "match same(dict(k={v})):\n    case {{'k': a, **b}} if {bit}: pass",
    "if {bit}: a = {v}\nelif (b := {w}): pass\nelse: c = {v}",
    *IN_LOOPS,
    "del a",
    "del (a, [b])",
    "if 'a' in globals(): del a",
    "change('a', {v})",
    "change('b', {v}); change('c', {w})",
    "drop('a')",
    "exec('d = {v}', globals())",
    "import none_such_module as a",
    "import json as a, none_such_module as b",
    "from math import pi as a, none_such as b",
    "print((a := {v}), fail(), (b := {w}), file=None)",
]


def statement(source: random.Random, form: str) -> str:
    """Return ``form`` with random names and values, its errors caught."""
    values = {
        "v": source.randrange(1000, 9**9),
        "w": source.randrange(1000, 9**9),
        "bit": source.randrange(2),
    }
    if source.random() < 0.3:
        values |= {"v": source.choice([1, 2]), "w": 1}  # objects that the names may have already
    text = form.strip().format(**values, x=source.choice(["fail()", "same(1)"]))
    names = dict(zip("abc", source.sample("abc", 3), strict=True))
    text = re.sub(r"\b[abc]\b", lambda match: names[match[0]], text)
    return "try:\n" + indent(text, "    ") + "\nexcept Exception: pass"


@pytest.mark.parametrize("form", FORMS)
def test_each_syntax_form_binds_exactly_its_own_names(form: str) -> None:
    for seed in range(6):
        source = random.Random(seed)
        ends = "change('a', -1); change('b', -2)", "if 'a' in globals(): del a"
        for end in ends:
            code = f"{statement(source, form)}\n{end}\nc = 5"
            ours, pythons = notebook(code)
            assert ours == pythons, code


def test_random_programs_leave_the_names_that_python_leaves() -> None:
    for seed in range(int(os.environ.get("N", "300"))):
        source = random.Random(seed)
        code = "\n".join(statement(source, source.choice(FORMS)) for _ in range(5))
        ours, pythons = notebook(code)
        assert ours == pythons, code


_FOUND = """{name: value if type(value) in (int, list, str) else type(value).__name__
for name, value in globals().items() if name in ('a', 'b', 'c', 'd')}"""


class Model:
    """The names of a notebook with nested scopes, whose cells Python itself runs."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        exec(HELPERS + NAMES, self.namespace)
        self.scopes: list[Recorder] = []

    def run(self, source: str) -> None:
        exec(compile(source, "cell", "exec"), self.namespace, *self.scopes[-1:])
        for scope in self.scopes[-1:]:
            scope.forget_deleted()

    def open(self) -> None:
        self.scopes.append(Recorder(self.namespace, self.scopes))

    def close(self, keep: str = "") -> None:
        """End the innermost scope; the names that ``keep`` matches go to the scope around it."""
        scope = self.scopes[-1]
        scope.forget_deleted()
        kept = {
            name for name in self.namespace if name in keep and len(name) == 1 and scope.owns(name)
        }
        shadowed = {name: scope.saved.pop(name) for name in kept & scope.saved.keys()}
        scope.imports -= kept
        scope.outer |= kept
        left = scope.left()
        self.scopes.pop()
        if self.scopes:
            self.scopes[-1].receive(kept, shadowed)
            self.scopes[-1].imports |= scope.imports.intersection(left) - scope.saved.keys()
        self.namespace.clear()
        self.namespace.update(left)

    def names(self) -> dict[str, Any]:
        return plain({name: self.namespace[name] for name in "abcd" if name in self.namespace})


def cell(source: random.Random, model: Model) -> str:
    """Return a random cell, and do to the model what it will do."""
    kind = source.random()
    depth = len(model.scopes)
    if kind < 0.15 and depth < 3:
        model.open()
        return f"%experiment start s{depth}"
    # a plain name that never existed would keep all names
    keep = source.choice(["", "", "[a]", "[bc]"])
    if kind < 0.28 and depth:
        model.close(keep)
        return f"%experiment keep {keep}\n%experiment end" if keep else "%experiment end"
    code = "\n".join(statement(source, source.choice(FORMS)) for _ in range(source.randrange(1, 4)))
    if kind < 0.5:
        model.open()
    model.run(code)
    wrapped = code
    if source.random() < 0.2:
        wrapped = f"%%time\n{code}"
    elif source.random() < 0.2:
        wrapped = f"get_ipython().run_cell({code!r}, store_history=False)"
    if kind >= 0.5:
        return wrapped
    if wrapped == code and kind < 0.35:
        model.close()
        return f"with ipygpumem.experiment('block', report='none'):\n{indent(code, '    ')}"
    model.close(keep)
    return f"%%experiment cell {'--keep ' * bool(keep)}{keep}\n{wrapped}"


THOROUGH = [pytest.param(1_000 + seed, marks=pytest.mark.thorough) for seed in range(20)]
"""Numbers of cells, which seed the random ones: 20,000 in total. A busy machine runs so many well
before a timeout.
"""


@pytest.mark.parametrize("cells", [60, *THOROUGH])
def test_random_cells_leave_the_names_that_scopes_should_leave(kernel: Kernel, cells: int) -> None:
    source = random.Random(cells)
    model = Model()
    run_quietly(
        kernel, "%config IPyGpuMem.experiment_report = 'none'", "%config IPyGpuMem.report = False"
    )
    run_quietly(kernel, "import ipygpumem\n" + HELPERS + NAMES)
    run = []
    for _ in range(cells):
        run.append(cell(source, model))
        run_quietly(kernel, run[-1])
        assert kernel.value(_FOUND) == model.names(), "\n-----\n".join(run[-5:])


shared_kernel, tidied = tidied_kernel("%reset -f", "%reload_ext ipygpumem")


def test_a_kept_older_value_belongs_to_the_outer_scope(tidied: Kernel) -> None:
    run_quietly(tidied, HELPERS + "b = 1", "%experiment start around")
    run_quietly(tidied, "%%experiment inner --keep b\nb = 1", "change('b', 2)", "%experiment end")
    assert tidied.value("b") == 1


@pytest.mark.parametrize(
    "binding",
    [
        "b = refuses.x = 1",
        "b = a, c = 1",
        "b, refuses.x = 1, 2",
        "target.x, [b, refuses.x] = 1, [1, 2]",
        "for b, refuses.x in [(1, 2)]: pass",
        "with Manager((1, 2)) as (b, refuses.x): pass",
    ],
)
def test_a_failing_target_has_bound_the_names_before_it(tidied: Kernel, binding: str) -> None:
    run_quietly(tidied, HELPERS + "b = 1")
    run_quietly(
        tidied, f"%experiment start x\ntry:\n    {binding}\nexcept (Failure, TypeError): pass"
    )
    run_quietly(tidied, "%experiment start inner\ndel b\n%experiment end", "%experiment end")
    assert tidied.value("globals().get('b')") == 1


HANDLER_IN_LOOP = """
for i in range(3):
    try: 1/0
    except ZeroDivisionError as e: pass
"""
HANDLER_IN_WHILE = """
i = 0
while i < 2:
    i += 1
    try: 1/0
    except ZeroDivisionError as e: pass
"""


SCOPES = [
    "%%experiment x\n{loop}",
    "%%experiment x --keep e\n{loop}",
    "import ipygpumem\nwith ipygpumem.experiment('x', report='none'):\n{indented}",
    "%experiment start x\nget_ipython().run_cell({loop!r})\n%experiment end",
]


def test_a_handler_in_a_loop_unbinds_no_older_name(tidied: Kernel) -> None:
    for loop in (HANDLER_IN_LOOP, HANDLER_IN_WHILE):
        for scope in SCOPES:
            cell = scope.format(loop=loop, indented=indent(loop, "    "))
            run_quietly(tidied, "e = 'older'", cell)
            assert tidied.value("(globals().get('e'), 'i' in globals())") == ("older", False), cell


@pytest.mark.parametrize("loop", ["for q in [1, 2]: b = 1", "while b:\n    b = 1\n    break"])
def test_a_loop_that_binds_the_same_object_loses_no_name(tidied: Kernel, loop: str) -> None:
    run_quietly(tidied, "b = 1", f"%%experiment x\n{loop}\ndel b")
    assert tidied.value("b") == 1
    run_quietly(tidied, "%experiment start x", loop, "del b", "%experiment end")
    assert tidied.value("b") == 1


class Vanishing(dict[str, Any]):
    """Names that a thread deletes as soon as they were looked for or listed."""

    def __contains__(self, name: object) -> bool:
        return self.pop(name, None) is not None

    def __iter__(self) -> Iterator[str]:
        names = list(self.keys())
        self.clear()
        return iter(names)


def test_a_thread_may_delete_names_at_any_moment() -> None:
    assert ownable_objects(Vanishing(old=1)) == {"old": 1}
    namespace: dict[str, Any] = {"old": 1}
    scope = Scope(namespace)
    namespace = scope._namespace = Vanishing(namespace)
    assert scope.save(["old"]) == ["old"]
    assert scope.overwritten_objects() == {}
    for word in (BINDS, MAY_BIND):
        namespace["old"] = 1
        scope.record_event(f"{word}old", [scope])
    namespace["new"] = 2
    scope.close(None, ["new"])
    assert set(namespace.keys()) == {"old"}


class Shrinking(dict[str, Any]):
    """Names of which a thread deletes the last one after a look at their objects."""

    def values(self) -> Any:
        objects = list(super().values())
        self.pop("last", None)
        return objects


def test_a_thread_may_delete_names_during_a_snapshot() -> None:
    namespace = Shrinking(first=[], last=[])
    snapshot = NameSnapshot(namespace)
    assert snapshot.some_may_live_on({"first": []})
