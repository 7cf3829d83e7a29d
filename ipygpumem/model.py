"""The records: what was measured, as plain data that every other module speaks.

Each record is a frozen dataclass. Bytes are ``int`` and end in ``_bytes``, times are ``float`` and end in
``_seconds`` (``started_at`` is Unix time). ``to_dict`` and ``from_dict`` are lossless, through JSON too.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeVar

from ipygpumem.columns import Rows
from ipygpumem.units import format_bytes, format_change

T = TypeVar("T", bound="Record")

Method = Literal["kernel", "allocator", "sampled"]
"""How a peak was got: the kernel's high-water mark, an allocator's counter, or samples (a lower bound)."""


class Record:
    """Base of all records: conversion to and from plain dictionaries."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, ready for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the record that ``to_dict`` made ``data`` from; unknown keys are ignored."""
        return cls(**{name: _decode(hint, data[name]) for name, hint in _hints(cls).items() if name in data})  # type: ignore[arg-type]  # classes are hashable


@functools.cache  # of the classes here; an export holds thousands of records
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _decode(arguments[0], value)
    if origin in (tuple, Sequence):
        return tuple(_decode(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        return dict(value)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_dict(value)
    if isinstance(hint, type) and issubclass(hint, tuple):
        fields = _hints(hint).items()  # a NamedTuple, kept as a dictionary
        return hint(**{name: _decode(inner, value[name]) for name, inner in fields if name in value})
    return value


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


@dataclass(frozen=True, slots=True)  # there may be tens of thousands, as of cells
class Usage(Record):
    """What one device went through during a cell, an experiment or any other span.

    For the host, bytes are RSS. For an accelerator they are those of live tensors (allocated); what the
    allocator reserves, what the whole device uses and what other processes use are fields of their own.
    """

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
    """What one finished cell cost."""

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


@dataclass(frozen=True)
class Holder(Record):
    """Who keeps an object alive."""

    path: str
    """The shortest chain of references from something that has a name."""
    advice: str
    """What to do about it, in words for the user."""


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
    """One step of giving memory back, and what came back on each device by it."""

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
    free: dict[str, int]
    """Free bytes of each device when the cell had failed, before anything was released."""
    held: tuple[Held, ...]
    frames: int
    reclaimed: dict[str, int]
    now: dict[str, int]
    """Each device's bytes after all that: RSS for the host, live tensors for an accelerator."""
    steps: tuple[ReclaimStep, ...] = ()
    poisoned: bool = False
    """The device context is broken: only a restart of the kernel helps."""


@dataclass(frozen=True)
class ExperimentRecord(Record):
    """A finished experiment: what it cost and what became of its names."""

    name: str
    started_at: float
    duration_seconds: float
    cells: tuple[CellRecord, ...]
    usages: tuple[Usage, ...]
    """From the start to after the clean-up; ``delta_bytes`` is what did not come back."""
    consumed: dict[str, int]
    """Per device, what the experiment held when its end was asked for."""
    reclaimed: dict[str, int]
    """Per device, what the clean-up gave back."""
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
    """The bytes that it was allowed, by device; ``notes`` say where it crossed them."""


@dataclass(frozen=True)
class Part(Record):
    """One of the parts that a device's memory consists of, and what the user can do about it."""

    name: str
    size_bytes: int | None
    """None for what nobody can tell; then ``advice`` says why."""
    advice: str


@dataclass(frozen=True)
class Reconciliation(Record):
    """What a device's memory consists of: the parts whose size is known sum to ``total_bytes`` exactly."""

    device: str
    total_bytes: int
    basis: str
    """What ``total_bytes`` is, in words: the device's memory, a container's limit, or only what is reserved."""
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """What the figures do not say by themselves, such as why one is missing."""


TensorKind = Literal["parameter", "gradient", "optimizer state", "buffer", "other"]
"""What a tensor is for; ``other`` is everything else: data, activations, results, NumPy arrays."""


class TensorRecord(NamedTuple):
    """The memory of one tensor or array. There may be a million, so it must cost little.

    Views and other tensors with the same storage are not listed beside it: ``aliases`` counts them.
    """

    name: str | None
    """The shortest path that leads to it, such as ``model.fc.weight``; None if no name of the notebook does."""
    type_name: str
    shape: tuple[int, ...] | None
    """None where there is no single shape, or where only the user's code could tell."""
    dtype: str
    device: str
    size_bytes: int
    """Bytes of the whole storage, or of all tensors inside it; 0 where it could not be read (see ``note``)."""
    kind: TensorKind = "other"
    requires_grad: bool = False
    in_graph: bool = False
    """Whether autograd has recorded how it was computed: then it keeps the graph behind it alive."""
    cell: int | None = None
    """Execution count of the last cell whose code binds the name's first part."""
    aliases: int = 0
    """How many other tensors or arrays share the storage."""
    shared: bool = False
    """Whether the storage is in memory that other processes may share; for the host only."""
    library: str = ""
    """``torch``, ``numpy``, or ``buffer`` for an array on another object's memory."""
    storage: int = 0
    """Identity of the storage among the library's: what stayed between two inventories has the same."""
    note: str = ""
    """Why the size is missing or not that of a storage."""


class TensorGroup(NamedTuple):
    """Tensors that have something in common."""

    label: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class Inventory(Record):
    """The tensors and arrays that were alive at one moment, the largest first, each storage once."""

    tensors: Sequence[TensorRecord]
    """Made into records when they are looked at, if there may be very many."""
    taken_at: float
    file: str | None = None
    """The script that took it; None where a notebook's cell did."""
    line: int | None = None
    cell: int | None = None
    """Execution count of the cell that took it."""
    notes: tuple[str, ...] = ()
    """What could not be read, in words for the user."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on all devices."""
        return sum(self.device_bytes.values())

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of the tensors on each device."""
        rows = Rows.of(TensorRecord, self.tensors)
        devices, sizes = rows.column("device"), rows.column("size_bytes")
        return {
            device: sum(compress(sizes, map(device.__eq__, devices)))
            for device in dict.fromkeys(devices)  # few
        }

    @property
    def place(self) -> str:
        """Where it was taken: ``train.py:12``, ``cell 3``, or nothing where that is unknown."""
        if self.file is not None:
            return f"{self.file}:{self.line}"
        return "" if self.cell is None else f"cell {self.cell}"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, ready for JSON; each tensor is one too."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "tensors": [tensor._asdict() for tensor in self.tensors]}

    def __repr__(self) -> str:
        """Return one line: there may be a million tensors."""
        sizes = ", ".join(f"{device} {format_bytes(size)}" for device, size in self.device_bytes.items())
        return f"<Inventory of {len(self.tensors)} tensors and arrays: {sizes or 'no memory'}>"


@dataclass(frozen=True, repr=False)
class InventoryDiff(Record):
    """What came and what went between two inventories, the largest first."""

    came: tuple[TensorRecord, ...]
    went: tuple[TensorRecord, ...]
    before: str
    """Where the first inventory was taken: a file with its line, or a cell; may be empty."""
    after: str
    """Where the second was taken."""

    @property
    def changed_bytes(self) -> dict[str, int]:
        """How far each device's bytes rose (or fell, if negative)."""
        changes: dict[str, int] = {}
        for sign, tensors in ((1, self.came), (-1, self.went)):
            for tensor in tensors:
                changes[tensor.device] = changes.get(tensor.device, 0) + sign * tensor.size_bytes
        return changes

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, ready for JSON; each tensor is one too."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = {name: [tensor._asdict() for tensor in fields[name]] for name in ("came", "went")}
        return {**fields, **rows}

    def __repr__(self) -> str:
        """Return one line."""
        sizes = ", ".join(f"{device} {format_change(size)}" for device, size in self.changed_bytes.items())
        return f"<InventoryDiff: {len(self.came)} came, {len(self.went)} went: {sizes or 'no change'}>"
