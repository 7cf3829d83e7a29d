"""What each cell cost: its peak and what it kept, as bars in the cells' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ipygpumem.model import CellRecord
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import cell_name, devices_of, ran_out, usage_on
from ipygpumem.reports.layout import count, device_label
from ipygpumem.units import format_change

_WIDTH, _LEFT, _RIGHT = 9.0, 0.85, 0.2
_ACROSS = _WIDTH - _LEFT - _RIGHT
_TOP, _TITLE, _BOTTOM = 0.4, 0.34, 0.7
_BARS = 100
"""Where there are more cells, each bar stands for several: as many as it takes."""
_NAMED = 4
"""So many of the highest peaks carry their figure, where there is room."""


def draw(cells: Sequence[CellRecord], *, device: str | None = None) -> Picture:
    """Return peak and kept memory of each of ``cells`` (at least one), a panel for each device."""
    devices = devices_of((usage for cell in cells for usage in cell.usages), device)
    panel = 2.2 if len(devices) == 1 else 1.6
    height = _TOP + len(devices) * (_TITLE + panel) + _BOTTOM
    with picture.drawing():
        figure = Picture(_WIDTH, height, _summary(cells, devices))
        figure.write(0.12, 0.3, "Memory of each cell", size=picture.LARGE, weight="bold")
        each = -(-len(cells) // _BARS)
        number = count(len(cells), "cell") + f", {each} in each bar" * (each > 1)
        figure.write(_WIDTH - _RIGHT, 0.3, number, size=picture.SMALL, ha="right")
        tops = [_TOP + _TITLE + index * (_TITLE + panel) for index in range(len(devices))]
        panels = [figure.panel(_LEFT, top, _ACROSS, panel) for top in tops]
        groups = [cells[start : start + each] for start in range(0, len(cells), each)]
        for axes, name in zip(panels, devices, strict=True):
            _draw_panel(axes, groups, name)
            axes.set_title(_headline(cells, name), loc="left", size=picture.NORMAL, pad=4)
        _set_numbers(panels[-1], groups)
        figure.legend(handles=_legend(cells, each), loc="lower center", bbox_to_anchor=(0.5, 0.03 / height), ncol=3)
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
    axes.set_xticks([])
    set_bytes(axes.yaxis)
    _name_highest(axes, peaks)


def _draw_bars(axes: Axes, heights: Sequence[int], width: float, **look: Any) -> None:
    sides = [(index - width / 2, index + width / 2, 0, height) for index, height in enumerate(heights) if height]
    picture.draw_boxes(axes, sides, **look)


def _name_highest(axes: Axes, peaks: Sequence[int]) -> None:
    """Write their figures over the highest peaks, where no higher one is in the way."""
    left, right = axes.get_xlim()
    per_inch = (right - left) / _ACROSS
    taken: list[tuple[float, float]] = []
    for index in sorted(range(len(peaks)), key=lambda index: -peaks[index])[:_NAMED]:
        text = format_change(peaks[index])
        half = (picture.inches(text, picture.SMALL) / 2 + 0.04) * per_inch
        middle = min(max(index, left + half), right - half)
        start, end = middle - half, middle + half
        if peaks[index] and all(start >= other_end or end <= other_start for other_start, other_end in taken):
            above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
            axes.annotate(
                text,
                (middle, peaks[index]),
                size=picture.SMALL,
                zorder=5,
                **above,
                bbox={"facecolor": picture.PAPER, "edgecolor": "none", "pad": 0.8},
            )
        taken.append((start, end))


def _set_numbers(axes: Axes, groups: Groups) -> None:
    """Number as many bars as there is room for, evenly: each by its first cell."""
    per_inch = (axes.get_xlim()[1] - axes.get_xlim()[0]) / _ACROSS
    widest = picture.inches("0", picture.SMALL) * max(len(cell_name(cells[0])) for cells in groups) + 0.1
    step = next(step for step in _steps() if step >= widest * per_inch)
    first = groups[0][0].execution_count or 0
    offset = -first % step if len(groups[0]) == 1 else 0  # round numbers, where that is easy
    placed = range(offset, len(groups), step)
    axes.set_xticks(list(placed), [cell_name(groups[index][0]) for index in placed])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("cell" if len(groups[0]) == 1 else "first cell of a bar", size=picture.SMALL)


def _steps() -> list[int]:
    return [digit * 10**power for power in range(8) for digit in (1, 2, 5)]


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
