"""What IPython can do with a cell, in a scope: magics, macros, silent cells, top-level await."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.steps import goes_on, names, open_now, run, works
from tests.kernel import Kernel


@pytest.mark.parametrize(
    "code",
    [
        "",
        " ",
        "\n\n",
        "# only a comment",
        "pass;",
        "1;",
        "%%experiment a",
        "%%experiment a\n",
        "%%experiment a\n  \n\n",
        "%%experiment a\n# a comment",
        "\n\n%%experiment a\nx = 1",
        "%%experiment a\nx = 1;",
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


def test_rerun_macro_and_recalled_cells_are_the_scopes_too(notebook: Kernel) -> None:
    works(notebook, "x = 'old'")
    count = int(works(notebook, "get_ipython().execution_count").result or 0)
    works(notebook, "x = 'inner'; n = 1")
    works(notebook, f"%macro -q m {count}")
    works(notebook, "x = 'old'\ndel n")
    works(notebook, "%experiment start a")
    works(notebook, "m")
    assert notebook.value("x") == "inner"
    works(notebook, "%experiment end")
    assert (notebook.value("x"), names(notebook)) == ("old", ["m", "x"])
    works(notebook, "%experiment start b")
    works(notebook, f"%rerun {count}")
    assert notebook.value("x") == "inner"
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    goes_on(notebook)


def test_a_nested_cell_is_counted_once_in_the_record(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem")
    works(notebook, "%%experiment a\nget_ipython().run_cell('x = 1')\nx")
    assert notebook.value("len(ipygpumem.experiments()[-1].cells)") == 1
    assert notebook.value("ipygpumem.experiments()[-1].cells[0].execution_count is not None") is True


@pytest.mark.parametrize(
    "code",
    [
        "%%capture\n%%experiment a\nx = 1",
        "%%time\n%%experiment a\nx = 1",
        "%%experiment a\n%%time\nx = 1",
        "%%experiment a\n%%capture\nx = 1",
        "%%experiment a\n%%experiment b\nx = 1",
        "%%experiment a\n%%experiment b\n%%time\nx = 1",
        "%%experiment a\n%%bash\necho x",
        "%%experiment a\n%%writefile FILE\nx = 1",
        "%%experiment a\n%%html\n<i>x</i>",
        "%%experiment a\n%%timeit -n 1 -r 1\nx = 1",
        "%%timeit -n 2 -r 2\n%%experiment a\nx = 1",
        "get_ipython().run_cell_magic('experiment', 'a', 'x = 1')",
        "get_ipython().run_cell('%%experiment a\\nx = 1')",
        "%%experiment a\n%run FILE2",
        "%%experiment a --keep 'n*'\n\n\nx = 1",
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


def test_a_task_that_outlives_its_cell_can_bind_names_later(notebook: Kernel) -> None:
    works(
        notebook,
        "import asyncio\nasync def later():\n    global late\n    await asyncio.sleep(0.1)\n    late = 1\ntask = None",
    )
    works(notebook, "%%experiment a\nbackground = asyncio.ensure_future(later())")
    works(notebook, "while 'late' not in globals(): await asyncio.sleep(0.01)")
    assert "late" in names(notebook)
    goes_on(notebook)
