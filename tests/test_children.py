"""`%gpumem status` lists the processes that the notebook has started, each with its cell, and ends none."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ipygpumem.model import CellRecord
from ipygpumem.probes import nvml
from ipygpumem.probes.host import Child, children
from ipygpumem.probes.nvml import DeviceWide
from ipygpumem.reconcile.findings import Findings
from ipygpumem.reports.status import started_in, status_report
from ipygpumem.units import MIB


def cell(number: int | None, started: float, seconds: float) -> CellRecord:
    return CellRecord(number, None, None, started, seconds, True, None, ())


def child(started: float, pid: int = 7, size: int = MIB) -> Child:
    return Child(pid, "python", started, size, is_shared_out=True)


def test_a_process_belongs_to_the_cell_that_ran_when_it_was_started() -> None:
    cells = [cell(1, 100.0, 1.0), cell(2, 101.01, 5.0), cell(None, 107.0, 9.0), cell(3, 120.0, 1.0)]
    places = [started_in(child(when), cells) for when in (100.5, 101.005, 103.0, 110.0, 121.005, 121.1)]
    assert places == [
        "cell 1",
        "cell 1 or 2",
        "cell 2",
        "no cell that is known",
        "cell 3",
        "no cell that is known",
    ]


def test_many_processes_are_the_largest_and_a_sum() -> None:
    many = [child(100.5, number, (20 - number) * MIB) for number in range(15)]
    table = status_report("x", [], [], (), many, [cell(1, 100.0, 1.0)]).tables[-1]
    assert table.title == "child processes, by PSS: shared pages count by share"
    assert table.rows[0] == ("20 MiB", "0", "python", "cell 1")
    assert table.rows[10:] == (("40 MiB", "", "and 5 smaller", ""),)
    assert len(status_report("x", [], [], (), [], []).tables) == 1


def test_what_a_child_has_on_devices_stands_beside_it_and_the_largest_there_come_first() -> None:
    two = [child(100.5, 7, 9 * MIB), child(100.5, 8)]
    found = Findings(children=two)
    found.note_processes("cuda:0", DeviceWide(others=((8, 64 * MIB), (99, MIB))))
    found.note_processes("cuda:1", DeviceWide(others=((8, 32 * MIB),)))
    table = status_report("x", [], [], (), found.children, []).tables[-1]
    assert table.columns == ("size", "on devices", "process", "name", "started in")
    assert [row[:3] for row in table.rows] == [("1 MiB", "cuda:0 64 MiB, cuda:1 32 MiB", "8"), ("9 MiB", "", "7")]


def test_in_a_container_with_ids_of_its_own_the_drivers_ids_are_not_those_of_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "_FIRST_NAMESPACE", "pid:[1]")
    found = Findings(children=[child(100.5, 8)])
    found.note_processes("cuda:0", DeviceWide(others=((8, 64 * MIB),)))
    assert found.children == [child(100.5, 8)]


@pytest.mark.skipif(sys.platform != "linux", reason="the time of a start is psutil's elsewhere")
def test_the_time_of_a_start_is_exact_enough_to_tell_cells_apart() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        (found,) = [item for item in children() if item.pid == process.pid]
        process.communicate(b"\n")
    assert before - 0.01 <= found.started_at <= after + 0.01
    assert found.memory_bytes > 0
