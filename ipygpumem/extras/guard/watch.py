"""Watches memory in use, in the meter's thread, and interrupts the cell before none is left.

shares.py computes the bytes that are left until then: ``Shares.until_interrupt_bytes``.
"""

from __future__ import annotations

import threading
import time

from ipygpumem.extras.guard.allocation_limit import SMALL_BYTES
from ipygpumem.extras.guard.counting import CHECK_SECONDS, LIMITED_CHECK_SECONDS
from ipygpumem.extras.guard.interrupt import CellInterrupt
from ipygpumem.extras.guard.memory import GuardedMemory
from ipygpumem.meter.worker import Worker
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.error_isolation import ErrorIsolation

_LONGEST_PAUSE_SECONDS = 1.0
"""Longest time between two checks."""
_IDLE_SECONDS = 0.1
"""Shortest time between two checks between cells; with less time the next cell wakes the thread."""
_SEARCH_SECONDS = 0.001
"""Shortest time between two checks while objects are examined."""
_BYTES_PER_SECOND = 4 << 30
"""Speed at which a cell may use memory."""
_GRACE_SECONDS = 1.0
"""Time that a cell has to free memory after an error before the next one."""


class Watch:
    """Checks the memory left, more often the less there is, until ``stop``."""

    def __init__(self, memory: GuardedMemory, worker: Worker, isolation: ErrorIsolation) -> None:
        self._memory = memory
        self._worker = worker
        self._isolation = isolation
        self.interrupt = CellInterrupt(self._is_used_up)
        self.lock = threading.Lock()
        """Protects the files and the cell. The limit's lock is taken inside it, never the other way
        round."""
        self.cell: Cell | None = None
        """The cell whose code runs."""
        self.is_on = True
        self._sleeps = False
        """True while the thread does not check."""
        self._struck_at = 0.0
        """Time of the last interrupt; 0 once enough is left again."""
        self._searched_at = 0.0
        """Time of the last check while objects are examined."""

    def start(self) -> None:
        """Check from now on."""
        self._worker.add(self._tick)

    def stop(self) -> None:
        """End the checks; a check that is under way has ended afterwards, and no file is read any
        more.
        """
        self._worker.remove(self._tick)
        with self.lock:
            self.is_on = False

    def abandon(self) -> None:
        """End the checks in a forked child: the thread stayed in the parent process, perhaps with
        the lock.
        """
        self.is_on = False
        self.cell = None
        self.interrupt.cancel(None)
        self.lock = threading.Lock()

    def begin_cell(self, cell: Cell) -> None:
        """Watch a cell that begins now."""
        self.interrupt.begin_cell()
        self._struck_at = 0.0
        self.cell = cell

    def wake(self) -> None:
        """Check again if the thread sleeps; waking it takes 100 us."""
        if self._sleeps:
            self._worker.wake(self._tick)

    def end_cell(self) -> None:
        """Stop interrupting the cell: its code has ended."""
        with self.lock:
            cell, self.cell = self.cell, None
            if not self._memory.limit.threads.are_busy():
                self._memory.limit.switch_off()
            thread = None if cell is None else cell.thread
            self.interrupt.cancel(thread)

    def _is_used_up(self) -> bool:
        return self._memory.shares.until_interrupt_bytes(self._memory.now()) <= 0

    def _tick(self) -> float | None:
        """Check, and return the seconds until the next check."""
        if self._memory.limit.is_failing:
            return LIMITED_CHECK_SECONDS
        try:
            return self._check_with_memory()
        except MemoryError:  # other threads were faster
            return CHECK_SECONDS
        except Exception as error:
            self._isolation.failed("the memory guard", error, "memory in use is watched no longer")
            return None

    def _check_with_memory(self) -> float | None:
        """Check; raise the limit if it refuses memory to this thread, too: else the cell would not
        be interrupted.
        """
        try:
            return self._check()
        except MemoryError:
            self._memory.limit.begin_raise(SMALL_BYTES)
            try:
                return self._check()
            finally:
                self._memory.limit.end_raise(renew=False)

    def _check(self) -> float | None:
        """Look at the memory once, and interrupt the cell if too little is left.

        Return the seconds until the next look; None if no look is needed until a cell begins.
        """
        cell = self.cell
        with self.lock:
            if not self.is_on:
                return None
            figures = self._memory.now()
        self._memory.renew(figures)
        shares = self._memory.shares
        limit = self._memory.limit
        left = shares.until_interrupt_bytes(figures)
        shortest_pause = self._memory.counting.shortest_pause_seconds(figures)
        # Code that writes to memory as fast as it can must not use up what is left in one pause.
        seconds_left = (left + shares.least_left_bytes // 2) / _BYTES_PER_SECOND
        pause = min(seconds_left, _LONGEST_PAUSE_SECONDS)
        self._sleeps = cell is None and pause < _IDLE_SECONDS and not limit.is_on
        if cell is None and limit.is_on and not limit.threads.are_busy():
            self._end_limit()
        if left > 0:
            self._struck_at = 0.0
        elif cell is not None and time.monotonic() - self._struck_at > _GRACE_SECONDS:
            self._strike_unless_trimming_helps(cell)
        if self._sleeps and self.cell is None:  # a cell may have begun since
            return None
        return max(pause, shortest_pause)

    def _end_limit(self) -> None:
        """Restore the user's limit after the last thread of a cell, if no other cell has begun."""
        with self._memory.limit.lock:
            if self.cell is None:
                self._memory.limit.switch_off()

    def _strike_unless_trimming_helps(self, cell: Cell) -> None:
        """Interrupt the cell, unless enough is left without the pages that ended threads have left
        in their heaps.
        """
        with self.lock:
            figures = self._memory.trimmed()
        if self._memory.shares.until_interrupt_bytes(figures) > 0:
            return
        self._struck_at = time.monotonic()
        self._strike(cell, self._memory.shares.left_bytes(figures))

    def _strike(self, cell: Cell, left_bytes: int) -> None:
        """Interrupt the cell, unless its code has ended, or an error is on its way already.

        A second error would be raised while IPython formats the first one. The limit's lock is held
        while an error begins.
        """
        with self.lock, self._memory.limit.lock:
            if cell is self.cell and not self._memory.limit.is_failing:
                self.interrupt.strike(cell.thread, left_bytes)

    def check_search(self) -> None:
        """End our own search after a cell before it uses up the memory: the limit does not count
        free heap.

        Raises:
            MemoryError: too little memory is left.
        """
        if self.cell is not None and not self._memory.limit.is_failing:
            return
        if time.monotonic() - self._searched_at <= _SEARCH_SECONDS:
            return
        left = self._memory.now().available_bytes
        self._searched_at = time.monotonic()
        if left < self._memory.shares.least_left_bytes // 2:
            raise MemoryError("too little memory is left to examine objects")
