"""Cost of laying out a report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
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


def run(*, quick: bool) -> Section:
    """Return the milliseconds that each report takes."""
    count = 200 if quick else 2000
    cell, experiment, recovery = _records()
    # Each of many in turn: what was drawn a moment ago is kept.
    usages = [_larger(cell.usages, number * 2**26) for number in range(_DIFFERENT)]
    cells = itertools.cycle([replace(cell, usages=each) for each in usages])
    experiments = itertools.cycle([replace(experiment, usages=each) for each in usages])
    kinds: tuple[tuple[str, float, Callable[[], Sequence[Report]]], ...] = (
        ("the line after a cell", _COMPACT_MS, lambda: [cell_report(next(cells))]),
        (
            "an experiment, compact",
            _COMPACT_MS,
            lambda: experiment_reports(next(experiments), "compact"),
        ),
        (
            "an experiment, full",
            _FULL_MS,
            lambda: experiment_reports(next(experiments), "full"),
        ),
        ("out of memory", _FULL_MS, lambda: recovery_reports(recovery, 1)),
    )
    rows = []
    for name, target, reports in kinds:
        notebook = _median_ms(
            lambda make=reports: (html.render(found := make()), text.render(found)), count
        )  # type: ignore[misc]
        terminal = _median_ms(lambda make=reports: text.render(make(), _TERMINAL), count)  # type: ignore[misc]
        for place, seen in (("notebook", notebook), ("terminal", terminal)):
            rows.append(
                Row(f"{name}, {place}", f"< {target} ms", f"{seen:.3f} ms", "", "", seen < target)
            )
    return Section(
        "Laying out a report",
        _METHOD.format(count=count, devices=_DEVICES, different=_DIFFERENT),
        tuple(rows),
    )


def _larger(usages: Sequence[Usage], size: int) -> tuple[Usage, ...]:
    return tuple(replace(usage, after_bytes=usage.after_bytes + size) for usage in usages)


def _median_ms(call: Callable[[], object], count: int) -> float:
    call()
    times = []
    for _ in range(count):
        started = thread_time()
        call()
        times.append(thread_time() - started)
    return sorted(times)[count // 2] * 1000


def _records() -> tuple[CellRecord, ExperimentRecord, RecoveryRecord]:
    devices = [f"cuda:{number}" for number in range(_DEVICES)]
    usages = (
        Usage("cpu", 3 * _GIB, 4 * _GIB, 5 * _GIB, 16 * _GIB, "kernel"),
        *(
            Usage(
                name,
                _GIB,
                9 * _GIB,
                40 * _GIB,
                80 * _GIB,
                "allocator",
                45 * _GIB,
                50 * _GIB,
                4 * _GIB,
            )
            for name in devices
        ),
    )
    held = tuple(
        RetainedArray(
            f"layer{number}.weight",
            "Tensor",
            (4096, 4096),
            "float32",
            "cuda:0",
            2**26,
            function="forward",
            line=number,
            holder=ReferencePath(f'notebook variable cache["run{number}"]', "remove it from there"),
        )
        for number in range(26)
    )
    cell = CellRecord(7, None, None, 0.0, 3.2, True, None, usages)
    sizes = dict.fromkeys(["cpu", *devices], _GIB)
    names = tuple(f"name_{number}" for number in range(50))
    steps = (FreeingStep("names", sizes, sizes, 0.1), FreeingStep("caches", sizes, sizes, 0.1))
    experiment = ExperimentRecord(
        "sweep",
        0.0,
        9.9,
        (cell,) * 3,
        usages,
        sizes,
        sizes,
        names,
        names[:3],
        names[:2],
        held[:20],
        steps,
    )
    recovery = RecoveryRecord(
        "oom", "OutOfMemoryError", "...", 20 * _GIB, sizes, held, 9, sizes, sizes, steps
    )
    return cell, experiment, recovery
