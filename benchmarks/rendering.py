"""Measures the milliseconds of CPU that it takes to lay out a report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import thread_time

from benchmarks.report import Row, Section
from ipygpumem.records import (
    CellRecord,
    ExperimentRecord,
    FreeingStep,
    RecoveryRecord,
    ReferencePath,
    RetainedArray,
    Usage,
)
from ipygpumem.report import html, text
from ipygpumem.report.cells import cell_report
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.layout import Report
from ipygpumem.report.recovery import recovery_reports

_GIB = 2**30
_COMPACT_MS = 0.3
_FULL_MS = 5.0
_TERMINAL = text.Style(width=100, colour=True, bars=True)

_METHOD = """\
A record becomes a report, its HTML with a notebook's text, or a terminal's text with colours and bars: CPU time in
this process, median of {count} runs. The records have the host and {devices} devices, 26 tensors in the frames, 20
leaks; those of {different} cells or experiments, with different figures, come in turn."""  # noqa: E501
_DEVICES = 4
_DIFFERENT = 50
_DEVICE_NAMES = [f"cuda:{number}" for number in range(_DEVICES)]
_SIZES = dict.fromkeys(["cpu", *_DEVICE_NAMES], _GIB)
_FREEING_STEPS = (
    FreeingStep("names", _SIZES, _SIZES, 0.1),
    FreeingStep("caches", _SIZES, _SIZES, 0.1),
)
_MakeReports = Callable[[], Sequence[Report]]


def run(*, quick: bool) -> Section:
    """Return the milliseconds that each report takes, in a notebook and in a terminal."""
    count = 200 if quick else 2000
    rows = []
    for name, target_ms, reports in _reports_to_lay_out():
        notebook_ms = _median_ms(partial(_lay_out_for_notebook, reports), count)
        terminal_ms = _median_ms(partial(_lay_out_for_terminal, reports), count)
        rows.append(_row(f"{name}, notebook", target_ms, notebook_ms))
        rows.append(_row(f"{name}, terminal", target_ms, terminal_ms))
    method = _METHOD.format(count=count, devices=_DEVICES, different=_DIFFERENT)
    return Section("Laying out a report", method, tuple(rows))


def _reports_to_lay_out() -> tuple[tuple[str, float, _MakeReports], ...]:
    """Return each kind of report: its title, its target in milliseconds, and a function that makes
    the next one.
    """
    cell = _cell_record()
    experiment = _experiment_record(cell)
    recovery = _recovery_record()
    # Many in turn, because a report that equals the one before is not drawn again.
    usages = [_larger(cell.usages, number * 2**26) for number in range(_DIFFERENT)]
    cells = itertools.cycle([replace(cell, usages=larger) for larger in usages])
    experiments = itertools.cycle([replace(experiment, usages=larger) for larger in usages])

    def of_cell() -> Sequence[Report]:
        return [cell_report(next(cells))]

    def of_experiment(style: str) -> Sequence[Report]:
        return experiment_reports(next(experiments), style)

    def of_recovery() -> Sequence[Report]:
        return recovery_reports(recovery, 1)

    return (
        ("the line after a cell", _COMPACT_MS, of_cell),
        ("an experiment, compact", _COMPACT_MS, partial(of_experiment, "compact")),
        ("an experiment, full", _FULL_MS, partial(of_experiment, "full")),
        ("out of memory", _FULL_MS, of_recovery),
    )


def _lay_out_for_notebook(make_reports: _MakeReports) -> None:
    reports = make_reports()
    html.render(reports)
    text.render(reports)


def _lay_out_for_terminal(make_reports: _MakeReports) -> None:
    text.render(make_reports(), _TERMINAL)


def _row(figure: str, target_ms: float, took_ms: float) -> Row:
    met = took_ms < target_ms
    return Row(figure, f"< {target_ms} ms", f"{took_ms:.3f} ms", "", "", met)


def _larger(usages: Sequence[Usage], size: int) -> tuple[Usage, ...]:
    return tuple(replace(usage, after_bytes=usage.after_bytes + size) for usage in usages)


def _median_ms(call: Callable[[], object], count: int) -> float:
    """Return the CPU time of a call in milliseconds: the median of ``count`` calls."""
    call()
    times = []
    for _ in range(count):
        started = thread_time()
        call()
        times.append(thread_time() - started)
    return sorted(times)[count // 2] * 1000


def _cell_record() -> CellRecord:
    """Return the record of a cell with the host and several devices."""
    host = Usage("cpu", 3 * _GIB, 4 * _GIB, 5 * _GIB, 16 * _GIB, "kernel")
    device = Usage(
        "cuda:0",
        before_bytes=_GIB,
        after_bytes=9 * _GIB,
        peak_bytes=40 * _GIB,
        total_bytes=80 * _GIB,
        method="allocator",
        reserved_bytes=45 * _GIB,
        used_bytes=50 * _GIB,
        other_bytes=4 * _GIB,
    )
    devices = [replace(device, device=name) for name in _DEVICE_NAMES]
    return CellRecord(7, None, None, 0.0, 3.2, True, None, (host, *devices))


def _experiment_record(cell: CellRecord) -> ExperimentRecord:
    """Return the record of an experiment of three cells with 20 leaks."""
    names = tuple(f"name_{number}" for number in range(50))
    return ExperimentRecord(
        "sweep",
        0.0,
        9.9,
        (cell,) * 3,
        cell.usages,
        _SIZES,
        _SIZES,
        names,
        names[:3],
        names[:2],
        _tensors(20),
        _FREEING_STEPS,
    )


def _recovery_record() -> RecoveryRecord:
    """Return the record of an error out of memory with 26 tensors in the frames."""
    return RecoveryRecord(
        "oom",
        "OutOfMemoryError",
        "...",
        20 * _GIB,
        _SIZES,
        _tensors(26),
        9,
        _SIZES,
        _SIZES,
        _FREEING_STEPS,
    )


def _tensors(count: int) -> tuple[RetainedArray, ...]:
    """Return tensors on the first device, each with a name and the variable that holds it."""
    tensors = []
    for number in range(count):
        holder = ReferencePath(f'notebook variable cache["run{number}"]', "remove it from there")
        tensor = RetainedArray(
            f"layer{number}.weight",
            "Tensor",
            (4096, 4096),
            "float32",
            "cuda:0",
            2**26,
            function="forward",
            line=number,
            holder=holder,
        )
        tensors.append(tensor)
    return tuple(tensors)
