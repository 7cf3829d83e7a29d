"""The records: what was measured, as plain data that every other module speaks.

Each record is a frozen dataclass. Bytes are ``int`` and end in ``_bytes``, times are ``float`` and end in
``_seconds`` (``started_at`` is Unix time). ``to_dict`` and ``from_dict`` are lossless, through JSON too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ipygpumem.errors import GpuMemError
from ipygpumem.record import MOST_DEVICES, Record

Method = Literal["kernel", "allocator", "sampled"]
"""How a peak was got: the kernel's high-water mark, an allocator's counter, or samples (a lower bound)."""


class Reading(NamedTuple):
    """One device at one moment, as a probe sees it; every cell makes two per device, so it must cost nothing.

    ``current_bytes`` is the process's RSS for the host and the bytes of live tensors for an accelerator.
    ``peak_bytes`` is the highest value since the probe was last rearmed.
    """

    device: str
    current_bytes: int
    peak_bytes: int
    method: Method
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    """Held by the allocator for this process: live tensors and its cache."""
    used_bytes: int | None = None
    """In use on the whole device, by every process."""
    other_bytes: int | None = None
    """In use on the device by other processes."""
    children_bytes: int | None = None
    """RSS of child processes (data loaders); host only."""
    note: str = ""
    """Why a figure is missing, in words for the user."""
    mapped_bytes: int | None = None
    """Address space of the process: what is freed at once lowers it, what an allocator purges later does not."""


@dataclass(frozen=True, slots=True)  # there may be tens of thousands, as of cells
class Usage(Record):
    """What one device went through during a cell, an experiment or any other span.

    For the host, bytes are RSS. For an accelerator they are those of live tensors (allocated); what the
    allocator reserves, what the whole device uses and what other processes use are fields of their own.
    """

    _most = MOST_DEVICES
    device: str
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    total_bytes: int | None
    method: Method
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    other_bytes: int | None = None
    children_bytes: int | None = None
    note: str = ""

    @property
    def delta_bytes(self) -> int:
        """What the span kept: after minus before; negative when it gave memory back."""
        return self.after_bytes - self.before_bytes

    @property
    def peak_delta_bytes(self) -> int:
        """How far the span rose above its start; never negative."""
        return max(0, self.peak_bytes - self.before_bytes)


@dataclass(frozen=True, slots=True)
class CellRecord(Record):
    """What one finished cell cost, once all that ended with it had given its memory back."""

    execution_count: int | None
    cell_id: str | None
    experiment: str | None
    started_at: float
    duration_seconds: float
    success: bool
    error: str | None
    """Name of the exception's type, or None."""
    usages: tuple[Usage, ...]
    source_digest: str = ""
    """The same for cells of the same source, whatever white space surrounds it."""
    source_line: str = ""
    """The first line that says what the cell does, cut to 80 characters."""
    recovery: RecoveryRecord | None = None
    """What came back after its error, where anything was released."""
    reclaimed: dict[str, int] = field(default_factory=dict)
    """Per device, what came back between its code's end and the end of ``usages``: by a recovery, by experiments that
    ended with it. Empty where neither ran."""


@dataclass(frozen=True, slots=True)
class TraceRecord(Record):
    """The cost of a traced block, of one iteration of a tracked loop, or of an epoch of a training."""

    label: str
    started_at: float
    duration_seconds: float
    error: str | None
    """Name of the type of the exception that left it, or None."""
    usages: tuple[Usage, ...]
    iteration: int | None = None
    """Of a tracked loop, or the number of the epoch, counted from 1."""


@dataclass(frozen=True)
class Holder(Record):
    """Who keeps an object alive."""

    path: str
    """The shortest chain of references from something that has a name."""
    advice: str
    """What to do about it, in words for the user; empty where only the user can know."""


@dataclass(frozen=True)
class Held(Record):
    """A tensor, an array, or an object full of them, and the name that holds it."""

    name: str
    type_name: str
    shape: tuple[int, ...] | None
    """None for an object that holds several arrays; then ``arrays`` says how many."""
    dtype: str
    device: str
    size_bytes: int
    arrays: int = 1
    function: str = ""
    line: int = 0
    cell: int | None = None
    """Number of the cell that bound the name, where that is known."""
    holder: Holder | None = None
    """Who keeps it alive, where that was asked and found."""


@dataclass(frozen=True)
class ReclaimStep(Record):
    """One step of freeing memory, with the bytes that it freed on each device: other threads' frees are left out."""

    name: str
    reclaimed: dict[str, int]
    """Fall of RSS (host) or of live tensors' bytes (accelerators)."""
    returned: dict[str, int]
    """Fall of what an accelerator's allocator reserves: memory that other processes can use again."""
    duration_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class RecoveryRecord(Record):
    """What came back after an out-of-memory error or an interrupt."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    message: str
    requested_bytes: int | None
    free: dict[str, int]  # of each device when the cell had failed, before anything was released
    held: tuple[Held, ...]
    frames: int
    reclaimed: dict[str, int]
    now: dict[str, int]
    """Each device's bytes after all that: RSS for the host, live tensors for an accelerator."""
    steps: tuple[ReclaimStep, ...] = ()
    poisoned: bool = False
    """The device context is broken: only a restart of the kernel helps."""
    let_go: tuple[Held, ...] = ()
    """What was taken off the exception, to which nothing of the user's referred."""
    refused_by: str = ""
    """The budget, or another limit on torch's allocator, that refused what was asked for, in words."""
    half_made: str = ""
    """The type of an optimizer that has made half of its state, and is in use still."""
    plain: tuple[str, ...] = ()
    """The numbers and short texts among the locals of the user's frames that were released, a line for each frame."""


