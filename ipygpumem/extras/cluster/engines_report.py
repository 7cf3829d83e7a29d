"""Reports on the engines of a cluster: one merged record, a table of figures, and a
row per engine.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ipygpumem.records import OUTSIDE, EngineRecord, ExperimentRecord, Usage
from ipygpumem.report.content import has_moved, times
from ipygpumem.report.layout import (
    Fact,
    Listing,
    Report,
    Table,
    clean,
    clean_name,
    count,
    device_label,
    in_use,
)
from ipygpumem.units import format_bytes, format_change, format_seconds

TIME, PEAK, KEPT, FREE = "time", "peak", "kept", "free"
NAMES = ("deleted", "restored", "kept")
_TOTALLED = (KEPT, "in use", "freed")
"""Figures whose sum is meaningful: peaks come at different times, and engines share the free
memory.
"""
Values = Mapping[tuple[str, str], float]
"""Figures of one engine by name and device kind: bytes, or seconds."""


def kind_of(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``: each engine numbers its own cards."""
    return device.partition(":")[0]


def is_told(usage: Usage) -> bool:
    """Return False for unused devices, and for child processes that stay as they are: each engine
    has a nanny.
    """
    return has_moved(usage) if usage.device in OUTSIDE else in_use(usage)


def values_of(engine: EngineRecord) -> Values:
    """Return an engine's figures of an experiment: time in its cells, peak, kept and
    free memory.
    """
    record = engine.record
    if record is None:
        return {}
    found: dict[tuple[str, str], float] = {(TIME, ""): record.duration_seconds}
    for usage in filter(is_told, record.usages):
        kind = kind_of(usage.device)
        found[PEAK, kind] = max(found.get((PEAK, kind), 0), usage.peak_delta_bytes)
        found[KEPT, kind] = found.get((KEPT, kind), 0) + usage.delta_bytes
    for device, free in engine.free.items():
        found[FREE, kind_of(device)] = min(free, found.get((FREE, kind_of(device)), free))
    return found


def merged_record(
    name: str, started_at: float, span_seconds: float, engines: Sequence[EngineRecord]
) -> ExperimentRecord:
    """Return the record of the experiment on all engines: sums, names, and notes on outliers."""
    records = [engine.record for engine in engines if engine.record is not None]
    deleted, restored, kept = (
        tuple(dict.fromkeys(name for record in records for name in getattr(record, what)))
        for what in NAMES
    )
    hosts = {engine.engine: engine.host for engine in engines}
    said = [
        (engine.engine, [engine.error, *(engine.record.notes if engine.record else ())])
        for engine in engines
    ]
    notes = [(number, text) for number, texts in said for text in texts if text]
    return ExperimentRecord(
        name,
        started_at,
        max((record.duration_seconds for record in records), default=span_seconds),
        (),
        _usages(records),
        _sums(record.consumed for record in records),
        _sums(record.freed for record in records),
        deleted,
        restored,
        kept,
        (),
        notes=tuple(alike(notes, hosts)),
        parameters=next((record.parameters for record in records), {}),
        ooms=sum(record.ooms for record in records),
        engines=tuple(engines),
        span_seconds=span_seconds,
    )


