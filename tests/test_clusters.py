"""Experiments and commands run on all engines of a real cluster, and one record and report is made
of theirs.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.cluster.engines_report import engines_report, merged_record, values_of
from ipygpumem.records import CellRecord, EngineRecord, ExperimentRecord, Usage
from ipygpumem.units import GIB, MIB
from tests.clusters import CTRL_C, ID, UNTIL, last_record, on_engines, start_cluster
from tests.steps import experiment, run_cells

NAMES_ON_ENGINE = "sorted(name for name in globals() if name in ('x', 'y', 'w', 'theirs'))"
NUMBER_OF_OPEN = (
    "(lambda found: len(found.experiments.open) if found else 0)"
    "(__import__('ipygpumem.shell.app').shell.app.find_app(get_ipython()))"
)


def refusal(kernel: Kernel, cell: str) -> str:
    """Return the one line that a cell with a mistake shows."""
    reply = kernel.run(cell)
    assert reply.status == "error"
    (line,) = [line for line in reply.stderr.splitlines() if line.startswith("UsageError: ")]
    return line


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel() as kernel:
        run_cells(kernel, "%load_ext ipygpumem")
        start_cluster(kernel, tmp_path_factory.mktemp("profile"))
        yield kernel
        kernel.run("cluster.stop_cluster_sync()")


@pytest.fixture
def cluster(shared: Kernel) -> Kernel:
    """The module's cluster, without the names of earlier tests on its engines."""
    run_cells(
        shared,
        "_ = rc[:].apply_sync(exec, \"for name in ('x', 'y', 'w', 'theirs'): globals().pop(name, "
        'None)")',
    )
    return shared


def test_a_cell_runs_as_an_experiment_on_every_engine(cluster: Kernel) -> None:
    reply = run_cells(
        cluster,
        f"""
        %%experiment sweep --on all --keep w
        x = bytearray(2**26)
        w = {ID}
        print('id', w)
        w+1
        """,
    )

    # The record of each engine.
    experiment = last_record(cluster)
    assert [engine["engine"] for engine in experiment["engines"]] == [0, 1, 2, 3]
    assert (experiment["deleted"], experiment["kept"]) == (("x",), ("w",))
    for engine in experiment["engines"]:
        (usage,) = [usage for usage in engine["record"]["usages"] if usage["device"] == "cpu"]
        # Linux counts the pages of each thread in steps.
        assert usage["peak_bytes"] - usage["before_bytes"] >= 63 * MIB
        assert engine["free"]["cpu"] > 0
        assert engine["pid"] != cluster.value("__import__('os').getpid()")

    # The record of them all.
    assert experiment["consumed"]["cpu"] >= 4 * 63 * MIB, "the sum over the engines"
    assert experiment["freed"]["cpu"] >= 4 * 63 * MIB
    assert on_engines(cluster, "w") == [0, 1, 2, 3]
    assert on_engines(cluster, NAMES_ON_ENGINE) == [["w"]] * 4
    assert cluster.value("'x' in globals()") is False, "nothing runs in the notebook itself"
    assert [f"id {number}" in reply.stdout for number in range(4)] == [True] * 4

    # What the notebook shows.
    (text,) = reply.reports("engines")
    assert text.startswith("experiment sweep · on 4 engines · ")
    assert re.search(r"RAM +peak +4 +\+6\d(\.\d)? MiB", text)


def test_failed_engines_are_named_and_other_results_are_kept(cluster: Kernel) -> None:
    source = (
        f"%%experiment failing --on all\nx = 1\nif {ID} == 1: raise MemoryError('full')\nif {ID} "
        f"!= 3: y = 2"
    )
    reply = cluster.run(source)
    assert (reply.status, reply.error) == ("error", "CompositeError"), "Run all stops"
    experiment = last_record(cluster)
    assert [engine["error"] for engine in experiment["engines"]] == ["", "MemoryError", "", ""]
    assert experiment["ooms"] == 1
    (text,) = reply.reports("engines")
    assert "engine 1 (" in text
    assert "): MemoryError" in text
    assert on_engines(cluster, NAMES_ON_ENGINE) == [[]] * 4, "each engine has ended its experiment"


