"""The records: measurements as plain data, used by all other modules.

Each record is a frozen dataclass. Bytes are ``int`` and end in ``_bytes``, times are ``float`` and
end in ``_seconds`` (``started_at`` is Unix time). ``to_dict`` and ``from_dict`` are lossless, also
through JSON.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import json
import os
import socket
import stat
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, TypeVar

from ipygpumem.errors import GpuMemError, how_to_install

# -- the base ------------------------------------------------------------------------------------

T = TypeVar("T", bound="Record")
MOST_DEVICES = 10_000
"""Maximum number of devices, ranks or keys to read of one record."""


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading; OSError for anything else, such as a pipe, which could block
    or never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # also of a text
        raise OSError(errno.EINVAL, "not a plain file")
    return open(path, "rb", opener=without_waiting)


def without_waiting(path: str, flags: int) -> int:
    """Open a file for reading, even if it has become a pipe by now."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


MimeBundle = tuple[dict[str, str], dict[str, Any]]
"""Texts by their MIME type, and the metadata of their display."""


class Record:
    """Base of all records: conversion to and from plain dictionaries.

    In a notebook and as a text, the function that ``mimebundle`` has for its class shows it.
    """

    __slots__ = ()
    _most_in_list = 0
    """Maximum number of such records to read in one list; 0 for no limit."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("ipygpumem."):  # not a user's, which may have the same name
            _CLASSES[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, ready for JSON."""
        return {name: _plain(getattr(self, name)) for name in _hints(type(self))}  # type: ignore[arg-type]  # classes are hashable

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the record that ``to_dict`` converted to ``data``; unknown keys are ignored.

        Raises:
            ValueError: a value does not have its field's type, or is too large.
            TypeError: a field is missing.
        """
        return _decoder(cls)(dict(data))  # type: ignore[arg-type, no-any-return]  # classes are hashable, and make instances

    def __str__(self) -> str:
        return mimebundle(self)[0].get("text/plain", repr(self))

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        return mimebundle(self)


_CLASSES: dict[str, type[Record]] = {}
"""The classes of records by name; those of modules that have not been imported are missing."""


@functools.singledispatch
def mimebundle(record: Record | History) -> MimeBundle:
    """Return a record as a notebook displays it; empty for records without a report.

    Modules of reports register a function for each class, because records know no report.
    """
    return {}, {}


@functools.cache  # of the classes of the model; an export holds thousands of records
def _hints(record: type) -> dict[str, Any]:
    """Return the types of a record's fields, by name."""
    hints = typing.get_type_hints(record)
    return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar}


def _plain(value: Any) -> Any:
    """Return a field's value without records and named tuples."""
    if value is None or type(value) in (int, str, float):
        return value
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_asdict"):  # a NamedTuple
            return {name: _plain(item) for name, item in value._asdict().items()}
        return tuple([_plain(item) for item in value])
    if isinstance(value, Mapping):
        return dict(value)
    return value


Decode = Callable[[Any], Any]
"""Function that converts a plain value to a field's; it raises ValueError for a wrong one."""


