"""Finds memory of any kind that remains after an experiment: new objects, and the old objects that
keep them.

Two ways lead to them. The old objects within reach of a name are compared with their earlier
contents, text included. Elsewhere, new objects that the collector tracks count if an old object
refers to them.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
from ipygpumem.heap.sizes import Share, Size, Sizes, row_of
from ipygpumem.heap.tensors import ENDS_OF_STORAGES
from ipygpumem.introspect import type_name
from ipygpumem.inventory.contents import Contents, Received, leading_objects
from ipygpumem.inventory.growth import Grown
from ipygpumem.inventory.leftover import MANY_MODULES
from ipygpumem.inventory.merging import holder_of_all
from ipygpumem.records import SEVERAL_TYPES, RetainedArray

_MOST_ROWS = 50
"""Maximum number of objects of one type in a container to list one by one."""
_MOST_MIXED = 100
"""Maximum number of small objects of several types whose holders are all searched."""
MOST_SEARCHED = 20_000
"""Maximum number of objects whose holders are all searched at once."""
_MOST_PLACES = 4
"""Maximum number of places with few of a row's objects that a row leaves out."""
_LITTLE = 0.01
"""Maximum share of a row's bytes that it leaves out."""
_MOST_LABELS = 200
"""Maximum number of measurements that are compared with each other."""
_MOST_SHARED = 1_000_000
"""Maximum number of objects to examine behind an object that shares memory with another one."""
_LEVELS_NEAR_NAMES = 4
"""Steps from a name: a list, its items, the dicts of their attributes, and what is in these."""
_MOST_NEAR = 1_000_000
"""Number of objects near names from which no further ones are listed."""
_NO_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, *NOT_ENTERED)


