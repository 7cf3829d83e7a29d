"""Settings, marks and steps of tests about the memory of a whole process."""

from __future__ import annotations

import mmap
import resource
import sys

import pytest

from ipygpumem.heap.sizes.sizes import MeasuredSize
from ipygpumem.probes import own_limits
from ipygpumem.units import MIB

QUIET = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0",
}
"""Settings with which pyarrow and polars keep no freed memory."""
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="memory in RAM is read as Linux shows it"
)


def touched(size: int) -> mmap.mmap:
    """Return ``size`` bytes of memory whose pages are really there."""
    memory = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def allow(name: str, more: int) -> int:
    """Let this process have so much more than it has, and return the limit."""
    limit = own_limits.used_bytes(name) + more
    resource.setrlimit(getattr(resource, name), (limit, -1))
    return limit


NOTE = "the pages in RAM of a mapped file of 8 MiB"


def assert_read(size: MeasuredSize, *, pages: int) -> None:
    """Check that a mapped file of 8 MiB counts some bytes; the kernel maps up to 2 MiB around what
    is read.
    """
    assert pages <= size.size_bytes <= pages + 3 * MIB
    assert size.notes == (NOTE,)
