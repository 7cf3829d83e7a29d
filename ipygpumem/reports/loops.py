"""Reports a tracked loop: one row for each iteration, and what grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipygpumem.measuring.growth import Growth
from ipygpumem.model import TraceRecord, devices_of, usage_on
from ipygpumem.objects.inventory import records
from ipygpumem.objects.inventory.records import Inventory, TensorRecord
from ipygpumem.reports.content import trace_segments
from ipygpumem.reports.history import growth_size
from ipygpumem.reports.layout import Report, Segment, Table, clean, clean_name, count, device_label, in_use, peak_label
from ipygpumem.units import format_bytes, format_change, format_seconds

_HOLDERS_SHOWN = 3
_LEAST_SHARE = 0.1
"""A name is said to hold what grows from this share of it on."""


def loop_report(rows: Sequence[TraceRecord], total: int | None, remarks: Sequence[str]) -> Report:
    """Return the table of a loop so far.

    Args:
        rows: the first iteration, and the last ones.
        total: how many there will be, where that is known.
        remarks: what to say below.
    """
    first, last = rows[0], rows[-1]
    number = f"{last.iteration}" if total is None else f"{last.iteration} of {total}"
    seconds = last.started_at + last.duration_seconds - first.started_at
    segments = (Segment(f"{clean_name(last.label)} {number}"), Segment(format_seconds(seconds)))
    devices = devices_of(usage for record in rows for usage in record.usages if in_use(usage))
    hidden = (last.iteration or 0) - len(rows)
    title = f"{count(hidden, 'row')} after the first not shown" if hidden else ""
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak", "growth")]
    columns = (clean_name(last.label), "time", *figures)
    table = Table(title, columns, tuple(_row(record, first, devices) for record in rows), frozenset(columns))
    return Report.of("track", segments, remarks, [table])


def _row(record: TraceRecord, first: TraceRecord, devices: Sequence[str]) -> tuple[str, ...]:
    cells = [str(record.iteration), format_seconds(record.duration_seconds)]
    for device in devices:
        usage, start = usage_on(record.usages, device), usage_on(first.usages, device)
        if usage is None:
            cells += ["", "", ""]
            continue
        grown = "" if record is first else format_change(usage.after_bytes - (start.after_bytes if start else 0))
        cells += [format_change(usage.delta_bytes), peak_label(usage), grown]
    return tuple(cells)


def iteration_report(record: TraceRecord) -> Report:
    """Return one line for one iteration, where no table can be updated."""
    return Report.of("track", [Segment(f"{clean_name(record.label)} {record.iteration}"), *trace_segments(record)])


def loop_growth_line(growth: Growth) -> str:
    """Return what is said of a loop that has grown with every iteration."""
    device = device_label(growth.device)
    return f"{device} has grown by {growth_size(growth)} in each of the last {growth.runs} iterations"


def holder_lines(before: Inventory, after: Inventory, iteration: int, growths: Sequence[Growth]) -> list[str]:
    """Return which names hold more tensors and arrays after one more iteration, on the devices that grow.

    By names, not by tensors: a name that the loop gives to another tensor each time holds no more than before.
    """
    least = {growth.device: growth.least_bytes * _LEAST_SHARE for growth in growths}
    old, new = _by_name(before), _by_name(after)
    more = {key: _size(tensors) - _size(old.get(key, ())) for key, tensors in new.items() if key[0] in least}
    held = sorted((key for key, size in more.items() if size >= least[key[0]]), key=lambda key: -more[key])
    if not held:
        return [f"no tensor or array that came and stayed in iteration {iteration} accounts for it"]
    lines = []
    for key in held[:_HOLDERS_SHOWN]:
        known = {tensor.name for tensor in old.get(key, ())}
        came = [tensor.name for tensor in new[key] if tensor.name not in known]
        lines.append(f"iteration {iteration} left {format_bytes(more[key])} more on {_place(*key, came)}")
    return lines


def _by_name(inventory: Inventory) -> dict[tuple[str, str], list[TensorRecord]]:
    """Return the tensors of each device by the first part of their names."""
    found: dict[tuple[str, str], list[TensorRecord]] = {}
    for tensor in inventory.tensors:
        found.setdefault((tensor.device, "" if tensor.name is None else records.first_part(tensor.name)), []).append(
            tensor
        )
    return found


def _size(tensors: Iterable[TensorRecord]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


def _place(device: str, name: str, came: Sequence[str | None]) -> str:
    if not name:
        return f"{device_label(device)}, to which no name of yours leads"
    example = f" ({clean(came[0])})" if came and came[0] not in (None, name) else ""
    return f"{device_label(device)}, held by {clean(name)}{example}"
