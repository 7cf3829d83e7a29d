"""Finds new objects in long containers, whose items no snapshot lists one by one.

After ``rows.append(row)``, the recorded length and last item of a long list show that the row is
new. After ``rows[3] = row``, only the row's own age does: the collector's lists tell that of a
dict, and ``EarlierData`` that of a text or of a tuple of numbers.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse, islice, repeat
from typing import Any

from ipygpumem.heap.bulk import (
    ONCE_IN_LIST,
    Kinds,
    by_identity,
    chunks,
    ids_of,
    of_types,
    one_of_each,
    without_types,
)
from ipygpumem.heap.containers import APPENDED, CONTAINER_TYPES, UNTRACKED_TYPES
from ipygpumem.heap.kinds.arrays import has_objects, is_array, library_type
from ipygpumem.introspect import HEAP_TYPE, flags_of, is_users_class
from ipygpumem.inventory.remaining.earlier_data import EarlierData
from ipygpumem.inventory.remaining.growth import Extents, GrownContainer
from ipygpumem.inventory.remaining.leading import MOST_ITEMS, elements_of

_CONTAINERS_AT_ONCE = 20
"""Number of long containers whose items are listed at once: a million at most."""
_ORDERED_TYPES = set(map(id, APPENDED))
"""Types of containers with a last item."""
_TYPES_OF_RECORDS = {id(kind) for kind in (tuple, list, dict)}


class LongContainers:
    """The long containers of a snapshot, and arrays of objects, by identity; keeps none alive.

    A *record* is an item of such a container which has data itself: a row of a table as a tuple,
    list or dict, or an instance of a user's class. What is in records counts as in the container.

    Args:
        extents: receives the lengths of the items, and of what is in records.
        earlier: receives the untracked data among the items and in records.

    Attributes:
        ends: the length of each container, and the identity of its last item or key.
    """

    def __init__(self, extents: Extents, earlier: EarlierData) -> None:
        self.ends: dict[int, tuple[int, int]] = {}
        self._extents = extents
        self._earlier = earlier
        self._with_recorded_items = dict[int, None]()
        """Identities of the containers whose items were not too many to record."""

    def record_end(self, container: Any) -> None:
        """Record the length and the last item of one container, but nothing of its other items."""
        (self.ends[id(container)],) = _ends_of([container])

    def record(self, containers: Sequence[Any]) -> None:
        """Record the ends of containers; and the data among their items and the lengths of these,
        unless there are too many items.
        """
        self.ends.update(zip(map(id, containers), _ends_of(containers), strict=True))
        of_builtin_types = of_types(CONTAINER_TYPES, containers)
        to_list = [container for container in of_builtin_types if len(container) <= MOST_ITEMS]
        self._with_recorded_items.update(dict.fromkeys(ids_of(to_list)))
        for part in chunks(to_list, _CONTAINERS_AT_ONCE):
            items = gc.get_referents(*part)
            for objects in (items, _contents_of_records(items)):
                kinds = Kinds(objects)
                self._extents.add(kinds)
                self._earlier.add(kinds)

    def added_to_end_of(self, container: Any) -> list[object]:
        """Return the items added to the end of a container since its end was recorded; none if it
        was not long, or if its last item was replaced.
        """
        length_before, last_id_before = self.ends.get(id(container), (0, 0))
        was_long = length_before > 0
        if not was_long or id(type(container)) not in _ORDERED_TYPES:
            return []
        if len(container) <= length_before:
            return []
        last_before, *added = islice(container, length_before - 1, None)
        if id(last_before) != last_id_before:
            return []
        if type(container) is dict:
            return list(islice(container.values(), length_before, None))
        return added

    def new_data(
        self, containers: Iterable[Any], new_ids: Set[int], own_references: Mapping[int, int]
    ) -> list[object]:
        """Return the new untracked data in long containers, such as texts, and in their older
        records.

        Data with further holders is left out, because it may be older, such as the texts of a data
        frame. So is data in arrays, whose earlier texts are too many to be recorded.

        Args:
            containers: the long containers that are still alive.
            new_ids: identities of the tracked objects made since; nothing is returned without any.
            own_references: the number of our references to untracked objects, by identity.
        """
        data = list[object]()
        for container in filterfalse(is_array, containers):
            items = self._items_and_contents_of_records(container, new_ids)
            data += self._earlier.new_data_among(_without_shared(items, own_references))
        return data

    def new_arrays(
        self, containers: Iterable[Any], new_ids: Set[int], is_older: Callable[[object], bool]
    ) -> list[object]:
        """Return the new NumPy arrays in long containers, and in their older records.

        Args:
            containers: as for ``new_data``.
            new_ids: as for ``new_data``.
            is_older: returns True for an array that may be older.
        """
        array_type = library_type("numpy", "ndarray")
        new_arrays = list[object]()
        if array_type is None:
            return new_arrays
        for container in containers:
            items = self._items_and_contents_of_records(container, new_ids)
            arrays = by_identity(of_types({id(array_type)}, items))
            new_arrays += filterfalse(is_older, arrays.values())
        return new_arrays

    def new_containers(self, containers: Iterable[Any], new_ids: Set[int]) -> list[object]:
        """Return the new containers in long ones, and in their older records: the list ``[1, 2]``
        after ``rows[3] = [1, 2]``, or after ``rows[3]["tags"] = [1, 2]``. The arguments are those
        of ``new_data``.

        A new list or dict is in ``new_ids``. A tuple of numbers may be untracked, so it is
        recognised by ``EarlierData``.
        """
        new_containers = list[object]()
        for container in containers:
            items = self._items_and_contents_of_records(container, new_ids)
            inner_containers = of_types(CONTAINER_TYPES, items)
            tracked = [item for item in inner_containers if id(item) in new_ids]
            if is_array(container):
                new_containers += without_types({id(dict)}, tracked)
                continue
            # A dict is tracked once it gets a container, so that an older one may seem new.
            new_containers += self._earlier.new_among(tracked)
            new_containers += of_types(UNTRACKED_TYPES, self._earlier.new_data_among(items))
        return new_containers

    def _items_and_contents_of_records(self, container: Any, new_ids: Set[int]) -> list[object]:
        """Return the items of a long container, and the objects in the older records among them;
        nothing if its items were not recorded.

        A new record is new as a whole, so the objects in it are not listed.
        """
        if not new_ids:
            return []
        if has_objects(container):
            items = elements_of(container)
        elif id(container) in self._with_recorded_items and _can_be_listed(container):
            items = gc.get_referents(container)
        else:
            return []
        tracked = by_identity(list(filter(gc.is_tracked, items)))
        older = {key: tracked[key] for key in tracked.keys() - new_ids}
        # A dict is tracked once it gets a container, so that an older one may seem new.
        older.update(by_identity(self._earlier.possibly_earlier_among(items)))
        return [*items, *_contents_of_records(list(older.values()))]

    def with_grown_items(
        self, candidates: Sequence[Any], smallest: int, new_ids: Set[int]
    ) -> Iterator[GrownContainer]:
        """Yield the long containers whose items, or the containers in their records, have grown
        together.

        Only items that are long themselves are compared: after ``table["column"] += values``, the
        list ``table["column"]``.

        Args:
            candidates: objects among which the containers are.
            smallest: minimum bytes of the growth.
            new_ids: identities of the tracked objects made since.
        """
        for container in by_identity(of_types(CONTAINER_TYPES, candidates)).values():
            is_new = id(container) in new_ids and type(container) is not dict
            if id(container) not in self.ends or is_new or len(container) > MOST_ITEMS:
                continue
            items = gc.get_referents(container)
            grown_items = self._grown_containers_among(items)
            in_records = self._grown_containers_among(_contents_of_records(items))
            grown_items += with_grown_items(in_records, items, smallest=1, new_ids=new_ids)
            yield from with_grown_items(grown_items, [container], smallest, new_ids)

    def _grown_containers_among(self, items: Sequence[object]) -> list[GrownContainer]:
        """Return the containers among the items that were long, and have grown by any bytes."""
        return list(self._extents.grown_containers(self._extents.long_among(items), smallest=1))


def with_grown_items(
    grown_items: Sequence[GrownContainer],
    parents: Sequence[object],
    smallest: int,
    new_ids: Set[int],
) -> Iterator[GrownContainer]:
    """Yield the parents whose items have grown by at least ``smallest`` bytes together.

    Args:
        grown_items: items that have grown.
        parents: the objects that may refer to them.
        smallest: minimum bytes of the growth in one parent.
        new_ids: identities of the tracked objects made since: these have not grown.
    """
    bytes_by_item = {id(container.item): container.size_bytes for container in grown_items}
    if sum(bytes_by_item.values()) < smallest:
        return
    for parent in parents:
        if id(parent) in new_ids and type(parent) is not dict:  # a dict's age is uncertain
            continue
        grown_ids = bytes_by_item.keys() & set(map(id, gc.get_referents(parent)))
        size_bytes = sum(map(bytes_by_item.__getitem__, grown_ids))
        if size_bytes >= smallest:
            yield GrownContainer(
                parent, size_bytes, earlier_length=0, length=0, grown_items=len(grown_ids)
            )


def _ends_of(containers: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Return the end of each container: its length, and the identity of its last item or key, by
    which a replaced end is seen. A container without order, such as a set, has the identity of
    None.
    """
    ordered = by_identity(of_types(_ORDERED_TYPES, containers))
    lists = [container if id(container) in ordered else () for container in containers]
    last_items = map(next, map(reversed, lists), repeat(None))
    return zip(map(len, lists), map(id, last_items), strict=True)


