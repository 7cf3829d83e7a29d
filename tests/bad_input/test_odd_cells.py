"""Cells that are odd or fail, scopes that end in the wrong order, children, subshells, unloading at
an odd moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import assert_goes_on, open_experiments, run, run_cells, user_names

ODD = [
    *(
        "",
        "# only a comment",
        "1;",
        "%%experiment a",
        "%%experiment a\n# a comment",
        "\n\n%%experiment a\nx = 1",
    ),
    *("%%experiment a\r\nx = 1\r\n", "%%experiment\ta\nx = 1"),
    *(
        "%%capture\n%%experiment a\nx = 1",
        "%%experiment a\n%%capture\nx = 1",
        "%%experiment a\n%%bash\necho x",
    ),
    *(
        """\
%%experiment a
%%experiment b
%%time
x = 1""",
        "%%timeit -n 2 -r 2\n%%experiment a\nx = 1",
    ),
    *("%%experiment a\n%%writefile {0}/one.py\nx = 1", "%%experiment a\n%run {0}/two.py"),
    "get_ipython().run_cell_magic('experiment', 'a', 'x = 1')",
    "get_ipython().run_cell('%%experiment a\\nx = 1')",
]
FAILING = [
    *(
        "%%experiment a\n%%nosuchmagic\nx = 1",
        "%%experiment a\n%%time\n1/0",
        "%%time\n%%experiment a\n1/0",
    ),
    *("%%experiment a\n%%capture\n1/0", "%%experiment a\n%%bash\nexit 3"),
]
PRINTED = {"echo": "x\n", "%%time\n": "Wall time", "%%writefile": "Writing"}


@pytest.mark.parametrize("code", [*ODD, *FAILING])
def test_an_odd_cell_leaves_the_names_and_no_experiment_open(
    notebook: Kernel, tmp_path: Path, code: str
) -> None:
    (tmp_path / "two.py").write_text("y = 1\n")
    run_cells(notebook, "x = 'old'")
    reply = (run_cells if code in ODD else run)(notebook, code.replace("{0}", str(tmp_path)))
    assert notebook.value("x") == "old"
    assert user_names(notebook) == ["x"]
    assert open_experiments(notebook) == []
    if code in ODD:
        assert all(printed in reply.stdout for magic, printed in PRINTED.items() if magic in code)
    assert_goes_on(notebook)


def test_silent_and_unrecorded_cells_run_in_a_scope(notebook: Kernel) -> None:
    run_cells(notebook, "x = 'old'; y = 'old'", "%experiment start a")
    run_cells(notebook, "x = 1\nx", silent=True)
    run_cells(notebook, "y = 2\ny", store_history=False)
    run_cells(notebook, "%experiment end")
    assert notebook.value("y") == "old"
    assert notebook.run("%%experiment b\nz = 1", silent=True).status == "error"
    assert "z" not in user_names(notebook)
    assert_goes_on(notebook)


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "+".join(["2"] * 700),
        "x = 'a'" + ".strip()" * 450,
        "if 0: 1\n" + "elif x == 1: 1\n" * 700 + "x = 1",
    ],
    ids=["sum", "chain", "elif"],
)
def test_a_scope_reads_code_as_deeply_nested_as_python_allows(notebook: Kernel, code: str) -> None:
    run_cells(
        notebook, "x = 'old'", code, "x = 'old'", "%experiment start a", code, "%experiment end"
    )
    assert notebook.value("x") == "old"
    run_cells(notebook, f"%%experiment b\n{code}")
    assert notebook.value("x") == "old"


def test_a_forked_child_in_a_scope_does_not_affect_its_parent(notebook: Kernel) -> None:
    run_cells(
        notebook,
        "%config IPyGpuMem.host_peak = 'sampled'",  # in a thread, which a child has not
        "import os\nx = 'old'",
        "%experiment start a",
        """\
