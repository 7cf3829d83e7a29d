"""The records of several processes, and of what they have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ipygpumem.model import TraceRecord
from ipygpumem.record import Record


@dataclass(frozen=True)
class Member(Record):
    """One process of a job, and what it has measured."""

    name: str
    """As ``rank 3``."""
    host: str
    pid: int
    traces: tuple[TraceRecord, ...]


@dataclass(frozen=True)
class Spread(Record):
    """One figure over all members: bytes, or seconds."""

    lowest: float
    median: float
    highest: float
    lowest_name: str
    highest_name: str


@dataclass(frozen=True)
class Row(Record):
    """The traces of one label on one kind of device."""

    label: str
    device: str
    """``cpu``, or ``cuda`` for whichever card each member used."""
    members: int
    """How many have such a trace."""
    peak: Spread
    """Bytes above the start of the trace; of several traces of a member, and of its cards, the highest."""
    kept: Spread
    """Bytes; of several traces of a member, and of its cards, the sum."""
    seconds: Spread
    """Of several traces of a member, the sum."""
    is_sampled: bool = False
    """Whether some peak is a lower bound."""


@dataclass(frozen=True, repr=False)
class Merged(Record):
    """What all members of a job have measured."""

    members: tuple[Member, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """Members that stand out: by their peak, their time, an error, or a trace that they lack."""

    def __repr__(self) -> str:
        """Return one line: there may be very many members."""
        return f"<Merged: {len(self.members)} members, {len(self.rows)} rows, {len(self.notes)} notes>"


@dataclass(frozen=True)
class Figure(Record):
    """One figure of the engines of a cluster, such as the peak on their cards."""

    name: str
    device: str
    """``cpu``, or ``cuda`` for whichever card each engine used; empty for a time."""
    engines: int
    """How many have it."""
    total: float
    spread: Spread
    is_sampled: bool = False
    """Whether some engine's is a lower bound."""
