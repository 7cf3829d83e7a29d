"""Cells that are odd or fail, scopes that end in the wrong order, children, and loading at an odd moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.steps import goes_on, names, open_now, run, works
from tests.kernel import Kernel

# -- what ipython can do with a cell, in a scope ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "",
        "# only a comment",
        "1;",
        "%%experiment a",
        "%%experiment a\n# a comment",
        "\n\n%%experiment a\nx = 1",
        "%%experiment a\r\nx = 1\r\n",
        "%%experiment\ta\nx = 1",
    ],
)
def test_cells_with_little_in_them_run(notebook: Kernel, code: str) -> None:
    works(notebook, code)
    assert names(notebook) == []
    assert "no experiment is open" in open_now(notebook)
    goes_on(notebook)


def test_silent_and_unrecorded_cells_run_in_a_scope(notebook: Kernel) -> None:
    works(notebook, "x = 'old'; y = 'old'")
    works(notebook, "%experiment start a")
    works(notebook, "x = 1\nx", silent=True)
    works(notebook, "y = 2\ny", store_history=False)
    works(notebook, "%experiment end")
    assert notebook.value("y") == "old"
    refused_silently = notebook.run("%%experiment b\nz = 1", silent=True)
    assert refused_silently.status == "error"
    assert "z" not in names(notebook)
    goes_on(notebook)


@pytest.mark.parametrize(
    "code",
    [
        "%%capture\n%%experiment a\nx = 1",
        "%%experiment a\n%%capture\nx = 1",
        "%%experiment a\n%%experiment b\n%%time\nx = 1",
        "%%experiment a\n%%bash\necho x",
        "%%experiment a\n%%writefile FILE\nx = 1",
        "%%timeit -n 2 -r 2\n%%experiment a\nx = 1",
        "get_ipython().run_cell_magic('experiment', 'a', 'x = 1')",
        "get_ipython().run_cell('%%experiment a\\nx = 1')",
        "%%experiment a\n%run FILE2",
    ],
)
def test_cell_magics_before_and_after_a_cell_scope_work(notebook: Kernel, tmp_path: Path, code: str) -> None:
    (tmp_path / "two.py").write_text("x = 1\n")
    code = code.replace("FILE2", str(tmp_path / "two.py")).replace("FILE", str(tmp_path / "one.py"))
    reply = works(notebook, code)
    assert names(notebook) == []
    assert "no experiment is open" in open_now(notebook)
    if "%%writefile" in code:
        assert (tmp_path / "one.py").read_text() == "x = 1\n"
    if "echo" in code:
        assert reply.stdout == "x\n"
    if "%%time\n" in code:
        assert "Wall time" in reply.stdout
    goes_on(notebook)


@pytest.mark.parametrize(
    "code",
    [
        "%%experiment a\n%%nosuchmagic\nx = 1",
        "%%experiment a\n%%time\n1/0",
        "%%time\n%%experiment a\n1/0",
        "%%experiment a\n%%capture\n1/0",
        "%%experiment a\n%%bash\nexit 3",
    ],
)
def test_a_cell_magic_that_fails_in_a_cell_scope_ends_it(notebook: Kernel, code: str) -> None:
    works(notebook, "x = 'old'")
    run(notebook, code)
    assert "no experiment is open" in open_now(notebook)
    assert notebook.value("x") == "old"
    goes_on(notebook)


@pytest.mark.parametrize(
    "body",
    [
        "import asyncio\nx = await asyncio.sleep(0.01, 'new')\nx",
        "class M:\n    async def __aenter__(self): return 'new'\n    async def __aexit__(self, *a): pass\n"
        "async with M() as x: y = x\nx",
    ],
)
def test_top_level_await_binds_a_scopes_names(notebook: Kernel, body: str) -> None:
    works(notebook, "x = 'old'")
    reply = works(notebook, f"%%experiment a --drop-imports\n{body}")
    assert reply.result is not None
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    works(notebook, "%experiment start b --drop-imports")
    works(notebook, body)
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    reply = run(notebook, f"%%experiment a --drop-imports\n{body}\nawait asyncio.sleep(0)\n1/0")
    assert reply.status == "error"
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    goes_on(notebook)


# -- errors inside a scope -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("y = (", "SyntaxError"),
        ("y = 1\n1/0", "ZeroDivisionError"),
        ("y = 1\nraise SystemExit(3)", "SystemExit"),
        ("y = 1\nraise KeyboardInterrupt", "KeyboardInterrupt"),
        ("y = 1\n%nosuchmagic", None),
        ("y = 1\nraise type('E', (Exception,), {'__str__': lambda s: 1/0})()", None),
        ("y = '\\ud800'\nraise ValueError(y)", None),
        ("y = 1\nraise BaseException()", "BaseException"),
    ],
)
def test_an_error_ends_a_cell_scope_and_leaves_a_started_one_open(
    notebook: Kernel, body: str, error: str | None
) -> None:
    works(notebook, "x = 'old'")
    assert run(notebook, f"%%experiment a\nx = 'new'\n{body}").status == "error"
    assert "no experiment is open" in open_now(notebook)
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    works(notebook, "%experiment start b")
    reply = run(notebook, f"x = 'new'\n{body}")
    assert reply.status == "error"
    assert error is None or reply.error == error
    assert "experiment b" in open_now(notebook)
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["x"])
    goes_on(notebook)


# -- programs that are long, deep or odd -----------------------------------------------------------------------------


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
    works(notebook, "x = 'old'")
    works(notebook, code)
    works(notebook, "x = 'old'")
    works(notebook, "%experiment start a")
    works(notebook, code)
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, f"%%experiment b\n{code}")
    assert notebook.value("x") == "old"


# -- scopes that are ended in the wrong order, twice, or not at all --------------------------------------------------


def test_python_scopes_finished_in_the_wrong_order_give_all_names_back(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem\nx = 'old'")
    works(notebook, "a = ipygpumem.experiment('a').start()\nx = 'a'")
    works(notebook, "b = ipygpumem.experiment('b').start()\nx = 'b'; y = 1")
    works(notebook, "a.finish()")
    works(notebook, "ipygpumem.experiments()[-1].name == 'a' or 1/0")
    works(notebook, "z = 1")
    assert notebook.value("x") == "old"
    assert "y" not in names(notebook)
    assert "z" in names(notebook)
    assert "no experiment is open" in open_now(notebook)


def test_with_blocks_left_in_the_wrong_order_end_each_scope_once(notebook: Kernel) -> None:
    works(
        notebook,
        "import ipygpumem\n"
        "outer, inner = ipygpumem.experiment('outer'), ipygpumem.experiment('inner')\n"
        "outer.__enter__(); x = 1; inner.__enter__(); y = 2\n"
        "outer.__exit__(None, None, None); inner.__exit__(None, None, None)\n"
        "found = [record.name for record in ipygpumem.experiments()]",
    )
    assert notebook.value("found") == ["inner", "outer"]
    assert not {"x", "y"} & set(names(notebook))


def test_a_cell_scope_that_ends_itself_ends_once(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    reply = works(notebook, "%%experiment a\nx = 1\n%experiment end\ny = x")
    assert len(reply.reports("experiment")) == 1
    assert notebook.value("y") == "old"


# -- forked children, threads and subshells while a scope is open ----------------------------------------------------


@pytest.mark.parametrize("peak", ["kernel", "sampled"])
def test_a_forked_child_in_a_scope_disturbs_nobody(notebook: Kernel, peak: str) -> None:
    works(notebook, f"%config IPyGpuMem.host_peak = '{peak}'")
    works(notebook, "import os, multiprocessing, ipygpumem\nx = 'old'")
    works(notebook, "%experiment start a")
    works(
        notebook,
        "x = 'new'\npid = os.fork()\n"
        "if pid == 0:\n"
        "    globals().clear(); import os; os._exit(0)\n"
        "done = os.waitpid(pid, 0)",
    )
    assert notebook.value("done[1]") == 0
    works(
        notebook,
        "def work(queue):\n"
        "    import ipygpumem\n"
        "    session = ipygpumem.notebook.notebook.current_notebook()\n"
        "    queue.put((os.getpid(), session.host.read()[0].current_bytes))\n"
        "fork = multiprocessing.get_context('fork')\nqueue = fork.Queue()\n"
        "process = fork.Process(target=work, args=(queue,)); process.start()\n"
        "child, size = queue.get(timeout=20); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert notebook.value("child != os.getpid() and size > 1 << 20") is True
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, "%config IPyGpuMem.host_peak = 'kernel'")
    goes_on(notebook)


def test_what_a_forked_child_shows_is_text(notebook: Kernel) -> None:
    reply = works(
        notebook,
        "import os, multiprocessing, ipygpumem\n"
        "def work():\n"
        "    with ipygpumem.experiment('forked'): y = 1\n"
        "process = multiprocessing.get_context('fork').Process(target=work); process.start(); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert "msg_id" not in reply.stdout + reply.stderr, (
        "a kernel's messages cannot be sent by a child: they are printed"
    )
    assert "experiment forked" in reply.stdout
    assert reply.reports("experiment") == []
    goes_on(notebook)


# -- %reset in a scope; loading, reloading and unloading the extension at an odd moment ------------------------------


def test_outputs_after_a_reset_in_a_scope_are_gone_at_its_end(notebook: Kernel) -> None:
    for number in range(6):
        works(notebook, f"{number}")
    works(notebook, "import weakref\nclass Thing: pass\nrefs = []")
    works(notebook, "%experiment start a")
    works(notebook, "%reset -f")
    works(
        notebook,
        "import weakref, builtins\nclass Thing: pass\nthing = Thing()\nbuiltins.test_ref = weakref.ref(thing)\nthing",
    )
    works(notebook, "7 * 7")
    works(notebook, "%experiment end")
    assert notebook.value("__import__('builtins').test_ref() is None") is True
    assert notebook.value("Out") == {}
    goes_on(notebook)


def test_unloading_inside_a_cell_scope_leaves_the_names_and_loading_again_works(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a\nx = 1\n%unload_ext ipygpumem\ny = 2")
    assert "'a'" in reply.stderr
    assert names(notebook) == ["x", "y"]
    assert notebook.run("1").reports() == []
    assert notebook.run("%experiment status").status == "error"
    works(notebook, "%load_ext ipygpumem")
    goes_on(notebook)


def test_unloading_works_after_the_user_cleared_ipythons_callbacks_and_lists() -> None:
    with Kernel() as kernel:
        works(kernel, "%load_ext ipygpumem")
        works(
            kernel,
            "ip = get_ipython()\nip.events.callbacks['post_run_cell'].clear()\n"
            "ip.events.callbacks['pre_run_cell'].clear()\n"
            "ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()\n"
            "ip.magics_manager.magics['line'].pop('experiment')",
        )
        reply = works(kernel, "%unload_ext ipygpumem")
        lines = reply.stderr.splitlines()
        assert [line for line in lines if not line.startswith("ipygpumem: unloading: ")] == []
        works(kernel, "%load_ext ipygpumem")
        works(kernel, "2")
        works(kernel, "%experiment start a\n%experiment end")
