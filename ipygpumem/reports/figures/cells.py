"""Draws what each cell cost: its peak and what it kept, as bars in the cells' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ipygpumem.model import CellRecord, usage_on
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import cell_name, devices_in, ran_out
from ipygpumem.reports.layout import count, device_label
from ipygpumem.units import format_change

_BARS = 100
"""Where there are more cells, each bar stands for several: as many as it takes."""
_NAMED = 4
"""So many of the highest peaks carry their figure, where there is room."""
_FIGURE_SHARE = 0.085
"""The share of a panel's width that such a figure takes."""


def draw(cells: Sequence[CellRecord], *, device: str | None = None) -> Picture:
    """Return peak and kept memory of each of ``cells`` (at least one), a panel for each device."""
    devices = devices_in((usage for cell in cells for usage in cell.usages), device)
    each = -(-len(cells) // _BARS)
    groups = [cells[start : start + each] for start in range(0, len(cells), each)]
    number = count(len(cells), "cell") + f", {each} in each bar" * (each > 1)
    with picture.drawing():
        height = 0.6 + (2.5 if len(devices) == 1 else 1.95 * len(devices))
        figure = Picture(height, _summary(cells, devices), "Memory of each cell", number)
        panels = figure.subplots(len(devices), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, devices, strict=True):
            _draw_panel(axes, groups, name)
            axes.set_title(_headline(cells, name), loc="left", size=picture.NORMAL, pad=4)
        _number(panels[-1], groups)
        figure.legend(handles=_legend(cells, each), loc="outside lower center", ncol=3)
        figure.lay_out()
    return figure


Groups = Sequence[Sequence[CellRecord]]
"""Cells that share a bar, mostly one."""

_PEAK: dict[str, Any] = {"facecolors": picture.PEAK, "edgecolors": picture.PEAK_EDGE, "linewidths": 0.6}


def _draw_panel(axes: Axes, groups: Groups, device: str) -> None:
    """Draw a bar for each group of cells: their highest peak, and what they have kept together."""
    usages = [[found for cell in cells if (found := usage_on(cell.usages, device))] for cells in groups]
    peaks = [max((usage.peak_delta_bytes for usage in own), default=0) for own in usages]
    kept = [sum(usage.delta_bytes for usage in own) for own in usages]
    low, high = min(0, *kept), max(1, *peaks, *kept)
    margin = 0.6 + 0.005 * len(groups)
    axes.set(xlim=(-margin, len(groups) - 1 + margin), ylim=(low - 0.05 * (high - low), high + 0.18 * (high - low)))
    _draw_bars(axes, peaks, 0.8, **_PEAK, zorder=2)
    _draw_bars(axes, kept, 0.4, facecolors=picture.IN_USE, edgecolors="none", zorder=3)
    for index, cells in enumerate(groups):
        if any(map(ran_out, cells)):
            axes.axvline(index, zorder=1, **picture.OUT)
    axes.axhline(0, color=picture.FAINT_INK, linewidth=0.7, zorder=4)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    set_bytes(axes.yaxis)
    _name_highest(axes, peaks)


def _draw_bars(axes: Axes, heights: Sequence[int], width: float, **look: Any) -> None:
    sides = [(index - width / 2, index + width / 2, 0, height) for index, height in enumerate(heights) if height]
    picture.draw_boxes(axes, sides, **look)


def _name_highest(axes: Axes, peaks: Sequence[int]) -> None:
    """Write their figures over the highest peaks, where no higher one is in the way."""
    width = _FIGURE_SHARE * (axes.get_xlim()[1] - axes.get_xlim()[0])
    highest = sorted(range(len(peaks)), key=lambda index: -peaks[index])[:_NAMED]
    for place, index in enumerate(highest):
        if peaks[index] and all(abs(index - other) >= width for other in highest[:place]):
            above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "zorder": 5, "size": picture.SMALL}
            paper = {"facecolor": picture.PAPER, "edgecolor": "none", "pad": 0.8}
            axes.annotate(format_change(peaks[index]), (index, peaks[index]), (0, 3), bbox=paper, **above)


def _number(axes: Axes, groups: Groups) -> None:
    """Number as many bars as there is room for, evenly: each by its first cell."""
    names = [cell_name(cells[0]) for cells in groups]
    axes.xaxis.set_major_locator(MaxNLocator(60 // max(map(len, names)), integer=True))
    axes.xaxis.set_major_formatter(lambda place, _: names[int(place)] if 0 <= place < len(names) else "")
    axes.set_xlabel("cell" if len(groups[0]) == 1 else "first cell of a bar", size=picture.SMALL)


def _legend(cells: Sequence[CellRecord], each: int) -> list[Patch | Line2D]:
    look = {name.removesuffix("s"): value for name, value in _PEAK.items()}
    peak, kept = "peak: highest rise above the start", "kept: end less start"
    handles: list[Patch | Line2D] = [
        Patch(label=peak if each == 1 else f"{peak}, of {each} cells", **look),
        Patch(color=picture.IN_USE, label=kept if each == 1 else f"{kept}, of {each} cells together"),
    ]
    if any(map(ran_out, cells)):
        handles.append(Line2D([], [], label="out of memory", **picture.OUT))
    return handles


def _headline(cells: Sequence[CellRecord], device: str) -> str:
    usages = [(cell, usage) for cell in cells if (usage := usage_on(cell.usages, device)) is not None]
    cell, highest = max(usages, key=lambda pair: pair[1].peak_delta_bytes)
    kept = sum(usage.delta_bytes for _, usage in usages)
    return (
        f"{picture.shorten(device_label(device), 24)} · kept by all {format_change(kept)} · "
        f"highest peak {format_change(highest.peak_delta_bytes)} in cell {cell_name(cell)}"
    )


def _summary(cells: Sequence[CellRecord], devices: Sequence[str]) -> str:
    return "\n".join(
        [f"memory of {count(len(cells), 'cell')}", *(f"  {_headline(cells, device)}" for device in devices)]
    )
