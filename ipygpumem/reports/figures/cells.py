"""What each cell cost: its peak and what it kept, as bars in the cells' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ipygpumem.model import CellRecord
from ipygpumem.reports.content import count, device_label
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import set_bytes
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import cell_name, devices_of, ran_out, usage_on
from ipygpumem.units import format_change

_WIDTH, _LEFT, _RIGHT = 9.0, 0.85, 0.2
_ACROSS = _WIDTH - _LEFT - _RIGHT
_TOP, _TITLE, _BOTTOM = 0.4, 0.34, 0.7
_FEW = 150
"""Up to so many bars have outlines and gaps between them."""
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
        figure.write(_WIDTH - _RIGHT, 0.3, count(len(cells), "cell"), size=picture.SMALL, ha="right")
        tops = [_TOP + _TITLE + index * (_TITLE + panel) for index in range(len(devices))]
        panels = [figure.panel(_LEFT, top, _ACROSS, panel) for top in tops]
        for axes, name in zip(panels, devices, strict=True):
            _draw_panel(axes, cells, name)
        _set_numbers(panels[-1], cells)
        figure.legend(handles=_legend(cells), loc="lower center", bbox_to_anchor=(0.5, 0.03 / height), ncol=3)
    return figure


def _draw_panel(axes: Axes, cells: Sequence[CellRecord], device: str) -> None:
    usages = [usage_on(cell.usages, device) for cell in cells]
    peaks = [0 if usage is None else usage.peak_delta_bytes for usage in usages]
    kept = [0 if usage is None else usage.delta_bytes for usage in usages]
    low, high = min(0, *kept), max(1, *peaks, *kept)
    margin = 0.6 + 0.005 * len(cells)
    axes.set(xlim=(-margin, len(cells) - 1 + margin), ylim=(low - 0.05 * (high - low), high + 0.18 * (high - low)))
    few = len(cells) <= _FEW
    _draw_bars(axes, peaks, 0.8 if few else 1.0, **_peak_look(few=few), zorder=2)
    _draw_bars(axes, kept, 0.4 if few else 1.0, facecolors=picture.IN_USE, edgecolors="none", zorder=3)
    for index, cell in enumerate(cells):
        if ran_out(cell):
            axes.axvline(index, zorder=1, **picture.OUT)
    axes.axhline(0, color=picture.FAINT_INK, linewidth=0.7, zorder=4)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    set_bytes(axes.yaxis)
    _name_highest(axes, peaks)
    axes.set_title(_headline(cells, device), loc="left", size=picture.NORMAL, pad=4)


def _draw_bars(axes: Axes, heights: Sequence[int], width: float, **look: Any) -> None:
    sides = [(index - width / 2, index + width / 2, 0, height) for index, height in enumerate(heights) if height]
    picture.draw_boxes(axes, sides, **look)


def _peak_look(*, few: bool) -> dict[str, Any]:
    if few:
        return {"facecolors": picture.PEAK, "edgecolors": picture.PEAK_EDGE, "linewidths": 0.6}
    return {"facecolors": picture.PEAK_EDGE, "edgecolors": "none"}


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


def _set_numbers(axes: Axes, cells: Sequence[CellRecord]) -> None:
    """Number as many cells as there is room for, evenly."""
    per_inch = (axes.get_xlim()[1] - axes.get_xlim()[0]) / _ACROSS
    widest = picture.inches("0", picture.SMALL) * max(len(cell_name(cell)) for cell in cells) + 0.1
    step = next(step for step in _steps() if step >= widest * per_inch)
    numbers = [index for index in range(len(cells)) if (cells[index].execution_count or index) % step == 0 or step == 1]
    placed: list[int] = []
    for index in numbers:
        if not placed or index - placed[-1] >= widest * per_inch:
            placed.append(index)
    axes.set_xticks(placed, [cell_name(cells[index]) for index in placed])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("cell", size=picture.SMALL)


def _steps() -> list[int]:
    return [digit * 10**power for power in range(8) for digit in (1, 2, 5)]


def _legend(cells: Sequence[CellRecord]) -> list[Patch | Line2D]:
    look = {name.removesuffix("s"): value for name, value in _peak_look(few=len(cells) <= _FEW).items()}
    handles: list[Patch | Line2D] = [
        Patch(label="peak: highest rise above the start", **look),
        Patch(color=picture.IN_USE, label="kept: end less start"),
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
