"""Reads torch's caching allocator on each device, block by block, from its own snapshot.

A segment is memory that the allocator got from the driver; it is divided into blocks. Both are as
in ``torch.cuda.memory_snapshot``. Taking a snapshot neither allocates on the device nor waits for
it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ipygpumem.oom_texts import TORCHS_FIGURES
from ipygpumem.probes.accelerators import initialized_backend, loaded_torch
from ipygpumem.units import bytes_in_message, divided_up

_PAGES = {"small": 2 << 20, "large": 20 << 20}
"""Page size of segments that torch may free in part, by the kind of segment."""

State = Literal["allocated", "pending", "inactive"]
"""The state of a block: in use; freed by the code, but still in use by another CUDA stream; free
for reuse.
"""


@dataclass(frozen=True)
class SnapshotBlock:
    """A piece of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """Requested bytes before the allocator's rounding; equal to ``size_bytes`` if torch does not
    report them.
    """
    state: State
    """``allocated``, ``inactive`` (free), or freed and still in use by a stream."""


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece."""

    blocks: tuple[SnapshotBlock, ...]
    """Its blocks, by address."""
    private: bool = False
    """True for a segment of a private pool, such as a captured CUDA graph's, which serves no other
    code.
    """
    page_bytes: int | None = None
    """Set for a segment that grows in place (``expandable_segments``): its free pages can be
    returned to the driver.
    """
    small: bool = False
    """True if it serves allocations of at most 1 MiB."""
    stream: int = 0
    """Its free blocks serve this CUDA stream alone; 0 is the default stream."""

    def is_usable(self, block: SnapshotBlock) -> bool:
        """Return True if a block of this segment is free for any code on the default stream."""
        return block.state == "inactive" and not self.private and not self.stream

    def free_pieces(self) -> Iterator[tuple[int, bool]]:
        """Yield the size of each free piece, and True if ``torch.cuda.empty_cache()`` frees it.

        That call frees segments without a block in use, and of segments that grow in place also
        whole pages.
        """
        is_all_free = all(block.state == "inactive" for block in self.blocks)
        for block in self.blocks:
            if block.state != "inactive":
                continue
            if is_all_free or self.page_bytes is None:
                yield block.size_bytes, is_all_free
            else:
                yield from self._pieces_by_page(block, self.page_bytes)

    def _pieces_by_page(self, block: SnapshotBlock, page_bytes: int) -> Iterator[tuple[int, bool]]:
        """Yield the pieces of a free block, as ``free_pieces`` does: the whole pages in it, which
        can be freed, and the parts of pages before and after them, which cannot.
        """
        start = block.address - self.blocks[0].address
        end = start + block.size_bytes
        first_page = divided_up(start, page_bytes)
        end_of_pages = end // page_bytes
        if first_page >= end_of_pages:
            yield block.size_bytes, False
            return
        yield first_page * page_bytes - start, False
        yield (end_of_pages - first_page) * page_bytes, True
        yield end - end_of_pages * page_bytes, False


class Snapshot:
    """All segments of one device, and sums: reserved, in use, waiting, and free for reuse."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.blocks_in_use = list[SnapshotBlock]()
        """The blocks in use, in the order of their addresses."""
        self.reserved_bytes = 0
        """All blocks, in use or not."""
        self.pending_bytes = 0
        """Freed blocks that another CUDA stream still uses."""
        self.private_bytes = 0
        """Free blocks in private pools."""
        self.cached_bytes = 0
        """Memory outside private pools that can be freed: segments, or pages of one, without any
        block in use.
        """
        self.fragments = list[int]()
        """Free pieces outside private pools that cannot be freed, because they share a segment with
        blocks in use.
        """
        for segment in segments:
            self._add_blocks(segment.blocks)
            self._add_free_pieces(segment)
        self.blocks_in_use.sort(key=lambda block: block.address)
        self.allocated_bytes = sum(block.size_bytes for block in self.blocks_in_use)
        self.requested_bytes = sum(block.requested_bytes for block in self.blocks_in_use)

    def _add_blocks(self, blocks: Sequence[SnapshotBlock]) -> None:
        """Add the blocks of a segment to the sums."""
        for block in blocks:
            self.reserved_bytes += block.size_bytes
            if block.state == "allocated":
                self.blocks_in_use.append(block)
            elif block.state == "pending":
                self.pending_bytes += block.size_bytes

    def _add_free_pieces(self, segment: Segment) -> None:
        """Add the free memory of a segment to the sums."""
        for size, can_be_freed in segment.free_pieces():
            if segment.private:
                self.private_bytes += size
            elif can_be_freed:
                self.cached_bytes += size
            else:
                self.fragments.append(size)


