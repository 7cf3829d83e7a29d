"""Reports on finished cells, traces, loops and experiments: tables with one row for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from ipygpumem.records import (
    CellRecord,
    ExperimentRecord,
    TraceRecord,
    Usage,
    devices_of,
    usage_on,
)
from ipygpumem.report.cells import trace_segments
from ipygpumem.report.devices import device_label, is_worth_reporting, peak_label
from ipygpumem.report.experiments import end_labels, has_pauses
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.words import (
    VALUE_SHOWN,
    clean,
    clean_name,
    count,
    number_text,
    shorten,
    value_text,
)
from ipygpumem.units import format_change, format_seconds

Spans = Sequence[CellRecord | ExperimentRecord | TraceRecord]

_SOURCE_SHOWN = 40
"""Maximum number of letters of a cell's source."""


def history_report(
    cells: Sequence[CellRecord], *, total: int, experiment: str | None = None
) -> Report:
    """Return the report of ``%gpumem history``.

    Args:
        cells: the cells to show, a row for each.
        total: the number of all finished cells.
        experiment: the name or glob by which the user has chosen experiments; None for all cells.
    """
    of_experiment = "" if experiment is None else f" of {clean(experiment)}"
    if not total:
        text = f"no cell{of_experiment} has finished yet"
        if of_experiment:
            text += "; an experiment inside one cell has no cells of its own"
        return Report("history", text)
    rows = list(map(_cell_row, cells, _figures(cells)))
    table = _table_of_figures(rows, "source", "experiment", "error")
    seconds = format_seconds(sum(cell.duration_seconds for cell in cells))
    headline = f"history · {_number_shown(cells, total, 'cell')}{of_experiment} · {seconds}"
    return Report("history", headline, tables=[table])


def _cell_row(cell: CellRecord, figures: dict[str, str]) -> dict[str, str]:
    """Return the row of a cell, with its devices' figures by heading."""
    return {
        "cell": number_text(cell.execution_count),
        **figures,
        "time": format_seconds(cell.duration_seconds),
        "source": shorten(cell.source_line, _SOURCE_SHOWN),
        "experiment": clean(cell.experiment or ""),
        "error": clean(cell.error or ""),
    }


def traces_report(traces: Sequence[TraceRecord], *, total: int) -> Report:
    """Return a report with a row for each trace.

    Args:
        traces: the traces to show, which may be iterations of loops.
        total: the number of all traces.
    """
    rows = list(map(_trace_row, traces, _figures(traces)))
    number = _number_shown(traces, total, "trace")
    return Report("traces", number, tables=[_table_of_figures(rows, "label", "error")])


def _trace_row(trace: TraceRecord, figures: dict[str, str]) -> dict[str, str]:
    """Return the row of a trace, with its devices' figures by heading."""
    return {
        "label": clean_name(trace.label),
        "iteration": number_text(trace.iteration),
        **figures,
        "time": format_seconds(trace.duration_seconds),
        "error": clean(trace.error or ""),
    }


def _table_of_figures(rows: Sequence[dict[str, str]], *words: str, title: str = "") -> Table:
    """Return a table whose columns are numbers.

    Args:
        rows: the texts of each row, by heading.
        words: the columns that are no numbers.
        title: the title.
    """
    numbers = rows[0].keys() - words
    return Table.of(rows, numbers, title, code={"source"})


def _number_shown(shown: Sequence[object], total: int, noun: str) -> str:
    """Return a text such as ``the last 20 of 35 cells``, or ``20 cells`` if all are shown."""
    number = count(total, noun)
    if len(shown) < total:
        return f"the last {len(shown)} of {number}"
    return number


def _figures(spans: Spans, first: TraceRecord | None = None) -> list[dict[str, str]]:
    """Return the figures of each record by heading: the memory that it kept on each device, and the
    peak. An iteration of a loop also has the growth since the first one.

    Args:
        spans: the records.
        first: the first iteration, if they are iterations; else None.
    """
    devices = _devices_worth_reporting(spans)
    rows = []
    for span in spans:
        row: dict[str, str] = {}
        for device in devices:
            usage = usage_on(span.usages, device)
            row |= _device_figures(span, device, usage)
            if first is not None:
                growth = "" if span is first else _growth_since(first, usage)
                row[f"{device_label(device)} growth"] = growth
        rows.append(row)
    return rows


def _device_figures(
    span: CellRecord | ExperimentRecord | TraceRecord, device: str, usage: Usage | None
) -> dict[str, str]:
    """Return the memory that a record kept on a device and the peak, by heading; empty texts if it
    did not use the device. An experiment's peak comes first, because it keeps nothing.

    Args:
        span: the record.
        device: the device.
        usage: the record's memory on it; None if there is none.
    """
    kept_text = peak_text = ""
    if usage is not None:
        kept_text = format_change(usage.delta_bytes)
        peak_text = peak_label(usage)
    label = device_label(device)
    if isinstance(span, ExperimentRecord):
        return {f"{label} peak": peak_text, f"{label} kept": kept_text}
    return {f"{label} kept": kept_text, f"{label} peak": peak_text}


def _growth_since(first: TraceRecord, usage: Usage | None) -> str:
    """Return the growth of a device since the end of a loop's first iteration."""
    if usage is None:
        return ""
    growth = usage.after_bytes
    start = usage_on(first.usages, usage.device)
    if start is not None:
        growth -= start.after_bytes
    return format_change(growth)


def _devices_worth_reporting(spans: Spans) -> list[str]:
    """Return the devices that are worth a column: the host, and each other one that any record
    used.
    """
    usages = list[Usage]()
    for span in spans:
        usages += filter(is_worth_reporting, span.usages)
    return devices_of(usages)


# -- loops --------------------------------------------------------------------------------------