def test_an_experiment_spans_cells_of_px(cluster: Kernel) -> None:
    run_cells(
        cluster,
        "%experiment start span --on 0-2 --keep x --note lr=0.1",
        "%px x = bytearray(2**25)",
    )
    assert "on engines 0-2" in "".join(run_cells(cluster, "%experiment status").reports())
    run_cells(cluster, "%px y = 2", "%experiment end")
    experiment = last_record(cluster)
    assert [len(engine["record"]["cells"]) for engine in experiment["engines"]] == [2, 2, 2]
    assert experiment["parameters"] == {"lr": 0.1}
    assert on_engines(cluster, NAMES_ON_ENGINE) == [["x"], ["x"], ["x"], ["x", "y"]], (
        "engine 3 took no part"
    )
    assert "no experiment is open" in refusal(cluster, "%experiment end")


def test_an_interrupt_reaches_an_engine_that_sleeps(cluster: Kernel, tmp_path: Path) -> None:
    asleep = tmp_path / "asleep"
    run_cells(
        cluster,
        f"{CTRL_C}\nctrl_c(lambda: os.path.exists({str(asleep)!r}) and len(rc.outstanding) == 1)",
    )
    source = (
        f"%%experiment slow --on all\n{UNTIL}x = 1\n"
        f"if {ID} == 2: Path({str(asleep)!r}).touch(); until({str(tmp_path / 'never')!r})"
    )
    assert cluster.run(source).error == "KeyboardInterrupt"
    assert [engine["error"] for engine in last_record(cluster)["engines"]] == [
        "",
        "",
        "KeyboardInterrupt",
        "",
    ]
    assert on_engines(cluster, NAMES_ON_ENGINE) == [[]] * 4


STRIKES_IN = """
from ipygpumem.extras.cluster.on_engines import Engines
original = Engines.NAME
def struck(*args, **options):
    Engines.NAME = original
    import os
    os.kill(os.getpid(), 2)
    return original(*args, **options)
Engines.NAME = struck
"""


EXPERIMENT_CELL = "%%experiment a --on all\nx = 1"
EXPERIMENT_START = "%experiment start a --on all"
MOMENTS = [(EXPERIMENT_CELL, "run"), (EXPERIMENT_START, "replies")]
REST = [(EXPERIMENT_CELL, place) for place in ("ask", "wait", "replies", "forget")] + [
    (EXPERIMENT_START, "ask"),
    (EXPERIMENT_START, "wait"),
]
MOMENTS += [pytest.param(*moment, marks=pytest.mark.thorough) for moment in REST]


@pytest.mark.parametrize(("cell", "place"), MOMENTS)
def test_a_ctrl_c_at_any_moment_ends_experiments_on_all_engines(
    cluster: Kernel, cell: str, place: str
) -> None:
    run_cells(cluster, "%gpumem status --on all")  # loads the extension there
    run_cells(cluster, STRIKES_IN.replace("NAME", place))
    assert cluster.run(cell, timeout=60).error == "KeyboardInterrupt"
    assert on_engines(cluster, NUMBER_OF_OPEN) == [0] * 4
    assert on_engines(cluster, NAMES_ON_ENGINE) == [[]] * 4
    assert "no experiment is open" in refusal(cluster, "%experiment end")


KEEP_BUSY = "rc[1].execute('import time\\nwhile True: time.sleep(0.05)', block=False)"
STOP_BUSY = "rc.send_signal(2, targets=[1], block=True)\nbusy.wait(30)"


def test_a_second_ctrl_c_stops_waiting_for_a_stuck_engine(cluster: Kernel, tmp_path: Path) -> None:
    deaf, end = tmp_path / "deaf", tmp_path / "end"
    source = f"%%experiment deaf --on 0-1\nimport signal\n{UNTIL}if {ID} == 1:\n" + (
        "    before = signal.signal(2, signal.SIG_IGN)\n"
        f"    Path({str(deaf)!r}).touch(); until({str(end)!r})\n    signal.signal(2, before)"
    )
    grace = (
        "from ipygpumem.extras.cluster import on_engines as e\nbefore, e._GRACE_SECONDS = "
        "e._GRACE_SECONDS, 600"
    )
    run_cells(
        cluster, f"{grace}\n{CTRL_C}\nctrl_c(lambda: os.path.exists({str(deaf)!r}), lambda: True)"
    )
    try:
        assert cluster.run(source).error == "KeyboardInterrupt"
        assert "its cell continues" in last_record(cluster)["engines"][1]["error"]
    finally:
        end.touch()
        run_cells(cluster, "e._GRACE_SECONDS = before")
    assert on_engines(cluster, NUMBER_OF_OPEN) == [0] * 4, "it has ended with its cell"


