"""Programs that are long, deep or odd."""

from __future__ import annotations

import pytest

from tests.bad_input.steps import names, run, works
from tests.kernel import Kernel


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


def test_ten_thousand_names_and_a_huge_cell_are_no_trouble(notebook: Kernel) -> None:
    works(notebook, "%%experiment a\n" + "\n".join(f"name{i} = {i}" for i in range(10_000)))
    assert names(notebook) == []


def test_a_long_list_costs_an_exit_no_memory_of_its_own(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem")
    works(notebook, "%experiment start a")
    works(notebook, "big = list(range(8_000_000))")
    works(notebook, "%experiment end")
    works(notebook, "record = ipygpumem.experiments()[-1]\n(usage,) = [u for u in record.usages if u.device == 'cpu']")
    consumed = notebook.value("record.consumed['cpu']")
    assert consumed > 250 << 20
    assert notebook.value("usage.peak_delta_bytes") < consumed + (30 << 20)


def test_a_name_deleted_and_bound_again_in_a_cell_that_fails_is_the_scopes(notebook: Kernel) -> None:
    works(notebook, "x = object()")
    works(notebook, "%experiment start a")
    assert run(notebook, "del x\nx = object()\n1/0").error == "ZeroDivisionError"
    works(notebook, "%experiment end")
    assert names(notebook) == []
