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
    from ipygpumem.inventory.arrays.records import Inventory
    from ipygpumem.inventory.names.top import LargestNames
    from ipygpumem.inventory.remaining.contents import Contents

_MOST_CELLS = 1000
"""Maximum number of cells whose runs are counted, the latest ones."""
_LEAST_SHARE = 0.01
"""Growth of one run to report, as a share of the memory in use."""
_LEAST_BYTES = 10 * MIB
"""Minimum of this growth in bytes."""
_ENOUGH_BYTES = 50 * MIB
"""Growth of one run that is reported however much is in use."""
_RUNS = 3
"""Number of runs that must grow after the first one, which imports, warms up and fills caches."""
_SMALL_BYTES = MIB
"""Smaller growth ends a series: it is noise."""
_SUM_SHARE = 0.02
"""The same share for the sum of smaller growth."""
_SUM_LEAST_BYTES = 30 * MIB
"""Minimum of this sum in bytes."""
_SUM_ENOUGH_BYTES = 100 * MIB
"""Sum that is reported however much is in use."""
_SMALL_RUNS = 4
"""Minimum number of runs whose smaller growth is reported by its sum."""
_SUSPECT_BYTES = 2 * _LEAST_BYTES
"""Growth in the last runs from which it is worth while to measure all names."""
_MOST_LOOKS = 6
"""Maximum number of times to measure all names for the same code."""
_MOST_KEPT = 8
"""Maximum number of cells that wait for the second of these times."""


class Trends:
    """The last runs of every cell. A cell is recognised by its id, or by its source."""

    def __init__(self) -> None:
        self._cells: dict[str, Growing] = {}
        """The runs of each cell, by its id and by the digest of its source."""
        self._waiting_for_second_look: deque[Growing] = deque(maxlen=_MOST_KEPT)
        """The cells with a first look, which wait for the second."""

    def add(self, record: CellRecord) -> Growing:
        """Count a run of a cell. Return the last runs of this cell, with this one."""
        keys = [key for key in (record.cell_id, record.source_digest) if key]
        growing = None
        for key in reversed(keys):  # the id comes last, because it counts more than the source
            growing = self._cells.pop(key, None) or growing
        if growing is None:
            growing = Growing()
        self._cells.update(dict.fromkeys(keys, growing))  # as the newest
        while len(self._cells) > 2 * _MOST_CELLS:
            del self._cells[next(iter(self._cells))]
        growing.add(record.usages, success=record.success)
        if growing.wants_look and growing.first_look is None:
            if len(self._waiting_for_second_look) == _MOST_KEPT:
                # The oldest one leaves the queue: its look has a record of each name.
                self._waiting_for_second_look[0].first_look = None
            self._waiting_for_second_look.append(growing)
        return growing


# Generating more methods of these classes would slow down loading the extension.
@dataclass(slots=True, eq=False, repr=False)
class _Streak:
    """Consecutive runs of the same code, in each of which a device grew by a minimum of bytes."""

    runs: int = 0
    least_bytes: int = 0
    """The smallest growth of one of the runs."""
    most_bytes: int = 0
    """The largest growth of one of the runs."""
    sum_bytes: int = 0
    """The growth of all runs together."""

    def add(self, grown_bytes: int, least_bytes: float) -> None:
        """Count one more run. If it grew the device by less than ``least_bytes``, the streak ends,
        and the next run begins another one.
        """
        if grown_bytes < least_bytes:
            self.runs = self.sum_bytes = 0
            return
        if not self.runs:
            self.least_bytes = self.most_bytes = grown_bytes
        self.least_bytes = min(self.least_bytes, grown_bytes)
        self.most_bytes = max(self.most_bytes, grown_bytes)
        self.runs += 1
        self.sum_bytes += grown_bytes

    def still_grows(self, last_two_bytes: int) -> bool:
        """Return True unless the growth gets smaller from run to run, as that from warm-up does.

        Args:
            last_two_bytes: bytes that the last two runs added. They must be at least three quarters
                of what two runs added on average.
        """
        # last_two_bytes / 2 >= 3/4 * sum_bytes / runs
        return 2 * last_two_bytes * self.runs >= 3 * self.sum_bytes


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
        """Count one more run. Return the series of runs to report, if the device grows with each of
        them; else None.

        Args:
            usage: the device's memory in this run.
            success: False if the code raised an error, whose traceback may keep memory.
        """
        freed_since = self.after_bytes - usage.before_bytes  # by any code
        has_freed_growth = freed_since > self.grown_bytes // 2
        if has_freed_growth or not success:
            self.large = _Streak()
            self.small = _Streak()
        self.is_suspect = False
        grown_bytes = usage.delta_bytes
        last_two_bytes = self.grown_bytes + grown_bytes
        self.after_bytes = usage.after_bytes
        self.grown_bytes = grown_bytes
        if not success:
            return None
        self.large.add(grown_bytes, _share_of(usage, _LEAST_SHARE, _LEAST_BYTES, _ENOUGH_BYTES))
        self.small.add(grown_bytes, _SMALL_BYTES)
        self.is_suspect = self.small.runs >= _RUNS - 1 and self.small.sum_bytes >= _SUSPECT_BYTES
        if self.large.runs >= _RUNS and self.large.still_grows(last_two_bytes):
            return self.large
        least_sum = _share_of(usage, _SUM_SHARE, _SUM_LEAST_BYTES, _SUM_ENOUGH_BYTES)
        if self.small.runs < _SMALL_RUNS or self.small.sum_bytes < least_sum:
            return None
        if self.small.still_grows(last_two_bytes):
            return self.small
        return None


