"""Tells memory that is a mapped file from allocated memory: only its pages in RAM count."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

from ipygpumem.probes.mappings import mapped_files
from ipygpumem.probes.pages import resident_bytes
from ipygpumem.units import format_bytes


class PagesInRam(NamedTuple):
    """The part of a mapped file that is in RAM."""

    size_bytes: int
    note: str
    """Says that the size is that of the pages in RAM, and of which file."""


class MappedFiles:
    """The mapped files of this process at one moment.

    Libraries show mapped files as ordinary arrays and tensors, such as ``torch.load(mmap=True)``
    and ``pyarrow.memory_map``. So the address decides. The kernel's list is read once, and only if
    it is needed.
    """

    @cached_property
    def _ends(self) -> dict[int, int]:
        """The end of each mapping by its start; mappings that follow each other are one."""
        ends: dict[int, int] = {}
        last = -1
        for start, end in mapped_files():
            if last in ends and ends[last] == start:
                ends[last] = end
            else:
                ends[start] = end
                last = start
        return ends

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(self._ends)

    def contain(self, address: int, size_bytes: int) -> bool:
        """Return True if all bytes from an address on are part of a mapped file."""
        position = bisect_right(self._starts, address) - 1
        return position >= 0 and address + size_bytes <= self._ends[self._starts[position]]

    def in_ram(self, address: int, size_bytes: int) -> PagesInRam | None:
        """Return the part of some memory that is in RAM; None if it is no mapped file, or if that
        is not known.
        """
        if not self.contain(address, size_bytes):
            return None
        try:
            resident = resident_bytes(address, size_bytes)
        except OSError:
            return None
        return PagesInRam(resident, note_on_pages(size_bytes, is_file=True))


def note_on_pages(size_bytes: int, *, is_file: bool) -> str:
    """Return the note of memory of which only the pages in RAM count."""
    kind = "mapped file" if is_file else "memory map"
    return f"the pages in RAM of a {kind} of {format_bytes(size_bytes)}"
