"""Experiments, commands and autofits run on all engines of a real cluster, and one report is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ipygpumem.notebook.cluster.engines import Engines
from ipygpumem.units import MIB
from tests.clusters import CTRL_C, ID, UNTIL, cluster_of, on_engines, record, start_cluster
from tests.kernel import Kernel
from tests.steps import works

shared = cluster_of(4)
NAMES = "sorted(name for name in globals() if name in ('x', 'y', 'w', 'n', 'q'))"


def refusal(kernel: Kernel, cell: str) -> str:
    """Return the one line that a cell with a mistake shows."""
    reply = kernel.run(cell)
    assert reply.status == "error"
    (line,) = [line for line in reply.stderr.splitlines() if line.startswith("UsageError: ")]
    return line


@pytest.fixture
def cluster(shared: Kernel) -> Kernel:
    """The module's cluster, without the names of earlier tests on its engines."""
    works(shared, "_ = rc[:].apply_sync(exec, \"for name in ('x', 'y', 'w', 'n', 'q'): globals().pop(name, None)\")")
    return shared


def test_a_cell_runs_as_an_experiment_on_every_engine(cluster: Kernel) -> None:
    reply = works(
        cluster, f"%%experiment sweep --on all --keep w\nx = bytearray(2**26)\nw = {ID}\nprint('id', w)\nw + 1"
    )
    found = record(cluster)
    assert [engine["engine"] for engine in found["engines"]] == [0, 1, 2, 3]
    assert (found["deleted"], found["kept"]) == (("x",), ("w",))
    for engine in found["engines"]:
        (usage,) = [usage for usage in engine["record"]["usages"] if usage["device"] == "cpu"]
        assert usage["peak_bytes"] - usage["before_bytes"] >= 64 * MIB
        assert engine["free"]["cpu"] > 0
        assert engine["pid"] != cluster.value("__import__('os').getpid()")
    assert found["consumed"]["cpu"] >= 4 * 64 * MIB, "the sum over the engines"
    assert found["reclaimed"]["cpu"] >= 4 * 63 * MIB
    assert on_engines(cluster, "w") == [0, 1, 2, 3]
    assert on_engines(cluster, NAMES) == [["w"]] * 4
    assert cluster.value("'x' in globals()") is False, "nothing runs in the notebook itself"
    assert [f"id {number}" in reply.stdout for number in range(4)] == [True] * 4
    (text,) = reply.reports("engines")
    assert text.startswith("experiment sweep · on 4 engines · ")
    assert re.search(r"RAM +peak +4 +\+6\d(\.\d)? MiB", text)


def test_engines_that_fail_are_named_and_the_others_results_are_kept(cluster: Kernel) -> None:
    source = f"%%experiment failing --on all\nx = 1\nif {ID} == 1: raise MemoryError('full')\nif {ID} != 3: y = 2"
    reply = cluster.run(source)
    assert (reply.status, reply.error) == ("error", "CompositeError"), "Run all stops"
    found = record(cluster)
    assert [engine["error"] for engine in found["engines"]] == ["", "MemoryError", "", ""]
    assert found["ooms"] == 1
    (text,) = reply.reports("engines")
    assert "engine 1 (" in text
    assert "): MemoryError" in text
    assert "deleted on engines 0, 2 only: y" in text
    assert on_engines(cluster, NAMES) == [[]] * 4, "each engine has ended its experiment"


def test_an_experiment_spans_cells_of_px_and_each_has_one_line(cluster: Kernel) -> None:
    works(cluster, "%experiment start span --on 0-2 --note lr=0.1")
    reply = works(cluster, "%%px\nx = bytearray(2**25)")
    (text,) = reply.reports("engines")
    assert re.fullmatch(
        r"experiment span · a cell on engines 0-2 · .+ \(engine \d\) · RAM \+9\d(\.\d)? MiB in all, "
        r"peak \+3\d(\.\d)? MiB \(engine \d\)",
        text.splitlines()[-1],
    )
    assert works(cluster, "1 + 1").reports("engines") == [], "no cell ran there"
    assert "on engines 0-2" in "".join(works(cluster, "%experiment status").reports())
    works(cluster, "%experiment keep x")
    works(cluster, "%%px\ny = 2")
    reply = works(cluster, "%experiment end")
    found = record(cluster)
    assert [len(engine["record"]["cells"]) for engine in found["engines"]] == [2, 2, 2]
    assert found["parameters"] == {"lr": 0.1}
    assert on_engines(cluster, NAMES) == [["x"], ["x"], ["x"], ["x", "y"]], "engine 3 took no part"
    assert "no experiment is open" in refusal(cluster, "%experiment end")


