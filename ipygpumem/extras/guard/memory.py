"""Measures the memory left to the cells of one shell, and limits their allocations to it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from ipygpumem.extras.guard.allocation_limit import AllocationLimit
from ipygpumem.extras.guard.counting import CountAllocated, Counting, CountTouched, CountUnlimited
from ipygpumem.extras.guard.memory_left import MemoryFigures, MemoryLeft
from ipygpumem.extras.guard.reserve_block import ReserveBlock
from ipygpumem.extras.guard.shares import LAST_ROOM_BYTES, MemoryShares
from ipygpumem.probes.malloc import free_heap_bytes, trim_heap
from ipygpumem.probes.own_limits import resource
from ipygpumem.units import format_bytes

_ABORTING = ("polars",)
"""Libraries that end the process if an allocation fails, so that allocations are not limited where
they are loaded."""


class GuardedMemory:
    """The memory left, its shares, and the limit on allocations.

    Args:
        user_limit_bytes: the user's ``--limit``; None without one.
        touched: the user's ``--touched``: count memory from its first use. Without it, memory is
            counted from its allocation, where the system can limit that.
        knows_peak: returns True if the kernel measures the peak of each cell, which shows how much
            was left when an allocation was refused.
    """

    def __init__(
        self, user_limit_bytes: int | None, *, touched: bool, knows_peak: Callable[[], bool]
    ) -> None:
        self.left = MemoryLeft()
        self.shares = MemoryShares(self.left, user_limit_bytes)
        self.limit = AllocationLimit(self.left.data_bytes, self._renew_if_possible)
        self.reserve = ReserveBlock()
        system_limits_allocations = self.left.now().data_bytes is not None and resource is not None
        self._counting: CountAllocated | CountTouched
        """The way in which memory is counted, unless a loaded library excludes it."""
        if touched or not system_limits_allocations:
            self._counting = CountTouched(self.shares)
        else:
            self._counting = CountAllocated(self.shares, self.limit, self.reserve, knows_peak)

    @property
    def counting(self) -> Counting:
        """The way in which memory is counted now: a cell may have loaded a library that excludes
        the user's choice.
        """
        for library in _ABORTING:
            if library in sys.modules:
                return CountUnlimited(library)
        return self._counting

    @property
    def state(self) -> str:
        """The memory left, and how it is guarded."""
        room = format_bytes(self.shares.room_bytes(self.trimmed()))
        how = self.counting.description
        return f"the guard is on: a cell can use {room} of {self.shares.whose} · {how}"

    def now(self) -> MemoryFigures:
        """Return the current figures."""
        return self.left.now()

    def trimmed(self) -> MemoryFigures:
        """Return the current figures; if little is left, ``malloc`` returns its free pages first.

        Those pages are free for Python, but count as used for the system.
        """
        figures = self.now()
        free = self.shares.free_bytes(figures)
        is_much_left = free >= 4 * self.shares.reserve_bytes
        if is_much_left or free >= (free_heap_bytes() or 0):
            return figures
        if trim_heap() is None:  # this system's malloc returns no pages on request
            return figures
        return self.now()

    def share(self, figures: MemoryFigures) -> None:
        """Fix the shares of a cell that begins now."""
        self.shares.begin_cell(figures)
        self._counting.begin_cell(figures)

    def limit_cell(self, figures: MemoryFigures) -> None:
        """Limit the allocations of a cell that begins now."""
        self.limit.switch_on()
        self.renew(figures)

    def renew(self, figures: MemoryFigures) -> None:
        """Limit allocations to the memory left now, as ``figures`` say."""
        if figures.data_bytes is None:
            return
        with self.limit.lock:
            limit_bytes = self.counting.limit_bytes(figures)
            self.limit.set_bounds(limit_bytes, self.shares.cushion_bytes(figures))

    def _renew_if_possible(self) -> None:
        """Measure the memory left after a call that took memory for long.

        The limit stays until the next check if another thread has closed the files, or if no memory
        is left to read them: this runs inside the user's calls, which must not fail by it.
        """
        with contextlib.suppress(OSError, ValueError, MemoryError):
            self.renew(self.now())

    def room_for_error_bytes(self) -> int:
        """Return the bytes that may be added to the limit for an error and its traceback."""
        error_bytes = self.shares.error_bytes
        try:
            figures = self.now()
        except (MemoryError, OSError, ValueError):
            return min(error_bytes, LAST_ROOM_BYTES)
        if self.limit.threads.are_busy():  # they may use up the bytes first
            return min(error_bytes, self.shares.cushion_bytes(figures))
        return min(error_bytes, figures.available_bytes // 2)
