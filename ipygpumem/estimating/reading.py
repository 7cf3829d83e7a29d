"""Reads the log of storages: the peak, what was alive then, what the allocator would reserve, and whether that fits."""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.estimating.storage_log import ACTIVATIONS, OTHER, ROLES, TEMPORARIES, StorageLife, StorageLog
from ipygpumem.probes.allocator import snapshots
from ipygpumem.probes.host import available_bytes
from ipygpumem.probes.nvml import DeviceWide, Nvml
from ipygpumem.units import MIB

_LEAST, _SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _STEP = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
"""Of a block; what is small and its segments; what is middling and its segments; the rest's rounding."""
_NO_LIMIT = 1 << 62
_CLOSE = 0.002
"""How well the least memory is looked for, as a share of it."""


def most_split_bytes() -> int:
    """Return the size from which the allocator splits no block, as set in this process or by its environment."""
    found = re.search(r"max_split_size_mb *: *(\d+)", settings())
    return int(found[1]) * MIB if found and int(found[1]) else _NO_LIMIT


def unfollowed() -> list[str]:
    """Return what is set of the allocator that changes what it reserves, and that an estimate does not follow."""
    return re.findall(
        r"expandable_segments *: *True|backend *: *(?!native)\w+|roundup_power2_divisions *: *(?:\[|\d+)", settings()
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
    """Hands out blocks as the real one does: best fit, large rests split off, its cache emptied before it gives up."""

    def __init__(self, most_split_bytes: int = _NO_LIMIT, limit_bytes: int = _NO_LIMIT) -> None:
        self._most_split_bytes, self._limit_bytes, self._next_address = most_split_bytes, limit_bytes, 0
        self._free: dict[bool, list[tuple[int, int, CachedBlock]]] = {True: [], False: []}
        self.reserved_bytes = self.most_reserved_bytes = 0

    def take(self, size_bytes: int) -> CachedBlock:
        """Return a block for ``size_bytes``; it may be larger.

        Raises:
            OutOfRoomError: the device has no more, with the cache emptied, too.
        """
        size = max(_LEAST, -(-size_bytes // _LEAST) * _LEAST)
        block = self._cached(size) or self._from_device(size)
        block.free = False
        rest = block.size - size
        if rest >= _LEAST if block.small else rest > _SMALL and size < self._most_split_bytes:
            self._split(block, size)
        return block

    def _cached(self, size: int) -> CachedBlock | None:
        free = self._free[size <= _SMALL]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        available, most = free[place][0], self._most_split_bytes
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


def least_bytes(
    events: Sequence[tuple[int, int]], most_split_bytes: int, allocated_bytes: int, reserved_bytes: int
) -> int:
    """Return about the least that a device must have: the allocator empties its cache before it gives up.

    It is between what is allocated at once, and what is reserved where there is room. ``events`` are those of the
    storages in order: which one, and its size where it is born; 0 where it dies.
    """
    low, high = allocated_bytes, reserved_bytes
    while high - low > max(_STEP, high * _CLOSE):
        middle = (low + high) // 2
        allocator, blocks = Allocator(most_split_bytes, middle), dict[int, CachedBlock]()
        try:
            for number, size in events:
                if size:
                    blocks[number] = allocator.take(size)
                else:
                    allocator.give(blocks.pop(number))
            high = middle
        except OutOfRoomError:
            low = middle
    return high


_CONTEXT_BYTES = 768 * MIB
"""What a device is taken to lose beside what the allocator reserves: to a process's context, to the code of libraries
and to the driver. Nobody tells it before; 400 to 700 MiB are usual for torch's builds with CUDA 12 and 13."""

_SPARE_SHARE = 50
"""One part in so many is set aside for what kernels take while they run. On a simulated card a training of GPT-2 XL
with checkpoints ran out of memory with nothing set aside, and ran with 1.3 % more."""


def with_room(figures: DeviceEstimate, there_bytes: int, room_bytes: int | None) -> DeviceEstimate:
    """Return a device's estimate with what it has for the code: what the user said, or what is free there now.

    ``there_bytes`` is memory that this process holds there already, and that ``figures`` count as well.
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
            return int(free + reserved - torch.cuda.memory_allocated(index) - (sum(split.fragments) if split else 0))
        with closing(Nvml()) as nvml:
            if torch.cuda.is_initialized():
                wide = nvml.device(torch.cuda, index, processes=False, has_context=False)
            else:  # torch tells a device's UUID only once CUDA is initialised: several cannot be told apart
                cards = nvml.cards()
                wide = cards[0].wide if len(cards) == 1 else DeviceWide()
    except Exception:  # a broken context or driver must not take the estimate with it
        return None
    return None if wide.total_bytes is None or wide.used_bytes is None else wide.total_bytes - wide.used_bytes


def read(log: StorageLog, device: str, label: str) -> DeviceEstimate:
    """Return the figures of one device, called ``label``. The host's storages take no more than their sizes."""
    own, most_split = [life for life in log.lives if life.device == device], most_split_bytes()
    born = [(life.born, True, number) for number, life in enumerate(own) if life.size_bytes]
    died = [(life.died, False, number) for number, life in enumerate(own) if life.size_bytes and life.died]
    events = sorted([*born, *died])
    allocator = Allocator(most_split) if label != "cpu" else None
    blocks: dict[int, CachedBlock] = {}
    sizes = [life.size_bytes for life in own]
    allocated = peak = peak_at = 0
    for moment, is_born, number in events:
        if is_born:
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
        taken = [(number, own[number].size_bytes if is_born else 0) for _, is_born, number in events]
        needed = least_bytes(taken, most_split, peak, reserved)
    return DeviceEstimate(label, before, peak, allocated, reserved, needed, parts)


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
