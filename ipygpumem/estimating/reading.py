"""Reads a log of storages: the peak, what was alive then, and what the CUDA caching allocator would reserve."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ipygpumem.estimating.lives import ACTIVATIONS, OTHER, PARTS, TEMPORARIES, Life
from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.units import MIB

_SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _STEP = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
"""The allocator's sizes: what is small and its segments, what is middling and its segments, the rest's rounding."""


def read(lives: Sequence[Life], backwards: Sequence[int], device: str, label: str) -> DeviceEstimate:
    """Return the figures of one device."""
    own = [life for life in lives if life.device == device]
    allocated = peak = peak_at = 0
    reserved = _Segments()
    blocks: dict[int, _Block] = {}
    for moment, born, number in _events(own):
        size = own[number].size_bytes
        if born:
            blocks[number] = reserved.take(size)
            allocated += size
        else:
            reserved.give(blocks.pop(number))
            allocated -= size
        if allocated > peak:
            peak, peak_at = allocated, moment
    parts = dict.fromkeys(PARTS, 0)
    for life in own:
        if life.born <= peak_at and (life.died is None or life.died > peak_at):
            parts[_part(life, backwards)] += life.size_bytes
    before = sum(life.size_bytes for life in own if life.before)
    return DeviceEstimate(label, before, peak, allocated, reserved.total_bytes, parts)


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


class _Block:
    """A piece of a segment; its neighbours join it when all are free."""

    __slots__ = ("before", "free", "next", "size", "small")

    def __init__(self, size: int, *, small: bool) -> None:
        self.size = size
        self.small = small
        self.free = False
        self.before: _Block | None = None
        self.next: _Block | None = None


class _Segments:
    """The allocator's way with segments: best fit, large remainders split off, nothing returned to the device."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def take(self, size: int) -> _Block:
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = free.pop(place)[2]
        else:
            segment = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _STEP) * _STEP
            self.total_bytes += segment
            block = _Block(segment, small=small)
        block.free = False
        rest = block.size - size
        if rest >= 512 if small else rest > _SMALL:
            self._split(block, size)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, small=block.small)
        rest.before, rest.next = block, block.next
        if block.next is not None:
            block.next.before = rest
        block.next, block.size = rest, size
        self._add(rest)

    def _add(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, id(block), block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, id(block))))

    def give(self, block: _Block) -> None:
        before, after = block.before, block.next
        if after is not None and after.free:
            self._remove(after)
            block.size, block.next = block.size + after.size, after.next
            if after.next is not None:
                after.next.before = block
        if before is not None and before.free:
            self._remove(before)
            before.size, before.next = before.size + block.size, block.next
            if block.next is not None:
                block.next.before = before
            block = before
        self._add(block)
