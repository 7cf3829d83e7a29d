"""Replays the log of storages in the simulated allocator, and derives a device's figures."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ipygpumem.estimating.memory.caching_allocator import (
    NO_LIMIT,
    STEP_BYTES,
    Allocator,
    OutOfRoomError,
    SimulatedBlock,
    most_split_bytes,
)
from ipygpumem.estimating.memory.storages import ROLES, StorageLife, StorageLog
from ipygpumem.estimating.records import DeviceEstimate
from ipygpumem.probes.allocator import Segment, snapshots

_PRECISION = 0.005
"""Precision of the search for the minimum memory, as a share of the reserved memory."""
_MOST_LIMITS = 40
"""Maximum number of limits to try in that search."""


@dataclass(frozen=True)
class Replay:
    """Input of a replay: events, the allocator's settings, and the segments at the start."""

    events: Sequence[tuple[int, int]]
    """The number of a storage with its size when it is allocated, and with 0 when it is freed."""
    most_split_bytes: int = NO_LIMIT
    """The size from which on the allocator does not split blocks."""
    segments: Sequence[Segment] = ()
    """The segments that the allocator has at the start."""
    addresses: Mapping[int, int] = field(default_factory=dict)
    """Addresses of the storages that exist at the start, by number."""

    @functools.cached_property
    def others_bytes(self) -> int:
        """Bytes of the segments that no storage of the log can use.

        Other tensors occupy them, or only another stream or a private pool can use them.
        """
        storages = set(self.addresses.values())
        size_bytes = 0
        for segment in self.segments:
            for block in segment.blocks:
                if not segment.is_usable(block) and block.address not in storages:
                    size_bytes += block.size_bytes
        return size_bytes

    @property
    def already_held_bytes(self) -> int:
        """Bytes of the segments that the storages occupy or can use."""
        return sum(map(_size_of, self.segments)) - self.others_bytes

    def allocator(self, limit_bytes: int = NO_LIMIT, *, downwards: bool = False) -> Allocator:
        """Return an allocator for a replay that may reserve ``limit_bytes``.

        The segments that other memory occupies do not count.
        """
        return Allocator(
            self.most_split_bytes,
            limit_bytes + self.others_bytes,
            self.segments,
            downwards=downwards,
        )

    def changes(self, allocator: Allocator) -> Iterator[tuple[int, int]]:
        """Replay the events in an allocator; yield each event's storage and its change of the bytes
        in use.
        """
        blocks: dict[int, SimulatedBlock] = {}
        for number, size in self.events:
            if size:
                existing = allocator.in_use.get(self.addresses.get(number, -1))
                block = existing or allocator.allocate(size)
                blocks[number] = block
                yield number, block.size
            else:
                block = blocks.pop(number)
                yield number, -block.size
                allocator.free(block)

    def fits(self, limit_bytes: int) -> bool:
        """Return True if the replay completes within a limit.

        It must do so with new segments above the existing ones, and with new ones below them.
        """
        return self._is_enough(limit_bytes, enough_from=_no_limits_known())

    def _is_enough(self, limit_bytes: int, enough_from: dict[bool, int]) -> bool:
        """Return True if the replay completes within a limit.

        Args:
            limit_bytes: the limit, which is lower than the ones before.
            enough_from: the lowest limit that is known to be enough, for segments that are added
                upwards (False) and downwards (True); it is updated.
        """
        for downwards, known_bytes in enough_from.items():
            if limit_bytes >= known_bytes:
                continue
            reserved_bytes = self._most_reserved_bytes(limit_bytes, downwards=downwards)
            if reserved_bytes is None:
                return False
            enough_from[downwards] = reserved_bytes
        return True

    def _most_reserved_bytes(self, limit_bytes: int, *, downwards: bool) -> int | None:
        """Return the most memory that a replay within a limit reserves; None if it is not enough.

        Within any limit between these bytes and the given one, the replay takes the same steps.
        """
        try:
            allocator = self.allocator(limit_bytes, downwards=downwards)
            for _ in self.changes(allocator):
                pass
        except OutOfRoomError:
            return None
        return allocator.most_reserved_bytes - self.others_bytes

    def least_bytes(self, allocated_bytes: int, reserved_bytes: int) -> int:
        """Return about the lowest limit from which on the replay completes with every limit.

        It is between the peak of the allocated memory and the reserved memory. Limits are tried
        from above, because a higher limit can fail where a lower one suffices: the later the cache
        is freed, the more of its segments are pinned by a small block.
        """
        fine_step = int(reserved_bytes * _PRECISION)
        coarse_step = (reserved_bytes - allocated_bytes) // _MOST_LIMITS
        step = max(STEP_BYTES, fine_step, coarse_step)
        enough = reserved_bytes
        lower = enough - step
        enough_from = _no_limits_known()
        while lower >= allocated_bytes and self._is_enough(lower, enough_from):
            enough = lower
            lower -= step
        return enough


