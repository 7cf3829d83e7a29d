"""What happened so far as tables: one row per cell, one row per experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from ipygpumem.model import CellRecord, ExperimentRecord, Usage
from ipygpumem.recorded import Growth, devices_of
from ipygpumem.reports.content import Report, Table, clean, count, device_label
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
    columns = ("cell", "source", "experiment", "time", *figures, "error")
    rows = [
        (
            "" if cell.execution_count is None else str(cell.execution_count),
            _cut(cell.source_line, _SOURCE_SHOWN),
            clean(cell.experiment or ""),
            format_seconds(cell.duration_seconds),
            *_figures(cell.usages, devices, _kept, _peak),
            clean(cell.error or ""),
        )
        for cell in cells
    ]
    return _without_empty(columns, rows, {"cell", "time", *figures})


def growth_line(growth: Growth) -> str:
    """Return what is said unasked of a cell that grows with every run."""
    least, most = format_bytes(growth.least_bytes), format_bytes(growth.most_bytes)
    if least != most:
        number, unit = least.split()
        least = number if most.endswith(f" {unit}") else least
    by = most if least == most else f"{least} to {most}"
    return f"this cell has grown {device_label(growth.device)} by {by} on each of its last {growth.runs} runs"


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
            label(name, run),
            datetime.fromtimestamp(item.started_at).strftime("%H:%M:%S"),  # the user's own clock
            format_seconds(item.duration_seconds),
            str(len(item.cells)),
            *_figures(item.usages, devices, _peak, _kept),
            str(item.ooms) if item.ooms else "",
            ", ".join(f"{_cut(key, _VALUE_SHOWN)}={_value(value)}" for key, value in item.parameters.items()),
        )
        for name, run, item in numbered(records)
    ]
    table = _without_empty(columns, rows, {"time", "cells", "OOMs", *figures})
    return Report("experiments", count(len(records), "experiment"), lines, (table,))


def comparison_report(runs: Sequence[tuple[str, int, ExperimentRecord]]) -> Report:
    """Return experiments side by side, as ``numbered`` gives them: parameters, time, what each device went through."""
    table = comparison_table(runs)
    return Report("comparison", f"{count(len(runs), 'experiment')} side by side", tables=(table,))


def comparison_table(runs: Sequence[tuple[str, int, ExperimentRecord]]) -> Table:
    """Return one row per run; a parameter is a column, and a column that would be empty in each is left out."""
    records = [item for _, _, item in runs]
    devices, parameters = _in_use(records), list(dict.fromkeys(key for item in records for key in item.parameters))
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("peak", "kept", "reclaimed")]
    columns = ("experiment", *(_cut(key, _VALUE_SHOWN) for key in parameters), "time", "cells", *figures, "OOMs")
    rows = [
        (
            label(name, run),
            *(_value(item.parameters[key]) if key in item.parameters else "" for key in parameters),
            format_seconds(item.duration_seconds),
            str(len(item.cells)),
            *_sides(item, devices),
            str(item.ooms),
        )
        for name, run, item in runs
    ]
    return _without_empty(columns, rows, set(columns[1:]))


def numbered(records: Iterable[ExperimentRecord]) -> Iterator[tuple[str, int, ExperimentRecord]]:
    """Yield each experiment's name as it can be shown, and the number of its run among those of the same name."""
    runs: dict[str, int] = {}
    for record in records:
        name = clean(record.name)
        runs[name] = runs.get(name, 0) + 1
        yield name, runs[name], record


def label(name: str, run: int) -> str:
    """Return how a run is called: ``baseline``, then ``baseline #2``."""
    return name if run == 1 else f"{name} #{run}"


def _in_use(records: Sequence[CellRecord | ExperimentRecord]) -> list[str]:
    """Return the host and the accelerators that held something."""
    used = {usage.device for record in records for usage in record.usages if usage.peak_bytes or usage.reserved_bytes}
    return [device for device in devices_of(records) if device == "cpu" or device in used]


def _figures(usages: Iterable[Usage], devices: Iterable[str], *figures: object) -> list[str]:
    found = {usage.device: usage for usage in usages}
    return [
        figure(found[device]) if device in found else ""  # type: ignore[operator]  # one of the functions below
        for device in devices
        for figure in figures
    ]


def _kept(usage: Usage) -> str:
    return format_change(usage.delta_bytes)


def _peak(usage: Usage) -> str:
    return format_change(usage.peak_delta_bytes)


def _sides(record: ExperimentRecord, devices: Iterable[str]) -> list[str]:
    found = {usage.device: usage for usage in record.usages}
    sides: list[str] = []
    for device in devices:
        usage, reclaimed = found.get(device), record.reclaimed.get(device)
        sides += ["", ""] if usage is None else [_peak(usage), _kept(usage)]
        sides.append("" if reclaimed is None else format_bytes(reclaimed))
    return sides


def _value(value: object) -> str:
    return _cut(value, _VALUE_SHOWN) if type(value) is str else f"{value:g}" if type(value) is float else str(value)


def _cut(text: str, length: int) -> str:
    text = clean(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _without_empty(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: set[str]) -> Table:
    filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return Table(
        "",
        tuple(columns[index] for index in filled),
        tuple(tuple(row[index] for index in filled) for row in rows),
        frozenset(numbers),
    )