def snapshots(backend: str) -> dict[str, Snapshot]:
    """Return the snapshot of each device of ``backend`` with reserved memory; none if torch has no
    snapshots.

    Raises:
        RuntimeError: the allocator in use has none (``cudaMallocAsync``, a user's allocator).
    """
    take_snapshot = getattr(initialized_backend(backend), "memory_snapshot", None)
    if take_snapshot is None:
        return {}
    try:
        # Without the history of allocations, which can be huge if the user records one.
        entries = take_snapshot(include_traces=False)
    except TypeError:  # an older torch
        entries = take_snapshot()
    segments_by_device: dict[str, list[Segment]] = {}
    for entry in entries:
        segments = segments_by_device.setdefault(f"{backend}:{entry['device']}", [])
        segments.append(_segment_of_entry(entry))
    return {device: Snapshot(tuple(segments)) for device, segments in segments_by_device.items()}


def _segment_of_entry(entry: Mapping[str, Any]) -> Segment:
    """Return the segment that an entry of torch's snapshot describes."""
    blocks = list[SnapshotBlock]()
    address = int(entry["address"])
    for block_entry in entry["blocks"]:
        # Older versions of torch have no addresses of blocks, which follow one another.
        address = int(block_entry.get("address", address))
        block = _snapshot_block(block_entry, address)
        blocks.append(block)
        address += block.size_bytes
    kind = entry.get("segment_type", "")
    pool = tuple(entry.get("segment_pool_id", (0, 0)))
    is_expandable = entry.get("is_expandable")  # from torch 2.1 on
    return Segment(
        tuple(blocks),
        private=pool != (0, 0),
        page_bytes=_PAGES.get(kind) if is_expandable else None,
        small=kind == "small",
        stream=int(entry.get("stream", 0)),
    )


_STATES: dict[str, State] = {"inactive": "inactive", "active_allocated": "allocated"}
"""The states of blocks by torch's names; any other name is that of a pending block."""


def _snapshot_block(entry: Mapping[str, Any], address: int) -> SnapshotBlock:
    """Return the block at ``address`` that an entry of torch's snapshot describes."""
    size = int(entry["size"])
    requested = min(int(entry.get("requested_size", size)), size)
    # torch's documentation calls the third state active_awaiting_free, its snapshots call it
    # active_pending_free.
    state = _STATES.get(entry["state"], "pending")
    return SnapshotBlock(address, size, requested, state)


# -- out-of-memory errors, and settings ---------------------------------------------------------


class FailedAllocation(NamedTuple):
    """torch's figures of a failed allocation in bytes, which its message rounds to two decimals of
    their units.
    """

    device: str
    requested: int
    """Bytes of the allocation."""
    total: int
    """The whole device."""
    free: int
    """Free bytes of the device, without the allocator's."""
    allocated: int
    """Bytes in use by tensors."""
    limit: int | None = None
    """The limit on torch's allocator, if there is one."""
    unallocated: int = 0
    """Reserved bytes that no tensor uses: torch has just freed all that it could."""


def failed_allocation(message: str) -> FailedAllocation | None:
    """Return the figures in the message of torch's out-of-memory error; None for any other message.

    An example is ``CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of
    ...``.
    """
    for pattern in TORCHS_FIGURES:
        match = re.search(pattern, message, re.DOTALL)
        if match is not None:
            # The groups have the names of FailedAllocation's fields; each version of torch reports
            # some of them.
            text_by_field = match.groupdict()
            device = f"cuda:{text_by_field.pop('index')}"
            sizes = {field: bytes_in_message(text) for field, text in text_by_field.items() if text}
            return FailedAllocation(device, **sizes)
    return None


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables of the allocator's settings, the newest first; torch before 2.9 does not
read the newest one.
"""


def settings() -> str:
    """Return the allocator's settings, such as ``expandable_segments:True``; empty without any.

    Newer torch reports them, also those that a call has set; else they are in the environment.
    """
    library = getattr(sys.modules.get("torch"), "_C", None)
    settings_of_torch = getattr(library, "_accelerator_getAllocatorSettings", None)
    texts = [] if settings_of_torch is None else [settings_of_torch()]
    texts += map(os.environ.get, _VARIABLES)
    for text in texts:
        if text:
            return str(text)
    return ""


def expandable_setting() -> str:
    """Return the environment variable that adds growing segments to the settings in force, such as
    ``PYTORCH_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True``.

    It is empty if the segments grow already, or if this build of torch does not support it.
    """
    torch: Any = loaded_torch()
    numbers = re.findall(r"\d+", str(getattr(torch, "__version__", "")))
    is_rocm = getattr(getattr(torch, "version", None), "hip", None) is not None
    is_too_old = tuple(map(int, numbers[:2])) < (2, 1)
    if is_too_old or is_rocm or sys.platform != "linux":
        return ""
    setting = "expandable_segments:True"
    in_force = settings()
    if setting in in_force:
        return ""
    reads_newest = hasattr(torch._C, "_accelerator_setAllocatorSettings")
    variable = _VARIABLES[0] if reads_newest else _VARIABLES[1]
    values = f"{in_force},{setting}" if in_force else setting
    return f"{variable}={values}"
