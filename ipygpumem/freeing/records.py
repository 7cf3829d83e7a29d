"""The records of memory that was given back by hand."""

from __future__ import annotations

from dataclasses import dataclass

from ipygpumem.model import Held, ReclaimStep
from ipygpumem.record import Record


@dataclass(frozen=True)
class ReleaseRecord(Record):
    """What became of an object that was released, and of what it held."""

    names: tuple[str, ...]
    where: str
    """The cell, or the script and its line."""
    freed: tuple[Held, ...]
    """The parts whose memory is gone, the largest first; in ``size_bytes`` that of the tensors and arrays that died."""
    left: tuple[Held, ...]
    """The parts, or what is left of them, that something else holds, and what that is."""
    workers: int
    """Child processes, as those of a data loader, that ended with it."""
    reclaimed: dict[str, int]
    """Per device, how far its memory fell: RSS for the host, live tensors for an accelerator."""
    steps: tuple[ReclaimStep, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """The memory of all tensors and arrays that are gone."""
        return sum(held.size_bytes for held in self.freed)


@dataclass(frozen=True)
class Room(Record):
    """What torch's allocator has of a device, and the largest block that it could hand out, at one moment."""

    device: str
    reserved_bytes: int
    largest_bytes: int | None
    """None where the allocator or the driver does not tell."""


@dataclass(frozen=True)
class PurgeRecord(Record):
    """What a purge moved off a device and back, and what was gained by it."""

    moved_bytes: int
    dropped_bytes: int
    """The optimizer's state, if it was not to be kept."""
    is_on_host: bool
    """Whether it did not fit any more, and so has stayed on the host."""
    before: tuple[Room, ...]
    after: tuple[Room, ...]
    notes: tuple[str, ...] = ()
