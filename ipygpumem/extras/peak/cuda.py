"""Replays the CUDA allocator's own history of blocks: sums equal its counters to the byte."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ipygpumem.errors import describe_error
from ipygpumem.estimating.memory.caching_allocator import FreePieces, block_bytes, most_split_bytes
from ipygpumem.estimating.memory.storages import StorageLife
from ipygpumem.extras.peak.origins import Line, Origin
from ipygpumem.extras.peak.timeline import Clock, FailureTime
from ipygpumem.introspect import is_users
from ipygpumem.probes.allocator import Segment, snapshots

_MOST_ENTRIES = 500_000
"""Number of events that torch keeps, of about 200 bytes each."""
_MOST_OPERATIONS = 100_000
"""Number of operations of backward passes after which the events so far are replayed."""
_MOST_NESTED = 8
"""Number of operations that may run at once, in the threads of several devices."""


class BlockOrigin(NamedTuple):
    """The origin of a block: the tensor's storage in it, if it is known, and the user's line."""

    storage: StorageLife | None
    """The storage of the tensor in the block; None if none was seen at its address."""
    line: Line | None
    """The user's line that allocated the block; None if it is unknown."""
    operation: str = ""
    """The operation of a backward pass that allocated the block, if it is known."""


def now_us() -> int:
    """Return the time on the clock of the allocator's events."""
    return time.time_ns() // 1000


@dataclass(slots=True)
class BackwardOperation:
    """An operation of a backward pass, from its start to its end."""

    origin: Origin
    began_us: int
    """Its start, on the clock of the allocator's events."""
    ended_us: int | None = None
    """None while it runs, and if it has failed."""


class BackwardOperations:
    """The operations of backward passes, to which blocks without a line belong."""

    def __init__(self) -> None:
        self._operations: list[BackwardOperation] = []

    def __len__(self) -> int:
        return len(self._operations)

    def begin(self, origin: Origin) -> BackwardOperation:
        """Add an operation of a backward pass that starts now, and return it."""
        operation = BackwardOperation(origin, now_us())
        self._operations.append(operation)
        return operation

    def at(self, time_us: int) -> Origin | None:
        """Return the origin of the operation that ran at a time; None if none ran, or several."""
        last = bisect_right(self._operations, time_us, key=attrgetter("began_us"))
        origins = set[Origin]()
        for operation in self._operations[max(0, last - _MOST_NESTED) : last]:
            if operation.ended_us is None or time_us <= operation.ended_us:
                origins.add(operation.origin)
        return origins.pop() if len(origins) == 1 else None

    def forget_ended(self) -> None:
        """Forget the operations that have ended."""
        self._operations = [
            operation for operation in self._operations if operation.ended_us is None
        ]


class _SeenStorage(NamedTuple):
    """A tensor's storage, and when the follower has seen it."""

    seen_us: int
    """The time, on the clock of the allocator's events."""
    storage: StorageLife


