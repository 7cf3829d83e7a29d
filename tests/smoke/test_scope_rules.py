"""What docs/experiments.md says below its table."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import ANNOUNCE, exist, fails, ok, open_experiments, run

_SLOW_EXIT = f"""
{ANNOUNCE}
from ipygpumem.objects.garbage import Garbage
quick = Garbage.collect

def slow(self, since=None):
    Garbage.collect = quick
    announce()

Garbage.collect = slow
"""


def test_a_cell_may_read_an_outer_name_before_it_binds_it(notebook: Kernel) -> None:
    assert ok(notebook, "x = 1", "%%experiment a\nx = x + 1\nx").result == "2"
    assert notebook.value("x") == 1


def test_status_and_report_show_what_waits_to_be_restored(notebook: Kernel) -> None:
    ok(notebook, "import numpy as np\nbig = np.ones(4 << 20)", "%experiment start a", "big = 1")
    (text,) = ok(notebook, "%experiment status").reports("note")
    assert "waiting to be restored: big 32 MiB" in text
    assert "names: big" in text
    (text,) = ok(notebook, "%experiment end").reports("experiment")
    assert "restored: big" in text
    assert "(big) took 32 MiB while the experiment ran" in text
    assert notebook.value("big.size") == 4 << 20


@pytest.mark.parametrize("how", [("%experiment start a", "%experiment end"), ("pass", "%gpumem free")])
def test_outputs_that_were_flushed_go_with_their_hidden_copies(notebook: Kernel, how: tuple[str, str]) -> None:
    # Seen: the first outputs of a kernel stayed, since `_` is an empty text before them and after a flush.
    begin, end = how
    ok(notebook, "import weakref\nclass Big: pass\nalive = weakref.WeakSet()")
    ok(notebook, "def big():\n    alive.add(one := Big())\n    return one")
    ok(notebook, "1", "%reset -f out", begin, "big()", "big()", "%reset -f out", end)
    assert notebook.value("len(alive)") == 0
    ok(notebook, "41")
    assert notebook.value("_") == 41


def test_an_object_that_an_outside_name_refers_to_is_not_touched(notebook: Kernel) -> None:
    ok(notebook, "outside = {}", "%%experiment a\nalias = outside\nmine = []\noutside['mine'] = mine")
    assert notebook.value("outside") == {"mine": []}
    assert exist(notebook, "alias", "mine") == []


@pytest.mark.parametrize("code", ["%%time\nold, new = 2, 3", "%time old, new = 2, 3", "%%capture\nold, new = 2, 3"])
def test_code_inside_other_magics_counts(notebook: Kernel, code: str) -> None:
    ok(notebook, "old = 1", "%experiment start a", code, "%experiment end")
    assert notebook.value("old") == 1
    assert exist(notebook, "new") == []
    if code.startswith("%%"):
        ok(notebook, f"%%experiment a\n{code}")
        assert notebook.value("old") == 1
        assert exist(notebook, "new") == []


def test_names_in_timeit_never_reach_the_notebook(notebook: Kernel) -> None:
    ok(notebook, "old = 1", "%experiment start a", "%%timeit -n1 -r1\nold = 2", "%timeit -n1 -r1 old = 3")
    assert notebook.value("old") == 1
    ok(notebook, "%experiment end")
    assert notebook.value("old") == 1


def test_scopes_nest(notebook: Kernel) -> None:
    ok(notebook, "x = 1", "%experiment start outer", "x = 2\ny = 20", "%experiment start inner", "x = 3\nz = 30")
    assert open_experiments(notebook) == ["outer", "inner"]
    ok(notebook, "%experiment end")
    assert notebook.value("(x, y)") == (2, 20)
    assert exist(notebook, "z") == []
    ok(notebook, "%%experiment third\nx = 4\ny = 40\nz = 50")
    assert notebook.value("(x, y)") == (2, 20)
    ok(notebook, "%experiment end")
    assert notebook.value("x") == 1
    assert exist(notebook, "y", "z") == []


def test_a_name_that_only_an_inner_scope_shadowed_is_back_after_it(notebook: Kernel) -> None:
    ok(notebook, "x = 1", "%experiment start outer", "%experiment start inner", "x = 2", "%experiment end")
    assert notebook.value("x") == 1
    ok(notebook, "x = 3", "%experiment end")
    assert notebook.value("x") == 1


def test_ending_an_outer_scope_ends_those_inside(notebook: Kernel) -> None:
    ok(notebook, "x = 1", "%experiment start outer", "x = 2", "%experiment start inner", "x = 3\ny = 4")
    assert len(ok(notebook, "%experiment end outer").reports("experiment")) == 1
    assert open_experiments(notebook) == []
    assert notebook.value("x") == 1
    assert exist(notebook, "y") == []


def test_starting_a_name_that_is_open_finishes_the_open_one_first(notebook: Kernel) -> None:
    ok(notebook, "old = 1", "%experiment start a", "old = 2\nx = 3", "%experiment start b", "y = 4")
    ok(notebook, "%experiment start a")
    assert open_experiments(notebook) == ["a"]
    assert notebook.value("old") == 1
    assert exist(notebook, "x", "y") == []
    ok(notebook, "x = 5", "%%experiment a\nz = 6")
    assert open_experiments(notebook) == []
    assert exist(notebook, "x", "z") == []


def test_running_a_notebook_again_from_the_top_works(notebook: Kernel) -> None:
    cells = [
        "n = 1",
        "%experiment start a",
        "n = n + 1\nmodel = [n]",
        "%experiment end",
        "%%experiment b\nn = n * 10\nn",
    ]
    for _ in range(2):
        assert ok(notebook, *cells).result == "10"
    for _ in range(2):
        ok(notebook, *cells[:3])
        assert notebook.value("model") == [2]
    assert open_experiments(notebook) == ["a"]


def test_an_error_leaves_an_open_scope_open(notebook: Kernel) -> None:
    ok(notebook, "old = 1", "%experiment start a", "x = 1")
    fails(notebook, "old = 2\ny = 2\n1 / 0", "ZeroDivisionError")
    fails(notebook, "z = = 3", "SyntaxError")
    assert open_experiments(notebook) == ["a"]
    ok(notebook, "w = x + y + old")
    assert notebook.value("(w, x, y, old)") == (5, 1, 2, 2)
    ok(notebook, "%experiment end")
    assert notebook.value("old") == 1
    assert exist(notebook, "w", "x", "y") == []


def test_an_interrupt_leaves_an_open_scope_open(notebook: Kernel) -> None:
    ok(notebook, ANNOUNCE + "old = 1", "%experiment start a")
    assert run(notebook, "old = 2\nannounce()", interrupt_when="waits here").error == "KeyboardInterrupt"
    assert open_experiments(notebook) == ["a"]
    ok(notebook, "%experiment end")
    assert notebook.value("old") == 1


def test_an_error_ends_an_experiment_cell_inside_an_open_scope_only(notebook: Kernel) -> None:
    ok(notebook, "%experiment start outer", "x = 1")
    fails(notebook, "%%experiment inner\nx = 2\ny = 3\n1 / 0", "ZeroDivisionError")
    assert open_experiments(notebook) == ["outer"]
    assert notebook.value("x") == 1
    assert exist(notebook, "y") == []


def test_ipythons_own_names_are_never_a_scopes(notebook: Kernel) -> None:
    own = ("In", "Out", "_ih", "_oh", "_dh", "exit", "quit", "get_ipython", "_", "__", "___", "_i", "_ii", "_iii")
    ok(notebook, "'an output'")
    number = notebook.value("len(In) - 1")
    ok(notebook, "%experiment start a", "1", "%cd -q .", "!true", "2", "%experiment end")
    assert exist(notebook, *own) == list(own)
    assert notebook.value("In is _ih and Out is _oh and len(In) > 5") is True
    assert notebook.value("[name for name in globals() if name.startswith('_i') and name[2:].isdigit()] != []") is True
    assert notebook.value(f"_i{number}") == "'an output'"
    ok(notebook, "%%experiment a\nIn, exit\nexit = 5")
    assert notebook.value("In is _ih") is True


def test_names_with_an_underscore_that_the_cells_bind_are_the_scopes(notebook: Kernel) -> None:
    ok(notebook, "_old = 1", "%%experiment a\n_new = 1\n__both__ = 2\n_old = 3\n_x, _1a = 4, 5\ndef _f(): pass")
    assert exist(notebook, "_new", "__both__", "_x", "_1a", "_f") == []
    assert notebook.value("_old") == 1
    ok(notebook, "%experiment start b", "_new = 1\nfor _item in 'ab': pass", "%experiment end", "del _old")
    assert exist(notebook, "_new", "_item") == []


def test_an_interrupted_end_can_be_asked_for_again(notebook: Kernel) -> None:
    ok(notebook, "old = 1", _SLOW_EXIT, "%experiment start a", "old = 2\nnew = 3")
    assert run(notebook, "%experiment end", interrupt_when="waits here").error == "KeyboardInterrupt"
    assert open_experiments(notebook) == ["a"]
    assert len(ok(notebook, "%experiment end").reports("experiment")) == 1
    assert notebook.value("old") == 1
    assert exist(notebook, "new") == []


def test_an_interrupted_end_of_an_experiment_cell_can_be_asked_for_again(notebook: Kernel) -> None:
    ok(notebook, "old = 1", _SLOW_EXIT)
    reply = run(notebook, "%%experiment a\nold = 2\nnew = 3", interrupt_when="waits here")
    assert any("its end was interrupted" in text for text in reply.reports("note"))
    assert open_experiments(notebook) == ["a"]
    ok(notebook, "%experiment end")
    assert notebook.value("old") == 1
    assert exist(notebook, "new") == []


def test_a_scope_may_begin_and_end_in_the_middle_of_a_cell(notebook: Kernel) -> None:
    ok(notebook, "before = 1\nold = 1\n%experiment start a\nnew = 2\nold = 2", "more = 3")
    ok(notebook, "last = 4\n%experiment end\nafter = 5")
    assert exist(notebook, "before", "new", "more", "last", "after") == ["before", "after"]
    assert notebook.value("old") == 1
    ok(notebook, "for i in range(2):\n    %experiment start a\n    new = i\n    %experiment end\nold = 3")
    assert notebook.value("(i, old, 'new' in globals())") == (1, 3, False)


def test_an_experiment_cell_inside_a_capture_ends_with_its_own_cell(notebook: Kernel) -> None:
    ok(notebook, "%%capture out\n%%experiment a\nx = 1\nprint(x)")
    assert notebook.value("(out.stdout, 'x' in globals())") == ("1\n", False)
    assert open_experiments(notebook) == []


def test_resetting_the_namespace_inside_a_scope_does_not_disturb_its_end(notebook: Kernel) -> None:
    ok(notebook, "%experiment start a", "x = 1", "%reset -f", "y = 2", "%experiment end")
    assert exist(notebook, "x", "y") == []


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("%experiment end", "no experiment is open"),
        ("%experiment keep x", "no experiment is open"),
        ("%experiment", "a command is missing"),
        ("%experiment begin a", "begin"),
        ("%experiment start", "name"),
        ("%gpumem", "a command is missing"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(notebook: Kernel, line: str, mistake: str) -> None:
    reply = fails(notebook, line, None)
    assert mistake in reply.stderr
    assert len(reply.stderr.strip().splitlines()) == 1


def test_ending_a_scope_that_is_not_open_names_those_that_are(notebook: Kernel) -> None:
    ok(notebook, "%experiment start a")
    assert "'a'" in fails(notebook, "%experiment end b", None).stderr
    assert open_experiments(notebook) == ["a"]
