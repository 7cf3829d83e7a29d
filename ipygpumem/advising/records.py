"""The advice of one moment, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ipygpumem.objects.arrays import StorageKey
from ipygpumem.record import Record
from ipygpumem.units import format_bytes


@dataclass(frozen=True)
class Advice(Record):
    """One thing that would save memory, and the line of code that does it."""

    kind: str
    device: str
    saves_bytes: int
    what: str
    """What takes the memory now, in words."""
    code: str
    """One line, for the notebook or the place that asked."""
    condition: str
    """When to do it and what changes, and how to avoid the same next time."""


@dataclass(frozen=True, repr=False)
class Advised(Record):
    """All advice of one moment, what saves most first."""

    advice: tuple[Advice, ...]
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    """What all of it would save on each device: bytes that several pieces of advice would free count once."""
    notes: tuple[str, ...] = ()
    """What was not looked at, in words for the user."""

    def __repr__(self) -> str:
        """Return one line: there may be much advice."""
        sizes = ", ".join(f"{device} {format_bytes(size)}" for device, size in self.device_bytes.items())
        return f"<Advised: {len(self.advice)} pieces of advice: {sizes or 'nothing to save'}>"


class Finding(NamedTuple):
    """A piece of advice before it is added up."""

    kind: str
    device: str
    shares: dict[StorageKey, int]
    """Bytes that it saves, by the storage that they are part of."""
    what: str
    code: str
    condition: str
