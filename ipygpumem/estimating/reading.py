"""Reads the log of storages: the peak, what was alive then, and what the allocator would reserve."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ipygpumem.estimating.caching import Allocator, CachedBlock, least_bytes, users_rules
from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.estimating.storage_log import ACTIVATIONS, OTHER, ROLES, TEMPORARIES, StorageLife, StorageLog


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
