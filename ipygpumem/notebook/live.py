"""The live line: while a cell runs for long, one line shows its time and each device's memory.

In a terminal it is the lowest row. In a notebook it is a display that is updated, until the cell shows something of
its own: a display between two prints would cut the user's output in two, and cannot be taken out again. When the cell
ends it is gone. Nothing is shown where the output is captured, or where nobody looks (nbconvert, papermill).

While ipygpumem itself works for long, for a magic or at the end of a cell, the same line says how far that is.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ipygpumem.model import Reading
from ipygpumem.notebook.aside import say_failed
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.config import IPyGpuMem
from ipygpumem.notebook.ipython.terminal import TerminalLine, terminal_of
from ipygpumem.notebook.ipython.wire import Place, Wire
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.ticker import Tick, Ticker
from ipygpumem.objects.progress import Progress
from ipygpumem.reports.live import (
    MINUTE_SECONDS,
    LivePoint,
    Work,
    live_html,
    live_text,
    sample_of,
    work_html,
    work_text,
)

_PATIENCE_SECONDS = 2.0
"""How long a cell's end waits for a line that is being drawn, such as on a terminal that was halted by Ctrl-S."""


_WORK_SECONDS = 1.0
"""After so long our own work is shown that we do when a cell has ended."""
_WORK_EVERY_SECONDS = 0.5


class Content(NamedTuple):
    """What a line shows: a cell's time and memory, or our own work."""

    kind: str
    html: Callable[[], str]
    text: Callable[..., str]


def _of_cell(readings: Sequence[Reading], samples: Sequence[LivePoint]) -> Content:
    return Content("live", partial(live_html, readings, samples), partial(live_text, readings, samples))


def _of_work(work: Work) -> Content:
    return Content("progress", partial(work_html, work), partial(work_text, work))


class Line(Protocol):
    """Where the live line of one cell is drawn."""

    def draw(self, content: Content) -> None:
        """Draw the line anew."""

    def close(self, *, replace: bool) -> str | None:
        """Take the line away; return the display that the cell's report shall take over, if it may ``replace`` one."""


class Live(Part):
    """The live line of one shell.

    Args:
        shell: IPython's shell.
        config: ``live`` and ``report`` switch the line off.
        ticker: reports cells that run for long.
        wire: the kernel's; None in a terminal.
    """

    def __init__(self, shell: Any, config: IPyGpuMem, ticker: Ticker, wire: Wire | None) -> None:
        self._shell = shell
        self._config = config
        self._ticker = ticker
        self._lock = threading.Lock()
        self._undo: Callable[[], None] | None = None
        self._cell: Cell | None = None
        self._line: Line | None = None
        self._samples: deque[LivePoint] = deque()
        self._work: Work | None = None
        self._ending: Cell | None = None
        self._wire = wire
        self.switch()

    def switch(self, *_: object) -> None:
        """Listen, or stop listening, as the option ``live`` says and where a line can be shown at all."""
        wanted = self._config.live and (hasattr(self._shell, "kernel") or terminal_of(self._shell) is not None)
        if wanted and self._undo is None:
            self._undo = self._ticker.listen(self._tick)
        elif not wanted and self._undo is not None:
            self._undo()
            self._undo = None

    def _tick(self, tick: Tick) -> None:
        with self._lock:
            if tick.cell.over or self._undo is None:
                return
            if self._cell is not tick.cell:
                self._close(replace=False)
                self._cell = tick.cell
                self._samples.clear()
                self._line = tick.cell.context.run(self._new_line)
            readings = tuple(tick.readings.values())
            self._samples.append(sample_of(tick.elapsed_seconds, readings))
            while self._samples[0].elapsed_seconds < tick.elapsed_seconds - MINUTE_SECONDS:
                self._samples.popleft()
            work = self._work
            if self._line is not None and (work is not None or self._config.report):
                content = _of_cell(readings, self._samples) if work is None else _of_work(work)
                tick.cell.context.run(self._line.draw, content)

    @contextlib.contextmanager
    def work(self, what: str) -> Iterator[Progress]:
        """Show, instead of memory, how far long work of our own is; ``what`` it is, for the user."""
        around, done, due = self._work, 0.0, time.perf_counter() + _WORK_SECONDS

        def progress(share: float) -> None:
            nonlocal due, done
            done = max(done, min(share, 1.0))  # what has to be done again after all does not move the bar back
            self._work = Work(what, done)
            if self._ending is not None and time.perf_counter() >= due:  # no ticks come any more
                due = time.perf_counter() + _WORK_EVERY_SECONDS
                try:
                    self._draw_at_end(self._ending, self._work)
                except Exception as error:  # the work goes on
                    self._ending = None
                    say_failed("the live line", error)

        self._work = Work(what, 0.0)
        try:
            yield progress
        finally:
            self._work = around

    def cell_begins(self, cell: Cell) -> None:
        """Look out for what the cell shows."""
        if not cell.nested:
            self._ending = None
            if self._wire is not None:
                self._wire.cell_begins()

    def code_ended(self, cell: Cell, *, failed: bool) -> None:
        """Show our own work from now on, until reports follow."""
        if not cell.nested and self._undo is not None:
            self._ending = cell

    def _draw_at_end(self, cell: Cell, work: Work) -> None:
        with self._lock:
            if self._cell is not cell:
                self._close(replace=False)
                self._cell = cell
            if self._line is None and self._config.report:  # it will be the report's place
                self._line = self._new_line(is_last=True)
            if self._line is not None:
                self._line.draw(_of_work(work))

    def _new_line(self, *, is_last: bool = False) -> Line | None:
        if not hasattr(self._shell, "kernel"):
            terminal = terminal_of(self._shell)
            return None if terminal is None else _StatusRow(TerminalLine(terminal))
        place = None if self._wire is None else self._wire.place(is_last=is_last)
        return None if place is None else _Output(place)

    def reported(self, cell: Cell) -> None:
        """Note that the reports of ``cell`` are shown."""
        if self._wire is not None and not cell.nested:
            self._wire.cell_ends()

    def end(self, cell: Cell, *, replace: bool) -> str | None:
        """Take away the line of ``cell``, which is over.

        Args:
            cell: the cell.
            replace: its report may take the line's place.

        Returns:
            The display that the report shall take over, or None if it is to be a display of its own.
        """
        if self._ending is cell:
            self._ending = None
        if self._cell is not cell and self._undo is None:
            return None
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            return None
        try:
            return self._close(replace=replace) if self._cell is cell else None
        except Exception as error:  # the report must come all the same
            self._line = self._cell = None
            say_failed("the live line", error)
            return None
        finally:
            self._lock.release()

    def _close(self, *, replace: bool) -> str | None:
        display = None if self._line is None else self._line.close(replace=replace)
        self._line = self._cell = None  # last: after an interrupt the next cell closes it
        return display

    def close(self) -> None:
        """Take the line away for good."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._cell is not None:
            self.end(self._cell, replace=False)
        if self._wire is not None:
            self._wire.close()


class _StatusRow:
    """The line as the lowest row of a terminal."""

    def __init__(self, row: TerminalLine) -> None:
        self._row = row

    def draw(self, content: Content) -> None:
        if sys.stdout is sys.__stdout__:
            self._row.draw(lambda width: content.text(width=width, ascii_only=not self._row.unicode))

    def close(self, *, replace: bool) -> None:
        self._row.close()


class _Output:
    """The line as the only output of the running cell."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def draw(self, content: Content) -> None:
        self._place.draw(content.html(), content.kind)

    def close(self, *, replace: bool) -> str | None:
        return self._place.close(replace=replace)
