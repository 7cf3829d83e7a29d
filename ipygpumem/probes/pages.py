"""Reads which pages of an address range are in RAM, on Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ipygpumem.units import divided_up

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def open_file(path: str, flags: int) -> int | None:
    """Return a descriptor of a file for ``os.pread``; None if it cannot be opened."""
    if not hasattr(os, "pread"):  # Windows
        return None
    try:
        return os.open(path, flags)
    except OSError:
        return None


_ENTRY_BYTES = 8
"""Bytes of an entry in ``/proc/self/pagemap``, of which it has one for each page."""
_PAGES_AT_ONCE = 1 << 17
"""Number of pages to read at once: 1 MiB of entries for 512 MiB of memory."""
_PRESENT, _FILE_OR_SHARED = 0x80, 0x20
"""Bits 63 and 61 of an entry, in its highest byte."""
_RESIDENT = bytes(bool(value & _PRESENT) for value in range(256))
"""Pages in RAM: a table for ``bytes.translate``, with 1 at each value that the highest byte of such
a page's entry may have, else 0.
"""
_ANONYMOUS = bytes(value & (_PRESENT | _FILE_OR_SHARED) == _PRESENT for value in range(256))
"""The same table for private pages in RAM."""
_SMALLEST_READ_BYTES = 16 * PAGE_BYTES
"""Smaller ranges count as present: reading the entries of many small ones would cost too much."""


def anonymous_bytes(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the private bytes in RAM of each range, given as its address and its size in bytes.

    Pages do not count that were never written to (``np.zeros``), are of a mapped file, or are
    swapped out. The kernel reports each page in ``/proc/self/pagemap`` (see
    admin-guide/mm/pagemap).

    Raises:
        OSError: the file cannot be read, as on other systems.
    """
    return _bytes_of_kind(ranges, _ANONYMOUS)


def resident_bytes(address: int, size: int) -> int:
    """Return the bytes in RAM of the ``size`` bytes from ``address`` on, also those of a mapped
    file; ``OSError`` if they cannot be read.
    """
    return _bytes_of_kind([(address, size)], _RESIDENT)[0]


def _bytes_of_kind(ranges: Iterable[tuple[int, int]], kind: bytes) -> list[int]:
    """Return the bytes of each range in pages of a kind, such as ``_RESIDENT``; small ranges count
    whole.
    """
    descriptor = open_file("/proc/self/pagemap", os.O_RDONLY)
    if descriptor is None:
        raise OSError("/proc/self/pagemap cannot be read")
    try:
        counted = list[int]()
        for address, size in ranges:
            if size >= _SMALLEST_READ_BYTES:
                counted.append(_bytes_of_kind_in_range(descriptor, address, size, kind))
            else:
                counted.append(size)
        return counted
    finally:
        os.close(descriptor)


def _bytes_of_kind_in_range(descriptor: int, address: int, size: int, kind: bytes) -> int:
    """Return the bytes of a range in pages of a kind; ``descriptor`` is that of the page map."""
    first_page = address // PAGE_BYTES
    end_page = divided_up(address + size, PAGE_BYTES)
    pages_of_kind = 0
    for page in range(first_page, end_page, _PAGES_AT_ONCE):
        pages_to_read = min(_PAGES_AT_ONCE, end_page - page)
        entries = os.pread(descriptor, pages_to_read * _ENTRY_BYTES, page * _ENTRY_BYTES)
        highest_bytes = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]  # of a little-endian number
        pages_of_kind += highest_bytes.translate(kind).count(1)
    return min(size, pages_of_kind * PAGE_BYTES)  # the range may begin and end within a page
