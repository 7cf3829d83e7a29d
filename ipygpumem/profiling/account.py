"""Adds up what lines cost: each lasts from its beginning until the next line of its frame begins or the frame is left.

What a line calls is within its span, so a followed function counts for the line that calls it, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from ipygpumem.freeing import reclaim
from ipygpumem.measuring.meter import Meter

_TRIM_SHARE, _TRIM_SECONDS = 1 / 3, 0.1
"""So much of the time since the beginning, and so much beside, may go into giving free heap pages back."""


@dataclass
class LineCost:
    """What one line cost in all its runs."""

    hits: int = 0
    seconds: float = 0.0
    kept_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """How far a device rose above its level at the line's beginning, in the worst of the runs."""

    def add(self, before: dict[str, int], peaks: dict[str, int], after: dict[str, int], seconds: float) -> None:
        """Count one run."""
        self.seconds += seconds
        for device, size in after.items():
            start = before.get(device, 0)
            self.kept_bytes[device] = self.kept_bytes.get(device, 0) + size - start
            rise = max(peaks.get(device, 0), size) - start
            self.peak_bytes[device] = max(self.peak_bytes.get(device, 0), rise)


@dataclass
class _Visit:
    """A line that runs."""

    key: tuple[int, int]
    before: dict[str, int]
    peaks: dict[str, int]
    began: float

    def fold(self, peaks: dict[str, int]) -> None:
        for device, peak in peaks.items():
            if peak > self.peaks.get(device, 0):
                self.peaks[device] = peak


@dataclass
class _Activation:
    """A followed frame that runs."""

    frame: int
    block: int
    visit: _Visit | None = None


class Account:
    """Keeps the books while one thread runs followed code.

    Frames are told apart by identity. They must be entered and left in the order of a stack; one that was not seen to
    leave is taken off with the frame below it.

    Args:
        meter: what measures; its open spans keep their peaks.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._span = meter.start()
        self._frames: list[_Activation] = []
        self.costs: dict[tuple[int, int], LineCost] = {}
        """By block and line."""
        self._began = time.perf_counter()
        self.own_seconds = 0.0
        """Time that went into measuring."""
        self._trim_seconds = 0.0
        self.untrimmed = 0
        """How often free heap pages were not given back, since that takes too long here."""

    def enter(self, frame: FrameType, block: int, *, line: int | None = None) -> None:
        """A frame begins, or goes on in ``line``: a generator or coroutine that had been suspended."""
        now = time.perf_counter()
        activation = _Activation(id(frame), block)
        self._frames.append(activation)
        if line is not None:
            self._begin(activation, line, self._lap(), now)
        self._done(now)

    def line(self, frame: FrameType, line: int) -> None:
        """A line of the running frame begins."""
        now = time.perf_counter()
        if self._is_running(frame):
            activation = self._frames[-1]
            after = self._lap()
            self._end(activation, after, now)
            self._begin(activation, line, after, now)
            self.costs.setdefault((activation.block, line), LineCost()).hits += 1
        self._done(now)

    def leave(self, frame: FrameType) -> None:
        """The running frame returns, is suspended, or an error leaves it."""
        now = time.perf_counter()
        if self._is_running(frame):
            self._end(self._frames[-1], self._lap(), now)
            self._frames.pop()
        self._done(now)

    def close(self) -> float:
        """End what still runs and return the seconds since the beginning."""
        now = time.perf_counter()
        after = self._lap()
        while self._frames:
            self._end(self._frames[-1], after, now)
            self._frames.pop()
        self.drop()
        return now - self._began

    def drop(self) -> None:
        """Measure no more; may be called again."""
        self._meter.drop(self._span)

    def _is_running(self, frame: FrameType) -> bool:
        """Take off frames above ``frame`` that never left; whether it is one that was entered."""
        wanted = id(frame)
        if all(activation.frame != wanted for activation in self._frames):
            return False
        while self._frames[-1].frame != wanted:
            self._end(self._frames[-1], self._lap(), time.perf_counter())
            self._frames.pop()
        return True

    def _lap(self) -> dict[str, int]:
        """Return each device's bytes, with the peak since the last lap counted for the line that runs."""
        self._trim()
        usages = self._meter.lap(self._span)
        running = next(self._visits(), None)
        if running is not None:
            running.fold({usage.device: usage.peak_bytes for usage in usages})
        return {usage.device: usage.after_bytes for usage in usages}

    def _trim(self) -> None:
        """Give free heap pages back, or lines that take them again would cost nothing; microseconds, mostly."""
        began = time.perf_counter()
        if self._trim_seconds > _TRIM_SHARE * (began - self._began) + _TRIM_SECONDS:
            self.untrimmed += 1
            return
        reclaim.trim_host_heap()
        self._trim_seconds += time.perf_counter() - began

    def _visits(self) -> Iterator[_Visit]:
        """Yield the lines that run, the innermost first."""
        return (frame.visit for frame in reversed(self._frames) if frame.visit is not None)

    def _begin(self, activation: _Activation, line: int, now_bytes: dict[str, int], now: float) -> None:
        # Time is counted without our own: this clock stands still while we measure.
        activation.visit = _Visit((activation.block, line), now_bytes, dict(now_bytes), now - self.own_seconds)

    def _end(self, activation: _Activation, after: dict[str, int], now: float) -> None:
        visit, activation.visit = activation.visit, None
        if visit is None:
            return
        outer = list(self._visits())
        if outer:
            outer[0].fold(visit.peaks)
        if all(other.key != visit.key for other in outer):  # in a recursion the outermost run has it all
            cost = self.costs.setdefault(visit.key, LineCost())
            cost.add(visit.before, visit.peaks, after, now - self.own_seconds - visit.began)

    def _done(self, began: float) -> None:
        self.own_seconds += time.perf_counter() - began
