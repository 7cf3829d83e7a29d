"""``ipygpumem.peak``: follows the memory of a block of code and keeps what it held at its highest moment."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from ipygpumem.api.inventories import inventory_at
from ipygpumem.errors import GpuMemError, TraceError
from ipygpumem.estimating import line_text
from ipygpumem.extras.peak.records import PeakRecord
from ipygpumem.inventory.records import Inventory
from ipygpumem.inventory.survey import names_in
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.reclaim.tracebacks import classify


class Peak:
    """Follows the memory of code between ``start`` and ``stop``."""

    def __init__(self, names: Callable[[], Iterable[tuple[str, object]]]) -> None:
        self._names = names
        self._follower: Any = None
        self._notes: list[str] = []
        self.record: PeakRecord | None = None
        """Its record, once the code has ended."""

    def start(self) -> None:
        """Follow the memory from now on."""
        if loaded_torch() is None:
            self._notes.append("torch is not imported: tensors are followed from the cell after the import on")
        else:
            module = importlib.import_module("ipygpumem.extras.peak.following")
            self._follower = module.Follower(self._names)
            self._follower.start()
        self._began = time.perf_counter()

    def stop(self, inventory: Callable[[], Inventory], error: BaseException | None = None) -> PeakRecord:
        """Stop, and make the record; ``error`` has ended the code, and ``inventory`` lists the tensors with names."""
        seconds = time.perf_counter() - self._began
        follower, self._follower = self._follower, None
        devices = []
        if follower is not None:
            follower.stop()
            found = None
            try:
                found = inventory()
            except GpuMemError as problem:
                self._notes.append(f"no names: {problem}")
            ran_out = error is not None and classify(error).kind == "oom"
            devices = follower.read(found, ran_out=ran_out)
            self._notes += follower.notes
            if ran_out and follower.failed is not None:
                _, operation, line = follower.failed[2]
                self._notes.append(f"memory ran out in {operation}" + (f", {line_text(*line)}" if line else ""))
            if follower.error:
                self._notes.append(f"following torch's storages stopped early: {follower.error}")
        self.record = PeakRecord(tuple(devices), seconds, tuple(self._notes))
        return self.record

    def drop(self) -> None:
        """Stop without a record; can be called again."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None


class PeakBlock:
    """A block of code whose memory is followed; ``record`` has the result once it has ended."""

    def __init__(self) -> None:
        self._peak: Peak | None = None

    @property
    def record(self) -> PeakRecord:
        """The memory of each device at its highest moment.

        Raises:
            TraceError: the block has not ended yet.
        """
        if self._peak is None or self._peak.record is None:
            raise TraceError("the block has not ended: read its record below it")
        return self._peak.record

    def __enter__(self) -> PeakBlock:
        frame = sys._getframe(1)
        self._peak = Peak(lambda: names_in(frame))
        self._peak.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        frame = sys._getframe(1)
        if self._peak is not None:
            self._peak.stop(lambda: inventory_at(frame), error)


def peak() -> PeakBlock:
    """Return a ``with`` block that follows the memory of its code; ``record`` then shows its highest moment.

    Use it to find out what a peak consists of. It works in scripts as well; ``%%peak`` does the same for a cell.

    >>> with ipygpumem.peak() as found:
    ...     total = sum(range(1000))
    >>> found.record.duration_seconds > 0
    True
    """
    return PeakBlock()
