"""What a scope shadows is kept from the moment at which it is bound, and what is deleted is gone at once."""

from __future__ import annotations

import re
import sys

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import exist, fails, ok

_OBJECT = """
import weakref
class Thing: pass
thing = Thing()
dead = weakref.ref(thing)
seen = []
def drop():
    global thing
    del thing
def build():
    seen.append(dead() is None)
    return 'built'
def rebuild():
    drop()
    return build()
"""

_FREEING = {
    "condition": "if 'thing' in globals(): del thing\nthing = build()",
    "try": "try:\n    del thing\nexcept NameError:\n    pass\nthing = build()",
    "with": "import contextlib\nwith contextlib.suppress(NameError): del thing\nthing = build()",
    "called function": "drop()\nthing = build()",
    "exec": "exec('del thing')\nthing = build()",
    "globals": "globals().pop('thing')\nthing = build()",
    "reset_selective": "%reset_selective -f ^thing$\nthing = build()",
    "xdel": "%xdel thing\nthing = build()",
    "loop": "for n in range(3):\n    if 'thing' in globals(): del thing\n    thing = build()",
    "while": "n = 0\nwhile n < 2:\n    n += 1\n    try: del thing\n    except NameError: pass\n    thing = build()",
    "unpacking": "if True: del thing\nthing, other = build(), 1",
    "def": "if True: del thing\nbuild()\ndef thing(): pass",
    "match": "if True: del thing\nmatch build():\n    case thing: pass",
    "walrus": "if True: del thing\nprint(thing := build())",
    "for target": "if True: del thing\nfor thing in [build()]: pass",
    "condition that fails first": "if seen: thing = 1\ndel thing\nthing = build()",
    "before a nested cell": "drop()\nget_ipython().run_cell('thing = build()')",
    "nested cell": "get_ipython().run_cell('if True: del thing')\nthing = build()",
}

_WAYS = {"cell": "%%experiment a\n{}", "start": "{}", "time": "%%time\n{}"}


def run(kernel: Kernel, way: str, code: str) -> None:
    ok(kernel, _OBJECT)
    if way != "cell":
        ok(kernel, "%experiment start a")
    ok(kernel, _WAYS[way].format(code))
    if way != "cell":
        ok(kernel, "%experiment end")


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("name", _FREEING)
def test_an_old_object_that_the_cell_frees_is_dead_before_the_next_is_built(
    notebook: Kernel, name: str, way: str
) -> None:
    run(notebook, way, _FREEING[name])
    assert notebook.value("seen[0]") is True
    assert exist(notebook, "thing") == []


def test_an_old_object_that_the_called_function_frees_is_dead_before_it_returns_the_next(notebook: Kernel) -> None:
    run(notebook, "cell", "thing = rebuild()")
    assert notebook.value("seen") == [sys.version_info >= (3, 11)]
    assert ("thing" in exist(notebook, "thing")) is (sys.version_info < (3, 11))


_SWEEPS = {
    "with": "for n in (1, 2):\n    with ipygpumem.experiment('i', report='none'):\n        {}",
    "magics": "for n in (1, 2):\n    %experiment start i --report none\n    {}\n    %experiment end",
    "while": "n = 0\nwhile n < 2:\n    n += 1\n    with ipygpumem.experiment('i', report='none'):\n        {}",
    "capture": "%%capture\nfor n in (1, 2):\n    with ipygpumem.experiment('i', report='none'):\n        {}",
    "unseen": "for n in (1, 2):\n    e = made('i', report='none').start()\n    {}\n    e.finish()",
}


@pytest.mark.parametrize("binding", ["x = n", "def x(): pass", "x, y = n, n", "for x in [n]: pass", "print(x := n)"])
@pytest.mark.parametrize("sweep", _SWEEPS)
def test_a_scope_inside_a_loop_gives_back_what_it_shadows(notebook: Kernel, sweep: str, binding: str) -> None:
    ok(notebook, "import ipygpumem\nmade = ipygpumem.experiment\nx = saved = object()", _SWEEPS[sweep].format(binding))
    assert notebook.value("x is saved") is True
    assert exist(notebook, "y") == []
    ok(notebook, "%experiment start outer", _SWEEPS[sweep].format(binding), "%experiment end")
    assert notebook.value("x is saved") is True


