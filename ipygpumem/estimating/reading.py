"""Reads the log of storages: the peak, what was alive then, what the allocator would reserve, and whether that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from ipygpumem.estimating.caching import Allocator, CachedBlock, least_bytes, users_rules
from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.estimating.storage_log import ACTIVATIONS, OTHER, ROLES, TEMPORARIES, StorageLife, StorageLog
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.host import available_bytes
from ipygpumem.probes.nvml import DeviceWide, Nvml
from ipygpumem.units import MIB

_CONTEXT_BYTES = 768 * MIB
"""What a device is taken to lose beside what the allocator reserves: to a process's context, to the code of libraries
and to the driver. Nobody tells it before; 400 to 700 MiB are usual for torch's builds with CUDA 12 and 13."""

_SPARE_SHARE = 50
"""One part in so many is set aside for what kernels take while they run. On a simulated card a training of GPT-2 XL
with checkpoints ran out of memory with nothing set aside, and ran with 1.3 % more."""


def with_room(figures: DeviceEstimate, there_bytes: int, room_bytes: int | None) -> DeviceEstimate:
    """Return a device's estimate with what it has for the code.

    Args:
        figures: the estimate without it.
        there_bytes: memory that this process holds there already, and that ``figures`` count as well.
        room_bytes: what the device has, if the user said it; else what is free there now.
    """
    name = figures.device
    context = _CONTEXT_BYTES if name.startswith("cuda") else 0
    if room_bytes is None and (free := free_bytes(name)) is not None:
        room_bytes = free + there_bytes
        if context and torch.cuda.memory_reserved(torch.device(name).index or 0) > 0:
            context = 0  # this process certainly has its own there
    elif room_bytes is None:
        context = 0
    spare = figures.needed_bytes // _SPARE_SHARE if name != "cpu" else 0
    return replace(figures, room_bytes=room_bytes, context_bytes=context, spare_bytes=spare)


def free_bytes(name: str) -> int | None:
    """Return the bytes that a device has free, with what the allocator keeps for later and can give back.

    None if the device is not here, cannot be asked, or if only a new context, of hundreds of MiB, could tell.
    """
    if name == "cpu":
        return available_bytes()
    device = torch.device(name)
    index = device.index or 0
    if device.type != "cuda" or index >= torch.cuda.device_count():
        return None
    try:
        reserved = torch.cuda.memory_reserved(index)
        if reserved:  # so there is a context already
            free, _ = torch.cuda.mem_get_info(index)
            split = snapshots("cuda").get(f"cuda:{index}")  # gaps between blocks in use stay gaps
            return int(free + reserved - torch.cuda.memory_allocated(index) - (split.fragmented_bytes if split else 0))
        wide = _by_driver(index)
    except Exception:  # a broken context or driver must not take the estimate with it
        return None
    return None if wide.total_bytes is None or wide.used_bytes is None else wide.total_bytes - wide.used_bytes


def _by_driver(index: int) -> DeviceWide:
    with closing(Nvml()) as nvml:
        if torch.cuda.is_initialized():
            return nvml.device(torch.cuda, index, processes=False, has_context=False)
        cards = nvml.cards()  # torch tells a device's UUID only once CUDA is initialised: several cannot be told apart
        return cards[0].wide if len(cards) == 1 else DeviceWide()


def read(log: StorageLog, device: str, label: str) -> DeviceEstimate:
    """Return the figures of one device, called ``label``. The host's storages take no more than their sizes."""
    own, rules = [life for life in log.lives if life.device == device], users_rules()
    events = _events(own)
    allocator = Allocator(rules) if label != "cpu" else None
    blocks: dict[int, CachedBlock] = {}
    sizes = [life.size_bytes for life in own]
    allocated = peak = peak_at = 0
    for moment, born, number in events:
        if born:
            if allocator is not None:
                blocks[number] = block = allocator.take(sizes[number])
                sizes[number] = block.size
            allocated += sizes[number]
        else:
            if allocator is not None:
                allocator.give(blocks.pop(number))
            allocated -= sizes[number]
        if allocated > peak:
            peak, peak_at = allocated, moment
    parts = dict.fromkeys(ROLES, 0)
    for life, size in zip(own, sizes, strict=True):
        if life.born <= peak_at and (life.died is None or life.died > peak_at):
            parts[_role(life, log.backwards)] += size
    before = sum(size for life, size in zip(own, sizes, strict=True) if life.before)
    reserved = needed = peak
    if allocator is not None:
        reserved = allocator.most_reserved_bytes
        taken = [(number, own[number].size_bytes if born else 0) for _, born, number in events]
        needed = least_bytes(taken, rules, peak, reserved)
    return DeviceEstimate(label, before, peak, allocated, reserved, needed, parts)


def _events(lives: Sequence[StorageLife]) -> list[tuple[int, bool, int]]:
    born = [(life.born, True, number) for number, life in enumerate(lives) if life.size_bytes]
    died = [(life.died, False, number) for number, life in enumerate(lives) if life.size_bytes and life.died]
    return sorted([*born, *died])


def _role(life: StorageLife, backwards: Sequence[int]) -> str:
    """Return what a storage was for: what a hook said, else by when it came and whether a backward pass met it."""
    if life.role:
        return life.role
    if life.before:
        return OTHER
    begun = bisect_left(backwards, life.born)
    met = begun < len(backwards) and (life.died is None or backwards[begun] < life.died)
    if life.recorded and (met or life.in_backward or not backwards):
        return ACTIVATIONS
    return OTHER if not life.in_backward and (met or life.died is None) else TEMPORARIES
