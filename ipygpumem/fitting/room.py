"""Finds the device that had too little memory for a try, and how much it would have needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ipygpumem.freeing.tracebacks import Failure
from ipygpumem.model import Usage
from ipygpumem.probes import own_limits
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import format_bytes

_NUMBERED = re.compile(r"\b(?:GPU|Allocation on device) (\d+)\b")
_HOSTS = re.compile(r"CPUAllocator|CPU memory|not enough memory: you tried", re.IGNORECASE)

Limits = Mapping[str, int]
"""The bytes that a budget allows, by device."""


def crowded_device(
    usages: Iterable[Usage], headroom: float, limits: Limits, *, host_available: int | None = None
) -> str | None:
    """Return a device of which less than ``headroom`` was free at the peak; None if there is none.

    Accelerators count if the try used one, else the host; a device with a budget counts always.

    Args:
        usages: what the try went through.
        headroom: share of a device's memory, or of its budget.
        limits: the budgets.
        host_available: how much host memory the process could still get after the try; by default asked now.
    """
    used = [usage for usage in usages if usage.peak_delta_bytes > 0]
    accelerated = any(usage.device != "cpu" for usage in used)
    for usage in used:
        limit = limits.get(usage.device)
        if limit is not None:
            taken = usage.peak_bytes
        elif not headroom or usage.total_bytes is None or (accelerated and usage.device == "cpu"):
            continue
        else:
            limit = _most(usage, usage.total_bytes)
            taken = usage.peak_bytes + _beside(usage, limit, host_available)
        if limit - taken < headroom * limit:
            return usage.device
    return None


def _most(usage: Usage, total: int) -> int:
    """Return how much of the device this process may have."""
    own = own_limits.limits() if usage.device == "cpu" else ()
    return min([total, *(limit.limit_bytes for limit in own)])


def _beside(usage: Usage, most: int, host_available: int | None) -> int:
    """Return what is in use on the device beside our live tensors and our allocator's cache, or our RSS."""
    if usage.device == "cpu":
        available = available_bytes() if host_available is None else host_available
        return max(0, most - available - usage.after_bytes)
    if usage.used_bytes is None or usage.reserved_bytes is None:
        return 0
    return max(0, usage.used_bytes - usage.reserved_bytes)


def why_too_little(device: str, needed: int, total: int | None) -> str:
    """Return why a device of ``total`` bytes did not have ``needed`` ones; empty where nobody knows."""
    own = own_limits.nearest() if device == "cpu" else None
    if own is not None and own.available_bytes <= available_bytes():
        return f", and {own.name} allows this process {format_bytes(own.limit_bytes)} of {own_limits.WHAT[own.name]}"
    return f", which has {format_bytes(total)}" if total and needed > total else ""


def failed_device(failure: Failure, usages: Sequence[Usage]) -> str:
    """Return the device whose memory ran out, by the error's text, else the accelerator that the try used."""
    accelerators = [usage for usage in usages if usage.device != "cpu" and usage.peak_bytes > 0]
    if failure.error == "MemoryError" or _HOSTS.search(failure.message) or not accelerators:
        return "cpu"
    numbered = _NUMBERED.search(failure.message)
    named = [usage.device for usage in accelerators if numbered and usage.device.endswith(f":{numbered[1]}")]
    return named[0] if named else max(accelerators, key=lambda usage: usage.peak_bytes).device
