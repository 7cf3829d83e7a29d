"""Draws experiments side by side: a row for each, with its time, and what it cost on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ipygpumem.model import ExperimentRecord, usage_on
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.picture import Picture
from ipygpumem.reports.figures.records import devices_in
from ipygpumem.reports.history import numbered
from ipygpumem.reports.layout import count, device_label
from ipygpumem.units import format_bytes, format_change, format_seconds

_ROW, _NAMES, _NARROWEST = 0.42, 1.95, 1.85
"""In inches: how high a row is, how wide names may be, and how wide the panel of a device must be at least."""
_AT_MOST = 40
"""More rows than this make no picture that anybody looks at."""
_LINE = 0.2
"""Half the distance of a row's two lines of text, in rows."""
_BACK: dict[str, Any] = {"facecolor": picture.GIVEN_BACK, "edgecolor": "#2f7d63", "hatch": "////"}
_TIMES: dict[str, Any] = {"facecolor": "#c3c7cd", "edgecolor": picture.FAINT_INK}
_PEAKS: dict[str, Any] = {"facecolor": picture.PEAK, "edgecolor": picture.PEAK_EDGE}


def draw(experiments: Sequence[ExperimentRecord], *, device: str | None = None) -> Picture:
    """Return the last 40 of ``experiments`` (at least one), the oldest on top."""
    shown = experiments[-_AT_MOST:]
    devices = devices_in((usage for item in shown for usage in item.usages), device)
    all_of_them = count(len(experiments), "experiment")
    number = f"the last {len(shown)} of {all_of_them}" if len(shown) < len(experiments) else all_of_them
    names = [run.label for run in numbered(shown)]
    with picture.drawing():
        width = max(9.0, _NAMES + 1.8 + _NARROWEST * len(devices))
        height = _ROW * len(shown) + 0.65
        figure = Picture(height, _summary(shown, names, devices), "Experiments", number, width=width)
        ratios = [1.3, *[5.25 / len(devices)] * len(devices)]
        times, *panels = figure.subplots(1, len(ratios), width_ratios=ratios)
        for axes, name in zip((times, *panels), ("time", *map(device_label, devices)), strict=True):
            _prepare(axes, len(shown))
            name = picture.fit(name, _NARROWEST - 0.35, picture.NORMAL)
            axes.set_title(name, loc="left", size=picture.NORMAL, pad=4)
        _draw_names(times, shown, names)
        figure.legend(handles=_legend(), loc="outside lower center", ncol=3)
        figure.lay_out()
        _draw_times(times, shown)
        for axes, name in zip(panels, devices, strict=True):
            _draw_device(axes, shown, name)
    return figure


