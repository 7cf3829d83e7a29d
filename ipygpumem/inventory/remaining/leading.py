"""Selects the objects from which a search through names goes on, and lists the contents of arrays
of objects, data frames, modules and classes.

From a list the search goes on to its items. A number leads to nothing, and a library's module to
everything: neither is a *leading object*.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import not_
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Kinds, by_identity, container_bases
from ipygpumem.heap.kinds.arrays import flat_elements, library_type, object_arrays, read_array
from ipygpumem.heap.knowledge.barriers import globals_among, types_not_entered
from ipygpumem.heap.paths.data_frame_steps import arrays_of_cells
from ipygpumem.introspect import ATOMS, class_dict, module_dict

LONGEST_SHORT = 100
"""Maximum length of a short container or array, of which a snapshot lists all items."""
MOST_ITEMS = 50_000
"""Maximum length of a container or array of which items are listed at all."""


def leading_objects(items: Sequence[Any]) -> list[Any]:
    """Return the items from which a search goes on, each once: no numbers and texts, and nothing
    that leads to everything, such as modules, classes and event loops.
    """
    return leading_among(Kinds(items))


def leading_among(kinds: Kinds) -> list[Any]:
    """Return the leading objects among some whose types have been read already, as
    ``leading_objects`` does.
    """
    types = kinds.examples.keys() - ATOMS
    if not types:
        return []
    # Only the attributes of named modules and classes are recorded.
    types -= kinds.derived_from(ModuleType, type, *types_not_entered())
    leading = by_identity(kinds.of_types(types))
    if id(dict) in types:
        for namespace in globals_among(list(leading.values())):
            del leading[id(namespace)]
    return list(leading.values())


def modules_and_classes(kinds: Kinds) -> Iterator[tuple[Any, dict[str, object]]]:
    """Yield each module and class among the objects, with its namespace."""
    for module in kinds.instances(ModuleType):
        yield module, module_dict(module)
    for kind in kinds.instances(type):
        yield kind, gc.get_referents(class_dict(kind))[0]


class ShortAndLong(NamedTuple):
    """Objects in two lists."""

    short: list[Any]
    """Containers with few items, and objects that are no containers."""
    long: list[Any]
    """Containers with many items."""


def short_and_long(kinds: Kinds, arrays_of_objects: Sequence[Any]) -> ShortAndLong:
    """Divide objects by their number of items.

    Args:
        kinds: the objects.
        arrays_of_objects: the arrays of objects among them, which count as containers.
    """
    items = kinds.items
    long = dict[int, object]()
    for array in arrays_of_objects:
        if _length_of(array) > LONGEST_SHORT:
            long[id(array)] = array
    for container in _long_containers(kinds):
        long[id(container)] = container
    if not long:
        return ShortAndLong(list(items), [])
    are_short = map(not_, map(long.__contains__, map(id, items)))
    return ShortAndLong(list(compress(items, are_short)), list(long.values()))


def _length_of(array: Any) -> int:
    """Return the number of elements of an array."""
    size: int = read_array("size", array)
    return size


def _long_containers(kinds: Kinds) -> list[Any]:
    """Return the containers among the objects that have many items: built-in ones, and those of
    derived classes.
    """
    types_by_base: dict[Any, set[int]] = {}
    for type_id, base in container_bases(kinds.examples).items():
        types_by_base.setdefault(base, set()).add(type_id)
    long = list[Any]()
    for base, type_ids in types_by_base.items():
        containers = kinds.of_types(type_ids)
        if max(map(base.__len__, containers)) <= LONGEST_SHORT:
            continue  # usually, so that no second loop is needed
        are_long = map(LONGEST_SHORT.__lt__, map(base.__len__, containers))
        long += compress(containers, are_long)
    return long


def arrays_of_objects(kinds: Kinds) -> list[Any]:
    """Return the NumPy arrays among the objects that refer to Python objects."""
    array_type = library_type("numpy", "ndarray")
    if array_type is None:
        return []
    arrays = kinds.instances(array_type)
    return object_arrays(arrays)


def data_frames(kinds: Kinds) -> list[Any]:
    """Return the data frames and series of pandas among the objects."""
    frame_type, series_type = library_type("pandas", "DataFrame"), library_type("pandas", "Series")
    if frame_type is None or series_type is None:
        return []
    return kinds.instances(frame_type, series_type)


def elements_of(array: Any) -> list[Any]:
    """Return the elements of an array of objects; none if they are too many."""
    if _length_of(array) > MOST_ITEMS:
        return []
    return flat_elements(array) or []


def elements_and_cells(arrays: Sequence[Any], frames: Sequence[object]) -> list[object]:
    """Return the elements of short arrays of objects, and the arrays that the cells of data frames
    are in: the collector lists neither as references.

    Args:
        arrays: the arrays of objects; long ones are left out.
        frames: the data frames.
    """
    contents = list[object]()
    for array in arrays:
        if _length_of(array) <= LONGEST_SHORT:
            contents += elements_of(array)
    for frame in frames:
        contents += arrays_of_cells(frame)
    return contents