def _no_limits_known() -> dict[bool, int]:
    """Return the lowest limits known to be enough before a search: none, in both directions."""
    return {False: NO_LIMIT, True: NO_LIMIT}


def _size_of(segment: Segment) -> int:
    """Return the bytes of all blocks of a segment."""
    return sum(block.size_bytes for block in segment.blocks)


class DeviceFigures(NamedTuple):
    """The figures of one device, before it is known how much memory it has for the code."""

    estimate: DeviceEstimate
    already_held_bytes: int
    """Bytes that the figures include and that this process holds on the device already."""


def device_figures(log: StorageLog, device: str, label: str) -> DeviceFigures:
    """Return the figures of one device, for RAM without an allocator.

    Args:
        log: the storages of all devices.
        device: the device's name in the log.
        label: its name in the estimate.
    """
    lives = [life for life in log.lives if life.device == device]
    moments = _moments(lives)
    in_use = _segments_in_use(label, log.erased)
    replay = _replay_of(lives, moments, in_use.segments)
    if label == "cpu":
        replayed = _replayed_in_ram(replay, lives, moments)
    else:
        replayed = _replayed_on_card(replay, moments)
    peak = replayed.peak
    sizes = _block_sizes(lives, moments, replayed.changes)
    before_bytes = 0
    for life, size in zip(lives, sizes, strict=True):
        if life.existed_before:
            before_bytes += size
    estimate = DeviceEstimate(
        device=label,
        before_bytes=before_bytes,
        peak_bytes=peak.size_bytes,
        after_bytes=peak.after_bytes,
        reserved_bytes=replayed.reserved_bytes,
        needed_bytes=replayed.needed_bytes,
        parts=_bytes_by_role(log, lives, sizes, peak.clock),
    )
    return DeviceFigures(estimate, replay.already_held_bytes + in_use.freed_bytes)


class _StorageMoment(NamedTuple):
    """A moment at which a storage is allocated or freed; moments are sorted by their fields."""

    clock: int
    """The time on the log's clock."""
    is_allocation: bool
    """True if it is allocated, False if it is freed."""
    number: int
    """The number of the storage."""


def _moments(lives: Sequence[StorageLife]) -> list[_StorageMoment]:
    """Return the moments at which storages are allocated and freed, in order."""
    moments: list[_StorageMoment] = []
    for number, life in enumerate(lives):
        if life.size_bytes:
            moments.append(_StorageMoment(life.born, is_allocation=True, number=number))
            if life.died:
                moments.append(_StorageMoment(life.died, is_allocation=False, number=number))
    return sorted(moments)


def _replay_of(
    lives: Sequence[StorageLife], moments: Iterable[_StorageMoment], segments: Sequence[Segment]
) -> Replay:
    """Return the input of a replay of some storages.

    A storage at the address of an existing block starts in that block.
    """
    events = []
    for moment in moments:
        size_bytes = 0
        if moment.is_allocation:
            size_bytes = lives[moment.number].size_bytes
        events.append((moment.number, size_bytes))
    existing = set[int]()
    for segment in segments:
        existing.update(block.address for block in segment.blocks)
    addresses = dict[int, int]()
    for number, life in enumerate(lives):
        if life.address in existing:
            addresses[number] = life.address
    return Replay(events, most_split_bytes(), segments, addresses)


def _changes_in_ram(
    events: Iterable[tuple[int, int]], lives: Sequence[StorageLife]
) -> Iterator[tuple[int, int]]:
    """Yield each event's storage and the change of bytes in use, without an allocator."""
    for number, size in events:
        if size:
            yield number, size
        else:
            yield number, -lives[number].size_bytes


