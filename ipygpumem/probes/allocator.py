"""Reads torch's caching allocator on each device, block by block, from its own snapshot.

A segment is memory that the allocator got from the driver; it is divided into blocks. Both are as in
``torch.cuda.memory_snapshot``. Taking a snapshot neither allocates on the device nor waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ipygpumem.probes.accelerators import in_use

_PAGES = {"small": 2 << 20, "large": 20 << 20}
"""Page size of segments that torch may free in part, by the kind of segment."""

State = Literal["allocated", "pending", "inactive"]
"""In use; freed, but waiting for another stream; free for reuse."""


@dataclass(frozen=True)
class Block:
    """A piece of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """Requested bytes before the allocator's rounding; equal to ``size_bytes`` if torch does not report them."""
    state: State


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece."""

    blocks: tuple[Block, ...]
    private: bool = False
    """True for a segment of a private pool, such as a captured CUDA graph's, which serves no other code."""
    page_bytes: int | None = None
    """Set for a segment that grows in place (``expandable_segments``): its free pages can be returned to the driver."""
    small: bool = False
    """It serves allocations of at most 1 MiB."""
    stream: int = 0
    """Its free blocks serve this CUDA stream alone; 0 is the default stream."""

    def is_usable(self, block: Block) -> bool:
        """Return True if a block is free for any allocation on the default stream."""
        return block.state == "inactive" and not self.private and not self.stream

    def free_pieces(self) -> Iterator[tuple[int, bool]]:
        """Yield the size of each free piece, and True if emptying the cache frees it."""
        is_free = all(block.state == "inactive" for block in self.blocks)
        page, origin = self.page_bytes, self.blocks[0].address if self.blocks else 0
        for block in self.blocks:
            start, end = block.address - origin, block.address - origin + block.size_bytes
            if block.state != "inactive":
                continue
            if is_free or page is None or -(-start // page) >= end // page:
                yield block.size_bytes, is_free
            else:  # whole pages, and the rests before and after them
                first, last = -(-start // page) * page, end // page * page
                yield from ((first - start, False), (last - first, True), (end - last, False))


class Snapshot:
    """All segments of one device, and sums: reserved, in use, waiting, and free for reuse."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        blocks = [block for segment in segments for block in segment.blocks]
        self.blocks_in_use = sorted(
            (block for block in blocks if block.state == "allocated"), key=lambda block: block.address
        )
        self.reserved_bytes = sum(block.size_bytes for block in blocks)
        self.allocated_bytes = sum(block.size_bytes for block in self.blocks_in_use)
        self.requested_bytes = sum(block.requested_bytes for block in self.blocks_in_use)
        self.pending_bytes = sum(block.size_bytes for block in blocks if block.state == "pending")
        pieces = [(segment.private, is_whole, size) for segment in segments for size, is_whole in segment.free_pieces()]
        self.private_bytes = sum(size for private, _, size in pieces if private)
        """Free blocks in private pools."""
        self.cached_bytes = sum(size for private, is_whole, size in pieces if is_whole and not private)
        """Memory outside private pools that can be freed: segments, or pages of one, without any block in use."""
        self.fragments = [size for private, is_whole, size in pieces if not is_whole and not private]
        """Free pieces outside private pools that cannot be freed, because they share a segment with blocks in use."""


def snapshots(backend: str) -> dict[str, Snapshot]:
    """Return the snapshot of each device of ``backend`` with reserved memory; none if torch has no snapshots.

    Raises:
        RuntimeError: the allocator in use has none (``cudaMallocAsync``, a user's allocator).
    """
    take = getattr(in_use(backend), "memory_snapshot", None)
    if take is None:
        return {}
    try:
        entries = take(include_traces=False)  # the allocation history, if the user records one, can be huge
    except TypeError:  # an older torch
        entries = take()
    segments: dict[str, list[Segment]] = {}
    for data in entries:
        segments.setdefault(f"{backend}:{data['device']}", []).append(_segment(data))
    return {device: Snapshot(tuple(items)) for device, items in segments.items()}


def _segment(data: Mapping[str, Any]) -> Segment:
    address, blocks = int(data["address"]), []
    for entry in data["blocks"]:
        size, state = int(entry["size"]), entry["state"]
        # torch's documentation calls the third state active_awaiting_free, its snapshots active_pending_free.
        known: State = "inactive" if state == "inactive" else "allocated" if state == "active_allocated" else "pending"
        address = int(entry.get("address", address))
        blocks.append(Block(address, size, min(int(entry.get("requested_size", size)), size), known))
        address += size
    pages = _PAGES.get(data.get("segment_type", "")) if data.get("is_expandable") else None  # torch 2.1
    private = tuple(data.get("segment_pool_id", (0, 0))) != (0, 0)
    return Segment(tuple(blocks), private, pages, data.get("segment_type") == "small", int(data.get("stream", 0)))
