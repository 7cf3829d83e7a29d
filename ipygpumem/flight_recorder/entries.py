"""The lines of a recording: one JSON object each, which says by itself what it is.

``kind`` names the entry and ``n`` counts the kernel's entries, so that one that two segments repeat is known as one.
Fields that are None are left out. Nothing here trusts a file: what does not decode to an entry is no entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

VERSION = 1

_LINES_KEPT = 12
_LETTERS_KEPT = 160
_quoted = json.encoder.encode_basestring_ascii


class Figures(NamedTuple):
    """One device at one moment: RSS for the host (``cpu``), live tensors for an accelerator."""

    device: str
    current_bytes: int
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None


_SIZES = Figures._fields[1:]


class Entry:
    """Base of all entries."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Header(Entry):
    """Whose recording this is, and what bounds the kernel's memory."""

    kind: ClassVar[str] = "kernel"
    time: float
    pid: int
    process_started: float
    boot: str
    """Names the machine's run since it was started."""
    namespace: str
    """Names the space of process ids: another container has another."""
    host: str
    python: str
    version: int = VERSION
    torch: str | None = None
    notebook: str | None = None
    parent_pid: int | None = None
    parent_started: float | None = None
    ram_bytes: int | None = None
    group_limit_bytes: int | None = None
    limits: dict[str, int] | None = None
    """The process's own limits on memory (``ulimit``) that are set."""
    counter: str | None = None
    """Names the counter that ``oom_kills`` are read from."""
    oom_kills: int | None = None
    available_bytes: int | None = None


@dataclass(frozen=True)
class CellStart(Entry):
    """A cell begins."""

    kind: ClassVar[str] = "cell"
    time: float
    cell: int | None
    source: str
    """Its first lines, each cut to a bounded length."""
    lines: int = 0
    """How many lines it has."""
    cell_id: str | None = None
    experiment: str | None = None
    oom_kills: int | None = None
    devices: tuple[Figures, ...] = ()


@dataclass(frozen=True)
class Sample(Entry):
    """Memory while a cell runs."""

    kind: ClassVar[str] = "sample"
    time: float
    cell: int | None
    available_bytes: int | None = None
    """What the system could still give, to anybody."""
    group_used_bytes: int | None = None
    group_available_bytes: int | None = None
    group_limit_bytes: int | None = None
    address_space_bytes: int | None = None
    """Noted where it is limited, as the data are."""
    oom_kills: int | None = None
    devices: tuple[Figures, ...] = ()
    address_space_limit_bytes: int | None = None
    data_bytes: int | None = None
    data_limit_bytes: int | None = None


@dataclass(frozen=True)
class CellEnd(Entry):
    """A cell is over, well or not."""

    kind: ClassVar[str] = "cell end"
    time: float
    cell: int | None
    seconds: float
    success: bool
    error: str | None = None
    oom_kills: int | None = None
    devices: tuple[Figures, ...] = ()


@dataclass(frozen=True)
class End(Entry):
    """The kernel, or only its recording, ends as somebody wished."""

    kind: ClassVar[str] = "end"
    time: float
    reason: str


KINDS: dict[str, type[Entry]] = {kind.kind: kind for kind in (Header, CellStart, Sample, CellEnd, End)}


def first_lines(source: str) -> str:
    """Return the beginning of a cell's source, bounded in lines and in letters of a line."""
    if len(source) <= _LETTERS_KEPT and source.count("\n") < _LINES_KEPT:
        return source.strip("\n")
    lines = source.strip("\n")[: 2 * _LINES_KEPT * _LETTERS_KEPT].split("\n")
    return "\n".join(line[:_LETTERS_KEPT] for line in lines[:_LINES_KEPT])


def encode(entry: Entry, number: int) -> bytes:
    """Return the line of ``entry``, which is the kernel's ``number``-th."""
    # By hand: a JSON encoder takes three times as long, and each cell pays for two lines.
    text = f'{{"kind":"{entry.kind}","n":{number}'
    for name, value in vars(entry).items():
        if value is not None:
            text += f',"{name}":{_json(value)}'
    return f"{text}}}\n".encode("ascii")


def _json(value: Any) -> str:
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is str:
        return _quoted(value)
    if kind is tuple:
        return f"[{','.join([_figures_json(item) for item in value])}]"
    return json.dumps(value)


def _figures_json(item: Figures) -> str:
    text = f'{{"device":{_quoted(item.device)}'
    for name, size in zip(_SIZES, item[1:], strict=True):
        if size is not None:
            text += f',"{name}":{size}'
    return f"{text}}}"


def decode(line: bytes) -> tuple[int, Entry] | None:
    """Return the number and the entry of a line; None if it is none of ours, or damaged."""
    try:
        data = json.loads(line)
        if type(data) is not dict or type(data["n"]) is not int:
            return None
        kind = KINDS[data["kind"]]
        return data["n"], kind(**_known(data, _CHECKS[kind]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _known(data: Any, checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the fields of an object that are known and not null, each of its kind (TypeError, ValueError)."""
    if type(data) is not dict:
        raise TypeError("no object")
    return {name: checks[name](value) for name, value in data.items() if value is not None and name in checks}


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"no {kind.__name__}")
        return value

    return check


def _int(value: Any) -> int:
    if type(value) is not int or not -_MOST < value < _MOST:
        raise ValueError("no size or count")
    return value


def _float(value: Any) -> float:
    # As a time it must be one that a calendar has.
    if type(value) not in (int, float) or not 0 <= value < _LATEST:
        raise ValueError("no time")
    return float(value)


def _sizes(value: Any) -> dict[str, int]:
    if type(value) is not dict:
        raise TypeError("no object")
    return {key: _int(size) for key, size in value.items()}


def _devices(value: Any) -> tuple[Figures, ...]:
    if type(value) is not list:
        raise TypeError("no list")
    return tuple([Figures(**_known(item, _FIGURES)) for item in value])


_MOST = 1 << 63
_LATEST = 1e11
_str, _bool = _exactly(str), _exactly(bool)
_BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": _float,
    "str": _str,
    "bool": _bool,
    "dict[str, int]": _sizes,
    "tuple[Figures, ...]": _devices,
}
_FIGURES = {"device": _str, **dict.fromkeys(_SIZES, _int)}
_CHECKS: dict[type[Entry], dict[str, Callable[[Any], Any]]] = {
    kind: {field.name: _BY_TYPE[str(field.type).removesuffix(" | None")] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # dataclasses
    for kind in KINDS.values()
}
