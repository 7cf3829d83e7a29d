"""Merges the traces of several processes: lowest, median and highest of each figure, and who stands out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipygpumem.merging.records import Member, Merged, Row, Spread
from ipygpumem.model import TraceRecord
from ipygpumem.units import MIB, format_bytes, format_seconds

_HIGH, _LEAST_BYTES = 1.25, 64 * MIB
"""A peak stands out if it is that many times the median, and so many bytes above it."""
_SLOW, _LEAST_SECONDS = 1.5, 1.0
"""So does a time."""
_MOST_NOTES = 20


class _Figures(NamedTuple):
    """What one member has under one label on one kind of device."""

    peak: int
    kept: int
    seconds: float
    is_sampled: bool


def merge(members: Sequence[Member]) -> Merged:
    """Return what the members have measured, in rows: a label, and a kind of device. Clocks are not compared."""
    labels = dict.fromkeys(trace.label for member in members for trace in member.traces)
    rows, notes = list[Row](), list[str]()
    by_member = [(member, _by_label(member.traces)) for member in members]
    for label in labels:
        own = [(member, traces.get(label, [])) for member, traces in by_member]
        lacking = [member for member, traces in own if not traces]
        if lacking:
            has = "has" if len(lacking) == 1 else "have"
            notes.append(f"{_names(lacking)} {has} no trace {label or 'without a label'}")
        failed = [(member, trace.error) for member, traces in own for trace in traces if trace.error]
        notes += [f"{_place(member)}: {label} failed with {error}" for member, error in failed]
        kinds = dict.fromkeys(kind_of(usage.device) for _, traces in own for trace in traces for usage in trace.usages)
        for kind in kinds:
            figures = [(member, _figures(traces, kind)) for member, traces in own if traces]
            rows.append(_row(label, kind, figures))
            notes += _standing_out(rows[-1], figures, with_time=kind == next(iter(kinds)))
    rest = len(notes) - _MOST_NOTES
    more = [f"and {rest:,} more that stand out"] if rest > 0 else []
    return Merged(tuple(members), tuple(rows), (*notes[:_MOST_NOTES], *more))


def _by_label(traces: Iterable[TraceRecord]) -> Mapping[str, list[TraceRecord]]:
    found: dict[str, list[TraceRecord]] = {}
    for trace in traces:
        found.setdefault(trace.label, []).append(trace)
    return found


def kind_of(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``: which card it is, each process counts by itself."""
    return device.partition(":")[0]


def _figures(traces: Sequence[TraceRecord], kind: str) -> _Figures:
    usages = [usage for trace in traces for usage in trace.usages if kind_of(usage.device) == kind]
    return _Figures(
        max((usage.peak_delta_bytes for usage in usages), default=0),
        sum(usage.delta_bytes for usage in usages),
        sum(trace.duration_seconds for trace in traces),
        any(usage.method == "sampled" for usage in usages),
    )


def _row(label: str, kind: str, figures: Sequence[tuple[Member, _Figures]]) -> Row:
    peak, kept, seconds = (
        spread_of([(getattr(own, what), member.name) for member, own in figures])
        for what in ("peak", "kept", "seconds")
    )
    return Row(label, kind, len(figures), peak, kept, seconds, any(own.is_sampled for _, own in figures))


def spread_of(values: Sequence[tuple[float, str]]) -> Spread:
    """Return the lowest, the median and the highest of values with their owners' names."""
    low, high = min(values, key=lambda item: item[0]), max(values, key=lambda item: item[0])
    return Spread(low[0], statistics.median_low([value for value, _ in values]), high[0], low[1], high[1])


def _standing_out(row: Row, figures: Sequence[tuple[Member, _Figures]], *, with_time: bool) -> Iterator[str]:
    for member, own in figures:
        if is_high(own.peak, row.peak.median):
            where = "RAM" if row.device == "cpu" else row.device
            sizes = f"{format_bytes(own.peak)} on {where}, the median is {format_bytes(int(row.peak.median))}"
            yield f"{_place(member)}: {row.label} rose by {sizes}"
        if with_time and is_slow(own.seconds, row.seconds.median):
            times = f"{format_seconds(own.seconds)}, the median is {format_seconds(row.seconds.median)}"
            yield f"{_place(member)}: {row.label} took {times}"


def is_high(peak: float, median: float) -> bool:
    """Whether a peak stands out among others."""
    return peak > max(_HIGH * median, median + _LEAST_BYTES)


def is_slow(seconds: float, median: float) -> bool:
    """Whether a time stands out among others."""
    return seconds > max(_SLOW * median, median + _LEAST_SECONDS)


def _place(member: Member) -> str:
    return f"{member.name} ({member.host}, process {member.pid})"


def _names(members: Sequence[Member]) -> str:
    names = ", ".join(member.name for member in members[:5])
    return f"{names} and {len(members) - 5} more" if len(members) > 5 else names