def test_a_busy_engine_is_left_out_and_does_not_begin_later(cluster: Kernel) -> None:
    seconds = (
        "from ipygpumem.extras.cluster import on_engines as e\nbefore, e._START_SECONDS = "
        "e._START_SECONDS, 3"
    )
    run_cells(cluster, f"{seconds}\nbusy = {KEEP_BUSY}")
    try:
        run_cells(cluster, experiment("x = 1", name="around", options="--on all"))
        assert [engine["error"] for engine in last_record(cluster)["engines"]] == [
            "",
            "did not reply",
            "",
            "",
        ]
        run_cells(cluster, f"{CTRL_C}\nctrl_c(lambda: True)")
        assert cluster.run("%%experiment a --on 1\n1").error == "KeyboardInterrupt"
        assert cluster.value("busy.ready()") is False, "what runs there is the user's"
    finally:
        run_cells(cluster, f"{STOP_BUSY}\ne._START_SECONDS = before")
    (text,) = run_cells(cluster, "%gpumem status --on 1").reports("engines")
    assert "no experiment is open" in text, "the request that waited for it was cancelled"


def test_commands_show_a_summary_and_a_report_for_each_engine(cluster: Kernel) -> None:
    (text,) = run_cells(cluster, "%gpumem status --on all").reports("engines")
    assert text.startswith("%gpumem status on 4 engines\n")
    assert len(re.findall(r"^ *engine \d \(.+\):$", text, re.MULTILINE)) == 4
    assert re.search(r"RAM +in use +4 +[\d.]+ MiB", text)
    (text,) = run_cells(cluster, "%gpumem free --on 0,2").reports("engines")
    assert re.search(r"RAM +freed +2 ", text)
    assert "engine 2 (" in text
    assert "engine 1 (" not in text
    (text,) = run_cells(cluster, "%gpumem leaks --on 3").reports("engines")
    assert text.startswith("%gpumem leaks on 1 engine\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%experiment end typo --on all", "no experiment 'typo' is open there"),
        ("%%experiment a --on 9\nx = 1", "the cluster has no engine 9; it has engines 0-3"),
        (
            "none = rc.direct_view([])\n%gpumem status --on none",
            "--on names no engine; the cluster has engines 0-3",
        ),
        ("%%experiment a --on nobody\nx = 1", "--on nobody: write all, numbers of engines"),
        ("%gpumem tensors --on all", "--on"),
        ("%%experiment --on all\nx = 1", "%%experiment --on: which name?"),
    ],
)
def test_a_mistake_is_one_line_and_runs_nothing(cluster: Kernel, line: str, said: str) -> None:
    assert said in refusal(cluster, line)
    assert on_engines(cluster, NAMES_ON_ENGINE) == [[]] * 4


def test_an_engine_without_the_extension_is_named(cluster: Kernel) -> None:
    hide = "import sys; sys.modules['ipygpumem.extras.cluster.engine'] = None"
    run_cells(cluster, f"rc[1].execute({hide!r}, block=True)")
    try:
        reply = run_cells(cluster, experiment("x = 1", name="some", options="--on all"))
        errors = [engine["error"] for engine in last_record(cluster)["engines"]]
        assert [bool(error) for error in errors] == [False, True, False, False]
        assert errors[1].startswith("has no ipygpumem, or an older one")
        assert "on 4 engines" in reply.reports("engines")[0]
    finally:
        run_cells(
            cluster,
            "rc[1].execute('import sys; del sys.modules[\"ipygpumem.extras.cluster.engine\"]', "
            "block=True)",
        )


def test_an_experiment_of_a_closed_client_blocks_no_new_client(cluster: Kernel) -> None:
    run_cells(
        cluster,
        """
        %experiment start shut --on all
        rc.close()
        """,
    )
    try:
        assert "is closed: connect again" in refusal(cluster, "%experiment end")
        assert "no experiment is open" in refusal(cluster, "%experiment end")
    finally:
        run_cells(
            cluster,
            """
            rc = cluster.connect_client_sync()
            rc.wait_for_engines(4)
            rc.activate()
            """,
        )
    run_cells(cluster, "%experiment end shut --on all")
    assert [bool(engine["record"]) for engine in last_record(cluster)["engines"]] == [True] * 4


