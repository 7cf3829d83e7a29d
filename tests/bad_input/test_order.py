"""Scopes that are ended in the wrong order, twice, or not at all."""

from __future__ import annotations

from tests.bad_input.steps import names, open_now, works
from tests.kernel import Kernel


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
