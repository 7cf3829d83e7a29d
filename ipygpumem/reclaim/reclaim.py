"""Frees memory step by step, and measures the effect of each step.

The steps follow the references: holders of objects first, then the garbage collector, then the
pools and caches that keep the freed memory, the host's allocator last. A step that fails is
reported, and the next one runs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, count, repeat
from operator import is_, ne
from time import perf_counter
from typing import Any, NamedTuple

from ipygpumem import interrupts
from ipygpumem.errors import GpuMemError, describe_error
from ipygpumem.heap.arrays import holds_objects, library_type, read_array, watch
from ipygpumem.heap.bulk import Kinds, differences
from ipygpumem.heap.garbage import Garbage, GcMark, weak
from ipygpumem.introspect import identities, is_instance, loaded
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import has_mps, loaded_torch
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.host import free_heap_bytes, malloc_trim
from ipygpumem.records import FreeingStep, Reading
from ipygpumem.scope.scope import ownable

Step = tuple[str, Callable[[], object]]
"""A step's name and function.

It returns 0 if there was nothing to do, True if it caused the whole decrease, ``AtMost`` if an
allocator limits that.
"""


class AtMost(NamedTuple):
    """Maximum number of bytes of RAM that a step can have freed, by its own count or by an
    allocator.
    """

    size_bytes: int


def run_steps(meter: Meter, steps: list[Step], done: list[FreeingStep]) -> None:
    """Run ``steps`` in order and append the memory freed by each to ``done``; an interrupt loses no
    finished step.
    """
    before = _now(meter)
    for name, action in steps:
        started = perf_counter()
        error, done_by_it = None, None
        try:
            with interrupts.reraise_swallowed():
                done_by_it = action()
        except MemoryError:
            error = "memory ran out"
        except Exception as problem:  # a broken step must not stop the next ones
            error = describe_error(problem)
        seconds = perf_counter() - started
        after = _now(meter)
        freed, freed_reserved = (
            _credit(before, after, done_by_it),
            decrease(reserved(before), reserved(after)),
        )
        done.append(FreeingStep(name, freed, freed_reserved, seconds, error))
        before = after


def _credit(
    before: Mapping[str, Reading], after: Mapping[str, Reading], done_by_it: object
) -> dict[str, int]:
    """Return each device's decrease by a step alone; other threads free memory too, and allocators
    free late.
    """
    freed = decrease(current(before), current(after))
    freed.pop("children", None)  # processes end some time after their names are deleted
    if type(done_by_it) in (int, bool) and not done_by_it:
        return dict.fromkeys(freed, 0)
    if isinstance(done_by_it, AtMost):
        return (
            freed | {"cpu": min(freed["cpu"], done_by_it.size_bytes)} if "cpu" in freed else freed
        )
    if done_by_it is not True:
        for device, size in freed.items():
            start, end = before[device].mapped_bytes, after[device].mapped_bytes
            if size > 0 and start is not None and end is not None:
                freed[device] = min(size, max(0, start - end))
    return freed


def _collect(garbage: Garbage, since: GcMark | None) -> object:
    falls: list[int] = []
    died = garbage.collect(since, falls)
    return AtMost(max(0, sum(falls))) if died and falls else died


def _now(meter: Meter) -> dict[str, Reading]:
    """Return the meter's readings; empty if memory has run out."""
    try:
        return meter.now()
    except MemoryError:
        return {}


def steps_that_free(
    garbage: Garbage, since: Callable[[], GcMark | None] = lambda: None, *, devices: bool = True
) -> list[Step]:
    """Return the steps that free memory once nothing refers to it any more.

    ``since`` returns the mark after which all possible garbage was made, if there is one. Pass
    ``devices=False`` if a broken context prevents emptying the devices' caches.
    """
    steps: list[Step] = [("garbage", lambda: _collect(garbage, since()))]
    if loaded("pyarrow") is not None:
        steps.append(("pyarrow's pool", release_pyarrow_pool))
    if devices and loaded_torch() is not None:
        steps.append(("device caches", empty_device_caches))
    return [*steps, ("malloc_trim", trim_host_heap)]


def free_now(
    meter: Meter, garbage: Garbage, *first: Step
) -> tuple[list[FreeingStep], dict[str, int]]:
    """Run ``first``, then all steps that free memory; return the steps, and each
    device's decrease.
    """
    steps, before = list[FreeingStep](), current(meter.now())
    run_steps(meter, [*first, *steps_that_free(garbage)], steps)
    return steps, decrease(before, current(meter.now()))