def test_an_interrupt_reaches_an_engine_that_sleeps(cluster: Kernel, tmp_path: Path) -> None:
    asleep = tmp_path / "asleep"
    works(cluster, f"{CTRL_C}\nctrl_c(lambda: os.path.exists({str(asleep)!r}) and len(rc.outstanding) == 1)")
    source = (
        f"%%experiment slow --on all\n{UNTIL}x = 1\n"
        f"if {ID} == 2: Path({str(asleep)!r}).touch(); until({str(tmp_path / 'never')!r})"
    )
    assert cluster.run(source).error == "KeyboardInterrupt"
    assert [engine["error"] for engine in record(cluster)["engines"]] == ["", "", "KeyboardInterrupt", ""]
    assert on_engines(cluster, NAMES) == [[]] * 4


STRIKES_IN = """
from ipygpumem.notebook.cluster.engines import Engines
original = Engines.NAME
def struck(*args, **options):
    Engines.NAME = original
    import os
    os.kill(os.getpid(), 2)
    return original(*args, **options)
Engines.NAME = struck
"""


@pytest.mark.parametrize("place", ["ask_each", "answers", "forget", "only", "run", "lost"])
@pytest.mark.parametrize("cell", ["%%experiment a --on all\nx = 1", "%%autofit n=2 --on all\nx = n"])
def test_a_ctrl_c_at_any_moment_leaves_nothing_open_and_engines_alike(cluster: Kernel, cell: str, place: str) -> None:
    works(cluster, "%gpumem status --on all")  # loads the extension there
    works(cluster, STRIKES_IN.replace("NAME", place))
    assert cluster.run(cell, timeout=60).error == "KeyboardInterrupt"
    assert on_engines(cluster, OPEN) == [0] * 4
    bound = ["n", "x"] if "autofit" in cell and place == "lost" else []  # there it has fitted, and is kept
    assert on_engines(cluster, NAMES) == [bound] * 4
    works(cluster, "%px globals().pop('n', None); globals().pop('x', None);")


OPEN = "len(__import__('ipygpumem.notebook.notebook').notebook.notebook.find_notebook(get_ipython()).experiments.open)"
BUSY = "rc[1].execute('import time\\nwhile True: time.sleep(0.05)', block=False)"
STOP_BUSY = "rc.send_signal(2, targets=[1], block=True)\nbusy.wait(30)"


@pytest.mark.parametrize(
    "cell", ["%gpumem status --on 1", "%%experiment a --on 1\n1", "%%experiment a --on gpu\n1", "%experiment end"]
)
def test_a_ctrl_c_while_we_wait_leaves_other_cells_of_an_engine_alone(cluster: Kernel, cell: str) -> None:
    if cell == "%experiment end":
        works(cluster, "%experiment start a --on 1")
    works(cluster, f"busy = {BUSY}")
    works(cluster, f"{CTRL_C}\nctrl_c(lambda: True)")
    try:
        cluster.run(cell)
        works(cluster, "time.sleep(1)")
        assert cluster.value("busy.ready()") is False, "what runs there is the user's"
    finally:
        works(cluster, STOP_BUSY)
        cluster.run("%experiment end a --on 1")


def test_a_second_ctrl_c_ends_the_waiting_for_an_engine_that_takes_none(cluster: Kernel, tmp_path: Path) -> None:
    deaf, end = tmp_path / "deaf", tmp_path / "end"
    source = f"%%experiment deaf --on 0-1\nimport signal\n{UNTIL}if {ID} == 1:\n" + (
        "    before = signal.signal(2, signal.SIG_IGN)\n"
        f"    Path({str(deaf)!r}).touch(); until({str(end)!r})\n    signal.signal(2, before)"
    )
    grace = "from ipygpumem.notebook.cluster import engines as e\nbefore, e._GRACE_SECONDS = e._GRACE_SECONDS, 600"
    works(cluster, f"{grace}\n{CTRL_C}\nctrl_c(lambda: os.path.exists({str(deaf)!r}), lambda: True)")
    try:
        assert cluster.run(source).error == "KeyboardInterrupt"
        assert "its cell goes on" in record(cluster)["engines"][1]["error"]
    finally:
        end.touch()
        works(cluster, "e._GRACE_SECONDS = before")
    works(cluster, "%experiment end deaf --on 1")