def loop_report(rows: Sequence[TraceRecord], total: int | None, remarks: Sequence[str]) -> Report:
    """Return the report of a loop so far, a row for each iteration.

    Args:
        rows: the first iteration and the last ones.
        total: the number of all iterations, if it is known.
        remarks: lines below the table.
    """
    first = rows[0]
    last = rows[-1]
    label = clean_name(last.label)
    number = str(last.iteration)
    if total is not None:
        number += f" of {total}"
    title = ""
    hidden = (last.iteration or 0) - len(rows)
    if hidden:
        title = f"{count(hidden, 'row')} after the first not shown"
    table_rows = []
    for record, figures in zip(rows, _figures(rows, first), strict=True):
        row = {label: str(record.iteration), "time": format_seconds(record.duration_seconds)}
        table_rows.append(row | figures)
    table = _table_of_figures(table_rows, title=title)
    seconds = last.started_at + last.duration_seconds - first.started_at
    head = [f"{label} {number}", format_seconds(seconds)]
    return Report("track", head, remarks, [table], records=rows)


def iteration_report(record: TraceRecord) -> Report:
    """Return the report of one iteration in a line, for front-ends that cannot update a table."""
    label = f"{clean_name(record.label)} {record.iteration}"
    head = [label, *trace_segments(record)]
    return Report("track", head, records=[record])


# -- experiments --------------------------------------------------------------------------------


def experiments_report(
    records: Sequence[ExperimentRecord], still_open: Iterable[str] = ()
) -> Report:
    """Return the report of ``%experiment list``.

    Args:
        records: the finished experiments, a row for each.
        still_open: the names of the open ones, a line for each.
    """
    lines = [f"open: {clean(name)}" for name in still_open]
    if not records:
        return Report("experiments", "no experiment has finished yet", lines)
    rows = list(map(_experiment_row, numbered(records), _figures(records)))
    table = _table_of_figures(rows, "experiment", "began", "parameters")
    return Report("experiments", count(len(records), "experiment"), lines, [table])


def _experiment_row(run: NumberedRun, figures: dict[str, str]) -> dict[str, str]:
    """Return the row of a finished experiment, with its devices' figures by heading."""
    record = run.record
    began = datetime.fromtimestamp(record.started_at)  # in local time
    parameters = []
    for name, value in record.parameters.items():
        short_name = shorten(name, VALUE_SHOWN)
        parameters.append(f"{short_name}={value_text(value)}")
    return {
        "experiment": run.label,
        "began": began.strftime("%H:%M:%S"),
        **_times(record),
        "cells": _number_of_cells(record),
        **figures,
        "OOMs": str(record.ooms or ""),
        "parameters": ", ".join(parameters),
    }


def _number_of_cells(record: ExperimentRecord) -> str:
    """Return the number of an experiment's cells, or of its engines if it ran on a cluster."""
    if record.engines:
        return count(len(record.engines), "engine")
    return str(len(record.cells))


def _times(record: ExperimentRecord) -> dict[str, str]:
    """Return the time in an experiment's cells; and the span from start to end, if there were
    pauses between cells.
    """
    seconds = record.duration_seconds
    span = ""
    if has_pauses(seconds, record.span_seconds):
        span = format_seconds(record.span_seconds)
    return {"time": format_seconds(seconds), "span": span}


def comparison_report(runs: Sequence[NumberedRun]) -> Report:
    """Return the report of ``%experiment compare``: parameters, time, and each device's figures of
    several experiments.

    Each device has a table of its own, because one table would be too wide for most pages.
    """
    records = [run.record for run in runs]
    parameters: dict[str, object] = {}
    for record in records:
        parameters |= record.parameters
    rows = [_comparison_row(run, parameters) for run in runs]
    tables = [_table_of_figures(rows, "experiment")]
    for device in _devices_worth_reporting(records):
        rows = []
        for run in runs:
            usage = usage_on(run.record.usages, device)
            if usage is not None:
                rows.append(_device_row(run, usage))
        tables.append(_table_of_figures(rows, "experiment", title=device_label(device)))
    return Report("comparison", f"{count(len(runs), 'experiment')} side by side", tables=tables)


def _comparison_row(run: NumberedRun, parameters: Iterable[str]) -> dict[str, str]:
    """Return an experiment's row: its parameters, its times, its cells and errors."""
    row = {"experiment": run.label}
    for name in parameters:
        value = run.record.parameters.get(name, "")
        row[shorten(name, VALUE_SHOWN)] = value_text(value)
    row |= _times(run.record)
    row["cells"] = _number_of_cells(run.record)
    row["OOMs"] = str(run.record.ooms)
    return row


def _device_row(run: NumberedRun, usage: Usage) -> dict[str, str]:
    """Return an experiment's row in the table of one device."""
    return {
        "experiment": run.label,
        **end_labels(run.record, usage.device),
        "peak": peak_label(usage),
        "kept": format_change(usage.delta_bytes),
    }


class NumberedRun(NamedTuple):
    """A finished experiment with its number."""

    name: str
    number: int
    """Its number among the experiments of its name, from 1 on."""
    label: str
    """Its name; with the number if several experiments have it: ``baseline #2``."""
    record: ExperimentRecord


def numbered(records: Iterable[ExperimentRecord]) -> list[NumberedRun]:
    """Return each experiment with its number among those of the same name."""
    named_records = [(clean(record.name), record) for record in records]
    runs_of_name = Counter(name for name, _ in named_records)
    runs_so_far = Counter[str]()
    runs = []
    for name, record in named_records:
        runs_so_far[name] += 1
        number = runs_so_far[name]
        label = name
        if runs_of_name[name] > 1:
            label = f"{name} #{number}"
        runs.append(NumberedRun(name, number, label, record))
    return runs
