"""Draws records as matplotlib figures. matplotlib is optional and slow to import: import this
module only to draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ipygpumem.errors import PlotError, UnitError, not_installed
from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
from ipygpumem.oom_texts import TYPES_IN_RECORDS
from ipygpumem.probes.accelerators import parse_device
from ipygpumem.records import CellRecord, ExperimentRecord, Usage, devices_of, usage_on
from ipygpumem.report.colours import IN_USE, OUT_OF_MEMORY, PEAK
from ipygpumem.report.devices import device_label, is_worth_reporting, size_or_unknown
from ipygpumem.report.history import numbered
from ipygpumem.report.layout import SEPARATOR
from ipygpumem.report.matplotlib_picture import LEGEND, Picture, put_ticks_at_bytes, style
from ipygpumem.report.words import clean, count, shorten
from ipygpumem.units import checked_integer, format_bytes, format_change, format_seconds

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
except ImportError:
    raise not_installed(PlotError, "pictures need", "matplotlib") from None

T = TypeVar("T")


# -- the session --------------------------------------------------------------------------------


class CellSpan(NamedTuple):
    """A cell with its position on the axis of computing time, in seconds."""

    cell: CellRecord
    begin: float
    end: float


class CellUse(NamedTuple):
    """A cell's use of one device, with the cell's position on the axis of computing time."""

    span: CellSpan
    usage: Usage


class UsePanel(NamedTuple):
    """The panel of one device in a picture of the session."""

    headline: str
    uses: list[CellUse]


def session(
    cells: Collection[CellRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw memory over computing time: a panel per device, with cells and their experiments above.

    Args:
        cells: the records of cells, the oldest first.
        device: the devices that the user wants, as for ``_selected_devices``.
        last: the number of cells that the user wants; None for the usual number.

    Raises:
        PlotError: there is nothing to draw.
    """
    last_cells, number_text = _last_records(cells, last, "cell", default=2000)
    spans = _spans(last_cells)
    time = format_seconds(spans[-1].end)
    title = SEPARATOR.join(["memory over the session", number_text, f"{time} of computing"])
    panels = []
    for name in _devices_in_use(last_cells, device):
        uses = _uses_of(spans, name)
        panels.append(UsePanel(_use_headline(name, uses), uses))
    with rc_context(style()):
        return _session_picture(title, spans, panels)


def _session_picture(title: str, spans: Sequence[CellSpan], panels: Sequence[UsePanel]) -> Picture:
    """Draw the cells in a narrow strip, and below it a panel for each device."""
    strip_height = 0.4
    panel_height = 1.8 if len(panels) == 1 else 1.4
    heights = [strip_height, *[panel_height] * len(panels)]
    height = sum(heights) + 0.4 * len(panels) + 1.2  # with the panels' titles, and the margins
    figure = Picture(height, [title, *(panel.headline for panel in panels)])
    strip, *axes_of_panels = figure.subplots(len(heights), height_ratios=heights, sharex=True)
    # Experiments are from 0 to 1, cells from 1 to 2, from the top to the bottom.
    strip.set(xlim=(0, spans[-1].end or 1), ylim=(2, 0), yticks=[], frame_on=False)
    strip.tick_params(axis="x", length=0, labelbottom=False)
    _draw_experiment_strip(strip, spans)
    _draw_cell_strip(strip, spans)
    for axes, panel in zip(axes_of_panels, panels, strict=True):
        axes.set_title(panel.headline, loc="left", fontsize="small")
        _draw_use_over_time(axes, panel.uses)
    _label_time(axes_of_panels[-1])
    _add_legend(figure, axes_of_panels, columns=4)
    return figure


def _spans(cells: Iterable[CellRecord]) -> list[CellSpan]:
    """Return the cells one after the other, in the order of their start and without pauses."""
    spans = []
    begin = 0.0
    for cell in sorted(cells, key=lambda cell: cell.started_at):
        end = begin + max(0.0, cell.duration_seconds)
        spans.append(CellSpan(cell, begin, end))
        begin = end
    return spans


def _uses_of(spans: Iterable[CellSpan], device: str) -> list[CellUse]:
    """Return the cells that used a device, each with its usage."""
    uses = []
    for span in spans:
        usage = usage_on(span.cell.usages, device)
        if usage is not None:
            uses.append(CellUse(span, usage))
    return uses