@functools.cache
def _decoder(hint: Any) -> Decode:
    """Return the function that converts a plain value to a field declared as ``hint``."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _decoder_of_union(inner)
    if origin is tuple and inner[1:] != (...,):
        return _decoder_of_tuple(inner)
    if origin in (tuple, Sequence):
        return _decoder_of_sequence(inner[0])
    if origin in (dict, Mapping):
        return _decoder_of_mapping(inner[1])
    if origin is Literal:
        return lambda value: _one_of(value, inner)
    if hint in _DECODERS:
        return _DECODERS[hint]
    return lambda value: _record(hint, _checked(value, dict))


def _decoder_of_union(hints: tuple[Any, ...]) -> Decode:
    """Return the decoder of a union; its first type is for values of any other type."""
    by_type = {hint: _decoder(hint) for hint in hints if type(hint) is type}
    decode_first = _decoder(hints[0])
    return lambda value: by_type.get(type(value), decode_first)(value)


def _decoder_of_tuple(hints: tuple[Any, ...]) -> Decode:
    """Return the decoder of a tuple with a type for each item."""
    decoders = [_decoder(hint) for hint in hints]

    def decode(value: Any) -> tuple[Any, ...]:
        items = _checked(value, list, tuple)
        pairs = zip(decoders, items, strict=True)
        return tuple([decode_item(item) for decode_item, item in pairs])

    return decode


def _decoder_of_sequence(hint: Any) -> Decode:
    """Return the decoder of a sequence whose items have one type."""
    decode_item = _decoder(hint)
    limit = getattr(hint, "_most_in_list", 0)
    return lambda value: tuple(map(decode_item, _bounded(_checked(value, list, tuple), limit)))


def _decoder_of_mapping(hint: Any) -> Decode:
    """Return the decoder of a dictionary whose values have one type."""
    decode_item = _decoder(hint)

    def decode(value: Any) -> dict[str, Any]:
        items = _bounded(_checked(value, dict), MOST_DEVICES)
        return {key: decode_item(item) for key, item in items.items()}

    return decode


def _decoder_of_type(kind: type) -> Decode:
    """Return the decoder of a plain type, which takes no other values."""
    return lambda value: _checked(value, kind)


_DECODERS: dict[Any, Decode] = {
    Any: lambda value: value,
    float: lambda value: float(_number(_checked(value, float, int))),
    int: lambda value: _number(_checked(value, int)),
    str: _decoder_of_type(str),
    bool: _decoder_of_type(bool),
    types.NoneType: _decoder_of_type(types.NoneType),
    Record: lambda value: _record(class_of(_checked(value, dict).get("kind")), value),
}


def _record(kind: type, values: dict[str, Any]) -> Any:
    """Return the record of a class, or the named tuple, with these plain values of its fields."""
    for name, value in values.items():
        is_duration = name.endswith("_seconds") and type(value) in (int, float)
        if is_duration and value < 0:
            raise ValueError("a duration is negative")
    fields = {}
    for name, hint in _hints(kind).items():
        if name in values:
            fields[name] = _decoder(hint)(values[name])
    return kind(**fields)


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    """Return a value; ValueError if it is none of the ``known`` ones."""
    if value not in known:
        raise ValueError(f"{value!r} is not one of {known}")
    return value


def _checked(value: Any, *types_: type) -> Any:
    """Return a value; ValueError if it has none of the types."""
    if type(value) not in types_:
        raise ValueError(f"{type(value).__name__} where {types_[0].__name__} belongs")
    return value


def _number(value: Any) -> Any:
    """Return a number; ValueError if it does not fit into 64 bits, or is infinite or NaN."""
    limit = 2**63 if type(value) is int else float("inf")
    if not abs(value) < limit:  # NaN is not, either
        raise ValueError("a number is too large, or NaN")
    return value


def _bounded(values: Any, limit: int) -> Any:
    """Return a list or dictionary; ValueError if it has more items than ``limit``, unless that is
    0.
    """
    if limit and len(values) > limit:
        raise ValueError(f"{len(values)} items, more than {limit}")
    return values


# -- measurements -------------------------------------------------------------------------------

Method = Literal["kernel", "allocator", "sampled"]
"""Source of a peak: the kernel's high-water mark, an allocator's counter, or samples (a lower
bound).
"""


OUTSIDE = ("shm", "children")
"""Devices for host memory outside this process's RSS: shared memory segments, and child processes.
"""


class Reading(NamedTuple):
    """One device at one moment, as read by a probe. A tuple, because every cell makes two per
    device.

    ``current_bytes`` is the process's RSS for the host and the bytes of live tensors for an
    accelerator. ``peak_bytes`` is the highest value since the probe was last rearmed. Your own
    probe returns these: see ``register_probe``.

    >>> Reading("tpu:0", current_bytes=100, peak_bytes=120, method="sampled").peak_bytes
    120
    """

    device: str
    current_bytes: int
    peak_bytes: int
    method: Method
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    """Reserved by the allocator for this process: live tensors and its cache."""
    used_bytes: int | None = None
    """In use on the whole device, by all processes."""
    other_bytes: int | None = None
    """In use on the device by other processes."""
    note: str = ""
    """Message for the user about a missing figure."""
    mapped_bytes: int | None = None
    """Address space of the process: memory freed at once lowers it, memory that an allocator purges
    later does not.
    """


@dataclass(frozen=True, slots=True)  # there may be tens of thousands, as of cells
class Usage(Record):
    """Memory of one device during a cell, an experiment or any other span.

    For the host, bytes are RSS; ``shm`` and ``children`` are its shared memory and child processes.
    For an accelerator they are those of live tensors (allocated); the allocator's reserved memory,
    and the use of the whole device and of other processes, are separate fields.

    >>> usage = Usage(
    ...     "cuda:0", before_bytes=100, after_bytes=150, peak_bytes=400,
    ...     total_bytes=None, method="allocator",
    ... )
    >>> usage.delta_bytes, usage.peak_delta_bytes
    (50, 300)
    """

    _most_in_list = MOST_DEVICES
    device: str
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    total_bytes: int | None
    method: Method
    """How the peak was measured: by Linux's ``kernel``, torch's ``allocator``, or ``sampled`` (a
    lower bound).
    """
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    """In use on the whole device, by every process."""
    other_bytes: int | None = None
    """In use by other processes; None if unknown."""
    note: str = ""

    @property
    def delta_bytes(self) -> int:
        """Memory kept by the span: after minus before; negative if it freed memory."""
        return self.after_bytes - self.before_bytes

    @property
    def peak_delta_bytes(self) -> int:
        """Peak above the span's start; never negative."""
        return max(0, self.peak_bytes - self.before_bytes)


