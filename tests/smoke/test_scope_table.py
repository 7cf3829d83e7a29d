"""Every row of the table in docs/experiments.md: what becomes of a scope's names at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.kernel import Kernel
from tests.smoke.steps import exist, ok

_WAYS = {"cell": "%%experiment a\n{}", "start": "{}", "time": "%%time\n{}"}
"""How a scope's cell is written: as its own experiment, inside an open one, and there inside another magic."""

_BINDING = {
    "assignment": "x = 1",
    "chained": "y = x = 1",
    "unpacking": "x, *y = 1, 2",
    "in_brackets": "[x, [y]] = 1, [2]",
    "augmented": "x = ''\nx += 'a'",
    "annotated": "x: int = 1",
    "for": "for x in range(3):\n    pass\nelse:\n    y = 1",
    "async_for": "async def many():\n    yield 1\nasync for x in many():\n    pass",
    "with": "import contextlib\nwith contextlib.nullcontext(1) as x:\n    pass",
    "async_with": "import contextlib\nasync with contextlib.AsyncExitStack() as x:\n    pass",
    "def": "def x():\n    return 1",
    "async_def": "async def x():\n    return 1",
    "class": "class x:\n    y = 1",
    "walrus": "print(x := 1)",
    "walrus_in_comprehension": "y = [x := i for i in range(3)]",
    "except": "try:\n    1 / 0\nexcept ZeroDivisionError as x:\n    pass",
    "match": "match [1, 2]:\n    case [1, *x]:\n        pass",
    "match_as": "match 1:\n    case int() as x:\n        pass",
    "match_rest": "match {'a': 1}:\n    case {**x}:\n        pass",
    "block": "if True:\n    while True:\n        x = 1\n        break",
    "magic": "x = %env HOME",
}
if "getoutput" in TransformerManager().transform_cell("x = !echo 1"):  # not IPython 7.34 and 8.12 on Python 3.12
    _BINDING["system"] = "x = !echo 1"
if sys.version_info >= (3, 11):
    _BINDING["except_group"] = "try:\n    raise ExceptionGroup('', [ValueError()])\nexcept* ValueError as x:\n    pass"
if sys.version_info >= (3, 12):
    _BINDING["type"] = "type x = int"
    _BINDING["generic"] = "def x[T](a: T) -> T:\n    return a"


def _run(kernel: Kernel, way: str, code: str) -> None:
    """Run ``code`` in a scope from beginning to end."""
    if way != "cell":
        ok(kernel, "%experiment start a")
    ok(kernel, _WAYS[way].format(code))
    if way != "cell":
        ok(kernel, "%experiment end")


_IN_MAGICS = ("assignment", "for", "def", "except", "walrus_in_comprehension")
_FORMS = [(name, way) for name in _BINDING for way in _WAYS if way != "time" or name in _IN_MAGICS]


@pytest.mark.parametrize(("code", "way"), [(_BINDING[name], way) for name, way in _FORMS], ids=map("-".join, _FORMS))
def test_a_new_name_is_deleted_and_an_old_one_names_its_object_again(notebook: Kernel, code: str, way: str) -> None:
    _run(notebook, way, code)
    assert exist(notebook, "x", "y", "many") == []
    ok(notebook, "x = saved = object()\ny = 'outer'")
    _run(notebook, way, code)
    assert notebook.value("(x is saved, y)") == (True, "outer")


@pytest.mark.parametrize("way", _WAYS)
def test_what_a_function_or_a_comprehension_binds_is_not_the_cells(notebook: Kernel, way: str) -> None:
    ok(notebook, "x = saved = object()\ni = 'outer'")
    _run(notebook, way, "def f(x):\n    i = x\n    return i\nf(1)\nz = [i for i in range(3)]\nx: int")
    assert notebook.value("(x is saved, i)") == (True, "outer")


@pytest.mark.parametrize("way", _WAYS)
def test_a_global_statement_leaves_a_name_to_the_notebook(notebook: Kernel, way: str) -> None:
    ok(notebook, "old = 1")
    _run(notebook, way, "global old, new\nold = 2\nnew = 3\nother = 4")
    assert notebook.value("(old, new)") == (2, 3)
    assert exist(notebook, "other") == []


def test_a_global_statement_in_one_cell_holds_for_the_scopes_other_cells(notebook: Kernel) -> None:
    ok(notebook, "old = 1", "%experiment start a", "old = 2\nnew = 3", "global old, new", "old = 4", "%experiment end")
    assert notebook.value("(old, new)") == (4, 3)