def _label_time(axes: Axes) -> None:
    """Label the axis of computing time."""
    axes.xaxis.set_major_formatter(_tick)
    axes.tick_params(labelsize="x-small")
    axes.set_xlabel("computing time, without pauses between cells", fontsize="small")


def _tick(seconds: float, _position: float) -> str:
    """Return the label of a tick, without zeros at its end: ``2 s`` for 2.00 s, ``3 min`` for 3 min
    0 s.
    """
    if seconds <= 0:
        return "0"
    return format_seconds(seconds).replace(".00 s", " s").replace(" min 0 s", " min")


_LETTER_SHARE = 0.01
"""Upper bound of a letter's share of the width."""
_CELL_SHADES = [(0.5, 0.5, 0.5, 0.2), (0.5, 0.5, 0.5, 0.08)]
"""Alternating greys, which show on light and dark pages."""
_STRIP_TEXT: dict[str, Any] = {
    "va": "center",
    "fontsize": "x-small",
    "clip_on": True,
    "in_layout": False,
}


def _draw_experiment_strip(axes: Axes, spans: Sequence[CellSpan]) -> None:
    """Draw a bar for each experiment, with its name where there is room."""
    for name, group in itertools.groupby(spans, lambda span: span.cell.experiment):
        if name is None:
            continue
        spans_of_experiment = list(group)
        begin = spans_of_experiment[0].begin
        width = spans_of_experiment[-1].end - begin
        (bar,) = axes.barh(0.5, width, 0.8, begin, facecolor="C4", alpha=0.3, linewidth=0)
        letters = int(width / _letter_width(axes)) - 1
        if letters > 2:
            label = shorten(name, letters)
            text = axes.annotate(
                label, (begin, 0.5), (3, 0), textcoords="offset points", **_STRIP_TEXT
            )
            text.set_clip_path(bar)


def _letter_width(axes: Axes) -> float:
    """Return an upper bound of a letter's width on an axis that begins at 0."""
    _, end = axes.get_xlim()
    return float(_LETTER_SHARE * end)


def _draw_cell_strip(axes: Axes, spans: Sequence[CellSpan]) -> None:
    """Draw the cells as pieces of one row, with their numbers where there is room; a failed one has
    a cross.
    """
    pieces = [(span.begin, span.end - span.begin) for span in spans]
    axes.broken_barh(pieces, (1, 1), facecolors=_CELL_SHADES)
    least_width = 3 * _letter_width(axes)
    for cell, begin, end in spans:
        if end - begin > least_width:
            text = _cell_name(cell)
            if not cell.success:
                text = f"× {text}"
            axes.text((begin + end) / 2, 1.5, text, ha="center", **_STRIP_TEXT)


def _draw_use_over_time(axes: Axes, uses: Sequence[CellUse]) -> None:
    """Draw the memory in use over time as an area, and on it the peaks within cells.

    When a cell's memory changed is unknown. So a cell has the use before it until its end, and
    there the curve jumps to the use after it; its peak is a bar over the whole cell.
    """
    seconds: list[float] = []
    sizes: list[int] = []
    peaks: list[int] = []
    for span, usage in uses:
        before_begin = sizes[-1] if sizes else 0
        seconds += [span.begin, span.begin, span.end, span.end]
        sizes += [before_begin, usage.before_bytes, usage.before_bytes, usage.after_bytes]
        peaks += [before_begin, usage.peak_bytes, usage.peak_bytes, usage.after_bytes]
    axes.fill_between(seconds, sizes, color=IN_USE, alpha=0.5, linewidth=0, label="in use")
    axes.plot(seconds, sizes, color=IN_USE, linewidth=1.2)
    axes.fill_between(
        seconds, sizes, peaks, color=PEAK, alpha=0.75, linewidth=0, label="peak within a cell"
    )
    _draw_reserved(axes, uses)
    for span, _ in uses:
        if _is_out_of_memory(span.cell):
            axes.axvline(
                span.end, color=OUT_OF_MEMORY, linestyle="--", linewidth=1, label="out of memory"
            )
    axes.set_ylim(0, 1.1 * max(peaks) or 1)
    put_ticks_at_bytes(axes.yaxis)