def _can_be_listed(container: Any) -> bool:
    """Return True if the items of a container can be listed: it has not become too long, and it is
    no object of another kind at the address of a dead container.
    """
    return id(type(container)) in CONTAINER_TYPES and len(container) <= MOST_ITEMS


def _contents_of_records(items: Sequence[object]) -> list[object]:
    """Return the objects in the records among the items of a long container: in dicts, lists and
    tuples, and in the attributes of instances of the user's classes.
    """
    contents = gc.get_referents(*of_types(_TYPES_OF_RECORDS, items))
    users_types = set[int]()
    for type_id, example in one_of_each(items).items():
        kind = type(example)
        if flags_of(kind) & HEAP_TYPE and is_users_class(kind):
            users_types.add(type_id)
    attributes = gc.get_referents(*of_types(users_types, items))
    contents += gc.get_referents(*of_types({id(dict)}, attributes))
    contents += without_types({id(dict)}, attributes)
    return contents


def _without_shared(
    references: Sequence[object], own_references: Mapping[int, int]
) -> list[object]:
    """Return the objects that have no other holder than the container in which they were listed.

    Args:
        references: the objects, each as often as the container refers to it. No other variable may
            have this list.
        own_references: the number of our further references to objects, by identity.
    """
    counts = list(map(sys.getrefcount, references))
    occurrences = Counter(map(id, references))
    unshared = list[object]()
    for item, count in zip(references, counts, strict=True):
        # Each occurrence stands for two references: that of a holder, and that of the list.
        # ONCE_IN_LIST counts those of the first occurrence.
        of_further_occurrences = 2 * (occurrences[id(item)] - 1)
        known_references = ONCE_IN_LIST + of_further_occurrences + own_references.get(id(item), 0)
        if count <= known_references:
            unshared.append(item)
    return unshared
