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
from typing import Any, Literal, NamedTuple, TypeVar

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
    let_go: tuple[Held, ...] = ()
    """What was taken off the exception, to which nothing of the user's referred."""
    refused_by: str = ""
    """The budget, or another limit on torch's allocator, that refused what was asked for, in words."""
    half_made: str = ""
    """The type of an optimizer that has made half of its state, and is in use still."""


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
    """The bytes that it was allowed, by device; ``notes`` say where it crossed them or was refused more."""