@dataclass
class _HighestMoment:
    """The highest moment of a replay."""

    size_bytes: int = 0
    """Bytes in use at the highest moment."""
    clock: int = 0
    """The highest moment on the log's clock."""
    after_bytes: int = 0
    """Bytes in use after the last event."""

    @classmethod
    def of(
        cls, moments: Iterable[_StorageMoment], changes: Iterable[tuple[int, int]]
    ) -> _HighestMoment:
        """Return the peak of a replay's changes."""
        peak = cls()
        for moment, (_, change) in zip(moments, changes, strict=True):
            peak.after_bytes += change
            if peak.after_bytes > peak.size_bytes:
                peak.size_bytes = peak.after_bytes
                peak.clock = moment.clock
        return peak


class _Replayed(NamedTuple):
    """The results of a replay."""

    changes: Sequence[tuple[int, int]]
    """Each event's storage, and its change of the bytes in use."""
    peak: _HighestMoment
    reserved_bytes: int
    """The most memory that the allocator has reserved."""
    needed_bytes: int
    """The least memory with which the code completes."""


def _replayed_in_ram(
    replay: Replay, lives: Sequence[StorageLife], moments: Iterable[_StorageMoment]
) -> _Replayed:
    """Return the results for RAM: only the peak is needed, and nothing more is reserved."""
    changes = list(_changes_in_ram(replay.events, lives))
    peak = _HighestMoment.of(moments, changes)
    return _Replayed(changes, peak, peak.size_bytes, peak.size_bytes)


def _replayed_on_card(replay: Replay, moments: Iterable[_StorageMoment]) -> _Replayed:
    """Return the results of a replay in the simulated allocator."""
    allocator = replay.allocator(downwards=True)
    changes = list(replay.changes(allocator))
    peak = _HighestMoment.of(moments, changes)
    reserved_bytes = allocator.most_reserved_bytes - replay.others_bytes
    needed_bytes = replay.least_bytes(peak.size_bytes, reserved_bytes)
    return _Replayed(changes, peak, reserved_bytes, needed_bytes)


def _block_sizes(
    lives: Iterable[StorageLife],
    moments: Iterable[_StorageMoment],
    changes: Iterable[tuple[int, int]],
) -> list[int]:
    """Return the size of each storage's block in a replay; of the storage itself if it got none."""
    sizes = [life.size_bytes for life in lives]
    for moment, (number, change) in zip(moments, changes, strict=True):
        if moment.is_allocation:
            sizes[number] = change
    return sizes


def _bytes_by_role(
    log: StorageLog, lives: Iterable[StorageLife], sizes: Iterable[int], clock: int
) -> dict[str, int]:
    """Return the bytes that are alive at a time on the log's clock, by role."""
    bytes_by_role = dict.fromkeys(ROLES, 0)
    for life, size in zip(lives, sizes, strict=True):
        is_dead = life.died is not None and life.died <= clock
        if life.born <= clock and not is_dead:
            bytes_by_role[log.role(life)] += size
    return bytes_by_role


class _SegmentsInUse(NamedTuple):
    """The segments of a device with a block in use."""

    segments: Sequence[Segment] = ()
    freed_bytes: int = 0
    """Bytes of further segments, in which only blocks that count as freed are in use."""


def _segments_in_use(device: str, erased: set[int]) -> _SegmentsInUse:
    """Return the segments of a CUDA device with a block in use; the allocator can free the rest.

    None are known before torch uses CUDA, with another allocator, and with expandable segments,
    which the replay does not simulate.

    Args:
        device: the name of the device.
        erased: addresses of blocks that count as freed.
    """
    if not torch.cuda.is_initialized():
        return _SegmentsInUse()
    try:
        snapshot = snapshots("cuda").get(device)
    except RuntimeError:  # another allocator
        return _SegmentsInUse()
    if snapshot is None:
        return _SegmentsInUse()
    segments = list[Segment]()
    freed_bytes = 0
    for segment in snapshot.segments:
        if _is_free(segment):
            continue
        if segment.page_bytes:  # an expandable segment
            return _SegmentsInUse()
        remaining = _segment_without(segment, erased)
        if _is_free(remaining):
            freed_bytes += _size_of(remaining)
        else:
            segments.append(remaining)
    return _SegmentsInUse(segments, freed_bytes)


def _is_free(segment: Segment) -> bool:
    """Return True if no block of a segment is in use, so that the allocator can free it."""
    return all(block.state == "inactive" for block in segment.blocks)


def _segment_without(segment: Segment, erased: set[int]) -> Segment:
    """Return a segment in which the blocks at some addresses are free."""
    blocks = []
    for block in segment.blocks:
        if block.address in erased:
            block = replace(block, state="inactive")
        blocks.append(block)
    return replace(segment, blocks=tuple(blocks))
