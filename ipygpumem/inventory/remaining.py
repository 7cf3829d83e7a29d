"""Finds memory of any kind that remains after an experiment: new objects, and the old objects that
keep them.

Two ways lead to them. The old objects within reach of a name are compared with their earlier
contents, text included. Elsewhere, new objects that the collector tracks count if an old object
refers to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter, not_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from ipygpumem.heap.arrays import StorageKey, object_key
from ipygpumem.heap.bulk import by_identity, chunks, kinds_of, of_types, one_of_each, types_of
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.knowledge.barriers import NOT_ENTERED, is_of_tool, recorders_of_cells
from ipygpumem.heap.knowledge.tasks import is_pending, pending
from ipygpumem.heap.paths.data_frame_steps import without_old_blocks
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import EVENT_LOOP, NOTEBOOK, Roots
from ipygpumem.heap.paths.task_endings import cancelling
from ipygpumem.heap.sizes import Sizes
from ipygpumem.heap.tensors import ENDS_OF_STORAGES
from ipygpumem.inventory.contents import Contents, Received
from ipygpumem.inventory.growth import Grown
from ipygpumem.inventory.leading import leading_objects
from ipygpumem.inventory.leftover import MANY_MODULES
from ipygpumem.inventory.merging import holder_of_all
from ipygpumem.inventory.remaining_rows import Remaining, RemainingRows

_MOST_MIXED = 100
"""Maximum number of small objects of several types whose holders are all searched."""
MOST_SEARCHED = 20_000
"""Maximum number of objects whose holders are all searched at once."""
_LEVELS_NEAR_NAMES = 4
"""Steps from a name: a list, its items, the dicts of their attributes, and what is in these."""
_MOST_NEAR = 1_000_000
"""Number of objects near names from which no further ones are listed."""
_NO_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, *NOT_ENTERED)


def is_searched_together(items: Sequence[object], number_searched: int) -> bool:
    """Return True if one search finds the holders of all objects of a row of several.

    Args:
        items: the objects.
        number_searched: the number of objects of other rows that it searches.
    """
    if len(items) > _MOST_MIXED and len(types_of(items)) > 1:
        # No line removes them all, and the search takes half a minute after an import of sympy.
        return False
    return 1 < len(items) <= MOST_SEARCHED - number_searched


def holder_of_several(
    items: Sequence[object],
    row: Row | None,
    holders: Mapping[StorageKey, Holder],
) -> Holder:
    """Return the holder of several objects.

    Args:
        items: the objects.
        row: their row, whose holder may lead to all of them; None if they are too many.
        holders: the holder of each object that was searched.
    """
    if all(map(is_pending, items)):
        return Holder(EVENT_LOOP, Remedy(cancelling(items)))
    first = holders[object_key(items[0])]
    and_more = replace(first, path=f"{first.path}, and more", remedy=REMOVE_THEM)
    if row is None:
        return and_more
    if row.is_whole and first.remedy != REMOVE_THEM:
        return first
    of_items = dict[int, Holder]()
    for item in items:
        holder = holders.get(object_key(item))
        if holder is None:
            return and_more
        of_items[id(holder)] = holder
    return holder_of_all(list(of_items.values()))


class Changes(NamedTuple):
    """The notebook's names, and all that has come since the start of an experiment."""

    names: Mapping[str, object]
    """The names and their objects."""
    contents: Contents
    """The contents of the names at the start."""
    new: set[int]
    """Identities of the tracked objects made since, and maybe of some that have died."""
    elsewhere: Sequence[object]
    """Other new objects, to which no object of the heap refers."""
    modules: int = 0
    """Number of modules that were imported."""
    is_older_array: Callable[[object], bool] | None = None
    """Returns True for a NumPy array that may be older; None if that is not known of any."""
    kept: Set[int] = frozenset()
    """Identities of objects that names keep on purpose; none of them is in ``new``."""
    in_new_memory: Sequence[object] = ()
    """Arrays and texts in older objects, which are new by their addresses."""

    def received(self, heap: Heap | None = None) -> list[Received]:
        """Return the new objects in each old one to which a name leads, and new ones in unknown old
        ones.

        Args:
            heap: the live objects, if a ``Heap`` has been made: it refers to them, too, which is no
                reference of the user's code.
        """
        own_references = None if heap is None else heap.own_references()
        received = self.contents.received(
            dict(self.names), self.new, own_references, self.is_older_array
        )
        return [*received, *_received_without_name(self.in_new_memory)]


