"""Finds the new objects that may be left of an experiment: all of them, or those near names.

After an import of many modules, most new objects are the libraries' own, in caches and in tables
of C++ code. Then only the new objects that names lead to are searched.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from ipygpumem.heap.bulk import by_identity, chunks, kinds_of, of_types, one_of_each, types_of
from ipygpumem.heap.kinds.tensors import ENDS_OF_STORAGES
from ipygpumem.heap.knowledge.barriers import NOT_ENTERED, is_of_tool, recorders_of_cells
from ipygpumem.heap.live.heap import Heap
from ipygpumem.inventory.remaining.leading import leading_objects

_LEVELS_NEAR_NAMES = 4
"""Steps from a name: a list, its items, the dicts of their attributes, and what is in these."""
_MOST_NEAR = 1_000_000
"""Number of objects near names from which no further ones are listed."""
_NO_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, *NOT_ENTERED)


class AllNewObjects:
    """All new objects that the collector tracks.

    Args:
        heap: the live objects.
        new_ids: identities of the tracked objects made since the start.
    """

    def __init__(self, heap: Heap, new_ids: set[int]) -> None:
        self._heap = heap
        self._new_ids = new_ids

    def parts(self) -> Iterator[list[object]]:
        """Yield the new objects in parts."""
        for part in chunks(self._heap.tracked):
            yield list(compress(part, map(self._new_ids.__contains__, map(id, part))))

    def in_older_objects(self, identities: set[int]) -> list[object]:
        """Return the new objects to which an older one refers that is not ours.

        Args:
            identities: the new objects to ask about.
        """
        without = self._new_ids | self._ids_of_ours()
        return self._heap.referred(identities, without=without)

    def _ids_of_ours(self) -> set[int]:
        """Return the identities of this package's objects: each cell changes their lists, and the
        end watches storages.
        """
        ours = {id(ENDS_OF_STORAGES)}
        for part in chunks(self._heap.tracked):
            ours.update(map(id, recorders_of_cells(part)))
        return ours


class NewNearNames:
    """The new objects that older ones near names keep, and the new ones behind these.

    Args:
        names: the names and their objects.
        new_ids: identities of the tracked objects made since the start.
        received: new objects in old ones, which the collector may not track.
    """

    def __init__(
        self, names: Mapping[str, object], new_ids: set[int], received: Sequence[object]
    ) -> None:
        self._near_names = _new_near_names(names, new_ids)
        self._new_ids = new_ids
        self._received = received

    def parts(self) -> Iterator[list[object]]:
        """Yield the new objects in parts."""
        return new_objects_behind([*self._received, *self._near_names.values()], self._new_ids)

    def in_older_objects(self, identities: set[int]) -> list[object]:
        """Return the new objects to which an older one near a name refers.

        Args:
            identities: the new objects to ask about.
        """
        return [self._near_names[key] for key in self._near_names.keys() & identities]


def _new_near_names(names: Mapping[str, object], new_ids: set[int]) -> dict[int, object]:
    """Return the new objects to which older ones refer that are a few references from names, by
    identity, as far as a limit allows.
    """
    near = dict[int, object]()
    visited = set[int]()
    level = leading_objects(list(names.values()))
    for _ in range(_LEVELS_NEAR_NAMES):
        below = by_identity(gc.get_referents(*level))
        near.update({key: below[key] for key in below.keys() & new_ids})
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


def new_objects_behind(items: Sequence[object], new_ids: set[int]) -> Iterator[list[object]]:
    """Yield the new objects among the items, and those to which only new ones lead from there, in
    parts: one for each number of references from the items.
    """
    visited = set[int]()
    level = leading_objects(items)
    while level:
        new_here = [item for item in level if id(item) in new_ids and id(item) not in visited]
        visited.update(map(id, new_here))
        yield new_here
        level = leading_objects(gc.get_referents(*new_here))


def objects_with_data(items: Sequence[object], new_ids: set[int]) -> list[object]:
    """Return the new objects that may have data: no functions, for example, and instead of dicts
    the new objects in these, because the age of a dict is uncertain.

    Args:
        items: new objects in older ones.
        new_ids: identities of all new objects.
    """
    objects = list[object]()
    unread = list(items)
    read_ids = set(map(id, unread))
    while unread:
        types_with_data = types_of(unread) - _types_without_data(unread) - {id(dict)}
        objects += of_types(types_with_data, unread)
        dicts = of_types({id(dict)}, unread)
        in_dicts = by_identity(gc.get_referents(*dicts))
        unread = [in_dicts[key] for key in in_dicts.keys() & new_ids if key not in read_ids]
        read_ids.update(map(id, unread))
    return objects


def _types_without_data(items: Sequence[object]) -> set[int]:
    """Return the types of items that keep no data of the user, such as functions and tools."""
    types = kinds_of(items, *_NO_DATA)
    for type_id, example in one_of_each(items).items():
        if is_of_tool(example):
            types.add(type_id)
    return types
