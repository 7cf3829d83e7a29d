"""Reports the history: one row per cell, trace, iteration of a loop, or experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from ipygpumem.inventory.children import ProcessGrowth
from ipygpumem.inventory.records import Inventory, TensorRecord
from ipygpumem.inventory.top import LargestNames
from ipygpumem.records import (
    CellRecord,
    ExperimentRecord,
    Growth,
    TraceRecord,
    devices_of,
    usage_on,
)
from ipygpumem.report.content import end_labels, times, trace_segments
from ipygpumem.report.inventory import kind_of
from ipygpumem.report.layout import (
    Report,
    Table,
    clean,
    clean_name,
    count,
    device_label,
    in_use,
    peak_label,
    shorten,
)
from ipygpumem.units import format_bytes, format_change, format_seconds

Spans = Sequence[CellRecord | ExperimentRecord | TraceRecord]

_SOURCE_SHOWN = 40
_VALUE_SHOWN = 24
_HOLDERS_SHOWN = 3
STATUS_LISTS_PROCESSES = "%gpumem status lists all child processes, with the lines that end them"
_LEAST_SHARE = 0.1
"""Minimum share of the growth for a holder to be reported."""


def history_report(
    cells: Sequence[CellRecord], *, total: int, experiment: str | None = None
) -> Report:
    """Return one row for each of ``cells``, out of ``total`` (of ``experiment``, if given)."""
    of = f" of {clean(experiment)}" if experiment is not None else ""
    if not total:
        why = "; an experiment inside one cell has no cells of its own" if of else ""
        return Report("history", f"no cell{of} has finished yet{why}")
    rows = [
        {
            "cell": "" if cell.execution_count is None else str(cell.execution_count),
            **own,
            "time": format_seconds(cell.duration_seconds),
            "source": shorten(cell.source_line, _SOURCE_SHOWN),
            "experiment": clean(cell.experiment or ""),
            "error": clean(cell.error or ""),
        }
        for cell, own in zip(cells, _figures(cells), strict=True)
    ]
    seconds = format_seconds(sum(cell.duration_seconds for cell in cells))
    headline = f"history · {_number(cells, total, 'cell')}{of} · {seconds}"
    return Report("history", headline, tables=[_table(rows, "source", "experiment", "error")])


def traces_report(traces: Sequence[TraceRecord], *, total: int) -> Report:
    """Return one row for each of ``traces``, including iterations of loops, out of ``total``."""
    rows = [
        {
            "label": clean_name(trace.label),
            "iteration": "" if trace.iteration is None else str(trace.iteration),
            **own,
            "time": format_seconds(trace.duration_seconds),
            "error": clean(trace.error or ""),
        }
        for trace, own in zip(traces, _figures(traces), strict=True)
    ]
    return Report(
        "traces", _number(traces, total, "trace"), tables=[_table(rows, "label", "error")]
    )


def _table(rows: Sequence[dict[str, str]], *words: str, title: str = "") -> Table:
    """Return a table whose columns are numbers, except those named in ``words``."""
    return Table.of(rows, set(rows[0]) - set(words), title, code={"source"})


def _number(shown: Sequence[object], total: int, what: str) -> str:
    return (
        f"the last {len(shown)} of {count(total, what)}"
        if len(shown) < total
        else count(total, what)
    )


def _figures(spans: Spans, first: TraceRecord | None = None) -> list[dict[str, str]]:
    """Return each record's kept memory, peak and growth since ``first``, by heading; experiments'
    peak comes first.
    """
    devices, found = _in_use(spans), []
    for span in spans:
        own: dict[str, str] = {}
        for device in devices:
            usage, label = usage_on(span.usages, device), device_label(device)
            kept = {f"{label} kept": "" if usage is None else format_change(usage.delta_bytes)}
            peak = {f"{label} peak": "" if usage is None else peak_label(usage)}
            own |= {**peak, **kept} if isinstance(span, ExperimentRecord) else {**kept, **peak}
            if first is not None:
                start = usage_on(first.usages, device)
                grown = (
                    0 if usage is None else usage.after_bytes - (start.after_bytes if start else 0)
                )
                own[f"{label} growth"] = (
                    "" if usage is None or span is first else format_change(grown)
                )
        found.append(own)
    return found


def _in_use(spans: Spans) -> list[str]:
    """Return the host and the accelerators that were in use."""
    return devices_of(usage for span in spans for usage in span.usages if in_use(usage))


# -- what grows ---------------------------------------------------------------------------------


def growth_line(growth: Growth) -> str:
    """Return the warning about a cell that grows with every run."""
    device = device_label(growth.device)
    return (
        f"this cell has grown {device} by {growth_size(growth)} on each of its last {growth.runs} "
        f"runs"
    )


def growth_size(growth: Growth) -> str:
    """Return the growth of a device per run: ``64 MiB``, or ``60 to 64 MiB``."""
    least, most = format_bytes(growth.least_bytes), format_bytes(growth.most_bytes)
    if least == most:
        return most
    number, unit = least.split()
    return f"{number if most.endswith(f' {unit}') else least} to {most}"


def loop_growth_line(growth: Growth) -> str:
    """Return the warning about a loop that grows with every iteration."""
    device = device_label(growth.device)
    return (
        f"{device} has grown by {growth_size(growth)} in each of the last {growth.runs} iterations"
    )


def holder_lines(
    before: tuple[LargestNames, Inventory],
    now: tuple[LargestNames, Inventory],
    growths: Sequence[Growth],
    run: str,
    runs: int,
    keeper_of: Callable[[TensorRecord], str],
    free_bytes: int = 0,
) -> list[str]:
    """Return the holders of the memory that each of the last ``runs`` runs added, the largest
    first.

    ``run`` is what a run is called. ``keeper_of`` names the graph, closure or cache that keeps an
    array without a name. Names are compared, not objects: a name that the code rebinds each time
    holds no more than before. The inventories have only arrays without a name. ``free_bytes`` is
    the growth of the free pages in malloc's heap: what names hold cannot be in them.
    """
    old = {row.name: row.device_bytes for row in before[0].names}
    known = {row.storage for row in before[1].tensors}
    lines = list[str]()
    for growth in growths:
        device, least = growth.device, growth.least_bytes * _LEAST_SHARE
        more = [
            (row.device_bytes.get(device, 0) - old.get(row.name, {}).get(device, 0), row)
            for row in now[0].names
        ]
        large = [(size // runs, row) for size, row in more if size >= least * runs]
        found = sorted(
            ((size, f"{clean_name(row.name)} ({kind_of(row)})") for size, row in large),
            reverse=True,
        )
        added = (now[1].device_bytes.get(device, 0) - before[1].device_bytes.get(device, 0)) // runs
        # names may hold some of them
        rest = min(added, growth.most_bytes - sum(size for size, _ in found))
        if rest >= least:
            new = next(
                (
                    row
                    for row in now[1].tensors
                    if row.device == device and row.storage not in known
                ),
                None,
            )
            found.append((rest, "objects without a name" if new is None else clean(keeper_of(new))))
        label = device_label(device)
        lines += [
            f"{label} {format_change(size)} per {run} is held by {holder}" for size, holder in found
        ]
        lines = lines[:_HOLDERS_SHOWN]
        if device == "cpu":
            named_bytes = sum(size for size, _ in found)
            lines += free_heap_line(
                growth, min(free_bytes // runs, growth.most_bytes - named_bytes), run
            )
    return lines or list(now[0].notes)


def process_lines(grown: Iterable[ProcessGrowth], growth: Growth, run: str, runs: int) -> list[str]:
    """Return the processes that grew with each of the last ``runs`` runs, with the lines that end
    them.
    """
    least, label = growth.least_bytes * _LEAST_SHARE, device_label(growth.device)
    lines = list[str]()
    for item in grown:
        size = item.grown_bytes // runs
        if size >= least:
            lines.append(f"{label} {format_change(size)} per {run} is held by {_processes(item)}")
    return lines[:_HOLDERS_SHOWN]


def _processes(item: ProcessGrowth) -> str:
    """Return processes by name and number, and the line that ends them."""
    names = ", ".join(
        f"{child.pid} ({clean(child.name)})" for child in item.processes[:_HOLDERS_SHOWN]
    )
    hidden = len(item.processes) - _HOLDERS_SHOWN
    if hidden > 0:
        names += f" and {hidden} more"
    noun, pronoun = ("process", "it") if len(item.processes) == 1 else ("processes", "them")
    if not item.ends_by:
        return f"{noun} {names}; the line that ends {pronoun} is not known"
    return f"{noun} {names}; to end {pronoun}: {clean(item.ends_by)}"


def free_heap_line(growth: Growth, size: int, run: str) -> list[str]:
    """Return a line if free pages of malloc's heap account for the growth of RAM, by ``size`` bytes
    in each run.
    """
    accounts_for_it = 2 * size >= growth.least_bytes
    if not accounts_for_it:
        return []
    label = device_label(growth.device)
    return [
        f"{label} {format_change(size)} per {run} is free in malloc's heap, in gaps between "
        f"objects: %gpumem free"
    ]


def unknown_line(growth: Growth) -> str:
    """Return the line about a device's growth for which nothing was measured that points to a
    holder.
    """
    return (
        f"no name, tensor or array accounts for the growth of {device_label(growth.device)}: its "
        f"holder is unknown"
    )


# -- loops --------------------------------------------------------------------------------------


def loop_report(rows: Sequence[TraceRecord], total: int | None, remarks: Sequence[str]) -> Report:
    """Return the table of a loop so far: the first iteration and the last ones, out of ``total`` if
    known.
    """
    first, last = rows[0], rows[-1]
    label = clean_name(last.label)
    number = f"{last.iteration}" if total is None else f"{last.iteration} of {total}"
    seconds = last.started_at + last.duration_seconds - first.started_at
    hidden = (last.iteration or 0) - len(rows)
    title = f"{count(hidden, 'row')} after the first not shown" if hidden else ""
    shown = [
        {label: str(record.iteration), "time": format_seconds(record.duration_seconds), **own}
        for record, own in zip(rows, _figures(rows, first), strict=True)
    ]
    head = [f"{label} {number}", format_seconds(seconds)]
    return Report("track", head, remarks, [_table(shown, title=title)], records=rows)


def iteration_report(record: TraceRecord) -> Report:
    """Return one line for one iteration, for front-ends that cannot update a table."""
    return Report(
        "track",
        [f"{clean_name(record.label)} {record.iteration}", *trace_segments(record)],
        records=[record],
    )


# -- experiments --------------------------------------------------------------------------------


def experiments_report(
    records: Sequence[ExperimentRecord], still_open: Iterable[str] = ()
) -> Report:
    """Return one row for each finished experiment, and a line for each open one."""
    lines = [f"open: {clean(name)}" for name in still_open]
    if not records:
        return Report("experiments", "no experiment has finished yet", lines)
    rows = [
        {
            "experiment": run.label,
            "began": datetime.fromtimestamp(item.started_at).strftime("%H:%M:%S"),  # local time
            **_times(item),
            "cells": _parts(item),
            **own,
            "OOMs": str(item.ooms) if item.ooms else "",
            "parameters": ", ".join(
                f"{shorten(key, _VALUE_SHOWN)}={_value(value)}"
                for key, value in item.parameters.items()
            ),
        }
        for run, item, own in zip(numbered(records), records, _figures(records), strict=True)
    ]
    table = _table(rows, "experiment", "began", "parameters")
    return Report("experiments", count(len(records), "experiment"), lines, [table])


def _parts(record: ExperimentRecord) -> str:
    """Return the number of its cells, or of its engines if it ran on a cluster."""
    return count(len(record.engines), "engine") if record.engines else str(len(record.cells))


def _times(record: ExperimentRecord) -> dict[str, str]:
    """Return the time in the cells, and the span including pauses."""
    time, *span = times(record.duration_seconds, record.span_seconds)
    return {"time": time, "span": "".join(span).removeprefix("span ")}


def comparison_report(runs: Sequence[NumberedRun]) -> Report:
    """Return experiments side by side: parameters, time, and each device's figures.

    Several devices have a table each, because one would be too wide for most pages.
    """
    records = [run.record for run in runs]
    parameters = dict.fromkeys(key for item in records for key in item.parameters)
    rows = [
        {
            "experiment": run.label,
            **{
                shorten(key, _VALUE_SHOWN): _value(run.record.parameters.get(key, ""))
                for key in parameters
            },
            **_times(run.record),
            "cells": _parts(run.record),
            "OOMs": str(run.record.ooms),
        }
        for run in runs
    ]
    tables = [_table(rows, "experiment")]
    for device in _in_use(records):
        rows = [
            {
                "experiment": run.label,
                **end_labels(run.record, device),
                "peak": peak_label(usage),
                "kept": format_change(usage.delta_bytes),
            }
            for run in runs
            if (usage := usage_on(run.record.usages, device)) is not None
        ]
        tables.append(_table(rows, "experiment", title=device_label(device)))
    return Report("comparison", f"{count(len(runs), 'experiment')} side by side", tables=tables)


class NumberedRun(NamedTuple):
    """An experiment with its number among those of its name; the label has it if
    there are several.
    """

    name: str
    number: int
    label: str
    record: ExperimentRecord


def numbered(records: Iterable[ExperimentRecord]) -> list[NumberedRun]:
    """Return each experiment with its number among those of the same name."""
    named = [(clean(record.name), record) for record in records]
    times = Counter(name for name, _ in named)
    so_far: Counter[str] = Counter()
    runs = []
    for name, record in named:
        so_far[name] += 1
        runs.append(
            NumberedRun(
                name, so_far[name], f"{name} #{so_far[name]}" if times[name] > 1 else name, record
            )
        )
    return runs


def _value(value: object) -> str:
    return (
        shorten(value, _VALUE_SHOWN)
        if type(value) is str
        else f"{value:g}"
        if type(value) is float
        else str(value)
    )
