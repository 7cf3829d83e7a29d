"""The lines of cells and traces: time, error, and each device's change, peak and use.

``cell 5 · 1.2 s · RAM +64 MiB, peak +128 MiB, 5.1 of 16 GiB``
"""

from __future__ import annotations

from collections.abc import Iterable

from ipygpumem.records import OUTSIDE, CellRecord, TraceRecord, Usage
from ipygpumem.report.devices import device_label, is_worth_reporting, peak_label
from ipygpumem.report.layout import LineSegment, Report
from ipygpumem.report.scales import Scales
from ipygpumem.report.words import clean, clean_name
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds, format_share


def cell_report(record: CellRecord, scales: Scales | None = None) -> Report:
    """Return the one-line report of a cell.

    Args:
        record: the cell's record.
        scales: the lengths of the bars; None outside of a session.
    """
    number = record.execution_count
    segments = _span_segments(record, scales or Scales())
    if number is None:
        return Report("cell", ["cell", *segments])
    has_bars = any(isinstance(segment, LineSegment) for segment in segments)
    has_nothing_to_say = record.error is None and not has_bars
    if has_nothing_to_say and record.duration_seconds < 1:
        segments.pop(0)  # the time
    return Report("cell", [f"cell {number}", *segments])


def trace_report(record: TraceRecord, note: str = "") -> Report:
    """Return the one-line report of a trace.

    Args:
        record: the trace's record.
        note: a text to show after its name; may be empty.
    """
    title = "trace"
    if record.label:
        title = f"trace {clean_name(record.label)}"
    head: list[LineSegment | str] = [title]
    if note:
        head.append(clean(note))
    head += trace_segments(record)
    return Report("trace", head, records=[record])


def trace_segments(record: TraceRecord) -> list[LineSegment | str]:
    """Return a trace's headline after its name: its time, its error, each device in use."""
    segments = _span_segments(record)
    if not record.usages:
        segments.append("memory was not measured")
    return segments


def _span_segments(
    record: CellRecord | TraceRecord, scales: Scales | None = None
) -> list[LineSegment | str]:
    """Return the parts of a headline: time, error, a child process's peak, and each device in use.
    Only a device whose memory has changed has a peak and a bar.

    Args:
        record: the cell or trace.
        scales: the lengths of the bars; None for a headline without bars.
    """
    segments: list[LineSegment | str] = [format_seconds(record.duration_seconds)]
    if record.error is not None:
        segments.append(clean_name(record.error))
    if isinstance(record, CellRecord) and record.child_peak_bytes is not None:
        segments.append(f"child process peak +{format_bytes(record.child_peak_bytes)}")
    for usage in worth_reporting(record.usages):
        if not has_changed(usage):
            in_use = _of_total(usage) or format_bytes(usage.after_bytes)
            segments.append(f"{usage_label(usage)} {in_use}")
            continue
        bar = None if scales is None else scales.bar(usage)
        segments.append(LineSegment(_usage_part(usage), bar))
    return segments


def worth_reporting(usages: Iterable[Usage]) -> list[Usage]:
    """Return the usages of the devices that are worth reporting (``is_worth_reporting``)."""
    return list(filter(is_worth_reporting, usages))


def begins_with_our_command(record: CellRecord) -> bool:
    """Return True if a cell's first line is one of our commands, which show their own reports."""
    return record.source_line.startswith(
        ("%gpumem", "%experiment", "%%estimate", "%%gpumemit", "%config IPyGpuMem")
    )


def is_quiet(record: CellRecord) -> bool:
    """Return True if a cell has nothing to report: no device has changed, nothing has failed, and
    neither child processes nor shared memory are in use.
    """
    if record.error is not None or record.recovery is not None:
        return False
    for usage in record.usages:
        if has_changed(usage):
            return False
        if usage.device in OUTSIDE and usage.after_bytes:
            return False
    return True


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return the change, peak and use of each device that is worth reporting, in words."""
    return list(map(_usage_part, worth_reporting(usages)))


def has_changed(usage: Usage) -> bool:
    """Return True if at least a MiB was kept, freed or needed for a while; less is usually not
    caused by the cell.
    """
    return max(abs(usage.delta_bytes), usage.peak_delta_bytes) >= MIB


def _usage_part(usage: Usage) -> str:
    """Return a device's change, peak and use in words, such as
    ``RAM +64 MiB, peak +128 MiB, 5.1 of 16 GiB``.
    """
    parts = [f"{usage_label(usage)} {format_change(usage.delta_bytes)}"]
    if usage.device not in OUTSIDE:
        parts.append(f"peak {peak_label(usage)}")
    parts.append(_of_total(usage) or f"{format_bytes(usage.after_bytes)} now")
    return ", ".join(parts)


def usage_label(usage: Usage) -> str:
    """Return the name of a device. That of child processes says so if they are measured by RSS, in
    which shared pages count several times.
    """
    label = device_label(usage.device)
    if usage.device == "children" and usage.note:
        label += " by RSS"
    return label


def _of_total(usage: Usage) -> str:
    """Return the memory in use and the total, such as ``5.1 of 16 GiB``; empty if the report shows
    no total.
    """
    total = usage.total_bytes
    if total is None:
        return ""
    if usage.used_bytes is not None:
        return format_share(usage.used_bytes, total)
    if usage.device == "shm":  # the mount's limit
        return f"{format_bytes(usage.after_bytes)} of {format_bytes(total)}"
    return ""
