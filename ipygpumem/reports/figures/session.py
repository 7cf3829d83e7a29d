"""Draws memory over the session: a panel for each device, with cells and experiments above."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ipygpumem.model import CellRecord, ExperimentRecord, Usage, usage_on
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import TimeAxis, set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import cell_name, devices_in, ran_out
from ipygpumem.reports.figures.timeline import COLUMNS, Timeline, draw_bands, draw_strip, prepare_strip
from ipygpumem.reports.layout import count, device_label
from ipygpumem.units import format_bytes, format_seconds

_ROW = 0.21
"""Inches that a row of the time line takes."""
_REACH = 2.0
"""A device's total is drawn if it is at most so many times the highest peak."""

_LABELS = 12
"""So many times find room on the time axis."""

_RESERVED: dict[str, Any] = {"color": picture.INK, "linewidth": 0.9, "linestyle": ":"}
_TOTAL: dict[str, Any] = {"color": picture.INK, "linewidth": 0.9, "linestyle": (0, (6, 3))}


def draw(
    cells: Sequence[CellRecord],
    experiments: Sequence[ExperimentRecord] = (),
    *,
    device: str | None = None,
    earlier: int = 0,
) -> Picture:
    """Return memory over time, from the first of ``cells`` (at least one) to the last.

    Args:
        cells: what to draw.
        experiments: those that overlap the cells are drawn above them.
        device: only this one, or this kind.
        earlier: how many cells before these are left out.
    """
    devices = devices_in((usage for cell in cells for usage in cell.usages), device)
    with picture.drawing():
        line = Timeline(cells, experiments)
        counts = _counts(line, earlier)
        heights = [(line.rows + 1) * _ROW, *([2.0] if len(devices) == 1 else [1.45] * len(devices))]
        height = sum(heights) + 0.35 * len(devices) + 0.75
        figure = Picture(height, _summary(line, devices, counts), "Memory over the session", counts)
        strip, *panels = figure.subplots(len(heights), height_ratios=heights, sharex=True)
        prepare_strip(strip, line)
        for axes, name in zip(panels, devices, strict=True):
            _draw_panel(axes, line, name)
        _set_times(panels[-1], line.axis)
        options: dict[str, Any] = {"ncol": 5, "columnspacing": 1.6, "handlelength": 1.8}
        figure.legend(handles=_legend(line.cells, devices), loc="outside lower center", **options)
        figure.lay_out()
        draw_strip(strip, line)
    return figure


# -- a device -------------------------------------------------------------------------------------------------


def _draw_panel(axes: Axes, line: Timeline, device: str) -> None:
    """Draw one device: what was in use as an area, each cell's peak above it, and marks where memory ran out."""
    usages = _usages(line.cells, device)
    total = _total_within_reach(usages.values())
    top = max([usage.peak_bytes for usage in usages.values()] + [total or 0]) * 1.1 or 1
    axes.set_ylim(0, top)
    if not line.is_dense:
        draw_bands(axes, line, 0, top)
    spans = [(line.places[index], usage) for index, usage in usages.items()]
    _draw_usages(axes, _together(spans, line.axis.length / COLUMNS) if line.is_dense else spans)
    if total is not None:
        axes.axhline(total, zorder=2, **_TOTAL)
    for (_, end), cell in zip(line.places, line.cells, strict=True):
        if ran_out(cell):
            axes.axvline(end, zorder=6, **picture.OUT)
    axes.tick_params(axis="x", length=0)
    set_bytes(axes.yaxis)
    axes.set_title(_headline(line, device), loc="left", size=picture.NORMAL, pad=4)


_Spans = Sequence[tuple[tuple[float, float], Usage]]


def _together(usages: _Spans, width: float) -> _Spans:
    """Return cells that end within the same ``width`` of the axis as one: single ones could not be told apart."""
    found = []
    for _, group in itertools.groupby(usages, lambda item: int(item[0][1] / width)):
        cells = list(group)
        (start, _), first = cells[0]
        (_, end), last = cells[-1]
        peak = max(usage.peak_bytes for _, usage in cells)
        reserved = max((usage.reserved_bytes or 0 for _, usage in cells), default=0) or None
        as_one = replace(last, before_bytes=first.before_bytes, peak_bytes=peak, reserved_bytes=reserved)
        found.append(((start, end), as_one))
    return found


