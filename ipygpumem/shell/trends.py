"""Detects code that retains more memory each time it runs: cells that are rerun, and iterations of tracked loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ipygpumem.records import CellRecord, Growth, Usage
from ipygpumem.units import MIB

_CELLS_MOST = 1000
_LEAST_BYTES, _LEAST_SHARE, _ENOUGH_BYTES = 10 * MIB, 0.01, 50 * MIB
"""Growth of one run to report: this share of the memory in use, but at least the first size and at most the last."""
_RUNS = 3
"""Number of runs that must grow after the first one, which imports, warms up and fills caches."""
_SMALL_BYTES = MIB
"""Smaller growth ends a series: it is noise."""
_SUM_LEAST_BYTES, _SUM_SHARE, _SUM_ENOUGH_BYTES = 30 * MIB, 0.02, 100 * MIB
"""The same limits for the sum of smaller growth."""
_SMALL_RUNS = 4


class Trends:
    """The last runs of every cell, identified by its id or its source."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[str, DeviceRuns]] = {}

    def remarks(self, record: CellRecord) -> Sequence[str]:
        """Return a line for each device on which each of the cell's last runs kept more memory."""
        growths = self.add(record)
        if not growths:
            return ()
        from ipygpumem.report.history import growth_line  # loading the extension must stay fast

        return [growth_line(growth) for growth in growths]

    def add(self, record: CellRecord) -> list[Growth]:
        """Count a run, and return the growth on devices where each of the last runs kept more memory."""
        known: dict[str, DeviceRuns] | None = None
        keys = [key for key in (record.cell_id, record.source_digest) if key]
        for key in keys:
            found = self._cells.pop(key, None)  # reinserted as the newest
            known = found if known is None else known
        devices = {} if known is None else known
        for key in keys:
            self._cells[key] = devices
        while len(self._cells) > 2 * _CELLS_MOST:
            del self._cells[next(iter(self._cells))]
        return [growth for usage in record.usages if (growth := count_run(devices, usage, success=record.success))]


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
        """Return True if the last two runs, which added ``two`` bytes, grew it like the runs before: warm-up fades."""
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