def _sums(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for own in sizes:
        for device, size in own.items():
            found[kind_of(device)] += size
    return dict(found)


def _usages(records: Iterable[ExperimentRecord]) -> tuple[Usage, ...]:
    """Return sums by device kind; those of peaks are upper bounds, because engines may peak at
    different times.
    """
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


def engine_numbers(numbers: Sequence[int]) -> str:
    """Return ``engines 0-2, 5``."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    parts = [[number for _, number in run] for _, run in runs]
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"engine{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def alike(texts: Iterable[tuple[int, str]], hosts: Mapping[int, str] = {}) -> list[str]:
    """Return each text once, prefixed with its engines; a single engine has its host's name."""
    having: dict[str, list[int]] = defaultdict(list)
    for number, text in texts:
        having[text].append(number)
    where = {number: f" ({host})" for number, host in hosts.items() if host}
    return [
        f"{engine_numbers(own)}{where.get(own[0], '') if len(own) == 1 else ''}: {clean(text)}"
        for text, own in having.items()
    ]


def engines_report(record: ExperimentRecord) -> Report:
    """Return the report of an experiment on a cluster."""
    failed = [engine for engine in record.engines if engine.error]
    used = {usage.device for usage in record.usages if is_told(usage)}
    segments = [
        f"experiment {clean_name(record.name)}",
        f"on {count(len(record.engines), 'engine')}",
        *times(record.duration_seconds, record.span_seconds),
        *([f"{len(failed)} failed"] if failed else []),
        *(
            f"{device_label(device)} consumed {format_change(size)}, freed "
            f"{format_bytes(record.freed.get(device, 0))}"
            for device, size in record.consumed.items()
            if device in used
        ),
    ]
    own = {engine.engine: values_of(engine) for engine in record.engines}
    sampled = {(PEAK, usage.device) for usage in record.usages if usage.method == "sampled"}
    names = {what: tuple(map(clean_name, getattr(record, what))) for what in NAMES}
    facts = [Fact(what, found, code=True) for what, found in names.items()]
    tables = [_figures_table(own, sampled), _engines_table(record.engines, own)]
    notes = tuple(map(clean, record.notes))
    return Report(
        "engines", segments, notes, tables, facts, is_trouble=bool(failed), records=[record]
    )


def _figures_table(
    engines: Mapping[int, Values], sampled: Collection[tuple[str, str]] = ()
) -> Table:
    """Return a row for each figure over the engines that have it, by device."""
    by_key: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for engine, values in engines.items():
        for key, value in values.items():
            by_key[key].append((value, engine))
    rows: list[dict[str, str]] = []
    for (name, device), found in sorted(
        by_key.items(), key=lambda item: {"": 0, "cpu": 1}.get(item[0][1], 2)
    ):
        sizes = [value for value, _ in found]
        lowest, highest = min(sizes), max(sizes)
        rows.append(
            {
                "device": device_label(device),
                "figure": name + " (sampled)" * ((name, device) in sampled),
                "of": str(len(found)),
                "in all": _size(name, sum(sizes)) if name in _TOTALLED else "",
                "lowest": _size(name, lowest),
                "median": _size(name, statistics.median_low(sizes)),
                "highest": _size(name, highest),
                "whose": "" if lowest == highest else f"engine {found[sizes.index(highest)][1]}",
            }
        )
    return Table.of(rows, {"of", "in all", "lowest", "median", "highest"})


def _size(name: str, value: float) -> str:
    if name == TIME:
        return format_seconds(value)
    return format_change(int(value)) if name in (KEPT, PEAK) else format_bytes(int(value))


def _engines_table(engines: Sequence[EngineRecord], figures: Mapping[int, Values]) -> Table:
    """Return a row for each engine; devices that no engine used have no column."""
    devices = dict.fromkeys(
        device for values in figures.values() for name, device in values if name == PEAK
    )
    keys = [(TIME, ""), *((name, device) for device in devices for name in (PEAK, KEPT))]
    heads = {f"{name} {device_label(device)}".strip(): (name, device) for name, device in keys}
    rows = [
        {
            "engine": str(engine.engine),
            "host": clean_name(engine.host),
            "process": str(engine.pid or ""),
            "card": clean_name(", ".join(engine.cards.values())),
            **{
                head: _size(key[0], values[key]) if key in values else ""
                for head, key in heads.items()
            },
            "error": clean_name(engine.error),
        }
        for engine, values in ((engine, figures[engine.engine]) for engine in engines)
    ]
    return Table.of(rows, {"engine", "process", *heads}, "each engine", folded=True)


def outputs_report(
    command: str, outputs: Mapping[int, tuple[str, str, Values]], failed: Mapping[int, str]
) -> Report:
    """Return a command's output on each engine (host, text and figures), and the errors of the
    failed ones.
    """
    headline = f"{clean(command)} on {count(len(outputs), 'engine')}"
    figures = _figures_table({number: values for number, (_, _, values) in outputs.items()})
    listings = [
        Listing(
            f"engine {number} ({clean_name(host)})",
            tuple(map(clean, text.splitlines())),
            code=True,
            folded=True,
        )
        for number, (host, text, _) in outputs.items()
    ]
    return Report(
        "engines", headline, alike(failed.items()), [figures], (), listings, is_trouble=bool(failed)
    )
