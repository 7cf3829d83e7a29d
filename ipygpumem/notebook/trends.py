"""Cells that are run again and again, and keep more memory each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipygpumem.model import CellRecord, Usage
from ipygpumem.units import MIB

if TYPE_CHECKING:
    from ipygpumem.recorded import Growth

_LEAST_BYTES = 10 * MIB
_LEAST_SHARE = 0.01
_RUNS = 3
"""So often a cell must have grown after its first run, which imports, warms up and fills caches."""
_CELLS_MOST = 1000


@dataclass(slots=True)
class _Device:
    """What one device went through in the last runs of a cell."""

    after_bytes: int
    grown_bytes: int = 0
    """By the last run."""
    runs: int = 0
    """How many runs without a break grew it."""
    least_bytes: int = 0
    most_bytes: int = 0

    def add(self, usage: Usage, *, success: bool) -> None:
        """Count one more run."""
        given_back = self.after_bytes - usage.before_bytes  # since the last run, by whatever did it
        if given_back > self.grown_bytes // 2:
            self.runs = 0
        grown = usage.delta_bytes
        # What an error leaves is held by its traceback, until the next one.
        if not success or grown < max(_LEAST_BYTES, _LEAST_SHARE * usage.before_bytes):
            self.runs = 0
        else:
            self.least_bytes = min(self.least_bytes, grown) if self.runs else grown
            self.most_bytes = max(self.most_bytes, grown) if self.runs else grown
            self.runs += 1
        self.after_bytes, self.grown_bytes = usage.after_bytes, grown


class Trends:
    """The last runs of every cell: one is known again by its id, or by its source."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[str, _Device]] = {}

    def add(self, record: CellRecord) -> list[Growth]:
        """Count a run, and return the devices that the cell has grown in each of its last runs."""
        known: dict[str, _Device] | None = None
        keys = [key for key in (record.cell_id, record.source_digest) if key]
        for key in keys:
            found = self._cells.pop(key, None)  # to be the youngest again
            known = found if known is None else known
        devices = {} if known is None else known
        for key in keys:
            self._cells[key] = devices
        while len(self._cells) > 2 * _CELLS_MOST:
            del self._cells[next(iter(self._cells))]
        return [growth for usage in record.usages if (growth := _count(devices, usage, success=record.success))]


def _count(devices: dict[str, _Device], usage: Usage, *, success: bool) -> Growth | None:
    device = devices.get(usage.device)
    if device is None:
        devices[usage.device] = _Device(usage.after_bytes)
        return None
    device.add(usage, success=success)
    if device.runs < _RUNS:
        return None
    from ipygpumem.recorded import Growth  # loading the extension must stay fast

    return Growth(usage.device, device.runs, device.least_bytes, device.most_bytes)
