"""Subshells run cells beside the main shell's, over the same names: a scope owns what its own shell's cells bind."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kernel import Kernel
from tests.steps import goes_on, names, open_now, works

_OWN = ("begun", "go_on", "threading")
"""The names that the tests themselves need."""


@dataclass
class Subshell:
    kernel: Kernel
    id: str

    def send(self, code: str, *, main: bool = False) -> None:
        """Send a cell here, or to the main shell."""
        client = self.kernel._client
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = client.session.msg("execute_request", content)
        if not main:
            message["header"]["subshell_id"] = self.id
        client.shell_channel.send(message)

    def succeeds(self, count: int = 1) -> None:
        """Wait for the next ``count`` replies, which tell of no error."""
        replies = [self.kernel._client.get_shell_msg(timeout=600)["content"] for _ in range(count)]
        assert all(reply["status"] == "ok" for reply in replies), replies

    def works(self, *cells: str) -> None:
        for cell in cells:
            self.send(cell)
            self.succeeds()


@pytest.fixture
def subshell(notebook: Kernel) -> Iterator[Subshell]:
    client = notebook._client
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    answer = client.control_channel.get_msg(timeout=600)["content"]
    if answer.get("status") != "ok":
        pytest.skip("this ipykernel has no subshells")
    works(notebook, "import threading\nbegun, go_on = threading.Event(), threading.Event()")
    yield Subshell(notebook, answer["subshell_id"])
    client.control_channel.send(client.session.msg("delete_subshell_request", {"subshell_id": answer["subshell_id"]}))
    client.control_channel.get_msg(timeout=600)
    goes_on(notebook)


def test_names_that_a_subshells_cells_bind_are_not_the_scopes(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "x = 'old'", "%experiment start a")
    subshell.send("x = 'new'\nassert begun.wait(60)\ny = 1", main=True)
    for cell in ("during = x", "exec('by_exec = 2')", "'an output'\nbegun.set()\n'an output'"):
        subshell.send(cell)
    subshell.succeeds(4)
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


def test_each_shell_has_scopes_of_its_own_and_ends_anothers_only_by_name(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "x = 'old'", "%experiment start a", "x = 'a'\nnew_a = 1")
    subshell.works("%experiment start b", "y = 'b'")
    works(notebook, "z = 'a'")
    assert open_now(notebook) == ["a", "b"]
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert set(names(notebook)) == {*_OWN, "x", "y"}
    assert open_now(notebook) == ["b"]
    reply = notebook.run("%experiment end")
    assert "no experiment is open in this subshell; open elsewhere: 'b'" in reply.stderr
    subshell.works("%experiment end", "%experiment start c", "y = 2")
    works(notebook, "%experiment end c")
    assert set(names(notebook)) == {*_OWN, "x"}
    assert open_now(notebook) == []


def test_an_end_beside_a_running_cell_of_another_shell_takes_its_own_garbage(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "import weakref\nclass Node:\n    def __init__(self): self.me = self\nalive = []")
    subshell.send("begun.set(); go_on.wait(); theirs = Node()")
    works(notebook, "%%experiment a\nbegun.wait(); n = Node(); alive.append(weakref.ref(n)); Node();")
    assert notebook.value("('n' in globals(), alive[0]() is None)") == (False, True)
    subshell.send("go_on.set()", main=True)
    subshell.succeeds(2)
    assert notebook.value("type(theirs).__name__") == "Node"


def test_a_scope_keeps_what_a_subshells_scope_bound_and_gave_back(subshell: Subshell) -> None:
    notebook = subshell.kernel
    works(notebook, "old, other = 'old', 'other'", "%experiment start a", "old = other = 'mine'")
    subshell.works(
        "%%experiment b --keep other\nold = other = 'theirs'\nnew = 1", "%experiment start c", "old = 'again'"
    )
    subshell.works("%experiment end")
    works(notebook, "%experiment end")
    assert notebook.value("(old, other)") == ("old", "theirs")
    assert set(names(notebook)) == {*_OWN, "old", "other"}


@pytest.mark.parametrize(
    "cells",
    [
        ["%%experiment e\nold = 2; thread.start(); inside.wait(60)", "go.set(); thread.join(); old"],
        ["thread.start(); inside.wait(60)", "%%experiment e\nold = 2; go.set(); thread.join(); old - 1"],
        [
            "thread.start(); inside.wait(60)",
            "globals().update(old=1.0); go.set(); thread.join(); int(type(old) is float)",
        ],
    ],
)
def test_a_block_in_a_thread_puts_back_no_name_that_other_code_has_bound(notebook: Kernel, cells: list[str]) -> None:
    works(
        notebook,
        "import threading, ipygpumem\ninside, go, old = threading.Event(), threading.Event(), 1\ndef work():\n"
        "    with ipygpumem.experiment('t', report='none'): inside.set(); go.wait(60)\n"
        "thread = threading.Thread(target=work)",
    )
    assert works(notebook, *cells).result == "1"
    assert notebook.value("int(old)") == 1
