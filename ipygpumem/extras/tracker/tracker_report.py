"""The record of a tracker's call, and its report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ipygpumem.inventory.records import InventoryDiff
from ipygpumem.records import Usage
from ipygpumem.report import layout
from ipygpumem.report.inventory import changed_tables
from ipygpumem.report.layout import Report, clean, device_label, sizes
from ipygpumem.units import format_bytes, format_change


@dataclass(frozen=True, repr=False)
class TrackerRecord(InventoryDiff):
    """Changes between two calls of a tracker, and the state at the second; in the first call everything is new."""

    number: int
    """Number of the call, counted from 1."""
    taken_at: float
    """Unix time."""
    file: str | None
    """The calling code's file; None for a notebook cell, and without a Python caller."""
    line: int | None
    """Line in the file, or in the cell."""
    cell: int | None
    """Execution count of the cell with the calling code."""
    function: str
    """The calling function, such as ``Net.forward``; empty at the top level."""
    tensor_bytes: dict[str, int]
    """Bytes of all tensors and arrays on each device, each storage once."""
    usages: tuple[Usage, ...]
    """Usage of each device since the last call."""
    notes: tuple[str, ...] = ()
    """Messages for the user about tensors that could not be read."""


def tracker_report(record: TrackerRecord, *, top: int) -> Report:
    """Return the ``top`` largest tensors that were added, as many that were removed, and each device's totals."""
    changes = sizes(record.changed_bytes, format_change) or ["no change"]
    headline = layout.SEPARATOR.join(filter(None, [f"tracker {record.number}", record.after, *changes]))
    return Report(
        "tracker", clean(headline), list(map(clean, (*_totals(record), *record.notes))), changed_tables(record, top)
    )


def _totals(record: TrackerRecord) -> Iterator[str]:
    since = "since the tracker was made" if record.number == 1 else "since the last call"
    left = dict(record.tensor_bytes)
    for usage in record.usages:
        own = left.pop(usage.device, None)
        own = left.pop(f"{usage.device}:0", 0) if own is None else own  # a single device: mps
        if layout.in_use(usage) or own:
            peak = f"peak {format_bytes(usage.peak_bytes)}{layout.sampled_mark(usage)} {since}"
            yield f"{device_label(usage.device)}: {format_bytes(own)} in tensors{_beside(usage, own)}, {peak}"
    yield from (f"{device_label(device)}: {format_bytes(size)} in tensors" for device, size in left.items() if size)


def _beside(usage: Usage, own: int) -> str:
    if usage.device == "cpu":
        return f" and arrays; RSS {format_bytes(usage.after_bytes)}"
    rest = usage.after_bytes - own
    reserved = "" if usage.reserved_bytes is None else f", reserved {format_bytes(usage.reserved_bytes)}"
    more = f"{format_bytes(rest)} of it in no Python tensor, or rounding"
    if rest < 0:
        more = f"{format_bytes(-rest)} less: some are memory that torch does not count here"
    return f"; torch has allocated {format_bytes(usage.after_bytes)}{f' ({more})' if rest else ''}{reserved}"
