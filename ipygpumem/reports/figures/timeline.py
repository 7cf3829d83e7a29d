"""Draws the time line above a session's panels: cells in order, experiments as bars over them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.reports.figures import picture
from ipygpumem.reports.figures.axes import TimeAxis
from ipygpumem.reports.figures.records import cell_name, ran_out

_ROWS_AT_MOST = 4
_LETTERS = 24
"""For so much of a name an experiment beside it goes into another row."""
_DIGIT = re.compile("[0-9]")
_BANDS = ("#e8eaee", "#f4f5f7")
_BAR, _BAR_EDGE = "#dcd6ea", "#6f5f97"
_MARGIN = 0.04  # inches beside a text
_ABOUT_ACROSS = 7.8
"""Inches of a time line, about: in which rows the experiments go is asked before it is laid out."""
COLUMNS = 120
"""Where there are more cells they are drawn together, in so many columns."""


@dataclass(frozen=True)
class ExperimentBar:
    """An experiment: where it lies along the axis, and in which row."""

    name: str
    start: float
    end: float
    row: int


class Timeline:
    """Cells and experiments, and where they lie along a time axis.

    Args:
        cells: at least one, in any order.
        experiments: those that do not overlap the cells are left out; open ones are known from their cells.
    """

    def __init__(self, cells: Sequence[CellRecord], experiments: Sequence[ExperimentRecord]) -> None:
        self.cells = sorted(cells, key=lambda cell: cell.started_at)
        self._spans = _spans(self.cells)
        self.axis = TimeAxis(self._spans)
        self.places: list[tuple[float, float]] = self.axis.place(np.array(self._spans)).tolist()
        """Where each cell begins and ends."""
        self.left_out = 0
        """How many experiments there is no room for: too many run at once."""
        self.bars = self._bars(experiments)
        """The experiments, as many as there is room for."""

    @property
    def rows(self) -> int:
        """How many rows of experiments there are."""
        return max((bar.row for bar in self.bars), default=-1) + 1

    @property
    def is_dense(self) -> bool:
        """Whether there are too many cells to tell them apart."""
        return len(self.cells) > COLUMNS

    @property
    def computing_seconds(self) -> float:
        """How long the cells ran together."""
        return sum(end - start for start, end in self._spans)

    def _bars(self, experiments: Sequence[ExperimentRecord]) -> list[ExperimentBar]:
        """Return the experiments, those inside others a row below them; what fits into no row is counted.

        One that would cover the name of the one before it goes into another row, if there is one.
        """
        spans = [(*_span(item), item.name) for item in experiments]
        spans += self._unfinished({item.name for item in experiments})
        first, last = self._spans[0][0], self._spans[-1][1]
        within = [span for span in spans if span[1] >= first and span[0] <= last]
        bars: list[ExperimentBar] = []
        ends, named = [float("-inf")] * _ROWS_AT_MOST, [float("-inf")] * _ROWS_AT_MOST
        for start, end, name in sorted(within, key=lambda span: (span[0], -span[1])):
            left, right = map(float, self.axis.place((start, end)))
            rows = range(max((row + 1 for row, until in enumerate(ends) if until > start), default=0), _ROWS_AT_MOST)
            if not rows:
                self.left_out += 1
                continue
            row = min(rows, key=lambda row: max(left, named[row]))
            ends[row], named[row] = end, right + self._beside(name, right - left)
            bars.append(ExperimentBar(name, left, right, row))
        return bars

    def _beside(self, name: str, room: float) -> float:
        """Return what a name takes beside its bar: nothing if there is ``room`` for it inside."""
        text = picture.shorten(name, _LETTERS)
        needed = (picture.inches(text, picture.SMALL) + 2 * _MARGIN) * self.axis.length / _ABOUT_ACROSS
        return needed if needed > room else 0.0

    def _unfinished(self, finished: set[str]) -> list[tuple[float, float, str]]:
        found: dict[str, tuple[float, float, str]] = {}
        for cell, (start, end) in zip(self.cells, self._spans, strict=True):
            name = cell.experiment
            if name is not None and name not in finished:
                found[name] = (found[name][0] if name in found else start, end, name)
        return list(found.values())


def _span(item: ExperimentRecord) -> tuple[float, float]:
    """Return when an experiment ran: one that a cell's first line opens begins with that cell, not just after it."""
    starts = [item.started_at, *(cell.started_at for cell in item.cells[:1])]
    return min(starts), item.started_at + item.duration_seconds


