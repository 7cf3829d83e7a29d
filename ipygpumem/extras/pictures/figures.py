"""Draws records as matplotlib figures. matplotlib is optional and slow to import: import this
module only to draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from ipygpumem.errors import PlotError, UnitError
from ipygpumem.inventory.breakdown import Part, Reconciliation
from ipygpumem.probes.accelerators import parse_device
from ipygpumem.records import CellRecord, ExperimentRecord, Usage, devices_of, usage_on
from ipygpumem.report.history import numbered
from ipygpumem.report.layout import SEPARATOR, clean, count, device_label, in_use, shorten
from ipygpumem.report.picture import LEGEND, NO_FORMULAS, Picture, count_bytes
from ipygpumem.units import format_bytes, format_change, format_seconds, whole

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
except ImportError:
    raise PlotError(
        "pictures need matplotlib, which is not installed: pip install matplotlib"
    ) from None

T = TypeVar("T")

_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError", "_ArrayMemoryError"})


# -- the session --------------------------------------------------------------------------------

_Uses = Sequence[tuple[CellRecord, float, float, Usage]]
"""Cells, with their start and end on the time axis, and their use of one device."""


def session(
    cells: Collection[CellRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw memory over computing time: a panel per device, with cells and their
    experiments above.
    """
    chosen, number = _last(cells, last, "cell", 2000)
    shown = sorted(chosen, key=lambda cell: cell.started_at)
    ends = list(itertools.accumulate(max(0.0, cell.duration_seconds) for cell in shown))
    spans = list(zip(shown, [0.0, *ends[:-1]], ends, strict=True))
    uses = {
        name: [
            (*span, usage)
            for span in spans
            if (usage := usage_on(span[0].usages, name)) is not None
        ]
        for name in _devices(shown, device)
    }
    headlines = [_use_headline(name, own) for name, own in uses.items()]
    title = (
        f"memory over the session{SEPARATOR}{number}{SEPARATOR}{format_seconds(ends[-1])} of "
        f"computing"
    )
    with rc_context(NO_FORMULAS):
        heights = [0.4, *[1.8 if len(uses) == 1 else 1.4] * len(uses)]
        figure = Picture(sum(heights) + 0.4 * len(uses) + 1.2, [title, *headlines])
        strip, *panels = figure.subplots(len(heights), height_ratios=heights, sharex=True)
        strip.set(xlim=(0, ends[-1] or 1), ylim=(2, 0), yticks=[], frame_on=False)
        strip.tick_params(axis="x", length=0, labelbottom=False)
        _draw_strip(strip, spans)
        for axes, own, headline in zip(panels, uses.values(), headlines, strict=True):
            axes.set_title(headline, loc="left", fontsize="small")
            _draw_uses(axes, own)
        panels[-1].xaxis.set_major_formatter(_tick)
        panels[-1].tick_params(labelsize="x-small")
        panels[-1].set_xlabel("computing time, without pauses between cells", fontsize="small")
        handles = {
            label: one
            for axes in panels
            for one, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncol=4, **LEGEND)
    return figure


def _tick(seconds: float, _place: int | None) -> str:
    return (
        format_seconds(seconds).replace(".00 s", " s").replace(" min 0 s", " min")
        if seconds > 0
        else "0"
    )


_LETTER = 0.01
"""Upper bound of a letter's share of the width."""


def _draw_strip(axes: Axes, spans: Sequence[tuple[CellRecord, float, float]]) -> None:
    """Draw a row of experiments and one of cells, numbered where there is room."""
    words: dict[str, Any] = {
        "va": "center",
        "fontsize": "x-small",
        "clip_on": True,
        "in_layout": False,
    }
    for name, group in itertools.groupby(spans, lambda span: span[0].experiment):
        if name is not None:
            own = list(group)
            begin, end = own[0][1], own[-1][2]
            (bar,) = axes.barh(
                0.5, end - begin, 0.8, begin, facecolor="C4", alpha=0.3, edgecolor="white"
            )
            letters = int((end - begin) / _LETTER / axes.get_xlim()[1]) - 1
            if letters > 2:
                label = shorten(name, letters)
                axes.annotate(
                    label, (begin, 0.5), (3, 0), textcoords="offset points", **words
                ).set_clip_path(bar)
    axes.broken_barh(
        [(start, end - start) for _, start, end in spans], (1, 1), facecolors=["0.875", "0.95"]
    )
    for cell, start, end in spans:
        if end - start > 3 * _LETTER * axes.get_xlim()[1]:
            text = _name(cell) if cell.success else f"× {_name(cell)}"
            axes.text((start + end) / 2, 1.5, text, ha="center", **words)


