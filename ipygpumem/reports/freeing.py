"""Reports what was given back by hand: by a release, or by a purge."""

from __future__ import annotations

from dataclasses import replace

from ipygpumem.freeing.moving import PurgeRecord, Room
from ipygpumem.freeing.release import ReleaseRecord
from ipygpumem.reports.content import freed_report, held_table, leak_lines
from ipygpumem.reports.html import Shown
from ipygpumem.reports.layout import Report, Table, clean, clean_name, device_label, listed
from ipygpumem.units import format_bytes


def release_report(record: ReleaseRecord) -> Report:
    """Return what went with an object, and what something else holds still."""
    names = listed([clean_name(name) for name in record.names])
    notes = [f"left: {line}" for line in leak_lines(record.left)]
    report = freed_report(f"released {names}", record.steps, record.reclaimed, notes)
    table = held_table("tensors and arrays that are gone", record.freed)
    return replace(report, kind="release", tables=(table.without_empty(),) * bool(record.freed))


def purge_report(record: PurgeRecord) -> Report:
    """Return what a purge gained on each device."""
    moved = f"{format_bytes(record.moved_bytes)} moved off" if record.moved_bytes else "nothing was moved"
    end = ", and still on the host" if record.is_on_host else " and back" if record.moved_bytes else ""

    def size(room: Room) -> str:
        return "unknown" if room.largest_bytes is None else format_bytes(room.largest_bytes)

    rows = tuple(
        (
            *(device_label(before.device), size(before), size(after)),
            *(format_bytes(before.reserved_bytes), format_bytes(after.reserved_bytes)),
        )
        for before, after in zip(record.before, record.after, strict=True)
    )
    columns = ("device", "largest free block before", "after", "reserved before", "reserved after")
    table = Table("", columns, rows, frozenset(columns[1:]))
    lines = tuple(map(clean, record.notes))
    return Report("purge", f"purge: {moved}{end}", lines, (table,) * bool(rows), is_trouble=record.is_on_host)


class ShownRelease(Shown, ReleaseRecord):
    """What a release freed, which shows itself."""

    _report = release_report


class ShownPurge(Shown, PurgeRecord):
    """What a purge gained, which shows itself."""

    _report = purge_report
