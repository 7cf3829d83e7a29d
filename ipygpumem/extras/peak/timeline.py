"""Bytes over time by role, and the blocks that were alive at the highest moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ipygpumem.estimating.user_lines import line_text
from ipygpumem.extras.peak.records import DevicePeak, PeakPoint, PeakRow
from ipygpumem.units import divided_up

_MOST_POINTS = 500
"""Maximum number of points of a curve."""
T = TypeVar("T")
Lives = Sequence[Any]
"""Lives of blocks, as in the estimates' log: ``size_bytes``, ``born``, ``died`` on a clock,
``origin``.
"""
RowKey = tuple[str, str, str, str, "tuple[str, int] | None"]
"""A block's role, name, module, operation and line."""


class FailureTime(NamedTuple):
    """The time at which an allocation failed."""

    tick: int
    """On the clock of the log, or of the allocator's history."""
    seconds: float
    """Since the start."""


class MemoryAtTime(NamedTuple):
    """The memory at one time."""

    lives: Lives
    """The blocks that were alive."""
    seconds: float
    """Since the start."""


class SizeChange(NamedTuple):
    """A block that is allocated or freed."""

    tick: int
    """The time, as in ``FailureTime``."""
    size_bytes: int
    """The block's bytes; negative if it is freed."""
    role: str


class SizedBlock(NamedTuple):
    """A block as it is at one moment: later code may still use more of its bytes."""

    life: Any
    """The ``StorageLife`` of the block."""
    size_bytes: int
    """Its bytes in use."""
    reserved_bytes: int
    """Further bytes, which are reserved and not used."""


class Clock:
    """Converts ticks of a log's clock to seconds.

    Seconds are noted for some of the ticks. A tick in between has those of the last noted tick
    before it.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._seconds: list[float] = []

    def note(self, tick: int, seconds: float) -> None:
        """Note the seconds of a tick; ignored unless the tick is later than all noted ones."""
        if not self._ticks or tick > self._ticks[-1]:
            self._ticks.append(tick)
            self._seconds.append(seconds)

    def seconds(self, tick: int) -> float:
        """Return the time of a tick."""
        index = bisect_right(self._ticks, tick)
        return self._seconds[index - 1] if index else 0.0


class Timeline:
    """The memory of one device over time.

    Args:
        role: returns the role of a life, such as ``gradients``.
        clock: converts the ticks of lives to seconds.
    """

    def __init__(self, role: Callable[[Any], str], clock: Clock) -> None:
        self._role = role
        self._seconds = clock.seconds
        self._added_until = 0
        """The tick until which blocks were added."""
        self._points: list[PeakPoint] = []
        self.peak_bytes = -1
        self.peak_at = 0
        """The tick of the peak."""
        self.blocks: Sequence[SizedBlock] = ()
        """The blocks that were alive at the peak."""

    def add(self, lives: Lives, until: int) -> None:
        """Add the memory since the last call to the curve, and keep the blocks of a new peak.

        Args:
            lives: the blocks that were alive since the last call.
            until: the tick until which they are known.
        """
        changes = self._changes(lives)
        self._added_until = until
        bytes_by_role = dict[str, int]()
        total = 0
        new_peak_at: int | None = None
        for group in _groups(changes):  # each has one point: its highest moment
            most_of_group = -1
            for tick, size, role in group:
                bytes_by_role[role] = bytes_by_role.get(role, 0) + size
                total += size
                if total > most_of_group:
                    most_of_group = total
                    point = PeakPoint(self._seconds(tick), dict(bytes_by_role))
                if total > self.peak_bytes:
                    self.peak_bytes = total
                    self.peak_at = new_peak_at = tick
            self._points.append(point)
        if new_peak_at is not None:
            self.blocks = blocks_of(alive_at(lives, new_peak_at))

    def _changes(self, lives: Lives) -> list[SizeChange]:
        """Return the allocations and frees since the last call, in the order of time; blocks from
        before begin it.
        """
        changes = list[SizeChange]()
        for life in lives:
            role = self._role(life)
            changes.append(SizeChange(max(life.born, self._added_until), life.size_bytes, role))
            if life.died is not None:
                changes.append(SizeChange(life.died, -life.size_bytes, role))
        changes.sort(key=attrgetter("tick"))
        return changes

    def peak(
        self,
        device: str,
        key_of: Callable[[Any], RowKey],
        *,
        source: str,
        moment: MemoryAtTime | None = None,
    ) -> DevicePeak:
        """Return the record of a device at its peak, or at the ``moment`` of a failure.

        Args:
            device: its name.
            key_of: returns the key of the row to which a life belongs.
            source: the origin of the figures, as in the record.
            moment: the memory at a failure; None for the peak.
        """
        if moment is None:
            blocks = self.blocks
            seconds = self._seconds(self.peak_at)
        else:
            lives, seconds = moment
            blocks = blocks_of(lives)
        groups: dict[RowKey, list[SizedBlock]] = {}
        for block in blocks:
            groups.setdefault(key_of(block.life), []).append(block)
        rows = sorted_rows(_row_of_blocks(row_key, group) for row_key, group in groups.items())
        # Several calls of ``add`` may have made more points than a curve may have.
        curve = tuple(
            max(points, key=lambda point: sum(point.parts.values()))
            for points in _groups(self._points)
        )
        size = sum(block.size_bytes for block in blocks)
        return DevicePeak(device, source, size, seconds, rows, curve, ran_out=moment is not None)


def _groups(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield items in order, in groups of equal size: at most as many as a curve may have points."""
    size = divided_up(len(items), _MOST_POINTS) or 1
    return (items[start : start + size] for start in range(0, len(items), size))


def alive_at(lives: Lives, tick: int) -> Lives:
    """Return the lives of the blocks that were alive after a tick."""
    return [life for life in lives if life.born <= tick and (life.died is None or life.died > tick)]


def blocks_of(lives: Lives) -> list[SizedBlock]:
    """Return the blocks with their sizes as they are now."""
    return [SizedBlock(life, life.size_bytes, life.reserved_bytes) for life in lives]


def _row_of_blocks(row_key: RowKey, blocks: Sequence[SizedBlock]) -> PeakRow:
    """Return the row of blocks that have the same key."""
    role, name, module, operation, line = row_key
    return PeakRow(
        sum(block.size_bytes for block in blocks),
        role,
        name,
        module,
        operation,
        line_text(*line) if line else "",
        len(blocks),
        reserved_bytes=sum(block.reserved_bytes for block in blocks),
    )


def sorted_rows(rows: Iterable[PeakRow]) -> tuple[PeakRow, ...]:
    """Return the rows that have any bytes, the largest first."""
    filled = [row for row in rows if row.size_bytes or row.reserved_bytes]
    return tuple(sorted(filled, key=lambda row: -row.size_bytes))