def test_a_view_names_its_engines_without_asking_a_closed_client(cluster: Kernel) -> None:
    run_cells(
        cluster,
        """
        pair = rc[1:3]
        every = rc.broadcast_view()
        """,
    )
    for name, numbers in {"pair": [1, 2], "every": [0, 1, 2, 3]}.items():
        run_cells(
            cluster,
            f"""
            %%experiment two --on {name}
            x = 1
            """,
        )
        assert [engine["engine"] for engine in last_record(cluster)["engines"]] == numbers
    run_cells(
        cluster,
        """
        other = cluster.connect_client_sync()
        old = other[:]
        other.close()
        """,
    )
    assert "the client of that view is closed" in refusal(cluster, "%%experiment two --on old\n1")
    run_cells(cluster, "del other, old, pair")


@pytest.fixture
def other(cluster: Kernel) -> Iterator[Kernel]:
    """The module's cluster, with a view of another client on its first engine."""
    run_cells(
        cluster,
        """
        client = cluster.connect_client_sync()
        client.wait_for_engines(4)
        other = client[0]
        """,
    )
    yield cluster
    run_cells(
        cluster,
        """
        client.close()
        del client, other
        """,
    )


MEANWHILE = """
from ipygpumem.extras.cluster.on_engines import Engines
original = Engines.run
def meanwhile(*args):
    Engines.run = original
    global task
    task = other.execute(THEIRS, silent=False, block=False)
    while task.metadata["execute_input"] is None:
        time.sleep(0.01)
    return original(*args)
Engines.run = meanwhile
"""
"""Lets the other client run something before our cell, and after we have asked whether all can
begin.
"""


def test_cells_of_another_client_belong_to_no_experiment(other: Kernel) -> None:
    run_cells(other, "%px %load_ext ipygpumem")
    run_cells(other, "other.execute('%experiment start a\\ntheirs = 1', silent=False, block=True)")
    run_cells(other, experiment("x = 1", name="a", options="--on 0"))
    assert on_engines(other, NAMES_ON_ENGINE)[0] == ["theirs"], (
        "of the same name, but each ends its own"
    )
    run_cells(other, "other.execute('%experiment end', silent=False, block=True)")
    assert on_engines(other, NAMES_ON_ENGINE)[0] == []
    run_cells(other, "%experiment start span --on all", "%px x = 1")
    run_cells(
        other,
        """
        other.execute('theirs = 1', silent=False, block=True)
        other.execute('w = 1', block=True)
        """,
    )
    run_cells(other, "%experiment end")
    assert on_engines(other, NAMES_ON_ENGINE) == [["theirs", "w"], [], [], []]
    assert last_record(other)["deleted"] == ("x",)
    assert [len(engine["record"]["cells"]) for engine in last_record(other)["engines"]] == [1] * 4
    run_cells(
        other,
        f"import time{MEANWHILE.replace('THEIRS', repr('theirs = 2'))}",
        experiment("x = 1", name="span", options="--on all"),
    )
    assert on_engines(other, "globals().get('theirs')")[0] == 2


def test_a_ctrl_c_spares_another_clients_earlier_task(other: Kernel, tmp_path: Path) -> None:
    end, ran = tmp_path / "end", tmp_path / "ran"
    run_cells(
        other, f"import time{MEANWHILE.replace('THEIRS', repr(f'{UNTIL}until({str(end)!r})'))}"
    )
    run_cells(
        other,
        f"{CTRL_C}\nctrl_c(lambda: os.path.exists({str(ran)!r}) and len(rc.outstanding) == 1)",
    )
    source = (
        f"%%experiment a --on 0,1\nfrom pathlib import Path\nx = 1\nif {ID}: "
        f"Path({str(ran)!r}).touch()"
    )
    assert other.run(source, timeout=60).error == "KeyboardInterrupt"
    assert "its cell had not begun and was cancelled" in last_record(other)["engines"][0]["error"]
    assert other.value("task.ready()") is False
    end.touch()
    run_cells(other, "_ = task.get(60)")
    assert on_engines(other, NAMES_ON_ENGINE) == [[]] * 4
    assert on_engines(other, NUMBER_OF_OPEN) == [0] * 4