def test_a_global_statement_in_an_inner_scope_leaves_the_name_to_the_notebook(notebook: Kernel) -> None:
    ok(notebook, "%experiment start outer", "%%experiment inner\nglobal x\nx = 1", "y = 2", "%experiment end")
    assert exist(notebook, "x", "y") == ["x"]


def test_names_and_globs_given_to_keep_stay_with_the_scopes_values(notebook: Kernel) -> None:
    ok(notebook, "best = 1", "%%experiment a --keep best,loss* --keep '?_end'\nbest = 2\nloss_1 = 3\na_end = 4\nx = 5")
    assert notebook.value("(best, loss_1, a_end)") == (2, 3, 4)
    assert exist(notebook, "x") == []


def test_keep_can_be_said_inside_the_scope(notebook: Kernel) -> None:
    ok(notebook, "%experiment start a", "x = 1\nyes = 2\nyet = 3\nz = 4", "%experiment keep x 'y*'", "%experiment end")
    assert exist(notebook, "x", "yes", "yet", "z") == ["x", "yes", "yet"]


def test_a_kept_name_belongs_to_the_enclosing_scope(notebook: Kernel) -> None:
    ok(notebook, "old = 1", "%experiment start outer")
    ok(notebook, "%%experiment inner --keep old --keep new\nold = 2\nnew = 3")
    assert notebook.value("(old, new)") == (2, 3)
    ok(notebook, "%experiment end")
    assert notebook.value("old") == 1
    assert exist(notebook, "new") == []


@pytest.mark.parametrize("way", _WAYS)
def test_imports_stay(notebook: Kernel, way: str) -> None:
    _run(notebook, way, "import json, os.path as p\nfrom math import pi, e as euler\nx = 1")
    assert exist(notebook, "json", "p", "pi", "euler", "x") == ["json", "p", "pi", "euler"]


def test_drop_imports_deletes_the_names_of_imports_too(notebook: Kernel) -> None:
    ok(notebook, "import math", "%%experiment a --drop-imports\nimport json, os.path\nfrom math import pi\nimport math")
    assert exist(notebook, "json", "os", "pi", "math") == ["math"]
    ok(notebook, "%experiment start b --drop-imports", "import json\nfrom math import pi", "%experiment end")
    assert exist(notebook, "json", "pi") == []


def test_imports_of_an_inner_scope_are_dropped_by_an_outer_one_that_drops_its_own(notebook: Kernel) -> None:
    ok(notebook, "%experiment start outer --drop-imports", "%%experiment inner\nimport json")
    assert exist(notebook, "json") == ["json"]
    ok(notebook, "%experiment end")
    assert exist(notebook, "json") == []


@pytest.mark.parametrize(
    "code",
    [
        "exec('new = 1')",
        "globals()['new'] = 1",
        "globals().update(new=1)",
        "get_ipython().push({'new': 1})",
        "get_ipython().run_cell('new = 1')",
        "def f():\n    global new\n    new = 1\nf()",
        "from string import *",
        "%run script.py",
        "%run -i script.py",
        "%%capture new\nprint(1)",
        "%%capture\nnew = 1",
        "%%prun -q\nnew = 1",
        "%time new = 1",
        "%store -r new",
    ],
)
@pytest.mark.parametrize("way", ["cell", "start"])
def test_a_new_name_that_appears_by_other_means_is_deleted(
    notebook: Kernel, tmp_path: Path, code: str, way: str
) -> None:
    (tmp_path / "script.py").write_text("new = 1\n")
    code = code.replace("script.py", f"'{tmp_path / 'script.py'}'")
    ok(notebook, "before = set(globals())")
    _run(notebook, way, code)
    assert notebook.value("sorted(n for n in set(globals()) - before if not n.startswith('_') and n != 'before')") == []


@pytest.mark.parametrize("way", _WAYS)
def test_an_old_name_that_a_function_changes_is_left_alone(notebook: Kernel, way: str) -> None:
    ok(notebook, "counter = 0\ndef count():\n    global counter\n    counter += 1")
    _run(notebook, way, "count()\ncount()")
    assert notebook.value("counter") == 2


@pytest.mark.parametrize("way", _WAYS)
def test_mutation_is_how_results_leave_a_scope(notebook: Kernel, way: str) -> None:
    ok(notebook, "results, d = [], {}\nclass Box: pass\nbox = Box()")
    _run(notebook, way, "results.append(1)\nd['k'] = 2\nd['l'], box.value = 3, 4")
    assert notebook.value("(results, d, box.value)") == ([1], {"k": 2, "l": 3}, 4)


