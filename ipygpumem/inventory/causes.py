"""Finds out why memory ran out, if figures from the moment of the error decide it."""

from __future__ import annotations

import gc
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

import psutil

from ipygpumem.heap.allowance import Allowance, AllowanceError
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.frames import stack
from ipygpumem.heap.knowledge.barriers import is_left_out
from ipygpumem.heap.region import Region
from ipygpumem.heap.sharing import partners, types_to_compare
from ipygpumem.introspect import is_users, is_users_class
from ipygpumem.inventory.findings import storages_of
from ipygpumem.inventory.top import take
from ipygpumem.probes import own_limits
from ipygpumem.probes.accelerators import in_use
from ipygpumem.probes.allocator import FailedAllocation, Snapshot, expandable_setting, snapshots
from ipygpumem.probes.nvml import Nvml, process_label
from ipygpumem.probes.segments import MOUNT
from ipygpumem.reclaim.failure import Failure
from ipygpumem.reclaim.frames import frames
from ipygpumem.records import Cause
from ipygpumem.units import MIB, format_bytes

_TIGHT = 16 * MIB
"""Maximum bytes left of a limit that refused a request of unknown size."""
_EDGES = 40 * MIB
"""Bytes of a gap that expandable segments may not free: a part of a page of 20 MiB at either end.
"""
_MAPPED = 32 * MIB
"""Size from which malloc maps each block on its own, so that freeing it returns address space."""
_MOST_NAMES, _MOST_FOLLOWED = 3, 100_000
_MOST_ON_HEAP = 2_000_000
"""Maximum number of allocated blocks for which the heap is searched: a third of a second."""
_NOT_SEARCHED = "; your variables were not searched for memory to free, to save time and memory"
_OUT_OF_SIGHT = {
    "globals",
    "locals",
    "vars",
    "eval",
    "exec",
    "user_ns",
    "__main__",
    "__globals__",
    "f_globals",
}
"""Names in code that may use any name."""


class Bound(NamedTuple):
    """A limit on this process."""

    left_bytes: int
    words: str
    remedy: str


class Holder(NamedTuple):
    """Processes or names without whose memory the device would have ``room_bytes``
    for one request.
    """

    kind: Literal["process", "names"]
    words: str
    size_bytes: int
    room_bytes: int
    remedy: str


@dataclass(frozen=True)
class Shortage:
    """Figures of one device, RAM or shared memory, when a request failed; None where unknown."""

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
    holders: tuple[Holder, ...] = ()


def cause_of(found: Shortage) -> Cause | None:
    """Return why a request failed; None if the figures do not decide it.

    A limit, gaps, a process or names are the cause if the request would have fit without them.

    >>> shortage = Shortage(
    ...     "cuda:0", requested_bytes=6 << 30, total_bytes=24 << 30, free_bytes=5 << 30
    ... )
    >>> cause_of(shortage).text
    'asked for 6.00 GiB, but 5.00 GiB of cuda:0 were free: 1.00 GiB too much'
    """
    if found.device == "shm":
        return _full(found)
    asked, free, total = found.requested_bytes, found.free_bytes, found.total_bytes
    least = min(found.bounds, default=None)
    if asked is None:
        is_tight = least is not None and least.left_bytes <= _TIGHT
        return _limit(found, least) if least is not None and is_tight else None
    if total is not None and _exceeds(asked, total):
        owner = "the machine" if found.device == "cpu" else found.device
        return Cause(
            "too large",
            found.device,
            f"{_request(asked)}, but {owner} has {format_bytes(total)} in all",
        )
    if least is not None and _exceeds(asked, least.left_bytes):
        return _limit(found, least)
    if free is None or found.overcommits or not _exceeds(asked, max(free, found.largest_gap_bytes)):
        return None
    if _exceeds(free + found.gap_bytes, asked):
        return _fragmentation(found, asked, free)
    is_too_much = _exceeds(asked, free + found.gap_bytes + found.idle_bytes)
    return _too_much(found, asked, free) if is_too_much else None


def _full(found: Shortage) -> Cause:
    total, free = (format_bytes(size or 0) for size in (found.total_bytes, found.free_bytes))
    text = f"{free} of the {total} of shared memory ({MOUNT}) were left: too little"
    return Cause(
        "shm",
        "shm",
        text,
        "start the container with a larger --shm-size, or use fewer DataLoader workers",
    )