PLACES = (
    "import ipygpumem.notebook.cluster.experiment as places\nbefore, places._START_SECONDS = places._START_SECONDS, 3"
)


def test_an_engine_that_is_busy_is_left_out_and_does_not_begin_later(cluster: Kernel) -> None:
    works(cluster, PLACES)
    works(cluster, f"busy = {BUSY}")
    try:
        works(cluster, "%%experiment around --on all\nx = 1")
        found = record(cluster)
        assert [engine["error"] for engine in found["engines"]] == ["", "has not answered", "", ""]
    finally:
        works(cluster, f"{STOP_BUSY}\nplaces._START_SECONDS = before")
    assert cluster.value("busy.ready()") is True
    (text,) = works(cluster, "%gpumem status --on 1").reports("engines")
    assert "no experiment is open" in text, "what waited for it was taken back"


def test_ctrl_c_while_an_engine_is_busy_with_something_else_does_not_reach_it(cluster: Kernel, tmp_path: Path) -> None:
    end = tmp_path / "end"
    source = f"{UNTIL}until({str(end)!r})\nq = 1"
    works(cluster, f"busy = rc[1].execute({source!r}, block=False)")
    works(cluster, f"{CTRL_C}\nctrl_c(lambda: len(rc.outstanding) == 2)")
    reply = cluster.run("%gpumem free --on all")
    end.touch()
    assert reply.error == "KeyboardInterrupt"
    assert "engine 1: has not answered" in reply.reports("engines")[0]
    works(cluster, "busy.wait(60)\nassert busy.successful()")
    assert on_engines(cluster, NAMES) == [[], ["q"], [], []], "its cell has run to the end"


