"""Finds memory of any kind that remains after an experiment: new objects, and the old objects that
keep them.

Two ways lead to them. The old objects within reach of a name are compared with their earlier
contents, text included. Elsewhere, new objects that the collector tracks count if an old object
refers to them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from ipygpumem.heap.arrays import NOT_ENTERED, TOOLS
from ipygpumem.heap.bulk import by_identity, kinds_of, of_types, one_of_each, types_of
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.data_frames import without_old_blocks
from ipygpumem.heap.holders.paths import PathWriter
from ipygpumem.heap.holders.roots import EVENT_LOOP, NOTEBOOK, REMOVE_THEM, Roots
from ipygpumem.heap.holders.tasks import cancelling, is_pending, pending
from ipygpumem.heap.sizes import Size, Sizes, row_of
from ipygpumem.introspect import module_of
from ipygpumem.inventory.contents import Contents, Received
from ipygpumem.inventory.merging import holder_of_all
from ipygpumem.records import ReferencePath, RetainedArray

_MOST_ROWS = 50
"""Maximum number of objects of one type in a container to list one by one."""
_MOST_MIXED = 100
"""Maximum number of small objects of several types whose holders are all searched."""
_NO_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, *NOT_ENTERED)


@dataclass(frozen=True)
class Remaining:
    """Some memory that remains, and where."""

    held: RetainedArray
    items: tuple[object, ...]
    """The objects, one of which the search for the holder starts from; keeps them alive."""
    name: str = ""
    chain: tuple[object, ...] = ()
    """The notebook's name that leads to the objects, and the objects on the way, if these are
    known.
    """
    is_old_perhaps: bool = False
    """True if older objects are too many to be sure that they do not hold the memory, too."""

    def holder(self, roots: Roots) -> ReferencePath:
        """Return the path from the name."""
        writer = PathWriter(roots, of_leaks=True)
        if len(self.items) == 1:
            return writer.holder_from_name(self.name, (*self.chain, self.items[0]))
        return writer.removal_of_items(self.name, self.chain, self.items)

    def to_search(self) -> Sequence[object]:
        """Return the objects whose holders are searched; of many below a name, none."""
        if self.chain and len(self.items) > 1:
            return ()
        if len(self.items) > _MOST_MIXED and len(types_of(self.items)) > 1:
            # No line removes them all, and the search takes half a minute after an import of sympy.
            return self.items[:1]
        return self.items

    def of_many(self, holders: Sequence[ReferencePath], roots: Roots) -> ReferencePath:
        """Return the holder of several objects without a name, given that of each."""
        if all(map(is_pending, self.items)):
            return ReferencePath(EVENT_LOOP, cancelling(self.items))
        if len(holders) == len(self.items):
            return holder_of_all(holders, roots.cuts)
        return ReferencePath(f"{holders[0].path}, and more", REMOVE_THEM)


def find(
    heap: Heap,
    names: Mapping[str, object],
    contents: Contents,
    new: set[int],
    *,
    elsewhere: Sequence[object],
    counted: Sizes,
    kept: Iterable[object],
    smallest: int,
    size_bytes: int,
) -> Iterator[Remaining]:
    """Yield the remaining memory, in no particular order.

    Args:
        heap: the live objects.
        names: the notebook's names and their objects.
        contents: what names held at the start.
        new: identities of the tracked objects made since, and maybe of some that have died.
        elsewhere: other new objects, to which no object of the heap refers.
        counted: has measured everything that is named already.
        kept: new objects of names that stay.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find; once so much has been found, the search ends.
    """
    counted.together(list(kept))
    received = _received(names, contents, new)
    inside = {id(item) for part in received for item in part.items}
    _measure_old(counted, names, inside.union(new))
    is_sure, left = counted.complete, size_bytes
    for part in received:
        # Asked once for all items: each question goes through all nodes.
        not_counted = counted.not_counted(set(map(id, part.items)))
        items = [item for item in part.items if id(item) in not_counted]
        for held, some in _rows(items, counted, smallest):
            left -= held.size_bytes
            yield Remaining(held, some, part.name, part.chain, not is_sure)
    if left < smallest:
        return
    not_counted = counted.not_counted(new)
    entries = without_old_blocks(_entries(heap, new, not_counted), new)
    entries += _pending_tasks(heap, not_counted)
    for held, some in _rows([*entries, *elsewhere], counted, smallest):
        left -= held.size_bytes
        yield Remaining(held, some, is_old_perhaps=not is_sure)
    if left >= smallest:
        in_arrays = heap.in_arrays(counted.not_counted(new))
        for held, some in _rows(in_arrays, counted, smallest):
            yield Remaining(held, some, is_old_perhaps=not is_sure)


def _received(names: Mapping[str, object], contents: Contents, new: set[int]) -> list[Received]:
    """Return the new objects in each old one; of two places, the one that a search for holders
    names comes first.
    """
    received = list(contents.received(dict(names), new))
    if new:  # a tracked object that is not among them is older, however deep inside it was
        for number, part in enumerate(received):
            items = [item for item in part.items if id(item) in new or not gc.is_tracked(item)]
            received[number] = part._replace(items=without_old_blocks(items, new))
    return sorted(received, key=lambda part: (len(part.chain), len(part.name), part.name))


class GrownRow(NamedTuple):
    """An old container that has grown, in words."""

    path: str
    size_bytes: int
    """Bytes that it has grown by."""
    items: str
    """The number of its items at the start and now, if it was not short."""
    line: str
    """The line that empties it, if it was short at the start."""


def grown(
    names: Mapping[str, object], contents: Contents, smallest: int, roots: Roots
) -> list[GrownRow]:
    """Return the old containers that have grown, the one that has grown most first."""
    writer = PathWriter(roots)
    rows = list[GrownRow]()
    for container in contents.grown(dict(names), smallest):
        path = writer.holder_from_name(container.name, container.chain).path
        path = path.removeprefix(NOTEBOOK)
        growth = container.grown
        line = growth.line_to_empty(path)
        rows.append(GrownRow(path, growth.size_bytes, growth.items, line))
    return sorted(rows, key=lambda row: -row.size_bytes)


def most_bytes(
    names: Mapping[str, object], contents: Contents, new: set[int], elsewhere: Sequence[object]
) -> int:
    """Return an upper bound of what ``find`` can find; costs little if that is little."""
    sizes, tracked = Sizes(), gc.get_objects()
    found = sizes.together(
        [item for one in contents.received(dict(names), new) for item in one.items]
    )
    are_new = list(map(new.__contains__, map(id, tracked)))
    sizes.pass_over(compress(map(id, tracked), map(not_, are_new)))
    return found + sizes.together([*compress(tracked, are_new), *elsewhere])


def _measure_old(counted: Sizes, names: Mapping[str, object], new: set[int]) -> None:
    """Count the memory behind the names, without passing through new objects."""
    with counted.passing_over(counted.not_counted(new)):
        counted.together(list(names.values()))


def _pending_tasks(heap: Heap, not_counted: set[int]) -> list[object]:
    """Return the new tasks that only the event loop keeps, by a future that wakes each of them."""
    return [task for task in pending(heap.tasks) if id(task) in not_counted]


def _entries(heap: Heap, new: set[int], not_counted: set[int]) -> list[object]:
    """Return the new objects, not counted yet, to which an old object refers.

    The age of a dict is uncertain: its new contents count instead.
    """
    entries = list[object]()
    waiting = heap.referred(not_counted, without=new)
    met = set(map(id, waiting))
    while waiting:
        dicts = of_types({id(dict)}, waiting)
        without_data = kinds_of(waiting, *_NO_DATA)
        without_data |= {key for key, item in one_of_each(waiting).items() if _is_tools(item)}
        entries += of_types(types_of(waiting) - without_data - {id(dict)}, waiting)
        inside = by_identity(gc.get_referents(*dicts))
        waiting = [inside[key] for key in inside.keys() & new if key not in met]
        met.update(map(id, waiting))
    return entries


def _is_tools(item: object) -> bool:
    return module_of(item).partition(".")[0] in TOOLS


def _rows(
    items: Sequence[object], counted: Sizes, smallest: int
) -> Iterator[tuple[RetainedArray, tuple[object, ...]]]:
    """Yield a row for each large object, one for many of a type, and one for the rest."""
    rest, size_of_rest = list[object](), 0
    for key in types_of(items):
        same = of_types({key}, items)
        for some in [same] if len(same) > _MOST_ROWS else [[item] for item in same]:
            found = counted.measure(some[0] if len(some) == 1 else some)
            if found.size_bytes >= smallest:
                yield row_of(some, found), tuple(some)
            else:
                rest += some
                size_of_rest += found.size_bytes
    if size_of_rest >= smallest:
        yield row_of(rest, Size({"cpu": size_of_rest})), tuple(rest)
