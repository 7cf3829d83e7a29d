"""Finds names of earlier cells whose deletion makes enough room, and which the failed code does not
use.

After an out-of-memory error, the report says: ``6 GiB are still held by train_data (cell 3), which
this cell does not use``.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.knowledge.barriers import is_never_followed
from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sharing import partners, types_to_compare
from ipygpumem.introspect import is_users, is_users_class
from ipygpumem.inventory.devices.findings import storages_of
from ipygpumem.inventory.names.top import NamedSize, measure_names
from ipygpumem.inventory.out_of_memory.causes import ProcessOrNames, Shortage, exceeds
from ipygpumem.reclaim.frames import frames_of
from ipygpumem.units import MIB, format_bytes

_LEAST_MAPPED_BYTES = 32 * MIB
"""Size from which malloc maps each block on its own, so that freeing it returns address space."""
_MOST_NAMES = 3
"""Maximum number of names to delete."""
_MOST_FOLLOWED = 100_000
"""Maximum number of objects to examine for the names that code may use."""
_WORDS_FOR_ANY_NAME = {
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
"""Words in code that may use any name of the notebook, such as ``globals()["model"]``."""

RoomAfter = Callable[[int, Collection[int]], int]
"""Returns the largest request that fits once blocks of that size, at these addresses, are freed."""


@dataclass(frozen=True)
class FailedCode:
    """The code that ran out of memory, and the notebook's names.

    Attributes:
        error: the error.
        source: the running cells, with magics.
        namespace: the notebook's names.
        named: returns the names that may be deleted, with their objects.
        cell_of: returns the earlier cell that bound a name, in words; None if the running one did.
    """

    error: BaseException
    source: str
    namespace: dict[str, Any]
    named: Callable[[], dict[str, object]]
    cell_of: Callable[[str], str | None]


def unused_names(
    shortage: Shortage, code: FailedCode, room_after: RoomAfter, allowance: Allowance
) -> ProcessOrNames | None:
    """Return the fewest large names of earlier cells that the code does not use and whose deletion
    makes enough room; None if up to ``_MOST_NAMES`` of them are not enough.

    Raises:
        AllowanceError: the search takes too much time or memory.
    """
    used = names_used(code, allowance)
    if used is None:
        return None
    asked = shortage.requested_bytes or 0
    lacking = _lacking_bytes(shortage, asked)
    candidates = _candidates(shortage.device, code, used, allowance)
    # The largest name alone, if it is enough; else the two largest ones, and so on.
    for number in range(1, min(_MOST_NAMES, len(candidates)) + 1):
        chosen = candidates[:number]
        rows = [row for row, _ in chosen]
        if sum(row.device_bytes[shortage.device] for row in rows) < lacking:
            continue
        holding = [code.namespace[row.name] for row in rows]
        # That of the list, that of the name, and those of its other names do not count.
        references = [2 + len(row.same) for row in rows]
        freed_blocks = _freed_blocks(holding, references, shortage.device, allowance)
        size = sum(freed_blocks.values())
        room = room_after(size, freed_blocks)
        if exceeds(room, asked):
            return _holder_in_words(chosen, size, room)
    return None


def _holder_in_words(
    chosen: Sequence[tuple[NamedSize, str]], size: int, room: int
) -> ProcessOrNames:
    """Return the chosen names as a holder, in words, with the line that deletes them.

    Args:
        chosen: the names, each with its cell in words.
        size: the bytes that deleting them frees.
        room: the largest request that fits then.
    """
    held_by = list[str]()
    deleted = list[str]()
    for row, cell in chosen:
        held_by.append(f"{row.name}{cell}")
        deleted += [row.name, *row.same]
    names = " and ".join(held_by)
    words = f"{format_bytes(size)} are still held by {names}, which this cell does not use"
    return ProcessOrNames("names", words, size, room, f"del {', '.join(deleted)}")


def _lacking_bytes(shortage: Shortage, asked: int) -> int:
    """Return the minimum of bytes that have to be freed before a request of ``asked`` bytes
    fits.
    """
    available = shortage.free_bytes or 0
    if shortage.bounds:
        available = min(shortage.bounds).left_bytes
    return asked - shortage.gap_bytes - available


def _candidates(
    device: str, code: FailedCode, used: set[str], allowance: Allowance
) -> list[tuple[NamedSize, str]]:
    """Return the names of earlier cells with memory on a device, the largest first, each with its
    cell in words. Names that the code may use are left out.

    Args:
        device: the device.
        code: the failed code, with the notebook's names.
        used: the names that it may use.
        allowance: the time and memory for the search.
    """
    candidates = list[tuple[NamedSize, str]]()
    for row in measure_names(code.named(), {}, progress=allowance.check).names:
        names = {row.name, *row.same}
        if not row.device_bytes.get(device) or not names <= code.namespace.keys() or names & used:
            continue
        cell = code.cell_of(row.name)
        if cell is not None:
            candidates.append((row, cell))
    return sorted(candidates, key=lambda pair: -pair[0].device_bytes[device])


# -- the memory that deleting names frees ---------------------------------------------------------


def _freed_blocks(
    holding: list[object], references: list[int], device: str, allowance: Allowance
) -> dict[int, int]:
    """Return the blocks of a device that are freed if some objects lose their names: the size of
    each by its address.

    Args:
        holding: the objects, in a list that our callers hold.
        references: the number of references to each one that do not count: of the list, and of its
            names.
        device: the device; of RAM, only blocks that return address space.
        allowance: the time and memory for it.
    """
    with undisturbed():
        region = Region(holding, allowance, keeps_folded=True, keeps_arrays=True)
        own_references = dict(zip(map(id, holding), references, strict=True))
        held_outside = region.held_from_outside(own_references)
        allowance.check()
        # After counting, because it refers to every object.
        heap = Heap(types=types_to_compare())
        shared = partners(region, heap, held_outside)
        heap.drop()
        dying = set[Any]()
        if region.complete:
            dying = region.reach(map(id, holding)) - region.reach([*held_outside, *shared])
        arrays = region.arrays_of(dying)
        storages = list(storages_of((array, "") for array in arrays))
    blocks = {item.address: item.size_bytes for item in storages if item.device == device}
    if device == "cpu":
        return _blocks_that_return_space(blocks)
    return blocks


def _blocks_that_return_space(blocks: dict[int, int]) -> dict[int, int]:
    """Return the blocks of RAM whose address space malloc returns at once when they are freed.
    Smaller blocks stay a part of its heap, which counts against a limit.
    """
    shared = _shared_ranges()
    returned = dict[int, int]()
    for address, size in blocks.items():
        is_shared = any(start <= address < end for start, end in shared)
        if size >= _LEAST_MAPPED_BYTES and not is_shared:
            returned[address] = size
    return returned


def _shared_ranges() -> list[tuple[int, int]]:
    """Return the start and end of each shared mapping of this process: limits such as
    ``RLIMIT_DATA`` do not count shared memory.
    """
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    ranges = list[tuple[int, int]]()
    for line in lines:
        span, flags, _ = line.split(maxsplit=2)
        if flags[3] == "s":
            start, end = span.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


# -- the names that code uses ---------------------------------------------------------------------


def names_used(code: FailedCode, allowance: Allowance) -> set[str] | None:
    """Return the names that the failed code may use; None if it may use any.

    The code of each function of the notebook counts, since libraries may call it: as a method of a
    class, as a magic, as an operator. So do words in texts of code, as in
    ``frame.query("a < @limit")``.
    """
    namespace = code.namespace
    words = set(re.findall(r"\w+", code.source))
    """The words in code and texts, some of which are names."""
    waiting: list[Any] = list(_running_code(code))
    # The notebook's functions refer to its namespace as their globals.
    waiting += [item for item in gc.get_referrers(namespace) if type(item) is FunctionType]
    waiting += map(namespace.get, words & namespace.keys())
    followed = dict[int, object]()
    while waiting and len(followed) < _MOST_FOLLOWED:
        allowance.check()
        item = waiting.pop()
        if id(item) in followed or item is namespace:
            continue
        followed[id(item)] = item
        if type(item) is CodeType:
            words |= _names_and_words(item)
            waiting += map(namespace.get, item.co_names)
        waiting += _run_with(item, namespace)
    if waiting or words & _WORDS_FOR_ANY_NAME:  # too much to follow, or code that may use any name
        return None
    return words


def _run_with(item: Any, namespace: dict[str, Any]) -> Iterator[object]:
    """Yield the objects whose code may run if an object is used: the functions inside code, a
    function's code and default arguments, the attributes and the class of an object.

    Args:
        item: the object.
        namespace: the notebook's names; only functions that use these have code that counts.
    """
    if type(item) is CodeType:
        yield from (part for part in item.co_consts if type(part) is CodeType)
    elif type(item) is FunctionType:
        if item.__globals__ is namespace:
            yield item.__code__
        yield from (item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__)
    elif not is_never_followed(item):
        yield from filter(gc.is_tracked, gc.get_referents(item))
        if is_users_class(type(item)):
            yield type(item)


def _running_code(code: FailedCode) -> Iterator[CodeType]:
    """Yield the code of the notebook and of the user's files that has failed, and that is
    running.
    """
    of_error = frames_of(code.error)
    for frame in [*of_error, *stack(sys._getframe())]:
        if frame.f_globals is code.namespace or is_users(frame.f_code.co_filename):
            yield frame.f_code


def _names_and_words(code: CodeType) -> set[str]:
    """Return the names in code, and the words in its texts."""
    texts = " ".join(_texts(code.co_consts))
    return {*code.co_names, *code.co_freevars, *re.findall(r"\w+", texts)}


def _texts(constants: Sequence[object]) -> Iterator[str]:
    """Yield the texts among a code's constants, also in tuples."""
    for item in constants:
        if type(item) is str:
            yield item
        elif type(item) is tuple:
            yield from _texts(item)