def _limit(found: Shortage, bound: Bound) -> Cause:
    left, free, asked = format_bytes(bound.left_bytes), found.free_bytes or 0, found.requested_bytes
    if asked is None:
        return Cause(
            "limit", found.device, f"almost nothing was left of {bound.words}", bound.remedy
        )
    text = f"{_request(asked)}, but only {left} were left of {bound.words}"
    text += f", although {format_bytes(free)} of the machine were free" * _exceeds(free, asked)
    for holder in _solving(found, asked):
        return Cause("limit", found.device, f"{text}. {holder.words}", holder.remedy)
    return Cause("limit", found.device, text, bound.remedy)


def _fragmentation(found: Shortage, asked: int, free: int) -> Cause:
    together, largest = (
        format_bytes(free + found.gap_bytes),
        format_bytes(max(free, found.largest_gap_bytes)),
    )
    text = (
        f"{_request(asked)}, and {together} of {found.device} were free, but the largest block had "
        f"{largest}"
    )
    helps = found.setting and _exceeds(free + found.expandable_bytes, asked)
    line = f"restart the kernel and run first: %env {found.setting}"
    return Cause("fragmentation", found.device, f"{text}: fragmentation", line if helps else "")


def _too_much(found: Shortage, asked: int, free: int) -> Cause:
    text = (
        f"{_request(asked)}, but {format_bytes(free)} of {found.device} were free: "
        f"{format_bytes(asked - free)}"
    )
    for holder in _solving(found, asked):
        return Cause(holder.kind, found.device, f"{text} too much. {holder.words}", holder.remedy)
    return Cause("too much", found.device, f"{text} too much")


def _request(asked: int) -> str:
    return f"asked for {format_bytes(asked)}"


def _solving(found: Shortage, asked: int) -> list[Holder]:
    """Return the holders without whose memory the request would have fit, the largest first."""
    solving = [holder for holder in found.holders if _exceeds(holder.room_bytes, asked)]
    return sorted(solving, key=lambda holder: -holder.size_bytes)


def _exceeds(one: int, other: int) -> bool:
    """Return True if a size is larger for sure: messages round to three digits."""
    return one - other > (one + other) // 200


# -- figures of the moment ----------------------------------------------------------------------


def find(
    error: BaseException,
    failure: Failure,
    figures: FailedAllocation | None,
    namespace: dict[str, Any],
    source: str,
    named: Callable[[], dict[str, object]],
    cell_of: Callable[[str], str | None],
    allowance: Allowance,
) -> Cause | None:
    """Return why memory ran out, if figures decide it; call it before anything is freed.

    Args:
        error: the error.
        failure: what it is.
        figures: torch's, in its message.
        namespace: the notebook's names.
        source: the running cells, with magics.
        named: returns the names that may be deleted, with their objects.
        cell_of: returns the earlier cell that bound a name, in words; None if the running one did.
        allowance: the time and memory for a search of the names.
    """
    snapshot = None
    if figures is not None:
        with suppress(RuntimeError):  # an allocator without snapshots
            snapshot = snapshots("cuda").get(figures.device)
        found = _on_card(figures, snapshot)
    elif failure.place == "shm":
        usage = shutil.disk_usage(MOUNT)
        return cause_of(Shortage("shm", None, usage.total, usage.free))
    else:
        found = _on_host(failure.requested_bytes)
    cause, asked = cause_of(found), found.requested_bytes
    if asked is None or cause is None or cause.kind not in ("too much", "limit"):
        return cause
    least = _bytes_to_limit(found, figures)

    def room(size: int, gone: Collection[int]) -> int:
        """Return the largest request that fits once blocks of ``size`` bytes in all at some
        addresses are freed.
        """
        device = (
            (found.free_bytes or 0) + size
            if snapshot is None
            else _room(snapshot, found.free_bytes or 0, gone)
        )
        if found.overcommits:
            return (least or 0) + size
        return device if least is None else min(device, least + size)

    holders = [] if figures is None else list(_processes(found, least))
    is_searched = sys.getallocatedblocks() <= _MOST_ON_HEAP
    if is_searched:
        try:
            used = names_used(error, namespace, source, allowance)
            names = _leftovers(found, used, namespace, named, cell_of, room, allowance)
            if names is not None:
                holders.append(names)
        except AllowanceError:
            is_searched = False
    cause = cause_of(replace(found, holders=tuple(holders)))
    if cause is not None and not is_searched:
        cause = replace(cause, text=cause.text + _NOT_SEARCHED)
    return cause


def _bytes_to_limit(found: Shortage, figures: FailedAllocation | None) -> int | None:
    """Return the bytes that can be allocated before the nearest limit; None without a limit."""
    if figures is not None and figures.limit is not None:
        return figures.limit - figures.allocated - figures.unallocated
    return min((bound.left_bytes for bound in found.bounds), default=None)