def test_an_engine_that_begins_too_late_ends_its_experiment_again(cluster: Kernel, tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    works(cluster, PLACES)
    slow = (
        f"{UNTIL}import ipygpumem.notebook.engine as e; place = e.place\n"
        f"e.place = lambda: until({str(begin)!r}) or place()"
    )
    works(cluster, f"rc[1].execute({slow!r}, block=True)")
    try:
        works(cluster, "%%experiment late --on 0-1\nx = 1")
        assert record(cluster)["engines"][1]["error"] == "has not answered"
    finally:
        begin.touch()
        works(cluster, "rc[1].execute('e.place = place; del e, place', block=True)\nplaces._START_SECONDS = before")
    assert cluster.value(f"rc[1].apply_sync(eval, {OPEN!r})") == 0


def test_commands_show_figures_of_all_engines_and_each_ones_report(cluster: Kernel) -> None:
    (text,) = works(cluster, "%gpumem status --on all").reports("engines")
    assert text.startswith("%gpumem status on 4 engines\n")
    assert len(re.findall(r"^ *engine \d \(.+\):$", text, re.MULTILINE)) == 4
    assert re.search(r"RAM +in use +4 +[\d.]+ MiB", text)
    (text,) = works(cluster, "%gpumem free --on 0,2").reports("engines")
    assert "RAM      came back    2" in text
    assert "engine 2 (" in text
    assert "engine 1 (" not in text
    for command in ("history", "leaks", "tensors --min 1MiB"):
        (text,) = works(cluster, f"%gpumem {command} --on 3").reports("engines")
        assert text.startswith(f"%gpumem {command} on 1 engine\n")


def test_an_autofit_agrees_on_one_value_and_none_waits_for_ever(cluster: Kernel) -> None:
    works(cluster, "_ = rc[:].apply_sync(exec, 'n = 7')")
    source = (
        f"%%autofit n=64 --on all\nimport time\nif {ID} == 1 and n > 20: raise MemoryError('full')\n"
        f"if {ID} == 2 and n > 40: raise ConnectionError\n"
        f"if {ID} == 3 and n > 20: time.sleep(600)  # as in a collective operation\nx = n"
    )
    (text,) = works(cluster, source).reports("autofit")
    assert "n=16 fits · 3 tries" in text
    assert "n=64: out of memory on engine 1; ConnectionError on engine 2\n" in text
    assert text.endswith("n=32: out of memory on engine 1")
    assert on_engines(cluster, "(n, x)") == [(16, 16)] * 4
    assert "even n=1 does not fit" in refusal(cluster, "%%autofit n=2 --on all\nq = 1\nraise MemoryError('full')")
    assert on_engines(cluster, "n") == [16] * 4, "as before the first try"
    reply = cluster.run("%%autofit n=2 --on all\nq = 1\nraise ValueError('mine')")
    assert reply.error == "CompositeError"
    assert on_engines(cluster, "n, 'q' in globals()") == [(16, False)] * 4


def test_answers_do_not_pile_up_in_the_clients_cache_or_the_hubs(cluster: Kernel) -> None:
    works(cluster, "%px 1")
    before = cluster.value("(len(rc.results), len(rc.metadata), len(rc.db_query({})))")
    for _ in range(3):
        works(cluster, "%%experiment again --on all\nx = 1")
        works(cluster, "%gpumem free --on all")
    assert cluster.value("(len(rc.results), len(rc.metadata), len(rc.db_query({})))") == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%experiment end typo --on all", "no experiment 'typo' is open there"),
        ("%%experiment a --on all --record /\nx = 1", "/"),
        ("%%experiment a --on 9\nx = 1", "the cluster has no engine 9; it has engines 0-3"),
        ("%%experiment a --on 2-9\nx = 1", "the cluster has no engines 4-9; it has engines 0-3"),
        ("%%experiment a --on 2-0\nx = 1", "--on names no engine; the cluster has engines 0-3"),
        ("none = rc.direct_view([])\n%gpumem status --on none", "--on names no engine; the cluster has engines 0-3"),
        ("%%experiment a --on nobody\nx = 1", "--on nobody: write all, gpu, numbers of engines"),
        ("%%experiment a --on gpu\nx = 1", "--on gpu: no engine has a GPU"),
        ("%experiment start a --on all --seed x", "--seed"),
        ("%experiment end --on all", "which experiment? Write its name"),
        ("%gpumem tensors --by size --on all", "--by: invalid choice"),
        ("%%autofit n --on all\nx = 1", "there is no variable 'n'"),
        ("%%experiment --on all\nx = 1", "which name?"),
    ],
)
def test_a_mistake_is_one_line_and_runs_nothing(cluster: Kernel, line: str, said: str) -> None:
    assert said in refusal(cluster, line)
    assert on_engines(cluster, NAMES) == [[]] * 4


def test_an_engine_without_the_extension_is_named(cluster: Kernel) -> None:
    hide = "import sys; sys.modules['ipygpumem.notebook.engine'] = None"
    works(cluster, f"rc[1].execute({hide!r}, block=True)")
    try:
        reply = works(cluster, "%%experiment some --on all\nx = 1")
        errors = [engine["error"] for engine in record(cluster)["engines"]]
        assert [bool(error) for error in errors] == [False, True, False, False]
        assert errors[1].startswith("has no ipygpumem, or an older one")
        assert "on 4 engines" in reply.reports("engines")[0]
    finally:
        works(cluster, "rc[1].execute('import sys; del sys.modules[\"ipygpumem.notebook.engine\"]', block=True)")


def test_a_client_that_reconnects_ends_what_an_earlier_one_has_begun(cluster: Kernel) -> None:
    works(cluster, "%experiment start long --on all")
    works(cluster, "%px x = 1")
    works(cluster, "%reload_ext ipygpumem\nrc.close()\nrc = cluster.connect_client_sync()\nrc.wait_for_engines(4)")
    works(cluster, "rc.activate()")
    works(cluster, "%experiment end long --on all")
    found = record(cluster)
    assert [len(engine["record"]["cells"]) for engine in found["engines"]] == [1] * 4
    assert on_engines(cluster, NAMES) == [[]] * 4


def test_what_a_closed_client_has_begun_does_not_stand_in_the_way(cluster: Kernel) -> None:
    works(cluster, "%experiment start shut --on all\nrc.close()")
    try:
        assert "is closed: connect again" in refusal(cluster, "%experiment end")
        assert "no experiment is open" in refusal(cluster, "%experiment end")
    finally:
        works(cluster, "rc = cluster.connect_client_sync()\nrc.wait_for_engines(4)\nrc.activate()")
    works(cluster, "%experiment end shut --on all")
    assert [bool(engine["record"]) for engine in record(cluster)["engines"]] == [True] * 4


