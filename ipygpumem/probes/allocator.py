"""Reads what torch's caching allocator has reserved on each device, block by block, from its own snapshot.

A segment is what the allocator got from the driver; it hands it out in blocks. Both are as ``torch.cuda.
memory_snapshot`` describes them. Taking one allocates nothing on the device and waits for nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ipygpumem.probes.accelerators import in_use

_PAGES = {"small": 2 << 20, "large": 20 << 20}
"""The pages that a segment consists of where torch may give back a part of one, by the kind of segment."""

State = Literal["allocated", "pending", "inactive"]
"""In use; freed, but waiting for another stream; free for reuse."""


@dataclass(frozen=True)
class Block:
    """A piece of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    """What was asked for, without the allocator's rounding; as ``size_bytes`` where torch does not tell."""
    state: State


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece."""

    blocks: tuple[Block, ...]
    private: bool = False
    """It belongs to a pool of its own, such as a captured CUDA graph's, and serves nothing else."""
    page_bytes: int | None = None
    """Set for a segment that grows in place (``expandable_segments``): free pages in it can be given back."""

    def free_pieces(self) -> Iterator[tuple[int, bool]]:
        """Yield the size of each free piece, and whether emptying the cache gives it back."""
        is_free = all(block.state == "inactive" for block in self.blocks)
        page, origin = self.page_bytes, self.blocks[0].address if self.blocks else 0
        for block in self.blocks:
            start, end = block.address - origin, block.address - origin + block.size_bytes
            if block.state != "inactive":
                continue
            if is_free or page is None or -(-start // page) >= end // page:
                yield block.size_bytes, is_free
            else:  # whole pages, and what lies before and after them
                first, last = -(-start // page) * page, end // page * page
                yield from ((first - start, False), (last - first, True), (end - last, False))


class Snapshot:
    """All segments of one device: what was got from the driver, in use, freed but waiting, and free for reuse."""

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
        """Free blocks in pools of their own."""
        self.cached_bytes = sum(size for private, is_whole, size in pieces if is_whole and not private)
        """What can be given back, pools of their own apart: segments, or pages of one, without any block in use."""
        self.fragments = [size for private, is_whole, size in pieces if not is_whole and not private]
        """What is free and cannot be given back, pools of their own apart: it lies beside blocks in use."""


def snapshots(backend: str) -> dict[str, Snapshot]:
    """Return the snapshot of each device of ``backend`` on which something is reserved; none where torch has none.

    Raises:
        RuntimeError: the allocator in use keeps none (``cudaMallocAsync``, one of the user's own).
    """
    take = getattr(in_use(backend), "memory_snapshot", None)
    if take is None:
        return {}
    try:
        entries = take(include_traces=False)  # the history of allocations, if the user records one, can be huge
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
        # torch calls the third one active_awaiting_free in its documentation, and active_pending_free in its answers.
        known: State = "inactive" if state == "inactive" else "allocated" if state == "active_allocated" else "pending"
        address = int(entry.get("address", address))
        blocks.append(Block(address, size, min(int(entry.get("requested_size", size)), size), known))
        address += size
    pages = _PAGES.get(data.get("segment_type", "")) if data.get("is_expandable") else None  # torch 2.1
    private = tuple(data.get("segment_pool_id", (0, 0))) != (0, 0)
    return Segment(tuple(blocks), private, pages)