def _draw_usages(axes: Axes, usages: _Spans) -> None:
    """Draw the use before each cell until it ends, then that after it: when in the cell it changed is not known."""
    places: list[float] = []
    sizes: list[int] = []
    for (start, end), usage in usages:
        places += [start, start, end, end]
        sizes += [sizes[-1] if sizes else 0, usage.before_bytes, usage.before_bytes, usage.after_bytes]
    axes.fill_between(places, sizes, color=picture.IN_USE_AREA, linewidth=0, zorder=1)
    axes.plot(places, sizes, color=picture.IN_USE, linewidth=1.4, solid_joinstyle="miter", zorder=4)
    peaks = [(start, end, usage.before_bytes, usage.peak_bytes) for (start, end), usage in usages]
    outlined: dict[str, Any] = {"facecolors": picture.PEAK, "edgecolors": picture.PEAK_EDGE, "linewidths": 0.6}
    picture.draw_boxes(axes, peaks, zorder=3, **outlined)
    reserved = [(place, usage.reserved_bytes) for span, usage in usages for place in span if usage.reserved_bytes]
    if reserved:
        axes.plot(*zip(*reserved, strict=True), zorder=5, drawstyle="steps-post", **_RESERVED)


def _usages(cells: Sequence[CellRecord], device: str) -> dict[int, Usage]:
    """Return what happened on ``device``, by the cells' positions."""
    found = ((index, usage_on(cell.usages, device)) for index, cell in enumerate(cells))
    return {index: usage for index, usage in found if usage is not None}


def _total_within_reach(usages: Iterable[Usage]) -> int | None:
    """Return a device's memory if it is not so far above all peaks that it would press them flat."""
    usages = list(usages)
    total = next((usage.total_bytes for usage in reversed(usages) if usage.total_bytes), None)
    highest = max(usage.peak_bytes for usage in usages)
    return total if total is not None and total <= _REACH * highest else None


def _headline(line: Timeline, device: str) -> str:
    usages = _usages(line.cells, device)
    last = list(usages.values())[-1]
    highest = max(usages, key=lambda index: usages[index].peak_bytes)
    parts = [
        picture.shorten(device_label(device), 24),
        f"{format_bytes(last.after_bytes)} in use at the end",
        f"peak {format_bytes(usages[highest].peak_bytes)} in cell {cell_name(line.cells[highest])}",
    ]
    if last.total_bytes:
        parts.append(f"total {format_bytes(last.total_bytes)}")
    return " · ".join(parts)


def _set_times(axes: Axes, axis: TimeAxis) -> None:
    ticks = axis.ticks(axis.length / _LABELS)
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.tick_params(axis="x", length=3)
    text = "time since the first cell"
    if axis.shortened:
        drawn, whole = format_seconds(axis.longest_pause), format_seconds(sum(axis.shortened))
        text += f" ({count(len(axis.shortened), 'pause')} drawn as {drawn}; {whole} in all)"
    axes.set_xlabel(text, size=picture.SMALL)


# -- words ----------------------------------------------------------------------------------------------------


def _legend(cells: Sequence[CellRecord], devices: Sequence[str]) -> list[Patch | Line2D]:
    usages = [list(_usages(cells, device).values()) for device in devices]
    handles: list[Patch | Line2D] = [
        Patch(facecolor=picture.IN_USE_AREA, edgecolor=picture.IN_USE, label="in use"),
        Patch(facecolor=picture.PEAK, edgecolor=picture.PEAK_EDGE, label="peak within a cell"),
    ]
    if any(usage.reserved_bytes for on_device in usages for usage in on_device):
        handles.append(Line2D([], [], label="reserved by the allocator", **_RESERVED))
    if any(map(_total_within_reach, usages)):
        handles.append(Line2D([], [], label="total", **_TOTAL))
    if any(map(ran_out, cells)):
        handles.append(Line2D([], [], label="out of memory", **picture.OUT))
    return handles


def _counts(line: Timeline, earlier: int) -> str:
    cells = count(len(line.cells), "cell") + f" in {COLUMNS} columns" * line.is_dense
    parts = [f"last {cells} ({earlier} earlier left out)" if earlier else cells]
    if line.bars:
        parts.append(count(len(line.bars), "experiment") + f" and {line.left_out} more" * bool(line.left_out))
    return " · ".join([*parts, f"{format_seconds(line.computing_seconds)} of computing"])


def _summary(line: Timeline, devices: Sequence[str], counts: str) -> str:
    lines = [f"memory over the session · {counts}"]
    lines += [f"  {_headline(line, device)}" for device in devices]
    out = [cell_name(cell) for cell in line.cells if ran_out(cell)]
    if out:
        shown = ", ".join(out[:20]) + (", …" if len(out) > 20 else "")
        lines.append(f"  out of memory in {'cell' if len(out) == 1 else 'cells'} {shown}")
    return "\n".join(lines)