def test_an_autofit_names_engines_that_take_no_part(cluster: Kernel) -> None:
    hide = "import sys; sys.modules['ipygpumem.notebook.engine'] = None"
    works(cluster, f"rc[1].execute({hide!r}, block=True)")
    try:
        (text,) = works(cluster, "%%autofit n=2 --on 0-1\nx = n").reports("autofit")
        assert "engine 1: has no ipygpumem" in text
    finally:
        works(cluster, "rc[1].execute('import sys; del sys.modules[\"ipygpumem.notebook.engine\"]', block=True)")


def test_a_busy_engine_is_named_once_and_waited_for_once(cluster: Kernel) -> None:
    works(cluster, "%experiment start async --on 0-1")
    (text,) = works(cluster, f"busy = {BUSY}").reports("engines")
    try:
        assert text.splitlines()[-1] == "experiment async · engine 1 not done yet"
        sent = cluster.value("len(rc.history)")
        assert works(cluster, "1 + 1").reports("engines") == []
        assert cluster.value("len(rc.history)") == sent + 1, "engine 0 alone was asked again"
    finally:
        works(cluster, STOP_BUSY)
    shown = [*works(cluster, "_ = rc[1].execute('1', silent=False, block=True)").reports("engines")]
    shown += [*works(cluster, "1 + 1").reports("engines"), *works(cluster, "1 + 1").reports("engines")]
    assert any("a cell on engine 1" in text for text in shown)
    works(cluster, "%experiment end")
    assert len(record(cluster)["engines"][1]["record"]["cells"]) == 1


def test_a_view_names_its_engines_and_a_closed_client_is_not_asked(cluster: Kernel) -> None:
    works(cluster, "pair = rc[1:3]")
    works(cluster, "%%experiment two --on pair\nx = 1")
    assert [engine["engine"] for engine in record(cluster)["engines"]] == [1, 2]
    works(cluster, "every = rc.broadcast_view()")
    works(cluster, "%%experiment wide --on every\nx = 1")
    assert [engine["engine"] for engine in record(cluster)["engines"]] == [0, 1, 2, 3]
    works(cluster, "other = cluster.connect_client_sync()\nold = other[:]\nother.close()")
    assert "the client of that view is closed" in refusal(cluster, "%%experiment two --on old\n1")
    works(cluster, "del other, old, pair")


def test_an_engine_that_dies_is_named_and_the_rest_goes_on(kernel: Kernel, tmp_path: Path) -> None:
    start_cluster(kernel, tmp_path, 3)
    works(kernel, "%%experiment first --on all\nx = 1")
    for engine in record(kernel)["engines"]:
        (usage,) = engine["record"]["usages"]
        assert usage["peak_bytes"] - usage["before_bytes"] < 3 * MIB, "what we import there is not the experiment's"
    reply = kernel.run(f"%%experiment deadly --on all\nimport os\nif {ID} == 1: os._exit(1)\nx = bytearray(2**25)")
    assert reply.error == "CompositeError"
    found = record(kernel)
    assert [engine["error"] for engine in found["engines"]] == ["", "died", ""]
    assert [engine["record"] is None for engine in found["engines"]] == [False, True, False]
    (text,) = reply.reports("engines")
    assert "· on 3 engines ·" in text
    assert "1 failed" in text
    works(kernel, "%%experiment rest --on all\nx = 1")
    assert [engine["engine"] for engine in record(kernel)["engines"]] == [0, 2]
    kernel.run("cluster.stop_cluster_sync()")


def test_without_a_cluster_it_says_how_to_start_one(kernel: Kernel) -> None:
    assert "pip install ipyparallel" in refusal(kernel, "%%experiment a --on all\n1")
    works(kernel, "import ipyparallel")
    assert "--on needs a running cluster" in refusal(kernel, "%gpumem free --on all")