def _received_without_name(items: Sequence[object]) -> list[Received]:
    """Return new objects, if there are any, as received by unknown older ones."""
    return [Received("", (), list(items))] if items else []


def find_remaining(
    heap: Heap,
    changes: Changes,
    *,
    counted: Sizes,
    smallest: int,
    size_bytes: int,
) -> list[Remaining]:
    """Return the remaining memory, in no particular order.

    Args:
        heap: the live objects.
        changes: what has come since the start.
        counted: has measured everything that is named already.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find; once so much has been found, the search ends.
    """
    counted.pass_over(changes.kept)
    new = changes.new
    received = _without_older(changes, heap)
    items_received = list(chain.from_iterable(part.items for part in received))
    new_ids = new | set(map(id, items_received))
    _measure_old(counted, list(changes.names.values()), new_ids)
    # Libraries make many objects when they are imported, and keep them in caches of their own, or
    # in tables of C++ code, as torch does: then only new objects that names lead to are searched.
    only_near_names = changes.modules >= MANY_MODULES
    if only_near_names:
        near_names = _new_near_names(changes)
        new_parts = new_behind([*items_received, *near_names.values()], new)
    else:
        new_parts = _all_new(heap, new)
    _measure_old(counted, _older_behind(new_parts, items_received, changes), new_ids)
    search = RemainingRows(counted, smallest, size_bytes)
    search.add_received(received)
    if search.is_done():
        return search.remaining
    not_counted = counted.not_counted(new)
    if only_near_names:
        in_older = [near_names[key] for key in near_names.keys() & not_counted]
    else:
        in_older = heap.referred(not_counted, without=new | _ids_of_ours(heap))
    remaining = without_old_blocks(_objects_with_data(in_older, new), new)
    remaining += _pending_tasks(heap, not_counted)
    search.add_rows([*remaining, *changes.elsewhere])
    if not search.is_done():
        search.add_rows(heap.in_arrays(counted.not_counted(new)))
    return search.remaining


def remaining_in_new_memory(
    items: Sequence[object], smallest: int, size_bytes: int
) -> list[Remaining]:
    """Return the memory of arrays and texts that are new by their addresses; much faster than
    ``find_remaining``.

    Args:
        items: the arrays and texts.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find.
    """
    search = RemainingRows(Sizes(), smallest, size_bytes)
    search.add_received(_received_without_name(items))
    return search.remaining


def _without_older(changes: Changes, heap: Heap) -> list[Received]:
    """Return the new objects in each old one; of two places, the one that a search for holders
    names comes first.
    """
    new = changes.new
    received = changes.received(heap)
    if new:
        for number, part in enumerate(received):
            received[number] = part._replace(items=without_old_blocks(part.items, new))
    return sorted(
        received, key=lambda part: (not part.name, len(part.chain), len(part.name), part.name)
    )


class GrownRow(NamedTuple):
    """An old container that has grown, in words."""

    path: str
    size_bytes: int
    """Bytes that it has grown by."""
    items: str
    """The number of its items at the start and now, if it was not short."""
    line: str
    """The line that empties it, if it was short at the start."""
    grown: Grown | None = None
    """The container; None in later looks."""


def rows_of_grown_containers(
    names: Mapping[str, object],
    contents: Contents,
    smallest: int,
    roots: Roots,
    made: Set[int],
) -> list[GrownRow]:
    """Return the old containers that have grown, the one that has grown most first.

    Args:
        names: the names and their objects.
        contents: the contents of the names at the start.
        smallest: minimum bytes of each.
        roots: the names and objects from which the user can reach objects.
        made: identities of the tracked objects made since the start.
    """
    writer = PathWriter(roots)
    rows = list[GrownRow]()
    # All of them first: writing a path may give an object a dict, through which it then refers.
    for container in list(contents.grown(dict(names), smallest, made)):
        path = writer.holder_from_name(container.name, container.chain).path
        path = path.removeprefix(NOTEBOOK)
        growth = container.grown
        line = growth.line_to_empty(path)
        rows.append(GrownRow(path, growth.size_bytes, growth.items, line, growth))
    return sorted(rows, key=attrgetter("size_bytes"), reverse=True)


