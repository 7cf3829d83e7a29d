"""Finds the new objects that an experiment may have left: all of them, or those near names.

After an import of many modules, most new objects are the libraries' own, in caches and in tables of
C++ code. Then only the new objects to which names lead are searched.
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
_CLASSES_WITHOUT_DATA = (
    ModuleType,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    *NOT_ENTERED,
)


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
        """Return the new objects to which an older object refers, except objects of this package.

        Args:
            identities: the new objects to ask about.
        """
        without = self._new_ids | self._ids_of_ours()
        return self._heap.referred(identities, without=without)

    def _ids_of_ours(self) -> set[int]:
        """Return the identities of this package's objects that refer to new ones: the recorders of
        cells, whose lists each cell changes, and the ends of storages that are watched.
        """
        our_ids = {id(ENDS_OF_STORAGES)}
        for part in chunks(self._heap.tracked):
            our_ids.update(map(id, recorders_of_cells(part)))
        return our_ids


class NewNearNames:
    """The new objects to which older objects near names refer, and the new objects behind these.

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
    """Return the new objects to which older objects refer that are at most a few references from
    names, by identity. It stops after ``_MOST_NEAR`` objects.
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
        # Behind a new object everything is new. But a dict may seem new and be older: the collector
        # tracks it once it gets a container.
        level = [
            item
            for item in leading_objects(unvisited)
            if id(item) not in near or type(item) is dict
        ]
    return near


def new_objects_behind(items: Sequence[object], new_ids: set[int]) -> Iterator[list[object]]:
    """Yield the new objects among the items, and those to which only new ones lead from there. They
    come in parts: first those among the items, then those one reference further, and so on.
    """
    visited = set[int]()
    level = leading_objects(items)
    while level:
        new_here = [item for item in level if id(item) in new_ids and id(item) not in visited]
        visited.update(map(id, new_here))
        yield new_here
        level = leading_objects(gc.get_referents(*new_here))


def objects_with_data(items: Sequence[object], new_ids: set[int]) -> list[object]:
    """Return the new objects that may keep data of the user, so that a row may name them: no
    functions, for example. A dict may be older than it seems, so the new objects in it are returned
    instead.

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
    types = kinds_of(items, *_CLASSES_WITHOUT_DATA)
    for type_id, example in one_of_each(items).items():
        if is_of_tool(example):
            types.add(type_id)
    return types
