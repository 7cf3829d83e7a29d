"""Finds out why memory ran out, from figures of the moment of the error: before anything is
freed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import psutil

from ipygpumem.heap.allowance import Allowance, AllowanceError
from ipygpumem.inventory.out_of_memory.causes import Bound, ProcessOrNames, Shortage, cause_of
from ipygpumem.inventory.out_of_memory.unused_names import FailedCode, unused_names
from ipygpumem.probes import own_limits
from ipygpumem.probes.accelerators import initialized_backend
from ipygpumem.probes.allocator import (
    FailedAllocation,
    Segment,
    Snapshot,
    SnapshotBlock,
    expandable_setting,
    snapshots,
)
from ipygpumem.probes.nvml import Nvml, process_label
from ipygpumem.probes.segments import MOUNT
from ipygpumem.reclaim.failure import Failure
from ipygpumem.records import Cause
from ipygpumem.units import MIB, format_bytes

_BYTES_OF_EDGES = 40 * MIB
"""Bytes of a gap that expandable segments may not free: a part of a page of 20 MiB at either end.
"""
_MOST_ON_HEAP = 2_000_000
"""Maximum number of allocated blocks for which the heap is searched: a third of a second."""
_NOT_SEARCHED = "; your variables were not searched for memory to free, to save time and memory"


def find_cause(
    code: FailedCode, failure: Failure, figures: FailedAllocation | None, allowance: Allowance
) -> Cause | None:
    """Return why memory ran out, if figures decide it. The error tells the kind of memory: a card's
    (then torch's message has figures), shared memory, or RAM.

    Args:
        code: the code that failed, with the notebook's names.
        failure: the error's kind.
        figures: torch's figures, from its message.
        allowance: the time and memory for a search of the names.
    """
    snapshot = None
    if figures is not None:
        with suppress(RuntimeError):  # an allocator without snapshots
            snapshot = snapshots("cuda").get(figures.device)
        shortage = _shortage_on_card(figures, snapshot)
    elif failure.place == "shm":
        usage = shutil.disk_usage(MOUNT)
        return cause_of(Shortage("shm", total_bytes=usage.total, free_bytes=usage.free))
    else:
        shortage = _shortage_on_host(failure.requested_bytes)
    cause = cause_of(shortage)
    if shortage.requested_bytes is None or cause is None or cause.kind not in ("too much", "limit"):
        return cause  # freeing other processes or names would not help
    return _cause_with_holders(shortage, code, figures, snapshot, allowance)


def _cause_with_holders(
    shortage: Shortage,
    code: FailedCode,
    figures: FailedAllocation | None,
    snapshot: Snapshot | None,
    allowance: Allowance,
) -> Cause | None:
    """Return why memory ran out, with the processes or names whose memory would have been enough
    for the request.

    Args:
        shortage: the figures without these processes and names.
        code: as for ``find_cause``.
        figures: as for ``find_cause``.
        snapshot: the allocator's segments; None for the host.
        allowance: as for ``find_cause``.
    """
    bytes_to_limit = _bytes_to_limit(shortage, figures)
    holders = list[ProcessOrNames]()
    if figures is not None:
        holders += _other_processes(shortage, bytes_to_limit)
    note = ""
    room = Room(shortage, snapshot, bytes_to_limit)
    try:
        names = _names_to_delete(shortage, code, room, allowance)
        if names is not None:
            holders.append(names)
    except AllowanceError:
        note = _NOT_SEARCHED
    cause = cause_of(replace(shortage, holders=tuple(holders)))
    if cause is not None:
        cause = replace(cause, text=cause.text + note)
    return cause


def _names_to_delete(
    shortage: Shortage, code: FailedCode, room: Room, allowance: Allowance
) -> ProcessOrNames | None:
    """Return the large names of earlier cells whose deletion makes room for the request; None if
    there are none.

    Raises:
        AllowanceError: there are too many objects, or the search takes too much time or memory.
    """
    if sys.getallocatedblocks() > _MOST_ON_HEAP:
        raise AllowanceError("too many objects to search")
    return unused_names(shortage, code, room.after, allowance)


def _bytes_to_limit(shortage: Shortage, figures: FailedAllocation | None) -> int | None:
    """Return the bytes that can still be allocated until the nearest limit, such as torch's
    ``set_per_process_memory_fraction``; None without a limit.
    """
    if figures is not None and figures.limit is not None:
        return figures.limit - figures.allocated - figures.unallocated
    return min((bound.left_bytes for bound in shortage.bounds), default=None)


# -- figures --------------------------------------------------------------------------------------


def _shortage_on_host(requested: int | None) -> Shortage:
    """Return the figures of the machine's memory and of the limits on this process."""
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    bounds = list[Bound]()
    for limit in own_limits.limits():
        size = format_bytes(limit.limit_bytes)
        what = own_limits.QUANTITIES[limit.name]
        words = f"the {size} of {what} that this process may use ({limit.name})"
        remedy = own_limits.remedy(limit.name)
        bounds.append(Bound(limit.available_bytes, words, remedy))
    return Shortage(
        "cpu",
        requested,
        total_bytes=int(memory.total + swap.total),
        free_bytes=int(memory.available + swap.free),
        overcommits=sys.platform == "linux",
        bounds=tuple(bounds),
    )


def _shortage_on_card(figures: FailedAllocation, snapshot: Snapshot | None) -> Shortage:
    """Return the figures of a card at the moment when the request failed.

    The snapshot is taken a moment later: when the failed functions ended, their tensors left
    further gaps. torch's message has the sum of that moment, so at most so many bytes count as
    gaps.
    """
    shortage = Shortage(figures.device, figures.requested, figures.total, figures.free)
    if snapshot is None:
        return shortage
    gaps = list[int]()
    """Bytes of the free pieces that the request could not use, because each is too small."""
    idle_bytes = 0
    """Free bytes that are kept for other streams, or for requests of another size."""
    for segment in snapshot.segments:
        idle_bytes += _bytes_of(segment, "pending")
        if not _serves(segment, figures.requested):
            idle_bytes += _bytes_of(segment, "inactive")
            continue
        for size, is_whole in segment.free_pieces():
            if not is_whole and size < figures.requested:
                gaps.append(size)
    gap_bytes = max(0, min(sum(gaps), figures.unallocated - idle_bytes))
    freed_since_bytes = sum(gaps) - gap_bytes
    bytes_without_edges = sum(max(0, size - _BYTES_OF_EDGES) for size in gaps)
    return replace(
        shortage,
        gap_bytes=gap_bytes,
        largest_gap_bytes=min(max(gaps, default=0), gap_bytes),
        idle_bytes=idle_bytes,
        expandable_bytes=max(0, bytes_without_edges - freed_since_bytes),
        setting=expandable_setting(),
    )


def _serves(segment: Segment, requested: int) -> bool:
    """Return True if the allocator takes a block of that size from a segment: it has segments for
    requests of up to a MiB, and other ones for larger requests.
    """
    if segment.private or segment.stream:
        return False
    return segment.small == (requested <= MIB)


def _bytes_of(segment: Segment, state: str) -> int:
    """Return the bytes of a segment's blocks that are in one state, such as ``inactive``."""
    return sum(block.size_bytes for block in segment.blocks if block.state == state)


class Room:
    """The largest request that a device could serve after more memory is freed.

    Args:
        shortage: the figures of the device.
        snapshot: the allocator's segments; None for the host.
        bytes_to_limit: the bytes that can be allocated before the nearest limit; None without one.
    """

    def __init__(
        self, shortage: Shortage, snapshot: Snapshot | None, bytes_to_limit: int | None
    ) -> None:
        self._shortage = shortage
        self._snapshot = snapshot
        self._bytes_to_limit = bytes_to_limit

    def after(self, size: int, freed: Collection[int]) -> int:
        """Return the largest request that fits once blocks are freed.

        Args:
            size: bytes of the blocks.
            freed: their addresses.
        """
        if self._shortage.overcommits:
            return (self._bytes_to_limit or 0) + size
        free = self._shortage.free_bytes or 0
        if self._snapshot is None:
            on_device = free + size
        else:
            on_device = _largest_free(self._snapshot, free, freed)
        if self._bytes_to_limit is None:
            return on_device
        return min(on_device, self._bytes_to_limit + size)


def _largest_free(snapshot: Snapshot, free: int, freed: Collection[int]) -> int:
    """Return the largest request that fits on a card once some blocks are freed.

    A segment that becomes free as a whole is returned to the card. In any other one, the request
    must fit into a run of free blocks.

    Args:
        snapshot: the allocator's segments.
        free: bytes of the card that no process uses.
        freed: the addresses of the blocks.
    """
    largest_run = 0
    """Bytes of the largest free run in a segment that cannot be returned to the card."""
    for segment in snapshot.segments:
        if segment.private or not any(block.address in freed for block in segment.blocks):
            continue
        sizes = _sizes_of_free_runs(segment.blocks, freed)
        whole_bytes = sum(block.size_bytes for block in segment.blocks)
        if segment.page_bytes is not None:
            # Whole pages of an expandable segment are returned to the card.
            edges = 2 * segment.page_bytes
            free += sum(max(0, size - edges) for size in sizes)
        elif sizes == [whole_bytes]:
            free += whole_bytes
        else:
            largest_run = max(largest_run, *sizes)
    return max(free, largest_run)


def _sizes_of_free_runs(blocks: Sequence[SnapshotBlock], freed: Collection[int]) -> list[int]:
    """Return the bytes of each run of neighbouring free blocks, once the blocks at the ``freed``
    addresses are free, too: only neighbours become one large block.
    """
    sizes = list[int]()
    is_in_run = False
    for block in blocks:
        is_free = block.state == "inactive" or block.address in freed
        if is_free and is_in_run:
            sizes[-1] += block.size_bytes
        elif is_free:
            sizes.append(block.size_bytes)
        is_in_run = is_free
    return sizes


# -- other processes ------------------------------------------------------------------------------


def _other_processes(shortage: Shortage, bytes_to_limit: int | None) -> Iterator[ProcessOrNames]:
    """Yield the other process that uses most of a card and, if there are more, all of them
    together.

    Args:
        shortage: the figures of the card.
        bytes_to_limit: the bytes that can be allocated before the nearest limit; None without one.
    """
    with closing(Nvml()) as nvml:
        index = int(shortage.device.partition(":")[2])
        wide = nvml.device(initialized_backend("cuda"), index, processes=True, has_context=True)
    sizes = dict(wide.other_processes)
    if not sizes:
        return
    largest = max(sizes, key=sizes.__getitem__)
    label = process_label(largest)
    size = sizes[largest]
    remedy = "end it if it is yours"
    if "another kernel" in label:
        remedy = "shut that kernel down"
    words = f"{label} has {format_bytes(size)} of it"
    yield ProcessOrNames(
        "process", words, size, _room_without(shortage, size, bytes_to_limit), remedy
    )
    if len(sizes) > 1:
        total = sum(sizes.values())
        words = f"{len(sizes)} other processes have {format_bytes(total)} of it, {label} the most"
        yield ProcessOrNames(
            "process", words, total, _room_without(shortage, total, bytes_to_limit), remedy=""
        )


def _room_without(shortage: Shortage, size: int, bytes_to_limit: int | None) -> int:
    """Return the largest request that fits without processes that use ``size`` bytes."""
    room = (shortage.free_bytes or 0) + size
    if bytes_to_limit is None:
        return room
    return min(room, bytes_to_limit)