def most_bytes(changes: Changes) -> int:
    """Return an upper bound of what ``find_remaining`` can find; costs little if that is little."""
    sizes = Sizes()
    sizes.pass_over(changes.kept)
    tracked = gc.get_objects()
    received = list[object]()
    for part in changes.received():
        received += part.items
    received_bytes = sizes.together(received)
    are_new = list(map(changes.new.__contains__, map(id, tracked)))
    sizes.pass_over(compress(map(id, tracked), map(not_, are_new)))
    new_objects = compress(tracked, are_new)
    return received_bytes + sizes.together([*new_objects, *changes.elsewhere])


def _measure_old(counted: Sizes, objects: Sequence[object], new: set[int]) -> None:
    """Count the memory behind some objects, without passing through new ones."""
    with counted.passing_over(counted.not_counted(new)):
        counted.pass_through(objects)


def _all_new(heap: Heap, new: set[int]) -> Iterator[list[object]]:
    """Yield the new objects in parts."""
    for part in chunks(heap.tracked):
        yield list(compress(part, map(new.__contains__, map(id, part))))


def new_behind(items: Sequence[object], new: set[int]) -> Iterator[list[object]]:
    """Yield the new ones among some objects, and those to which only new ones lead from there, in
    parts.
    """
    visited = set[int]()
    level = leading_objects(items)
    while level:
        new_here = [item for item in level if id(item) in new and id(item) not in visited]
        visited.update(map(id, new_here))
        yield new_here
        level = leading_objects(gc.get_referents(*new_here))


def _older_behind(
    new_parts: Iterable[Sequence[object]], received: Sequence[object], changes: Changes
) -> list[object]:
    """Return the older objects to which new ones refer, such as the tail of a list after a new
    head, and the untracked data from before the experiment.

    Args:
        new_parts: the new objects, in parts.
        received: new objects that the collector may not track.
        changes: all that has come.
    """
    data = changes.contents.earlier
    older = by_identity(data.behind(received))
    for part in new_parts:
        referents = gc.get_referents(*part)
        are_older = map(not_, map(changes.new.__contains__, map(id, referents)))
        for item in filter(gc.is_tracked, compress(referents, are_older)):
            older[id(item)] = item
        older.update(by_identity(data.behind(referents)))
    return list(older.values())


def _new_near_names(changes: Changes) -> dict[int, object]:
    """Return the new objects to which older ones refer that are a few references from names, by
    identity, as far as a limit allows.
    """
    near = dict[int, object]()
    visited = set[int]()
    level = leading_objects(list(changes.names.values()))
    for _ in range(_LEVELS_NEAR_NAMES):
        below = by_identity(gc.get_referents(*level))
        near.update({key: below[key] for key in below.keys() & changes.new})
        unvisited = [below[key] for key in below.keys() - visited]
        visited.update(map(id, unvisited))
        if len(visited) > _MOST_NEAR:
            break
        # An older dict may seem new.
        level = [
            item
            for item in leading_objects(unvisited)
            if id(item) not in near or type(item) is dict
        ]
    return near


def _pending_tasks(heap: Heap, not_counted: set[int]) -> list[object]:
    """Return the new tasks that only the event loop keeps, by a future that wakes each of them."""
    return [task for task in pending(heap.tasks) if id(task) in not_counted]


def _objects_with_data(in_older: Sequence[object], new: set[int]) -> list[object]:
    """Return the new objects that may have data.

    The age of a dict is uncertain: its new contents count instead.

    Args:
        in_older: the new objects, not counted yet, to which an old object refers that is not ours.
        new: the identities of all new objects.
    """
    objects = list[object]()
    waiting = list(in_older)
    met = set(map(id, waiting))
    while waiting:
        data = types_of(waiting) - _types_without_data(waiting) - {id(dict)}
        objects += of_types(data, waiting)
        dicts = of_types({id(dict)}, waiting)
        in_dicts = by_identity(gc.get_referents(*dicts))
        waiting = [in_dicts[key] for key in in_dicts.keys() & new if key not in met]
        met.update(map(id, waiting))
    return objects


def _ids_of_ours(heap: Heap) -> set[int]:
    """Return the identities of this package's objects: each cell changes their lists, and the end
    watches storages.
    """
    ours = {id(ENDS_OF_STORAGES)}
    for part in chunks(heap.tracked):
        ours.update(map(id, recorders_of_cells(part)))
    return ours


def _types_without_data(items: Sequence[object]) -> set[int]:
    """Return the types of items that keep no data of the user, such as functions and tools."""
    types = kinds_of(items, *_NO_DATA)
    for key, item in one_of_each(items).items():
        if is_of_tool(item):
            types.add(key)
    return types
