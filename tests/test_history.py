"""History and comparison: which rows are shown, what the table for pandas has, what a mistake says."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.errors import GpuMemError
from ipygpumem.records import History, SessionRecord
from ipygpumem.report import history as reports
from ipygpumem.report.layout import Table
from tests.test_export import MIB, SESSION, cell, experiment, oom, usage


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_a_history_is_a_list_whose_slices_are_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(number) for number in range(5)]
    found = History(cells)
    assert found == cells
    assert found[1:3] == cells[1:3]
    assert type(found[1:3]) is History
    assert repr(found[:1]) == "<History of 1 cell, 2.0 s>"
    saved = SessionRecord(0.0, tuple(cells), (experiment("a"),))
    assert repr(saved) == "<SessionRecord of 5 cells, 1 experiment and 0 traces>"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuMemError, match="pip install pandas"):
        found.to_pandas()


def test_pandas_gets_a_row_per_cell_with_units_in_the_names() -> None:
    pandas = pytest.importorskip("pandas")
    cells = [cell(1), cell(None, usages=(), success=False, error="ValueError", recovery=oom()), cell(3, cell_id=None)]
    table = History(cells).to_pandas()
    assert len(table) == 3
    assert table["cpu_delta_bytes"].tolist()[::2] == [50 * MIB, 50 * MIB]
    assert table["cuda:0_peak_delta_bytes"].sum() == 600 * MIB
    assert table["cpu_after_bytes"].isna().tolist() == [False, True, False]
    assert table["execution_count"].isna().tolist() == [False, True, False]
    assert table["recovery"].isna().tolist() == [True, False, True]
    assert str(table["started_at"].dtype).startswith("datetime64")
    assert table["started_at"][0] == pandas.Timestamp(1.5, unit="s", tz="UTC")
    assert "cpu_children_bytes" not in table.columns
    assert "source_line" in History().to_pandas().columns


def test_the_history_shows_devices_in_use_and_drops_what_is_empty() -> None:
    idle = dataclasses.replace(usage("cuda:1", 0, 0, 0), reserved_bytes=0)
    report = reports.history_report([cell(7, usages=(usage(), idle))], total=5, experiment="a")
    assert report.tables[0].columns == ("cell", "RAM kept", "RAM peak", "time", "source")
    assert report.tables[0].rows == (("7", "+50 MiB", "+300 MiB", "2.00 s", "train()"),)
    assert report.headline == "history · the last 1 of 5 cells of a · 2.00 s"


def test_a_comparison_has_parameters_as_columns_and_runs_apart() -> None:
    alone = experiment("cpu only", usages=(usage(),), freed={"cpu": 0})  # it has no row of the device
    table, host, device = reports.comparison_report(reports.numbered([*SESSION.experiments, alone])).tables
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


def shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str) -> str:
    capsys.readouterr()
    result = shell.run_cell(line)
    assert result.success, result.error_in_exec
    return capsys.readouterr().out


def test_history_lists_the_last_cells_or_those_of_an_experiment(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell("first = 1")
    loaded.run_cell("%experiment start outer")
    loaded.run_cell("%%experiment inner\nsecond = 2")
    loaded.run_cell("third = 1 / 0")
    loaded.run_cell("%experiment end")
    everything = shown(loaded, capsys, "%gpumem history")
    for words in ("5 cells", "first = 1", "second = 2", "ZeroDivisionError"):
        assert words in everything
    two = shown(loaded, capsys, "%gpumem history -n 2")
    assert "the last 2 of 6 cells" in two
    assert "first" not in two
    outer = shown(loaded, capsys, "%gpumem history --experiment out*")
    assert "second = 2" in outer
    assert "third" in outer
    assert "first" not in outer
    assert "third" not in shown(loaded, capsys, "%gpumem history --experiment inner")
    loaded.run_cell("import ipygpumem\nwith ipygpumem.experiment('block'): pass")
    assert "inside one cell has no cells of its own" in shown(loaded, capsys, "%gpumem history --experiment block")


def test_history_lists_traces_and_iterations_below_the_cells(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "trace" not in shown(loaded, capsys, "%gpumem history")
    loaded.run_cell("import ipygpumem\nfor _ in ipygpumem.track(range(3), 'epoch', silent=True): pass")
    loaded.run_cell("with ipygpumem.trace(silent=True):\n    1 / 0")
    loaded.run_cell("%%experiment apart\npass")
    found = shown(loaded, capsys, "%gpumem history")
    rows = [line.split() for line in found[found.index("4 traces") :].splitlines()]
    assert [row[:2] for row in rows if row[:1] == ["epoch"]] == [["epoch", "1"], ["epoch", "2"], ["epoch", "3"]]
    assert rows[-1][-1] == "ZeroDivisionError"
    two = shown(loaded, capsys, "%gpumem history -n 2")
    assert "the last 2 of 4 traces" in two
    assert ["epoch", "1"] not in [line.split()[:2] for line in two.splitlines()]
    assert "traces" not in shown(loaded, capsys, "%gpumem history --experiment apart")


def test_experiments_are_listed_and_compared(loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no experiment has finished yet" in shown(loaded, capsys, "%experiment list")
    for name, lr in (("a", 0.1), ("a", 0.2), ("b", 0.3)):
        loaded.run_cell(f"%%experiment {name} --note lr={lr}\nx = 1")
    loaded.run_cell("%experiment start still")
    listed = shown(loaded, capsys, "%experiment list")
    for words in ("3 experiments", "a #2", "lr=0.3", "open: still"):
        assert words in listed
    assert "0.3" not in shown(loaded, capsys, "%experiment compare a")
    assert "0.1" not in shown(loaded, capsys, "%experiment compare a#2 b")
    assert "3 experiments side by side" in shown(loaded, capsys, "%experiment compare")
    assert "3 experiments side by side" in shown(loaded, capsys, "%experiment compare [ab]")