@dataclass(frozen=True, slots=True)
class CellRecord(Record):
    """Measurements of one finished cell, after the end of everything that ended with it."""

    execution_count: int | None
    cell_id: str | None
    experiment: str | None
    started_at: float
    duration_seconds: float
    success: bool
    error: str | None
    """Name of the exception's type, or None."""
    usages: tuple[Usage, ...]
    """Memory kept after everything that ended with the cell was freed; their peaks are those of the
    cell's code.
    """
    source_digest: str = ""
    """Equal for cells with the same source, ignoring surrounding white space."""
    source_line: str = ""
    """The first line of code in the cell, cut to 80 characters."""
    recovery: RecoveryRecord | None = None
    """The recovery after its error, if anything was released."""
    freed: dict[str, int] = field(default_factory=dict)
    """Bytes freed per device between the end of the cell's code and the end of ``usages``: by a
    recovery, and by experiments that ended with the cell. Empty without either.
    """
    child_peak_bytes: int | None = None
    """RSS at its peak of the largest child process that ended in the cell, if it was larger than
    all earlier ones and than this process; or the growth at its peak of the child process that ran
    the cell (``%%isolate``); or None.
    """


@dataclass(frozen=True, slots=True)
class TraceRecord(Record):
    """Measurements of a traced block, of one iteration of a tracked loop, or of an epoch of a
    training.
    """

    label: str
    started_at: float
    duration_seconds: float
    error: str | None
    """Name of the type of the exception that left it, or None."""
    usages: tuple[Usage, ...]
    iteration: int | None = None
    """Number of a tracked loop's iteration, or of an epoch, counted from 1."""


class Growth(NamedTuple):
    """Code whose last runs have each grown a device by memory that was not freed."""

    device: str
    runs: int
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class ReferencePath(Record):
    """The reference that keeps an object alive."""

    path: str
    """The shortest chain of references from a name."""
    advice: str
    """Advice to the user on how to free it; empty if there is none."""


COMMENT = "  # "
"""Text between a line of advice and its comment."""


SEVERAL_TYPES = "object"
"""Name of the type of a row of objects of several types; the row's parts are these types."""


def uncounted_note(libraries: Sequence[str]) -> str:
    """Return the note on libraries that keep memory which nothing counts."""
    verb = "keeps" if len(libraries) == 1 else "keep"
    return f"{', '.join(libraries)} {verb} memory that is not counted"


