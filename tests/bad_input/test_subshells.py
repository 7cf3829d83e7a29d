"""Subshells run cells beside the main shell's, over the same names: a scope owns what its own shell's cells bind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.bad_input import steps
from tests.bad_input.steps import goes_on, names, open_now
from tests.kernel import Kernel

_OWN = ("begun", "go_on", "threading")
"""The names that the tests themselves need."""


@dataclass
class Subshell:
    """One subshell of a kernel."""

    kernel: Kernel
    id: str

    def send(self, code: str, subshell: str | None = "") -> str:
        """Send a cell here (or to the main shell: None), and return the request's id."""
        client = self.kernel._client
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = client.session.msg("execute_request", content)
        if subshell is not None:
            message["header"]["subshell_id"] = self.id
        client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def replies(self, count: int) -> dict[str, Any]:
        """Return the next replies by the ids of their requests, in the order in which they came."""
        found = [self.kernel._client.get_shell_msg(timeout=30) for _ in range(count)]
        return {reply["parent_header"]["msg_id"]: reply["content"] for reply in found}

    def works(self, *cells: str) -> None:
        """Run cells that must succeed."""
        for cell in cells:
            self.send(cell)
            (reply,) = self.replies(1).values()
            assert reply["status"] == "ok", (cell, reply)

    def beside(self, slow: str, *quick: str) -> None:
        """Run ``slow`` in the main shell, and ``quick`` cells here while it runs."""
        self.send(slow, None)
        for cell in quick:
            self.send(cell)
        replies = self.replies(1 + len(quick))
        assert all(reply["status"] == "ok" for reply in replies.values()), replies

    def let_go_on(self) -> None:
        """Let the cell end that waits here for ``go_on``."""
        self.send("go_on.set()", None)
        assert [reply["status"] for reply in self.replies(2).values()] == ["ok", "ok"]


def works(kernel: Kernel, *cells: str) -> None:
    """Run cells of the main shell that must succeed."""
    for cell in cells:
        steps.works(kernel, cell)


@pytest.fixture
def subshell(notebook: Kernel) -> Iterator[Subshell]:
    client = notebook._client
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    answer = client.control_channel.get_msg(timeout=30)["content"]
    if answer.get("status") != "ok":
        pytest.skip("this ipykernel has no subshells")
    works(notebook, "import threading\nbegun, go_on = threading.Event(), threading.Event()")
    yield Subshell(notebook, answer["subshell_id"])
    client.control_channel.send(client.session.msg("delete_subshell_request", {"subshell_id": answer["subshell_id"]}))
    client.control_channel.get_msg(timeout=30)
    goes_on(notebook)


def test_names_that_a_subshells_cells_bind_are_not_the_scopes(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "x = 'old'", "%experiment start a")
    subshell.beside(
        "x = 'new'\nassert begun.wait(60)\ny = 1",
        "during = x",
        "exec('by_exec = 2')",
        "'an output'\nbegun.set()\n'an output'",
    )
    subshell.works("later = 1", "def function(): pass")
    works(notebook, "z = 2", "%experiment end")
    assert notebook.value("x") == "old"
    assert set(names(notebook)) == {*_OWN, "x", "during", "by_exec", "later", "function"}
    assert "an output" in notebook.value("list(Out.values())")


def test_a_name_that_a_scope_shadows_and_a_subshell_binds_is_the_subshells(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "x = 'old'", "%experiment start a", "x = 'new'")
    subshell.works("x = 'elsewhere'")
    works(notebook, "%experiment end")
    assert notebook.value("x") == "elsewhere"
    works(notebook, "%experiment start a")
    subshell.works("x = 'again'")
    works(notebook, "x = 'new'", "%experiment end")
    assert notebook.value("x") == "again"


def test_each_shell_has_scopes_of_its_own(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "x = 'old'", "%experiment start a", "x = 'a'\nnew_a = 1")
    subshell.works("%experiment start b", "y = 'b'")
    works(notebook, "z = 'a'")
    assert open_now(notebook).count("experiment ") == 2
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert set(names(notebook)) == {*_OWN, "x", "y"}
    assert "experiment b" in open_now(notebook)
    subshell.works("%experiment end")
    assert set(names(notebook)) == {*_OWN, "x"}
    assert "no experiment is open" in open_now(notebook)


def test_a_scope_of_another_shell_is_ended_by_its_name_only(subshell: Subshell) -> None:
    notebook = subshell.kernel
    subshell.works("%experiment start b", "y = 2")
    reply = notebook.run("%experiment end")
    assert "no experiment is open in this subshell; open elsewhere: 'b'" in reply.stderr
    works(notebook, "%experiment end b")
    assert names(notebook) == [*_OWN]


def test_an_end_beside_a_running_cell_of_another_shell_takes_its_own_garbage(
    notebook: Kernel, subshell: Subshell
) -> None:
    works(notebook, "import weakref\nclass Node:\n    def __init__(self): self.me = self\nalive = []")
    subshell.send("begun.set(); go_on.wait(); theirs = Node()")
    steps.works(notebook, "%%experiment a\nbegun.wait(); n = Node(); alive.append(weakref.ref(n)); Node();")
    assert notebook.value("('n' in globals(), alive[0]() is None)") == (False, True)
    subshell.let_go_on()
    assert notebook.value("type(theirs).__name__") == "Node"