@pytest.mark.parametrize("target", ["nothing, x", "d['missing'], x", "o.attribute, x", "(l[5], (x,))"])
def test_what_a_deletion_did_not_reach_is_still_there(notebook: Kernel, target: str) -> None:
    failing = f"try: del {target}\nexcept (LookupError, NameError, AttributeError): pass"
    ok(notebook, "x = saved = object()\nd, o, l = {}, object(), []", f"%%experiment a\n{failing}")
    assert notebook.value("x is saved") is True
    ok(notebook, "%experiment start a")
    ok(notebook, failing, "%experiment end")
    assert notebook.value("x is saved") is True


_LATER = [("x = x", "del x"), ("n = 0", "del n")] if sys.version_info >= (3, 11) else []


@pytest.mark.parametrize(
    "cells",
    [
        *_LATER,
        ("x = saved\ndel x",),
        ("for x in [saved]: pass\ndel x",),
        ("import contextlib\nwith contextlib.nullcontext(x) as x: pass\ndel x",),
        ("x, y = saved, 1\ndel x",),
        ("print(x := saved)\ndel x",),
    ],
)
def test_a_name_that_is_bound_to_the_same_object_again_is_the_scopes(notebook: Kernel, cells: tuple[str, ...]) -> None:
    ok(notebook, "x = saved = object()\nn = 0", "%experiment start a", *cells, "%experiment end")
    assert notebook.value("(x is saved, n)") == (True, 0)
    ok(notebook, "%%experiment a\n" + "\n".join(cells))
    assert notebook.value("(x is saved, n)") == (True, 0)


@pytest.mark.parametrize("way", _WAYS)
def test_an_old_object_that_is_not_freed_is_back(notebook: Kernel, way: str) -> None:
    run(notebook, way, "if not seen: thing = build()\nwhile len(seen) < 3:\n    thing = build()")
    assert notebook.value("(seen, thing is dead())") == ([False] * 3, True)


@pytest.mark.parametrize(
    "rebinding",
    [
        "%experiment start x\ndel b\nb = 33\n%time b = 35\n%experiment end",
        "%%experiment x\ndel b\nb = 33\n%time b = 35",
        "%%experiment x\ndel b\nb = 33\nget_ipython().run_cell('b = 35')",
        "%%experiment x\ndel b\nglobals()['b'] = 10",
        "%%experiment x\nif True: del b\nexec('b = 10')",
        "%%experiment x\nget_ipython().run_cell('del b')\nb = 33",
    ],
)
def test_what_a_scope_binds_after_it_deleted_a_name_goes_with_it(notebook: Kernel, rebinding: str) -> None:
    ok(notebook, "b = 1", rebinding)
    assert exist(notebook, "b") == []


def test_a_name_that_an_inner_scope_deletes_and_a_later_cell_of_it_binds_is_the_inner_ones(notebook: Kernel) -> None:
    ok(notebook, "x = 1", "%experiment start outer", "x = 2", "%experiment start inner", "del x", "x = 3")
    ok(notebook, "%experiment end")
    assert exist(notebook, "x") == []
    ok(notebook, "%experiment end")
    assert notebook.value("x") == 1


_BUMP = "n = 0\nc = 'c'\ndef bump():\n    global n\n    n += 1\n    return n"


_BUMPING = [
    "bump(); n = 10",
    "bump()\nfor n in range(3): pass",
    "exec('bump()')\nn = 10",
    "for i in range(1):\n    bump()\n    if i > 5: n = 100",
    "if False: n = 5\nbump()",
]
if sys.version_info >= (3, 11):
    _BUMPING += ["try: n = {}['missing']\nexcept KeyError: pass\nbump()", "n = bump()", "print(n := bump())"]


@pytest.mark.parametrize("code", _BUMPING)
def test_what_a_function_changed_before_the_cell_bound_the_name_is_kept(notebook: Kernel, code: str) -> None:
    ok(notebook, _BUMP, f"%%experiment a\n{code}")
    assert notebook.value("n") == 1
    ok(notebook, "%experiment start a", code, "%experiment end")
    assert notebook.value("n") == 2


@pytest.mark.parametrize("first", ["", "%%time\n", "%%memlines\n"])
def test_what_happens_after_an_inner_experiment_cell_is_not_undone(notebook: Kernel, first: str) -> None:
    ok(notebook, _BUMP, "%experiment start outer", f"%%experiment inner\n{first}n = 99\nc = 100", "bump()", "del c")
    ok(notebook, "%experiment end")
    assert notebook.value("n") == 1
    assert exist(notebook, "c") == []