x = 'new'
pid = os.fork()
if pid == 0:
    globals().clear(); import os; os._exit(0)
done = os.waitpid(pid, 0)""",
    )
    assert notebook.value("done[1]") == 0
    run_cells(notebook, "%experiment end", "%config IPyGpuMem.host_peak = 'kernel'")
    assert notebook.value("x") == "old"
    assert_goes_on(notebook)


def test_a_forked_child_shows_reports_as_text(notebook: Kernel) -> None:
    """A kernel's messages cannot be sent by a child: they are printed."""
    reply = run_cells(
        notebook,
        """
        import os, multiprocessing, ipygpumem
        def work():
            with ipygpumem.experiment('forked'): y = 1
        process = multiprocessing.get_context('fork').Process(target=work)
        process.start()
        process.join(20)
        """,
    )
    assert notebook.value("process.exitcode") == 0
    assert "msg_id" not in reply.stdout + reply.stderr
    assert "experiment forked" in reply.stdout
    assert reply.reports("experiment") == []


def test_outputs_after_a_reset_in_a_scope_are_gone_at_its_end(notebook: Kernel) -> None:
    thing = """\
import weakref, builtins
class Thing: 1
thing = Thing()
builtins.test_ref = weakref.ref(thing)
thing"""
    run_cells(
        notebook,
        *map(str, range(6)),
        "%experiment start a",
        "%reset -f",
        thing,
        "7 * 7",
        "%experiment end",
    )
    assert notebook.value("(__import__('builtins').test_ref() is None, Out)") == (True, {})
    assert_goes_on(notebook)


_OWN = ("begun", "go_on", "threading")
"""The names that the tests themselves need."""


@dataclass
class Subshell:
    kernel: Kernel
    id: str

    def send(self, code: str, *, main: bool = False) -> None:
        """Send a cell here, or to the main shell."""
        client = self.kernel._client
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
        }
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
    run_cells(notebook, "import threading\nbegun, go_on = threading.Event(), threading.Event()")
    yield Subshell(notebook, answer["subshell_id"])
    client.control_channel.send(
        client.session.msg("delete_subshell_request", {"subshell_id": answer["subshell_id"]})
    )
    client.control_channel.get_msg(timeout=600)
    assert_goes_on(notebook)


def test_names_that_a_subshells_cells_bind_are_not_the_scopes(subshell: Subshell) -> None:
    notebook = subshell.kernel
    run_cells(notebook, "x = 'old'", "%experiment start a")
    subshell.send("x = 'new'\nassert begun.wait(60)\ny = 1", main=True)
    for cell in ("during = x", "exec('by_exec = 2')", "'an output'\nbegun.set()\n'an output'"):
        subshell.send(cell)
    subshell.succeeds(4)
    subshell.works("later = 1", "def function(): pass")
    run_cells(notebook, "z = 2", "%experiment end")
    assert notebook.value("x") == "old"
    assert set(user_names(notebook)) == {*_OWN, "x", "during", "by_exec", "later", "function"}
    assert "an output" in notebook.value("list(Out.values())")


def test_a_scope_does_not_restore_over_a_subshells_new_value(subshell: Subshell) -> None:
    notebook = subshell.kernel
    run_cells(notebook, "x = 'old'", "%experiment start a", "x = 'new'")
    subshell.works("x = 'elsewhere'")
    run_cells(notebook, "%experiment end")
    assert notebook.value("x") == "elsewhere"
    run_cells(notebook, "%experiment start a")
    subshell.works("x = 'again'")
    run_cells(notebook, "x = 'new'", "%experiment end")
    assert notebook.value("x") == "again"


def test_an_undone_try_leaves_the_names_of_a_subshell(subshell: Subshell) -> None:
    """They were deleted with those of the try."""
    fitted = """
%%autofit batch=8
made_by_try = 1
if batch == 8:
    begun.set()
    assert go_on.wait(60)
    raise MemoryError
"""
    subshell.send(fitted.lstrip(), main=True)
    subshell.send("assert begun.wait(60)\nduring = 1\nexec('by_exec = 2')\ngo_on.set()")
    subshell.succeeds(2)
    expected = {*_OWN, "batch", "made_by_try", "during", "by_exec"}
    assert set(user_names(subshell.kernel)) == expected