def _on_host(requested: int | None) -> Shortage:
    memory, swap, bounds = psutil.virtual_memory(), psutil.swap_memory(), []
    for limit in own_limits.limits():
        what = (
            f"the {format_bytes(limit.limit_bytes)} of {own_limits.WHAT[limit.name]} that this "
            f"process may use"
        )
        bounds.append(
            Bound(limit.available_bytes, f"{what} ({limit.name})", own_limits.remedy(limit.name))
        )
    total, free = int(memory.total + swap.total), int(memory.available + swap.free)
    return Shortage("cpu", requested, total, free, sys.platform == "linux", tuple(bounds))


def _on_card(figures: FailedAllocation, snapshot: Snapshot | None) -> Shortage:
    """Return the figures of a card, with gaps that existed when the request failed, not those left
    by its frames.
    """
    found = Shortage(figures.device, figures.requested, figures.total, figures.free)
    if snapshot is None:
        return found
    is_small, pieces, elsewhere = figures.requested <= MIB, [], 0
    for segment in snapshot.segments:
        serves = not (segment.private or segment.stream) and segment.small == is_small
        free = sum(block.size_bytes for block in segment.blocks if block.state == "inactive")
        elsewhere += sum(block.size_bytes for block in segment.blocks if block.state == "pending")
        elsewhere += 0 if serves else free
        gaps = [size for size, is_whole in segment.free_pieces() if not is_whole] if serves else []
        pieces += [size for size in gaps if size < figures.requested]
    gap_bytes = max(0, min(sum(pieces), figures.unallocated - elsewhere))
    unknown = sum(pieces) - gap_bytes
    return replace(
        found,
        gap_bytes=gap_bytes,
        largest_gap_bytes=min(max(pieces, default=0), gap_bytes),
        idle_bytes=elsewhere,
        expandable_bytes=max(0, sum(max(0, size - _EDGES) for size in pieces) - unknown),
        setting=expandable_setting(),
    )


# -- memory without which the request would fit -------------------------------------------------


def _processes(found: Shortage, least: int | None) -> Iterator[Holder]:
    """Yield the largest other process on a card, and all of them if they are several."""
    with closing(Nvml()) as nvml:
        index = int(found.device.partition(":")[2])
        wide = nvml.device(in_use("cuda"), index, processes=True, has_context=True)
    listed = sorted(wide.other_processes, key=lambda item: -item[1])
    for number in sorted({min(1, len(listed)), len(listed)} - {0}):
        label, size = process_label(listed[0][0]), sum(used for _, used in listed[:number])
        room = (found.free_bytes or 0) + size
        remedy = "shut that kernel down" if "another kernel" in label else "end it if it is yours"
        words = f"{label} has {format_bytes(size)} of it"
        if number > 1:
            words, remedy = (
                f"{number} other processes have {format_bytes(size)} of it, {label} the most",
                "",
            )
        yield Holder("process", words, size, room if least is None else min(room, least), remedy)


def _leftovers(
    found: Shortage,
    used: set[str] | None,
    namespace: dict[str, Any],
    named: Callable[[], dict[str, object]],
    cell_of: Callable[[str], str | None],
    room: Callable[[int, Collection[int]], int],
    allowance: Allowance,
) -> Holder | None:
    """Return the names of earlier cells, without those ``used``, if deleting them makes enough
    room.
    """
    device, asked = found.device, found.requested_bytes or 0
    if used is None:
        return None
    lacking = (
        asked
        - found.gap_bytes
        - (min(found.bounds).left_bytes if found.bounds else found.free_bytes or 0)
    )
    rows = [
        row
        for row in take(named(), {}, progress=allowance.check).names
        if row.device_bytes.get(device)
    ]
    rows = [
        row
        for row in rows
        if (names := {row.name, *row.same}) <= namespace.keys() and not names & used
    ]
    cells = {row.name: cell for row in rows if (cell := cell_of(row.name)) is not None}
    rows = sorted(
        (row for row in rows if row.name in cells), key=lambda row: -row.device_bytes[device]
    )
    for number in range(1, len(rows[:_MOST_NAMES]) + 1):
        chosen = rows[:number]
        if sum(row.device_bytes[device] for row in chosen) < lacking:
            continue
        holding = [namespace[row.name] for row in chosen]
        freed = _freed(holding, [2 + len(row.same) for row in chosen], device, allowance)
        size = sum(freed.values())
        if _exceeds(left := room(size, freed), asked):
            held_by = " and ".join(f"{row.name}{cells[row.name]}" for row in chosen)
            words = (
                f"{format_bytes(size)} are still held by {held_by}, which this cell does not use"
            )
            deleted = ", ".join(name for row in chosen for name in (row.name, *row.same))
            return Holder("names", words, size, left, f"del {deleted}")
    return None


