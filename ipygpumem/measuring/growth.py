"""Finds growth: what is run again and again, and keeps more memory each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ipygpumem.model import Usage
from ipygpumem.units import MIB

_LEAST_BYTES, _LEAST_SHARE, _ENOUGH_BYTES = 10 * MIB, 0.01, 50 * MIB
"""A run that grows the device by this share of what was in use is reported; never by less, always by enough."""
_RUNS = 3
"""So often code must have grown after its first run, which imports, warms up and fills caches."""
_SMALL_BYTES = MIB
"""Runs that grow it by less break off: that is noise."""
_SUM_LEAST_BYTES, _SUM_SHARE, _SUM_ENOUGH_BYTES = 30 * MIB, 0.02, 100 * MIB
"""What smaller growth must come to together to be reported."""
_SMALL_RUNS = 4


class Growth(NamedTuple):
    """A cell that has grown a device in each of its last runs, none of which was given back."""

    device: str
    runs: int
    least_bytes: int
    most_bytes: int


@dataclass(slots=True, eq=False, repr=False)  # making these methods takes time while the extension loads
class _Streak:
    """Runs of the same code, one after the other, that each grew a device by so much at least."""

    runs: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    sum_bytes: int = 0

    def add(self, grown: int, least: float) -> None:
        """Count one more run, or begin anew if it grew the device by less than ``least``."""
        if grown < least:
            self.runs = self.sum_bytes = 0
            return
        self.least_bytes = min(self.least_bytes, grown) if self.runs else grown
        self.most_bytes = max(self.most_bytes, grown) if self.runs else grown
        self.runs += 1
        self.sum_bytes += grown

    def goes_on(self, two: int) -> bool:
        """Return True if the last two runs grew it by ``two``, not little: warming up fades away, a leak does not."""
        return 2 * two * self.runs >= 3 * self.sum_bytes


@dataclass(slots=True, eq=False, repr=False)
class DeviceRuns:
    """What one device went through in the last runs of the same code."""

    after_bytes: int
    grown_bytes: int = 0
    """By the last run."""
    large: _Streak = field(default_factory=_Streak)
    small: _Streak = field(default_factory=_Streak)
    """Growth that is reported for what it has come to."""

    def add(self, usage: Usage, *, success: bool) -> _Streak | None:
        """Count one more run, and return those that are to be reported."""
        given_back = self.after_bytes - usage.before_bytes  # since the last run, by whatever did it
        if given_back > self.grown_bytes // 2 or not success:  # what an error leaves is held by its traceback
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
    """Count a run in ``devices``, and return how it grew the device in each of the last runs, if it did."""
    if usage.device not in devices:
        devices[usage.device] = DeviceRuns(usage.after_bytes)
        return None
    streak = devices[usage.device].add(usage, success=success)
    return None if streak is None else Growth(usage.device, streak.runs, streak.least_bytes, streak.most_bytes)