def test_an_engine_that_dies_is_named_and_the_rest_goes_on(kernel: Kernel, tmp_path: Path) -> None:
    start_cluster(kernel, tmp_path, 2)
    run_cells(
        kernel,
        """
        %%experiment first --on all
        x = 1
        """,
    )
    for engine in last_record(kernel)["engines"]:
        (usage,) = [usage for usage in engine["record"]["usages"] if usage["device"] == "cpu"]
        assert usage["peak_bytes"] - usage["before_bytes"] < 3 * MIB, (
            "what we import there is not the experiment's"
        )

    # The second engine dies.
    reply = kernel.run(
        f"%%experiment deadly --on all\nimport os\nif {ID} == 1: os._exit(1)\nx = bytearray(2**25)"
    )
    assert reply.error == "CompositeError"
    experiment = last_record(kernel)
    assert [engine["error"] for engine in experiment["engines"]] == ["", "died"]
    assert [engine["record"] is None for engine in experiment["engines"]] == [False, True]
    (text,) = reply.reports("engines")
    assert "· on 2 engines ·" in text
    assert "1 failed" in text

    # What is left goes on.
    run_cells(
        kernel,
        """
        %%experiment rest --on all
        x = 1
        """,
    )
    assert [engine["engine"] for engine in last_record(kernel)["engines"]] == [0]
    kernel.run("cluster.stop_cluster_sync()")


def test_on_without_a_cluster_says_how_to_start_one(kernel: Kernel) -> None:
    assert "pip install ipyparallel" in refusal(kernel, "%%experiment a --on all\n1")
    run_cells(kernel, "import ipyparallel")
    assert "--on needs a running cluster" in refusal(kernel, "%gpumem free --on all")


def usage(device: str, kept: int, peak: int) -> Usage:
    return Usage(device, GIB, GIB + kept * MIB, GIB + peak * MIB, None, "kernel")


def engine(
    number: int, *usages: Usage, seconds: float = 1.0, error: str = "", **changes: object
) -> EngineRecord:
    """One engine whose experiment had one cell; ``changes`` are of the experiment."""
    cell = CellRecord(1, None, "s", 0.0, seconds, not error, error or None, usages)
    sizes = {"cpu": MIB, "children": 0}
    record = ExperimentRecord("s", 0.0, 9.0, (cell,), usages, sizes, sizes, ("x",), (), (), ())
    record = replace(record, **changes)  # type: ignore[arg-type]
    return EngineRecord(
        number, f"host{number // 2}", 100 + number, {}, {"cpu": number * GIB}, "v", error, record
    )


def four(*peaks: int, **changes: object) -> list[EngineRecord]:
    idle = Usage("children", 9 * MIB, 9 * MIB, 9 * MIB, None, "sampled")
    return [
        engine(number, usage("cpu", 2, peak), idle, **changes) for number, peak in enumerate(peaks)
    ]  # type: ignore[arg-type]


def test_figures_of_engines_are_summarised_by_kind_of_device() -> None:
    report = engines_report(merged_record("s", 0.0, 1.0, four(10, 30, 20, 40)))
    rows = {tuple(row[:2]): row[2:] for row in report.tables[0].rows}
    assert rows["RAM", "peak"] == ("4", "", "+10 MiB", "+20 MiB", "+40 MiB", "engine 3")
    assert rows["RAM", "kept"] == ("4", "+8 MiB", "+2 MiB", "+2 MiB", "+2 MiB", "")
    assert ("child processes", "peak") not in rows
    assert "child" not in report.headline
    one = engine(0, usage("cuda:0", 5, 100), usage("cuda:1", 7, 300))
    values = values_of(one)
    assert (values["peak", "cuda"], values["kept", "cuda"]) == (300 * MIB, 12 * MIB)


def test_equal_errors_and_notes_of_engines_are_shown_once() -> None:
    engines = [
        *four(1, 1, notes=("a note",)),
        *(replace(one, error="KeyError") for one in four(1, 1, 1)[2:]),
    ]
    engines = [*engines, EngineRecord(3, error="died"), EngineRecord(4, error="died")]
    engines[1] = replace(
        engines[1], record=replace(engines[1].record, deleted=("x", "y"), kept=("z",))
    )  # type: ignore[type-var]
    merged = merged_record("s", 5.0, 1.0, engines)
    assert merged.notes == (
        "engines 0-1: a note",
        "engine 2 (host1): KeyError",
        "engines 3-4: died",
    )
    assert (merged.deleted, merged.kept) == (("x", "y"), ("z",))
    assert merged.consumed == merged.freed == {"cpu": 3 * MIB, "children": 0}
    sums, _ = merged.usages
    assert sums.device == "cpu"
    assert sums.peak_delta_bytes == 3 * MIB
    assert sums.delta_bytes == 6 * MIB
    assert engines_report(merged).is_trouble
