"""Replays the CUDA allocator's own history of blocks, so that sums equal its
counters to the byte.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.storages import StorageLife, most_split_bytes
from ipygpumem.extras.peak.timeline import Clock
from ipygpumem.introspect import is_users
from ipygpumem.probes.allocator import Segment, snapshots
from ipygpumem.units import MIB

_MOST_ENTRIES = 500_000
"""Number of events that torch keeps, of about 200 bytes each."""
_LEAST = 512


class Block(NamedTuple):
    """Where a block came from: the tensor's storage in it, if it is known, and the user's line."""

    storage: StorageLife | None
    line: tuple[str, int] | None


class Blocks:
    """The blocks of one device: those of ``segments``, and those of the events that follow."""

    def __init__(self, device: str, segments: Iterable[Segment], began_us: int) -> None:
        self.device, self.clock, self.tick = device, Clock(), 0
        self.lives: list[StorageLife] = []
        self.failed: tuple[int, float] | None = None
        """Tick and seconds of the last out-of-memory error."""
        self._began_us, self._most_split = began_us, most_split_bytes()
        self._seen: dict[int, list[tuple[int, StorageLife]]] = {}
        """Tensors' storages that have no block yet, with the time when they were seen, by address.
        """
        self._alive: dict[int, StorageLife] = {}
        self._sizes: dict[int, int] = {}
        """Sizes of blocks that wait for another stream, by address."""
        self._free: dict[int, int] = {}
        """Sizes of free pieces by address, and their addresses by their ends."""
        self._ends: dict[int, int] = {}
        self._starts: set[int] = set()
        """Addresses of segments, across which free pieces do not join."""
        self._grows = False
        for segment in segments:
            self._starts.update(block.address for block in segment.blocks[:1])
            self._grows |= segment.page_bytes is not None
            for block in segment.blocks:
                if block.state == "allocated":
                    self._born(block.address, block.size_bytes, None)
                elif block.state == "inactive":
                    self._join(block.address, block.size_bytes)
                else:
                    self._sizes[block.address] = block.size_bytes

    def saw(self, storage: StorageLife) -> None:
        """Note the storage of a tensor, which its block belongs to."""
        self._seen.setdefault(storage.address, []).append((time.time_ns() // 1000, storage))

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Replay the events of a history."""
        for event in events:
            action, size = event["action"], event["size"]
            address, at = event.get("addr", 0), event["time_us"]
            if at < self._began_us:
                continue
            self.tick += 1
            self.clock.note(self.tick, (at - self._began_us) / 1e6)
            if action == "alloc":
                self._born(
                    address,
                    self._cut(address, max(_LEAST, -(-size // _LEAST) * _LEAST)),
                    event.get("frames"),
                )
            elif action == "free_requested":
                block = self._alive.pop(address, None)
                if block is not None:
                    self._match(block, at)
                    block.died, self._sizes[address] = self.tick, block.size_bytes
            elif action == "free_completed":
                self._join(address, self._sizes.pop(address, 0))
            elif action in ("segment_alloc", "segment_map"):
                self._grows |= action == "segment_map"
                self._starts.update([address] * (action == "segment_alloc"))
                self._join(address, size)
            elif action in ("segment_free", "segment_unmap"):
                self._starts.discard(address)
                self._leave(address, size)
            elif action == "oom":
                self.failed = self.tick, (at - self._began_us) / 1e6

    def settle(self) -> None:
        """Give the blocks that are in use now the storages that were seen at their addresses."""
        for block in self._alive.values():
            self._match(block, time.time_ns())

    def prune(self) -> None:
        """Drop the blocks that were freed."""
        self.lives = list(self._alive.values())

    def _match(self, block: StorageLife, until_us: int) -> None:
        seen = self._seen.get(block.address)
        if block.place.storage is None and seen and seen[0][0] <= until_us:
            block.place = Block(seen.pop(0)[1], None)

    def _born(self, address: int, size: int, frames: Any) -> None:
        life = StorageLife(self.device, size, self.tick, not self.tick, address=address)
        found = [frame for frame in frames or () if is_users(frame["filename"])][:1]
        life.place = Block(None, (found[0]["filename"], found[0]["line"]) if found else None)
        self._alive[address] = life
        self.lives.append(life)

    def _cut(self, address: int, size: int) -> int:
        """Take a block from the free piece at its address, and return its size: the rest may be too
        small to split.
        """
        piece = self._free.get(address)
        if piece is None:
            return size
        rest = piece - size
        splits = (
            rest >= _LEAST if size <= MIB or self._grows else rest > MIB and size < self._most_split
        )
        self._leave(address, size if splits else piece)
        return size if splits else piece

    def _join(self, start: int, size: int) -> None:
        """Add a free piece, and join it with its neighbours."""
        end = start + size
        if start not in self._starts and start in self._ends:
            start = self._ends.pop(start)
        if end not in self._starts and end in self._free:
            end += self._free.pop(end)
        self._free[start], self._ends[end] = end - start, start

    def _leave(self, address: int, size: int) -> None:
        """Remove a part of a free piece."""
        for start in (address,) if address in self._free else [*self._free]:
            end = start + self._free[start]
            if start <= address and address + size <= end:
                del self._free[start], self._ends[end]
                for first, last in ((start, address), (address + size, end)):
                    if first < last:
                        self._free[first], self._ends[last] = last - first, first
                return


class History:
    """torch's history of CUDA allocations, from the first use of CUDA on."""

    def __init__(self, began_us: int, *, keep: bool) -> None:
        self._is_ours, self._keeps, self._began_us = (
            not torch._C._cuda_isHistoryEnabled(),
            keep,
            began_us,
        )
        self.devices = {
            device: Blocks(device, snapshot.segments, self._began_us)
            for device, snapshot in snapshots("cuda").items()
        }
        self._switch(on=True)

    def saw(self, storage: StorageLife) -> None:
        """Note the storage of a tensor."""
        self._blocks(storage.device).saw(storage)

    def _blocks(self, device: str) -> Blocks:
        return self.devices.get(device) or self.devices.setdefault(
            device, Blocks(device, (), self._began_us)
        )

    def replay(self, *, last: bool) -> Any:
        """Replay the events since the last call, and return torch's snapshot."""
        snapshot = torch.cuda.memory._snapshot()
        self._switch(on=False)
        for index, events in enumerate(snapshot["device_traces"]):
            if events:
                self._blocks(f"cuda:{index}").replay(events)
        for blocks in self.devices.values():
            blocks.settle()
        if not last:
            self._switch(on=True)
        return snapshot

    def _switch(self, *, on: bool) -> None:
        """Record, or stop and forget; a recording of the user's own goes on as it is."""
        if self._is_ours and on:
            most = sys.maxsize if self._keeps else _MOST_ENTRIES
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=most
            )
        elif self._is_ours:
            torch.cuda.memory._record_memory_history(None)