def current(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return each device's current bytes: RSS for the host, live tensors for an accelerator."""
    return {device: reading.current_bytes for device, reading in readings.items()}


def reserved(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return each accelerator's reserved bytes, without the host."""
    return {
        device: reading.reserved_bytes
        for device, reading in readings.items()
        if reading.reserved_bytes is not None
    }


def decrease(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return each device's decrease; negative for an increase."""
    return {device: size - after[device] for device, size in before.items() if device in after}


def empty_device_caches() -> None:
    """Free cached device memory, on every accelerator that the user's code has initialised."""
    torch: Any = loaded_torch()
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            if getattr(
                module, "is_current_stream_capturing", bool
            )():  # asking other streams might create contexts
                raise GpuMemError("skipped while a CUDA graph is captured: freeing would spoil it")
            if private_pools(name) is False:
                # cuBLAS keeps some MiB per handle and stream
                _call(torch, f"_{name}_clearCublasWorkspaces")
            module.empty_cache()
            _call(torch, "_host_emptyCache")  # pinned host memory
    if has_mps(torch):
        torch.mps.empty_cache()
    cupy = loaded("cupy")
    if (
        cupy is not None
        and cupy.cuda.is_available()
        and not cupy.cuda.get_current_stream().is_capturing()
    ):
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def private_pools(backend: str) -> bool | None:
    """Return True if a captured graph, whose addresses must stay, may exist; None if the allocator
    hides it.
    """
    try:
        by_device = snapshots(backend)
    except RuntimeError:  # an allocator without snapshots, such as cudaMallocAsync
        return None
    return any(segment.private for snapshot in by_device.values() for segment in snapshot.segments)


def _call(torch: Any, name: str) -> None:
    function = getattr(torch._C, name, None)  # private, absent in some builds
    if function is not None:
        function()


def release_pyarrow_pool() -> bool:
    """Free the unused memory of pyarrow's pool, where pandas keeps text; return False if the pool
    was never used.
    """
    pool: Any = sys.modules["pyarrow"].default_memory_pool()
    if pool.max_memory() == 0:
        return False
    pool.release_unused()
    # the pool reports its free pages nowhere, and may hold more of them than the most it had
    # allocated
    return True


def trim_host_heap() -> AtMost | bool:
    """Ask glibc to free unused heap pages; return the heap's unused bytes, or False if no page was
    freed.
    """
    trim, free = malloc_trim(), free_heap_bytes()
    if trim is None or not trim(0):
        return False
    return True if free is None else AtMost(free)


# -- how much garbage there may be --------------------------------------------------------------

_GONE = object()
"""Stands for the object of a name that has been deleted."""


class NameSnapshot:
    """The objects of all names at one moment; detects later whether one may be still alive without
    its name.

    Dead objects may leave objects behind in reference cycles, except tensors, which refer to
    nothing. It keeps no object alive, and does not cover objects that only other objects refer to.
    There may be 100,000 names: only tensors, and objects that support weak references, cost a
    Python object each.
    """

    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...] = ()) -> None:
        """Take a snapshot; ``names`` are those of the namespace, if the caller has a
        tuple of them.
        """
        values = tuple(namespace.values())
        self._names = names if len(names) == len(values) else tuple(namespace)
        self._identities = identities(values)
        self._leads_on = bytearray(map(gc.is_tracked, values))
        """For each name 1 if its object may refer to more, 0 for numbers and text."""
        kinds = Kinds(values)
        array_type = library_type("numpy", "ndarray")
        array_kinds = _kinds_that_derive_from(array_type, kinds.examples)
        for position in kinds.positions(array_kinds):
            self._leads_on[position] = holds_objects(read_array("dtype", values[position]))
        tensor_kinds = _kinds_that_derive_from(library_type("torch", "Tensor"), kinds.examples)
        # NumPy does not resize an array that has weak references.
        weak_kinds = {kind for kind, one in kinds.examples.items() if weak(one) is not None}
        weak_kinds -= tensor_kinds | array_kinds
        self._tensors: dict[str, tuple[int, Callable[[], bool]]] = {}
        self._weakly: dict[str, weakref.ref[Any]] = {}
        for position in self._owned(kinds.positions(tensor_kinds)):
            value = values[position]
            self._tensors[self._names[position]] = id(value), watch(value)
            self._leads_on[position] = False  # known better
        for position in self._owned(kinds.positions(weak_kinds)):
            self._weakly[self._names[position]] = weakref.ref(values[position])

    def some_may_live_on(self, namespace: dict[str, Any]) -> bool:
        """Return True if an object has lost its name, and it or an object that it referred to may
        be still alive.
        """
        if self._owned(self._changed(namespace)):
            return True
        # A new object may have the identity of one that has died.
        if any(map(is_, map(weakref.ref.__call__, self._weakly.values()), repeat(None))):
            return True
        return any(
            earlier != id(namespace.get(name)) and is_alive()
            for name, (earlier, is_alive) in self._tensors.items()
        )

    def _owned(self, positions: Iterable[int]) -> list[int]:
        """Return the positions of names that are the user's, and whose objects may
        refer to more.
        """
        leading = [position for position in positions if self._leads_on[position]]
        names = list(map(self._names.__getitem__, leading))
        owned = set(ownable(names))  # in C: there may be 100,000 names
        return [
            position
            for position, name in zip(leading, names, strict=True)
            if type(name) is str and name in owned
        ]

    def _changed(self, namespace: dict[str, Any]) -> Iterator[int]:
        """Return the positions of the names that have other objects now."""
        if identities(namespace) == identities(self._names):
            return differences(self._identities, identities(namespace.values()))
        values = map(namespace.get, self._names, repeat(_GONE))
        return compress(count(), map(ne, memoryview(self._identities).cast("Q"), map(id, values)))


def _kinds_that_derive_from(base: type | None, kinds: Mapping[int, object]) -> set[int]:
    """Return the identities of the types that derive from a library's class, if it is loaded."""
    if base is None:
        return set()
    return {kind for kind, one in kinds.items() if is_instance(one, base)}
