"""Merges what the engines of a cluster had of one experiment, or of one look at their memory, and reports it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ipygpumem.model import EngineRecord, ExperimentRecord, Usage
from ipygpumem.reports.layout import (
    Fact,
    Listing,
    Report,
    Segment,
    Table,
    clean,
    clean_name,
    count,
    device_label,
)
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds

TIME, PEAK, KEPT, FREE = "time", "peak", "kept", "free"
NAMES = ("deleted", "restored", "kept")
_SHOWN = 20
_HIGH, _LEAST_BYTES = 1.25, 64 * MIB
"""A peak stands out if it is that many times the median, and so many bytes above it."""
_SLOW, _LEAST_SECONDS = 1.5, 1.0
"""So does a time."""
_ROWS_SHOWN = 200
_TOTALLED = (KEPT, "in use", "came back")
"""The sum of the others means nothing: peaks come at different times, and engines share what is free."""
_CHANGES = (KEPT, PEAK)


class Value(NamedTuple):
    """One figure of one engine."""

    value: float
    is_sampled: bool = False


Values = dict[tuple[str, str], Value]
"""By name and kind of device."""


@dataclass(frozen=True)
class Spread:
    """One figure over all engines: bytes, or seconds."""

    lowest: float
    median: float
    highest: float
    lowest_name: str
    highest_name: str


@dataclass(frozen=True)
class Figure:
    """One figure of the engines of a cluster, such as the peak on their cards."""

    name: str
    device: str
    """``cpu``, or ``cuda`` for whichever card each engine used; empty for a time."""
    engines: int
    """How many have it."""
    total: float
    spread: Spread
    is_sampled: bool = False
    """Whether some engine's is a lower bound."""