@dataclass(frozen=True)
class EngineRecord(Record):
    """What an experiment on a cluster was on one engine."""

    _most = MOST_DEVICES
    engine: int
    host: str = ""
    pid: int = 0
    cards: dict[str, str] = field(default_factory=dict)  # names of those that torch used there, by device
    free: dict[str, int] = field(default_factory=dict)  # bytes at the end, by device
    version: str = ""
    error: str = ""  # what ended its code, or why there is no record
    record: ExperimentRecord | None = None


@dataclass(frozen=True)
class ExperimentRecord(Record):
    """A finished experiment: what it cost and what became of its names."""

    name: str
    started_at: float
    duration_seconds: float
    """The sum of its cells' times; of a block inside one cell, the block's time."""
    cells: tuple[CellRecord, ...]
    usages: tuple[Usage, ...]
    """From the start to after the clean-up; ``delta_bytes`` is what did not come back."""
    consumed: dict[str, int]
    """Per device, what the experiment held when it was ended, above its start."""
    reclaimed: dict[str, int]
    """Per device, what the clean-up gave back: ``consumed`` less ``delta_bytes``, so negative where a device rose."""
    deleted: tuple[str, ...]
    restored: tuple[str, ...]
    kept: tuple[str, ...]
    survivors: tuple[Held, ...]
    """Deleted names whose arrays are still alive, because something outside the scope refers to them."""
    steps: tuple[ReclaimStep, ...] = ()
    notes: tuple[str, ...] = field(default=())
    parameters: dict[str, int | float | str] = field(default_factory=dict)
    """What the user noted of it: ``--note lr=1e-3 bs=64``."""
    ooms: int = 0
    """Out-of-memory errors that ended one of its cells, or left it or an experiment inside it."""
    budget: dict[str, int] = field(default_factory=dict)
    """The bytes that it was allowed, by device; ``notes`` say where it was refused more."""
    engines: tuple[EngineRecord, ...] = ()  # of an experiment on a cluster; the sizes are sums over them
    span_seconds: float = 0.0
    """From its start to the end of its code, with the time between its cells."""


# -- a session's records together -----------------------------------------------------------------------------

_PLAIN = ("execution_count", "cell_id", "experiment")
_TEXTS = ("error", "source_line", "source_digest")
_SIZES = ("before", "after", "peak", "delta", "peak_delta", "total", "reserved", "used", "other", "children")
USAGE_BYTES = tuple(f"{name}_bytes" for name in _SIZES)
"""What tables have of each device."""


class History(list[CellRecord]):
    """The records of finished cells, oldest first: a list that knows how to become a table."""

    def __getitem__(self, index: Any) -> Any:  # typed as a list's
        found = super().__getitem__(index)
        return History(found) if isinstance(index, slice) else found

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
        for device in devices_of(usage for cell in self for usage in cell.usages):
            usages = [usage_on(cell.usages, device) for cell in self]
            for name in USAGE_BYTES:
                values = [None if usage is None else getattr(usage, name) for usage in usages]
                if any(value is not None for value in values):
                    columns[f"{device}_{name}"] = pandas.array(values, dtype="Int64")
        return pandas.DataFrame(columns)


def devices_of(usages: Iterable[Usage]) -> list[str]:
    """Return the devices of all ``usages``, the host first, then in the order in which they come."""
    return sorted(dict.fromkeys(usage.device for usage in usages), key=lambda device: device != "cpu")


def usage_on(usages: Iterable[Usage], device: str) -> Usage | None:
    """Return what happened on ``device``; None where it was not there."""
    return next((usage for usage in usages if usage.device == device), None)


@dataclass(frozen=True, repr=False)
class SessionRecord(Record):
    """What a session had recorded when it was exported."""

    saved_at: float
    """Unix time."""
    cells: tuple[CellRecord, ...]
    experiments: tuple[ExperimentRecord, ...]
    traces: tuple[TraceRecord, ...] = ()
    host: str = ""
    pid: int = 0

    @classmethod
    def of(
        cls, cells: Iterable[CellRecord], experiments: Iterable[ExperimentRecord], traces: Iterable[TraceRecord]
    ) -> SessionRecord:
        """Return what this process has measured."""
        return cls(time.time(), tuple(cells), tuple(experiments), tuple(traces), socket.gethostname(), os.getpid())

    @property
    def history(self) -> History:
        """The cells, as ``ipygpumem.history()`` gives them."""
        return History(self.cells)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<SessionRecord of {len(self.cells)} cells and {len(self.experiments)} experiments>"
