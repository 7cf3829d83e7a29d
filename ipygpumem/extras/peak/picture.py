"""Draws the bytes over the time of a ``%%peak``, stacked by role."""

from __future__ import annotations

from typing import Any

from ipygpumem.errors import PlotError, not_installed
from ipygpumem.extras.peak.records import DevicePeak, PeakRecord
from ipygpumem.extras.peak.words import headline, title
from ipygpumem.report.colours import OUT_OF_MEMORY, PEAK
from ipygpumem.report.matplotlib_picture import LEGEND, Picture, put_ticks_at_bytes, style
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
    """Return a figure with a panel for each device; the peak, or the failure, is marked.

    Raises:
        PlotError: no device has a curve.
    """
    devices = [device for device in record.devices if device.curve and device.size_bytes]
    if not devices:
        raise PlotError("there is nothing to draw: no tensor was followed")
    with rc_context(style()):
        lines = [f"memory over {format_seconds(record.duration_seconds)}", *map(headline, devices)]
        figure = Picture(2.4 * len(devices) + 0.8, lines)
        panels = figure.subplots(len(devices), squeeze=False)[:, 0]
        handles_by_role = dict[str, Any]()
        for axes, device in zip(panels, devices, strict=True):
            highest_bytes = _draw_roles(axes, device)
            _mark_moment(axes, device)
            _format_axes(axes, device, highest_bytes)
            handles, roles = axes.get_legend_handles_labels()
            handles_by_role.update(zip(roles, handles, strict=True))
        roles_shown = [role for role in _ROLE_COLOURS if role in handles_by_role]
        handles_shown = [handles_by_role[role] for role in roles_shown]
        figure.legend(handles_shown, roles_shown, loc="outside lower center", ncol=4, **LEGEND)
    return figure


def _draw_roles(axes: Axes, device: DevicePeak) -> int:
    """Draw the bytes of each role over time, stacked on each other; return the highest sum."""
    roles = [role for role in _ROLE_COLOURS if any(point.parts.get(role) for point in device.curve)]
    times = [point.seconds for point in device.curve]
    sizes = [[point.parts.get(role, 0) for point in device.curve] for role in roles]
    colors = [_ROLE_COLOURS[role] for role in roles]
    axes.stackplot(times, sizes, labels=roles, colors=colors, step="post", linewidth=0, alpha=0.8)
    return max(map(sum, zip(*sizes, strict=True)), default=0)


def _mark_moment(axes: Axes, device: DevicePeak) -> None:
    """Draw a line at the peak or the failure, with the bytes in use at that time."""
    label = "peak"
    colour = PEAK
    if device.ran_out:
        label = "out of memory"
        colour = OUT_OF_MEMORY
    seconds = device.at_seconds or 0.0
    axes.axvline(seconds, color=colour, linestyle="--", linewidth=1)
    last_second = max(point.seconds for point in device.curve)
    # The text stands to the right of the line, in the second half of the picture to its left.
    side = "left"
    points_to_the_right = 4
    if seconds > last_second / 2:
        side = "right"
        points_to_the_right = -4
    axes.annotate(
        f"{label} {format_bytes(device.size_bytes)}",
        (seconds, device.size_bytes),
        (points_to_the_right, 2),
        textcoords="offset points",
        ha=side,
        fontsize="small",
        color=colour,
    )


def _format_axes(axes: Axes, device: DevicePeak, highest_bytes: int) -> None:
    """Set the title, the limits and the ticks; ``highest_bytes`` is the top of the curves."""
    axes.set_title(title(device), loc="left", fontsize="small")
    last_second = max(point.seconds for point in device.curve)
    axes.set_xlim(0, last_second or 1)
    axes.set_ylim(0, 1.15 * max(device.size_bytes, highest_bytes, 1))
    put_ticks_at_bytes(axes.yaxis)
    axes.xaxis.set_major_formatter(
        lambda seconds, _: format_seconds(seconds) if seconds > 0 else "0"
    )
    axes.tick_params(labelsize="x-small")
