"""Reports estimates and summaries of models."""

from __future__ import annotations

from collections.abc import Mapping

from ipygpumem.estimating.records import PERHAPS, DeviceEstimate, Estimate, ModelSummary, ModuleRow
from ipygpumem.report.layout import Fact, Report, Table, clean, device_label, shape_label
from ipygpumem.report.showing import shows
from ipygpumem.units import format_bytes, format_change, format_seconds

_GUESSES_SHOWN = 5
_CONTEXT = {"cpu": "other memory of this process"}


@shows(Estimate)
def estimate_report(estimate: Estimate) -> Report:
    """Return the report of the memory that code would take on each device, by purpose."""
    segments = [
        "estimate",
        *(_verdict(device, bool(estimate.upper_bounds)) for device in estimate.devices),
    ]
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
    facts = [
        Fact(what, tuple(map(clean, values)), most=_GUESSES_SHOWN) for what, values in lines.items()
    ]
    return Report(
        "estimate", segments, tuple(map(clean, estimate.notes)), tables, facts, records=[estimate]
    )


def _verdict(device: DeviceEstimate, is_bound: bool) -> str:
    text = (
        f"{device_label(device.device)} peak "
        f"{'at most ' * is_bound}{format_bytes(device.peak_bytes)}"
    )
    if device.room_bytes is None:
        return text
    needed = format_bytes(device.required_bytes)
    unknown = (
        f" ({', '.join(map(clean, device.unknown_operators))})" if device.verdict == PERHAPS else ""
    )
    return f"{text}, {device.verdict}{unknown}: needs {needed} of {format_bytes(device.room_bytes)}"


def _parts(device: DeviceEstimate, title: str) -> Table:
    sizes = {"peak": device.peak_bytes}
    if device.device != "cpu":
        sizes |= {
            "reserved by the allocator": device.reserved_bytes,
            "minimum to run": device.needed_bytes,
        }
    if device.spare_bytes:
        sizes["set aside for kernels"] = device.spare_bytes
    if device.context_bytes:
        sizes[_CONTEXT.get(device.device, "set aside for a context")] = device.context_bytes
    rows = share_rows(device.parts, device.peak_bytes)
    sizes["already allocated"] = device.before_bytes
    rows += [{"size": format_bytes(size), "at the peak": name} for name, size in sizes.items()]
    rows.append({"size": format_change(device.kept_bytes), "at the peak": "kept"})
    return Table.of(rows, {"size", "share"}, title)


def share_rows(parts: Mapping[str, int], peak_bytes: int) -> list[dict[str, str]]:
    """Return a row for each purpose of the memory at the peak, with its share."""
    return [
        {"size": format_bytes(size), "share": f"{size / peak_bytes:.0%}", "at the peak": name}
        for name, size in parts.items()
        if size
    ]


@shows(ModelSummary)
def summary_report(summary: ModelSummary) -> Report:
    """Return a model's modules, one row each, indented as they are nested."""
    total = summary.total
    share_of = total.parameter_bytes + total.buffer_bytes + total.activation_bytes
    segments = (
        f"{clean(total.type_name)}: {total.parameters:,} parameters, "
        f"{summary.trainable_parameters:,} trainable",
        f"{format_bytes(total.parameter_bytes + total.buffer_bytes)} of weights",
        f"{format_bytes(total.activation_bytes)} of activations",
    )
    rows = [_row(row, share_of) for row in summary.rows]
    table = Table.of(rows, {"parameters", "weights", "activations", "share"})
    return Report("summary", segments, (), [table], records=[summary])


def _row(row: ModuleRow, share_of: int) -> dict[str, str]:
    weights = row.parameter_bytes + row.buffer_bytes
    again = f" (×{row.calls})" if row.calls > 1 else "" if row.calls else " (not called)"
    return {
        "module": clean(f"{'· ' * row.depth}{row.name.rpartition('.')[2] or '(whole)'}{again}"),
        "type": clean(row.type_name),
        "output": "" if row.output_shape is None else shape_label(row.output_shape),
        "parameters": f"{row.parameters:,}" if row.parameters else "",
        "weights": format_bytes(weights) if weights else "",
        "activations": format_bytes(row.activation_bytes) if row.activation_bytes else "",
        "share": f"{(weights + row.activation_bytes) / share_of:.0%}" if share_of else "",
    }