def _prepare(axes: Axes, rows: int) -> None:
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set(xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    bands = [(0.0, 1.0, row - 0.5, row + 0.5) for row in range(0, rows, 2)]
    picture.draw_boxes(axes, bands, facecolors=picture.BAND, zorder=0, transform=axes.get_yaxis_transform())


def _draw_names(axes: Axes, experiments: Sequence[ExperimentRecord], names: Sequence[str]) -> None:
    """Write each experiment's name, and below it its parameters."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    place |= {"ha": "right", "va": "center"}
    for row, (item, name) in enumerate(zip(experiments, names, strict=True)):
        below = ", ".join(f"{key}={value}" for key, value in item.parameters.items())
        name, below = picture.fit(name, _NAMES, picture.NORMAL), picture.fit(below, _NAMES, picture.SMALL)
        axes.annotate(name, (0, row - _LINE if below else row), (-6, 0), size=picture.NORMAL, **place)
        axes.annotate(below, (0, row + _LINE), (-6, 0), size=picture.SMALL, color=picture.FAINT_INK, **place)


def _draw_times(axes: Axes, experiments: Sequence[ExperimentRecord]) -> None:
    times = [item.duration_seconds for item in experiments]
    labels = [(format_seconds(item.duration_seconds), f"{item.ooms} OOM" if item.ooms else "") for item in experiments]
    _set_room(axes, 0, max(times) or 1, labels)
    _draw_bars(axes, [0] * len(times), times, 0.36, zorder=2, **_TIMES)
    _write_labels(axes, times, labels, below=picture.TROUBLE)


def _draw_device(axes: Axes, experiments: Sequence[ExperimentRecord], device: str) -> None:
    """Draw peaks as wide bars, and on them what was kept and what the end gave back, one after the other."""
    usages = [usage_on(item.usages, device) for item in experiments]
    peaks = [0 if usage is None else usage.peak_delta_bytes for usage in usages]
    kept = [0 if usage is None else usage.delta_bytes for usage in usages]
    back = [max(0, item.reclaimed.get(device, 0)) for item in experiments]
    ends = [max(0, peak, size, size + given) for peak, size, given in zip(peaks, kept, back, strict=True)]
    labels = [
        ("not in use", "") if usage is None else (format_change(peak), f"kept {format_change(size)}")
        for usage, peak, size in zip(usages, peaks, kept, strict=True)
    ]
    _set_room(axes, min(0, *kept), max(1, *ends), labels)
    nothing = [0] * len(experiments)
    _draw_bars(axes, nothing, peaks, 0.62, zorder=2, **_PEAKS)
    _draw_bars(axes, kept, back, 0.3, zorder=3, **_BACK)  # what was there before may be among it
    _draw_bars(axes, nothing, kept, 0.3, zorder=3.5, facecolor=picture.IN_USE, edgecolor=picture.IN_USE)
    _write_labels(axes, ends, labels, below=picture.FAINT_INK)
    axes.axvline(0, color=picture.FAINT_INK, linewidth=0.7, zorder=4)


def _draw_bars(axes: Axes, starts: Sequence[float], lengths: Sequence[float], thick: float, **look: Any) -> None:
    rows = enumerate(zip(starts, lengths, strict=True))
    boxes = [(start, start + length, row - thick / 2, row + thick / 2) for row, (start, length) in rows if length]
    picture.draw_boxes(axes, boxes, linewidths=0.6, **look)


def _set_room(axes: Axes, low: float, high: float, labels: Sequence[tuple[str, str]]) -> None:
    """Leave room for the labels behind the bars."""
    width = picture.width_of(axes)
    longest = sorted({text for label in labels for text in label}, key=len)[-5:]
    room = max(picture.inches(text, picture.SMALL) for text in longest) + 0.12
    axes.set_xlim(low, high + (high - low) * room / (width - room))


def _write_labels(axes: Axes, ends: Sequence[float], labels: Sequence[tuple[str, str]], *, below: str) -> None:
    """Write one or two lines behind each bar."""
    for row, (end, (first, second)) in enumerate(zip(ends, labels, strict=True)):
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": picture.SMALL, "zorder": 5}
        axes.annotate(first, (end, row - _LINE if second else row), (4, 0), **place)
        if second:
            axes.annotate(second, (end, row + _LINE), (4, 0), color=below, **place)


def _legend() -> list[Patch]:
    return [
        Patch(label="peak above the start", **_PEAKS),
        Patch(color=picture.IN_USE, label="kept after the end"),
        Patch(label="given back at the end", **_BACK),
    ]


def _summary(experiments: Sequence[ExperimentRecord], names: Sequence[str], devices: Sequence[str]) -> str:
    lines = [count(len(experiments), "experiment")]
    for item, name in list(zip(experiments, names, strict=True))[-20:]:
        parts = [picture.shorten(name, 60), format_seconds(item.duration_seconds)]
        for device in devices:
            usage = usage_on(item.usages, device)
            if usage is not None:
                given = format_bytes(max(0, item.reclaimed.get(device, 0)))
                peak, kept = format_change(usage.peak_delta_bytes), format_change(usage.delta_bytes)
                parts.append(f"{device_label(device)} peak {peak}, kept {kept}, given back {given}")
        lines.append("  " + " · ".join(parts))
    return "\n".join(lines)
