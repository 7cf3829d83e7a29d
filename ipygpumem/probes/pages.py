"""Reads how much of an address range of this process is really in RAM.

An array's size is what was asked for. Pages that were never written to take no memory, pages of a mapped file belong
to the file, and others are swapped out: the kernel tells for each page (``/proc/self/pagemap``, documented under
admin-guide/mm/pagemap; since Linux 4.2 a process may read its own without being root).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_ENTRY = 8
_AT_ONCE = 1 << 17
"""Pages that are read in one go: 1 MiB of entries for 512 MiB of memory."""
_PRESENT, _FILE_OR_SHARED = 0x80, 0x20
"""Bits 63 and 61 of an entry, in its highest byte."""
_ANONYMOUS = bytes(int(value & _PRESENT != 0 and value & _FILE_OR_SHARED == 0) for value in range(256))
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SMALL = 16 * PAGE_BYTES
"""Below this a range is taken as present: asking for each of many small ones would cost more than it tells."""


def anonymous_bytes(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each range (address, size in bytes) how much is in RAM as memory of this process alone.

    Raises:
        OSError: the system does not tell.
    """
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [size if size < _SMALL else _present(descriptor, address, size) for address, size in ranges]
    finally:
        os.close(descriptor)


def _present(descriptor: int, address: int, size: int) -> int:
    first, last = address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES)
    pages = 0
    for start in range(first, last, _AT_ONCE):
        wanted = min(_AT_ONCE, last - start)
        highest = os.pread(descriptor, wanted * _ENTRY, start * _ENTRY)[_ENTRY - 1 :: _ENTRY]
        pages += highest.translate(_ANONYMOUS).count(1)
    return min(size, pages * PAGE_BYTES)
