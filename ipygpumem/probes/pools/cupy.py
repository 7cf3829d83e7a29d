"""CuPy: its default memory pool on the current device. To ask for another device would make a context there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipygpumem.probes.pools import Pool


def pools(cupy: Any) -> Iterator[Pool]:
    """Yield the pool of the current device, if there is one."""
    if cupy.cuda.is_available():
        pool = cupy.get_default_memory_pool()
        index = cupy.cuda.runtime.getDevice()
        yield Pool(index, pool.used_bytes(), None, pool.total_bytes(), pool.get_limit() or None)
