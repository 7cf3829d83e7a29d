"""The session's events: cells that nest, vanish, repeat, or never began."""

import ast
import contextlib
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.inventory.leaks.trends import Growing
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.oom_kills import Kills
from ipygpumem.records import Growth
from ipygpumem.report.layout import Report, note
from ipygpumem.report.scales import Scales
from ipygpumem.shell import recovery
from ipygpumem.shell.advised_lines import AdvisedLines
from ipygpumem.shell.app import App
from ipygpumem.shell.cell import CellStack
from ipygpumem.shell.config import IPyGpuMem
from ipygpumem.shell.experiments.experiment_handle import Experiment
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.units import MIB
from tests.control_group import v2_system
from tests.fakes import FakeProbe


def info_of(source: str) -> Any:
    return SimpleNamespace(raw_cell=source, cell_id=None)


def result_of(info: Any, number: int | None = 1, error: BaseException | None = None) -> Any:
    return SimpleNamespace(
        info=info, execution_count=number, error_before_exec=None, error_in_exec=error, result=None
    )


def observer(**hooks: Any) -> Any:
    """Return an observer with these hooks; the others do nothing."""
    others = dict.fromkeys(("cell_begins", "cell_ended", "cell_shown", "close"), lambda *_: ())
    return SimpleNamespace(**{**others, **hooks})


class Recorder:
    """Stands in for the display."""

    def __init__(self) -> None:
        self.shown: list[Report] = []
        self.scales = Scales()
        self.advised = AdvisedLines()

    def show(
        self, reports: list[Report], cell: object = None, *, display_id: str | None = None
    ) -> None:
        self.shown += reports


@pytest.fixture
def probe() -> FakeProbe:
    return FakeProbe()


def app_in(shell: InteractiveShell, config: IPyGpuMem, probe: FakeProbe) -> tuple[App, Recorder]:
    """Return an App without the extension around it, and the recorder of its reports."""
    app = App(shell, config, probes=[probe])
    recorder = Recorder()
    vars(app.context)["display"] = recorder
    return app, recorder


@pytest.fixture
def app(shell: InteractiveShell, probe: FakeProbe) -> App:
    return app_in(shell, IPyGpuMem(), probe)[0]


def shown_in(app: App) -> list[Report]:
    display: Any = app.context.display
    shown: list[Report] = display.shown
    return shown


