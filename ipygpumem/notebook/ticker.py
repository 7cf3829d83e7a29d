"""Calls listeners with what a long cell holds, again and again while it runs.

A trivial cell must pay nothing for this, so no cell starts or wakes a thread. Ours looks around about once a second
while cells come, often enough for each cell's first tick, and rests when none has been seen for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Reading
from ipygpumem.notebook.aside import say_failed
from ipygpumem.notebook.cell import Cell, CellStack

_IDLE_SECONDS = 10.0
"""The thread rests when it has seen no cell for so long."""
_SHORTEST_SECONDS = 0.25


class Tick(NamedTuple):
    """One moment of a cell that runs for long."""

    cell: Cell
    elapsed_seconds: float
    readings: dict[str, Reading]


class _Listening:
    def __init__(self, listener: Callable[[Tick], None], after_seconds: float, every_seconds: float) -> None:
        self.listener = listener
        self.after_seconds = max(after_seconds, _SHORTEST_SECONDS)
        self.every_seconds = max(every_seconds, _SHORTEST_SECONDS)
        self.cell: Cell | None = None
        self.due = 0.0

    def due_for(self, cell: Cell) -> float:
        """Return when this listener hears next of ``cell``."""
        if self.cell is not cell:
            self.cell, self.due = cell, cell.started + self.after_seconds
        return self.due


class Ticker:
    """Calls listeners about the outermost running cell, from the meter's thread; none listens: no thread."""

    def __init__(self, cells: CellStack, meter: Meter) -> None:
        self._cells = cells
        self._meter = meter
        self._listening: tuple[_Listening, ...] = ()
        self._seen_at = 0.0
        self.rests = False
        """Whether the next cell must wake the thread."""

    def listen(
        self, listener: Callable[[Tick], None], *, after_seconds: float = 1.0, every_seconds: float = 0.5
    ) -> Callable[[], None]:
        """Call ``listener`` with a ``Tick`` while a cell runs, and return the undo.

        It is called from a thread of ours, never twice at once, and may be called once more while the cell ends:
        ``tick.cell.over`` says. If it fails, that is said once, and it is dropped.

        Args:
            listener: what to call; it should be back within milliseconds.
            after_seconds: how long a cell has to run for its first tick; 0.25 at least.
            every_seconds: time between two ticks; 0.25 at least.
        """
        entry = _Listening(listener, after_seconds, every_seconds)
        self._listening += (entry,)
        self._seen_at = time.perf_counter()
        self._meter.worker.add(self._look)
        self.wake()
        return lambda: self._drop(entry)

    def wake(self) -> None:
        """Let the thread look around now."""
        self.rests = False
        self._meter.worker.wake(self._look)

    def _drop(self, entry: _Listening) -> None:
        self._listening = tuple(item for item in self._listening if item is not entry)
        if not self._listening:
            self.rests = False
            self._meter.worker.remove(self._look)

    def _look(self) -> float | None:
        """Call the listeners that are due; return how long to wait, or None to rest."""
        listening, now = self._listening, time.perf_counter()
        longest = min((entry.after_seconds for entry in listening), default=_SHORTEST_SECONDS)
        cell = self._cells.outermost()
        if cell is None:
            return self._rest(now, longest)
        self._seen_at = now
        due = [entry for entry in listening if entry.due_for(cell) <= now]
        if due:
            self._call(due, Tick(cell, now - cell.started, self._meter.glance()))
        now = time.perf_counter()
        return max(0.0, min(longest, *(entry.due_for(cell) - now for entry in listening))) if listening else longest

    def _rest(self, now: float, longest: float) -> float | None:
        if now - self._seen_at < _IDLE_SECONDS:
            return longest
        self.rests = True  # first this, then a look: a cell that has begun meanwhile wakes us, or is seen
        if self._cells.outermost() is None:
            return None
        self.rests = False
        return 0.0

    def _call(self, due: list[_Listening], tick: Tick) -> None:
        for entry in due:
            entry.due = time.perf_counter() + entry.every_seconds
            if tick.cell.over or entry not in self._listening:
                continue
            try:
                entry.listener(tick)
            except Exception as error:
                self._drop(entry)
                say_failed(getattr(entry.listener, "__qualname__", type(entry.listener).__name__), error)
