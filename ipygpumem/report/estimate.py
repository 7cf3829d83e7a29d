"""The reports of an estimate (``cuda:0 peak 9.1 GiB, fits: ...``), and of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ipygpumem.estimating.records import PERHAPS, DeviceEstimate, Estimate, ModelSummary, ModuleRow
from ipygpumem.report.devices import device_label, size_text
from ipygpumem.report.layout import Fact, Report, Table
from ipygpumem.report.registration import shows
from ipygpumem.report.words import clean, shape_label
from ipygpumem.units import format_bytes, format_change, format_in, format_seconds

_LINES_SHOWN = 5
"""Maximum number of the code's lines in a fact."""
_TINY_SHARE = 0.001
"""Share of the peak below which parts have one row together."""
_ADDED, _VERDICT = "added to the peak", "verdict"
"""Headings of the second and the third table of a device."""


@shows(Estimate)
def estimate_report(estimate: Estimate, size: str = "") -> Report:
    """Return the report of the memory that code would take on each device, by purpose.

    Args:
        estimate: the estimate.
        size: the text that the user has typed for the device's memory, such as ``80 GB``: the
            verdict has its unit.
    """
    is_bound = bool(estimate.upper_bounds)
    has_titles = len(estimate.devices) > 1
    segments = ["estimate"]
    tables = list[Table]()
    for device in estimate.devices:
        segments.append(_verdict(device, size, is_bound=is_bound))
        if device.peak_bytes:
            title = device_label(device.device) if has_titles else ""
            tables += _tables(device, title)
    if not estimate.devices:
        segments.append("no tensor was made")
    segments.append(f"made in {format_seconds(estimate.duration_seconds)}, nothing ran on a device")
    facts = [
        _lines_fact("lines that got guessed values", estimate.guesses),
        _lines_fact(
            "at most, since these lines are assumed to select all that they can",
            estimate.upper_bounds,
        ),
    ]
    notes = list(map(clean, estimate.notes))
    return Report("estimate", segments, notes, tables, facts, records=[estimate])


def _lines_fact(title: str, lines: Sequence[str]) -> Fact:
    """Return the fact on lines of the code whose results the estimate had to assume."""
    return Fact(title, list(map(clean, lines)), most=_LINES_SHOWN)


def _verdict(device: DeviceEstimate, size: str, *, is_bound: bool) -> str:
    """Return a device's peak and, if the device's memory is known, the verdict:
    ``cuda:0 peak 9.1 GiB, fits: needs 9.6 of 16 GiB``.

    Args:
        device: the estimate for the device.
        size: the text that the user has typed for the device's memory; its unit is used.
        is_bound: True if the peak is an upper bound.
    """
    peak = format_bytes(device.peak_bytes)
    if is_bound:
        peak = f"at most {peak}"
    text = f"{device_label(device.device)} peak {peak}"
    if device.room_bytes is None:
        return text
    verdict = device.verdict
    if verdict == PERHAPS:
        doubts = ", ".join(map(clean, device.doubts))
        verdict = f"{verdict} ({doubts})"
    needed = format_in(device.required_bytes, size)
    room = format_in(device.room_bytes, size)
    return f"{text}, {verdict}: needs {needed} of {room}"


def _tables(device: DeviceEstimate, title: str) -> list[Table]:
    """Return a device's three tables: the memory at the peak by purpose; the memory that the device
    needs in addition; the verdict, with the sizes that it depends on.
    """
    parts = share_rows(device.parts, device.peak_bytes)
    parts.append({"size": format_bytes(device.peak_bytes), "at the peak": "sum: the peak"})
    return [
        Table.of(parts, {"size", "share"}, title),
        Table.of(_added_rows(device), {"size"}),
        Table.of(_verdict_rows(device), {"size"}),
    ]


def _added_rows(device: DeviceEstimate) -> list[dict[str, str]]:
    """Return a row for each size that the device needs in addition to the peak, and one for their
    sum with the peak. Return no rows if it needs only the peak.
    """
    is_host = device.device == "cpu"
    context = "other memory of this process" if is_host else "CUDA context"
    added = {
        "fragmentation": device.needed_bytes - device.peak_bytes,
        "headroom for GPU kernels": device.spare_bytes,
        context: device.context_bytes,
    }
    rows = []
    for name, size in added.items():
        if size:
            rows.append({"size": format_change(size), _ADDED: name})
    if rows:
        rows.append({"size": format_bytes(device.required_bytes), _ADDED: "sum: needed in total"})
    return rows


