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
from ipygpumem.units import format_bytes, format_change, format_seconds, whole

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


def session(
    cells: Collection[CellRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw memory over computing time: a panel per device, with cells and their
    experiments above.
    """
    last_cells, number = _last_records(cells, last, "cell", 2000)
    spans = _spans(last_cells)
    seconds = spans[-1].end
    title = ["memory over the session", number, f"{format_seconds(seconds)} of computing"]
    headlines = []
    uses_of_devices = []
    for name in _devices_in_use(last_cells, device):
        uses = _uses_of(spans, name)
        uses_of_devices.append(uses)
        headlines.append(_use_headline(name, uses))
    with rc_context(style()):
        panel_height = 1.8 if len(headlines) == 1 else 1.4
        heights = [0.4, *[panel_height] * len(headlines)]
        height = sum(heights) + 0.4 * len(headlines) + 1.2
        figure = Picture(height, [SEPARATOR.join(title), *headlines])
        strip, *panels = figure.subplots(len(heights), height_ratios=heights, sharex=True)
        strip.set(xlim=(0, seconds or 1), ylim=(2, 0), yticks=[], frame_on=False)
        strip.tick_params(axis="x", length=0, labelbottom=False)
        _draw_experiment_strip(strip, spans)
        _draw_cell_strip(strip, spans)
        for axes, uses, headline in zip(panels, uses_of_devices, headlines, strict=True):
            axes.set_title(headline, loc="left", fontsize="small")
            _draw_use_over_time(axes, uses)
        _label_time(panels[-1])
        _add_legend(figure, panels, columns=4)
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
    """Return the cells that used a device."""
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
    """Return the label of a tick, without zeros after the last digit that matters."""
    if seconds <= 0:
        return "0"
    return format_seconds(seconds).replace(".00 s", " s").replace(" min 0 s", " min")


_LETTER = 0.01
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
    return float(_LETTER * end)


def _draw_cell_strip(axes: Axes, spans: Sequence[CellSpan]) -> None:
    """Draw the cells as pieces of one row, with their numbers where there is room; a failed one has
    a cross.
    """
    pieces = [(span.begin, span.end - span.begin) for span in spans]
    axes.broken_barh(pieces, (1, 1), facecolors=_CELL_SHADES)
    least = 3 * _letter_width(axes)
    for cell, begin, end in spans:
        if end - begin > least:
            text = _cell_name(cell)
            if not cell.success:
                text = f"× {text}"
            axes.text((begin + end) / 2, 1.5, text, ha="center", **_STRIP_TEXT)


def _draw_use_over_time(axes: Axes, uses: Sequence[CellUse]) -> None:
    """Draw each cell's use before it until it ends, then the use after it: the time of the change
    is unknown.
    """
    seconds: list[float] = []
    sizes: list[int] = []
    peaks: list[int] = []
    for span, usage in uses:
        earlier = sizes[-1] if sizes else 0
        seconds += [span.begin, span.begin, span.end, span.end]
        sizes += [earlier, usage.before_bytes, usage.before_bytes, usage.after_bytes]
        peaks += [earlier, usage.peak_bytes, usage.peak_bytes, usage.after_bytes]
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


def experiments(
    records: Collection[ExperimentRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw experiments in rows, the oldest on top: the time of each, and its memory
    on each device.
    """
    shown, title = _last_records(records, last, "experiment", 20, 40)
    device_names = _devices_in_use(shown, device)
    names = [shorten(run.label, 28) for run in numbered(shown)]
    times = list(map(_time_label, shown))
    lines = []
    for record, name, time in zip(shown, names, times, strict=True):
        memory = [f"{_device_label(each)} {_peak_and_kept(record, each)}" for each in device_names]
        lines.append(SEPARATOR.join([name, time, *memory]))
    columns = ["time", *map(_device_label, device_names)]
    height = 0.5 * len(shown) + 1.3
    width = max(9, 2.5 * len(columns))
    with rc_context(style()):
        figure = Picture(height, [title, *lines], width)
        panels = figure.subplots(1, len(columns), sharey=True)
        _draw_times(panels[0], shown, names, times)
        for axes, name in zip(panels[1:], device_names, strict=True):
            _draw_memory_of_experiments(axes, shown, name)
        for axes, column in zip(panels, columns, strict=True):
            axes.set_title(column, loc="left", fontsize="small")
            axes.margins(x=0.4)
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


def _draw_times(
    axes: Axes, shown: Sequence[ExperimentRecord], names: Sequence[str], times: Sequence[str]
) -> None:
    """Draw the time of each experiment, labelled with its name and parameters."""
    rows = range(len(shown))
    seconds = [record.duration_seconds for record in shown]
    bars = axes.barh(rows, seconds, 0.6, color="gray")
    axes.bar_label(bars, times, padding=3, fontsize="x-small")
    labels = []
    for record, name in zip(shown, names, strict=True):
        parameters = [f"{key}={value}" for key, value in record.parameters.items()]
        text = shorten(", ".join(parameters), 28)
        labels.append(f"{name}\n{text}".rstrip())
    axes.set_yticks(rows, labels, size="x-small")
    axes.set_ylim(len(shown) - 0.5, -0.5)


def _draw_memory_of_experiments(axes: Axes, shown: Sequence[ExperimentRecord], device: str) -> None:
    """Draw peaks as wide bars, and on them the memory that was kept and that the end freed."""
    peaks = []
    kept_bytes = []
    freed_bytes = []
    labels = []
    for record in shown:
        usage = usage_on(record.usages, device)
        if usage is None:
            peaks.append(0)
            kept_bytes.append(0)
        else:
            peaks.append(usage.peak_delta_bytes)
            kept_bytes.append(usage.delta_bytes)
        freed_bytes.append(max(0, record.freed.get(device, 0)))
        labels.append(_peak_and_kept(record, device).replace(", ", "\n"))
    rows = range(len(shown))
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


def devices(reconciliations: Sequence[Reconciliation], *, device: str | None = None) -> Picture:
    """Draw each device's memory as one stacked bar, with its parts' names and sizes below it."""
    names = [reconciliation.device for reconciliation in reconciliations]
    wanted = _selected_devices(names, device, "is not known")
    shown = [item for item in reconciliations if item.device in wanted]
    headlines = []
    summary = ["parts of the memory"]
    heights: list[float] = []
    for item in shown:
        size = format_bytes(item.total_bytes)
        headline = f"{_device_label(item.device)}{SEPARATOR}{size}, {clean(item.basis)}"
        headlines.append(headline)
        labels = list(map(_part_label, _parts_with_label(item)))
        summary.append(f"{headline}: {', '.join(labels)}")
        legend_lines = math.ceil(max(1, len(labels)) / 2)  # of two columns
        heights += [0.4, 0.18 * legend_lines]
    height = sum(heights) + 0.9 * len(shown) + 0.4
    with rc_context(style()):
        figure = Picture(height, summary)
        grid = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
        bars = grid[::2, 0]
        legends = grid[1::2, 0]
        for axes, legend, item, headline in zip(bars, legends, shown, headlines, strict=True):
            axes.set_title(shorten(headline, 120), loc="left", fontsize="small")
            _draw_parts(axes, item)
            legend.axis("off")
            legend.legend(*axes.get_legend_handles_labels(), loc="upper left", ncol=2, **LEGEND)
    return figure


def _parts_with_label(reconciliation: Reconciliation) -> list[Part]:
    """Return the parts that have a name below the bar: those of unknown size, too."""
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
    """Return a part's colour; free memory is empty, unknown memory hatched."""
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
    records: Collection[T], last: int | None, what: str, default: int, most: int = 10**9
) -> tuple[list[T], str]:
    """Return the last records, and a text with their number and how many are left out.

    Args:
        records: all records, the oldest first.
        last: the number that the user wants; None for ``default``.
        what: the noun for a record.
        default: the number without a wish of the user.
        most: the largest number that a picture shows.
    """
    try:
        wanted = default if last is None else whole(last)
    except UnitError as error:
        raise PlotError(f"last (-n): {error}") from None
    if not records:
        raise PlotError(f"there is nothing to draw: no {what} has finished yet")
    number = min(wanted, most)
    shown = list(records)[-number:]
    text = count(len(shown), what)
    left_out = len(records) - number
    if left_out > 0:
        text += f" ({left_out} earlier left out)"
    return shown, text


def _devices_in_use(
    records: Iterable[CellRecord | ExperimentRecord], wanted: str | None
) -> list[str]:
    """Return the devices in use, the host first; only the ``wanted`` ones if given."""
    usages = list[Usage]()
    for record in records:
        usages += filter(is_worth_reporting, record.usages)
    return _selected_devices(devices_of(usages), wanted, "was not in use")


def _selected_devices(devices: Iterable[str], wanted: str | None, why_not: str) -> list[str]:
    """Return the devices selected by ``wanted``: ``RAM``, ``cuda:0``, ``cuda`` for all of its kind;
    None for all.
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