_OBJECT = "import weakref\nclass Thing: pass\nthing = Thing()\ndead = weakref.ref(thing)\nseen = []"


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("rest", ["", "\nthing = 5", "\nfor thing in range(3): pass"])
def test_deleting_an_old_name_is_honoured_at_once(notebook: Kernel, way: str, rest: str) -> None:
    """The object dies in the very statement, and nothing comes back at the end of the scope."""
    ok(notebook, _OBJECT)
    _run(notebook, way, f"del thing\nseen.append(dead() is None){rest}")
    assert notebook.value("seen") == [True]
    assert exist(notebook, "thing") == []


def test_an_old_name_that_one_cell_deletes_and_a_later_one_binds_is_new(notebook: Kernel) -> None:
    ok(notebook, _OBJECT, "%experiment start a", "del thing")
    assert notebook.value("dead() is None") is True
    ok(notebook, "thing = 5", "%experiment end")
    assert exist(notebook, "thing") == []


def test_deleting_the_scopes_own_value_gives_the_old_object_back_at_the_end(notebook: Kernel) -> None:
    ok(notebook, "x = saved = object()", "%experiment start a", "x = 1", "del x")
    assert exist(notebook, "x") == []
    ok(notebook, "%experiment end")
    assert notebook.value("x is saved") is True
    ok(notebook, "%%experiment b\nx = 1\ndel x")
    assert notebook.value("x is saved") is True


def test_outputs_of_the_scope_are_gone_and_earlier_ones_are_back(kernel: Kernel) -> None:
    ok(kernel, "11", "22", "33", "keys = set(Out)")
    earlier = kernel.value("(_, __, ___)")
    assert earlier == (33, 22, 11)
    ok(kernel, "%experiment start a", "44", "55")
    assert kernel.value("_") == 55
    ok(kernel, "%experiment end")
    assert kernel.value("(_, __, ___)") == earlier
    assert kernel.value("set(Out) == keys") is True
    assert kernel.value("[n for n in globals() if n[0] == '_' and n[1:].isdigit() and globals()[n] in (44, 55)]") == []
    assert ok(kernel, "%%experiment b\n66").result == "66"
    assert kernel.value("(_, __, ___, set(Out) == keys)") == (*earlier, True)
    ok(kernel, "77")
    assert kernel.value("(_, __, ___)") == (77, 33, 22)


def test_an_output_object_dies_with_its_scope(notebook: Kernel) -> None:
    ok(notebook, "import weakref\nclass Thing: pass\nseen = []", "'earlier'")
    ok(
        notebook,
        "%experiment start a",
        "t = Thing()\nseen.append(weakref.ref(t))\nt",
        "u = _",
        "[u]",
        "%experiment end",
    )
    assert notebook.value("seen[0]() is None") is True
    ok(notebook, "%%experiment b\nt = Thing()\nseen.append(weakref.ref(t))\nt")
    assert notebook.value("seen[1]() is None") is True
    ok(notebook, "%experiment start c", "try:\n    Thing()\nfinally:\n    pass\nThing()", "_.ref = weakref.ref(_)")
    ok(notebook, "seen.append(_.ref)", "%experiment end")
    assert notebook.value("seen[2]() is None") is True


def test_an_underscore_that_the_scope_binds_itself_is_the_earlier_output_again(kernel: Kernel) -> None:
    ok(kernel, "11", "%%experiment a\nfor _ in range(3):\n    pass\n22")
    assert kernel.value("_") == 11
    ok(kernel, "33")
    assert kernel.value("(_, __)") == (33, 11)


def test_an_underscore_that_the_user_has_bound_stays_his(kernel: Kernel) -> None:
    ok(kernel, "11", "_ = 'mine'", "%%experiment a\n22")
    assert kernel.value("_") == "mine"


def test_a_scope_without_outputs_changes_no_output(kernel: Kernel) -> None:
    ok(kernel, "11", "22", "%%experiment a\nx = 1")
    assert kernel.value("(_, __)") == (22, 11)


def test_the_first_output_of_a_session_can_be_a_scopes(kernel: Kernel) -> None:
    ok(kernel, "%%experiment a\n11", "x = 1")
    assert kernel.value("(_, __, ___, dict(Out))") == ("", "", "", {})