MEANWHILE = {
    "an assignment": ("a = 5\nmeet()", "a = 'theirs'"),
    "before the scope's own": ("meet()\na = 5", "a = 'theirs'"),
    "between two of the scope's": ("a = 5\nmeet()\na = 6", "a = 'theirs'"),
    "a call's result": ("a = same(5)\nmeet()\na = same(6)", "a = same('theirs')"),
    "in a loop": ("for a in [1, 2]: pass\nmeet()", "for a in ['theirs']: pass"),
    "in a loop that calls": (
        "for a in same([1, 2]): same(a)\nmeet()",
        "for a in same(['theirs']): same(a)",
    ),
    "by with": ("with Manager(5) as a: same(a)\nmeet()", "with Manager('theirs') as a: same(a)"),
    "by a walrus": ("same(a := 5)\nmeet()", "same(a := 'theirs')"),
    "by unpacking": ("a, b = 5, 6\nmeet()", "a, b = same(('theirs', 'also'))"),
    "by match": ("match 5:\n    case a: pass\nmeet()", "match 'theirs':\n    case a: same(a)"),
    "in a nested cell": ("a = 5\nmeet()", "get_ipython().run_cell('a = \\'theirs\\'')"),
}
"""Cells of the main shell and of a subshell that bind ``a``; the subshell's waits for ``meet()``
and binds then.
"""
MEET = """
import threading
class Manager:
    def __init__(self, value): self.value = value
    def __enter__(self): return self.value
    def __exit__(self, *error): pass
def same(value): return value
def meet():
    begun.set()
    assert go_on.wait(60)
"""


@pytest.mark.parametrize("names", MEANWHILE)
@pytest.mark.parametrize("scope", ["%%experiment long\n", "%experiment start long\n"])
def test_names_bound_by_a_subshell_during_a_scope_are_kept(
    subshell: Subshell, scope: str, names: str
) -> None:
    cell, theirs = MEANWHILE[names]
    notebook = subshell.kernel
    run_cells(notebook, MEET, "a = 'older'")
    subshell.send(f"{scope}{cell}", main=True)
    subshell.send(f"assert begun.wait(60)\n{theirs}\ngo_on.set()")
    subshell.succeeds(2)
    if "start" in scope:
        run_cells(notebook, "%experiment end")
    assert notebook.value("a") == "theirs"


def wait_in_both(subshell: Subshell, ours: str, theirs: str, *, subshell_first: bool) -> None:
    """Run a cell in each shell; theirs waits until ``meet()`` in ours is called, and begins before
    or after ours.
    """
    run_cells(subshell.kernel, MEET + "here = threading.Event()", "a = 'older'")
    theirs = f"here.set()\nassert begun.wait(60)\n{theirs}\ngo_on.set()"
    if subshell_first:
        subshell.send(theirs)
        run_cells(subshell.kernel, "assert here.wait(60)")
        subshell.send(ours, main=True)
    else:
        subshell.send(ours, main=True)
        subshell.send("assert begun.wait(60)")
        subshell.succeeds()
        subshell.send(theirs)
    subshell.succeeds(2)


@pytest.mark.parametrize("subshell_first", [True, False])
@pytest.mark.parametrize("scope", ["%%experiment long\n", "%experiment start long\n", ""])
def test_a_scope_restores_a_new_name_that_a_subshell_bound_first(
    subshell: Subshell, scope: str, subshell_first: bool
) -> None:
    """The name did not exist when the scope's cell began, so only the running code can tell who
    binds it.
    """
    notebook = subshell.kernel
    if not scope:
        run_cells(notebook, "%experiment start long")
    wait_in_both(
        subshell, f"{scope}meet()\nfresh = 5", "fresh = 'theirs'", subshell_first=subshell_first
    )
    if "%%" not in scope:
        run_cells(notebook, "%experiment end")
    assert notebook.value("fresh") == "theirs"


