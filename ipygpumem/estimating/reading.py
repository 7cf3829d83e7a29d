"""Reads a log of storages: the peak, what was alive then, and what the CUDA caching allocator would do about them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ipygpumem.estimating.caching import Allocator, Block, Rules, least_bytes
from ipygpumem.estimating.lives import ACTIVATIONS, OTHER, PARTS, TEMPORARIES, Life
from ipygpumem.estimating.records import DeviceEstimate


def read(lives: Sequence[Life], backwards: Sequence[int], device: str, label: str, rules: Rules) -> DeviceEstimate:
    """Return the figures of one device; the host's storages are no more than their sizes."""
    own = [life for life in lives if life.device == device]
    events = _events(own)
    allocator = Allocator(rules) if label != "cpu" else None
    blocks: dict[int, Block] = {}
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
    parts = dict.fromkeys(PARTS, 0)
    for life, size in zip(own, sizes, strict=True):
        if life.born <= peak_at and (life.died is None or life.died > peak_at):
            parts[_part(life, backwards)] += size
    before = sum(size for life, size in zip(own, sizes, strict=True) if life.before)
    reserved = needed = peak
    if allocator is not None:
        reserved = allocator.most_reserved_bytes
        taken = [(number, own[number].size_bytes if born else 0) for _, born, number in events]
        needed = least_bytes(taken, rules, peak, reserved)
    return DeviceEstimate(label, before, peak, allocated, reserved, needed, parts)


def _events(lives: Sequence[Life]) -> list[tuple[int, bool, int]]:
    born = [(life.born, True, number) for number, life in enumerate(lives) if life.size_bytes]
    died = [(life.died, False, number) for number, life in enumerate(lives) if life.size_bytes and life.died]
    return sorted([*born, *died])


def _part(life: Life, backwards: Sequence[int]) -> str:
    """Return what a storage was for, if no hook has said it: by when it came, and whether a backward pass met it."""
    if life.part:
        return life.part
    if life.before:
        return OTHER
    begun = bisect_left(backwards, life.born)
    met = begun < len(backwards) and (life.died is None or backwards[begun] < life.died)
    if life.recorded and (met or life.in_backward or not backwards):
        return ACTIVATIONS
    return OTHER if not life.in_backward and (met or life.died is None) else TEMPORARIES
