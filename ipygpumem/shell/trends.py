"""Detects code that retains more memory each time it runs: cells that are rerun, and iterations of
tracked loops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ipygpumem.records import CellRecord, Growth, Reading, Usage
from ipygpumem.units import MIB

if TYPE_CHECKING:
    from ipygpumem.inventory.contents import Contents
    from ipygpumem.inventory.records import Inventory
    from ipygpumem.inventory.top import LargestNames

_CELLS_MOST = 1000
_LEAST_BYTES, _LEAST_SHARE, _ENOUGH_BYTES = 10 * MIB, 0.01, 50 * MIB
"""Growth of one run to report: this share of the memory in use, but at least the first size and at
most the last.
"""
_RUNS = 3
"""Number of runs that must grow after the first one, which imports, warms up and fills caches."""
_SMALL_BYTES = MIB
"""Smaller growth ends a series: it is noise."""
_SUM_LEAST_BYTES, _SUM_SHARE, _SUM_ENOUGH_BYTES = 30 * MIB, 0.02, 100 * MIB
"""The same limits for the sum of smaller growth."""
_SMALL_RUNS = 4
_SUSPECT_BYTES = 2 * _LEAST_BYTES
"""Growth in the last runs from which it is worth while to measure all names."""
_MOST_LOOKS, _MOST_KEPT = 6, 8
"""Maximum number of times to measure all names for the same code, and of cells that wait for the
second time.
"""


class Trends:
    """The last runs of every cell, identified by its id or its source."""

    def __init__(self) -> None:
        self._cells: dict[str, Growing] = {}
        self._looked: deque[Growing] = deque(maxlen=_MOST_KEPT)

    def add(self, record: CellRecord) -> Growing:
        """Count a run of a cell."""
        keys = [key for key in (record.cell_id, record.source_digest) if key]
        found = [self._cells.pop(key, None) for key in keys]  # reinserted as the newest
        growing = next(filter(None, found), None) or Growing()
        self._cells.update(dict.fromkeys(keys, growing))
        while len(self._cells) > 2 * _CELLS_MOST:
            del self._cells[next(iter(self._cells))]
        growing.add(record.usages, success=record.success)
        if growing.wants_look and growing.before is None:
            if len(self._looked) == _MOST_KEPT:
                self._looked[0].before = None
            self._looked.append(growing)
        return growing


@dataclass(
    slots=True, eq=False, repr=False
)  # generating these methods would slow down loading the extension
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
        """Return True if the last two runs, which added ``two`` bytes, grew it like the runs
        before: warm-up fades.
        """
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
    is_suspect: bool = False
    """True if one more run like the last ones may be reported."""

    def add(self, usage: Usage, *, success: bool) -> _Streak | None:
        """Count one more run, and return the series to report, if any."""
        freed = self.after_bytes - usage.before_bytes  # since the last run, by any code
        if (
            freed > self.grown_bytes // 2 or not success
        ):  # a traceback keeps an error's memory alive
            self.large, self.small = _Streak(), _Streak()
        self.is_suspect = False
        two = self.grown_bytes + usage.delta_bytes
        self.after_bytes, self.grown_bytes = usage.after_bytes, usage.delta_bytes
        if not success:
            return None
        grown, in_use = self.grown_bytes, usage.before_bytes
        self.large.add(grown, min(_ENOUGH_BYTES, max(_LEAST_BYTES, _LEAST_SHARE * in_use)))
        self.small.add(grown, _SMALL_BYTES)
        self.is_suspect = self.small.runs >= _RUNS - 1 and self.small.sum_bytes >= _SUSPECT_BYTES
        if self.large.runs >= _RUNS and self.large.goes_on(two):
            return self.large
        enough = min(_SUM_ENOUGH_BYTES, max(_SUM_LEAST_BYTES, _SUM_SHARE * in_use))
        is_reported = (
            self.small.runs >= _SMALL_RUNS
            and self.small.sum_bytes >= enough
            and self.small.goes_on(two)
        )
        return self.small if is_reported else None


class Processes(NamedTuple):
    """The child processes after a run."""

    run: int
    """Number of the run since the first look."""
    sizes: dict[int, int]
    """Their bytes by process number."""


class FirstLook(NamedTuple):
    """The memory of all names, and what else may grow."""

    names: LargestNames
    arrays: Inventory
    """Arrays without a name."""
    contents: Contents
    large: set[int]
    """Identities of objects that are large by themselves."""
    free_heap_bytes: int
    """Free pages in malloc's heap, once those of the look itself are freed."""


@dataclass(slots=True, eq=False, repr=False)
class Growing:
    """The last runs of the same code: the devices that grow with each of them, and what holds the
    new memory.
    """

    growths: list[Growth] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Lines about the holders, once they were found."""
    wants_look: bool = False
    """True if a look at all names would find something new."""
    devices: dict[str, DeviceRuns] = field(default_factory=dict)
    before: FirstLook | None = None
    """The memory at the first look, with which the second one compares."""
    processes: Processes | None = None
    """The child processes at the last look or report."""
    process_lines: list[str] = field(default_factory=list)
    """Lines about the processes that grew in the last run. They are made again after each run,
    because a name such as ``process`` may refer to another process by then.
    """
    runs: int = 0
    """Number of runs since the first look."""
    _looks: int = 0

    def add(self, usages: Sequence[Usage], *, success: bool = True) -> None:
        """Count a run."""
        self.runs += 1
        self.growths, self.process_lines = [], []
        is_suspect = False
        for usage in usages:
            runs = self.devices.get(usage.device)
            if runs is None:
                self.devices[usage.device] = DeviceRuns(usage.after_bytes)
                continue
            streak = runs.add(usage, success=success)
            is_suspect |= runs.is_suspect
            if streak is not None:
                self.growths.append(
                    Growth(usage.device, streak.runs, streak.least_bytes, streak.most_bytes)
                )
        if not is_suspect:
            self.before, self.processes, self.held = None, None, []
        is_time = self._looks < _MOST_LOOKS if self.before is None else bool(self.growths)
        self.wants_look = is_suspect and is_time and not self.held
        self._looks += self.wants_look

    def measured(self, now: Mapping[str, Reading]) -> None:
        """Note each device's memory after our own work: if it is less when the next run begins,
        code has freed some.
        """
        for device, reading in now.items():
            runs = self.devices.get(device)
            if runs is not None:
                runs.after_bytes = reading.current_bytes