def test_the_extension_leaves_engines_as_it_found_them(kernel: Kernel, tmp_path: Path) -> None:
    """Where the user has loaded it there, its lines are off only while the notebook merges them."""
    start_cluster(kernel, tmp_path, 1)
    works(kernel, "%px %load_ext ipygpumem")
    assert "RAM" in str(works(kernel, "%px x = 1").displays)
    reply = works(kernel, "%%experiment a --on all\ny = 1")
    assert len(reply.reports()) == 2, "the notebook's line and one report, and none of the engine's"
    assert "RAM" in str(works(kernel, "%px x = 1").displays)
    works(kernel, "%experiment start a --on all\n%experiment start b --on all")
    works(kernel, "%experiment end b")
    assert not any("children" in text for text in works(kernel, "%px x = 1").reports()), "a is still open there"
    works(kernel, "%px %experiment end")
    assert any("children" in text for text in works(kernel, "%px x = 1").reports()), "the user has ended it there"
    kernel.run("cluster.stop_cluster_sync()")


def test_a_controller_that_has_stopped_makes_nothing_hang(kernel: Kernel, tmp_path: Path) -> None:
    start_cluster(kernel, tmp_path, 1)
    works(
        kernel,
        "from ipygpumem.notebook.cluster.engines import Engines\nengines = Engines(rc, [0])\n"
        "asked = engines.ask('place')\nassert not engines.wait(asked, 60)",
    )
    works(kernel, "%experiment start open --on 0")
    works(
        kernel,
        "from ipygpumem.notebook.cluster import controller as c\nc._EVERY_SECONDS = 0.1\n"
        "cluster.stop_controller_sync()",
    )
    works(kernel, "engines.forget(asked)")
    for cell in ("%gpumem status --on 0", "%experiment end"):
        text = works(kernel, cell).reports("engines")[0]
        assert "has not answered, nor has the controller: it has stopped, or cannot be reached" in text
    assert "nor has the controller" in refusal(kernel, "%%experiment a --on 0\nx = 1")
    assert "no experiment is open" in refusal(kernel, "%experiment end")
    kernel.run("cluster.stop_cluster_sync()")


KILL_SCHEDULER = """
    import psutil
    port = int(rc._config["mux"].rpartition(":")[2])
    for process in psutil.Process(cluster.controller.pid).children(recursive=True):
        if any(at.status == "LISTEN" and at.laddr.port == port for at in process.net_connections()):
            process.kill()
"""
SHUT_DOWN_HUB = """
    other._notification_handlers["shutdown_notification"] = lambda message: None
    other._send(other._query_stream, "shutdown_request")
"""


@pytest.mark.parametrize(
    ("head", "how"), [("%%autofit n=2 --on all", KILL_SCHEDULER), ("%%experiment a --on all", SHUT_DOWN_HUB)]
)
def test_what_stops_beneath_a_cell_ends_the_waiting_and_stops_run_all(
    kernel: Kernel, tmp_path: Path, head: str, how: str
) -> None:
    start_cluster(kernel, tmp_path, 1)
    began = tmp_path / "began"
    works(kernel, "from ipygpumem.notebook.cluster import controller as c\nc._EVERY_SECONDS = 0.1")
    works(
        kernel,
        f"import os, threading, time\nother = cluster.connect_client_sync()\ndef stop():\n"
        f"    while not os.path.exists({str(began)!r}): time.sleep(0.05)\n{how}\nthreading.Thread(target=stop).start()",
    )
    cell = f"{head}\nimport time\nfrom pathlib import Path\nPath({str(began)!r}).touch()\nwhile True: time.sleep(0.05)"
    said = "engine 0 has not answered, nor has the controller: it has stopped, or cannot be reached; start the cluster"
    assert said in refusal(kernel, cell)
    kernel.run("cluster.stop_cluster_sync()")


def test_an_engine_that_dies_before_it_is_asked_is_not_there_any_more() -> None:
    error = pytest.importorskip("ipyparallel").error

    class Client:
        ids = (0, 1, 2)

        def __getitem__(self, number: int) -> Client:
            if number:
                raise error.NoEnginesRegistered if number == 2 else IndexError
            return self

        def execute(self, source: str, **_: bool) -> str:
            return source

    engines = Engines(Client(), (0, 1, 2, 3))
    asked = engines.run("1")
    assert asked == {0: "1"}
    assert engines.only((1, 2, 3)).answers(asked)[1] == dict.fromkeys((1, 2, 3), "is not there any more")
