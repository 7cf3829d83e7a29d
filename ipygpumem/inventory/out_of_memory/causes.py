"""Decides from figures why memory ran out: a limit, gaps, a process, or names.

``cause_search.py`` collects the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ipygpumem.probes.segments import MOUNT
from ipygpumem.records import Cause
from ipygpumem.units import MIB, format_bytes

_MOST_BYTES_LEFT = 16 * MIB
"""Maximum bytes left of a limit that refused a request of unknown size."""


class Bound(NamedTuple):
    """A limit on this process."""

    left_bytes: int
    words: str
    """The limit in words, such as ``the 8 GiB of address space that this process may use``."""
    remedy: str
    """The line or words that raise it."""


class ProcessOrNames(NamedTuple):
    """Processes or names without whose memory the device could serve a request of
    ``room_bytes``.
    """

    kind: Literal["process", "names"]
    words: str
    """The sentence that names them with their memory."""
    size_bytes: int
    room_bytes: int
    remedy: str


@dataclass(frozen=True)
class Shortage:
    """Figures of one device, RAM or shared memory at the moment when a request failed; None where a
    figure is unknown.
    """

    device: str
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    overcommits: bool = False
    """True if the system grants more than is free, up to the total."""
    bounds: tuple[Bound, ...] = ()
    gap_bytes: int = 0
    """Free bytes between torch's tensors."""
    largest_gap_bytes: int = 0
    idle_bytes: int = 0
    """Bytes that torch keeps free for other streams and for graphs."""
    expandable_bytes: int = 0
    """Bytes of the gaps that expandable segments would free."""
    setting: str = ""
    """The setting for that; empty if this torch cannot, or already does."""
    holders: tuple[ProcessOrNames, ...] = ()


def cause_of(shortage: Shortage) -> Cause | None:
    """Return why a request failed; None if the figures do not decide it.

    A limit, gaps, a process or names are the cause if the request would have fit without them.

    >>> shortage = Shortage(
    ...     "cuda:0", requested_bytes=6 << 30, total_bytes=24 << 30, free_bytes=5 << 30
    ... )
    >>> cause_of(shortage).text
    'asked for 6.00 GiB, but 5.00 GiB of cuda:0 were free: 1.00 GiB too much'
    """
    if shortage.device == "shm":
        return _full_shared_memory(shortage)
    asked = shortage.requested_bytes
    nearest = min(shortage.bounds, default=None)
    if asked is None:
        if nearest is None or nearest.left_bytes > _MOST_BYTES_LEFT:
            return None
        return _beyond_limit(shortage, nearest)
    if shortage.total_bytes is not None and exceeds(asked, shortage.total_bytes):
        owner = "the machine" if shortage.device == "cpu" else shortage.device
        text = f"{_request(asked)}, but {owner} has {format_bytes(shortage.total_bytes)} in total"
        return Cause("too large", shortage.device, text)
    if nearest is not None and exceeds(asked, nearest.left_bytes):
        return _beyond_limit(shortage, nearest)
    if shortage.free_bytes is None or shortage.overcommits:
        return None
    return _cause_on_device(shortage, asked, shortage.free_bytes)


def _cause_on_device(shortage: Shortage, asked: int, free: int) -> Cause | None:
    """Return why a device could not serve a request: its free memory is in pieces, or there is too
    little of it. None if the figures say that the request fits.
    """
    if not exceeds(asked, max(free, shortage.largest_gap_bytes)):
        return None
    if exceeds(free + shortage.gap_bytes, asked):
        return _fragmentation(shortage, asked, free)
    if exceeds(asked, free + shortage.gap_bytes + shortage.idle_bytes):
        return _too_much(shortage, asked, free)
    return None


def _full_shared_memory(shortage: Shortage) -> Cause:
    """Return the cause of an error in full shared memory."""
    free = format_bytes(shortage.free_bytes or 0)
    total = format_bytes(shortage.total_bytes or 0)
    text = f"{free} of the {total} of shared memory ({MOUNT}) were left: too little"
    remedy = "start the container with a larger --shm-size, or use fewer DataLoader workers"
    return Cause("shm", "shm", text, remedy)


def _beyond_limit(shortage: Shortage, bound: Bound) -> Cause:
    """Return the cause of a request beyond a limit, with the largest process or names whose memory
    would have been enough, or else with the line that raises the limit.
    """
    asked = shortage.requested_bytes
    free = shortage.free_bytes or 0
    if asked is None:
        text = f"almost nothing was left of {bound.words}"
        return Cause("limit", shortage.device, text, bound.remedy)
    left_text = format_bytes(bound.left_bytes)
    text = f"{_request(asked)}, but only {left_text} were left of {bound.words}"
    if exceeds(free, asked):
        text += f", although {format_bytes(free)} of the machine were free"
    holder = _largest_sufficient_holder(shortage, asked)
    if holder is not None:
        return Cause("limit", shortage.device, f"{text}. {holder.words}", holder.remedy)
    return Cause("limit", shortage.device, text, bound.remedy)


def _fragmentation(shortage: Shortage, asked: int, free: int) -> Cause:
    """Return the cause of a request that fits into all free memory together, but into no single
    piece of it.
    """
    together = format_bytes(free + shortage.gap_bytes)
    largest = format_bytes(max(free, shortage.largest_gap_bytes))
    text = (
        f"{_request(asked)}, and {together} of {shortage.device} were free, but the largest block "
        f"had {largest}: fragmentation"
    )
    line = ""
    if shortage.setting and exceeds(free + shortage.expandable_bytes, asked):
        line = f"restart the kernel and run first: %env {shortage.setting}"
    return Cause("fragmentation", shortage.device, text, line)


def _too_much(shortage: Shortage, asked: int, free: int) -> Cause:
    """Return the cause of a request that is larger than all free memory, with the largest process
    or names whose memory would have been enough.
    """
    text = (
        f"{_request(asked)}, but {format_bytes(free)} of {shortage.device} were free: "
        f"{format_bytes(asked - free)} too much"
    )
    holder = _largest_sufficient_holder(shortage, asked)
    if holder is not None:
        return Cause(holder.kind, shortage.device, f"{text}. {holder.words}", holder.remedy)
    return Cause("too much", shortage.device, text)


def _request(asked: int) -> str:
    """Return the words ``asked for 6.00 GiB``."""
    return f"asked for {format_bytes(asked)}"


def _largest_sufficient_holder(shortage: Shortage, asked: int) -> ProcessOrNames | None:
    """Return the largest process or group of names without whose memory the request would have fit;
    None if none of them was large enough.
    """
    sufficient = [holder for holder in shortage.holders if exceeds(holder.room_bytes, asked)]
    return max(sufficient, key=lambda holder: holder.size_bytes, default=None)


def exceeds(size: int, other: int) -> bool:
    """Return True if a size is surely larger than another one. Figures in torch's messages have
    three digits, so that each may be wrong by half a percent.
    """
    return size - other > (size + other) // 200