def test_code_of_a_cell_that_changes_hands_midway_is_saved_where_it_runs(notebook: Kernel) -> None:
    ok(notebook, "x = y = 1", "x = 2\n%experiment start a\nx = 3\nnew = y\n%experiment end\ny = 4")
    assert notebook.value("(x, y)") == (2, 4)
    ok(notebook, "import ipygpumem as m", "start = m.experiment", "s = start('a')")
    ok(notebook, "x = 5\ns.start(); x = 6; s.finish(); y = 7")
    assert notebook.value("(x, y)") == (5, 7)


def test_a_transformer_of_the_users_that_fails_loses_nothing(notebook: Kernel) -> None:
    ok(notebook, "import ast\nclass Fails(ast.NodeTransformer):\n    def visit(self, node): raise ValueError('no')")
    ok(notebook, "x = 1", "%experiment start a", "get_ipython().ast_transformers.append(Fails())", "1")
    ok(notebook, "get_ipython().ast_transformers.append(Fails())")
    ok(notebook, "x = 2", "%experiment end")
    assert notebook.value("x") == 1


def test_a_transformer_of_the_users_sees_the_code_as_it_was_written(notebook: Kernel) -> None:
    ok(
        notebook,
        "import ast\nseen = []\nclass Sees(ast.NodeTransformer):\n    def visit(self, node):\n"
        "        seen.append(ast.unparse(node))\n        return node",
        "x = 1",
        "get_ipython().ast_transformers.append(Sees())",
        "%experiment start a",
        "x = int(2)\ndel x",
    )
    assert notebook.value("seen[-1]") == "x = int(2)\ndel x"
    ok(notebook, "%experiment end")
    assert notebook.value("x") == 1


def test_a_traceback_shows_what_it_shows_without_the_extension(kernel: Kernel, bare_kernel: Kernel) -> None:
    define = "def f(n):\n    return 1 / n\nx = 1"
    ok(kernel, define, "%experiment start a")
    ok(bare_kernel, "1", define, "2")  # as many cells
    for body in ("x = f(0)", "x = y = 1 + f(0)", "for x in f(0): pass", "if f(0): x = 1", "a, x = 5"):
        error = "TypeError" if "5" in body else "ZeroDivisionError"
        ours, bare = fails(kernel, f"y = 1\n{body}", error), fails(bare_kernel, f"y = 1\n{body}", error)
        # IPython 7 names a cell after the kernel's process.
        assert re.sub(r"kernel_\d+", "", ours.traceback) == re.sub(r"kernel_\d+", "", bare.traceback), body


def test_unloading_in_the_middle_of_a_cell_does_not_disturb_it(kernel: Kernel) -> None:
    ok(kernel, "x = 1", "%experiment start a")
    assert kernel.run("%unload_ext ipygpumem\nx = int(2)\nx").result == "2"
    assert kernel.run("x").result == "2"
    assert kernel.run("'__ipygpumem_names__' in dir(__builtins__)").result == "False"


def test_a_cell_that_loads_the_extension_may_run_others(bare_kernel: Kernel) -> None:
    nested = "get_ipython().run_cell({!r})"
    for load in ("%load_ext ipygpumem", "%reload_ext ipygpumem"):
        ok(bare_kernel, "x = 1", f"{load}\n{nested.format('%experiment start a')}\n{nested.format('x = 5')}")
        ok(bare_kernel, "%experiment end")
        assert bare_kernel.value("x") == 1


def test_a_comment_about_measured_lines_changes_nothing(notebook: Kernel) -> None:
    run(notebook, "cell", "# as in %%memlines\nif True: del thing\nthing = build()")
    assert notebook.value("seen") == [True]


def test_a_deletion_in_a_try_that_is_taken_back_is_none(notebook: Kernel) -> None:
    ok(notebook, "x = saved = object()", "%experiment start a")
    fails(notebook, "%%autofit n=2\ndel x\nx = 1\nraise MemoryError", None)
    assert notebook.value("x is saved") is True
    ok(notebook, "%experiment end")
    assert notebook.value("x is saved") is True
    ok(notebook, "%experiment start a", "%%autofit n=2\ndel x\nx = n\nif n > 1: raise MemoryError", "%experiment end")
    assert exist(notebook, "x") == []


def test_timed_code_is_not_made_slower(notebook: Kernel) -> None:
    ok(notebook, "x = 1\nnames = []", "%experiment start a")
    timed = "%timeit -n1 -r1 names.append(__import__('sys')._getframe().f_code.co_names); x = 2"
    ok(notebook, timed, "%experiment end", timed)
    assert notebook.value("names[0] == names[1]") is True
    assert notebook.value("x") == 1
