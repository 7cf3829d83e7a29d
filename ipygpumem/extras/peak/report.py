"""The report of ``%%peak``."""

from __future__ import annotations

from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow
from ipygpumem.report.estimate import share_rows
from ipygpumem.report.layout import Report, Table, clean, clean_name, count, device_label
from ipygpumem.units import format_bytes, format_seconds

_ROWS_SHOWN = 20
_PARTS_OF_RAM = {"storages": " of tensors", "memray": " outside torch"}


def peak_report(record: PeakRecord, *, top: int = _ROWS_SHOWN) -> Report:
    """Return the report: for each device the memory at the moment, by role, and by name or origin."""
    segments = ["peak", *map(headline, record.devices), f"in {format_seconds(record.duration_seconds)}"]
    tables = [table for device in record.devices for table in _tables(device, top)]
    return Report("peak", segments, tuple(map(clean, record.notes)), tables, records=[record])


def title(device: DevicePeak) -> str:
    """Return a device's name; RAM has two parts."""
    return device_label(device.device) + _PARTS_OF_RAM.get(device.source, "") * (device.device == "cpu")


def headline(device: DevicePeak) -> str:
    """Return a device's bytes at the moment, and when that was."""
    what = "out of memory with" if device.ran_out else "highest with"
    when = "" if device.at_seconds is None else f" after {format_seconds(device.at_seconds)}"
    return f"{title(device)} {what} {format_bytes(device.size_bytes)}{when}"


def _tables(device: DevicePeak, top: int) -> list[Table]:
    parts = share_rows(device.parts, device.size_bytes)
    rows = [_row(row) for row in device.rows[:top]]
    if rest := device.rows[top:]:
        size = format_bytes(sum(row.size_bytes for row in rest))
        rows.append({"size": size, "name or module": count(len(rest), "smaller row")})
    what = Table.of(rows, {"size", "blocks"}, title(device) * (len(parts) < 2), code={"name or module", "line"})
    return [Table.of(parts, {"size", "share"}, title(device)), what] if len(parts) > 1 else [what]


def _row(row: PeakRow) -> dict[str, str]:
    return {
        "size": format_bytes(row.size_bytes),
        "blocks": str(row.count) if row.count > 1 else "",
        "role": row.role,
        "name or module": clean_name(row.name or row.module),
        "operation": clean(row.operation),
        "line": clean_name(row.line),
    }
