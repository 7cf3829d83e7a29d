"""Defines the lines of a recording: one JSON object each, which says by itself what it is.

``kind`` names the entry and ``n`` counts the kernel's entries, so that one that two segments repeat is known as one.
Fields that are None are left out. Nothing here trusts a file: what does not decode to an entry is no entry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from ipygpumem.record import Record

VERSION = 1

_LINES_KEPT = 12
_LETTERS_KEPT = 160
_MOST = 1 << 63
"""Sizes and counts stay below it."""
_LATEST = 1e11
"""No calendar has later times."""


@dataclass(frozen=True)
class Figures(Record):
    """One device at one moment: RSS for the host (``cpu``), live tensors for an accelerator."""

    device: str
    current_bytes: int
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None


class Entry(Record):
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


ENTRIES: dict[str, type[Entry]] = {entry.kind: entry for entry in (Header, CellStart, Sample, CellEnd, End)}


def first_lines(source: str) -> str:
    """Return the beginning of a cell's source, bounded in lines and in letters of a line."""
    if len(source) <= _LETTERS_KEPT and source.count("\n") < _LINES_KEPT:
        return source.strip("\n")
    lines = source.strip("\n")[: 2 * _LINES_KEPT * _LETTERS_KEPT].split("\n")
    return "\n".join(line[:_LETTERS_KEPT] for line in lines[:_LINES_KEPT])


def encode(entry: Entry, number: int) -> bytes:
    """Return the line of ``entry``, which is the kernel's ``number``-th."""
    line = {"kind": entry.kind, "n": number, **entry.to_dict()}
    return f"{json.dumps(_known(line), separators=(',', ':'))}\n".encode("ascii")


def _known(value: Any) -> Any:
    """Return plain values without the fields that are None."""
    if type(value) is dict:
        return {name: _known(item) for name, item in value.items() if item is not None}
    return [_known(item) for item in value] if type(value) is tuple else value


def decode(line: bytes) -> tuple[int, Entry] | None:
    """Return the number and the entry of a line; None if it is none of ours, or damaged."""
    try:
        data = json.loads(line, parse_int=_int)
        entry = ENTRIES[data["kind"]].from_dict({name: item for name, item in data.items() if item is not None})
        times = [value for value in vars(entry).values() if type(value) is float]
        if type(data["n"]) is int and all(0 <= value < _LATEST for value in times):
            return data["n"], entry
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        pass
    return None


def _int(digits: str) -> int:
    number = int(digits)
    if abs(number) >= _MOST:
        raise ValueError("no size or count")
    return number