@dataclass(frozen=True)
class RetainedArray(Record):
    """A tensor, an array, or any object that holds memory, and the name that refers to it."""

    name: str
    type_name: str
    shape: tuple[int, ...] | None
    """None for an object with several arrays, or with none; ``arrays`` is their number."""
    dtype: str
    device: str
    size_bytes: int
    """Size of the whole storage, which a view keeps alive; shared storages count once."""
    arrays: int = 1
    function: str = ""
    line: int = 0
    cell: int | None = None
    """Number of the cell that bound the name, if known."""
    holder: ReferencePath | None = None
    """The holder that keeps it alive, if it was searched for and found."""
    objects: int = 1
    """Number of objects of that type, if the holder has several."""
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes of the largest parts of an object without arrays: columns, keys, attributes, or types
    of items.
    """
    is_at_least: bool = False
    """True if it holds more than ``size_bytes``: memory that is not counted, or that was not
    reached within the limits.
    """
    uncounted: tuple[str, ...] = ()
    """Libraries that keep memory of it which nothing counts."""


@dataclass(frozen=True)
class KeptObject(Record):
    """The object of a name that an experiment has kept, with all that it holds."""

    name: str
    device_bytes: dict[str, int]
    """Bytes by device; ``cpu`` is RAM. Memory that several names share is counted for one of them.
    """
    is_at_least: bool = False
    """True if it holds more: memory that is not counted, or that was not reached within the limits.
    """


FREE_HEAP_PAGES = "free heap pages"
"""Name of the step that returns free pages of the heap to the system."""


@dataclass(frozen=True)
class FreeingStep(Record):
    """One step of freeing memory, with the bytes freed on each device, without those freed by other
    threads.
    """

    name: str
    freed: dict[str, int]
    """Decrease of RSS (host) or of live tensors' bytes (accelerators)."""
    freed_reserved: dict[str, int]
    """Decrease of an accelerator's reserved memory, which other processes can use again."""
    duration_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Cause(Record):
    """Why memory ran out, decided by figures from that moment."""

    kind: Literal[
        "too large", "too much", "limit", "guard", "fragmentation", "process", "names", "shm"
    ]
    device: str
    text: str
    remedy: str = ""
    """The line that helps, or advice; empty if there is none."""


@dataclass(frozen=True)
class CutListing(Record):
    """Why a list of an error's memory is not complete: its sizes are at least what is shown."""

    reason: Literal["time", "memory", "objects"]
    """``time``: half a second was over; ``memory``: too little was left; ``objects``: there were
    too many.
    """
    uncounted: int
    """Number of names of which nothing, or only a part, was counted."""
    names: int
    """Number of all names."""


@dataclass(frozen=True)
class KeptError(Record):
    """Memory that only errors keep alive: in their arguments, attributes, and the frames of stored
    errors.
    """

    place: str
    """Names and places that hold the errors, such as ``errors[0]``; empty for the last error, kept
    for %debug.
    """
    size_bytes: int
    names: tuple[str, ...]
    """The largest arguments, attributes and locals."""
    remedy: str
    """The line that frees it."""
    is_complete: bool = True
    """False if it may be more."""
    loses: str = ""
    """Containers of the errors whose other items the line removes, too."""


@dataclass(frozen=True)
class RecoveryRecord(Record):
    """Memory freed after an out-of-memory error or an interrupt."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    message: str
    requested_bytes: int | None
    free: dict[str, int]
    """Free bytes of each device when the cell had failed, before anything was freed."""
    held: tuple[RetainedArray, ...]
    """Objects held by the traceback's frames, the largest first, without those that your variables
    hold too.
    """
    frames: int
    freed: dict[str, int]
    now: dict[str, int]
    """Each device's bytes at the end: RSS for the host, live tensors for an accelerator."""
    steps: tuple[FreeingStep, ...] = ()
    poisoned: bool = False
    """True if the device context is broken: only restarting the kernel helps."""
    cause: Cause | None = None
    """Why memory ran out; None if it is not clear."""
    incomplete_optimizer: str = ""
    """Type of an optimizer that is still in use with incomplete state."""
    plain: tuple[str, ...] = ()
    """Numbers and short texts among the locals of the user's released frames, one line per frame.
    """
    cut: CutListing | None = None
    """Why ``held`` does not list everything; None if it does."""
    kept_errors: tuple[KeptError, ...] = ()
    """Memory that the error itself or earlier errors still hold, the largest first."""


@dataclass(frozen=True)
class EngineRecord(Record):
    """The part of an experiment on a cluster that one engine ran."""

    _most_in_list = MOST_DEVICES
    engine: int
    host: str = ""
    pid: int = 0
    cards: dict[str, str] = field(default_factory=dict)
    """Names of the GPUs that torch used there, by device."""
    free: dict[str, int] = field(default_factory=dict)
    """Free bytes of each device at the end."""
    version: str = ""
    error: str = ""
    """Name of the error that ended one of its cells, or why there is no record."""
    record: ExperimentRecord | None = None


