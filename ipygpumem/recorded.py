"""What a session has recorded: its cells as a sequence that becomes a table, and all of it as one record."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, SupportsIndex, overload

from ipygpumem.errors import GpuMemError
from ipygpumem.model import CellRecord, ExperimentRecord, Record, Usage

_PLAIN = ("execution_count", "cell_id", "experiment")
_TEXTS = ("error", "source_line", "source_digest")
USAGE_BYTES = (
    "before_bytes",
    "after_bytes",
    "peak_bytes",
    "delta_bytes",
    "peak_delta_bytes",
    "total_bytes",
    "reserved_bytes",
    "used_bytes",
    "other_bytes",
    "children_bytes",
)
"""What tables have of each device."""


class Growth(NamedTuple):
    """A cell that has grown a device in each of its last runs, none of which was given back."""

    device: str
    runs: int
    least_bytes: int
    most_bytes: int


class History(list[CellRecord]):
    """The records of finished cells, oldest first: a list that knows how to become a table."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> CellRecord: ...

    @overload
    def __getitem__(self, index: slice) -> History: ...

    def __getitem__(self, index: SupportsIndex | slice) -> CellRecord | History:
        if isinstance(index, slice):
            return History(super().__getitem__(index))
        return super().__getitem__(index)

    def __repr__(self) -> str:
        """Return one line: there may be ten thousand cells."""
        number = "1 cell" if len(self) == 1 else f"{len(self)} cells"
        seconds = sum(cell.duration_seconds for cell in self)
        return f"<History of {number}, {seconds:.1f} s>"

    def to_pandas(self) -> Any:
        """Return a DataFrame with one row per cell; docs/history.md lists the columns.

        Raises:
            GpuMemError: pandas is not installed.
        """
        if importlib.util.find_spec("pandas") is None:
            raise GpuMemError("to_pandas needs pandas, which is not installed: pip install pandas")
        pandas = importlib.import_module("pandas")  # takes a second, and few ask for it
        columns: dict[str, Any] = {name: [getattr(cell, name) for cell in self] for name in _PLAIN}
        columns["execution_count"] = pandas.array(columns["execution_count"], dtype="Int64")
        columns["started_at"] = pandas.to_datetime([cell.started_at for cell in self], unit="s", utc=True)
        columns["duration_seconds"] = pandas.array([cell.duration_seconds for cell in self], dtype="float64")
        columns["success"] = pandas.array([cell.success for cell in self], dtype="bool")
        columns |= {name: [getattr(cell, name) for cell in self] for name in _TEXTS}
        columns["recovery"] = [cell.recovery and cell.recovery.kind for cell in self]
        for name, values in self._usage_columns().items():
            columns[name] = pandas.array(values, dtype="Int64")
        return pandas.DataFrame(columns)

    def _usage_columns(self) -> dict[str, list[int | None]]:
        """Return each device's columns, without those that are empty in every row."""
        found: dict[str, list[int | None]] = {}
        for device in devices_of(self):
            usages = [_usage_of(cell, device) for cell in self]
            for name in USAGE_BYTES:
                read = attrgetter(name)
                values = [None if usage is None else read(usage) for usage in usages]
                if any(value is not None for value in values):
                    found[f"{device}_{name}"] = values
        return found


def devices_of(records: Iterable[CellRecord | ExperimentRecord]) -> list[str]:
    """Return the devices of all records, the host first, then in the order in which they come."""
    found = dict.fromkeys(usage.device for record in records for usage in record.usages)
    return sorted(found, key=lambda device: device != "cpu")


def _usage_of(cell: CellRecord, device: str) -> Usage | None:
    return next((usage for usage in cell.usages if usage.device == device), None)


@dataclass(frozen=True, repr=False)
class SessionRecord(Record):
    """What a session had recorded when it was exported."""

    saved_at: float
    """Unix time."""
    cells: tuple[CellRecord, ...]
    experiments: tuple[ExperimentRecord, ...]

    @property
    def history(self) -> History:
        """The cells, as ``ipygpumem.history()`` gives them."""
        return History(self.cells)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<SessionRecord of {len(self.cells)} cells and {len(self.experiments)} experiments>"