def _verdict_rows(device: DeviceEstimate) -> list[dict[str, str]]:
    """Return the rows of the third table: the memory allocated before, kept afterwards, and
    reserved; last, the memory that is available, with the verdict.
    """
    sizes = dict[str, str]()
    if device.before_bytes:
        sizes["allocated before, part of the peak"] = format_bytes(device.before_bytes)
    if device.kept_bytes:
        sizes["still allocated at the end"] = format_change(device.kept_bytes)
    if device.device != "cpu":
        reserved = "reserved by the allocator if there is room, cache included"
        sizes[reserved] = format_bytes(device.reserved_bytes)
    if device.room_bytes is not None:
        sizes[f"available: {device.verdict}"] = format_bytes(device.room_bytes)
    rows = []
    for name, size in sizes.items():
        rows.append({"size": size, _VERDICT: name})
    return rows


def share_rows(parts: Mapping[str, int], peak_bytes: int) -> list[dict[str, str]]:
    """Return a row with its share for each part of the memory at the peak. Tiny parts have one row
    together.

    Args:
        parts: the bytes of each part by its purpose, such as ``parameters``.
        peak_bytes: the bytes at the peak.
    """
    least_bytes = _TINY_SHARE * peak_bytes
    tiny_parts = {name: size for name, size in parts.items() if 0 < size < least_bytes}
    parts_shown = parts
    if len(tiny_parts) > 1:
        parts_shown = {name: size for name, size in parts.items() if name not in tiny_parts}
        parts_shown[f"{len(tiny_parts)} smaller parts"] = sum(tiny_parts.values())
    rows = []
    for name, size in parts_shown.items():
        if size:
            share = _share_label(size, peak_bytes)
            rows.append({"size": format_bytes(size), "share": share, "at the peak": name})
    return rows


def _share_label(size: int, total: int) -> str:
    """Return a share in per cent; never 0 % for memory that is there."""
    share = f"{size / total:.0%}"
    return "<1%" if share == "0%" else share


@shows(ModelSummary)
def summary_report(summary: ModelSummary) -> Report:
    """Return the report on a model: a row for each module, indented as they are nested."""
    total = summary.total
    weights = total.parameter_bytes + total.buffer_bytes
    number = f"{total.parameters:,} parameters, {summary.trainable_parameters:,} trainable"
    segments = [
        f"{clean(total.type_name)}: {number}",
        f"{format_bytes(weights)} of weights",
        f"{format_bytes(total.activation_bytes)} of activations",
    ]
    rows = [_row_of_module(row, weights + total.activation_bytes) for row in summary.rows]
    table = Table.of(rows, {"parameters", "weights", "activations", "share"})
    return Report("summary", segments, (), [table], records=[summary])


def _row_of_module(row: ModuleRow, total_bytes: int) -> dict[str, str]:
    """Return the row of a module. Figures of zero are left out.

    Args:
        row: the module.
        total_bytes: the bytes of the whole model, of which it shows the share.
    """
    weights = row.parameter_bytes + row.buffer_bytes
    texts = {"module": _module_label(row), "type": clean(row.type_name)}
    if row.output_shape is not None:
        texts["output"] = shape_label(row.output_shape)
    if row.parameters:
        texts["parameters"] = f"{row.parameters:,}"
    texts["weights"] = size_text(weights or None)
    texts["activations"] = size_text(row.activation_bytes or None)
    if total_bytes:
        share = (weights + row.activation_bytes) / total_bytes
        texts["share"] = f"{share:.0%}"
    return texts


def _module_label(row: ModuleRow) -> str:
    """Return a module's name, indented by its depth; with the number of its calls if that is not 1:
    ``· attention (×12)``.
    """
    name = row.name.rpartition(".")[2] or "(whole)"
    label = "· " * row.depth + name
    if not row.calls:
        label += " (not called)"
    elif row.calls > 1:
        label += f" (×{row.calls})"
    return clean(label)
