"""Reports estimates and summaries of models."""

from __future__ import annotations

from ipygpumem.estimating.records import PERHAPS, DeviceEstimate, Estimate, ModelSummary, ModuleRow
from ipygpumem.report.layout import Fact, Report, Table, clean, device_label, shape_label
from ipygpumem.units import format_bytes, format_change, format_seconds

_GUESSES_SHOWN = 5
_CONTEXT = {"cpu": "other memory of this process"}


def estimate_report(estimate: Estimate) -> Report:
    """Return the report of the memory that code would take on each device, by purpose."""
    segments = ["estimate", *(_verdict(device, bool(estimate.upper_bounds)) for device in estimate.devices)]
    if not estimate.devices:
        segments.append("no tensor was made")
    segments.append(f"made in {format_seconds(estimate.duration_seconds)}, nothing ran on a device")
    several = len(estimate.devices) > 1
    tables = [
        _parts(device, device_label(device.device) if several else "")
        for device in estimate.devices
        if device.peak_bytes
    ]
    lines = {
        "lines that got guessed values": estimate.guesses,
        "at most, since these lines are assumed to select all that they can": estimate.upper_bounds,
    }
    facts = [Fact(what, tuple(map(clean, values)), most=_GUESSES_SHOWN) for what, values in lines.items() if values]
    return Report("estimate", segments, tuple(map(clean, estimate.notes)), tables, tuple(facts))


def _verdict(device: DeviceEstimate, is_bound: bool) -> str:
    text = f"{device_label(device.device)} peak {'at most ' * is_bound}{format_bytes(device.peak_bytes)}"
    if device.room_bytes is None:
        return text
    needed = format_bytes(device.required_bytes)
    unknown = f" ({', '.join(map(clean, device.unknown_operators))})" if device.verdict == PERHAPS else ""
    return f"{text}, {device.verdict}{unknown}: needs {needed} of {format_bytes(device.room_bytes)}"


def _parts(device: DeviceEstimate, title: str) -> Table:
    rows = [
        (format_bytes(size), f"{size / device.peak_bytes:.0%}", name) for name, size in device.parts.items() if size
    ]
    rows.append((format_bytes(device.peak_bytes), "", "peak"))
    if device.device != "cpu":
        rows.append((format_bytes(device.reserved_bytes), "", "reserved by the allocator"))
        rows.append((format_bytes(device.needed_bytes), "", "minimum to run"))
    if device.spare_bytes:
        rows.append((format_bytes(device.spare_bytes), "", "set aside for kernels"))
    if device.context_bytes:
        rows.append((format_bytes(device.context_bytes), "", _CONTEXT.get(device.device, "set aside for a context")))
    rows.append((format_bytes(device.before_bytes), "", "already allocated"))
    rows.append((format_change(device.kept_bytes), "", "kept"))
    return Table(title, ("size", "share", "at the peak"), tuple(rows), frozenset({"size", "share"}))


def summary_report(summary: ModelSummary) -> Report:
    """Return a model's modules, one row each, indented as they are nested."""
    total = summary.total
    share_of = total.parameter_bytes + total.buffer_bytes + total.activation_bytes
    segments = (
        f"{clean(total.type_name)}: {total.parameters:,} parameters, {summary.trainable_parameters:,} trainable",
        f"{format_bytes(total.parameter_bytes + total.buffer_bytes)} of weights",
        f"{format_bytes(total.activation_bytes)} of activations",
    )
    columns = ("module", "type", "output", "parameters", "weights", "activations", "share")
    rows = tuple(_row(row, share_of) for row in summary.rows)
    numbers = frozenset({"parameters", "weights", "activations", "share"})
    return Report("summary", segments, (), [Table("", columns, rows, numbers)])


def _row(row: ModuleRow, share_of: int) -> tuple[str, ...]:
    own = row.parameter_bytes + row.buffer_bytes + row.activation_bytes
    again = f" (×{row.calls})" if row.calls > 1 else "" if row.calls else " (not called)"
    return (
        clean(f"{'· ' * row.depth}{row.name.rpartition('.')[2] or '(whole)'}{again}"),
        clean(row.type_name),
        "" if row.output_shape is None else shape_label(row.output_shape),
        f"{row.parameters:,}" if row.parameters else "",
        format_bytes(row.parameter_bytes + row.buffer_bytes) if row.parameter_bytes + row.buffer_bytes else "",
        format_bytes(row.activation_bytes) if row.activation_bytes else "",
        f"{own / share_of:.0%}" if share_of else "",
    )
