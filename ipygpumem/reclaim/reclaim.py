"""Frees memory step by step, and measures the effect of each step.

The steps follow the references: holders of objects first, then the garbage collector, then the
pools and caches that keep the freed memory, the host's allocator last. A step that fails is
reported, and the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

from ipygpumem import interrupts
from ipygpumem.errors import describe_error
from ipygpumem.heap.live.garbage import Garbage, GcMark
from ipygpumem.introspect import loaded
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.reclaim.emptying import (
    AtMost,
    empty_device_caches,
    release_pyarrow_pool,
    trim_host_heap,
)
from ipygpumem.records import FREE_HEAP_PAGES, FreeingStep, Reading

Step = tuple[str, Callable[[], object]]
"""A step's name and function.

The function's result says how much of the decrease in RAM, while it ran, is due to it: 0 or False
if there was nothing to do, True if all of it is, ``AtMost`` if there is a known limit. Any other
result says nothing about it.
"""


def run_steps(meter: Meter, steps: list[Step], done: list[FreeingStep]) -> None:
    """Run ``steps`` in order, and append the record of each to ``done``, so that the caller has
    those of the finished steps if an interrupt ends the call.
    """
    before = _readings_now(meter)
    for name, action in steps:
        started = perf_counter()
        result, error = _run_step(action)
        seconds = perf_counter() - started
        after = _readings_now(meter)
        freed = _freed_by_step(before, after, result)
        freed_reserved = decrease(bytes_reserved(before), bytes_reserved(after))
        done.append(FreeingStep(name, freed, freed_reserved, seconds, error))
        before = after


def _run_step(action: Callable[[], object]) -> tuple[object, str | None]:
    """Run a step; return its result, and None or its error in words, because a broken step must not
    stop the next ones. Only an interrupt is raised.
    """
    try:
        with interrupts.reraise_swallowed():
            return action(), None
    except Exception as problem:
        if interrupts.is_from_signal(problem):
            raise
        if isinstance(problem, MemoryError):
            return None, "memory ran out"
        return None, describe_error(problem)


def _freed_by_step(
    before: Mapping[str, Reading], after: Mapping[str, Reading], result: object
) -> dict[str, int]:
    """Return the bytes that a step itself has freed on each device.

    Other threads free memory in this time, too, and allocators free late: ``result``, that of the
    step, limits the decrease that counts (see ``Step``).
    """
    freed = decrease(bytes_in_use(before), bytes_in_use(after))
    freed.pop("children", None)  # processes end some time after their names are deleted
    if type(result) in (int, bool) and not result:
        return dict.fromkeys(freed, 0)
    if result is True:
        return freed
    if isinstance(result, AtMost):
        if "cpu" in freed:
            freed["cpu"] = min(freed["cpu"], result.size_bytes)
        return freed
    # A decrease of RAM by more than that of the address space has another cause, such as pages that
    # the kernel has swapped out.
    for device, size in freed.items():
        mapped_before = before[device].mapped_bytes
        mapped_after = after[device].mapped_bytes
        if size > 0 and mapped_before is not None and mapped_after is not None:
            freed[device] = min(size, max(0, mapped_before - mapped_after))
    return freed


def _collect(garbage: Garbage, since: GcMark | None) -> int | AtMost:
    """Collect garbage made since the mark; return the number of objects that died, or the decrease
    of RAM during the collection itself, if that is known.
    """
    decreases: list[int] = []  # of each collection
    died = garbage.collect(since, decreases)
    if died and decreases:
        return AtMost(max(0, sum(decreases)))
    return died


def _readings_now(meter: Meter) -> dict[str, Reading]:
    """Return the meter's readings; empty if there is no memory for them."""
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
    return [*steps, (FREE_HEAP_PAGES, trim_host_heap)]


def free_now(
    meter: Meter, garbage: Garbage, *first: Step
) -> tuple[list[FreeingStep], dict[str, int]]:
    """Run the steps ``first``, then all steps that free memory.

    The result are the records of all steps, and each device's decrease from the first step to the
    last.
    """
    steps = list[FreeingStep]()
    before = bytes_in_use(meter.now())
    run_steps(meter, [*first, *steps_that_free(garbage)], steps)
    return steps, decrease(before, bytes_in_use(meter.now()))


def bytes_in_use(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return each device's current bytes: RSS for the host, live tensors for an accelerator."""
    return {device: reading.current_bytes for device, reading in readings.items()}


def bytes_reserved(readings: Mapping[str, Reading]) -> dict[str, int]:
    """Return each accelerator's reserved bytes, without the host."""
    return {
        device: reading.reserved_bytes
        for device, reading in readings.items()
        if reading.reserved_bytes is not None
    }


def decrease(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the decrease of each device that both have, in bytes; negative for an increase."""
    return {device: size - after[device] for device, size in before.items() if device in after}