@dataclass(frozen=True)
class ExperimentRecord(Record):
    """A finished experiment: its memory, time, and names."""

    name: str
    started_at: float
    duration_seconds: float
    """Sum of its cells' times; the block's time for a block inside one cell."""
    cells: tuple[CellRecord, ...]
    usages: tuple[Usage, ...]
    """From the start to the end of the clean-up; ``delta_bytes`` is the memory that was not freed.
    """
    consumed: dict[str, int]
    """Bytes per device that the experiment held at its end, above its start."""
    freed: dict[str, int]
    """Bytes per device freed by the clean-up: ``consumed`` minus ``delta_bytes``; negative for an
    increase.
    """
    deleted: tuple[str, ...]
    restored: tuple[str, ...]
    kept: tuple[str, ...]
    """Names that stayed, because you asked or a cell declares them ``global``."""
    survivors: tuple[RetainedArray, ...]
    """Deleted names whose arrays are still alive, because something outside the scope refers to
    them.
    """
    steps: tuple[FreeingStep, ...] = ()
    notes: tuple[str, ...] = field(default=())
    parameters: dict[str, int | float | str] = field(default_factory=dict)
    """Parameters noted by the user: ``--note lr=1e-3 bs=64``."""
    ooms: int = 0
    """Number of out-of-memory errors that ended one of its cells, or left it or an experiment
    inside it.
    """
    budget: dict[str, int] = field(default_factory=dict)
    """Allowed bytes by device; refusals are in ``notes``."""
    engines: tuple[EngineRecord, ...] = ()
    """One per engine of a cluster; then all sizes are sums, and the time is that of the slowest."""
    span_seconds: float = 0.0
    """Time from its start to the end of its code, including pauses between its cells."""
    kept_objects: tuple[KeptObject, ...] = ()
    """The objects of ``kept`` names with at least ``min_held_bytes``, if it has left that much."""


# -- the records of a session -------------------------------------------------------------------

SCHEMA = 1
"""Incremented when older readers would misunderstand a file; an additional field does not change
it.
"""
_MOST_PACKED_BYTES = 256 * 1024
"""Maximum bytes of the records in an output's metadata, as JSON."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=str)


def is_kind(kind: object) -> bool:
    """Return True for the name of a class of records that has been imported."""
    return type(kind) is str and kind in _CLASSES


def class_of(kind: Any) -> type[Record]:
    """Return the class of the records of a kind; ValueError if it is unknown."""
    if not is_kind(kind):
        raise ValueError("a record of an unknown kind")
    return _CLASSES[kind]


def packed(records: Iterable[Record]) -> dict[str, Any]:
    """Return records in the form stored in an output's metadata. A record for which there is no
    room is left out, and counted under its kind.
    """
    packed_records = list[Any]()
    bytes_left = _MOST_PACKED_BYTES
    left_out: dict[str, int] = {}
    for record in records:
        kind = type(record).__name__
        # Surrogates that are no text would break the message, and NaN the notebook's file.
        data = _ENCODER.encode({"kind": kind, **record.to_dict()}).encode("utf-8", "replace")
        if len(data) <= bytes_left:
            packed_records.append(_DECODER.decode(data.decode()))
            bytes_left -= len(data)
        else:
            left_out[kind] = left_out.get(kind, 0) + 1
    metadata: dict[str, Any] = {"schema": SCHEMA, "records": packed_records}
    if left_out:
        metadata["left_out"] = left_out
    return metadata


_FIRST_COLUMNS = ("execution_count", "cell_id", "experiment")
_TEXT_COLUMNS = ("error", "source_line", "source_digest")
"""Fields of a cell in the DataFrame: before and after those with a type of their own."""
_SIZES = ("before", "after", "peak", "delta", "peak_delta", "total", "reserved", "used", "other")
USAGE_BYTES = tuple(f"{name}_bytes" for name in _SIZES)
"""Fields of each device in tables."""


class History(list[CellRecord]):
    """The records of finished cells, oldest first: a list with ``to_pandas``."""

    def __getitem__(self, index: Any) -> Any:  # typed as a list's
        item = super().__getitem__(index)
        if isinstance(index, slice):
            return History(item)
        return item

    def __repr__(self) -> str:
        """Return one line: there may be ten thousand cells."""
        seconds = sum(cell.duration_seconds for cell in self)
        return f"<History of {_count(self, 'cell')}, {seconds:.1f} s>"

    def __str__(self) -> str:
        return mimebundle(self)[0].get("text/plain", repr(self))

    def _repr_pretty_(self, printer: Any, cycle: object) -> None:
        printer.text(str(self))  # else IPython prints it as any list

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        return mimebundle(self)

    def to_pandas(self) -> Any:
        """Return a DataFrame with one row per cell and one column per field.

        Raises:
            GpuMemError: pandas is not installed.

        >>> History().to_pandas().shape[0]
        0
        """
        if importlib.util.find_spec("pandas") is None:
            line = how_to_install("pandas")
            raise GpuMemError(f"to_pandas needs pandas, which is not installed: {line}")
        pandas = importlib.import_module("pandas")  # slow to import, and rarely used
        columns: dict[str, Any] = {name: self._values(name) for name in _FIRST_COLUMNS}
        columns["execution_count"] = pandas.array(columns["execution_count"], dtype="Int64")
        columns["started_at"] = pandas.to_datetime(self._values("started_at"), unit="s", utc=True)
        for name, dtype in (("duration_seconds", "float64"), ("success", "bool")):
            columns[name] = pandas.array(self._values(name), dtype=dtype)
        for name in _TEXT_COLUMNS:
            columns[name] = self._values(name)
        columns["recovery"] = [cell.recovery and cell.recovery.kind for cell in self]
        for name, sizes in self._sizes().items():
            columns[name] = pandas.array(sizes, dtype="Int64")
        return pandas.DataFrame(columns)

    def _values(self, name: str) -> list[Any]:
        """Return one field of all cells."""
        return [getattr(cell, name) for cell in self]

    def _sizes(self) -> dict[str, list[int | None]]:
        """Return the columns of each device's bytes, without those that no cell has."""
        columns = {}
        all_usages = list[Usage]()
        for cell in self:
            all_usages += cell.usages
        for device in devices_of(all_usages):
            usages = [usage_on(cell.usages, device) for cell in self]
            for name in USAGE_BYTES:
                sizes = [None if usage is None else getattr(usage, name) for usage in usages]
                if any(size is not None for size in sizes):
                    columns[f"{device}_{name}"] = sizes
        return columns