def _draw_reserved(axes: Axes, uses: Sequence[CellUse]) -> None:
    """Draw the memory reserved by the device's allocator, where it is known."""
    seconds: list[float] = []
    sizes: list[int] = []
    for span, usage in uses:
        if usage.reserved_bytes:
            seconds += [span.begin, span.end]
            sizes += [usage.reserved_bytes, usage.reserved_bytes]
    if seconds:
        axes.plot(seconds, sizes, ":", color="gray", linewidth=1, label="reserved by the allocator")


def _is_out_of_memory(cell: CellRecord) -> bool:
    """Return True if a cell ran out of memory, also if another error came of it."""
    if cell.error in TYPES_IN_RECORDS:
        return True
    return cell.recovery is not None and cell.recovery.kind == "oom"


def _use_headline(device: str, uses: Sequence[CellUse]) -> str:
    """Return a device's use at the end, its peak, and its size."""
    highest = max(uses, key=lambda use: use.usage.peak_bytes)
    last = uses[-1].usage
    peak = format_bytes(highest.usage.peak_bytes)
    words = [
        _device_label(device),
        f"{format_bytes(last.after_bytes)} in use at the end",
        f"peak {peak} in cell {_cell_name(highest.span.cell)}",
    ]
    if last.total_bytes:
        words.append(f"total {format_bytes(last.total_bytes)}")
    return SEPARATOR.join(words)


# -- experiments --------------------------------------------------------------------------------


class ExperimentRow(NamedTuple):
    """The row of one experiment."""

    record: ExperimentRecord
    name: str
    """Its label, and its number among runs with the same label."""
    time: str
    """The time it took, and how often it ran out of memory."""

    def summary(self, devices: Iterable[str]) -> str:
        """Return the row in words."""
        parts = [self.name, self.time]
        for device in devices:
            parts += [f"{_device_label(device)} {_peak_and_kept(self.record, device)}"]
        return SEPARATOR.join(parts)