def _spans(cells: Sequence[CellRecord]) -> list[tuple[float, float]]:
    """Return when each cell ran; where the system's clock was set back, later cells move up."""
    spans: list[tuple[float, float]] = []
    for cell in cells:
        start = max(cell.started_at, spans[-1][1]) if spans else cell.started_at
        spans.append((start, start + max(0.0, cell.duration_seconds)))
    return spans


# -- drawing --------------------------------------------------------------------------------------------------


def prepare_strip(axes: Axes, line: Timeline) -> None:
    """Give ``axes`` their limits and the names of their rows."""
    rows = {0.46: "experiments", line.rows + 0.5: "cells"} if line.rows else {0.5: "cells"}
    axes.set(xlim=(0, line.axis.length), ylim=(line.rows + 1, 0))
    axes.set_yticks(list(rows), list(rows.values()), color=picture.FAINT_INK)
    axes.tick_params(axis="x", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=False)


def draw_strip(axes: Axes, line: Timeline) -> None:
    """Draw experiments as bars, and below them the cells with those of their numbers that there is room for."""
    per_inch = line.axis.length / picture.width_of(axes)
    for bar, room in zip(line.bars, _rooms(line), strict=True):
        _draw_bar(axes, bar, room, per_inch)
    draw_bands(axes, line, line.rows + 0.05, line.rows + 0.95)
    _number_cells(axes, line, per_inch)


def _rooms(line: Timeline) -> list[float]:
    """Return how far each bar's text may reach: to the next bar in its row."""
    ends = [line.axis.length] * (line.rows or 1)
    rooms = []
    for bar in reversed(line.bars):
        rooms.append(ends[bar.row])
        ends[bar.row] = bar.start
    return rooms[::-1]


def _draw_bar(axes: Axes, bar: ExperimentBar, room: float, per_inch: float) -> None:
    """Draw one experiment with its name inside, or beside it where that is free and more of the name fits."""
    margin = _MARGIN * per_inch
    wide = max(bar.end - bar.start, 0.02 * per_inch)
    thin = wide < 0.1 * per_inch
    axes.barh(
        bar.row + 0.44, wide, left=bar.start, height=0.72, facecolor=_BAR, edgecolor=_BAR_EDGE, lw=0.3 if thin else 0.7
    )
    inside, beside = bar.start + margin, bar.start + margin + wide
    options = [(inside, beside - 2 * margin), (beside, room - margin)]
    names = [(left, picture.fit(bar.name, (end - left) / per_inch, picture.SMALL)) for left, end in options]
    left, name = max(names, key=lambda option: len(option[1]))
    if name:
        axes.text(left, bar.row + 0.46, name, size=picture.SMALL, va="center")


def _number_cells(axes: Axes, line: Timeline, per_inch: float) -> None:
    """Write the numbers of cells into their bands, where they fit; those that ran out of memory come first."""
    taken: list[tuple[float, float]] = []
    widths: dict[tuple[str, str], float] = {}
    out = [ran_out(cell) for cell in line.cells]
    lengths = [end - start for start, end in line.places]
    for index in sorted(range(len(line.cells)), key=lambda index: (not out[index], -lengths[index])):
        cell, (start, end) = line.cells[index], line.places[index]
        low, high = (0.0, line.axis.length) if line.is_dense else (start, end)
        mark = "OOM " if out[index] else "" if cell.success else "× "
        weight = "bold" if out[index] else "normal"
        for text in (mark + cell_name(cell), cell_name(cell)):
            form = (_DIGIT.sub("0", text), weight)  # digits are equally wide: few texts have to be measured
            if form not in widths:
                widths[form] = (picture.inches(form[0], picture.SMALL, weight=weight) + 0.5 * _MARGIN) * per_inch
            width = widths[form]
            left = min(max((start + end - width) / 2, low), high - width)
            if width > high - low or any(left < other_right and left + width > other for other, other_right in taken):
                continue
            taken.append((left, left + width))
            color = picture.INK if cell.success else picture.TROUBLE
            place = (left + width / 2, line.rows + 0.5)
            axes.text(*place, text, size=picture.SMALL, ha="center", va="center", color=color, weight=weight)
            break


def draw_bands(axes: Axes, line: Timeline, low: float, high: float) -> None:
    """Shade every cell, neighbours differently; all alike where they could not be told apart."""
    for parity, color in enumerate(_BANDS):
        spans = [(start, end - start) for start, end in line.places[parity::2]]
        if line.is_dense:
            spans = [(0, line.axis.length)] * parity
        axes.broken_barh(spans, (low, high - low), facecolors=color, edgecolors=color, linewidths=0.3, zorder=0)
