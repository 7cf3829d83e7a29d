"""Reports what the engines of a cluster had: sums, spreads, who stands out, and a folded row for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ipygpumem.merging import KEPT, NAMES, PEAK, TIME, Figure, Spread, Values, engine_numbers, merged_figures, values_of
from ipygpumem.model import CellRecord, EngineRecord, ExperimentRecord
from ipygpumem.reports.layout import (
    SEPARATOR,
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
from ipygpumem.units import format_bytes, format_change, format_seconds

_ROWS_SHOWN = 200
_TOTALLED = (KEPT, "in use", "came back")
"""The sum of the others means nothing: peaks come at different times, and engines share what is free."""
_CHANGES = (KEPT, PEAK)


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


def cells_line(name: str, cells: Mapping[int, CellRecord], *, still_busy: Sequence[int] = ()) -> Report:
    """Return the one line on a cell that engines ran in the experiment ``name``."""
    records = [
        EngineRecord(number, record=ExperimentRecord("", 0.0, 0.0, (cell,), cell.usages, {}, {}, (), (), (), ()))
        for number, cell in cells.items()
    ]
    figures = merged_figures((record.engine, values_of(record)) for record in records)
    by_key = {(figure.name, figure.device): figure for figure in figures}
    parts = [f"experiment {clean_name(name)}"]
    if cells:
        slowest = by_key[TIME, ""].spread
        parts.append(f"a cell on {engine_numbers(list(cells))}")
        parts.append(f"{format_seconds(slowest.highest)}{_owner(slowest)}")
    failed = [number for number, cell in cells.items() if cell.error is not None]
    if failed:
        errors = dict.fromkeys(cells[number].error or "" for number in failed)
        parts.append(f"{engine_numbers(failed)}: {', '.join(map(clean_name, errors))}")
    for device in dict.fromkeys(figure.device for figure in figures if figure.device):
        peak, kept = by_key[PEAK, device], by_key[KEPT, device]
        if peak.spread.highest or kept.total or device == "cpu":
            mark = " (sampled)" if peak.is_sampled else ""
            parts.append(
                f"{device_label(device)} {format_change(int(kept.total))} in all, peak "
                f"{format_change(int(peak.spread.highest))}{mark}{_owner(peak.spread)}"
            )
    if still_busy:
        parts.append(f"{engine_numbers(still_busy)} not done yet")
    return Report("engines", SEPARATOR.join(parts))


def _owner(spread: Spread) -> str:
    return f" ({spread.highest_name})" if spread.highest > spread.lowest else ""


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
        Listing(f"engine {number} ({clean_name(host)})", _lines(text), code=True, folded=True)
        for number, (host, text, _) in list(looks.items())[:_ROWS_SHOWN]
    )
    tables = (figures_table(figures),) if figures else ()
    return Report("engines", headline, lines, tables, (), listings, is_trouble=bool(failed))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(map(clean, _cut(text.splitlines())))


def _cut(lines: Sequence[str]) -> Iterable[str]:
    return [*lines[:_ROWS_SHOWN], *([f"and {len(lines) - _ROWS_SHOWN} more lines"] * (len(lines) > _ROWS_SHOWN))]
