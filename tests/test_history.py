"""Histories, comparisons, the table for pandas; sources, parameters and OOMs in records."""

import dataclasses
import enum
import importlib.util
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import ExperimentError, GpuMemError
from ipygpumem.magics.experiment import parse_parameters
from ipygpumem.records import CellRecord, ExperimentRecord, History, SessionRecord
from ipygpumem.report import history as reports
from ipygpumem.report.layout import Table
from ipygpumem.shell.app import app_of
from ipygpumem.shell.experiments.experiment_options import checked_parameters
from ipygpumem.shell.ipython.sources import cell_that_bound
from ipygpumem.shell.session import describing_line
from ipygpumem.units import MIB
from tests.session_samples import SESSION, cell, experiment, oom, usage

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_a_history_is_a_list_whose_slices_are_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(number) for number in range(5)]
    history = History(cells)
    assert history == cells
    assert history[1:3] == cells[1:3]
    assert type(history[1:3]) is History
    assert repr(history[:1]) == "<History of 1 cell, 2.0 s>"
    saved = SessionRecord(0.0, tuple(cells), (experiment("a"),))
    assert repr(saved) == "<SessionRecord of 5 cells, 1 experiment and 0 traces>"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuMemError, match="pip install pandas"):
        history.to_pandas()


def test_pandas_gets_a_row_per_cell_with_units_in_the_names() -> None:
    pandas = pytest.importorskip("pandas")
    cells = [
        cell(1),
        cell(None, usages=(), success=False, error="ValueError", recovery=oom()),
        cell(3, cell_id=None),
    ]
    table = History(cells).to_pandas()
    assert len(table) == 3
    assert table["cpu_delta_bytes"].tolist()[::2] == [50 * MIB, 50 * MIB]
    assert table["cuda:0_peak_delta_bytes"].sum() == 600 * MIB
    assert table["cpu_after_bytes"].isna().tolist() == [False, True, False]
    assert table["execution_count"].isna().tolist() == [False, True, False]
    assert table["recovery"].isna().tolist() == [True, False, True]
    assert str(table["started_at"].dtype).startswith("datetime64")
    assert table["started_at"][0] == pandas.Timestamp(1.5, unit="s", tz="UTC")
    assert "source_line" in History().to_pandas().columns


def test_the_history_shows_used_devices_and_no_empty_columns() -> None:
    idle = dataclasses.replace(usage("cuda:1", 0, 0, 0), reserved_bytes=0)
    report = reports.history_report([cell(7, usages=(usage(), idle))], total=5, experiment="a")
    assert report.tables[0].columns == ("cell", "RAM kept", "RAM peak", "time", "source")
    assert report.tables[0].rows == (("7", "+50 MiB", "+300 MiB", "2.00 s", "train()"),)
    assert report.headline == "history · the last 1 of 5 cells of a · 2.00 s"


def test_a_comparison_has_parameters_as_columns_and_runs_apart() -> None:
    # it has no row of the device
    alone = experiment("cpu only", usages=(usage(),), freed={"cpu": 0})
    table, host, device = reports.comparison_report(
        reports.numbered([*SESSION.experiments, alone])
    ).tables
    assert column(table, "experiment") == ["run #1", "other", "run #2", "cpu only"]
    assert column(table, "lr") == ["0.001", "0.1", "0.001", "0.001"]
    assert column(table, "bs") == ["64", "", "64", "64"]
    assert column(table, "OOMs") == ["1"] * 4
    assert (host.title, device.title) == ("RAM", "cuda:0")
    assert column(host, "peak") == ["+300 MiB"] * 4
    assert column(device, "kept") == ["+50 MiB"] * 3
    assert column(device, "consumed") == ["+60 MiB"] * 3
    assert column(device, "freed") == ["55 MiB"] * 3


