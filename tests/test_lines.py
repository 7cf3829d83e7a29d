"""What lines cost: exact figures from a fake probe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ipygpumem.extras.lines.lines import CodeBlock, LineCost, LinesRecord, Tracer, code_of
from ipygpumem.extras.lines.lines_report import lines_report
from ipygpumem.meter.meter import Meter
from ipygpumem.report import text
from tests.fakes import FakeProbe


class Lab:
    """Follows functions of the test while a fake probe tells their memory."""

    def __init__(self, *functions: Any) -> None:
        self.probe = FakeProbe()
        self.meter = Meter([self.probe])
        self.tracer = Tracer(self.meter, "<no cell>", CodeBlock("cell", 1, ()))
        self.record = self.tracer.record
        for function in functions:
            self.tracer.add(function.__name__, code_of(function))  # type: ignore[arg-type]

    def now(self) -> int:
        return self.probe.read()[0].current_bytes

    def add(self, size: int) -> None:
        self.probe.set(self.now() + size)

    def spike(self, size: int) -> None:
        self.probe.spike(self.now() + size)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.tracer.start()
        try:
            yield
        finally:
            self.tracer.finish()
            self.meter.close()

    def figures(self, line: int, block: int = 1) -> tuple[int, int, int]:
        """Hits, kept and peak of a line, counted from the first one of its block."""
        cost = self.record.costs.get((block, self.record.blocks[block].first_line + line), LineCost())
        return cost.hits, cost.kept_bytes.get("cpu", 0), cost.peak_bytes.get("cpu", 0)


@pytest.fixture(autouse=True)
def _no_trace_function_is_left() -> Iterator[None]:
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before


def test_each_line_has_its_own_kept_and_peak() -> None:
    def work() -> None:
        lab.add(10)
        lab.spike(70)
        lab.add(-4)

    lab = Lab(work)
    with lab.watching():
        work()
    assert [lab.figures(line) for line in range(4)] == [(0, 0, 0), (1, 10, 10), (1, 0, 70), (1, -4, 0)]


def test_a_recursion_counts_its_memory_once() -> None:
    def work(depth: int) -> None:
        lab.add(10)
        if depth:
            work(depth - 1)

    lab = Lab(work)
    with lab.watching():
        work(3)
    assert lab.figures(1) == (4, 40, 10)
    assert lab.figures(3) == (3, 30, 30)


def test_a_generator_is_charged_for_its_own_lines_only() -> None:
    def produce() -> Iterator[int]:
        lab.add(10)
        yield 1
        lab.add(20)
        yield 2

    lab = Lab(produce)
    with lab.watching():
        for _ in produce():
            lab.add(1000)
    assert [lab.figures(line)[1:] for line in (1, 2, 3, 4)] == [(10, 10), (0, 0), (20, 20), (0, 0)]


def test_a_coroutine_is_not_charged_for_what_others_do_while_it_waits() -> None:
    async def work() -> None:
        lab.add(10)
        await asyncio.sleep(0.01)
        lab.spike(5)

    async def other() -> None:
        lab.add(500)

    async def both() -> None:
        await asyncio.gather(work(), other())

    lab = Lab(work)
    with lab.watching():
        asyncio.run(both())
    assert [lab.figures(line)[1:] for line in (1, 2, 3)] == [(10, 10), (0, 0), (0, 5)]


def test_a_line_that_awaits_has_the_peak_of_all_its_pieces() -> None:
    async def grow() -> None:
        for _ in range(3):
            lab.add(100)
            await asyncio.sleep(0)

    async def work() -> None:
        await grow()
        lab.add(-300)
        await grow()

    async def other() -> None:
        for _ in range(3):
            lab.add(500)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(), other())

    lab = Lab(work)
    with lab.watching():
        asyncio.run(both())
    assert [lab.figures(line)[1:] for line in (1, 2, 3)] == [(300, 300), (-300, 0), (300, 300)]


def test_the_trace_function_of_somebody_else_rests_and_is_back() -> None:
    def theirs(*_: Any) -> None: ...

    def work() -> None:
        lab.add(1)

    lab, before = Lab(work), sys.gettrace()
    sys.settrace(theirs)
    try:
        with lab.watching():
            work()
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(before)
    assert lab.figures(1) == (1, 1, 1)


def test_our_own_failure_stops_the_watching_and_not_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> int:
        lab.add(1)
        return 5

    def fail(*_: Any) -> None:
        raise OSError("gone")

    lab = Lab(work)
    monkeypatch.setattr(lab.tracer, "_next_line", fail)
    with lab.watching():
        assert work() == 5
    assert lab.record.error == "OSError: gone"


def test_the_heap_is_trimmed_before_each_look_while_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        held = 1
        assert held

    clock, took, trimmed = [0.0], [0.0], [0]

    def trim() -> None:
        trimmed[0] += 1
        clock[0] += took[0]

    monkeypatch.setattr("ipygpumem.reclaim.reclaim.trim_host_heap", trim)
    monkeypatch.setattr("ipygpumem.extras.lines.lines.time.perf_counter", lambda: clock[0])
    for seconds, times, untrimmed in ((0.0, 3, 0), (10.0, 1, 2)):
        lab, took[0], trimmed[0] = Lab(work), seconds, 0
        with lab.watching():
            work()
            before_the_end = trimmed[0]
        assert (before_the_end, lab.record.untrimmed - (seconds > 0)) == (times, untrimmed)


def record(*, own_seconds: float = 0.1) -> LinesRecord:
    source = ("def work():", "\tx = big()", "    y = 1", "    return x")
    costs = {
        (1, 2): LineCost(1, 0.5, {"cpu": 100 << 20, "cuda:0": 0}, {"cpu": 300 << 20, "cuda:0": 0}),
        (1, 3): LineCost(2, 0.0001, {"cpu": 0}, {"cpu": 4096}),
    }
    return LinesRecord([CodeBlock("cell", 1, ("work()",)), CodeBlock("work", 1, source)], costs, 1.0, own_seconds)


def test_the_table_shows_the_source_with_figures_where_lines_ran() -> None:
    lines = text.render([lines_report(record(), "line")]).splitlines()
    assert lines[0] == "memlines · 2 lines ran · 1.00 s, of which measuring took 100 ms"
    assert lines[1].strip() == "work"
    assert lines[4].split() == ["1", "def", "work():"]
    assert lines[5].split() == ["2", "1", "500", "ms", "+100", "MiB", "+300", "MiB", "x", "=", "big()"]
    assert lines[5].index("x = big()") - lines[4].index("def") == 4
    assert lines[-1].strip() == "cell did not run"


@pytest.mark.parametrize(("order", "first"), [("peak", "2"), ("kept", "2"), ("time", "2"), ("hits", "3")])
def test_sorted_by_a_figure_only_lines_that_ran_are_shown_the_most_first(order: str, first: str) -> None:
    lines = text.render([lines_report(record(), order)]).splitlines()
    assert [line.split()[0] for line in lines[4:6]] == [first, {"2": "3", "3": "2"}[first]]
    assert len(lines) == 7
