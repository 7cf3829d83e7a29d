"""Empties the pools and caches in which libraries and the C library keep freed memory."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ipygpumem.errors import GpuMemError
from ipygpumem.introspect import loaded
from ipygpumem.probes.accelerators import has_mps, loaded_torch
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.malloc import free_heap_bytes, trim_heap


class AtMost(NamedTuple):
    """A step's result: the maximum number of bytes of RAM that it can have freed, by its own count
    or by an allocator's.
    """

    size_bytes: int


def empty_device_caches() -> None:
    """Free cached device memory, on every accelerator that the user's code has initialised."""
    torch: Any = loaded_torch()
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            _empty_torch_cache(torch, name, module)
    if has_mps(torch):
        torch.mps.empty_cache()
    _empty_cupy_pools()


def _empty_torch_cache(torch: Any, backend: str, module: Any) -> None:
    """Empty the allocator's cache of a backend (``cuda``), and its other caches."""
    # Asking other streams than the current one might create contexts.
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise GpuMemError("skipped while a CUDA graph is captured: freeing would spoil it")
    if private_pools(backend) is False:
        # cuBLAS keeps some MiB per handle and stream
        _call_if_present(torch, f"_{backend}_clearCublasWorkspaces")
    module.empty_cache()
    _call_if_present(torch, "_host_emptyCache")  # pinned host memory


def private_pools(backend: str) -> bool | None:
    """Return True if torch's allocator has a private pool on a device of ``backend``, as of a
    captured CUDA graph, whose addresses must stay the same; None if the allocator cannot say.
    """
    try:
        by_device = snapshots(backend)
    except RuntimeError:  # an allocator without snapshots, such as cudaMallocAsync
        return None
    for snapshot in by_device.values():
        if any(segment.private for segment in snapshot.segments):
            return True
    return False


def _call_if_present(torch: Any, name: str) -> None:
    """Call the function ``name`` of ``torch._C``, which some builds do not have."""
    function = getattr(torch._C, name, None)
    if function is not None:
        function()


def _empty_cupy_pools() -> None:
    """Free the unused memory of CuPy's pools, unless a CUDA graph is captured."""
    cupy = loaded("cupy")
    if cupy is None or not cupy.cuda.is_available():
        return
    if cupy.cuda.get_current_stream().is_capturing():
        return
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def release_pyarrow_pool() -> bool:
    """Free the unused memory of pyarrow's pool, where pandas keeps text; return False if the pool
    was never used.
    """
    pool: Any = sys.modules["pyarrow"].default_memory_pool()
    if pool.max_memory() == 0:
        return False
    pool.release_unused()
    # True, so that the whole decrease of RAM counts: the pool reports its free pages nowhere, and
    # may have more of them than its highest allocation.
    return True


def trim_host_heap() -> AtMost | bool:
    """Ask glibc to free the heap's unused pages.

    Returns:
        False if it freed none; else the heap's unused bytes before, which it can have freed at
        most; True if these are unknown.
    """
    free_bytes = free_heap_bytes()
    if not trim_heap():
        return False
    return True if free_bytes is None else AtMost(free_bytes)