@pytest.fixture
def loaded(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_line_magic("gpumem", "off")
    shell.run_line_magic("config", "IPyGpuMem.experiment_report = 'none'")
    return shell


def output_of(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str) -> str:
    capsys.readouterr()
    result = shell.run_cell(line)
    assert result.success, result.error_in_exec
    return capsys.readouterr().out


@pytest.fixture
def with_history(loaded: InteractiveShell) -> InteractiveShell:
    """A shell that has run three cells, two of them in experiments."""
    loaded.run_cell("first = 1")
    loaded.run_cell("%experiment start outer")
    loaded.run_cell("%%experiment inner\nsecond = 2")
    loaded.run_cell("third = 1 / 0")
    loaded.run_cell("%experiment end")
    return loaded


def test_history_lists_each_cell(
    with_history: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(with_history, capsys, "%gpumem history")
    for words in ("3 cells", "first = 1", "second = 2", "ZeroDivisionError"):
        assert words in text


def test_history_lists_the_last_cells(
    with_history: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(with_history, capsys, "%gpumem history -n 2")
    assert "the last 2 of 3 cells" in text
    assert "first" not in text


def test_history_lists_the_cells_of_an_experiment(
    with_history: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = output_of(with_history, capsys, "%gpumem history --experiment out*")
    assert "second = 2" in outer
    assert "third" in outer
    assert "first" not in outer
    assert "third" not in output_of(with_history, capsys, "%gpumem history --experiment inner")


def test_an_experiment_inside_a_cell_has_no_cells_in_history(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell("import ipygpumem\nwith ipygpumem.experiment('block'): pass")
    text = output_of(loaded, capsys, "%gpumem history --experiment block")
    assert "inside one cell has no cells of its own" in text


def test_history_lists_traces_below_the_cells(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "trace" not in output_of(loaded, capsys, "%gpumem history")
    loaded.run_cell(
        "import ipygpumem\nfor _ in ipygpumem.track(range(3), 'epoch', silent=True): pass"
    )
    loaded.run_cell("with ipygpumem.trace(silent=True):\n    1 / 0")
    loaded.run_cell("%%experiment apart\npass")
    text = output_of(loaded, capsys, "%gpumem history")
    rows = [line.split() for line in text[text.index("4 traces") :].splitlines()]
    assert [row[:2] for row in rows if row[:1] == ["epoch"]] == [
        ["epoch", "1"],
        ["epoch", "2"],
        ["epoch", "3"],
    ]
    assert rows[-1][-1] == "ZeroDivisionError"
    two = output_of(loaded, capsys, "%gpumem history -n 2")
    assert "the last 2 of 4 traces" in two
    assert ["epoch", "1"] not in [line.split()[:2] for line in two.splitlines()]
    assert "traces" not in output_of(loaded, capsys, "%gpumem history --experiment apart")


def test_experiments_are_listed_and_compared(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no experiment has finished yet" in output_of(loaded, capsys, "%experiment list")
    for name, lr in (("a", 0.1), ("a", 0.2), ("b", 0.3)):
        loaded.run_cell(f"%%experiment {name} --note lr={lr}\nx = 1")
    loaded.run_cell("%experiment start still")
    listed = output_of(loaded, capsys, "%experiment list")
    for words in ("3 experiments", "a #2", "lr=0.3", "open: still"):
        assert words in listed
    assert "0.3" not in output_of(loaded, capsys, "%experiment compare a")
    assert "0.1" not in output_of(loaded, capsys, "%experiment compare a#2 b")
    assert "3 experiments side by side" in output_of(loaded, capsys, "%experiment compare")
    assert "3 experiments side by side" in output_of(loaded, capsys, "%experiment compare [ab]")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("loss = train()\nloss", "loss = train()"),
        ("\n\n# first\n%%time\n  loss = train()", "loss = train()"),
        (
            """\
import torch
from x import (
    y,
    z)
run(y)""",
            "run(y)",
        ),
        ("%matplotlib inline\n# a comment\nimport x", "%matplotlib inline"),
        ("", ""),
        ("x = '" + "y" * 200 + "'", "x = '" + "y" * 74 + "…"),
        ("#\n" * 10_000 + "x = 1", "#"),
    ],
)
def test_a_cell_is_listed_with_its_first_meaningful_line(source: str, line: str) -> None:
    assert describing_line(source) == line
    assert len(describing_line(source)) <= 80


def test_an_oom_counts_once_for_each_open_experiment(loaded: InteractiveShell) -> None:
    loaded.run_cell("%experiment start outer")
    loaded.run_cell("raise MemoryError")
    loaded.run_cell("%%experiment inner\nraise MemoryError")
    loaded.run_cell("1 / 0")
    loaded.run_cell(
        "import ipygpumem\nwith ipygpumem.experiment('a'), ipygpumem.experiment('b'): raise "
        "MemoryError"
    )
    loaded.run_cell(
        """\
for _ in range(3):
    try:
        with ipygpumem.experiment('caught'): raise MemoryError
    except MemoryError: pass"""
    )
    loaded.run_cell("%experiment end")
    counts = [(record.name, record.ooms) for record in ipygpumem.experiments()]
    assert counts == [("inner", 1), ("b", 1), ("a", 1), *[("caught", 1)] * 3, ("outer", 6)]


def test_notes_become_parameters(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = (
        "--note lr=1e-3 bs=64 --note 'optimizer=AdamW fused' amp=True n=-0 big=1e400 not=nan "
        "odd=1_0 none= a=b=c"
    )
    notes += " id=12345678901234567890"
    loaded.run_cell(f"%%experiment one {notes} --report none\n1")
    loaded.run_line_magic("config", "IPyGpuMem.experiment_report = 'full'")
    with ipygpumem.experiment(
        "two", note={"lr": 0.5, "amp": True, "name": Mode.FAST, "loss": float("nan")}
    ):
        pass
    one, two = (record.parameters for record in ipygpumem.experiments())
    texts = {
        "optimizer": "AdamW fused",
        "amp": "True",
        "big": "inf",
        "not": "nan",
        "odd": "1_0",
        "none": "",
        "a": "b=c",
        "id": "12345678901234567890",
    }
    assert one == {"lr": 0.001, "bs": 64, "n": 0, **texts}
    assert two == {"lr": 0.5, "amp": "True", "name": "fast", "loss": "nan"}
    assert type(two["name"]) is str
    assert "noted: lr=0.5, amp=True, name=fast, loss=nan" in capsys.readouterr().out
    result = loaded.run_cell("%experiment start --note lr=1 run")
    assert "name" in str(result.error_in_exec)


class Mode(str, enum.Enum):
    """A text of a class of its own."""

    FAST = "fast"


@pytest.mark.parametrize(
    "given", [5, [("lr", 1)], {1: 2}, {"a b": 1}, {"x": [1]}, {"x": 10**400}, {"x": 2**63}]
)
def test_a_note_from_python_holds_names_numbers_and_text(given: Any) -> None:
    with pytest.raises(ExperimentError, match="note"):
        checked_parameters(given)


@pytest.mark.parametrize("words", [["lr"], ["=1"], ["a b=1"], ["1=2"], ["x=1", "x=2"]])
def test_a_note_that_is_none_is_one_clear_line(words: list[str]) -> None:
    with pytest.raises(ExperimentError, match="--note: ") as caught:
        parse_parameters(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["%%experiment a --keep x", "%%autofit n=3"])
def test_names_bound_in_our_magic_below_time_are_the_cells(
    loaded: InteractiveShell, line: str
) -> None:
    loaded.run_cell("x = 0", store_history=True)
    loaded.run_cell(f"%%time\n{line}\nx = 1", store_history=True)
    assert cell_that_bound(loaded, "x") == 2


def test_a_cell_that_failed_before_an_assignment_binds_no_name(loaded: InteractiveShell) -> None:
    for source in (
        "x = y = z = 0",
        "x = 1\nfor y in [1]: pass\nz = unknown",
        "%%time\nx = 2\n1 / 0",
    ):
        loaded.run_cell(source, store_history=True)
    failed_at = app_of(loaded).context.cells.failed_at
    assert [cell_that_bound(loaded, name, failed_at=failed_at) for name in "xyz"] == [3, 2, 1]


def test_records_of_older_and_newer_versions_are_read() -> None:
    cell = CellRecord(1, "id", None, 0.0, 1.0, True, None, (), "digest", "x = 1").to_dict()
    old_cell = {
        key: cell[key] for key in cell if key not in ("source_digest", "source_line", "recovery")
    }
    read = CellRecord.from_dict({**old_cell, "later_bytes": 5})
    assert read.source_digest == ""
    assert read.source_line == ""
    assert read.recovery is None
    experiment = ExperimentRecord("a", 0.0, 1.0, (read,), (), {}, {}, (), (), (), ()).to_dict()
    del experiment["parameters"], experiment["ooms"]
    old = ExperimentRecord.from_dict(experiment)
    assert old.parameters == {}
    assert old.ooms == 0
    assert old.cells == (read,)
