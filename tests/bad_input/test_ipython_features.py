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
