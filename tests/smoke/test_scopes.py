"""The table of docs/experiments.md and what stands below it: the names that are there after a
scope.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from benchmarks.harness.kernel import Kernel
from tests.steps import (
    ANNOUNCE,
    dedented,
    existing_names,
    experiment,
    open_experiments,
    plain,
    run,
    run_failing,
    run_quietly,
)

START = "%experiment start a"
END = "%experiment end"
WAYS = {
    "cell": ("%%experiment a\n{}",),
    "start": (START, "{}", END),
    "time": (START, "%%time\n{}", END),
}
"""Forms of a scope's cell: as its own experiment, inside an open one, and there inside another
magic.
"""

_NAMES = """{n: v if isinstance(v, (int, str, list, dict)) else type(v).__name__ for n, v in globals().items()
if n[0] != '_' and n not in ('In', 'Out', 'exit', 'quit', 'get_ipython', 'open')}"""  # noqa: E501


def user_values(kernel: Kernel) -> dict[str, Any]:
    """Return the user's names with their values, or the types of those that are not plain."""
    user_names = kernel.value(_NAMES)
    assert isinstance(user_names, dict)
    return user_names


def whole_scope(kernel: Kernel, way: str, code: str) -> None:
    """Run ``code`` in a scope from beginning to end."""
    run_quietly(kernel, *(part.format(code) for part in WAYS[way]))


BINDING = [
    "x = 1",
    "y = x = 1",
    "x, *y = 1, 2",
    "[x, [y]] = 1, [2]",
    "x = ''\nx += 'a'",
    "x: int = 1",
    """\
for x in range(3):
    pass
else:
    y = 1""",
    """\
async def many():
    yield 1
async for x in many():
    pass""",
    "with open('/dev/null') as x:\n    pass",
    "async def x():\n    return 1",
    """\
import contextlib
async with contextlib.AsyncExitStack() as x:
    y = x
del contextlib""",
    "class x:\n    y = 1",
    "def x():\n    return 1",
    "y = [x := i for i in range(3)]",
    """\
try:
    1 / 0
except ZeroDivisionError as x:
    pass""",
    "match [1, {'a': 2}]:\n    case [int() as x, {**y}]:\n        pass",
    """\
if True:
    while True:
        x = 1
        break""",
    "x = %env HOME",
]
if "getoutput" in TransformerManager().transform_cell(
    "x = !echo 1"
):  # not IPython 7.34 and 8.12 on Python 3.12
    BINDING.append("x = !echo 1")
if sys.version_info >= (3, 11):
    BINDING.append(
        """\
try:
    raise ExceptionGroup('', [ValueError()])
except* ValueError as x:
    pass"""
    )
if sys.version_info >= (3, 12):
    BINDING += ["type x = int", "def x[T](a: T) -> T:\n    return a"]


