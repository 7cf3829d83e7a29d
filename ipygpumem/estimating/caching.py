"""Imitates the sizes of torch's CUDA caching allocator: what it reserves, and with how little it gets through.

Rules and sizes are those of torch 2.11's ``CUDACachingAllocator``, seen to be the same from 2.0 on.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem.units import MIB

_LEAST, _SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _STEP = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
"""Of a block; what is small and its segments; what is middling and its segments; the rest's rounding."""
_NO_LIMIT = 1 << 62
_CLOSE = 0.002
"""How well the least memory is looked for, as a share of it."""


@dataclass(frozen=True)
class Rules:
    """What users may set of the allocator."""

    most_split_bytes: int = _NO_LIMIT
    divisions: int = 0
    """Sizes are rounded up to one of so many steps between two powers of two; 0: to whole blocks."""

    def rounded(self, size: int) -> int:
        """Return what is taken for ``size`` bytes, if nothing larger is at hand."""
        if self.divisions > 1 and size > _LEAST * self.divisions:
            step = max(1, (1 << (size.bit_length() - 1)) // self.divisions)
            return -(-size // step) * step
        return max(_LEAST, -(-size // _LEAST) * _LEAST)


def users_rules() -> Rules:
    """Return what is set in this process, or by its environment."""
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) *: *(\d+)", settings())}
    most = numbers.get("max_split_size_mb", 0) * MIB or _NO_LIMIT
    return Rules(most, numbers.get("roundup_power2_divisions", 0))


def unfollowed() -> list[str]:
    """Return what is set of the allocator that changes what it reserves, and that an estimate does not follow."""
    return re.findall(
        r"expandable_segments *: *True|backend *: *(?!native)\w+|roundup_power2_divisions *: *\[", settings()
    )


def settings() -> str:
    """Return what is set of the allocator, by a call (newer torch tells) or by the environment."""
    ask: Any = getattr(getattr(sys.modules.get("torch"), "_C", None), "_accelerator_getAllocatorSettings", str)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return str(ask() or next(filter(None, map(os.environ.get, names)), ""))


class OutOfRoomError(Exception):
    """The device has less than the allocator needs."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A piece of a segment; its neighbours join it when all are free."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: CachedBlock | None = None
    after: CachedBlock | None = None


class Allocator:
    """Hands out blocks as the real one does: best fit, large rests split off, its cache emptied before it gives up.

    Args:
        rules: what users may set.
        limit_bytes: what the device has.
    """

    def __init__(self, rules: Rules, limit_bytes: int = _NO_LIMIT) -> None:
        self._rules = rules
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._free: dict[bool, list[tuple[int, int, CachedBlock]]] = {True: [], False: []}
        self.reserved_bytes = self.most_reserved_bytes = 0

    def take(self, size_bytes: int) -> CachedBlock:
        """Return a block for ``size_bytes``; it may be larger.

        Raises:
            OutOfRoomError: the device has no more, with the cache emptied, too.
        """
        size = self._rules.rounded(size_bytes)
        block = self._cached(size) or self._from_device(size)
        block.free = False
        rest = block.size - size
        if rest >= _LEAST if block.small else rest > _SMALL and size < self._rules.most_split_bytes:
            self._split(block, size)
        return block

    def _cached(self, size: int) -> CachedBlock | None:
        free = self._free[size <= _SMALL]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        available, most = free[place][0], self._rules.most_split_bytes
        if available >= most > size or (size >= most and available >= size + _MIDDLE_SEGMENT):
            return None
        return free.pop(place)[2]

    def _from_device(self, size: int) -> CachedBlock:
        small = size <= _SMALL
        segment = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _STEP) * _STEP
        if self.reserved_bytes + segment > self._limit_bytes:
            self.empty()
            if self.reserved_bytes + segment > self._limit_bytes:
                raise OutOfRoomError
        self.reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._next_address += segment
        return CachedBlock(self._next_address - segment, segment, small)

    def empty(self) -> None:
        """Give segments back to the device of which nothing is in use."""
        for small, blocks in self._free.items():
            whole = [block for _, _, block in blocks if block.before is None and block.after is None]
            self._free[small] = [entry for entry in blocks if entry[2].before or entry[2].after]
            self.reserved_bytes -= sum(block.size for block in whole)

    def _split(self, block: CachedBlock, size: int) -> None:
        rest = CachedBlock(block.address + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[rest.small], (rest.size, rest.address, rest))

    def give(self, block: CachedBlock) -> None:
        """Take a block back; free neighbours become one."""
        free = self._free[block.small]
        for first, rest in ((block, block.after), (block.before, block)):
            neighbour = rest if first is block else first
            if first is None or rest is None or neighbour is None or not neighbour.free:
                continue
            free.pop(bisect_left(free, (neighbour.size, neighbour.address)))
            first.size, first.after = first.size + rest.size, rest.after
            if rest.after is not None:
                rest.after.before = first
            block = first
        block.free = True
        insort(free, (block.size, block.address, block))


def least_bytes(events: Sequence[tuple[int, int]], rules: Rules, allocated_bytes: int, reserved_bytes: int) -> int:
    """Return about the least that a device must have: the allocator empties its cache before it gives up.

    Args:
        events: of the storages, in order: which one, and its size where it is born; 0 where it dies.
        rules: what users may set.
        allocated_bytes: the most that is in use at once: less will not do.
        reserved_bytes: what the allocator takes where it may: enough.
    """
    low, high = allocated_bytes, reserved_bytes
    while high - low > max(_STEP, high * _CLOSE):
        middle = (low + high) // 2
        if _gets_through(events, rules, middle):
            high = middle
        else:
            low = middle
    return high


def _gets_through(events: Sequence[tuple[int, int]], rules: Rules, limit_bytes: int) -> bool:
    allocator, blocks = Allocator(rules, limit_bytes), dict[int, CachedBlock]()
    with contextlib.suppress(OutOfRoomError):
        for number, size in events:
            if size:
                blocks[number] = allocator.take(size)
            else:
                allocator.give(blocks.pop(number))
        return True
    return False