@pytest.mark.parametrize("subshell_first", [True, False])
def test_a_subshells_loop_binds_names_again_and_again(
    subshell: Subshell, subshell_first: bool
) -> None:
    ours = """\
%%experiment long
a = 5
for _ in same(range(1000)): a = 6
meet()"""
    theirs = "for _ in same(range(1000)): a = 'theirs'"
    wait_in_both(subshell, ours, theirs, subshell_first=subshell_first)
    assert subshell.kernel.value("a") == "theirs"


UNBOUND = [
    "if same(False): a = 7",
    "%timeit -n1 -r1 a = 7",
    "for a in same([]): pass",
    "while not same(True): a = 7",
]
UNBOUND += [
    "while False: a = 7",
    "try: same(1)\nexcept ValueError as a: pass",
    "same(0) and (a := 7)",
]


@pytest.mark.parametrize("statement", UNBOUND)
@pytest.mark.parametrize("subshell_first", [True, False])
def test_a_name_that_a_subshell_does_not_bind_is_restored(
    subshell: Subshell, statement: str, subshell_first: bool
) -> None:
    wait_in_both(
        subshell, "%%experiment long\na = 5\nmeet()", statement, subshell_first=subshell_first
    )
    assert subshell.kernel.value("a") == "older"


def test_a_shell_ends_another_shells_scope_only_by_name(subshell: Subshell) -> None:
    notebook = subshell.kernel
    run_cells(notebook, "x = 'old'", "%experiment start a", "x = 'a'\nnew_a = 1")
    subshell.works("%experiment start b", "y = 'b'")
    run_cells(notebook, "z = 'a'")
    assert open_experiments(notebook) == ["a", "b"]

    # Without a name, each shell ends only its own.
    run_cells(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    assert set(user_names(notebook)) == {*_OWN, "x", "y"}
    assert open_experiments(notebook) == ["b"]
    reply = notebook.run("%experiment end")
    assert "no experiment is open in this subshell; open elsewhere: 'b'" in reply.stderr

    # With its name, an open scope of the other shell ends, too.
    subshell.works("%experiment end", "%experiment start c", "y = 2")
    run_cells(notebook, "%experiment end c")
    assert set(user_names(notebook)) == {*_OWN, "x"}
    assert open_experiments(notebook) == []


def test_a_scope_frees_its_garbage_while_another_shell_runs(subshell: Subshell) -> None:
    notebook = subshell.kernel
    run_cells(
        notebook,
        """\
import weakref
class Node:
    def __init__(self): self.me = self
alive = []""",
    )
    subshell.send("begun.set(); go_on.wait(); theirs = Node()")
    run_cells(
        notebook, "%%experiment a\nbegun.wait(); n = Node(); alive.append(weakref.ref(n)); Node();"
    )
    assert notebook.value("('n' in globals(), alive[0]() is None)") == (False, True)
    subshell.send("go_on.set()", main=True)
    subshell.succeeds(2)
    assert notebook.value("type(theirs).__name__") == "Node"


@pytest.mark.parametrize("inner_first", [True, False])
@pytest.mark.parametrize("subshell_first", [True, False])
def test_two_shells_scopes_shadow_one_name(
    subshell: Subshell, inner_first: bool, subshell_first: bool
) -> None:
    """Whichever scope shadows the name first, and whichever ends first, its older value is back
    after both.
    """
    notebook = subshell.kernel
    run_cells(notebook, "a = 'older'", "%experiment start main")
    subshell.works("%experiment start sub")
    if subshell_first:
        subshell.works("a = 'theirs'")
        run_cells(notebook, "a = 'ours'")
    else:
        run_cells(notebook, "a = 'ours'")
        subshell.works("a = 'theirs'")

    # They end in this or the other order.
    if inner_first == subshell_first:
        run_cells(notebook, "%experiment end")
        subshell.works("%experiment end")
    else:
        subshell.works("%experiment end")
        run_cells(notebook, "%experiment end")
    assert notebook.value("a") == "older"


UNBINDING = """
for _ in [1]:
    try: 1 / 0
    except ZeroDivisionError as a: pass
"""


@pytest.mark.parametrize("begins_before", [True, False])
@pytest.mark.parametrize("cell", ["pass", UNBINDING, "a = 'ours'"])
def test_a_scope_keeps_names_restored_by_another_scope(
    subshell: Subshell, cell: str, begins_before: bool
) -> None:
    """A handler has unbound the name in a subshell's scope, which restores it at its end."""
    notebook = subshell.kernel
    run_cells(notebook, "a = 'older'")
    if begins_before:
        run_cells(notebook, "%experiment start main")
    subshell.works("%experiment start sub", UNBINDING)
    if not begins_before:
        run_cells(notebook, "%experiment start main")
    run_cells(notebook, cell)
    subshell.works("%experiment end")
    run_cells(notebook, "%experiment end")
    assert notebook.value("a") == "older"


@pytest.mark.parametrize("cell", ["n = 'theirs'", UNBINDING.replace("as a", "as n")])
@pytest.mark.parametrize("first_end", ["ours", "theirs"])
def test_a_new_name_shadowed_in_two_shells_is_deleted_at_the_end(
    subshell: Subshell, cell: str, first_end: str
) -> None:
    """The subshell's scope has saved the object of a name that is new in the main shell's."""
    notebook = subshell.kernel
    run_cells(notebook, "%experiment start main", "n = 'ours'")
    subshell.works("%experiment start sub", cell)
    if first_end == "ours":
        run_cells(notebook, "%experiment end")
        if "theirs" in cell:
            assert notebook.value("n") == "theirs"
        subshell.works("%experiment end")
    else:
        subshell.works("%experiment end")
        assert notebook.value("n") == "ours"
        run_cells(notebook, "%experiment end")
    assert set(user_names(notebook)) == {*_OWN}


def test_a_scope_keeps_values_left_by_a_subshells_scope(subshell: Subshell) -> None:
    notebook = subshell.kernel
    run_cells(
        notebook, "old, other = 'old', 'other'", "%experiment start a", "old = other = 'mine'"
    )
    subshell.works(
        """\
%%experiment b --keep other
old = other = 'theirs'
n = 1
""",
        "%experiment start c",
        "old = 'again'",
    )
    subshell.works("%experiment end")
    run_cells(notebook, "%experiment end")
    assert notebook.value("(old, other)") == ("old", "theirs")
    assert set(user_names(notebook)) == {*_OWN, "old", "other"}


@pytest.mark.parametrize(
    "cells",
    [
        [
            "%%experiment e\nold = 2; thread.start(); inside.wait(60)",
            "go.set(); thread.join(); old",
        ],
        [
            "thread.start(); inside.wait(60)",
            "%%experiment e\nold = 2; go.set(); thread.join(); old - 1",
        ],
        [
            "thread.start(); inside.wait(60)",
            "globals().update(old=1.0); go.set(); thread.join(); 0 + old.is_integer()",
        ],
    ],
)
def test_a_block_in_a_thread_keeps_names_bound_by_other_code(
    notebook: Kernel, cells: list[str]
) -> None:
    run_cells(
        notebook,
        """\
import threading, ipygpumem
inside, go, old = threading.Event(), threading.Event(), 1
def work():
    with ipygpumem.experiment('t', report='none'): inside.set(); go.wait(60)
thread = threading.Thread(target=work)""",
    )
    assert run_cells(notebook, *cells).result == "1"
    assert notebook.value("int(old)") == 1
