"""Gives memory back, step by step, and says how much each step gave.

The order is that of the references: whatever holds objects first, then the garbage collector, then the caches
that keep the freed memory, the host's allocator last. A step that fails is reported, and the next one runs.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from ipygpumem.errors import GpuMemError, said
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Reading, ReclaimStep
from ipygpumem.objects import interrupts
from ipygpumem.objects.garbage import Garbage, Mark
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.pools import is_loaded

Step = tuple[str, Callable[[], object]]
"""Its name and its function, which returns 0 if there was nothing to do, True if it caused the whole decrease."""


def run_steps(meter: Meter, steps: list[Step], done: list[ReclaimStep]) -> None:
    """Run ``steps`` in order and append to ``done`` what each gave back; an interrupt loses no finished step."""
    before = _now(meter)
    for name, action in steps:
        started = perf_counter()
        error, done_by_it = None, None
        try:
            with interrupts.kept():
                done_by_it = action()
        except MemoryError:
            error = "memory ran out"
        except Exception as problem:  # one broken step must not keep the others from running
            error = said(problem)
        seconds = perf_counter() - started
        after = _now(meter)
        given, returned = _credit(before, after, done_by_it), fallen(reserved(before), reserved(after))
        done.append(ReclaimStep(name, given, returned, seconds, error))
        before = after


def _credit(before: Mapping[str, Reading], after: Mapping[str, Reading], done_by_it: object) -> dict[str, int]:
    """Return how far each device fell by a step: other threads free memory, and allocators purge what was freed."""
    given = fallen(current(before), current(after))
    if type(done_by_it) in (int, bool) and not done_by_it:
        return dict.fromkeys(given, 0)
    if done_by_it is not True:
        for device, size in given.items():
            start, end = before[device].mapped_bytes, after[device].mapped_bytes
            if size > 0 and start is not None and end is not None:
                given[device] = min(size, max(0, start - end))
    return given


def _now(meter: Meter) -> dict[str, Reading]:
    """Return what the meter reads; nothing while there is no memory for that."""
    try:
        return meter.now()
    except MemoryError:
        return {}


def steps_that_free(
    garbage: Garbage, since: Callable[[], Mark | None] = lambda: None, *, devices: bool = True
) -> list[Step]:
    """Return the steps that give memory back once nothing refers to it any more.

    ``since`` returns the moment after which all was made that may be garbage now, if there is one. The caches of
    ``devices`` cannot be emptied where a context is broken.
    """
    steps: list[Step] = [("garbage", lambda: garbage.collect(since()))]
    if devices and loaded_torch() is not None:
        steps.append(("device caches", empty_device_caches))
    return [*steps, ("malloc_trim", trim_host_heap)]


def current(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return each device's bytes: RSS for the host, those of live tensors for an accelerator."""
    return {device: reading.current_bytes for device, reading in readings.items()}


def reserved(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return what each accelerator's allocator reserves; the host is left out."""
    return {
        device: reading.reserved_bytes for device, reading in readings.items() if reading.reserved_bytes is not None
    }


def fallen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how far each device fell; negative where it rose."""
    return {device: size - after[device] for device, size in before.items() if device in after}


def empty_device_caches() -> None:
    """Return cached device memory to the driver, for every accelerator that the user's code has initialised."""
    torch: Any = loaded_torch()
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            if _is_capturing(module):
                raise GpuMemError("skipped while a CUDA graph is captured: freeing would spoil it")
            if private_pools(name) is False:
                _call(torch, f"_{name}_clearCublasWorkspaces")  # cuBLAS keeps some MiB per handle and stream
            module.empty_cache()
            _call(torch, "_host_emptyCache")  # pinned host memory
    mps = getattr(getattr(torch, "backends", None), "mps", None)
    if mps is not None and mps.is_available():
        torch.mps.empty_cache()
    cupy: Any = sys.modules["cupy"] if is_loaded("cupy") else None
    if cupy is not None and cupy.cuda.is_available() and not cupy.cuda.get_current_stream().is_capturing():
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def _is_capturing(module: Any) -> bool:
    """Whether the current stream is captured into a graph. Asking other streams might create contexts."""
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def private_pools(backend: str) -> bool | None:
    """Return whether a captured graph may be alive, whose addresses must stay; None if the allocator does not tell."""
    try:
        by_device = snapshots(backend)
    except RuntimeError:  # an allocator without snapshots, such as cudaMallocAsync
        return None
    return any(segment.private for snapshot in by_device.values() for segment in snapshot.segments)


def _call(torch: Any, name: str) -> None:
    function = getattr(torch._C, name, None)  # private, absent in some builds
    if function is not None:
        function()


def trim_host_heap() -> bool:
    """Ask glibc to return free heap pages to the system, if there is such a call; return True if it did."""
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
