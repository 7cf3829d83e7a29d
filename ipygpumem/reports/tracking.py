"""Reports a call of a tracker: what came, what went, and what there is beside the allocator's figures."""

from __future__ import annotations

from collections.abc import Iterator

from ipygpumem.model import Usage
from ipygpumem.objects.inventory.records import TrackerRecord
from ipygpumem.reports.layout import SEPARATOR, Report, clean, device_label, in_use, sampled_mark
from ipygpumem.reports.tensors import changed_tables
from ipygpumem.units import format_bytes, format_change


def tracker_report(record: TrackerRecord, *, top: int) -> Report:
    """Return the ``top`` largest tensors that came, as many that went, and each device's totals."""
    by = [f"{device_label(device)} {format_change(size)}" for device, size in record.changed_bytes.items()]
    headline = SEPARATOR.join(
        filter(None, [f"tracker {record.number}", record.after, *(by or ["nothing came or went"])])
    )
    lines = [clean(line) for line in (*_totals(record), *record.notes)]
    return Report("tracker", clean(headline), tuple(lines), changed_tables(record, top=top))


def _totals(record: TrackerRecord) -> Iterator[str]:
    since = "since the tracker was made" if record.number == 1 else "since the last call"
    left = dict(record.tensor_bytes)
    for usage in record.usages:
        own = left.pop(usage.device, None)
        own = left.pop(f"{usage.device}:0", 0) if own is None else own  # where there is only one: mps
        if in_use(usage) or own:
            tensors = f"{device_label(usage.device)}: {format_bytes(own)} in tensors"
            yield f"{tensors}{_beside(usage, own)}, peak {format_bytes(usage.peak_bytes)}{sampled_mark(usage)} {since}"
    for device, size in left.items():
        if size:
            yield f"{device_label(device)}: {format_bytes(size)} in tensors"


def _beside(usage: Usage, own: int) -> str:
    if usage.device == "cpu":
        return f" and arrays; RSS {format_bytes(usage.after_bytes)}"
    rest = usage.after_bytes - own
    reserved = "" if usage.reserved_bytes is None else f", reserved {format_bytes(usage.reserved_bytes)}"
    more = f"{format_bytes(rest)} of it in no Python tensor, or rounding"
    if rest < 0:
        more = f"{format_bytes(-rest)} less: some are memory that torch does not count here"
    return f"; torch has allocated {format_bytes(usage.after_bytes)}{f' ({more})' if rest else ''}{reserved}"
