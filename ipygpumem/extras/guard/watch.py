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
from ipygpumem.extras.guard.memory_left import MemoryFigures
from ipygpumem.meter.worker import Worker
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.error_isolation import ErrorIsolation

_LONGEST_PAUSE_SECONDS = 1.0
"""Longest time between two checks."""
_IDLE_SECONDS = 0.1
"""Shortest time between two checks while no cell runs; with less the thread sleeps until one does.
"""
_SEARCH_SECONDS = 0.001
"""Shortest time between two checks while objects are examined."""
_BYTES_PER_SECOND = 4 << 30
"""Speed at which a cell may use memory."""
_GRACE_SECONDS = 1.0
"""Time that a cell has to free memory after an error before the next one."""


class Watch:
    """Checks the memory left, more often the less there is, until ``stop``.

    Args:
        memory: the memory left, its shares and the limit on allocations.
        worker: the meter's thread, which calls ``_tick`` after the seconds that it returned.
        isolation: reports our own failures.
    """

    def __init__(self, memory: GuardedMemory, worker: Worker, isolation: ErrorIsolation) -> None:
        self._memory = memory
        self._worker = worker
        self._isolation = isolation
        self.interrupt = CellInterrupt(self._is_used_up)
        self.lock = threading.Lock()
        """Protects the files and the cell. The limit's lock is taken inside it, never the other way
        round."""
        self.cell: Cell | None = None
        """The cell whose code runs; None between cells."""
        self.is_on = True
        """False after ``stop``: the files are closed soon."""
        self._sleeps = False
        """True while the thread does not check: the next cell wakes it."""
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
        self.interrupt.cancel(thread=None)
        self.lock = threading.Lock()

    def begin_cell(self, cell: Cell) -> None:
        """Watch a cell that begins now."""
        self.interrupt.begin_cell()
        self._struck_at = 0.0
        self.cell = cell

    def wake(self) -> None:
        """Begin to check again if the thread sleeps; only then, because waking it takes 100 us."""
        if self._sleeps:
            self._worker.wake(self._tick)

    def end_cell(self) -> None:
        """Stop interrupting the cell, and restore the user's limit: the cell's code has ended.

        The limit stays while threads of the cell go on; ``_check`` ends it after them.
        """
        with self.lock:
            cell, self.cell = self.cell, None
            if not self._memory.limit.threads.are_busy():
                self._memory.limit.switch_off()
            thread = None if cell is None else cell.thread
            self.interrupt.cancel(thread)

    def _is_used_up(self) -> bool:
        """Return True if the cell may use no further byte before it is interrupted."""
        return self._memory.shares.until_interrupt_bytes(self._memory.now()) <= 0

    def _tick(self) -> float | None:
        """Check, for the meter's thread, and return the seconds until the next check.

        None means that no check is needed until ``wake``.
        """
        if self._memory.limit.is_failing:
            # An error is being shown: its room must stay, and a second one would hide it.
            return LIMITED_CHECK_SECONDS
        try:
            return self._check_despite_limit()
        except MemoryError:  # other threads were faster
            return CHECK_SECONDS
        except Exception as error:
            self._isolation.failed("the memory guard", error, "memory in use is watched no longer")
            return None

    def _check_despite_limit(self) -> float | None:
        """Check; if the limit refuses memory to this thread, too, raise it and check again.

        Otherwise nothing would interrupt the cell.
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
        """Measure the memory left once, and interrupt the cell if it is used up.

        Return the seconds until the next check; None if none is needed until a cell begins.
        """
        cell = self.cell
        with self.lock:
            if not self.is_on:
                return None
            figures = self._memory.now()
        self._memory.renew(figures)
        pause_seconds = self._pause_seconds(figures)
        shortest_pause_seconds = self._memory.counting.shortest_pause_seconds(figures)
        # With little memory left between cells, the checks would be frequent, and for nothing.
        self._sleeps = (
            cell is None and pause_seconds < _IDLE_SECONDS and not self._memory.limit.is_on
        )
        if cell is None:
            self._end_limit_after_threads()
        if self._memory.shares.until_interrupt_bytes(figures) > 0:
            self._struck_at = 0.0
        elif cell is not None and time.monotonic() - self._struck_at > _GRACE_SECONDS:
            self._strike_unless_trimming_helps(cell)
        if self._sleeps and self.cell is None:  # a cell may have begun since
            return None
        return max(pause_seconds, shortest_pause_seconds)

    def _pause_seconds(self, figures: MemoryFigures) -> float:
        """Return the time in which code that writes to memory as fast as it can does not use up
        what is left.
        """
        shares = self._memory.shares
        usable_bytes = shares.until_interrupt_bytes(figures) + shares.interrupt_left_bytes // 2
        return min(usable_bytes / _BYTES_PER_SECOND, _LONGEST_PAUSE_SECONDS)

    def _end_limit_after_threads(self) -> None:
        """Restore the user's limit once the last thread of an ended cell has ended, if no other
        cell has begun.
        """
        limit = self._memory.limit
        if not limit.is_on or limit.threads.are_busy():
            return
        with limit.lock:
            if self.cell is None:
                limit.switch_off()

    def _strike_unless_trimming_helps(self, cell: Cell) -> None:
        """Interrupt the cell, unless enough is left without the pages that ended threads have left
        in their heaps.
        """
        with self.lock:
            figures = self._memory.trimmed()
        if self._memory.shares.until_interrupt_bytes(figures) > 0:
            return
        self._struck_at = time.monotonic()  # before the strike: the next one waits for the grace
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
        """End our own search for objects before it uses up the memory.

        Searches call this often. Between cells no limit protects the memory left; a limit would
        count free heap, which a search may use, as used up.

        Raises:
            MemoryError: too little memory is left.
        """
        if self.cell is not None and not self._memory.limit.is_failing:
            return  # the cell itself searches: its limit is in force
        if time.monotonic() - self._searched_at <= _SEARCH_SECONDS:
            return
        left = self._memory.now().available_bytes
        self._searched_at = time.monotonic()
        if left < self._memory.shares.interrupt_left_bytes // 2:
            raise MemoryError("too little memory is left to examine objects")
