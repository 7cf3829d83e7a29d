"""What a device's memory consists of, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ipygpumem.record import Record


@dataclass(frozen=True)
class Part(Record):
    """One of the parts that a device's memory consists of, and what the user can do about it."""

    name: str
    size_bytes: int | None
    """None where nobody knows it; then ``advice`` says why."""
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