@dataclass(frozen=True)
class Remaining:
    """Some memory that remains, and where."""

    record: RetainedArray
    """Its size, without name and holder."""
    items: tuple[object, ...]
    """The objects, one of which the search for the holder starts from; keeps them alive."""
    name: str = ""
    chain: tuple[object, ...] = ()
    """The notebook's name that leads to the objects, and the objects on the way, if these are
    known.
    """
    may_be_older: bool = False
    """True if older objects are too many to be sure that they do not hold the memory, too."""

    def row(self) -> Row:
        """Return the row whose holder leads to all objects."""
        return Row.of_objects(self.items)

    def largest_place(
        self, holders: Mapping[StorageKey, Holder], smallest: int
    ) -> Remaining | None:
        """Return the objects that one of their holders keeps, if these are many, and the rest is
        little: among thousands of lists in older records may be a list of a few names elsewhere.

        Args:
            holders: the holder of each object that was searched.
            smallest: minimum bytes of a row.
        """
        places = dict[int, list[object]]()
        for item in self.items:
            holder = holders.get(object_key(item))
            places.setdefault(id(holder), []).append(item)
        largest, *further = sorted(places.values(), key=len, reverse=True)
        is_divided = len(largest) > _MOST_ROWS and 1 <= len(further) <= _MOST_PLACES
        if not is_divided or self.record.parts:
            return None
        items = list(chain.from_iterable(further))
        size = Sizes(limit=_MOST_SHARED).measure(items)
        most_bytes_elsewhere = min(_LITTLE * self.record.size_bytes, smallest - 1)
        if size.is_at_least or size.size_bytes > most_bytes_elsewhere:
            return None
        size_bytes = self.record.size_bytes - size.size_bytes
        record = replace(self.record, size_bytes=size_bytes, objects=len(largest))
        return replace(self, record=record, items=tuple(largest))

    def from_name(self, roots: Roots) -> Holder:
        """Return the path from the name."""
        writer = PathWriter(roots, of_leaks=True)
        if len(self.items) == 1:
            return writer.holder_from_name(self.name, (*self.chain, self.items[0]))
        return writer.removal_of_items(self.name, self.chain, self.items)


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
        """Return the new objects in each old one.

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
        made = new_behind([*items_received, *near_names.values()], new)
    else:
        made = _all_new(heap, new)
    _measure_old(counted, _older_behind(made, items_received, changes), new_ids)
    search = _Search(counted, smallest, size_bytes)
    search.add_received(received)
    if search.is_done():
        return search.remaining
    not_counted = counted.not_counted(new)
    if only_near_names:
        held = [near_names[key] for key in near_names.keys() & not_counted]
    else:
        held = heap.referred(not_counted, without=new | _ours(heap))
    entries = without_old_blocks(_entries(held, new), new)
    entries += _pending_tasks(heap, not_counted)
    search.add_rows([*entries, *changes.elsewhere])
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
    search = _Search(Sizes(), smallest, size_bytes)
    search.add_received(_received_without_name(items))
    return search.remaining


class _Search:
    """A search for new objects, which ends once enough memory has been found.

    Args:
        counted: has measured everything that is named already, and the old objects.
        smallest: minimum bytes of a row.
        size_bytes: the memory to find.

    Attributes:
        remaining: the memory that was found.
    """

    def __init__(self, counted: Sizes, smallest: int, size_bytes: int) -> None:
        self.remaining: list[Remaining] = []
        self._counted = counted
        self._smallest = smallest
        self._left_bytes = size_bytes
        self._may_be_older = not counted.complete
        self._measured = 0
        """Number of measurements, each of which has its number as its label."""
        self._large: dict[str, int] = {}
        """The position in ``remaining`` of each object alone, by the label of its measurement."""
        self._with_row = set[int]()
        """The identities of the objects in ``remaining``."""
        self._scattered = list[object]()
        """Objects that are too small for a row where they are."""
        self._sizes_of_scattered = Counter[str]()
        """Their bytes, by type."""

    def is_done(self) -> bool:
        """Return True if less than a row's bytes are left to find."""
        return self._left_bytes < self._smallest

    def add_received(self, received: Iterable[Received]) -> None:
        """Add rows for the new objects in older ones."""
        for part in received:
            # Asked once for all items: each question goes through all nodes.
            not_counted = self._counted.not_counted(set(map(id, part.items)))
            items = list[object]()
            for item in part.items:
                if id(item) in not_counted or self._is_in_row(item):
                    items.append(item)
            self.add_rows(items, part.name, part.chain)
        self._add_scattered()

    def _is_in_row(self, item: object) -> bool:
        """Return True for an object that the row of another object has counted."""
        return self._counted.label_of(item) in self._large and id(item) not in self._with_row

    def add_rows(
        self, items: Sequence[object], name: str = "", chain: tuple[object, ...] = ()
    ) -> None:
        """Add a row for each large object, one for many of a type, and one for the rest.

        Args:
            items: new objects.
            name: the name that leads to them; empty if there is none.
            chain: the name's object, and the objects from it to the container of the items.
        """
        small = list[object]()
        sizes_of_small = Counter[str]()
        # An object with one reference is found twice: in the old object that has received it, and
        # among the new objects.
        unique = [item for key, item in by_identity(items).items() if key not in self._with_row]
        for key in types_of(unique):
            same = of_types({key}, unique)
            groups = [[item] for item in same]
            if len(same) > _MOST_ROWS:
                groups = [same]
            for group in groups:
                size, label = self._measure(group)
                if not self._is_added(group, size, label, name, chain):
                    small += group
                    sizes_of_small[type_name(group[0])] += size.size_bytes
        if sizes_of_small.total() >= self._smallest:
            self._add(row_of(small, _size_of_types(sizes_of_small)), small, name, chain)
        else:
            self._scattered += small
            self._sizes_of_scattered += sizes_of_small

    def _is_added(
        self,
        group: Sequence[object],
        size: Size,
        label: str,
        name: str,
        chain: tuple[object, ...],
    ) -> bool:
        """Add a row for some objects if they are large, or add an object to the row of another one
        that leads to the same memory; return False if they are small.
        """
        if size.size_bytes >= self._smallest:
            if len(group) == 1 and label:
                self._large[label] = len(self.remaining)
            self._add(row_of(group, size), group, name, chain)
            return True
        position = self._row_with_same_memory(group, size)
        if position is None:
            return False
        self._add_to_row(position, group[0], size, chain)
        return True

    def _add_scattered(self) -> None:
        """Add a row for each type of the objects that are small where they are, and large together:
        each of 60 older objects has received a list.
        """
        scattered, sizes = self._scattered, self._sizes_of_scattered
        self._scattered, self._sizes_of_scattered = [], Counter()
        mixed = list[object]()
        of_mixed = Counter[str]()
        for key in types_of(scattered):
            same = list(by_identity(of_types({key}, scattered)).values())
            of_type = Counter({type_name(same[0]): sizes[type_name(same[0])]})
            if of_type.total() >= self._smallest:
                self._add(row_of(same, _size_of_types(of_type)), same, "", ())
            else:
                mixed += same
                of_mixed += of_type
        if of_mixed.total() >= self._smallest:
            self._add(row_of(mixed, _size_of_types(of_mixed)), mixed, "", ())

    def _measure(self, group: Sequence[object]) -> tuple[Size, str]:
        """Return the memory of some objects that nothing has counted yet, and the label of the
        measurement; the label is empty after many measurements, each of which compares all labels.
        """
        self._measured += 1
        label = ""
        if self._measured <= _MOST_LABELS:
            label = str(self._measured)
        measured = group[0] if len(group) == 1 else group
        return self._counted.measure(measured, label), label

    def _add(
        self,
        row: RetainedArray,
        items: Sequence[object],
        name: str,
        chain: tuple[object, ...],
    ) -> None:
        """Add a row with its objects, which explains a part of the memory to find."""
        self._left_bytes -= row.size_bytes
        self._with_row.update(map(id, items))
        self.remaining.append(Remaining(row, tuple(items), name, chain, self._may_be_older))

    def _row_with_same_memory(self, group: Sequence[object], size: Size) -> int | None:
        """Return the position of the row of another object that leads to the same memory as an
        object alone; None if there is none.

        The memory is freed only without both. An example are the tuples of ``results.append((i,
        model))`` in a loop: only the first one's row has the model's bytes.
        """
        if len(group) > 1:
            return None
        labels = [*size.also_in, self._counted.label_of(group[0])]
        positions = [self._large[label] for label in labels if label in self._large]
        if not positions:
            return None
        # With the memory that other rows have counted; measured last, because it takes long.
        whole_size = Sizes(limit=_MOST_SHARED).measure(group[0])
        if whole_size.size_bytes < self._smallest:
            return None
        return positions[0]

    def _add_to_row(
        self, position: int, item: object, size: Size, chain: tuple[object, ...]
    ) -> None:
        """Add an object to the row of other ones."""
        row = self.remaining[position]
        items = (*row.items, item)
        name = row.name
        chain_of_row = row.chain
        if list(map(id, chain)) != list(map(id, row.chain)):
            name, chain_of_row = "", ()  # the search for holders finds each of them
        before = row.record
        sizes = Counter({before.type_name: before.size_bytes})
        if before.type_name == SEVERAL_TYPES:
            sizes = Counter(before.parts)
        sizes[type_name(item)] += size.size_bytes
        record = replace(
            row_of(items, _size_of_types(sizes)),
            size_bytes=before.size_bytes + size.size_bytes,
            device=before.device,
            is_at_least=before.is_at_least or size.is_at_least,
            uncounted=tuple(sorted({*before.uncounted, *size.uncounted})),
        )
        self._left_bytes -= size.size_bytes
        self._with_row.add(id(item))
        self.remaining[position] = replace(
            row, record=record, items=items, name=name, chain=chain_of_row
        )