def _share_of(usage: Usage, share: float, least: int, most: int) -> float:
    """Return a share of the memory that was in use before a run, but at least ``least`` and at most
    ``most`` bytes.
    """
    return min(most, max(least, share * usage.before_bytes))


class Processes(NamedTuple):
    """The child processes after a run."""

    run: int
    """Number of the run since the first look."""
    sizes: dict[int, int]
    """Their bytes by process number."""


class FirstLook(NamedTuple):
    """The memory of all names at the first look, and of everything else that each run may add to.
    The second look compares with it.
    """

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
    """The last runs of the same code: the devices that grow with each of them, and the holders of
    the new memory.
    """

    growths: list[Growth] = field(default_factory=list)
    holder_lines: list[str] = field(default_factory=list)
    """Lines about the holders, once they were found."""
    wants_look: bool = False
    """True if a look at all names would find something new."""
    devices: dict[str, DeviceRuns] = field(default_factory=dict)
    first_look: FirstLook | None = None
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
        """Count a run. Afterwards, ``growths`` has the devices that grow with each run, and
        ``wants_look`` is True if a look at all names may tell why.

        Args:
            usages: the memory of each device in this run.
            success: False if the code raised an error.
        """
        self.runs += 1
        self.process_lines = []
        is_suspect = self._add_to_devices(usages, success=success)
        if not is_suspect:
            self._forget_looks()
        self.wants_look = is_suspect and not self.holder_lines and self._is_time_to_look()
        if self.wants_look:
            self._looks += 1

    def _add_to_devices(self, usages: Sequence[Usage], *, success: bool) -> bool:
        """Count a run of each device, and fill ``growths``. Return True if a device may have to be
        reported after one more run.
        """
        self.growths = []
        is_suspect = False
        for usage in usages:
            runs = self.devices.get(usage.device)
            if runs is None:
                self.devices[usage.device] = DeviceRuns(usage.after_bytes)
                continue
            streak = runs.add(usage, success=success)
            if runs.is_suspect:
                is_suspect = True
            if streak is not None:
                self.growths.append(
                    Growth(usage.device, streak.runs, streak.least_bytes, streak.most_bytes)
                )
        return is_suspect

    def _forget_looks(self) -> None:
        """Forget the memory at the first look, and the holders that the second one has found."""
        self.first_look = None
        self.processes = None
        self.holder_lines = []

    def _is_time_to_look(self) -> bool:
        """Return True for a first look, unless there have been too many of them; and for a second
        look once there is growth to explain.
        """
        if self.first_look is None:
            return self._looks < _MOST_LOOKS
        return bool(self.growths)

    def growth_of(self, device: str) -> Growth | None:
        """Return the growth of one device; None if it does not grow."""
        for growth in self.growths:
            if growth.device == device:
                return growth
        return None

    def note_memory(self, now: Mapping[str, Reading]) -> None:
        """Note each device's memory after our own work. If a device has less memory in use when the
        next run begins, other code has freed it.
        """
        for device, reading in now.items():
            runs = self.devices.get(device)
            if runs is not None:
                runs.after_bytes = reading.current_bytes
