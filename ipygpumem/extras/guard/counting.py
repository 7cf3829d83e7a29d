"""Two ways in which a cell's memory is counted: from its allocation, or from its first use
(``--touched``).

Memory that is counted from its allocation can be limited: the system refuses what is too much, at
once and in native code. Memory that is counted from its use can only be watched. So the way decides
the limit on allocations, how often the watching thread checks, and how a refused allocation is
explained.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ipygpumem.extras.guard.allocation_limit import AllocationLimit
from ipygpumem.extras.guard.memory_left import MemoryFigures
from ipygpumem.extras.guard.refusal import Refusal
from ipygpumem.extras.guard.reserve_block import ReserveBlock
from ipygpumem.extras.guard.shares import LEAST_ROOM_BYTES, MemoryShares
from ipygpumem.extras.guard.soft_limit import NO_LIMIT
from ipygpumem.probes import own_limits
from ipygpumem.shell.cell import GuardAction
from ipygpumem.units import format_bytes

LIMITED_CHECK_SECONDS = 0.05
"""Shortest time between two checks while the limit on allocations protects the memory left."""
CHECK_SECONDS = 0.002
"""Shortest time between two checks where it does not."""
_ADVICE = (
    "The guard counts memory from its allocation, even if it is never used: "
    "%gpumem guard on --touched counts only memory in use, %gpumem guard off turns it off"
)
_OFF = "%gpumem guard off turns the guard off"


def stop_of_cell(left_bytes: int, whose: str) -> GuardAction:
    """Return the stop of a cell that had used up the memory."""
    left = format_bytes(max(0, left_bytes))
    return GuardAction(f"stopped the cell: only {left} of {whose} were left", _OFF)


class Counting(Protocol):
    """A way of counting memory."""

    @property
    def description(self) -> str:
        """How the memory is guarded, in words."""

    def limit_bytes(self, figures: MemoryFigures) -> int:
        """Return the limit that allocations should have now, or ``NO_LIMIT``."""

    def shortest_pause_seconds(self, figures: MemoryFigures) -> float:
        """Return the shortest time until the watching thread checks again."""

    def explain(self, refusal: Refusal, data_bytes: int) -> GuardAction | None:
        """Return how the guard refused an allocation; None if something else refused it.

        Args:
            refusal: the error.
            data_bytes: the process's private address space now.
        """


class CountAllocated:
    """Counts memory from its allocation, and limits allocations to the memory left.

    Args:
        shares: the shares of the memory left.
        limit: the limit on allocations.
        reserve: memory that is freed when nothing can be allocated.
        knows_peak: returns True if the kernel measures the peak of each cell.
    """

    def __init__(
        self,
        shares: MemoryShares,
        limit: AllocationLimit,
        reserve: ReserveBlock,
        knows_peak: Callable[[], bool],
    ) -> None:
        self._shares = shares
        self._limit = limit
        self._reserve = reserve
        self._knows_peak = knows_peak
        self._given_bytes = 0
        """Bytes that the cell could allocate when it began."""
        self._private_bytes_before = 0
        """Private pages in RAM when the cell began."""

    @property
    def description(self) -> str:
        """How the memory is guarded, in words."""
        if self._limit.is_set_by_user():
            return "only memory in use is watched: other code has set RLIMIT_DATA, which is kept"
        return "allocations are limited (RLIMIT_DATA), and memory in use is watched"

    def begin_cell(self, figures: MemoryFigures) -> None:
        """Note the memory when a cell begins."""
        self._given_bytes = self.limit_bytes(figures) - (figures.data_bytes or 0)
        self._private_bytes_before = figures.private_bytes

    def limit_bytes(self, figures: MemoryFigures) -> int:
        """Return the limit that allocations should have now: the memory left to the cell."""
        return self._shares.limit_bytes(figures)

    def shortest_pause_seconds(self, figures: MemoryFigures) -> float:
        """Return the shortest time until the watching thread checks again."""
        unused_bytes = (figures.data_bytes or 0) - figures.private_bytes
        if unused_bytes < self._shares.until_interrupt_bytes(figures):
            return LIMITED_CHECK_SECONDS
        return CHECK_SECONDS  # pages allocated earlier may use up the memory below the limit

    def explain(self, refusal: Refusal, data_bytes: int) -> GuardAction | None:
        """Return how the limit refused an allocation; None if something else refused it.

        The limit did not refuse a request that would have fit into the memory left. If the size is
        unknown, most requests would have fit while much is left: then the limit is only a guess.
        """
        left_bytes = self._left_bytes(data_bytes)
        if refusal.asked_bytes is not None:
            request = format_bytes(refusal.asked_bytes)
            would_fit = refusal.asked_bytes <= left_bytes - LEAST_ROOM_BYTES
            is_other_error = would_fit
        else:
            request = "a request"
            would_fit = left_bytes > max(LEAST_ROOM_BYTES, self._given_bytes // 8)
            # These two are created for other reasons, too: only a lack of memory blames the limit.
            is_other_error = would_fit and refusal.kind in ("raised", "internal")
        if is_other_error:
            return None
        is_sure = not would_fit and refusal.kind in ("refused", "internal")
        verb = "refused" if is_sure else "perhaps refused"
        left = format_bytes(max(0, left_bytes))
        text = f"{verb} {request}: {left} of {self._shares.whose} were left for this cell"
        return GuardAction(text, _ADVICE, is_sure)

    def _left_bytes(self, data_bytes: int) -> int:
        """Return the bytes that were left to the cell when an allocation failed.

        ``data_bytes`` is the address space now, after the error may have freed much: ``numpy.ones``
        in a function that has raised. So where the kernel has measured the cell's peak, the bytes
        that were left at the peak count if they are fewer.
        """
        left = self._limit.wanted_bytes - data_bytes - self._reserve.freed_bytes
        if not self._knows_peak():
            return left
        status = Path("/proc/self/status").read_bytes()
        shared_bytes = own_limits.figure(status, b"\nRssFile:") + own_limits.figure(
            status, b"\nRssShmem:"
        )
        peak_bytes = own_limits.figure(status, b"\nVmHWM:") - shared_bytes
        left_at_peak = self._given_bytes - (peak_bytes - self._private_bytes_before)
        return min(left, left_at_peak)


class CountTouched:
    """Counts memory from its first use, and limits allocations only once nothing is left."""

    description = "only memory in use is watched"

    def __init__(self, shares: MemoryShares) -> None:
        self._shares = shares
        self._left_bytes: int | None = None
        """Memory left when the limit came into force for this cell."""

    def begin_cell(self, figures: MemoryFigures) -> None:
        """Forget the limit of the last cell."""
        self._left_bytes = None

    def limit_bytes(self, figures: MemoryFigures) -> int:
        """Return the limit that allocations should have now; ``NO_LIMIT`` while memory is left."""
        if self._shares.free_bytes(figures):
            return NO_LIMIT
        self._left_bytes = self._shares.left_bytes(figures)
        return self._shares.limit_bytes(figures)

    def shortest_pause_seconds(self, figures: MemoryFigures) -> float:
        """Return the shortest time until the watching thread checks again: it is short, because no
        limit protects the memory left.
        """
        return CHECK_SECONDS

    def explain(self, refusal: Refusal, data_bytes: int) -> GuardAction | None:
        """Return the stop of the cell; None if the limit was not in force, or something else
        refused memory.
        """
        if self._left_bytes is None or refusal.kind == "raised":
            return None
        return stop_of_cell(self._left_bytes, self._shares.whose)


class CountUnlimited:
    """Counts memory from its first use, and never limits allocations: a library ends the process
    where one fails.

    Args:
        library: the name of this library.
    """

    def __init__(self, library: str) -> None:
        self.description = (
            f"only memory in use is watched: {library} ends the process if an allocation fails"
        )

    def limit_bytes(self, figures: MemoryFigures) -> int:
        """Return ``NO_LIMIT``."""
        return NO_LIMIT

    def shortest_pause_seconds(self, figures: MemoryFigures) -> float:
        """Return the shortest time until the watching thread checks again."""
        return CHECK_SECONDS

    def explain(self, refusal: Refusal, data_bytes: int) -> None:
        """Return None: the guard refused nothing."""