def kind_of(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``: each engine numbers its cards by itself."""
    return device.partition(":")[0]


def merged_figures(engines: Iterable[tuple[int, Values]]) -> list[Figure]:
    """Return each figure over the engines that have it, by device and then in the order in which they come."""
    by_key: dict[tuple[str, str], list[tuple[Value, str]]] = defaultdict(list)
    for engine, values in engines:
        for key, value in values.items():
            by_key[key].append((value, f"engine {engine}"))
    made = [
        Figure(
            name,
            device,
            len(found),
            sum(value.value for value, _ in found),
            _spread([(value.value, owner) for value, owner in found]),
            any(value.is_sampled for value, _ in found),
        )
        for (name, device), found in by_key.items()
    ]
    order = {"": 0, "cpu": 1}
    return sorted(made, key=lambda figure: order.get(figure.device, 2))


def _spread(values: Sequence[tuple[float, str]]) -> Spread:
    low, high = min(values, key=lambda item: item[0]), max(values, key=lambda item: item[0])
    return Spread(low[0], statistics.median_low([value for value, _ in values]), high[0], low[1], high[1])


def values_of(engine: EngineRecord) -> Values:
    """Return an engine's figures of an experiment: time in its cells, peak, what stayed, what is free."""
    record = engine.record
    if record is None:
        return {}
    found: Values = {(TIME, ""): Value(seconds_of(record))}
    for usage in record.usages:
        peak, kept = (PEAK, kind_of(usage.device)), (KEPT, kind_of(usage.device))
        others = found.get(peak, Value(0))
        is_sampled = others.is_sampled or usage.method == "sampled"
        found[peak] = Value(max(others.value, usage.peak_delta_bytes), is_sampled)
        found[kept] = Value(found.get(kept, Value(0)).value + usage.delta_bytes)
    for device, free in engine.free.items():
        key = (FREE, kind_of(device))
        found[key] = Value(min(free, found[key].value) if key in found else free)
    return found


def seconds_of(record: ExperimentRecord) -> float:
    """Return how long an engine's cells ran; of one without cells, how long the experiment was open."""
    return sum(cell.duration_seconds for cell in record.cells) if record.cells else record.duration_seconds


def merged_record(
    name: str, started_at: float, duration_seconds: float, engines: Sequence[EngineRecord]
) -> ExperimentRecord:
    """Return the experiment that all engines ran: sums, names, and the engines that stand out."""
    records = [engine.record for engine in engines if engine.record is not None]
    deleted, restored, kept = (
        tuple(dict.fromkeys(name for record in records for name in getattr(record, what))) for what in NAMES
    )
    return ExperimentRecord(
        name,
        started_at,
        duration_seconds,
        (),
        _usages(records),
        _sums(record.consumed for record in records),
        _sums(record.reclaimed for record in records),
        deleted,
        restored,
        kept,
        (),
        notes=_cut(
            [*_failed(engines), *_standing_out(engines), *_differing(engines), *_said(engines)],
            _SHOWN,
            "notes on engines",
        ),
        parameters=next((record.parameters for record in records), {}),
        ooms=sum(record.ooms for record in records),
        engines=tuple(engines),
    )


def _sums(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for own in sizes:
        for device, size in own.items():
            found[kind_of(device)] += size
    return dict(found)


def _usages(records: Iterable[ExperimentRecord]) -> tuple[Usage, ...]:
    """Return sums by kind of device; of peaks, too, though engines need not have had theirs at one moment."""
    by_kind: dict[str, list[Usage]] = defaultdict(list)
    for record in records:
        for usage in record.usages:
            by_kind[kind_of(usage.device)].append(usage)
    return tuple(
        Usage(
            kind,
            sum(usage.before_bytes for usage in own),
            sum(usage.after_bytes for usage in own),
            sum(usage.peak_bytes for usage in own),
            None,
            next((usage.method for usage in own if usage.method == "sampled"), own[0].method),
        )
        for kind, own in by_kind.items()
    )


def _cut(texts: Sequence[str], most: int, what: str) -> tuple[str, ...]:
    rest = len(texts) - most
    return (*texts[:most], *([f"and {rest:,} more {what}"] if rest > 0 else []))


def place_of(engine: EngineRecord) -> str:
    """Return which engine it is, and where: ``engine 3 (host, rank 3, cuda:0 Some GPU)``."""
    where = [engine.host, "" if engine.rank is None else f"rank {engine.rank}"]
    where += [f"{device} {card}" for device, card in engine.cards.items()]
    inside = ", ".join(filter(None, where))
    return f"engine {engine.engine} ({inside})" if inside else f"engine {engine.engine}"


def engine_numbers(numbers: Sequence[int]) -> str:
    """Return ``engines 0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"engine{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def _failed(engines: Sequence[EngineRecord]) -> Iterator[str]:
    """Yield who failed, those that failed in the same way together."""
    alike: dict[str, list[EngineRecord]] = defaultdict(list)
    for engine in engines:
        if engine.error:
            alike[engine.error].append(engine)
    for error, failed in alike.items():
        who = place_of(failed[0]) if len(failed) == 1 else engine_numbers([engine.engine for engine in failed])
        yield f"{who}: {error}"


def _standing_out(engines: Sequence[EngineRecord]) -> Iterator[str]:
    own = [(engine, values_of(engine)) for engine in engines if engine.record is not None]
    medians = {
        (figure.name, figure.device): figure.spread.median
        for figure in merged_figures((engine.engine, values) for engine, values in own)
    }
    for engine, values in own:
        for (name, device), value in values.items():
            median = medians[name, device]
            if name == PEAK and value.value > max(_HIGH * median, median + _LEAST_BYTES):
                where = "RAM" if device == "cpu" else device
                sizes = f"{format_bytes(int(value.value))} on {where}, the median is {format_bytes(int(median))}"
                yield f"{place_of(engine)} rose by {sizes}"
            if name == TIME and value.value > max(_SLOW * median, median + _LEAST_SECONDS):
                times = f"{format_seconds(value.value)}, the median is {format_seconds(median)}"
                yield f"{place_of(engine)} took {times}"


def _differing(engines: Sequence[EngineRecord]) -> Iterator[str]:
    """Yield the names that only some engines deleted, restored or kept."""
    own = [(engine.engine, engine.record) for engine in engines if engine.record is not None]
    for what in NAMES:
        having: dict[str, list[int]] = defaultdict(list)
        for number, record in own:
            for name in getattr(record, what):
                having[name].append(number)
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, numbers in having.items():
            if len(numbers) < len(own):
                groups[tuple(numbers)].append(name)
        for some, names in groups.items():
            yield f"{what} on {engine_numbers(some)} only: {', '.join(_cut(names, _SHOWN, 'names'))}"


def _said(engines: Sequence[EngineRecord]) -> Iterator[str]:
    """Yield the notes of the engines' own records, and their versions where they are not the same."""
    notes: dict[str, list[int]] = defaultdict(list)
    versions: dict[str, list[int]] = defaultdict(list)
    for engine in engines:
        for note in engine.record.notes if engine.record is not None else ():
            notes[note].append(engine.engine)
        if engine.version:
            versions[engine.version].append(engine.engine)
    for note, numbers in notes.items():
        yield f"{engine_numbers(numbers)}: {note}"
    if len(versions) > 1:
        for version, numbers in versions.items():
            yield f"{engine_numbers(numbers)} ran {version}"


def engines_report(record: ExperimentRecord) -> Report:
    """Return the report of an experiment on a cluster."""
    failed = [engine for engine in record.engines if engine.error]
    segments = [
        f"experiment {clean_name(record.name)}",
        f"on {count(len(record.engines), 'engine')}",
        format_seconds(record.duration_seconds),
        *([f"{len(failed)} failed"] if failed else []),
        *(
            f"{device_label(device)} consumed {format_change(size)}, "
            f"reclaimed {format_bytes(max(0, record.reclaimed.get(device, 0)))}"
            for device, size in record.consumed.items()
        ),
    ]
    own = [(engine, values_of(engine)) for engine in record.engines]
    figures = merged_figures((engine.engine, values) for engine, values in own)
    names = {what: tuple(map(clean_name, getattr(record, what))) for what in NAMES}
    facts = tuple(Fact(what, found, code=True) for what, found in names.items() if found)
    tables = [figures_table(figures), _engines_table(own)]
    shown = [table for table in tables if table.rows]
    notes = tuple(map(clean, record.notes))
    return Report.of("engines", map(Segment, segments), notes, shown, facts, is_trouble=bool(failed))


def figures_table(figures: Sequence[Figure]) -> Table:
    """Return a row for each figure."""
    columns = ("device", "figure", "of", "in all", "lowest", "median", "highest", "whose")
    rows = tuple(
        (
            device_label(figure.device),
            figure.name,
            str(figure.engines),
            _size(figure, figure.total) if figure.name in _TOTALLED else "",
            _size(figure, figure.spread.lowest),
            _size(figure, figure.spread.median),
            _size(figure, figure.spread.highest) + (" (sampled)" if figure.is_sampled else ""),
            "" if figure.spread.lowest == figure.spread.highest else clean_name(figure.spread.highest_name),
        )
        for figure in figures
    )
    return Table("", columns, rows, frozenset(columns[2:7])).without_empty()


def _size(figure: Figure, value: float) -> str:
    if figure.name == TIME:
        return format_seconds(value)
    return format_change(int(value)) if figure.name in _CHANGES else format_bytes(int(value))


def _engines_table(engines: Sequence[tuple[EngineRecord, Values]]) -> Table:
    """Return a row for each engine; devices that no engine had take no column."""
    devices = dict.fromkeys(device for _, values in engines for name, device in values if name == PEAK)
    heads = [f"{name} {device_label(device)}" for device in devices for name in (PEAK, KEPT)]
    columns = ("engine", "host", "process", "card", "time", *heads, "error")
    rows = [
        (
            str(engine.engine),
            clean_name(engine.host),
            str(engine.pid or ""),
            clean_name(", ".join(engine.cards.values())),
            _value(values, TIME, ""),
            *(_value(values, name, device) for device in devices for name in (PEAK, KEPT)),
            clean_name(engine.error),
        )
        for engine, values in engines[:_ROWS_SHOWN]
    ]
    if len(engines) > _ROWS_SHOWN:
        rows.append((f"and {len(engines) - _ROWS_SHOWN:,} more", *[""] * (len(columns) - 1)))
    numbers = frozenset({"engine", "process", "time", *heads})
    return Table("each engine", columns, tuple(rows), numbers, folded=True).without_empty()


def _value(values: Values, name: str, device: str) -> str:
    found = values.get((name, device))
    if found is None:
        return ""
    if name == TIME:
        return format_seconds(found.value)
    return format_change(int(found.value)) + (" (sampled)" if found.is_sampled else "")


def looks_report(
    command: str, looks: Mapping[int, tuple[str, str, Values]], failed: Mapping[str, Sequence[int]]
) -> Report:
    """Return what a command showed on each engine: figures of all, and below each engine's own report, folded.

    Args:
        command: as the user wrote it.
        looks: by engine, its host, the text it showed, and its figures.
        failed: by error, the engines that have no answer.
    """
    headline = f"{clean(command)} on {count(len(looks), 'engine')}"
    lines = tuple(f"{engine_numbers(numbers)}: {clean(error)}" for error, numbers in failed.items())
    figures = merged_figures((number, values) for number, (_, _, values) in looks.items())
    listings = tuple(
        Listing(
            f"engine {number} ({clean_name(host)})",
            _cut([clean(line) for line in text.splitlines()], _ROWS_SHOWN, "lines"),
            code=True,
            folded=True,
        )
        for number, (host, text, _) in list(looks.items())[:_ROWS_SHOWN]
    )
    tables = (figures_table(figures),) if figures else ()
    return Report("engines", headline, lines, tables, (), listings, is_trouble=bool(failed))