def _size_of_types(sizes: Counter[str]) -> Size:
    """Return the memory of objects of several types, given the bytes of each type."""
    parts = list[Share]()
    for name, size_bytes in sizes.most_common():
        parts.append(Share(name, "items", name, 1, size_bytes))
    return Size({"cpu": sizes.total()}, tuple(parts))


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


def grown(
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
        made = [item for item in level if id(item) in new and id(item) not in visited]
        visited.update(map(id, made))
        yield made
        level = leading_objects(gc.get_referents(*made))


def _older_behind(
    made: Iterable[Sequence[object]], received: Sequence[object], changes: Changes
) -> list[object]:
    """Return the older objects to which new ones refer, such as the tail of a list after a new
    head, and the untracked data from before the experiment.

    Args:
        made: parts of the new objects.
        received: new objects that the collector may not track.
        changes: all that has come.
    """
    data = changes.contents.earlier
    older = by_identity(data.behind(received))
    for part in made:
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


def _entries(held: Sequence[object], new: set[int]) -> list[object]:
    """Return the new objects that may have data.

    The age of a dict is uncertain: its new contents count instead.

    Args:
        held: the new objects, not counted yet, to which an old object of another package refers.
        new: the identities of all new objects.
    """
    entries = list[object]()
    waiting = list(held)
    met = set(map(id, waiting))
    while waiting:
        data = types_of(waiting) - _types_without_data(waiting) - {id(dict)}
        entries += of_types(data, waiting)
        dicts = of_types({id(dict)}, waiting)
        in_dicts = by_identity(gc.get_referents(*dicts))
        waiting = [in_dicts[key] for key in in_dicts.keys() & new if key not in met]
        met.update(map(id, waiting))
    return entries


def _ours(heap: Heap) -> set[int]:
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
