"""torch's devices that have no probe of their own, through ``torch.accelerator`` or the device's own module.

These are MTIA and what plug-ins register as PrivateUse1 (``torch.npu`` and its like).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipygpumem.probes.accelerators import other_accelerator
from ipygpumem.probes.pools import Pool


def pools(torch: Any) -> Iterator[Pool]:
    """Yield what torch's allocator has on each device of the kind, once the user's code has initialised it."""
    name = other_accelerator()
    module = getattr(torch, name, None) if name else None
    initialized = getattr(module, "is_initialized", None)
    if module is None or initialized is None or not initialized():
        return
    source = _source(torch, module)
    what = ("memory_allocated", "max_memory_allocated", "memory_reserved", "get_device_properties")
    functions: list[Any] = [getattr(source, one, getattr(module, one, None)) for one in what]
    allocated, highest, reserved, properties = functions
    for number in range(module.device_count() if allocated is not None else 0):
        yield Pool(
            number,
            int(allocated(number)),
            None if highest is None else int(highest(number)),
            None if reserved is None else int(reserved(number)),
            None if properties is None else getattr(properties(number), "total_memory", None),
            name,
        )


def _source(torch: Any, module: Any) -> Any:
    """Return who tells of the allocator: ``torch.accelerator`` if it knows it (torch 2.9), else the device's module."""
    knows = getattr(torch._C, "_accelerator_isAllocatorInitialized", None)
    try:
        return torch.accelerator if knows is not None and knows() else module
    except RuntimeError:  # the plug-in's allocator is of another kind
        return module