def _freed(
    holding: list[object], references: list[int], device: str, allowance: Allowance
) -> dict[int, int]:
    """Return the address and size of the blocks of a device that only these objects hold.

    Args:
        holding: the objects, in a list that our callers hold.
        references: the number of references to each one that do not count: of the list, and of its
            names.
        device: the device; of RAM, only blocks that return address space.
        allowance: the time and memory for it.
    """
    with undisturbed():
        region = Region(holding, allowance, keeps_folded=True, keeps_arrays=True)
        held = region.held_from_outside(dict(zip(map(id, holding), references, strict=True)))
        allowance.check()
        # after counting, because it refers to every object
        heap = Heap(types=types_to_compare())
        held |= partners(region, heap, held).keys()
        heap.drop()
        own = region.reach(map(id, holding)) - region.reach(held) if region.complete else set()
        storages = list(storages_of((array, "") for array in region.arrays_of(own)))
    least, shared = (_MAPPED, _shared_ranges()) if device == "cpu" else (0, [])
    return {
        one.address: one.size_bytes
        for one in storages
        if one.device == device
        and one.size_bytes >= least
        and not any(start <= one.address < end for start, end in shared)
    }


def _shared_ranges() -> list[tuple[int, int]]:
    """Return the addresses of shared mappings, which not all limits count."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = (line.split(maxsplit=2)[:2] for line in lines)
    return [
        (int(start, 16), int(end, 16))
        for span, flags in found
        if flags[3] == "s"
        for start, end in [span.split("-")]
    ]


def _plain(constants: tuple[object, ...]) -> list[object]:
    """Return the texts among a code's constants, also in tuples."""
    inner = [one for item in constants if type(item) is tuple for one in _plain(item)]
    return [item for item in constants if type(item) is str] + inner


def _room(snapshot: Snapshot, free: int, gone: Collection[int]) -> int:
    """Return the largest request that fits once the blocks at some addresses are freed."""
    largest = 0
    for segment in snapshot.segments:
        states = [
            (block.state == "inactive" or block.address in gone, block) for block in segment.blocks
        ]
        if segment.private or not any(block.address in gone for _, block in states):
            continue
        runs = [
            list(run)
            for is_free, run in itertools.groupby(states, key=lambda item: item[0])
            if is_free
        ]
        sizes = [sum(block.size_bytes for _, block in run) for run in runs]
        if segment.page_bytes is not None:
            free += sum(max(0, size - 2 * segment.page_bytes) for size in sizes)
        elif len(runs) == 1 and len(runs[0]) == len(states):
            free += sizes[0]
        else:
            largest = max(largest, *sizes)
    return max(free, largest)


def names_used(
    error: BaseException, namespace: dict[str, Any], source: str, allowance: Allowance
) -> set[str] | None:
    """Return the names that the failed code may use; None if it may use any.

    The code of each function of the notebook counts, since libraries may call it: methods that were
    added to their classes, magics, operators. So do words in its texts, as in ``frame.query("a <
    @limit")``.
    """
    all_frames = [*(frame for frame, _ in frames(error)), *stack(sys._getframe())]
    waiting: list[Any] = [frame.f_code for frame in all_frames if frame.f_globals is namespace]
    waiting += [frame.f_code for frame in all_frames if is_users(frame.f_code.co_filename)]
    waiting += [one for one in gc.get_referrers(namespace) if type(one) is FunctionType]
    words, seen = set(re.findall(r"\w+", source)), dict[int, object]()
    waiting += map(namespace.get, words & namespace.keys())
    while waiting and len(seen) < _MOST_FOLLOWED:
        allowance.check()
        item = waiting.pop()
        if id(item) in seen or item is namespace:
            continue
        seen[id(item)] = item
        if type(item) is CodeType:
            words |= {
                *item.co_names,
                *item.co_freevars,
                *re.findall(r"\w+", repr(_plain(item.co_consts))),
            }
            waiting += [one for one in item.co_consts if type(one) is CodeType]
            waiting += map(namespace.get, item.co_names)
        elif type(item) is FunctionType:
            waiting += [item.__code__] * (item.__globals__ is namespace)
            waiting += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        elif not is_left_out(item):
            waiting += [one for one in gc.get_referents(item) if gc.is_tracked(one)]
            waiting += [type(item)] * is_users_class(type(item))
    return None if waiting or words & _OUT_OF_SIGHT else words
