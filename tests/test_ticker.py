"""Ticks of long cells: who hears them when, and that short cells pay nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from ipygpumem.measuring.meter import Meter
from ipygpumem.notebook import ticker as module
from ipygpumem.notebook.cell import CellStack
from ipygpumem.notebook.ticker import Tick, Ticker
from tests.fakes import FakeProbe
from tests.kernel import Kernel
from tests.test_worker import threads, wait_for


class Bench:
    """A ticker over one fake device, and cells that begin and end by hand."""

    def __init__(self) -> None:
        self.probe = FakeProbe()
        self.meter = Meter([self.probe])
        self.cells = CellStack()
        self.ticker = Ticker(self.cells, self.meter)
        self.ticks: list[Tick] = []

    def begin(self, info: object = None) -> None:
        self.cells.push(info, self.meter.start())
        if self.ticker.rests:
            self.ticker.wake()

    def end(self) -> None:
        cell, _ = self.cells.pop(None)
        assert cell is not None
        self.meter.stop(cell.measurement)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.meter.close()


def test_a_long_cell_ticks_with_its_time_and_each_devices_memory(bench: Bench) -> None:
    bench.ticker.listen(bench.ticks.append)
    bench.begin()
    bench.probe.set(300)
    wait_for(lambda: len(bench.ticks) >= 3)
    bench.end()
    first, second, third = bench.ticks[:3]
    assert first.cell is second.cell is third.cell
    assert first.readings["cpu"].current_bytes == 300
    assert first.elapsed_seconds >= 1.0
    assert second.elapsed_seconds - first.elapsed_seconds >= 0.45
    assert third.elapsed_seconds - second.elapsed_seconds >= 0.45


def test_a_cell_that_is_over_and_no_cell_at_all_do_not_tick(bench: Bench) -> None:
    bench.ticker.listen(bench.ticks.append, after_seconds=0.25)
    for _ in range(20):
        bench.begin()
        bench.end()
        time.sleep(0.02)
    assert bench.ticks == []


def test_each_listener_has_its_own_pace_but_never_above_four_a_second(bench: Bench) -> None:
    fast: list[Tick] = []
    bench.ticker.listen(bench.ticks.append)
    bench.ticker.listen(fast.append, after_seconds=0, every_seconds=0)
    bench.begin()
    wait_for(lambda: len(bench.ticks) >= 1)
    bench.end()
    assert len(fast) >= 3
    times = [0.0, *(tick.elapsed_seconds for tick in fast)]
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.2


def test_there_is_no_thread_without_a_listener(bench: Bench) -> None:
    assert threads() == []
    undo = bench.ticker.listen(bench.ticks.append)
    assert len(threads()) == 1
    undo()
    wait_for(lambda: not threads())
    undo()  # once more is no mistake


def test_a_listener_that_fails_is_named_once_and_dropped_and_the_others_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(tick: Tick) -> None:
        raise ValueError("no")

    bench.ticker.listen(broken, after_seconds=0.25, every_seconds=0.25)
    bench.ticker.listen(bench.ticks.append, after_seconds=0.25, every_seconds=0.25)
    bench.begin()
    wait_for(lambda: len(bench.ticks) >= 2)
    bench.end()
    told = capsys.readouterr().err
    assert told.count("failed (ValueError: no). Your code is not affected") == 1


def test_the_thread_rests_when_no_cell_comes_and_the_next_one_wakes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    bench.ticker.listen(bench.ticks.append, after_seconds=0.25)
    wait_for(lambda: bench.ticker.rests)
    bench.begin()
    assert not bench.ticker.rests
    wait_for(lambda: bench.ticks)
    bench.end()


def test_a_glance_disturbs_no_peak(bench: Bench) -> None:
    bench.begin()
    bench.probe.spike(900)
    bench.probe.set(20)
    assert bench.meter.glance()["cpu"].current_bytes == 20
    cell = bench.cells.running()[0]
    assert bench.meter.stop(cell.measurement)[0].peak_bytes == 900


def test_a_probe_that_fails_at_a_glance_leaves_the_others(bench: Bench) -> None:
    class Broken(FakeProbe):
        def glance(self) -> tuple[()]:
            raise RuntimeError("driver gone")

    meter = Meter([Broken("cuda:0"), FakeProbe()])
    assert list(meter.glance()) == ["cpu"]
    assert meter.failures == {"Broken": "RuntimeError: driver gone"}


def test_many_short_cells_neither_start_nor_wake_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ticker.listen(bench.ticks.append)
    woken: list[int] = []
    monkeypatch.setattr(bench.ticker, "wake", lambda: woken.append(1))
    thread = next(thread for thread in threading.enumerate() if "ipygpumem" in thread.name)
    for _ in range(1000):
        bench.begin()
        bench.end()
    assert woken == []
    assert [item for item in threading.enumerate() if "ipygpumem" in item.name] == [thread]


def test_forked_children_and_the_end_of_the_kernel_do_not_hang_on_the_thread(kernel: Kernel) -> None:
    kernel.run(
        "import multiprocessing, ipygpumem\n"
        "session = ipygpumem.notebook.notebook.current_notebook()\n"
        "ticks = []\n"
        "_ = session.tools.ticker.listen(ticks.append, after_seconds=0.25, every_seconds=0.25)"
    )
    reply = kernel.run(
        "context = multiprocessing.get_context('fork')\n"
        "codes = set()\n"
        "while len(ticks) < 3:\n"
        "    child = context.Process(target=session.tools.meter.now); child.start(); child.join(20)\n"
        "    codes.add(child.exitcode)\n"
    )
    assert reply.status == "ok", reply.traceback
    assert kernel.value("codes") == {0}
