"""Reports what was given back by hand: by a release, or by a purge."""

from __future__ import annotations

from dataclasses import replace

from ipygpumem.freeing.records import PurgeRecord, ReleaseRecord, Room
from ipygpumem.reports.content import freed_report, held_table, leak_lines
from ipygpumem.reports.html import Shown
from ipygpumem.reports.layout import Report, Table, clean, clean_name, count, device_label, listed
from ipygpumem.units import format_bytes

_UNKNOWN = "unknown"


def release_report(record: ReleaseRecord) -> Report:
    """Return what went with an object, and what something else holds still."""
    names = listed([clean_name(name) for name in record.names])
    notes = [*map(clean, record.notes)]
    if record.workers:
        notes.append(f"{count(record.workers, 'worker')} ended")
    notes += [f"left: {line}" for line in leak_lines(record.left)]
    report = freed_report(f"released {names}", record.steps, record.reclaimed, notes)
    table = held_table("tensors and arrays that are gone", record.freed)
    return replace(report, kind="release", tables=(table.without_empty(),) * bool(record.freed))


def purge_report(record: PurgeRecord) -> Report:
    """Return what a purge gained on each device."""
    parts = [f"purge: {format_bytes(record.moved_bytes)} moved off and back"]
    if record.is_on_host:
        parts = [f"purge: {format_bytes(record.moved_bytes)} moved off, and still on the host"]
    elif not record.moved_bytes:
        parts = ["purge: nothing was moved"]
    if record.dropped_bytes:
        parts.append(f"{format_bytes(record.dropped_bytes)} of optimizer state dropped")
    rows = tuple(
        (device_label(before.device), _largest(before), _largest(after), *map(_reserved, (before, after)))
        for before, after in zip(record.before, record.after, strict=True)
    )
    columns = ("device", "largest free block before", "after", "reserved before", "reserved after")
    table = Table("", columns, rows, frozenset(columns[1:]))
    lines = tuple(map(clean, record.notes))
    return Report("purge", ", ".join(parts), lines, (table,) * bool(rows), is_trouble=record.is_on_host)


def _largest(room: Room) -> str:
    return _UNKNOWN if room.largest_bytes is None else format_bytes(room.largest_bytes)


def _reserved(room: Room) -> str:
    return format_bytes(room.reserved_bytes)


class ShownRelease(Shown, ReleaseRecord):
    """What a release freed, which shows itself."""

    _report = release_report


class ShownPurge(Shown, PurgeRecord):
    """What a purge gained, which shows itself."""

    _report = purge_report