def test_the_line_says_that_the_oom_killer_took_a_process(
    shell: InteractiveShell, probe: FakeProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = v2_system(tmp_path, "/job")
    system.write("sys/fs/cgroup/job/memory.events", "oom_kill 1\n")
    monkeypatch.setattr(recovery, "Kills", lambda: Kills(tmp_path))
    app, recorder = app_in(shell, IPyGpuMem(quiet=True), probe)
    for kills in (1, 2, 2, 4):
        info = info_of("join()")
        app.session.cell_begins(info)
        system.write("sys/fs/cgroup/job/memory.events", f"oom_kill {kills}\n")
        app.session.cell_ends(result_of(info))
    told = (
        "the OOM killer ended {} of this control group, such as a data loader's worker or a forked "
        "child"
    )
    assert [item.lines for item in recorder.shown] == [
        (told.format(what),) for what in ("1 process", "2 processes")
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    "step", ["_finish_measurement", "_reports_with_line", "_recover", "cell_ended"]
)
def test_a_failure_at_a_cells_end_prevents_no_other_step(
    app: App, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    info = info_of("x")
    app.session.cell_begins(info)
    experiment = Experiment(app.experiments, "one cell").start()
    app.experiments.end_with_cell(experiment)
    if step[0] == "_":
        monkeypatch.setattr(app.session, step, failing)
    else:
        app.session.observers = (observer(**{step: failing}), *app.session.observers)
    with contextlib.suppress(RuntimeError):  # the extension's guard says it
        app.session.cell_ends(result_of(info))
    assert [record.name for record in app.experiments.finished] == ["one cell"]
    assert (app.experiments.open, len(app.context.meter._open)) == ([], 0)
    assert "experiment" in [report.kind for report in shown_in(app)]


def test_a_part_whose_end_fails_keeps_no_other_from_closing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise RuntimeError("no end")

    Experiment(app.experiments, "open").start()
    app.session.observers = (observer(close=failing), *app.session.observers)
    with pytest.raises(RuntimeError, match="no end"):
        app.close()
    assert app.experiments.open == []
    assert len(app.context.meter._open) == 0


def run(app: App, source: str) -> None:
    info = info_of(source)
    app.session.cell_begins(info)
    tree = ast.parse(source)
    app.experiments.code.code_seen(tree, may_change=False, is_timed=False)
    exec(compile(tree, "cell", "exec"), app.context.namespace)
    app.session.cell_ends(result_of(info))


@pytest.fixture
def experiment_with_search(
    app: App, probe: FakeProbe, monkeypatch: pytest.MonkeyPatch
) -> Experiment:
    """An experiment of which the search for survivors raises the RAM to 17 MiB."""

    def look(*args: object, **options: object) -> tuple[()]:
        probe.set(17 * MIB)
        return ()

    monkeypatch.setattr(app.experiments.survivors, "rows_of_experiment", look)
    experiment = Experiment(app.experiments, "a").start()
    app.context.namespace["finish"] = experiment.finish
    return experiment


def test_an_experiment_and_its_last_cell_agree(
    app: App, experiment_with_search: Experiment
) -> None:
    run(app, "finish()")
    record = experiment_with_search.record
    assert record is not None
    assert record.freed == {"cpu": 0}
    last_cell = app.session.history[-1]
    # What the search set.
    assert record.usages[0].after_bytes == last_cell.usages[0].after_bytes == 17 * MIB


def test_the_search_for_survivors_is_no_peak_of_an_experiment(
    app: App, experiment_with_search: Experiment
) -> None:
    (at_start,) = experiment_with_search.measured_scope.usages()
    run(app, "finish()")
    record = experiment_with_search.record
    assert record is not None
    (usage,) = record.usages
    # The search set 17 MiB.
    assert usage.peak_bytes == at_start.peak_bytes < 17 * MIB


def test_memory_that_the_end_itself_takes_is_in_no_note(app: App, probe: FakeProbe) -> None:
    class Noted:
        def __del__(self) -> None:
            probe.set(900 * MIB)

    experiment = Experiment(app.experiments, "a").start()
    app.context.namespace.update(noted=Noted(), finish=experiment.finish)
    run(app, "finish()")
    assert experiment.record is not None
    assert [note for note in experiment.record.notes if "still in use" in note] == []


def run_cell(app: App, number: int = 1, error: BaseException | None = None) -> list[str]:
    """Run a cell that does nothing, and return the headlines of what is shown."""
    shown = shown_in(app)
    shown.clear()
    info = info_of("x")
    app.session.cell_begins(info)
    app.session.cell_ends(result_of(info, number, error))
    return [report.headline for report in shown]


def test_quiet_hides_no_error_no_growth_and_no_note(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.context.config.quiet = True
    (line,) = run_cell(app, error=ValueError())
    assert "ValueError" in line
    monkeypatch.setattr(
        app.session.trends, "add", lambda record: Growing([Growth("cpu", 3, MIB, MIB)])
    )
    (line,) = run_cell(app)
    assert line.startswith("cell 1 · RAM")
    assert "has grown RAM" in shown_in(app)[0].lines[0]
    monkeypatch.undo()
    told = note("a budget was crossed")
    monkeypatch.setattr(app.experiments, "code_ended", lambda cell: cell.below.append(told))
    assert run_cell(app) == [told.headline]


KINDS = st.sampled_from(["begin", "end", "end again", "end unknown", "end none"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 9)))


@settings(deadline=None)
@given(EVENTS)
def test_any_order_of_events_ends_each_cell_at_most_once(events: list[tuple[str, int]]) -> None:
    stack = CellStack()
    begun: list[Any] = []
    ended: list[Any] = []
    lost: list[Any] = []
    for event, number in events:
        if event == "begin":
            info = info_of(f"cell {len(begun)}")
            begun.append(info)
            assert stack.push(info).is_nested == (len(stack.running()) > 1)
            continue

        # An end: of a known cell, of a cell that has ended, of an unknown one, or of any.
        candidates = {"end": begun, "end again": ended}.get(event, [])
        if event == "end none":
            result = None
        else:
            result = result_of(
                candidates[number % len(candidates)] if candidates else info_of("unknown")
            )
        cell, inside = stack.pop(result)
        if cell is not None:
            assert result is None or cell.info is result.info
            ended.append(cell.info)
        lost += [other.info for other in inside]

    # No cell has ended twice, and each is running, ended or lost.
    gone = [id(info) for info in ended + lost]
    assert len(gone) == len(set(gone))
    assert len(stack.running()) == len(begun) - len(gone)


@pytest.fixture
def timed(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """The loaded extension with a clock that only ``wait(seconds)`` moves."""
    passed = [0.0]

    def wait(seconds: float) -> None:
        passed[0] += seconds

    for module in (
        "session",
        "cell",
        "experiments.managed_experiment",
        "experiments.experiment_log",
    ):
        monkeypatch.setattr(f"ipygpumem.shell.{module}.perf_counter", lambda: passed[0])
    shell.user_ns["wait"] = wait
    shell.run_cell("%load_ext ipygpumem")
    return shell


@pytest.mark.usefixtures("others_out_of_sight")
def test_an_experiments_time_sums_its_cells_apart_from_its_span(
    timed: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three cells take 2 minutes together; an hour passes after each.
    for cell in ("%experiment start main\nwait(20)", "wait(60)", "%%experiment inner\nwait(40)"):
        timed.run_cell(cell)
        timed.user_ns["wait"](3600)
    capsys.readouterr()

    # The last one takes 3 minutes.
    timed.run_cell("""
        wait(180)
        %experiment status
        %experiment end
        """)
    shown = capsys.readouterr().out
    assert re.search(r"experiment main · 5 min 0 s · span 3 h 5 min", shown)
    assert re.search(r"experiment main · 3 cells · 5 min \d+ s · span 3 h 5 min", shown)

    # The records have the times of the reports.
    times = {
        item.name: (item.duration_seconds, item.span_seconds) for item in ipygpumem.experiments()
    }
    assert times == {"inner": (40, 40), "main": (300, 11_100)}
    timed.run_cell("""
    %experiment list
    %experiment compare
    """)
    shown = capsys.readouterr().out
    heads = [line.split()[:3] for line in shown.splitlines() if "span" in line]
    assert heads == [["experiment", "began", "time"], ["experiment", "time", "span"]]
    assert shown.count("3 h 5 min") == 2


@pytest.mark.usefixtures("others_out_of_sight")
def test_a_blocks_time_is_only_its_own_part_of_the_cell(timed: InteractiveShell) -> None:
    timed.run_cell(
        """
        import ipygpumem
        wait(50)
        with ipygpumem.experiment('block'): wait(500)
        wait(50)
        """
    )
    (record,) = ipygpumem.experiments()
    assert (record.duration_seconds, record.span_seconds) == (500, 500)


@pytest.mark.usefixtures("others_out_of_sight")
def test_an_experiments_span_is_never_below_its_time(
    timed: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell that started it is longer than the span since then."""
    timed.run_cell("""
    wait(500)
    %experiment start outer
    """)
    capsys.readouterr()
    timed.run_cell("%experiment status")
    assert "span" not in capsys.readouterr().out.splitlines()[0]
    timed.run_cell("%experiment end outer")
    record = ipygpumem.experiments()[-1]
    assert record.span_seconds >= record.duration_seconds >= 500


def test_status_lists_the_names_of_each_open_experiment(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in (
        "%experiment start outer",
        "x, both = 1, 2",
        "%experiment start inner",
        "y = both = 3",
    ):
        loaded.run_cell(cell)
    capsys.readouterr()
    loaded.run_cell("%experiment status")
    outer, inner, *_ = capsys.readouterr().out.splitlines()
    assert "names: x, both" in outer
    assert "names: both, y" in inner


@pytest.mark.usefixtures("others_out_of_sight")
def test_a_captured_experiment_has_its_time_in_the_report(
    timed: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    timed.run_cell("""
    %%capture shown
    %%experiment captured
    wait(30)
    """)
    record = ipygpumem.experiments()[-1]
    assert record.span_seconds >= record.duration_seconds == pytest.approx(30, abs=10)
    timed.run_cell("shown()")
    assert "experiment captured · 1 cell · 30" in capsys.readouterr().out


def test_a_cells_time_begins_after_our_own_work(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine makes that work long: processes that the cell starts would begin after its
    end.
    """
    begun = list[float]()
    cell_begins = ExperimentManager.cell_begins

    def note_time(*args: Any) -> None:
        cell_begins(*args)
        begun.append(time.time())

    monkeypatch.setattr(ExperimentManager, "cell_begins", note_time)
    loaded.run_cell("1")
    assert ipygpumem.history()[-1].started_at >= begun[-1]


def test_a_step_that_did_nothing_gets_no_credit(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = itertools.count(4000, -1)

    def read(self: HostProbe) -> tuple[int, int]:
        size = next(falling) * MIB  # as if another thread freed a MiB between any two readings
        return size, size

    monkeypatch.setattr(HostProbe, "_rss_and_peak", read)
    for cell in (
        "%load_ext ipygpumem",
        "%%experiment a\npass",
        "%%experiment b\nx = 1",
        "%%experiment c\n1 / 0",
    ):
        shell.run_cell(cell)
    given = [
        {step.name for step in item.steps if step.freed["cpu"] > 0}
        for item in ipygpumem.experiments()
    ]
    assert [steps & {"names", "tracebacks"} for steps in given] == [
        set(),
        {"names"},
        {"tracebacks"},
    ]


def test_memory_left_by_a_reset_counts_as_outputs(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    big = "class Big:\n    def __init__(self):\n        self.data = b'x' * (64 << 20)"
    for cell in ("%load_ext ipygpumem", big, "Big()", "%reset -f out"):
        shell.run_cell(cell, store_history=True)
    capsys.readouterr()
    shell.run_cell("%gpumem free")
    assert re.search(
        r"^  freed by: outputs \(RAM 6[34](\.\d)? MiB\)", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.usefixtures("others_out_of_sight")
def test_a_ctrl_c_that_leaves_an_experiment_open_says_so(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    loaded.run_cell("""
    %experiment start m --report none
    x = 1
    """)
    with monkeypatch.context() as patch:
        patch.setattr(ExperimentManager, "_try_to_end", interrupted)
        error = loaded.run_cell("%experiment end").error_in_exec
    assert str(error) == "the experiment m is still open: run %experiment end again"
    shown = "".join(capsys.readouterr())
    assert f"KeyboardInterrupt: {error}" in shown
    assert "ipygpumem/" not in shown
    assert loaded.user_ns["x"] == 1
    loaded.run_cell("%experiment end")
    assert "x" not in loaded.user_ns
