"""The memory that a device has for the estimated code."""

from __future__ import annotations

from dataclasses import replace

import torch
from psutil import Process

from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.probes.accelerators import has_context, initialized_backend, limit_bytes
from ipygpumem.probes.allocator import expandable_setting, snapshots
from ipygpumem.probes.device_memory import memory
from ipygpumem.units import MIB, format_bytes

_CONTEXT_BYTES = 768 * MIB
"""Assumed bytes of a process's context, the code of libraries and the driver.

They come in addition to the allocator's segments. No call reports them in advance; 400 to 700 MiB
are usual for torch's builds with CUDA 12 and 13.
"""
_SPARE_FRACTION = 50
"""The minimum memory, divided by this, is headroom for buffers of kernels.

On a simulated card, training GPT-2 XL with checkpoints ran out of memory without headroom,
and ran with 1.3 % more.
"""


def with_room(
    figures: DeviceEstimate, already_held_bytes: int, room_bytes: int | None
) -> DeviceEstimate:
    """Return a device's estimate with the memory that it has for the code.

    Args:
        figures: the estimate without that memory.
        already_held_bytes: the part of the figures that this process holds on the device already.
        room_bytes: the user's figure for the memory; None: the device's free memory.
    """
    name = figures.device
    context_bytes = 0
    if room_bytes is not None:
        context_bytes = _bytes_besides_tensors(name, already_held_bytes)
    else:
        free = free_bytes(name)
        if free is not None:
            room_bytes = max(0, free + already_held_bytes)
            if _lacks_context(name):
                context_bytes = _CONTEXT_BYTES
    spare_bytes = 0
    if name != "cpu":
        spare_bytes = figures.needed_bytes // _SPARE_FRACTION
    return replace(
        figures, room_bytes=room_bytes, context_bytes=context_bytes, spare_bytes=spare_bytes
    )


def _lacks_context(name: str) -> bool:
    """Return True for a CUDA device on which this process has no context yet."""
    if not name.startswith("cuda"):
        return False
    index = torch.device(name).index or 0
    return not has_context(index)


def _bytes_besides_tensors(name: str, already_held_bytes: int) -> int:
    """Return the bytes that memory other than tensors takes of a size that the user has given.

    That is CUDA's context, or in RAM the libraries and objects of this process.

    Args:
        name: the device.
        already_held_bytes: the memory that tensors of this process hold there already.
    """
    if name.startswith("cuda"):
        return _CONTEXT_BYTES
    if name == "cpu":  # the user's figure is for the whole process
        rss_bytes = int(Process().memory_info().rss)
        return max(0, rss_bytes - already_held_bytes)
    return 0


def advice(figures: DeviceEstimate) -> str:
    """Return advice to use expandable segments if they would help; else an empty text.

    They help if the code would fit without the gaps between blocks.
    """
    device = figures.device
    if not device.startswith("cuda") or not figures.gaps_decide:
        return ""
    enough_bytes = figures.peak_bytes + figures.spare_bytes + figures.context_bytes
    if enough_bytes > (figures.room_bytes or 0):
        return ""
    setting = expandable_setting()
    if not setting:
        return ""
    enough = format_bytes(enough_bytes)
    return (
        f"fragmentation decides on {device}: start Python with {setting}, which prevents most of "
        f"it; then {enough} should suffice"
    )


def free_bytes(name: str) -> int | None:
    """Return the free memory of a device, within torch's limit.

    It includes cached memory that the allocator can free. None if the device is not available,
    cannot be queried, or if that would take a context of hundreds of MiB.
    """
    try:
        return _free_bytes(torch.device(name))
    except Exception:  # a broken context or driver must not end the estimate
        return None


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, of which the allocator's cache is a part."""
    figures = memory(device)
    free = figures.free_bytes
    reserved = figures.reserved_bytes
    cuda = initialized_backend("cuda")
    if free is not None and reserved is not None and cuda is not None:
        index = device.index or 0
        allowed = limit_bytes(cuda, index) - reserved
        if not has_context(index):
            allowed += _CONTEXT_BYTES  # which no limit counts
        free = min(free, allowed)
    if free is None or not reserved:
        return free
    # Gaps between blocks in use cannot be freed.
    snapshot = snapshots("cuda").get(figures.device)
    if snapshot is None:
        allocated = figures.allocated_bytes or 0
        return free + reserved - allocated
    return free + snapshot.cached_bytes
