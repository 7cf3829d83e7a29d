"""Says when a cell's freed memory stays with malloc.

``del losses`` after a long loop frees the objects, but malloc keeps the pages between the objects
that are left, and RAM does not fall.
"""

from __future__ import annotations

from ipygpumem.probes.malloc import free_heap_bytes
from ipygpumem.probes.mappings import own_pages
from ipygpumem.records import CellRecord, Usage
from ipygpumem.units import MIB, format_bytes

_LEAST_MOVED_BYTES = 64 * MIB
"""A cell that allocates or frees less, and deletes no name, is not looked at: asking malloc takes
up to 4 ms.
"""
_LEAST_BYTES = 128 * MIB
"""Twice what malloc keeps on purpose at the heap's end (``M_TRIM_THRESHOLD``, at most 64 MiB)."""
_LEAST_SHARE = 0.125
"""Share of the RSS from which free pages matter to the user."""


class FreeHeap:
    """The free pages of malloc's heap that earlier cells have mentioned: each is mentioned once."""

    def __init__(self) -> None:
        self._mentioned_bytes = 0
        """Free bytes in RAM at the last remark, or fewer since then."""
        self._rss_bytes = 0
        """RSS at the last remark."""

    def remark(self, record: CellRecord, source: str) -> list[str]:
        """Return a line in a list if the free pages of the heap have grown by much since the last
        remark; else nothing. Remember the free pages of the remark, or fewer if some have gone
        back, for the next call.

        Args:
            record: the finished cell.
            source: its source.
        """
        usage = record.usages[0] if record.usages else None  # the host's comes first
        if usage is None or usage.device != "cpu":
            return []
        fallen = self._rss_bytes - min(usage.before_bytes, usage.after_bytes)
        if fallen > self._mentioned_bytes // 2:
            # The pages have gone back, as with %gpumem free: malloc still counts them as free.
            self._mentioned_bytes = 0
        if not _frees_or_moves_much(usage, source):
            return []
        least_bytes = max(_LEAST_BYTES, int(_LEAST_SHARE * usage.after_bytes))
        free_bytes = self._free_pages(least_bytes)
        if free_bytes - self._mentioned_bytes < least_bytes:
            self._mentioned_bytes = min(self._mentioned_bytes, free_bytes)
            return []
        self._mentioned_bytes = free_bytes
        self._rss_bytes = usage.after_bytes
        return [f"{format_bytes(free_bytes)} free in the heap: %gpumem free"]

    def _free_pages(self, least_bytes: int) -> int:
        """Return the bytes of the heap's free pages in RAM. If malloc's own figure, an upper limit
        that costs less, is below ``least_bytes`` already, return that.
        """
        free = free_heap_bytes() or 0
        if free - self._mentioned_bytes < least_bytes:
            return free
        return own_pages().free_heap_bytes  # takes longer, but counts only the pages in RAM


def _frees_or_moves_much(usage: Usage, source: str) -> bool:
    """Return True for a cell that may have freed much memory, by its figures or by its source."""
    moved = max(abs(usage.delta_bytes), usage.peak_delta_bytes)
    return moved >= _LEAST_MOVED_BYTES or "del" in source or "clear" in source
