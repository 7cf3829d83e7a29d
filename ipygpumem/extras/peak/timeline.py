"""Bytes over time by role, and the blocks that were alive at the highest moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipygpumem.estimating import line_text
from ipygpumem.extras.peak.records import DevicePeak, PeakPoint, PeakRow

_MOST_POINTS = 1000
Lives = Sequence[Any]
"""Lives of blocks, as in the estimates' log: ``size_bytes``, ``born``, ``died`` on a clock, ``place``."""


class Clock:
    """Converts ticks of a log's clock to seconds: those of the last note before it."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._seconds: list[float] = []

    def note(self, tick: int, seconds: float) -> None:
        """Note the time of a tick, unless it is known."""
        if not self._ticks or tick > self._ticks[-1]:
            self._ticks.append(tick)
            self._seconds.append(seconds)

    def seconds(self, tick: int) -> float:
        """Return the time of a tick."""
        place = bisect_right(self._ticks, tick)
        return self._seconds[place - 1] if place else 0.0


class Timeline:
    """The memory of one device over time."""

    def __init__(self, role: Callable[[Any], str], clock: Clock) -> None:
        self._role, self._seconds, self._since = role, clock.seconds, 0
        self._points: list[PeakPoint] = []
        self.peak_bytes, self.peak_at = -1, 0
        self.lives: Lives = ()
        """The blocks that were alive at the peak."""

    def add(self, lives: Lives, until: int) -> None:
        """Add the blocks that were alive since the last call, until a tick."""
        since, self._since = self._since, until
        now: dict[str, int] = {}
        total, changes = 0, list[tuple[int, int, str]]()
        for life in lives:
            role = self._role(life)
            if life.born > since:
                changes.append((life.born, life.size_bytes, role))
            else:
                now[role] = now.get(role, 0) + life.size_bytes
                total += life.size_bytes
            if life.died is not None:
                changes.append((life.died, -life.size_bytes, role))
        points, highest = [PeakPoint(self._seconds(since), dict(now))], -1
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_at, highest = total, since, since
        last = changes and max(changes)[0]
        step = (self._seconds(last) - points[0].seconds) / _MOST_POINTS if last else 0.0
        top = total
        for tick, size, role in sorted(changes, key=lambda change: change[0]):
            now[role] = now.get(role, 0) + size
            total += size
            if total > self.peak_bytes:
                self.peak_bytes, self.peak_at, highest = total, tick, tick
            at = self._seconds(tick)
            if at > points[-1].seconds + step:
                points.append(PeakPoint(at, dict(now)))
                top = total
            elif total > top:  # of close moments, the highest
                points[-1], top = PeakPoint(points[-1].seconds, dict(now)), total
        self._points += points
        if highest >= 0:
            self.lives = alive_at(lives, highest)

    def curve(self) -> tuple[PeakPoint, ...]:
        """Return the bytes over time, of close moments the highest."""
        group = -(-len(self._points) // _MOST_POINTS) or 1
        groups = (self._points[start : start + group] for start in range(0, len(self._points), group))
        return tuple(max(points, key=lambda point: sum(point.parts.values())) for points in groups)


def alive_at(lives: Lives, tick: int) -> Lives:
    """Return the lives that include a tick."""
    return [life for life in lives if life.born <= tick and (life.died is None or life.died > tick)]


def device_peak(
    device: str,
    timeline: Timeline,
    row: Callable[[Any], tuple[str, str, str, str, tuple[str, int] | None]],
    *,
    source: str,
    moment: tuple[Lives, float] | None = None,
) -> DevicePeak:
    """Return the record of a device at its peak, or at the ``moment`` of a failure.

    ``row`` returns a block's role, name, module, operation and line.
    """
    lives, seconds = moment or (timeline.lives, timeline._seconds(timeline.peak_at))
    groups: dict[Any, list[int]] = {}
    for life in lives:
        groups.setdefault(row(life), []).append(life.size_bytes)
    return DevicePeak(
        device,
        source,
        sum(life.size_bytes for life in lives),
        seconds,
        rows_of(groups),
        timeline.curve(),
        ran_out=moment is not None,
    )


def rows_of(groups: Mapping[Any, list[int]]) -> tuple[PeakRow, ...]:
    """Return a row for each role, name, module, operation and line of blocks, the largest first."""
    rows = [
        PeakRow(sum(sizes), role, name, module, operation, line_text(*line) if line else "", len(sizes))
        for (role, name, module, operation, line), sizes in groups.items()
        if sum(sizes)
    ]
    return tuple(sorted(rows, key=lambda row: -row.size_bytes))