def _draw_uses(axes: Axes, uses: _Uses) -> None:
    """Draw each cell's use before it until it ends, then the use after it: the time of the change
    is unknown.
    """
    places: list[float] = []
    sizes: list[int] = []
    peaks: list[int] = []
    for _, start, end, usage in uses:
        earlier = sizes[-1] if sizes else 0
        places += [start, start, end, end]
        sizes += [earlier, usage.before_bytes, usage.before_bytes, usage.after_bytes]
        peaks += [earlier, usage.peak_bytes, usage.peak_bytes, usage.after_bytes]
    axes.fill_between(places, sizes, color="C0", alpha=0.35, linewidth=0, label="in use")
    axes.plot(places, sizes, color="C0", linewidth=1.2)
    axes.fill_between(
        places, sizes, peaks, color="C1", alpha=0.5, linewidth=0, label="peak within a cell"
    )
    reserved = [
        (place, use.reserved_bytes)
        for _, *span, use in uses
        for place in span
        if use.reserved_bytes
    ]
    if reserved:
        axes.plot(
            *zip(*reserved, strict=True),
            ":",
            color="gray",
            linewidth=1,
            label="reserved by the allocator",
        )
    for cell, _, end, _ in uses:
        if cell.error in _OUT_OF_MEMORY or (
            cell.recovery is not None and cell.recovery.kind == "oom"
        ):
            axes.axvline(end, color="tab:red", linestyle="--", linewidth=1, label="out of memory")
    axes.set_ylim(0, 1.1 * max(peaks) or 1)
    count_bytes(axes.yaxis)


def _use_headline(device: str, uses: _Uses) -> str:
    cell, *_, highest = max(uses, key=lambda use: use[3].peak_bytes)
    last = uses[-1][3]
    total = f"{SEPARATOR}total {format_bytes(last.total_bytes)}" if last.total_bytes else ""
    end, peak = (
        format_bytes(last.after_bytes),
        f"{format_bytes(highest.peak_bytes)} in cell {_name(cell)}",
    )
    return f"{_label(device)}{SEPARATOR}{end} in use at the end{SEPARATOR}peak {peak}{total}"


# -- experiments --------------------------------------------------------------------------------


def experiments(
    experiments: Collection[ExperimentRecord], *, device: str | None = None, last: int | None = None
) -> Picture:
    """Draw experiments in rows, the oldest on top: the time of each, and its memory
    on each device.
    """
    shown, title = _last(experiments, last, "experiment", 20, 40)
    devices = _devices(shown, device)
    names = [shorten(run.label, 28) for run in numbered(shown)]
    notes = [
        shorten(", ".join(f"{key}={value}" for key, value in item.parameters.items()), 28)
        for item in shown
    ]
    times = []
    for item in shown:
        time = format_seconds(item.duration_seconds)
        times.append(f"{time}, {item.ooms} OOM" if item.ooms else time)
    lines = [
        SEPARATOR.join(
            [
                name,
                time,
                *(f"{_label(device)} {_peak_and_kept(item, device)}" for device in devices),
            ]
        )
        for item, name, time in zip(shown, names, times, strict=True)
    ]
    with rc_context(NO_FORMULAS):
        figure = Picture(0.5 * len(shown) + 1.3, [title, *lines], max(9, 2.5 * (1 + len(devices))))
        panels = figure.subplots(1, 1 + len(devices), sharey=True)
        rows = range(len(shown))
        bars = panels[0].barh(rows, [item.duration_seconds for item in shown], 0.6, color="gray")
        panels[0].bar_label(bars, times, padding=3, fontsize="x-small")
        labels = [f"{name}\n{note}".rstrip() for name, note in zip(names, notes, strict=True)]
        panels[0].set_yticks(rows, labels, size="x-small")
        panels[0].set_ylim(len(shown) - 0.5, -0.5)
        for axes, name in zip(panels[1:], devices, strict=True):
            _draw_experiments(axes, shown, name)
        for axes, title in zip(panels, ["time", *map(_label, devices)], strict=True):
            axes.set_title(title, loc="left", fontsize="small")
            axes.margins(x=0.4)
            axes.set_xticks([])
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        figure.legend(
            *panels[-1].get_legend_handles_labels(), loc="outside lower center", ncol=3, **LEGEND
        )
    return figure


