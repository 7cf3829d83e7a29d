"""Detects code that retains more memory each time it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ipygpumem.records import Usage
from ipygpumem.units import MIB

_LEAST_BYTES, _LEAST_SHARE, _ENOUGH_BYTES = 10 * MIB, 0.01, 50 * MIB
"""Share of the memory in use, at least the first and at most the last figure, that one run must add to be reported."""
_RUNS = 3
"""Number of runs that must grow after the first one, which imports, warms up and fills caches."""
_SMALL_BYTES = MIB
"""Smaller growth ends a series: it is noise."""
_SUM_LEAST_BYTES, _SUM_SHARE, _SUM_ENOUGH_BYTES = 30 * MIB, 0.02, 100 * MIB
"""The same limits for the sum of smaller growth."""
_SMALL_RUNS = 4


class Growth(NamedTuple):
    """A cell whose last runs have each grown a device by memory that was not freed."""

    device: str
    runs: int
    least_bytes: int
    most_bytes: int


@dataclass(slots=True, eq=False, repr=False)  # generating these methods would slow down loading the extension
class _Streak:
    """Consecutive runs of the same code that each grew a device by some least amount."""

    runs: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    sum_bytes: int = 0

    def add(self, grown: int, least: float) -> None:
        """Count one more run, or start again if it grew the device by less than ``least``."""
        if grown < least:
            self.runs = self.sum_bytes = 0
            return
        self.least_bytes = min(self.least_bytes, grown) if self.runs else grown
        self.most_bytes = max(self.most_bytes, grown) if self.runs else grown
        self.runs += 1
        self.sum_bytes += grown

    def goes_on(self, two: int) -> bool:
        """Return True if the last two runs, ``two`` in sum, grew it enough: warming up fades, a leak does not."""
        return 2 * two * self.runs >= 3 * self.sum_bytes


@dataclass(slots=True, eq=False, repr=False)
class DeviceRuns:
    """The last runs of the same code on one device."""

    after_bytes: int
    grown_bytes: int = 0
    """Growth in the last run."""
    large: _Streak = field(default_factory=_Streak)
    small: _Streak = field(default_factory=_Streak)
    """Growth that is reported by its sum."""

    def add(self, usage: Usage, *, success: bool) -> _Streak | None:
        """Count one more run, and return the series to report, if any."""
        freed = self.after_bytes - usage.before_bytes  # since the last run, by any code
        if freed > self.grown_bytes // 2 or not success:  # a traceback keeps an error's memory alive
            self.large, self.small = _Streak(), _Streak()
        two = self.grown_bytes + usage.delta_bytes
        self.after_bytes, self.grown_bytes = usage.after_bytes, usage.delta_bytes
        if not success:
            return None
        grown, in_use = self.grown_bytes, usage.before_bytes
        self.large.add(grown, min(_ENOUGH_BYTES, max(_LEAST_BYTES, _LEAST_SHARE * in_use)))
        self.small.add(grown, _SMALL_BYTES)
        if self.large.runs >= _RUNS and self.large.goes_on(two):
            return self.large
        enough = min(_SUM_ENOUGH_BYTES, max(_SUM_LEAST_BYTES, _SUM_SHARE * in_use))
        is_reported = self.small.runs >= _SMALL_RUNS and self.small.sum_bytes >= enough and self.small.goes_on(two)
        return self.small if is_reported else None


def count_run(devices: dict[str, DeviceRuns], usage: Usage, *, success: bool) -> Growth | None:
    """Count a run in ``devices``, and return the growth of the device in the last runs, if any."""
    if usage.device not in devices:
        devices[usage.device] = DeviceRuns(usage.after_bytes)
        return None
    streak = devices[usage.device].add(usage, success=success)
    return None if streak is None else Growth(usage.device, streak.runs, streak.least_bytes, streak.most_bytes)