def experiments(
    records: Collection[ExperimentRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw experiments in rows, the oldest on top: the time of each, and its memory
    on each device.

    Args:
        records: the records of experiments, the oldest first.
        device: the devices that the user wants, as for ``_selected_devices``.
        last: the number of experiments that the user wants; None for the usual number.

    Raises:
        PlotError: there is nothing to draw.
    """
    shown, title = _last_records(records, last, "experiment", default=20, upper_bound=40)
    device_names = _devices_in_use(shown, device)
    rows = []
    for record, run in zip(shown, numbered(shown), strict=True):
        rows.append(ExperimentRow(record, shorten(run.label, 28), _time_label(record)))
    with rc_context(style()):
        return _experiments_picture(title, rows, device_names)


def _experiments_picture(
    title: str, rows: Sequence[ExperimentRow], devices: Sequence[str]
) -> Picture:
    """Draw the times of experiments, and next to them a panel with their memory on each device."""
    columns = ["time", *map(_device_label, devices)]
    height = 0.5 * len(rows) + 1.3
    width = max(9, 2.5 * len(columns))
    lines = [row.summary(devices) for row in rows]
    figure = Picture(height, [title, *lines], width)
    panels = figure.subplots(1, len(columns), sharey=True)
    _draw_times(panels[0], rows)
    records = [row.record for row in rows]
    for axes, device in zip(panels[1:], devices, strict=True):
        _draw_memory_of_experiments(axes, records, device)
    for axes, column in zip(panels, columns, strict=True):
        axes.set_title(column, loc="left", fontsize="small")
        axes.margins(x=0.4)  # room for the labels to the right of the bars
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    _add_legend(figure, panels[-1:], columns=3)
    return figure


def _time_label(record: ExperimentRecord) -> str:
    """Return an experiment's time, and how often it ran out of memory."""
    time = format_seconds(record.duration_seconds)
    if record.ooms:
        return f"{time}, {record.ooms} OOM"
    return time


def _draw_times(axes: Axes, rows: Sequence[ExperimentRow]) -> None:
    """Draw the time of each experiment, labelled with its name and parameters."""
    positions = range(len(rows))
    seconds = [row.record.duration_seconds for row in rows]
    bars = axes.barh(positions, seconds, 0.6, color="gray")
    axes.bar_label(bars, [row.time for row in rows], padding=3, fontsize="x-small")
    labels = []
    for row in rows:
        parameters = [f"{key}={value}" for key, value in row.record.parameters.items()]
        text = shorten(", ".join(parameters), 28)
        labels.append(f"{row.name}\n{text}".rstrip())
    axes.set_yticks(positions, labels, size="x-small")
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first one on top


def _draw_memory_of_experiments(
    axes: Axes, records: Sequence[ExperimentRecord], device: str
) -> None:
    """Draw the peaks of experiments on a device as wide bars, and on each a narrow one: the memory
    that was kept, and next to it the memory that the end freed.
    """
    peaks = []
    kept_bytes = []
    freed_bytes = []
    labels = []
    for record in records:
        usage = usage_on(record.usages, device)
        if usage is None:
            peaks.append(0)
            kept_bytes.append(0)
        else:
            peaks.append(usage.peak_delta_bytes)
            kept_bytes.append(usage.delta_bytes)
        freed_bytes.append(max(0, record.freed.get(device, 0)))
        labels.append(_peak_and_kept(record, device).replace(", ", "\n"))
    rows = range(len(records))
    bars = axes.barh(rows, peaks, 0.7, color=PEAK, alpha=0.75, label="peak above the start")
    axes.barh(rows, freed_bytes, 0.35, kept_bytes, color="C2", label="freed at the end")
    axes.barh(rows, kept_bytes, 0.35, color=IN_USE, label="kept after the end")
    axes.bar_label(bars, labels, padding=3, fontsize="x-small")


def _peak_and_kept(record: ExperimentRecord, device: str) -> str:
    """Return an experiment's peak and the memory that it kept on a device, in words."""
    usage = usage_on(record.usages, device)
    if usage is None:
        return "not in use"
    return f"peak {format_change(usage.peak_delta_bytes)}, kept {format_change(usage.delta_bytes)}"


# -- devices ------------------------------------------------------------------------------------


_BAR_HEIGHT = 0.4
_LEGEND_LINE_HEIGHT = 0.18
_LEGEND_COLUMNS = 2


def devices(reconciliations: Sequence[Reconciliation], *, device: str | None = None) -> Picture:
    """Draw each device's memory as one stacked bar, with its parts' names and sizes below it.

    Args:
        reconciliations: the parts of each device's memory.
        device: the devices that the user wants, as for ``_selected_devices``.

    Raises:
        PlotError: there is no such device.
    """
    names = [reconciliation.device for reconciliation in reconciliations]
    wanted = _selected_devices(names, device, "is not known")
    shown = [item for item in reconciliations if item.device in wanted]
    with rc_context(style()):
        return _devices_picture(shown)


def _devices_picture(reconciliations: Sequence[Reconciliation]) -> Picture:
    """Draw two rows for each device: the bar, and the legend of its parts."""
    summary = ["parts of the memory"]
    heights: list[float] = []
    for item in reconciliations:
        labels = list(map(_part_label, _parts_with_label(item)))
        summary.append(f"{_device_headline(item)}: {', '.join(labels)}")
        legend_lines = math.ceil(max(1, len(labels)) / _LEGEND_COLUMNS)
        heights += [_BAR_HEIGHT, _LEGEND_LINE_HEIGHT * legend_lines]
    height = sum(heights) + 0.9 * len(reconciliations) + 0.4
    figure = Picture(height, summary)
    grid = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
    bars = grid[::2, 0]
    legends = grid[1::2, 0]
    for axes, legend, item in zip(bars, legends, reconciliations, strict=True):
        axes.set_title(shorten(_device_headline(item), 120), loc="left", fontsize="small")
        _draw_parts(axes, item)
        legend.axis("off")
        handles, labels = axes.get_legend_handles_labels()
        legend.legend(handles, labels, loc="upper left", ncol=_LEGEND_COLUMNS, **LEGEND)
    return figure


def _device_headline(reconciliation: Reconciliation) -> str:
    """Return a device's name, the size of its memory, and the source of that figure."""
    size = format_bytes(reconciliation.total_bytes)
    label = _device_label(reconciliation.device)
    return f"{label}{SEPARATOR}{size}, {clean(reconciliation.basis)}"


def _parts_with_label(reconciliation: Reconciliation) -> list[Part]:
    """Return the parts that have a name below the bar: all but empty ones, also parts of unknown
    size.
    """
    return [part for part in reconciliation.parts if part.size_bytes != 0]


_PART_COLOURS = [position for position in range(20) if position not in (2, 3, 6, 7)]
"""Positions in matplotlib's colours of parts, except the oranges and reds: peaks and failures."""


def _draw_parts(axes: Axes, reconciliation: Reconciliation) -> None:
    """Draw the parts of a device as one stacked bar."""
    left = 0
    for index, part in enumerate(_parts_with_label(reconciliation)):
        width = part.size_bytes or 0
        axes.barh(0, width, 1, left, label=_part_label(part), **_part_style(part, index))
        left += width
    axes.set(xlim=(0, reconciliation.total_bytes or 1), ylim=(-0.5, 0.5), yticks=[])
    put_ticks_at_bytes(axes.xaxis)


def _part_style(part: Part, index: int) -> dict[str, Any]:
    """Return the options of matplotlib for a part's bar; free memory is empty, unknown memory
    hatched.

    Args:
        part: the part.
        index: its position among the parts, which decides its colour.
    """
    if part.name == "free":
        return {"facecolor": "none", "edgecolor": "gray", "hatch": ""}
    if part.name.startswith("unknown"):
        return {"facecolor": "none", "edgecolor": "gray", "hatch": "xxx"}
    return {"color": colormaps["tab20"](_PART_COLOURS[index % len(_PART_COLOURS)])}


def _part_label(part: Part) -> str:
    """Return the name and the size of a part."""
    return f"{shorten(part.name, 40)} {size_or_unknown(part.size_bytes)}"


# -- shared -------------------------------------------------------------------------------------


def _add_legend(figure: Picture, panels: Iterable[Axes], *, columns: int) -> None:
    """Add one legend below all panels, in which each label occurs once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        handles |= zip(labels, lines, strict=True)
    figure.legend(handles.values(), handles, loc="outside lower center", ncol=columns, **LEGEND)


def _last_records(
    records: Collection[T], last: int | None, noun: str, *, default: int, upper_bound: int = 10**9
) -> tuple[list[T], str]:
    """Return the last records, and a text with their number: ``20 cells (5 earlier left out)``.

    Args:
        records: all records, the oldest first.
        last: the number that the user wants; None for ``default``.
        noun: the word for a record.
        default: the number if the user gives none.
        upper_bound: the largest number that a picture shows.

    Raises:
        PlotError: there are no records, or ``last`` is no number of them.
    """
    try:
        wanted = default if last is None else checked_integer(last)
    except UnitError as error:
        raise PlotError(f"last (-n): {error}") from None
    if not records:
        raise PlotError(f"there is nothing to draw: no {noun} has finished yet")
    number = min(wanted, upper_bound)
    shown = list(records)[-number:]
    text = count(len(shown), noun)
    left_out = len(records) - number
    if left_out > 0:
        text += f" ({left_out} earlier left out)"
    return shown, text


def _devices_in_use(
    records: Iterable[CellRecord | ExperimentRecord], wanted: str | None
) -> list[str]:
    """Return the devices in use, the host first; only the ``wanted`` ones, as for
    ``_selected_devices``.
    """
    usages = list[Usage]()
    for record in records:
        usages += filter(is_worth_reporting, record.usages)
    return _selected_devices(devices_of(usages), wanted, "was not in use")


def _selected_devices(devices: Iterable[str], wanted: str | None, why_not: str) -> list[str]:
    """Return the devices that the user wants.

    Args:
        devices: the devices that there are.
        wanted: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind; None for all.
        why_not: the end of the error's sentence on a device that is not there.

    Raises:
        PlotError: no device is left.
    """
    existing = list(dict.fromkeys(devices))
    selected = []
    for name in existing:
        kind = name.partition(":")[0]
        if wanted is None or parse_device(wanted, known=existing) in (name, kind):
            selected.append(name)
    if not selected:
        labels = [clean(device_label(device)) for device in existing]
        names = ", ".join(labels) or "none"
        raise PlotError(f"device {clean(str(wanted))!r} {why_not}; there are: {names}")
    return selected


def _cell_name(cell: CellRecord) -> str:
    """Return a cell's number, or a dot for one that has none."""
    if cell.execution_count is None:
        return "·"
    return str(cell.execution_count)


def _device_label(device: str) -> str:
    """Return a device's name, short enough for a picture."""
    return shorten(device_label(device), 24)