class DeviceBlocks:
    """The blocks of one device: at first those in ``segments``, then as each event of the allocator
    changes them.

    torch's events have addresses, but know no tensors. So a block gets the tensor's storage that
    was seen at its address while the block was in use.

    Args:
        device: its name.
        segments: the memory of the allocator at the start.
        began_us: the start, on the clock of the allocator's events; earlier events are ignored.
        operations: the operations of backward passes.
    """

    def __init__(
        self,
        device: str,
        segments: Iterable[Segment],
        began_us: int,
        operations: BackwardOperations,
    ) -> None:
        self.device = device
        self._operations = operations
        self.clock = Clock()
        self.tick = 0
        self.lives: list[StorageLife] = []
        self.failure: FailureTime | None = None
        """The last out-of-memory error."""
        self._began_us = began_us
        self._unmatched: dict[int, list[_SeenStorage]] = {}
        """Tensors' storages without a block, by address, the first one seen first."""
        self._blocks_in_use: dict[int, StorageLife] = {}
        """Blocks that are not freed, by address."""
        self._waiting_bytes: dict[int, int] = {}
        """Sizes of blocks that are freed, and wait for another stream, by address."""
        self._free = FreePieces(most_split_bytes())
        for segment in segments:
            self._add_existing(segment)

    def _add_existing(self, segment: Segment) -> None:
        """Add the blocks of a segment that exists."""
        if segment.page_bytes is not None:
            self._free.is_expandable = True
        if segment.blocks:
            size_bytes = sum(block.size_bytes for block in segment.blocks)
            self._free.segments[segment.blocks[0].address] = size_bytes
        for block in segment.blocks:
            if block.state == "allocated":
                self._add_block(
                    block.address, block.size_bytes, BlockOrigin(storage=None, line=None)
                )
            elif block.state == "inactive":
                self._free.free(block.address, block.size_bytes)
            else:
                self._waiting_bytes[block.address] = block.size_bytes

    def note_storage(self, storage: StorageLife) -> None:
        """Note a tensor's storage, so that the block at its address gets it."""
        seen = _SeenStorage(now_us(), storage)
        self._unmatched.setdefault(storage.address, []).append(seen)

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Replay the events of a history."""
        for event in events:
            if event["time_us"] >= self._began_us:
                self._replay(event)

    def _replay(self, event: Mapping[str, Any]) -> None:
        """Replay one event of the allocator's history."""
        time_us = event["time_us"]
        address = event.get("addr", 0)
        size = event["size"]
        seconds = (time_us - self._began_us) / 1e6
        self.tick += 1
        self.clock.note(self.tick, seconds)
        match event["action"]:
            case "alloc":
                size = self._free.take_if_free(address, block_bytes(size))
                self._add_block(address, size, self._origin_of(event))
            case "free_requested":
                self._free_block(address, time_us)
            case "free_completed":
                if address in self._waiting_bytes:
                    self._free.free(address, self._waiting_bytes.pop(address))
            case "segment_alloc":
                self._free.segments[address] = size
                self._free.free(address, size)
            case "segment_map":  # an expandable segment grows
                self._free.is_expandable = True
                self._free.free(address, size)
            case "segment_free" | "segment_unmap":
                self._free.segments.pop(address, None)
                self._free.cut_out(address, size)
            case "oom":
                self.failure = FailureTime(self.tick, seconds)

    def match_storages(self) -> None:
        """Give the blocks that are in use now the storages that were seen at their addresses."""
        for block in self._blocks_in_use.values():
            self._match_storage(block, now_us())

    def drop_freed_blocks(self) -> None:
        """Forget the blocks that were freed: a timeline has counted them."""
        self.lives = list(self._blocks_in_use.values())

    def _match_storage(self, block: StorageLife, until_us: int) -> None:
        """Give a block the first storage that was seen at its address.

        Args:
            block: a block without a storage, or one that has its storage already.
            until_us: the end of the block: later storages are in another block at this address.
        """
        storages = self._unmatched.get(block.address)
        if block.origin.storage is None and storages and storages[0].seen_us <= until_us:
            block.origin = BlockOrigin(storages.pop(0).storage, line=None)

    def _origin_of(self, event: Mapping[str, Any]) -> BlockOrigin:
        """Return the origin of an allocation: the operation of a backward pass, else the line."""
        origin = self._operations.at(event["time_us"])
        if origin is not None:
            return BlockOrigin(storage=None, line=origin.line, operation=origin.operation)
        return BlockOrigin(storage=None, line=_users_line(event.get("frames") or ()))

    def _add_block(self, address: int, size: int, origin: BlockOrigin) -> None:
        """Add a block that is in use from now on."""
        existed_before = self.tick == 0  # the first event makes it 1
        life = StorageLife(self.device, size, self.tick, existed_before, address=address)
        life.origin = origin
        self._blocks_in_use[address] = life
        self.lives.append(life)

    def _free_block(self, address: int, time_us: int) -> None:
        """End a block that the code has freed: it waits until all streams are done with it."""
        block = self._blocks_in_use.pop(address, None)
        if block is not None:
            self._match_storage(block, time_us)
            block.died = self.tick
            self._waiting_bytes[address] = block.size_bytes


