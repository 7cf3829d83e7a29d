"""Reports on the engines of a cluster: one merged record, a table of figures, and a
row per engine.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ipygpumem.records import OUTSIDE, EngineRecord, ExperimentRecord, Usage
from ipygpumem.report.cells import has_changed
from ipygpumem.report.devices import device_label, is_worth_reporting
from ipygpumem.report.experiments import name_facts, times
from ipygpumem.report.layout import Listing, Report, Table
from ipygpumem.report.words import clean, clean_name, count
from ipygpumem.units import format_bytes, format_change, format_seconds

TIME = "time"
PEAK = "peak"
KEPT = "kept"
FREE = "free"
_TOTALLED = (KEPT, "in use", "freed")
"""Figures whose sum is meaningful: peaks come at different times, and engines share the free
memory.
"""
FigureKey = tuple[str, str]
"""The name of a figure and a kind of device, such as ``("peak", "cuda")``."""
Values = Mapping[FigureKey, float]
"""Figures of one engine: bytes, or seconds."""


class EngineOutput(NamedTuple):
    """A command's output on one engine."""

    host: str
    """The name of the engine's machine."""
    text: str
    """The output."""
    values: Values
    """The memory there after the command."""


def kind_of(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``: each engine numbers its own cards."""
    return device.partition(":")[0]


def is_reported(usage: Usage) -> bool:
    """Return False for unused devices, and for child processes that stay as they are: each engine
    has a nanny.
    """
    if usage.device in OUTSIDE:
        return has_changed(usage)
    return is_worth_reporting(usage)


def values_of(engine: EngineRecord) -> Values:
    """Return an engine's figures of an experiment: time in its cells, peak, kept and
    free memory.
    """
    record = engine.record
    if record is None:
        return {}
    values: dict[FigureKey, float] = {(TIME, ""): record.duration_seconds}
    for usage in filter(is_reported, record.usages):
        kind = kind_of(usage.device)
        peak = values.get((PEAK, kind), 0)
        values[PEAK, kind] = max(peak, usage.peak_delta_bytes)
        values.setdefault((KEPT, kind), 0)
        values[KEPT, kind] += usage.delta_bytes
    for device, free in engine.free.items():
        key = (FREE, kind_of(device))
        values[key] = min(free, values.get(key, free))
    return values


# -- the merged record --------------------------------------------------------------------------


def merged_record(
    name: str, started_at: float, span_seconds: float, engines: Sequence[EngineRecord]
) -> ExperimentRecord:
    """Return the record of an experiment on all engines: sums, names, and notes on outliers.

    Args:
        name: its name.
        started_at: the Unix time of its start.
        span_seconds: the time from its start to its end, by the notebook's clock.
        engines: the records of the engines, also of those that have failed.
    """
    records = [engine.record for engine in engines if engine.record is not None]
    hosts = {engine.engine: engine.host for engine in engines}
    seconds = span_seconds
    parameters: dict[str, int | float | str] = {}
    if records:
        seconds = max(record.duration_seconds for record in records)
        parameters = records[0].parameters
    return ExperimentRecord(
        name,
        started_at,
        duration_seconds=seconds,
        cells=(),
        usages=_summed_usages(records),
        consumed=_sums_by_kind(record.consumed for record in records),
        freed=_sums_by_kind(record.freed for record in records),
        deleted=_names_of_all_engines(record.deleted for record in records),
        restored=_names_of_all_engines(record.restored for record in records),
        kept=_names_of_all_engines(record.kept for record in records),
        survivors=(),
        notes=tuple(texts_with_engines(_errors_and_notes(engines), hosts)),
        parameters=parameters,
        ooms=sum(record.ooms for record in records),
        engines=tuple(engines),
        span_seconds=span_seconds,
    )


def _names_of_all_engines(names_of_engines: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all engines, each once, in the order of their first occurrence."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(names_of_engines)))


def _errors_and_notes(engines: Iterable[EngineRecord]) -> list[tuple[int, str]]:
    """Return the error of each engine, and the notes of its record, with the engine's number."""
    texts: list[tuple[int, str]] = []
    for engine in engines:
        texts_of_engine = [engine.error]
        if engine.record is not None:
            texts_of_engine += engine.record.notes
        texts += [(engine.engine, text) for text in texts_of_engine if text]
    return texts


def _sums_by_kind(sizes_of_engines: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of the engines' bytes by device kind."""
    sums: dict[str, int] = defaultdict(int)
    for sizes in sizes_of_engines:
        for device, size in sizes.items():
            sums[kind_of(device)] += size
    return dict(sums)


def _summed_usages(records: Iterable[ExperimentRecord]) -> tuple[Usage, ...]:
    """Return the sum of the engines' usages for each kind of device.

    The sum of the peaks is an upper bound, because engines may peak at different times.
    """
    usages_by_kind: dict[str, list[Usage]] = defaultdict(list)
    for record in records:
        for usage in record.usages:
            usages_by_kind[kind_of(usage.device)].append(usage)
    return tuple(map(_summed_usage, usages_by_kind, usages_by_kind.values()))


def _summed_usage(kind: str, usages: Sequence[Usage]) -> Usage:
    """Return the sum of the usages of one device kind; it is sampled if one of them is."""
    before_bytes = after_bytes = peak_bytes = 0
    method = usages[0].method
    for usage in usages:
        before_bytes += usage.before_bytes
        after_bytes += usage.after_bytes
        peak_bytes += usage.peak_bytes
        if usage.method == "sampled":
            method = "sampled"
    return Usage(
        kind,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        peak_bytes=peak_bytes,
        total_bytes=None,
        method=method,
    )


# -- texts about engines ------------------------------------------------------------------------


def engine_numbers(numbers: Sequence[int]) -> str:
    """Return numbers of engines in words: ``engines 0-2, 5`` for 0, 1, 2 and 5."""
    texts: list[str] = []
    first = last = 0
    for number in sorted(numbers):
        if texts and number == last + 1:
            texts[-1] = f"{first}-{number}"
        else:
            texts.append(str(number))
            first = number
        last = number
    noun = "engines" if len(numbers) > 1 else "engine"
    return f"{noun} {', '.join(texts)}"


def texts_with_engines(
    texts: Iterable[tuple[int, str]], hosts: Mapping[int, str] = {}
) -> list[str]:
    """Return each text once, after the engines that it is about: ``engines 0-2: died``.

    Args:
        texts: the number of an engine, with a text about it.
        hosts: the engines' hosts, which are named for single engines: ``engine 3 (node7): died``.
    """
    engines_by_text: dict[str, list[int]] = defaultdict(list)
    for number, text in texts:
        engines_by_text[text].append(number)
    lines = []
    for text, numbers in engines_by_text.items():
        prefix = engine_numbers(numbers)
        host = hosts.get(numbers[0])
        if host and len(numbers) == 1:
            prefix += f" ({host})"
        lines.append(f"{prefix}: {clean(text)}")
    return lines


# -- reports ------------------------------------------------------------------------------------


def engines_report(record: ExperimentRecord) -> Report:
    """Return the report of an experiment on a cluster."""
    failed = [engine for engine in record.engines if engine.error]
    values_by_engine = {engine.engine: values_of(engine) for engine in record.engines}
    sampled = {(PEAK, usage.device) for usage in record.usages if usage.method == "sampled"}
    tables = [
        _figures_table(values_by_engine, sampled),
        _engines_table(record.engines, values_by_engine),
    ]
    return Report(
        "engines",
        _engines_headline(record, len(failed)),
        list(map(clean, record.notes)),
        tables,
        name_facts(record),
        is_trouble=bool(failed),
        records=[record],
    )


def _engines_headline(record: ExperimentRecord, failed: int) -> list[str]:
    """Return the headline: the engines, the time, and the memory of each device in use."""
    engines = count(len(record.engines), "engine")
    head = [f"experiment {clean_name(record.name)}", f"on {engines}"]
    head += times(record.duration_seconds, record.span_seconds)
    if failed:
        head.append(f"{failed} failed")
    devices_in_use = {usage.device for usage in record.usages if is_reported(usage)}
    for device, size in record.consumed.items():
        if device in devices_in_use:
            consumed = f"{device_label(device)} consumed {format_change(size)}"
            freed = format_bytes(max(0, record.freed.get(device, 0)))
            head.append(f"{consumed}, freed {freed}")
    return head


def _figures_table(engines: Mapping[int, Values], sampled: Collection[FigureKey] = ()) -> Table:
    """Return the table with a row for each figure: its spread over the engines that have it.

    Args:
        engines: the figures by engine.
        sampled: the figures that were sampled on an engine.
    """
    values_by_figure: dict[FigureKey, dict[int, float]] = defaultdict(dict)
    for engine, values in engines.items():
        for key, value in values.items():
            values_by_figure[key][engine] = value
    rows = []
    for key in sorted(values_by_figure, key=_position_of_figure):
        row = _figure_row(key, values_by_figure[key], is_sampled=key in sampled)
        rows.append(row)
    return Table.of(rows, {"of", "in total", "lowest", "median", "highest"})


def _position_of_figure(key: FigureKey) -> int:
    """Return the position of a figure in the table: time first, then the host, then devices."""
    _, device = key
    return {"": 0, "cpu": 1}.get(device, 2)


def _figure_row(key: FigureKey, values: Mapping[int, float], *, is_sampled: bool) -> dict[str, str]:
    """Return the row of a figure: its sum and spread over the engines, and the first engine with
    the highest value.
    """
    name, device = key
    sizes = values.values()
    lowest = min(sizes)
    highest = max(sizes)
    row = {
        "device": device_label(device),
        "figure": name,
        "of": str(len(values)),
        "in total": "",
        "lowest": _value_text(name, lowest),
        "median": _value_text(name, statistics.median_low(sizes)),
        "highest": _value_text(name, highest),
    }
    if is_sampled:
        row["figure"] = f"{name} (sampled)"
    if name in _TOTALLED:
        row["in total"] = _value_text(name, sum(sizes))
    if lowest < highest:
        row["whose"] = f"engine {max(values, key=values.__getitem__)}"
    return row


def _value_text(name: str, value: float) -> str:
    """Return the value of a figure with its unit; changes have a sign."""
    if name == TIME:
        return format_seconds(value)
    if name in (KEPT, PEAK):
        return format_change(int(value))
    return format_bytes(int(value))


def _engines_table(engines: Sequence[EngineRecord], figures: Mapping[int, Values]) -> Table:
    """Return the table with a row for each engine; devices that no engine used have no column."""
    columns = {TIME: (TIME, "")}
    for values in figures.values():
        for name, device in values:
            if name == PEAK:
                label = device_label(device)
                columns[f"{PEAK} {label}"] = (PEAK, device)
                columns[f"{KEPT} {label}"] = (KEPT, device)
    rows = [_engine_row(engine, figures[engine.engine], columns) for engine in engines]
    return Table.of(rows, {"engine", "process", *columns}, "each engine", is_collapsed=True)


def _engine_row(
    engine: EngineRecord, values: Values, columns: Mapping[str, FigureKey]
) -> dict[str, str]:
    """Return an engine's row; ``columns`` are the figures by heading."""
    row = {
        "engine": str(engine.engine),
        "host": clean_name(engine.host),
        "process": str(engine.pid or ""),
        "card": clean_name(", ".join(engine.cards.values())),
    }
    for heading, key in columns.items():
        name, _ = key
        row[heading] = ""
        if key in values:
            row[heading] = _value_text(name, values[key])
    row["error"] = clean_name(engine.error)
    return row


def outputs_report(
    command: str, outputs: Mapping[int, EngineOutput], failed: Mapping[int, str]
) -> Report:
    """Return the report of a command that has run on several engines.

    Args:
        command: the command as the user wrote it.
        outputs: its output by engine.
        failed: the errors of the engines on which it has failed.
    """
    headline = f"{clean(command)} on {count(len(outputs), 'engine')}"
    values_by_engine: dict[int, Values] = {}
    listings = []
    for number, output in outputs.items():
        values_by_engine[number] = output.values
        lines = list(map(clean, output.text.splitlines()))
        title = f"engine {number} ({clean_name(output.host)})"
        listings.append(Listing(title, lines, code=True, is_collapsed=True))
    return Report(
        "engines",
        headline,
        texts_with_engines(failed.items()),
        [_figures_table(values_by_engine)],
        listings=listings,
        is_trouble=bool(failed),
    )
