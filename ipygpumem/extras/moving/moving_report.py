"""The reports of ``release`` and ``purge``."""

from __future__ import annotations

from dataclasses import replace

from ipygpumem.extras.moving.moving import PurgeRecord
from ipygpumem.extras.moving.releasing import ReleaseRecord
from ipygpumem.report import content, layout
from ipygpumem.report.layout import Report, Table, clean, clean_name, device_label
from ipygpumem.units import format_bytes


def release_report(record: ReleaseRecord) -> Report:
    """Return the memory freed with an object, and the memory that other objects still hold."""
    names = layout.listed([clean_name(name) for name in record.names])
    notes = [*map(clean, record.notes), *(f"left: {line}" for line in content.leak_lines(record.left))]
    report = content.freed_report(f"released {names}", record.steps, record.freed, notes)
    tables = [content.held_table("freed tensors and arrays", record.freed_parts)] * bool(record.freed_parts)
    return replace(report, kind="release", tables=tables)


def purge_report(record: PurgeRecord) -> Report:
    """Return the report of a purge: the decrease of each allocator's reserved memory."""
    moved = f"{format_bytes(record.moved_bytes)} moved off" if record.moved_bytes else "nothing was moved"
    end = ", and still on the host" if record.is_on_host else " and back" if record.moved_bytes else ""
    rows = [
        {
            "device": device_label(device),
            "reserved before": format_bytes(size),
            "after": format_bytes(record.after[device]),
        }
        for device, size in record.before.items()
        if device in record.after
    ]
    tables = [Table.of(rows, {"reserved before", "after"})] * bool(rows)
    lines = list(map(clean, record.notes))
    return Report("purge", f"purge: {moved}{end}", lines, tables, is_trouble=record.is_on_host)
