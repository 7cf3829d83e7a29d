"""The record of ``%%peak``: the memory of each device at its highest moment, and over time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipygpumem.errors import PlotError
from ipygpumem.records import Record, Usage


@dataclass(frozen=True)
class PeakRow(Record):
    """Blocks of memory that were alive at the moment, with the same name or origin."""

    size_bytes: int
    role: str
    """Purpose: ``parameters``, ``gradients``, ``activations`` and so on."""
    name: str = ""
    """The notebook's name; empty for memory that had none when the code ended."""
    module: str = ""
    """Path of the module whose forward pass allocated it."""
    operation: str = ""
    line: str = ""
    """The user's line that allocated it."""
    count: int = 1
    """Number of blocks."""
    allocator: str = ""
    """Function that allocated memory outside torch, such as ``malloc`` or ``mmap``."""
    reserved_bytes: int = 0
    """Further bytes of these blocks, which are reserved and not used: they have no page in RAM."""


@dataclass(frozen=True)
class PeakPoint(Record):
    """Bytes in use for each role, such as gradients, at one time."""

    seconds: float
    parts: Mapping[str, int]


@dataclass(frozen=True)
class DevicePeak(Record):
    """Memory of one device at its highest moment, or when memory ran out."""

    device: str
    source: str
    """Origin of the figures: ``storages`` of torch, torch's ``allocator``, or ``memray``."""
    size_bytes: int
    at_seconds: float | None = None
    """Time of the moment since the start; None if unknown."""
    rows: tuple[PeakRow, ...] = ()
    """The largest first; their sum is ``size_bytes``."""
    curve: tuple[PeakPoint, ...] = ()
    """Bytes over time; of close moments, the highest one."""
    ran_out: bool = False
    """True if the moment is that of the out-of-memory error."""
    is_bound: bool = False
    """True if ``size_bytes`` is only an upper bound: the most that the process's own peak allows.
    """
    missed_bytes: int = 0
    """Further RAM that the process used at its own peak, at another moment than that of the rows.
    """

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all rows that are reserved and not used; ``size_bytes`` does not
        include them.
        """
        return sum(row.reserved_bytes for row in self.rows)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by role, the largest first."""
        bytes_by_role: dict[str, int] = {}
        for row in self.rows:
            bytes_by_role[row.role] = bytes_by_role.get(row.role, 0) + row.size_bytes
        return dict(sorted(bytes_by_role.items(), key=lambda part: -part[1]))


@dataclass(frozen=True)
class PeakRecord(Record):
    """The memory of each device at its highest moment."""

    devices: tuple[DevicePeak, ...]
    duration_seconds: float
    notes: tuple[str, ...] = field(default=())
    ram: Usage | None = None
    """RAM of the whole process while the code ran, with its own peak; None if it was not measured.
    """

    def picture(self) -> Any:
        """Return a matplotlib figure of the bytes over time, by role.

        Raises:
            PlotError: matplotlib is not installed, or nothing was followed.
        """
        return draw(self)


@functools.singledispatch
def draw(record: PeakRecord) -> Any:
    """Return a record's picture; the report registers how, because records know no picture."""
    raise PlotError("import ipygpumem.extras.peak.report first")
