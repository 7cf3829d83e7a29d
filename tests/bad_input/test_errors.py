"""Errors inside a scope."""

from __future__ import annotations

import pytest

from tests.bad_input.steps import goes_on, names, open_now, run, works
from tests.kernel import Kernel


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
