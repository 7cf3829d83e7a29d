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

from ipygpumem.probes.accelerators import in_use, loaded_torch
from ipygpumem.units import bytes_in_message

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
    """Requested bytes before the allocator's rounding; equal to ``size_bytes`` if torch does not
    report them.
    """
    state: State


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece."""

    blocks: tuple[Block, ...]
    private: bool = False
    """True for a segment of a private pool, such as a captured CUDA graph's, which serves no other
    code.
    """
    page_bytes: int | None = None
    """Set for a segment that grows in place (``expandable_segments``): its free pages can be
    returned to the driver.
    """
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
            (block for block in blocks if block.state == "allocated"),
            key=lambda block: block.address,
        )
        self.reserved_bytes = sum(block.size_bytes for block in blocks)
        self.allocated_bytes = sum(block.size_bytes for block in self.blocks_in_use)
        self.requested_bytes = sum(block.requested_bytes for block in self.blocks_in_use)
        self.pending_bytes = sum(block.size_bytes for block in blocks if block.state == "pending")
        pieces = [
            (segment.private, is_whole, size)
            for segment in segments
            for size, is_whole in segment.free_pieces()
        ]
        self.private_bytes = sum(size for private, _, size in pieces if private)
        """Free blocks in private pools."""
        self.cached_bytes = sum(
            size for private, is_whole, size in pieces if is_whole and not private
        )
        """Memory outside private pools that can be freed: segments, or pages of one, without any
        block in use.
        """
        self.fragments = [
            size for private, is_whole, size in pieces if not is_whole and not private
        ]
        """Free pieces outside private pools that cannot be freed, because they share a segment with
        blocks in use.
        """


def snapshots(backend: str) -> dict[str, Snapshot]:
    """Return the snapshot of each device of ``backend`` with reserved memory; none if torch has no
    snapshots.

    Raises:
        RuntimeError: the allocator in use has none (``cudaMallocAsync``, a user's allocator).
    """
    take = getattr(in_use(backend), "memory_snapshot", None)
    if take is None:
        return {}
    try:
        # the allocation history, if the user records one, can be huge
        entries = take(include_traces=False)
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
        # torch's documentation calls the third state active_awaiting_free, its snapshots
        # active_pending_free.
        known: State = (
            "inactive"
            if state == "inactive"
            else "allocated"
            if state == "active_allocated"
            else "pending"
        )
        address = int(entry.get("address", address))
        blocks.append(
            Block(address, size, min(int(entry.get("requested_size", size)), size), known)
        )
        address += size
    # torch 2.1
    pages = _PAGES.get(data.get("segment_type", "")) if data.get("is_expandable") else None
    private = tuple(data.get("segment_pool_id", (0, 0))) != (0, 0)
    return Segment(
        tuple(blocks),
        private,
        pages,
        data.get("segment_type") == "small",
        int(data.get("stream", 0)),
    )


# -- out-of-memory errors, and settings ---------------------------------------------------------

_BYTES = r"[\d.]+ (?:bytes|[KMGT]iB)"
_MESSAGES = (
    rf"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<requested>{_BYTES})\. GPU (?P<index>\d+) "
    rf"has a total \w+ of "
    rf"(?P<total>{_BYTES}) of which (?P<free>{_BYTES}) is free\..*?(?:(?P<limit>{_BYTES}) allowed; "
    rf")?Of the allocated "
    rf"memory (?P<allocated>{_BYTES}) is allocated.*? and (?P<unallocated>{_BYTES}) is reserved by "
    rf"PyTorch but",
    rf"Allocation on device (?P<index>\d+) would exceed allowed memory\..*?\nCurrently allocated "
    rf"+: "
    rf"(?P<allocated>{_BYTES})\nRequested +: (?P<requested>{_BYTES})\nDevice limit +: "
    rf"(?P<total>{_BYTES})\n"
    rf"Free .*?: (?P<free>{_BYTES})\nPyTorch limit .*?: (?P<limit>{_BYTES})",
)
"""Messages of the caching allocator, since torch 2.1, and of cudaMallocAsync."""


class FailedAllocation(NamedTuple):
    """torch's figures of a failed allocation, rounded to two decimals of their units."""

    device: str
    requested: int
    total: int
    free: int
    """Free bytes of the device, without the allocator's."""
    allocated: int
    limit: int | None = None
    unallocated: int = 0
    """Reserved bytes that no tensor uses: torch has just freed all that it could."""


def failed_allocation(message: str) -> FailedAllocation | None:
    """Return the figures in the message of torch's out-of-memory error; None in any
    other message.
    """
    found = next(
        filter(None, (re.search(pattern, message, re.DOTALL) for pattern in _MESSAGES)), None
    )
    if found is None:
        return None
    texts = {name: text for name, text in found.groupdict().items() if text and name != "index"}
    return FailedAllocation(
        f"cuda:{found['index']}", **{name: bytes_in_message(text) for name, text in texts.items()}
    )


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables, newest first; torch before 2.9 does not read that one."""


def settings() -> str:
    """Return the allocator's settings: made by a call, which newer torch reports, or in the
    environment.
    """
    ask: Any = getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_accelerator_getAllocatorSettings", str
    )
    return str(ask() or next(filter(None, map(os.environ.get, _VARIABLES)), ""))


def expandable_setting() -> str:
    """Return the settings that add growing segments to those in force; empty if they grow, or this
    torch cannot.
    """
    torch: Any = loaded_torch()
    version = tuple(map(int, re.findall(r"\d+", str(getattr(torch, "__version__", "")))[:2]))
    is_rocm = getattr(getattr(torch, "version", None), "hip", None) is not None
    if (
        version < (2, 1)
        or is_rocm
        or sys.platform != "linux"
        or "expandable_segments:True" in settings()
    ):
        return ""
    values = ",".join(filter(None, (settings(), "expandable_segments:True")))
    return f"{_VARIABLES[not hasattr(torch._C, '_accelerator_setAllocatorSettings')]}={values}"
