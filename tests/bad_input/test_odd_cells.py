"""Cells that are odd or fail, scopes that end in the wrong order, children, and loading at an odd moment."""

from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.steps import fails, goes_on, names, open_now, run, works

ODD = [
    *("", "# only a comment", "1;", "%%experiment a", "%%experiment a\n# a comment", "\n\n%%experiment a\nx = 1"),
    *("%%experiment a\r\nx = 1\r\n", "%%experiment\ta\nx = 1"),
    *("%%capture\n%%experiment a\nx = 1", "%%experiment a\n%%capture\nx = 1", "%%experiment a\n%%bash\necho x"),
    *("%%experiment a\n%%experiment b\n%%time\nx = 1", "%%timeit -n 2 -r 2\n%%experiment a\nx = 1"),
    *("%%experiment a\n%%writefile {0}/one.py\nx = 1", "%%experiment a\n%run {0}/two.py"),
    "get_ipython().run_cell_magic('experiment', 'a', 'x = 1')",
    "get_ipython().run_cell('%%experiment a\\nx = 1')",
]
FAILING = [
    *("%%experiment a\n%%nosuchmagic\nx = 1", "%%experiment a\n%%time\n1/0", "%%time\n%%experiment a\n1/0"),
    *("%%experiment a\n%%capture\n1/0", "%%experiment a\n%%bash\nexit 3"),
]
PRINTED = {"echo": "x\n", "%%time\n": "Wall time", "%%writefile": "Writing"}


@pytest.mark.parametrize("code", [*ODD, *FAILING])
def test_an_odd_cell_leaves_the_names_and_no_experiment_open(notebook: Kernel, tmp_path: Path, code: str) -> None:
    (tmp_path / "two.py").write_text("y = 1\n")
    works(notebook, "x = 'old'")
    reply = (works if code in ODD else run)(notebook, code.replace("{0}", str(tmp_path)))
    assert (notebook.value("x"), names(notebook), open_now(notebook)) == ("old", ["x"], [])
    if code in ODD:
        assert all(printed in reply.stdout for magic, printed in PRINTED.items() if magic in code)
    goes_on(notebook)


def test_silent_and_unrecorded_cells_run_in_a_scope(notebook: Kernel) -> None:
    works(notebook, "x = 'old'; y = 'old'", "%experiment start a")
    works(notebook, "x = 1\nx", silent=True)
    works(notebook, "y = 2\ny", store_history=False)
    works(notebook, "%experiment end")
    assert notebook.value("y") == "old"
    assert notebook.run("%%experiment b\nz = 1", silent=True).status == "error"
    assert "z" not in names(notebook)
    goes_on(notebook)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("y = (", "SyntaxError"),
        ("y = 1\nraise SystemExit(3)", "SystemExit"),
        ("y = 1\n%nosuchmagic", None),
        ("y = 1\nraise type('E', (Exception,), {'__str__': lambda s: 1/0})()", ""),
    ],
)
def test_an_error_ends_a_cell_scope_and_leaves_a_started_one_open(
    notebook: Kernel, body: str, error: str | None
) -> None:
    works(notebook, "x = 'old'")
    reply = fails(notebook, f"%%experiment a\nx = 'new'\n{body}", error)
    assert "/ipygpumem/" not in reply.traceback
    assert (notebook.value("x"), names(notebook), open_now(notebook)) == ("old", ["x"], [])
    works(notebook, "%experiment start b")
    reply = fails(notebook, f"x = 'new'\n{body}", error)
    assert "/ipygpumem/" not in reply.traceback
    assert open_now(notebook) == ["b"]
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    goes_on(notebook)


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "+".join(["2"] * 700),
        "x = 'a'" + ".strip()" * 450,
        "if 0: pass\n" + "elif x == 1: pass\n" * 700 + "x = 1",
    ],
    ids=["sum", "chain", "elif"],
)
def test_code_that_is_deep_enough_for_python_is_not_too_deep_for_a_scope(notebook: Kernel, code: str) -> None:
    works(notebook, "x = 'old'", code, "x = 'old'", "%experiment start a", code, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, f"%%experiment b\n{code}")
    assert notebook.value("x") == "old"


def test_python_scopes_finished_in_the_wrong_order_give_all_names_back(notebook: Kernel) -> None:
    works(
        notebook,
        "import ipygpumem\nx = 'old'",
        "a = ipygpumem.experiment('a').start()\nx = 'a'",
        "b = ipygpumem.experiment('b').start()\nx = 'b'; y = 1",
        "a.finish()",
        "ipygpumem.experiments()[-1].name == 'a' or 1/0",
        "z = 1",
    )
    assert (notebook.value("x"), open_now(notebook)) == ("old", [])
    assert "z" in names(notebook)
    assert "y" not in names(notebook)


def test_a_forked_child_in_a_scope_disturbs_nobody(notebook: Kernel) -> None:
    works(
        notebook,
        "%config IPyGpuMem.host_peak = 'sampled'",  # in a thread, which a child has not
        "import os\nx = 'old'",
        "%experiment start a",
        "x = 'new'\npid = os.fork()\nif pid == 0:\n    globals().clear(); import os; os._exit(0)\n"
        "done = os.waitpid(pid, 0)",
    )
    assert notebook.value("done[1]") == 0
    works(notebook, "%experiment end", "%config IPyGpuMem.host_peak = 'kernel'")
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_what_a_forked_child_shows_is_text(notebook: Kernel) -> None:
    """A kernel's messages cannot be sent by a child: they are printed."""
    reply = works(
        notebook,
        "import os, multiprocessing, ipygpumem\n"
        "def work():\n"
        "    with ipygpumem.experiment('forked'): y = 1\n"
        "process = multiprocessing.get_context('fork').Process(target=work); process.start(); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert "msg_id" not in reply.stdout + reply.stderr
    assert "experiment forked" in reply.stdout
    assert reply.reports("experiment") == []


def test_outputs_after_a_reset_in_a_scope_are_gone_at_its_end(notebook: Kernel) -> None:
    thing = (
        "import weakref, builtins\nclass Thing: pass\nthing = Thing()\nbuiltins.test_ref = weakref.ref(thing)\nthing"
    )
    works(notebook, *map(str, range(6)), "%experiment start a", "%reset -f", thing, "7 * 7", "%experiment end")
    assert notebook.value("(__import__('builtins').test_ref() is None, Out)") == (True, {})
    goes_on(notebook)


def test_unloading_works_after_the_user_cleared_ipythons_callbacks_and_lists() -> None:
    with Kernel() as kernel:
        works(
            kernel,
            "%load_ext ipygpumem",
            "ip = get_ipython()\nip.events.callbacks['post_run_cell'].clear()\n"
            "ip.events.callbacks['pre_run_cell'].clear()\n"
            "ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()\n"
            "ip.magics_manager.magics['line'].pop('experiment')",
        )
        lines = works(kernel, "%unload_ext ipygpumem").stderr.splitlines()
        assert [line for line in lines if not line.startswith("ipygpumem: unloading: ")] == []
        works(kernel, "%load_ext ipygpumem", "2", "%experiment start a\n%experiment end")