@pytest.mark.parametrize("way", ["cell", pytest.param("start", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("code", BINDING)
def test_a_scope_deletes_new_names_and_restores_old_ones(
    notebook: Kernel, code: str, way: str
) -> None:
    whole_scope(notebook, way, code)
    assert user_values(notebook) == {}
    run_quietly(
        notebook,
        """
        x = saved = object()
        y = 'outer'
        """,
    )
    whole_scope(notebook, way, code)
    assert notebook.value("(x is saved, y)") == (True, "outer")


COUNT = """\
n = 0
def count():
    global n
    n += 1
    return n"""
OTHER_RULES = {
    "a function's and a comprehension's names": (
        "x = i = 1",
        """\
def f(x):
    i = x
    return i
f(2)
z = [i for i in range(3)]
x: int""",
        {"x": 1, "i": 1},
    ),
    "global": (
        "old = 1",
        """\
global old, new
old = 2
new = 3
other = 4""",
        {"old": 2, "new": 3},
    ),
    "global in a function of the cell": ("x = 1", "def f():\n    global x\nx = 2", {"x": 1}),
    "imports": ("", "import json, os.path as p\nx = 1", {"json": "module", "p": "module"}),
    "changed by a function": (COUNT, "count()\ncount()", {"n": 2, "count": "function"}),
    "changed before it is bound": (
        COUNT,
        "exec('count()')\nfor n in range(9): pass",
        {"n": 1, "count": "function"},
    ),
    "mutation": (
        "d = {}",
        """\
alias = d
mine = [1]
d['k'] = mine
mine.append(2)""",
        {"d": {"k": [1, 2]}},
    ),
    "deleted": (
        "x = y = z = 1",
        """\
del x
del y
y = 5
if True: del z
for z in range(3): pass""",
        {},
    ),
    "deleted and bound by a nested cell": (
        "x = 1",
        "del x\nx = 3\nget_ipython().run_cell('x = 5')",
        {},
    ),
    "deleted by a nested cell": ("x = 1", "get_ipython().run_cell('del x')\nx = 5", {}),
    "an import that one branch replaces": (
        "",
        "try: import json\nexcept ImportError: json = [0]",
        {"json": "module"},
    ),
    "an import that fails and is replaced": (
        "",
        "try: import none_such\nexcept ImportError: none_such = [0]",
        {},
    ),
    "deleted and bound by other means": ("x = 1", "if True: del x\nexec('x = 5')", {}),
}


@pytest.mark.parametrize("way", ["cell", "time"])
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_the_other_rules_of_names(notebook: Kernel, rule: str, way: str) -> None:
    before, code, left = OTHER_RULES[rule]
    run_quietly(notebook, before)
    whole_scope(notebook, way, code)
    assert user_values(notebook) == left


@pytest.mark.parametrize("way", ["cell", "start"])
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("exec('new = 1')", id="exec"),
        pytest.param("globals().update(new=1)", id="globals"),
        pytest.param("get_ipython().push({'new': 1})", id="push"),
        pytest.param(
            """\
def f():
    global new
    new = 1
f()""",
            id="a global of a function",
        ),
        pytest.param("from string import *", id="import star"),
        pytest.param("%run {script}", id="run"),
        pytest.param(
            """
            %%capture new
            print(1)
            """,
            id="capture",
        ),
        pytest.param(
            """
            %%capture
            new = 1
            """,
            id="capture of a cell",
        ),
        pytest.param(
            """
            %%prun -q
            new = 1
            """,
            id="prun",
        ),
    ],
)
def test_a_scope_deletes_names_bound_without_an_assignment(
    notebook: Kernel, tmp_path: Path, code: str, way: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("new = 1\n")
    whole_scope(notebook, way, dedented(code).replace("{script}", f"'{script}'"))
    assert user_values(notebook) == {}


OBJECT = """
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
"""
FREEING = [
    "del thing\nseen.append(dead() is None)",
    "if 'thing' in globals(): del thing\nthing = build()",
    """\
try:
    del thing
except NameError:
    pass
thing = build()""",
    "drop()\nthing = build()",
    "globals().pop('thing')\nthing = build()",
    "%reset_selective -f ^thing$\nthing = build()",
    "for n in range(3):\n    if 'thing' in globals(): del thing\n    thing = build()",
    "if True: del thing\nfor thing in [build()]: pass",
    "if seen: thing = 1\ndel thing\nthing = build()",
    "drop()\nget_ipython().run_cell('thing = build()')",
    "# as in %%memlines\nif True: del thing\nthing = build()",
]


@pytest.mark.parametrize("way", ["cell", "time"])
@pytest.mark.parametrize("code", FREEING)
def test_an_old_object_that_is_deleted_dies_at_once(notebook: Kernel, code: str, way: str) -> None:
    run_quietly(notebook, OBJECT)
    whole_scope(notebook, way, code)
    assert notebook.value("seen[0]") is True
    assert existing_names(notebook, "thing") == []


@pytest.mark.parametrize("binding", ["x = n", "def x(): pass"])
@pytest.mark.parametrize(
    "sweep",
    [
        "for n in (1, 2):\n    with ipygpumem.experiment('i', report='none'):\n        {}",
        """\
for n in (1, 2):
    %experiment start i --report none
    {}
    %experiment end""",
        """\
%%capture
for n in (1, 2):
    with ipygpumem.experiment('i', report='none'):
        {}""",
        """\
for n in (1, 2):
    e = made('i', report='none').start()
    {}
    e.finish()""",
    ],
)
def test_a_scope_inside_a_loop_restores_shadowed_names(
    notebook: Kernel, sweep: str, binding: str
) -> None:
    run_quietly(
        notebook,
        """
        import ipygpumem
        made = ipygpumem.experiment
        x = saved = object()
        """,
        sweep.format(binding),
    )
    assert notebook.value("x is saved") is True
    run_quietly(notebook, START, sweep.format(binding), END)
    assert notebook.value("x is saved") is True


KEEP = """\
%%experiment a --keep best,loss* --keep '?_end'
best = 2
loss_1 = 3
a_end = 4
x = 5"""
MODULE = "from math import pi\nimport json"
NOTEBOOKS = {
    "global in one cell": (
        ["old = 1", START, "old = 2\nnew = 3", "global old, new", "old = 4", END],
        {"old": 4, "new": 3},
    ),
    "global in an inner scope": (
        [START, "%%experiment inner\nglobal x\nx = 1", "y = 2", END],
        {"x": 1},
    ),
    "global in an outer scope": (
        ["x = 0", START, "global x\nx = 1", "%%experiment inner --keep x\nx = 2", END],
        {"x": 2},
    ),
    "keep": (["best = 1", KEEP], {"best": 2, "loss_1": 3, "a_end": 4}),
    "imports that are dropped": (
        ["import os", f"%%experiment a --drop-imports\n{MODULE}, os"],
        {"os": "module"},
    ),
    "an import of a name to be bound later": (
        [START, "from math import pi", "if 0: pi = 3", END],
        {"pi": "float"},
    ),
    "an outer end": (
        ["x = 1", START, "x = 2", "%experiment start b", "x = 3\ny = 4", "%experiment end a"],
        {"x": 1},
    ),
    "a start with an open name": (
        [
            "x = 1",
            START,
            "x = 2\ny = 3",
            "%experiment start b",
            START,
            "assert x == 1",
            "%%experiment a\ny = 6",
        ],
        {"x": 1},
    ),
    "an object dies though a later cell binds its name": (
        [
            "x, y = {1}, []",
            START,
            "import weakref; y = weakref.ref(x); del x",
            "assert y() is None",
            "x = 5",
            END,
        ],
        {"y": [], "weakref": "module"},
    ),
    "bindings that do not happen": (
        [
            "import os\ndef change(value): globals().update(lr=value)\nlr = 1",
            "%%experiment a\nlr = os.environ.get('HOME') or (lr := 0.1)",
            "assert lr == 1",
            """\
%%experiment a
%%time
try: change(2)
except ValueError as lr: pass
for lr in []: pass""",
            "del change",
        ],
        {"lr": 2, "os": "module"},
    ),
    "an import that fails of a name that a function binds": (
        [
            "def f(): globals().update(nosuch=1)",
            "%%experiment a\ntry: import nosuch\nexcept ImportError: f()",
            "del f",
        ],
        {},
    ),
    "an inner cell": (
        [
            "x = y = 1",
            START,
            """\
%%experiment b
%%memlines
x = 9
y = 9""",
            "exec('x = 3')",
            "del y",
            END,
        ],
        {"x": 3},
    ),
    "a scope begins and ends in the middle of cells": (
        [
            "x = y = 1",
            """\
x = 2
%experiment start a
x = 3
new = y""",
            "more = 4",
            "last = 5\n%experiment end\ny = 4",
        ],
        {"x": 2, "y": 4},
    ),
    "a scope of Python begins and ends in one line": (
        [
            "import ipygpumem\ns = ipygpumem.experiment('a')\nx = y = 1",
            "x = 5\ns.start(); x = 6; s.finish(); y = 7",
        ],
        {"x": 5, "y": 7, "ipygpumem": "module", "s": "Experiment"},
    ),
    "a cell that ends its own scope": (
        [
            "x = 1",
            """\
%%experiment a
x = 2
%experiment end
y = x""",
        ],
        {"x": 1, "y": 1},
    ),
    "other magics": (
        ["x = 1", START, "%time x, y = 2, 3", "%%capture\nx, z = 4, 5", END],
        {"x": 1},
    ),
    "names in timeit": (
        ["x = 1", START, "%%timeit -n1 -r1\nx = 2", "%timeit -n1 -r1 x = 3", END],
        {"x": 1},
    ),
    "reset": ([START, "x = 1", "%reset -f", "y = 2", END], {}),
    "a cell inside a capture": (
        [
            """\
%%capture out
%%experiment a
x = 1
print(x)""",
            "out = out.stdout",
        ],
        {"out": "1\n"},
    ),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_names_after_the_cells_of_a_notebook(notebook: Kernel, name: str) -> None:
    cells, left = NOTEBOOKS[name]
    run_quietly(notebook, *cells)
    assert user_values(notebook) == left
    assert open_experiments(notebook) == []


def test_a_scope_owns_private_names_but_none_of_ipythons(notebook: Kernel) -> None:
    own = (
        "In",
        "Out",
        "_ih",
        "_oh",
        "_dh",
        "exit",
        "quit",
        "get_ipython",
        "_",
        "__",
        "___",
        "_i",
        "_ii",
        "_iii",
    )
    run_quietly(notebook, "_old = 1", "'an output'")
    number = notebook.value("len(In) - 1")
    run_quietly(
        notebook,
        START,
        "1",
        "%cd -q .",
        "!true",
        """
        _new = 1
        __both__ = 2
        _old = 3
        _x, _1a = 4, 5
        """,
        END,
    )
    assert existing_names(notebook, *own, "_new", "__both__", "_x", "_1a") == list(own)
    assert notebook.value("In is _ih and Out is _oh and _old") == 1
    assert notebook.value(f"_i{number}") == "'an output'"
    run_quietly(notebook, "del _old")


def test_outputs_of_the_scope_are_gone_and_earlier_ones_are_back(kernel: Kernel) -> None:
    assert run_quietly(kernel, experiment("11", name="a"), "x = 1").result is None
    assert kernel.value("(_, __, ___)") == ("", "", "")
    assert kernel.value("dict(Out)") == {}
    run_quietly(
        kernel, "11", "22", "33", "keys = set(Out)", START, "44", "assert _ == 44", "55", END
    )
    assert kernel.value("(_, __, ___)") == (33, 22, 11)
    assert kernel.value("set(Out) == keys") is True
    assert (
        kernel.value(
            "[n for n in globals() if n[0] == '_' and n[1:].isdigit() and globals()[n] in (44, 55)]"
        )
        == []
    )
    assert (
        run_quietly(
            kernel,
            """
            %%experiment b
            for _ in range(3): pass
            66
            """,
        ).result
        == "66"
    )
    assert kernel.value("(_, __, ___)") == (33, 22, 11)
    assert kernel.value("set(Out) == keys") is True
    run_quietly(kernel, "77")
    assert kernel.value("(_, __, ___)") == (77, 33, 22)
    run_quietly(kernel, "_ = 'mine'", experiment("22", name="a"))
    assert kernel.value("_") == "mine"


WEAK = """
import weakref
class Big: pass
alive = weakref.WeakSet()
def big():
    alive.add(one := Big())
    return one
"""


@pytest.mark.parametrize(
    "cells",
    [
        [START, "t = big()\nt", "u = _", "[u]", END],
        ["%%experiment b\nt = big()\nt"],
        [
            START,
            """\
try:
    big()
finally:
    pass
big()""",
            "_.ref = weakref.ref(_)",
            END,
        ],
        # Seen: the first outputs of a kernel stayed, since `_` is an empty text before them and
        # after a flush.
        ["1", "%reset -f out", START, "big()", "big()", "%reset -f out", END],
        ["1", "%reset -f out", "big()", "big()", "%reset -f out", "%gpumem free"],
    ],
)
def test_an_output_object_dies_with_its_scope(notebook: Kernel, cells: list[str]) -> None:
    run_quietly(notebook, WEAK, *cells)
    assert notebook.value("len(alive)") == 0
    assert run_quietly(notebook, "41", "_").result == "41"


def test_a_scope_restores_the_last_outputs_after_cache_changes(kernel: Kernel) -> None:
    nested = "get_ipython().run_cell('222', store_history=False); 333"
    run_quietly(kernel, "111", nested)
    assert kernel.value("(_, __)") == (333, 222)
    run_quietly(
        kernel,
        experiment("444", name="a"),
        START,
        "555",
        "get_ipython().run_cell('666', store_history=False)",
        END,
    )
    assert kernel.value("(_, __)") == (333, 222)
    run_quietly(kernel, START, "del Out[max(Out)]", "777", END)
    assert kernel.value("(_, __)") == (333, 222)


def test_status_and_report_show_values_to_be_restored(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np
        big = np.ones(4 << 20)
        """,
        START,
        "big = 1",
    )
    (text,) = run_quietly(notebook, "%experiment status").reports("note")
    assert "restored at the end: big 32 MiB" in text
    assert "names: big" in text
    (text,) = run_quietly(notebook, END).reports("experiment")
    assert "(big) took 32 MiB while the experiment ran" in text
    assert notebook.value("big.size") == 4 << 20


def test_the_earlier_object_of_a_kept_name_is_not_restored(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np
        big = np.ones(4 << 20); other = np.ones(2 << 20)
        """,
    )
    run_quietly(notebook, f"{START} --keep big", "big = 1; other = 2")
    (text,) = run_quietly(notebook, "%experiment status").reports("note")
    assert "restored at the end: other 16 MiB" in text
    assert "kept names, whose earlier objects stay until the end: big 32 MiB" in text
    (text,) = run_quietly(notebook, END).reports("experiment")
    assert "the restored objects (other) took 16 MiB while the experiment ran" in text
    assert "the earlier objects of kept names (big) took 32 MiB until the experiment's end" in text
    assert notebook.value("(big, other.size)") == (1, 2 << 20)


def test_a_name_that_keeps_its_object_is_not_restored(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import numpy as np
        log = []
        """,
        START,
        "log += [np.ones(4 << 20)]",
    )
    (text,) = run_quietly(notebook, "%experiment status").reports("note")
    assert "restored" not in text
    (text,) = run_quietly(notebook, END).reports("experiment")
    assert "del log[0]" in text
    assert "while the experiment ran" not in text


def test_errors_end_an_experiment_cell_but_no_open_scope(notebook: Kernel) -> None:
    run_quietly(notebook, ANNOUNCE + "old = 1", START, "x = 1")
    odd = "raise type('E', (Exception,), {'__str__': lambda s: 1/0})()"
    errors = {
        "z = = 3": "SyntaxError",
        "raise SystemExit(3)": "SystemExit",
        "%nosuchmagic": None,
        odd: "",
        "1 / 0": "",
    }

    # In the open scope, and in a cell's own inside it.
    for body, error in errors.items():
        for head in ("", "%%experiment inner\n"):
            reply = run_failing(notebook, f"{head}old = 2\ny = 2\n{body}", error)
            assert "/ipygpumem/" not in reply.traceback
            assert open_experiments(notebook) == ["a"]
    assert (
        run(notebook, "z = 3\nannounce()", interrupt_when="waits here").error == "KeyboardInterrupt"
    )

    # The inner scope restores `x` and `inner`; `old` is still shadowed by the open one.
    run_failing(
        notebook,
        """
        %%experiment inner
        x = 2
        inner = 3
        1 / 0
        """,
        "ZeroDivisionError",
    )
    assert open_experiments(notebook) == ["a"]
    values = notebook.value("{'x': x, 'y': y, 'z': z, 'old': old}")
    assert values == {"x": 1, "y": 2, "z": 3, "old": 2}
    assert existing_names(notebook, "inner") == []

    # The end of the open scope restores the rest.
    run_quietly(notebook, END)
    assert notebook.value("old") == 1
    assert existing_names(notebook, "x", "y", "z") == []


def test_the_users_input_transformers_see_the_original_code(notebook: Kernel) -> None:
    sees = """\
class Sees(ast.NodeTransformer):
    def visit(self, node):
        seen.append(ast.unparse(node))
"""
    run_quietly(
        notebook,
        f"import ast\nseen, x = [], 1\n{sees}        return node\nfound = "
        f"get_ipython().ast_transformers",
    )
    run_quietly(
        notebook,
        "found.append(Sees())",
        START,
        """
        x = int(2)
        del x
        """,
    )
    assert notebook.value("seen[-1]") == "x = int(2)\ndel x"
    run_quietly(
        notebook,
        """
        class Fails(ast.NodeTransformer):
            def visit(self, node): raise ValueError('no')
        """,
    )
    run_quietly(notebook, "found[-1] = Fails()", "1", "x = 2", END)
    assert notebook.value("x") == 1


def test_a_traceback_is_the_same_with_and_without_the_extension(
    kernel: Kernel, bare_kernel: Kernel
) -> None:
    define = "def f(n):\n    return 1 / n\nx = 1"
    run_quietly(kernel, define, START)
    run_quietly(bare_kernel, "1", define, "2")  # as many cells
    for body in (
        "x = f(0)",
        "x = y = 1 + f(0)",
        "for x in f(0): pass",
        "if f(0): x = 1",
        "a, x = 5",
    ):
        error = "TypeError" if "5" in body else "ZeroDivisionError"
        ours = run_failing(kernel, f"y = 1\n{body}", error)
        bare = run_failing(bare_kernel, f"y = 1\n{body}", error)
        # IPython 7 names a cell after the kernel's process.
        shown = [re.sub(r"kernel_\d+", "", reply.traceback) for reply in (ours, bare)]
        # Without columns in tracebacks, IPython 8 highlights no expression in our code.
        if sys.version_info < (3, 11):
            shown = list(map(plain, shown))
        assert shown[0] == shown[1], body


def test_cells_that_load_or_unload_the_extension_go_on(bare_kernel: Kernel) -> None:
    nested = "get_ipython().run_cell({!r})"
    for load in ("%load_ext ipygpumem", "%reload_ext ipygpumem"):
        run_quietly(
            bare_kernel, "x = 1", f"{load}\n{nested.format(START)}\n{nested.format('x = 5')}", END
        )
        assert bare_kernel.value("x") == 1
    run_quietly(bare_kernel, START)
    assert (
        bare_kernel.run("""
        %unload_ext ipygpumem
        x = int(2)
        x
        """).result
        == "2"
    )
    assert bare_kernel.run("(x, '__ipygpumem_names__' in dir(__builtins__))").result == "(2, False)"


def test_a_deletion_in_a_try_that_is_taken_back_is_none(notebook: Kernel) -> None:
    run_quietly(notebook, "x = saved = object()", START)
    run_failing(
        notebook,
        """
        %%autofit n=2
        del x
        x = 1
        raise MemoryError
        """,
        None,
    )
    assert notebook.value("x is saved") is True
    run_quietly(notebook, END)
    assert notebook.value("x is saved") is True
    run_quietly(
        notebook,
        START,
        """
        %%autofit n=2
        del x
        x = n
        if n > 1: raise MemoryError
        """,
        END,
    )
    assert existing_names(notebook, "x") == []


def test_timed_code_is_not_made_slower(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        x = 1
        names = []
        """,
        START,
    )
    timed = "%timeit -n1 -r1 names.append(__import__('sys')._getframe().f_code.co_names); x = 2"
    run_quietly(notebook, timed, END, timed)
    assert notebook.value("(names[0] == names[1], x)") == (True, 1)
