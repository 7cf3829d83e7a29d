"""Measures how much a tool slows a cell that runs, and the milliseconds of CPU that it takes."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from benchmarks.kernel import Kernel
from benchmarks.report import NOT_INSTALLED, Row, Section, lower
from benchmarks.tools import OURS, PEER, Tool, installed_tools

_OFF = "off"
_OFF_AGAIN = "off again"
_SLEEP_TARGET_MS = 10.0
_CALIBRATION_SECONDS = 0.2
_MOST_NOISE = 0.1
"""Largest A/A difference with which a small slow-down can be seen; beyond it there is no verdict.
"""

_SETUP = """
import os, time, numpy
_left, _right, _out = numpy.ones((600, 600)), numpy.ones((600, 600)), numpy.empty((600, 600))
def pure_python(count):
    total = 0
    for number in range(count):
        total += number * number % 7
def two_thread_blas(count):
    for _ in range(count):
        numpy.matmul(_left, _right, out=_out)
def os_stat(count):
    for _ in range(count):
        os.stat(".")
def timed(work, count):
    started = time.perf_counter()
    work(count)
    return time.perf_counter() - started
"""

_WORKS = (
    ("pure_python", "pure Python"),
    ("two_thread_blas", "2-thread BLAS"),
    ("os_stat", "`os.stat`"),
)

_METHOD = """\
A fixed amount of work, calibrated to {seconds:g} s: {rounds} rounds in one kernel, each with the tools off, ours on,
theirs on, off again, in rotating order. Median (least to most) of time on / mean of both off; A/A: off again / off."""  # noqa: E501

_SLEEP_METHOD = """\
CPU time of the kernel process (all threads): read in the cell right before and after `time.sleep(2)`, and around the
whole cell, which adds report and garbage collection. Median of {rounds} runs, minus that with the tools off."""  # noqa: E501


def run(*, quick: bool) -> Section:
    """Return the factor by which each tool slows cells of different kinds."""
    seconds, rounds = (0.5, 3) if quick else (1.0, 5)
    with Kernel() as kernel:
        kernel.run(_SETUP)
        rows = tuple(_row(kernel, work, title, seconds, rounds) for work, title in _WORKS)
    return Section(
        "Slow-down of long cells",
        _METHOD.format(seconds=seconds, rounds=rounds),
        rows,
        control="A/A control",
    )


def _row(kernel: Kernel, work: str, title: str, seconds: float, rounds: int) -> Row:
    """Return the row of one kind of work; ``seconds`` is its time without a tool."""
    cell = f"{work}({_calibrated(kernel, work, seconds)})"
    ratios = _ratios([_round(kernel, cell, number) for number in range(rounds)])
    ours = ratios[OURS.name]
    peer = NOT_INSTALLED
    better = None
    if PEER.name in ratios:
        peer = _spread(ratios[PEER.name])
        better = lower(median(ours), median(ratios[PEER.name]))
    differences = [abs(ratio - 1) for ratio in ratios[_OFF_AGAIN]]
    met: bool | None = median(ours) <= 1 + 2 * median(differences)
    if max(differences) > _MOST_NOISE:
        met = None
    return Row(
        figure=f"{title}, {seconds:g} s: times longer",
        target="1, within 2 median A/A differences",
        ours=_spread(ours),
        peer=peer,
        control=_spread(ratios[_OFF_AGAIN]),
        met=met,
        better=better,
    )


def _calibrated(kernel: Kernel, work: str, seconds: float) -> int:
    """Return the count with which ``work`` takes about ``seconds``."""
    count = 16
    while True:
        took = float(kernel.ask(f"timed({work}, {count})"))
        if took >= _CALIBRATION_SECONDS:
            return round(count * seconds / took)
        count *= 2


def _round(kernel: Kernel, cell: str, number: int) -> dict[str, float]:
    """Run ``cell`` once per variant and return the seconds; the order depends on the round's
    number.
    """
    variants: list[tuple[str, Tool | None]] = [(_OFF, None)]
    variants += [(tool.name, tool) for tool in installed_tools()]
    variants.insert(2, (_OFF_AGAIN, None))
    turn = number % len(variants)
    return {name: _timed(kernel, cell, tool) for name, tool in variants[turn:] + variants[:turn]}


def _timed(kernel: Kernel, cell: str, tool: Tool | None) -> float:
    """Return the seconds of a cell with a tool, which is off again after it."""
    if tool is not None:
        kernel.run(tool.on)
    try:
        return kernel.run(cell).seconds
    finally:
        if tool is not None:
            kernel.run(tool.off)


def _ratios(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return each variant's times divided by those with the tools off in the same round: by the
    mean of both runs, or by the first one for the second.
    """
    ratios: dict[str, list[float]] = {name: [] for name in rounds[0]}
    for times in rounds:
        off = (times[_OFF] + times[_OFF_AGAIN]) / 2
        for name, seconds in times.items():
            ratios[name].append(seconds / off)
        ratios[_OFF_AGAIN][-1] = times[_OFF_AGAIN] / times[_OFF]
    return ratios


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def run_sleep(*, quick: bool) -> Section:
    """Return the CPU time that each tool burns beside a cell that sleeps."""
    rounds = 1 if quick else 5
    variants: dict[str, Tool | None] = {_OFF: None}
    for tool in installed_tools():
        variants[tool.name] = tool
    during: dict[str, list[float]] = {name: [] for name in variants}
    around_cell: dict[str, list[float]] = {name: [] for name in variants}
    with Kernel() as kernel:
        kernel.run("import time")
        for _ in range(rounds):
            for name, variant in variants.items():
                seconds = _cpu_of_sleep(kernel, variant)
                during[name].append(seconds.during)
                around_cell[name].append(seconds.around_cell)
    rows = (
        _sleep_row("CPU burned during `time.sleep(2)`", during),
        _sleep_row("the same, around the cell", around_cell),
    )
    return Section(
        "CPU beside a sleeping cell",
        _SLEEP_METHOD.format(rounds=rounds),
        rows,
        control="off: total",
    )


def _sleep_row(figure: str, seconds: dict[str, list[float]]) -> Row:
    """Return the row of CPU seconds, which are given by the name of the variant."""
    milliseconds = {name: 1000 * median(times) for name, times in seconds.items()}
    off = milliseconds[_OFF]
    added = {name: total - off for name, total in milliseconds.items()}
    peer = NOT_INSTALLED
    if PEER.name in added:
        peer = f"{added[PEER.name]:+.0f} ms"
    return Row(
        figure=figure,
        target=f"under {_SLEEP_TARGET_MS:.0f} ms",
        ours=f"{added[OURS.name]:+.1f} ms",
        peer=peer,
        control=f"{off:.1f} ms",
        met=added[OURS.name] < _SLEEP_TARGET_MS,
        better=lower(added[OURS.name], added.get(PEER.name)),
    )


class _SleepSeconds(NamedTuple):
    """The process's CPU seconds during the sleep, and around the whole cell."""

    during: float
    around_cell: float


def _cpu_of_sleep(kernel: Kernel, tool: Tool | None) -> _SleepSeconds:
    """Run a cell that sleeps, with a tool or without one."""
    if tool is not None:
        kernel.run(tool.on)
    before = float(kernel.ask("time.process_time()"))
    kernel.run("_first = time.process_time(); time.sleep(2); _last = time.process_time()")
    after = float(kernel.ask("time.process_time()"))
    during = float(kernel.ask("_last - _first"))
    if tool is not None:
        kernel.run(tool.off)
    return _SleepSeconds(during, after - before)
