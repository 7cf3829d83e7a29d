"""Detects cells that keep more memory each time they are rerun."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.meter.growth import DeviceRuns, Growth, count_run
from ipygpumem.records import CellRecord
from ipygpumem.shell.cell import CellObserver

_CELLS_MOST = 1000


class Trends(CellObserver):
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
