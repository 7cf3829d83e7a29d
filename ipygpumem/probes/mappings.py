"""Reads the mappings of this process's address space, on Linux, and what its own pages hold."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ipygpumem.probes.malloc import free_blocks_bytes, heap_figures
from ipygpumem.probes.pages import PAGE_BYTES
from ipygpumem.units import KIB, MIB

_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *([^\n]*)\n"
    rb".*?^Rss: +(\d+) kB\n.*?^Anonymous: +(\d+) kB\n",
    re.MULTILINE | re.DOTALL,
)
"""Addresses, permissions, inode, name, RSS and private pages of a mapping in smaps; see
proc_pid_smaps(5).
"""
_ARENA_BYTES = 64 * MIB
"""Alignment of the arenas that malloc makes for threads (``HEAP_MAX_SIZE`` on 64 bits)."""


class AddressRange(NamedTuple):
    """A range of this process's addresses."""

    start: int
    end: int
    allowed: bytes
    """``rw-p``: may be read and written, and is private."""
    has_file: bool
    name: bytes
    resident_bytes: int
    private_bytes: int

    def is_stack(self, previous: AddressRange | None) -> bool:
        """Return True for the stack of a thread; its guard page is the mapping before it."""
        if self.name == b"[stack]":
            return True
        if self.name or self.allowed != b"rw-p" or previous is None:
            return False
        return previous.is_guard and previous.end == self.start

    @property
    def is_guard(self) -> bool:
        """True for a page that nothing may touch, as below a thread's stack."""
        return self.allowed == b"---p" and self.end - self.start == PAGE_BYTES

    @property
    def may_be_in_arena(self) -> bool:
        """True if it may be in use by a thread's arena."""
        return self.allowed == b"rw-p" and not self.has_file and not self.name

    def is_reserved_for(self, arena: AddressRange) -> bool:
        """Return True if this is the part of a thread's arena that malloc has reserved, after the
        part in use, which begins with ``arena``.
        """
        if self.has_file or self.allowed != b"---p":
            return False
        return self.start < arena.start + _ARENA_BYTES <= self.end


def address_ranges() -> list[AddressRange]:
    """Return the mappings in the order of their addresses; none if the kernel lists none."""
    try:
        text = Path("/proc/self/smaps").read_bytes()
    except OSError:
        return []
    ranges = list[AddressRange]()
    for start, end, allowed, inode, name, resident, private in _MAPPING.findall(text):
        ranges.append(
            AddressRange(
                int(start, 16),
                int(end, 16),
                allowed,
                inode != b"0",
                name,
                int(resident) * KIB,
                int(private) * KIB,
            )
        )
    return ranges


class OwnPages(NamedTuple):
    """Parts of the private pages of this process in RAM."""

    data_bytes: int
    """Written pages of mapped files: the data of libraries and extension modules."""
    stack_bytes: int
    """Stacks of all threads, as far as their guard pages show them."""
    free_heap_bytes: int
    """Free pages in the heap of glibc's malloc."""
    free_blocks_bytes: int = 0
    """Free blocks in the arenas of Python's allocator, also those never used since an arena began.
    """


def own_pages() -> OwnPages:
    """Return parts of this process's private pages, as the kernel lists its mappings; all 0 if it
    does not.
    """
    data = stacks = 0
    previous: AddressRange | None = None
    ranges = address_ranges()
    for mapping in ranges:
        if mapping.has_file:
            data += mapping.private_bytes
        elif mapping.is_stack(previous):
            stacks += mapping.resident_bytes
        previous = mapping
    return OwnPages(data, stacks, free_heap_in(ranges), free_blocks_bytes())


def free_heap_in(ranges: Sequence[AddressRange]) -> int:
    """Return the free pages in the heap of glibc's malloc, by the mappings of this process."""
    figures = heap_figures()
    if figures is None:
        return 0
    heap = [mapping for mapping in ranges if mapping.name == b"[heap]"]
    resident_bytes = sum(mapping.resident_bytes for mapping in (*heap, *_arenas_in(ranges)))
    return max(0, min(figures.free_bytes, resident_bytes - figures.used_bytes))


def _arenas_in(ranges: Sequence[AddressRange]) -> Iterator[AddressRange]:
    """Yield the mappings that are in use by threads' arenas.

    An arena has several if NumPy has asked for huge pages in large arrays there.
    """
    arena = list[AddressRange]()
    for mapping in ranges:
        if arena and mapping.start != arena[-1].end:
            arena = []
        if mapping.may_be_in_arena and (arena or mapping.start % _ARENA_BYTES == 0):
            arena.append(mapping)
            continue
        if arena and mapping.is_reserved_for(arena[0]):
            yield from arena
        arena = []


_LEAST_UNUSED_BYTES = 16 * MIB
"""Bytes of the smallest unused part of a mapping that counts: a thread's stack has 8 MiB, and uses
a few pages.
"""


def unused_in(ranges: Sequence[AddressRange]) -> dict[tuple[int, int], int]:
    """Return the bytes without a page in RAM of the large mappings, by first and last address.

    These are ``np.zeros``, libraries' pools, mapped files and the like. Code and constant data of
    libraries, which are private and cannot be written to, do not count.
    """
    unused = dict[tuple[int, int], int]()
    for mapping in ranges:
        is_data = mapping.allowed.startswith(b"rw") or mapping.allowed.endswith(b"s")
        if not is_data or mapping.name == b"[stack]":
            continue
        unused_bytes = mapping.end - mapping.start - mapping.resident_bytes
        if unused_bytes >= _LEAST_UNUSED_BYTES:
            unused[mapping.start, mapping.end] = unused_bytes
    return unused


_READABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r", re.MULTILINE)
"""The addresses in a line of ``/proc/self/maps`` whose mapping may be read."""


class ReadableAddresses:
    """The addresses that may be read at a moment; on Linux only.

    An array at other addresses is newer than that moment.

    >>> before = ReadableAddresses()
    >>> text = bytes(1 << 28)  # malloc maps such a large block
    >>> before.may_have_had(id(text), id(text) + len(text))
    False
    """

    def __init__(self) -> None:
        try:
            mappings = _READABLE.findall(Path("/proc/self/maps").read_bytes())
        except OSError:
            mappings = []
        self._ends = {int(start, 16): int(end, 16) for start, end in mappings}
        self._starts = sorted(self._ends)

    def may_have_had(self, start: int, end: int) -> bool:
        """Return True if a part of the memory from ``start`` to ``end`` could be read then, or if
        that is unknown.
        """
        if not self._starts:
            return True
        place = bisect_left(self._starts, end) - 1  # the last that begins before the end
        return place >= 0 and self._ends[self._starts[place]] > start


_LINE_OF_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)
"""A line of ``/proc/self/maps`` whose mapping has a file: it has an inode."""
_IN_MEMORY = (b"/dev/shm/", b"/memfd:", b"/SYSV", b"/dev/zero")  # nothing is written there
"""Starts of the names of files that are memory themselves."""


def mapped_files() -> list[tuple[int, int]]:
    """Return the first and last addresses of all mapped files, in this order; none if the kernel
    lists none.
    """
    try:
        lines = _LINE_OF_FILE.findall(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    on_disk = [line for line in lines if not line[2].startswith(_IN_MEMORY)]
    return [(int(start, 16), int(end, 16)) for start, end, _ in on_disk]
