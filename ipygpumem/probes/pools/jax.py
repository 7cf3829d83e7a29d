"""JAX: what its allocator says of each device (``Device.memory_stats``). On the CPU it says nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.probes.pools import Pool


def pools(jax: Any) -> Iterator[Pool]:
    """Yield the pool of each device of JAX's backend, if there is a backend: asking for devices would make one."""
    has_begun = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    if has_begun is None or not has_begun():
        return
    for device in jax.local_devices():
        stats = device.memory_stats()
        if stats:
            number = getattr(device, "local_hardware_id", None)
            yield Pool(
                device.id if number is None else number,
                stats["bytes_in_use"],
                stats.get("peak_bytes_in_use"),
                stats.get("pool_bytes"),
                stats.get("bytes_limit"),
            )
