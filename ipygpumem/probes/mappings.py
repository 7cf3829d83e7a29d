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
    """A range of this process's addresses: one mapping."""

    start: int
    end: int
    """The first address after it."""
    allowed: bytes
    """``rw-p``: may be read and written, and is private."""
    has_file: bool
    """True if it maps a file."""
    name: bytes
    """The file's path, or the kernel's name such as ``[heap]``; empty for anonymous memory."""
    resident_bytes: int
    """Bytes of its pages in RAM."""
    private_bytes: int
    """Bytes of its pages in RAM that belong to this process alone."""

    def is_stack(self, previous: AddressRange | None) -> bool:
        """Return True for the stack of a thread. ``previous`` is the mapping before this one: a
        guard page directly below marks the stack of any thread but the main one.
        """
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
        """True if it looks like memory that a thread's arena of malloc uses: anonymous, and may be
        written to.
        """
        return self.allowed == b"rw-p" and not self.has_file and not self.name

    def is_reserved_for(self, arena: AddressRange) -> bool:
        """Return True if this is the unused end of a thread's arena.

        malloc reserves 64 MiB of addresses for an arena, and makes the part in use writable. That
        part begins with the mapping ``arena``, and this one must end where the 64 MiB do, or later.
        """
        if self.has_file or self.allowed != b"---p":
            return False
        return self.start < arena.start + _ARENA_BYTES <= self.end


def address_ranges() -> list[AddressRange]:
    """Return the mappings of this process in the order of their addresses; none if the kernel does
    not list them.
    """
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
    """Return the parts of this process's private pages that can be told by their mappings; the
    first three are 0 if the kernel does not list these.
    """
    data_bytes = stack_bytes = 0
    previous: AddressRange | None = None
    ranges = address_ranges()
    for mapping in ranges:
        if mapping.has_file:
            data_bytes += mapping.private_bytes
        elif mapping.is_stack(previous):
            stack_bytes += mapping.resident_bytes
        previous = mapping
    return OwnPages(data_bytes, stack_bytes, free_heap_in(ranges), free_blocks_bytes())


def free_heap_in(ranges: Sequence[AddressRange]) -> int:
    """Return the bytes in RAM of the free pages in the heap of glibc's malloc.

    malloc's own figure of free bytes also counts pages that are not in RAM. So they are at most the
    pages in RAM of the heap's mappings, less the bytes in use there.

    Args:
        ranges: the mappings of this process.
    """
    figures = heap_figures()
    if figures is None:
        return 0
    mappings_of_heap = [mapping for mapping in ranges if mapping.name == b"[heap]"]
    mappings_of_heap += _arenas_in(ranges)
    resident_bytes = sum(mapping.resident_bytes for mapping in mappings_of_heap)
    return max(0, min(figures.free_bytes, resident_bytes - figures.used_bytes))


def _arenas_in(ranges: Sequence[AddressRange]) -> Iterator[AddressRange]:
    """Yield the mappings that are in use by threads' arenas.

    An arena begins at a multiple of its size, has one writable mapping, or several if NumPy has
    asked for huge pages in large arrays there, and ends with the mapping that is reserved for it.
    """
    arena = list[AddressRange]()  # the mappings of a possible arena, until its end confirms it
    for mapping in ranges:
        if arena and mapping.start != arena[-1].end:  # a gap: it was no arena
            arena = []
        if mapping.may_be_in_arena and (arena or mapping.start % _ARENA_BYTES == 0):
            arena.append(mapping)
            continue
        if arena and mapping.is_reserved_for(arena[0]):
            yield from arena
        arena = []


_SMALLEST_UNUSED_BYTES = 16 * MIB
"""Bytes of the smallest unused part of a mapping that counts: a thread's stack has 8 MiB, and uses
a few pages.
"""


def unused_in(ranges: Sequence[AddressRange]) -> dict[tuple[int, int], int]:
    """Return the bytes of each large mapping that have no page in RAM, by its start and end.

    These are ``np.zeros``, libraries' pools, mapped files and the like. Code and constant data of
    libraries, which are private and cannot be written to, do not count.
    """
    unused = dict[tuple[int, int], int]()
    for mapping in ranges:
        # "s" is for shared: a file mapped for reading, as by ``np.memmap(path, mode="r")``.
        is_data = mapping.allowed.startswith(b"rw") or mapping.allowed.endswith(b"s")
        if not is_data or mapping.name == b"[stack]":
            continue
        unused_bytes = mapping.end - mapping.start - mapping.resident_bytes
        if unused_bytes >= _SMALLEST_UNUSED_BYTES:
            unused[mapping.start, mapping.end] = unused_bytes
    return unused


_READABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r", re.MULTILINE)
"""The addresses in a line of ``/proc/self/maps`` whose mapping may be read."""


class ReadableAddresses:
    """The addresses that could be read when this was made; on Linux only.

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
        """The end of each mapping, by its start."""
        self._starts = sorted(self._ends)

    def may_have_had(self, start: int, end: int) -> bool:
        """Return True if a part of the memory from ``start`` to ``end`` could be read then, or if
        that is unknown.
        """
        if not self._starts:
            return True
        # Of the mappings that begin before ``end``, the last one reaches farthest.
        place = bisect_left(self._starts, end) - 1
        return place >= 0 and self._ends[self._starts[place]] > start


_LINE_OF_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)
"""A line of ``/proc/self/maps`` whose mapping has a file: it has an inode."""
_IN_MEMORY = (b"/dev/shm/", b"/memfd:", b"/SYSV", b"/dev/zero")  # nothing is written there
"""Starts of the names of files that are memory themselves."""


def mapped_files() -> list[tuple[int, int]]:
    """Return the start and the end of each mapping of a file on disk, in the order of their
    addresses; none if the kernel does not list them.
    """
    try:
        lines = _LINE_OF_FILE.findall(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    on_disk = [line for line in lines if not line[2].startswith(_IN_MEMORY)]
    return [(int(start, 16), int(end, 16)) for start, end, _ in on_disk]
