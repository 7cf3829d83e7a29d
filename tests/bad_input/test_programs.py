"""Programs that are long, deep or odd."""

from __future__ import annotations

import pytest

from tests.bad_input.steps import works
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
