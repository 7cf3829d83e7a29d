"""Draws the bytes over the time of a ``%%peak``, stacked by role."""

from __future__ import annotations

from ipygpumem.errors import PlotError, not_installed
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord
from ipygpumem.extras.peak.words import headline, title
from ipygpumem.report.colours import OUT_OF_MEMORY, PEAK
from ipygpumem.report.picture import LEGEND, Picture, count_bytes, style
from ipygpumem.units import format_bytes, format_seconds

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
except ImportError:
    raise not_installed(PlotError, "pictures need", "matplotlib") from None

_ROLE_COLOURS = {
    "parameters": "tab:blue",
    "buffers": "tab:brown",
    "gradients": "tab:green",
    "optimizer state": "tab:purple",
    "activations": "tab:cyan",
    "temporaries": "tab:olive",
    "cuBLAS workspaces": "tab:pink",
    "data": "tab:gray",
}
"""From the bottom to the top: memory that stays, then memory that comes and goes. None has the
colour of the peak.
"""


def draw(record: PeakRecord) -> Picture:
    """Return a figure with a panel for each device; the peak, or the failure, is marked."""
    devices = [device for device in record.devices if device.curve and device.size_bytes]
    if not devices:
        raise PlotError("there is nothing to draw: no tensor was followed")
    with rc_context(style()):
        lines = [f"memory over {format_seconds(record.duration_seconds)}", *map(headline, devices)]
        figure = Picture(2.4 * len(devices) + 0.8, lines)
        panels = figure.subplots(len(devices), squeeze=False)[:, 0]
        for axes, device in zip(panels, devices, strict=True):
            _draw(axes, device)
        found = {
            label: one
            for axes in panels
            for one, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        handles = {role: found[role] for role in _ROLE_COLOURS if role in found}
        figure.legend(handles.values(), handles, loc="outside lower center", ncol=4, **LEGEND)
    return figure


def _draw(axes: Axes, device: DevicePeak) -> None:
    roles = [role for role in _ROLE_COLOURS if any(point.parts.get(role) for point in device.curve)]
    times = [point.seconds for point in device.curve]
    sizes = [[point.parts.get(role, 0) for point in device.curve] for role in roles]
    colors = [_ROLE_COLOURS[role] for role in roles]
    axes.stackplot(times, sizes, labels=roles, colors=colors, step="post", linewidth=0, alpha=0.8)
    at, size = device.at_seconds or 0.0, device.size_bytes
    label, colour = "peak", PEAK
    if device.ran_out:
        label, colour = "out of memory", OUT_OF_MEMORY
    axes.axvline(at, color=colour, linestyle="--", linewidth=1)
    is_late = at > max(times) / 2
    axes.annotate(
        f"{label} {format_bytes(size)}",
        (at, size),
        (-4 if is_late else 4, 2),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize="small",
        color=colour,
    )
    axes.set_title(title(device), loc="left", fontsize="small")
    axes.set(
        xlim=(0, max(times) or 1),
        ylim=(0, 1.15 * max(size, *map(sum, zip(*sizes, strict=True)), 1)),
    )
    count_bytes(axes.yaxis)
    axes.xaxis.set_major_formatter(
        lambda seconds, _: format_seconds(seconds) if seconds > 0 else "0"
    )
    axes.tick_params(labelsize="x-small")