def _users_line(frames: Iterable[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return file and number of the innermost line in the user code."""
    for frame in frames:
        if is_users(frame["filename"]):
            return frame["filename"], frame["line"]
    return None


class AllocationHistory:
    """torch's history of CUDA allocations, from the first use of CUDA on.

    Args:
        began_us: the start, on the clock of the allocator's events.
        operations: the operations of backward passes.
        keep: keep all events, for torch's snapshot; otherwise ``replay`` drops them.
    """

    def __init__(self, began_us: int, operations: BackwardOperations, *, keep: bool) -> None:
        self._has_started_recording = not torch._C._cuda_isHistoryEnabled()
        self._keeps_events = keep
        self._began_us = began_us
        self._operations = operations
        self.devices = {
            device: DeviceBlocks(device, snapshot.segments, began_us, operations)
            for device, snapshot in snapshots("cuda").items()
        }
        self._switch_recording(on=True)

    def note_storage(self, storage: StorageLife) -> None:
        """Note the storage of a tensor."""
        self._blocks_of(storage.device).note_storage(storage)

    def _blocks_of(self, device: str) -> DeviceBlocks:
        """Return the blocks of a device; add an empty record if the device has none yet."""
        if device not in self.devices:
            self.devices[device] = DeviceBlocks(device, (), self._began_us, self._operations)
        return self.devices[device]

    def replay(self, *, last: bool) -> Any:
        """Replay the events since the last call, and return torch's snapshot.

        Args:
            last: record nothing after this call.
        """
        snapshot = torch.cuda.memory._snapshot()
        self._switch_recording(on=False)
        for index, events in enumerate(snapshot["device_traces"]):
            if events:
                self._blocks_of(f"cuda:{index}").replay(events)
        for blocks in self.devices.values():
            blocks.match_storages()
        self._operations.forget_ended()
        if not last:
            self._switch_recording(on=True)
        return snapshot

    def _switch_recording(self, *, on: bool) -> None:
        """Let torch record, or stop it and drop its events; a recording that the user has started
        goes on unchanged.
        """
        if not self._has_started_recording:
            return
        if on:
            most = sys.maxsize if self._keeps_events else _MOST_ENTRIES
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=most
            )
        else:
            torch.cuda.memory._record_memory_history(None)


class CudaRecording:
    """torch's history while code runs; not every allocator and every torch has one.

    Args:
        keep: keep all events until the end, for torch's snapshot, whose file the user wants. Then
            no event is replayed earlier, because a replay drops the events.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keeps_events = keep
        self._history: AllocationHistory | None = None
        """None until the code uses CUDA."""
        self.is_on = False
        """True once the recording has started."""
        self._operations = BackwardOperations()
        self.is_possible = True
        """False once it has failed to start."""
        self.snapshot: Any = None
        """torch's snapshot at the end, with the history."""

    @property
    def blocks(self) -> dict[str, DeviceBlocks]:
        """The blocks of each device."""
        return {} if self._history is None else self._history.devices

    def start(self, began: float, lives: Iterable[StorageLife]) -> str:
        """Start to record, and return why that is not possible; an empty text if it is.

        Args:
            began: when the code began, on ``time.perf_counter``.
            lives: the storages that exist.
        """
        began_us = now_us() - int((time.perf_counter() - began) * 1e6)
        try:
            self._history = AllocationHistory(began_us, self._operations, keep=self._keeps_events)
            self.is_on = True
            for life in lives:
                if life.address and life.device != "cpu":
                    self._history.note_storage(life)
        # Another allocator raises a RuntimeError, an old torch a TypeError or AttributeError.
        except (RuntimeError, TypeError, AttributeError) as error:
            self.is_possible = False
            return f"CUDA's allocator has no history ({describe_error(error)})"
        return ""

    def note_storage(self, storage: StorageLife) -> None:
        """Note the storage of a tensor."""
        if self._history is not None:
            self._history.note_storage(storage)

    @property
    def is_full(self) -> bool:
        """True if so many operations are noted that the events so far should be replayed; never if
        all events are kept.
        """
        return not self._keeps_events and len(self._operations) > _MOST_OPERATIONS

    def begin_operation(self, origin: Origin) -> BackwardOperation:
        """Note the start of an operation of a backward pass, and return it."""
        return self._operations.begin(origin)

    def replay(self) -> None:
        """Replay the events so far, unless torch is to keep them for the snapshot."""
        if self._history is not None and not self._keeps_events:
            self._history.replay(last=False)

    def stop(self) -> bool:
        """Stop recording; return True if it has ended early, by another block or by the code."""
        if self._history is None:
            return False
        has_ended = not torch._C._cuda_isHistoryEnabled()
        self.snapshot = self._history.replay(last=True)
        return has_ended
