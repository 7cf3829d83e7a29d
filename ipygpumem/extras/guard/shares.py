"""Divides the memory left among a cell, its errors, the code around it, and a reserve."""

from __future__ import annotations

from ipygpumem.extras.guard.memory_left import MemoryFigures, MemoryLeft
from ipygpumem.units import MIB, format_bytes

LEAST_ROOM_BYTES = 32 * MIB
"""Bytes that a cell may allocate even if little memory is left, so that ``del`` works; it gets less
than this once nearly nothing is left.
"""
LAST_ROOM_BYTES = 4 * MIB
"""Bytes that a cell may allocate even if ``--limit`` is exceeded."""


class MemoryShares:
    """The bytes of memory left at which the guard refuses allocations or interrupts the cell.

    From much memory left to none: an allocation is refused at ``_refusal_bytes``, the cell is
    interrupted at ``reserve_bytes``, and the rest is for errors and for the code around the cell.
    ``begin_cell`` fixes the shares of one cell; all other shares follow the figures.

    Args:
        left: the memory that this process can use.
        user_limit_bytes: the user's ``--limit`` for the process's private pages; None without one.
    """

    def __init__(self, left: MemoryLeft, user_limit_bytes: int | None) -> None:
        self._user_limit_bytes = user_limit_bytes
        total_bytes = left.total_bytes
        self.whose = left.name
        """The memory that may run out, in words."""
        if user_limit_bytes is not None:
            total_bytes = min(user_limit_bytes, total_bytes)
            self.whose = f"the limit of {format_bytes(user_limit_bytes)}"
        self.reserve_bytes = min(max(total_bytes // 16, 32 * MIB), 512 * MIB)
        """Memory left at which a cell is interrupted."""
        self._refusal_bytes = self.reserve_bytes * 3 // 2
        """Memory left at which an allocation is refused."""
        self.error_bytes = 0
        """Maximum number of bytes added to the limit for an error of the cell."""
        self.interrupt_left_bytes = 0
        """Memory left at which this cell is interrupted: less than the reserve if the cell began
        with little memory."""
        self._interrupt_private_bytes = 0
        """Private pages at which this cell is interrupted because of ``--limit``. It is above that
        limit, so that allocations are refused first, where they can be."""
        self._floor_bytes = 0
        """Minimum of the limit on allocations during the cell."""

    def begin_cell(self, figures: MemoryFigures) -> None:
        """Fix the shares of a cell that begins now.

        The cell may allocate the least room even if little is left: all limits leave it that.
        """
        left = figures.available_bytes
        room = self._least_room_bytes(figures)
        self.error_bytes = min(self.reserve_bytes, (left - room) // 2)
        # Before its interrupt, the cell may use twice the room, but at most half of what is left.
        least_left = max(left // 2, left - 2 * room)
        self.interrupt_left_bytes = min(self.reserve_bytes, least_left)
        above_limit = (self._user_limit_bytes or 0) + LEAST_ROOM_BYTES // 2
        self._interrupt_private_bytes = max(above_limit, figures.private_bytes + room)
        self._floor_bytes = (figures.data_bytes or 0) + room

    def left_bytes(self, figures: MemoryFigures) -> int:
        """Return the memory left, the reserve included."""
        return self._left_above(figures, kept_bytes=0)

    def free_bytes(self, figures: MemoryFigures) -> int:
        """Return the memory left until allocations are refused."""
        return self._left_above(figures, kept_bytes=self._refusal_bytes)

    def _left_above(self, figures: MemoryFigures, *, kept_bytes: int) -> int:
        """Return the memory left if ``kept_bytes`` stay unused and ``--limit`` is not exceeded."""
        left = figures.available_bytes - kept_bytes
        if self._user_limit_bytes is not None:
            left = min(left, self._user_limit_bytes - figures.private_bytes)
        return max(0, left)

    def room_bytes(self, figures: MemoryFigures) -> int:
        """Return the bytes that a cell that begins now may allocate."""
        return max(self.free_bytes(figures), self._least_room_bytes(figures))

    def _least_room_bytes(self, figures: MemoryFigures) -> int:
        """Return the bytes that a cell that begins now may allocate even if nothing is left.

        This is at most half of what is left above half of the reserve, but at least an eighth of
        the memory left, because cells that keep their memory come one after the other.
        """
        left = figures.available_bytes
        above_reserve = left - min(self.reserve_bytes // 2, LEAST_ROOM_BYTES)
        room = min(LEAST_ROOM_BYTES, max(above_reserve // 2, left // 8))
        if self._user_limit_bytes is None:
            return room
        # half of what is left: else cells that keep their memory would exceed --limit step by step
        until_limit = (self._user_limit_bytes + LEAST_ROOM_BYTES - figures.private_bytes) // 2
        return min(room, max(until_limit, LAST_ROOM_BYTES))

    def limit_bytes(self, figures: MemoryFigures) -> int:
        """Return the private address space that the process may have while the cell runs.

        Args:
            figures: the current figures, with ``data_bytes``.
        """
        free = max(self.free_bytes(figures), self._slack_bytes(figures))
        return max((figures.data_bytes or 0) + free, self._floor_bytes)

    def _slack_bytes(self, figures: MemoryFigures) -> int:
        """Return the bytes that may be allocated although the cell has used up its memory.

        libzmq's own threads allocate a few KiB when a front-end sends a message, and end the
        process if the allocation is refused. A loop that tries again and again uses up an eighth of
        the slack at each check, but never the reserve.
        """
        left = figures.available_bytes - self.reserve_bytes * 5 // 4
        if self._user_limit_bytes is not None:
            above_limit = self._user_limit_bytes + LEAST_ROOM_BYTES // 4
            left = min(left, above_limit - figures.private_bytes)
        return max(0, left // 8)

    def cushion_bytes(self, figures: MemoryFigures) -> int:
        """Return the bytes that may be added to the limit while code around the user's runs.

        It is half of what is left above half of the reserve, so that other threads get less each
        time that they use it.
        """
        left = figures.available_bytes - self.reserve_bytes // 2
        if self._user_limit_bytes is not None:
            until_interrupt = self._interrupt_private_bytes - figures.private_bytes
            left = min(left, until_interrupt + self._refusal_bytes)
        return max(0, left // 2)

    def until_interrupt_bytes(self, figures: MemoryFigures) -> int:
        """Return the bytes that the cell may still use before it is interrupted.

        They are negative once that is due. With ``--limit``, the private pages count, too.
        """
        until_none_left = figures.available_bytes - self.interrupt_left_bytes
        if self._user_limit_bytes is None:
            return until_none_left
        until_limit = self._interrupt_private_bytes - figures.private_bytes
        return min(until_none_left, until_limit)