def _draw_experiments(axes: Axes, shown: Sequence[ExperimentRecord], device: str) -> None:
    """Draw peaks as wide bars, and on them the memory that was kept and that the end freed."""
    usages = [usage_on(item.usages, device) for item in shown]
    kept = [usage.delta_bytes if usage else 0 for usage in usages]
    freed = [max(0, item.freed.get(device, 0)) for item in shown]
    peaks = [usage.peak_delta_bytes if usage else 0 for usage in usages]
    bars = axes.barh(
        range(len(shown)), peaks, 0.7, color="C1", alpha=0.5, label="peak above the start"
    )
    axes.barh(range(len(shown)), freed, 0.35, kept, color="C2", label="freed at the end")
    axes.barh(range(len(shown)), kept, 0.35, color="C0", label="kept after the end")
    words = [_peak_and_kept(item, device).replace(", ", "\n") for item in shown]
    axes.bar_label(bars, words, padding=3, fontsize="x-small")


def _peak_and_kept(item: ExperimentRecord, device: str) -> str:
    usage = usage_on(item.usages, device)
    if usage is None:
        return "not in use"
    return f"peak {format_change(usage.peak_delta_bytes)}, kept {format_change(usage.delta_bytes)}"


# -- devices ------------------------------------------------------------------------------------


def devices(reconciliations: Sequence[Reconciliation], *, device: str | None = None) -> Picture:
    """Draw each device's memory as one stacked bar, with its parts' names and sizes below it."""
    chosen = _chosen((found.device for found in reconciliations), device, "is not known")
    shown = [found for found in reconciliations if found.device in chosen]
    parts = [[part for part in found.parts if part.size_bytes != 0] for found in shown]
    lines = [
        f"{_label(one.device)}{SEPARATOR}{format_bytes(one.total_bytes)}, {clean(one.basis)}"
        for one in shown
    ]
    words = [
        f"{line}: {', '.join(map(_part_label, own))}"
        for line, own in zip(lines, parts, strict=True)
    ]
    with rc_context(NO_FORMULAS):
        heights = [inches for own in parts for inches in (0.4, 0.18 * -(-max(1, len(own)) // 2))]
        figure = Picture(sum(heights) + 0.9 * len(parts) + 0.4, ["parts of the memory", *words])
        panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        for axes, below, found, own, line in zip(
            panels[::2], panels[1::2], shown, parts, lines, strict=True
        ):
            axes.set_title(shorten(line, 120), loc="left", fontsize="small")
            left = 0
            for index, part in enumerate(own):
                look: dict[str, Any] = {"color": colormaps["tab20"](index % 20)}
                if part.name == "free" or part.name.startswith("unknown"):
                    look = {
                        "facecolor": "none",
                        "edgecolor": "gray",
                        "hatch": "xxx" * (part.name != "free"),
                    }
                axes.barh(0, part.size_bytes or 0, 1, left, label=_part_label(part), **look)
                left += part.size_bytes or 0
            axes.set(xlim=(0, found.total_bytes or 1), ylim=(-0.5, 0.5), yticks=[])
            count_bytes(axes.xaxis)
            below.axis("off")
            below.legend(*axes.get_legend_handles_labels(), loc="upper left", ncol=2, **LEGEND)
    return figure


def _part_label(part: Part) -> str:
    size = "unknown" if part.size_bytes is None else format_bytes(part.size_bytes)
    return f"{shorten(part.name, 40)} {size}"


# -- shared -------------------------------------------------------------------------------------


def _last(
    records: Collection[T], last: int | None, what: str, default: int, most: int = 10**9
) -> tuple[list[T], str]:
    """Return the last records, and a text with their number and the number left out."""
    try:
        number = min(default if last is None else whole(last), most)
    except UnitError as error:
        raise PlotError(f"last (-n): {error}") from None
    if not records:
        raise PlotError(f"there is nothing to draw: no {what} has finished yet")
    shown, rest = list(records)[-number:], len(records) - number
    return shown, count(len(shown), what) + f" ({rest} earlier left out)" * (rest > 0)


def _devices(records: Iterable[CellRecord | ExperimentRecord], wanted: str | None) -> list[str]:
    """Return the devices in use, the host first; only the ``wanted`` ones if given."""
    usages = [usage for record in records for usage in record.usages if in_use(usage)]
    return _chosen(devices_of(usages), wanted, "was not in use")


def _chosen(devices: Iterable[str], wanted: str | None, why_not: str) -> list[str]:
    """Return the devices selected by ``wanted``: ``RAM``, ``cuda:0``, ``cuda`` for all of its kind;
    None for all.
    """
    there = list(dict.fromkeys(devices))
    found = [
        n
        for n in there
        if wanted is None or parse_device(wanted, known=there) in (n, n.partition(":")[0])
    ]
    if not found:
        names = ", ".join(clean(device_label(device)) for device in there) or "none"
        raise PlotError(f"device {clean(str(wanted))!r} {why_not}; there are: {names}")
    return found


def _name(cell: CellRecord) -> str:
    return "·" if cell.execution_count is None else str(cell.execution_count)


def _label(device: str) -> str:
    return shorten(device_label(device), 24)
