"""Keeps memory that is freed when nothing else can be allocated."""

from __future__ import annotations

import contextlib
from mmap import ACCESS_COPY, mmap

from ipygpumem.units import MIB

_SPARE_BYTES = 8 * MIB
"""Address space, which takes no RAM. Not ``malloc``'s, which would keep larger blocks after they
were freed."""


class ReserveBlock:
    """Small objects of all sizes and one large block."""

    def __init__(self) -> None:
        self.blocks: object = None
        """The reserve; None once it is freed. A caller sets it to None itself, which needs no
        memory: a call might."""

    def fill(self) -> None:
        """Allocate the reserve again if it was freed and if there is enough memory, which threads
        of an earlier cell may have used up.
        """
        if self.blocks is None:
            with contextlib.suppress(MemoryError, OSError):
                self.blocks = _allocate()

    @property
    def freed_bytes(self) -> int:
        """Address space that counts as free only because the reserve was freed."""
        return _SPARE_BYTES if self.blocks is None else 0


def _allocate() -> object:
    """Return objects of all sizes that Python's allocator serves, and address space."""
    small: list[object] = []
    for size in range(1, 480, 16):
        small += [bytes(size) for _ in range(100)]
    small += map(float, range(100))
    small += (object() for _ in range(100))
    return small, mmap(-1, _SPARE_BYTES, access=ACCESS_COPY)
