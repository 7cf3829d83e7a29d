"""The report of ``%%peak``."""

from __future__ import annotations

from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow
from ipygpumem.report.estimate import share_rows
from ipygpumem.report.layout import Report, Table, clean, clean_name, count, device_label
from ipygpumem.units import format_bytes, format_seconds

_ROWS_SHOWN = 20


def peak_report(record: PeakRecord, *, top: int = _ROWS_SHOWN) -> Report:
    """Return the report: for each device the memory at the moment, by role, and by name or origin."""
    segments = ["peak", *map(_headline, record.devices), f"in {format_seconds(record.duration_seconds)}"]
    tables = [table for device in record.devices for table in _tables(device, top, several=len(record.devices) > 1)]
    return Report("peak", segments, tuple(map(clean, record.notes)), tables)


def _headline(device: DevicePeak) -> str:
    what = "out of memory with" if device.ran_out else "highest with"
    when = "" if device.at_seconds is None else f" after {format_seconds(device.at_seconds)}"
    return f"{device_label(device.device)} {what} {format_bytes(device.size_bytes)}{when}"


def _tables(device: DevicePeak, top: int, *, several: bool) -> list[Table]:
    title = device_label(device.device) if several else ""
    parts = [
        *share_rows(device.parts, device.size_bytes),
        {"size": format_bytes(device.size_bytes), "at the peak": "all"},
    ]
    rows = [_row(row) for row in device.rows[:top]]
    rest = device.rows[top:]
    if rest:
        size = sum(row.size_bytes for row in rest)
        rows.append({"size": format_bytes(size), "name or module": count(len(rest), "smaller row")})
    what = Table.of(rows, {"size", "blocks"}, code={"name or module", "line"})
    what = Table.of(rows, {"size", "blocks"}, code={"name or module", "line"})
    return [Table.of(parts, {"size", "share"}, title), what]


def _row(row: PeakRow) -> dict[str, str]:
    return {
        "size": format_bytes(row.size_bytes),
        "blocks": str(row.count) if row.count > 1 else "",
        "role": row.role,
        "name or module": clean_name(row.name or row.module),
        "operation": clean(row.operation),
        "line": clean_name(row.line),
    }