def devices_of(usages: Iterable[Usage]) -> list[str]:
    """Return the devices of all ``usages``, the host first, then in order of occurrence."""
    devices = dict.fromkeys(usage.device for usage in usages)
    return sorted(devices, key=lambda device: device != "cpu")


def usage_on(usages: Iterable[Usage], device: str) -> Usage | None:
    """Return the usage of ``device``; None if it was not in use."""
    for usage in usages:
        if usage.device == device:
            return usage
    return None


@dataclass(frozen=True, repr=False)
class SessionRecord(Record):
    """The records of a session at the time of its export, or those in a notebook's outputs."""

    saved_at: float
    """Unix time."""
    cells: tuple[CellRecord, ...]
    experiments: tuple[ExperimentRecord, ...]
    traces: tuple[TraceRecord, ...] = ()
    host: str = ""
    pid: int = 0
    results: tuple[Record, ...] = ()
    """Records of commands, such as estimates and peaks; only those of a notebook's file."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of records that were too large for the notebook's file, by kind."""

    @classmethod
    def of(
        cls,
        cells: Iterable[CellRecord],
        experiments: Iterable[ExperimentRecord],
        traces: Iterable[TraceRecord],
    ) -> SessionRecord:
        """Return the record of this process."""
        return cls(
            time.time(),
            tuple(cells),
            tuple(experiments),
            tuple(traces),
            socket.gethostname(),
            os.getpid(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary of plain values, with the kinds of ``results``."""
        results = list[dict[str, Any]]()
        for record in self.results:
            results.append({"kind": type(record).__name__, **record.to_dict()})
        return {**super().to_dict(), "results": tuple(results)}

    @property
    def history(self) -> History:
        """The cells, as from ``ipygpumem.history()``."""
        return History(self.cells)

    def __repr__(self) -> str:
        """Return one line."""
        cells = _count(self.cells, "cell")
        experiments = _count(self.experiments, "experiment")
        traces = _count(self.traces, "trace")
        return f"<SessionRecord of {cells}, {experiments} and {traces}>"


def _count(records: Sequence[Record], thing: str) -> str:
    """Return a number of records in words, such as ``3 cells``."""
    number = len(records)
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}s"
