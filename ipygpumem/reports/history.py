"""Reports what happened so far: one row for each cell, each trace, each experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from ipygpumem.measuring.growth import Growth
from ipygpumem.model import CellRecord, ExperimentRecord, TraceRecord, Usage, devices_of, usage_on
from ipygpumem.reports.content import reclaimed_label
from ipygpumem.reports.layout import Report, Table, clean, clean_name, count, device_label, in_use, peak_label, shorten
from ipygpumem.units import format_bytes, format_change, format_seconds

_SOURCE_SHOWN = 40
_VALUE_SHOWN = 24


def history_report(cells: Sequence[CellRecord], *, total: int, experiment: str | None = None) -> Report:
    """Return one row for each of ``cells``, of ``total`` that there are (of ``experiment``, if that is given)."""
    of = f" of {clean(experiment)}" if experiment is not None else ""
    if not total:
        return Report("history", f"no cell{of} has finished yet")
    number = f"the last {len(cells)} of {count(total, 'cell')}" if len(cells) < total else count(total, "cell")
    seconds = format_seconds(sum(cell.duration_seconds for cell in cells))
    return Report("history", f"history · {number}{of} · {seconds}", tables=(cells_table(cells),))


def cells_table(cells: Sequence[CellRecord]) -> Table:
    """Return one row per cell; columns that would be empty in each are left out."""
    devices = _in_use(cells)
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak")]
    columns = ("cell", *figures, "time", "source", "experiment", "error")
    rows = [
        (
            "" if cell.execution_count is None else str(cell.execution_count),
            *_figures(cell.usages, devices, _kept, peak_label),
            format_seconds(cell.duration_seconds),
            shorten(cell.source_line, _SOURCE_SHOWN),
            clean(cell.experiment or ""),
            clean(cell.error or ""),
        )
        for cell in cells
    ]
    numbers = frozenset({"cell", "time", *figures})
    return Table("", columns, tuple(rows), numbers, frozenset({"source"})).without_empty()


def traces_report(traces: Sequence[TraceRecord], *, total: int) -> Report:
    """Return one row for each of ``traces``, the iterations of loops among them, of ``total`` that there are."""
    number = f"the last {len(traces)} of {count(total, 'trace')}" if len(traces) < total else count(total, "trace")
    devices = _in_use(traces)
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak")]
    rows = [
        (
            clean_name(trace.label),
            "" if trace.iteration is None else str(trace.iteration),
            *_figures(trace.usages, devices, _kept, peak_label),
            format_seconds(trace.duration_seconds),
            clean(trace.error or ""),
        )
        for trace in traces
    ]
    columns = ("label", "iteration", *figures, "time", "error")
    table = Table("", columns, tuple(rows), frozenset({"iteration", "time", *figures}))
    return Report("traces", number, tables=(table.without_empty(),))


def growth_line(growth: Growth) -> str:
    """Return what is said unasked of a cell that grows with every run."""
    device = device_label(growth.device)
    return f"this cell has grown {device} by {growth_size(growth)} on each of its last {growth.runs} runs"


def growth_size(growth: Growth) -> str:
    """Return by how much each run grew its device: ``64 MiB``, or ``60 to 64 MiB``."""
    least, most = format_bytes(growth.least_bytes), format_bytes(growth.most_bytes)
    if least == most:
        return most
    number, unit = least.split()
    return f"{number if most.endswith(f' {unit}') else least} to {most}"


def experiments_report(records: Sequence[ExperimentRecord], still_open: Iterable[str] = ()) -> Report:
    """Return one row for each finished experiment, and a line for each that is open."""
    lines = tuple(f"open: {clean(name)}" for name in still_open)
    if not records:
        return Report("experiments", "no experiment has finished yet", lines)
    devices = _in_use(records)
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("peak", "kept")]
    columns = ("experiment", "began", "time", "cells", *figures, "OOMs", "parameters")
    rows = [
        (
            label,
            datetime.fromtimestamp(item.started_at).strftime("%H:%M:%S"),  # the user's own clock
            format_seconds(item.duration_seconds),
            _parts(item),
            *_figures(item.usages, devices, peak_label, _kept),
            str(item.ooms) if item.ooms else "",
            ", ".join(f"{shorten(key, _VALUE_SHOWN)}={_value(value)}" for key, value in item.parameters.items()),
        )
        for _, _, label, item in numbered(records)
    ]
    table = Table("", columns, tuple(rows), frozenset({"time", "cells", "OOMs", *figures}))
    return Report("experiments", count(len(records), "experiment"), lines, (table.without_empty(),))


def _parts(record: ExperimentRecord) -> str:
    """Return how many cells it had, or engines where it ran on a cluster."""
    return count(len(record.engines), "engine") if record.engines else str(len(record.cells))


def comparison_report(runs: Sequence[NumberedRun]) -> Report:
    """Return experiments side by side: parameters, time, and what each device went through.

    Several devices have a table each: side by side they would be too wide for most pages.
    """
    records = [run.record for run in runs]
    parameters = list(dict.fromkeys(key for item in records for key in item.parameters))
    columns = ("experiment", *(shorten(key, _VALUE_SHOWN) for key in parameters), "time", "cells", "OOMs")
    rows = [
        (
            run.label,
            *(_value(run.record.parameters[key]) if key in run.record.parameters else "" for key in parameters),
            format_seconds(run.record.duration_seconds),
            _parts(run.record),
            str(run.record.ooms),
        )
        for run in runs
    ]
    first = Table("", columns, tuple(rows), frozenset(columns[1:]))
    devices = [_device_table(runs, device) for device in _in_use(records)]
    return Report("comparison", f"{count(len(runs), 'experiment')} side by side", tables=(first, *devices))


def _device_table(runs: Sequence[NumberedRun], device: str) -> Table:
    columns = ("experiment", "consumed", "peak", "reclaimed", "kept")
    found = ((run, usage_on(run.record.usages, device)) for run in runs)
    rows = [
        (
            run.label,
            format_change(run.record.consumed.get(device, 0)),
            peak_label(usage),
            reclaimed_label(run.record, device),
            _kept(usage),
        )
        for run, usage in found
        if usage is not None
    ]
    return Table(clean(device_label(device)), columns, tuple(rows), frozenset(columns[1:]))


class NumberedRun(NamedTuple):
    """An experiment among others of its name."""

    name: str
    """As it can be shown."""
    number: int
    """Counted from 1 among those of the same name."""
    label: str
    """The name, with the number where there are several."""
    record: ExperimentRecord


def numbered(records: Iterable[ExperimentRecord]) -> list[NumberedRun]:
    """Return each experiment with its number among those of the same name."""
    records = list(records)
    times = Counter(clean(record.name) for record in records)
    so_far: Counter[str] = Counter()
    runs = []
    for record in records:
        name = clean(record.name)
        so_far[name] += 1
        runs.append(NumberedRun(name, so_far[name], f"{name} #{so_far[name]}" if times[name] > 1 else name, record))
    return runs


def _in_use(records: Sequence[CellRecord | ExperimentRecord | TraceRecord]) -> list[str]:
    """Return the host and the accelerators that held something."""
    return devices_of(usage for record in records for usage in record.usages if in_use(usage))


def _figures(usages: Sequence[Usage], devices: Iterable[str], *figures: Callable[[Usage], str]) -> list[str]:
    of_devices = [usage_on(usages, device) for device in devices]
    return ["" if usage is None else figure(usage) for usage in of_devices for figure in figures]


def _kept(usage: Usage) -> str:
    return format_change(usage.delta_bytes)


def _value(value: object) -> str:
    return shorten(value, _VALUE_SHOWN) if type(value) is str else f"{value:g}" if type(value) is float else str(value)
