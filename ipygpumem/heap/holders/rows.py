"""Names one holder for a row of several arrays: the nearest object that leads to all of them.

Of the 40 arrays in ``runs = {"losses": [...]}``, it is the list, not the dict around it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.containers import CONTAINERS
from ipygpumem.heap.holders.limited_walk import LimitedWalk
from ipygpumem.heap.holders.referrer_graph import Steps
from ipygpumem.heap.kinds.arrays import (
    StorageKey,
    described,
    is_array,
    is_of_library,
    is_of_pandas,
    memory_key,
    object_key,
    other_owner_of,
)
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.items_and_attributes import items_of
from ipygpumem.introspect import instance_dict, is_atom, is_exactly, is_instance, type_name

_OTHER_SHARE = 0.1
"""Maximum share of other arrays in an object that is removed as a whole, by their bytes."""
_SMALL_SHARE = 0.01
"""Share of a row's bytes that may stay alive, because other places hold these arrays, too."""
_OF_PANDAS = {"DataFrame", "Series", "Index"}
"""Names of pandas' classes that users know, besides all that end in ``Index``."""


class Row:
    """The objects that a report lists in one row, such as the 40 arrays of a list.

    A search explains the row by one of their storages, which stands for all.

    Args:
        storages: the storages of the objects; that of an object that is no array is "object" and
            its identity.
        object_id: identity of the object that a name of the experiment referred to, such as a
            model, if its arrays are the row; 0 if there was none.
    """

    def __init__(self, storages: Iterable[StorageKey], object_id: int = 0) -> None:
        self.storages = set(storages)
        self.object_id = object_id
        self.storage_by_object_id: dict[int, StorageKey] = {}
        """The storage of each live object, by the object's identity; of arrays these are filled in
        by ``RowHolders``, which finds the objects that keep each storage.
        """
        self.objects: dict[int, object] = {}
        """The same live objects, by identity."""
        self.held_storages: set[StorageKey] = set(self.storages)
        """The storages to which the holder of the row leads; all of them until a search for this
        holder (``explain``) replaces them.
        """

    @classmethod
    def of_objects(cls, items: Sequence[object]) -> Row:
        """Return the row of objects that are no arrays, such as lists of numbers."""
        row = cls([object_key(item) for item in items])
        row.objects = by_identity(items)
        row.storage_by_object_id = {key: ("object", key) for key in row.objects}
        return row

    @property
    def is_whole(self) -> bool:
        """True if the holder leads to all objects."""
        return self.held_storages == self.storages

    def part(self, storages: Iterable[StorageKey]) -> Row:
        """Return a new row with some of the storages, and with the objects on these."""
        part = Row(storages)
        for key, storage in self.storage_by_object_id.items():
            if storage in part.storages:
                part.storage_by_object_id[key] = storage
                part.objects[key] = self.objects[key]
        return part

    def held_objects(self) -> list[object]:
        """Return the objects to which the holder of the row leads, without small arrays: these may
        be constants of a library, such as those of matplotlib, to which all figures lead.
        """
        held = [
            self.objects[key]
            for key, storage in self.storage_by_object_id.items()
            if storage in self.held_storages
        ]
        return _without_small(held)

    def removed_storages(self) -> set[StorageKey]:
        """Return the storages that the line of the row frees: those of ``held_objects``.

        A small one is not counted among them, because the line may leave it, such as a loss: its
        graph may keep large memory.
        """
        return {self.storage_by_object_id[id(item)] for item in self.held_objects()}


class HolderOfRow(NamedTuple):
    """The nearest object that leads to a row's arrays."""

    to_holder: Steps
    """The chain of objects from a root to the holder, which is the last of them."""
    held_storages: set[StorageKey]
    """The storages of the row to which the holder leads."""
    is_inside_item: bool
    """True if the holder has the arrays by one item for which users write no name, such as a block
    of a data frame.
    """


def objects_of_storages(
    heap: Heap, wanted: Container[StorageKey]
) -> Iterator[tuple[StorageKey, object]]:
    """Yield the objects that keep ``wanted`` storages, each with its storage: tensors, arrays, and
    the objects whose memory arrays show, such as the ``bytearray`` of ``numpy.frombuffer``.
    """
    for item in [*heap.tensors, *heap.ndarrays] if wanted else ():
        key = memory_key(item)
        if key not in wanted:
            continue
        yield key, item
        other_owner = other_owner_of(item) if is_array(item) else None
        if other_owner is not None:
            yield key, other_owner


class RowHolders:
    """Finds the holder of each row on a chain of references, and the items of it to remove.

    Args:
        rows: the rows by the storage that is explained.
        heap: the live objects.
        namespaces: identities of the dicts with the user's names, which lead to everything.
    """

    def __init__(
        self, rows: Mapping[StorageKey, Row], heap: Heap, namespaces: Iterable[int]
    ) -> None:
        self._rows = dict(rows)
        self._heap = heap
        objects_of_rows = [item for row in rows.values() for item in row.objects.values()]
        self._walk = LimitedWalk(namespaces, objects_of_rows)
        by_storage: dict[StorageKey, list[Row]] = {}
        for row in rows.values():
            for storage in row.storages:
                by_storage.setdefault(storage, []).append(row)
        self._storages_of_rows = frozenset(by_storage)
        """The storages of all rows."""
        for key, item in objects_of_storages(heap, by_storage):
            for row in by_storage[key]:
                row.storage_by_object_id[id(item)] = key
                row.objects[id(item)] = item

    def row(self, key: StorageKey) -> Row | None:
        """Return the row for which a storage stands; None if it stands for none."""
        return self._rows.get(key)

    def object_id(self, key: StorageKey) -> int:
        """Return the identity of the object for whose row a storage stands; 0 if there is none."""
        row = self._rows.get(key)
        return 0 if row is None else row.object_id

    def add(self, key: StorageKey, row: Row) -> None:
        """Add a row, and make a storage stand for it."""
        self._rows[key] = row

    def nearest_holder(self, row: Row, chain: Steps) -> HolderOfRow:
        """Return the nearest object on a chain that leads to all arrays of a row; if none does, the
        one that leads to the most of them.

        Of the chain to one array of ``runs = {"losses": [...]}``, it is the list.

        Args:
            row: the row.
            chain: the objects from a root to one of the row's arrays.
        """
        position, held_storages = self._nearest_on_chain(chain, row)
        is_inside_item = False
        for number, item in enumerate(chain[:position]):
            if id(item) == row.object_id and not is_instance(item, BaseException):
                # The object of the experiment's name is still alive, so it is the holder, although
                # a part of it may also lead to all arrays: ``model``, not ``model.layers``.
                return HolderOfRow(chain[: number + 1], held_storages, is_inside_item)
        if _are_parts_of_module(chain[: position + 1]):
            position -= 1
        while position > 0 and _is_inner(chain[position - 1], chain[position]):
            position -= 1
            is_inside_item = True
        to_holder = chain[: position + 1]
        if is_instance(to_holder[-1], BaseException):
            # The advice names the attribute, or the local name of a frame, that has the array.
            to_holder = chain
        return HolderOfRow(to_holder, held_storages, is_inside_item)

    def has_little_else(self, item: object) -> bool:
        """Return True if an object may be removed as a whole, because nearly all arrays to which it
        leads belong to rows.
        """
        reached_ids = self._walk.ids_reached_from(item)
        if self._walk.is_at_limit:
            return False
        sizes = dict[StorageKey, int]()
        arrays = by_identity([*self._heap.tensors, *self._heap.ndarrays])
        for _, array in described([arrays[key] for key in reached_ids & arrays.keys()]):
            sizes[array.storage] = array.size_bytes
        bytes_of_rows = 0
        for storage, size_bytes in sizes.items():
            if storage in self._storages_of_rows:
                bytes_of_rows += size_bytes
        if not bytes_of_rows:  # a row of lists: nothing tells if further ones must stay
            return False
        other_bytes = sum(sizes.values()) - bytes_of_rows
        return other_bytes <= _OTHER_SHARE * bytes_of_rows

    def removable_items(self, row: Row, items: Sequence[object]) -> list[object]:
        """Return the items of a container that lead to arrays of a row, to remove these items as a
        whole; none if one of them has further data of the user: ``{"loss": loss, "epoch": 3}``.
        """
        wanted = row.storage_by_object_id.keys()
        # What is inside the arrays themselves, such as elements of an array of objects, is theirs.
        ids_in_row = set[int]()
        for array in row.objects.values():
            self._walk.reach(array, ids_in_row)
        leading = self.leading_items(row, items)
        if self._walk.is_at_limit:
            return []
        if all(self._leads_only_to(item, wanted, ids_in_row) for item in leading):
            return leading
        return []

    def leading_items(self, row: Row, items: Sequence[object]) -> list[object]:
        """Return the items that lead to arrays of a row, as far as the limit of objects allows."""
        wanted = row.storage_by_object_id.keys()
        leading = list[object]()
        for item in items:
            if self._walk.is_at_limit:
                break
            if not wanted.isdisjoint(self._walk.ids_reached_from(item)):
                leading.append(item)
        return leading

    def _leads_only_to(
        self, item: object, wanted: Container[int], ids_in_row: Container[int]
    ) -> bool:
        """Return True if an item has no data of the user except ``wanted`` arrays: all objects in
        it lead to them.

        Numbers, text and empty containers need not, such as those of a module of torch. But if the
        item is a list or dict, they are data of the user, which must stay: the ``3`` in ``{"loss":
        loss, "epoch": 3}``.

        Args:
            item: the item.
            wanted: the identities of the arrays of a row.
            ids_in_row: the identities of these and of all objects in them.
        """
        inside = self._walk.objects_inside(item, ids_in_row)
        if inside is None:
            return False
        leading_ids = _ids_leading_to(wanted, inside.owners)
        if is_instance(item, list) or is_instance(item, deque) or type(item) is dict:
            # Its numbers and text are data, too; an older dict may be as new as what it has got.
            item_ids = map(id, items_of(item))
            return all(key in leading_ids or key in wanted for key in item_ids)
        return all(
            key in leading_ids or is_atom(value) or _is_empty(value)
            for key, value in inside.objects.items()
        )

    def _nearest_on_chain(self, chain: Steps, row: Row) -> tuple[int, set[StorageKey]]:
        """Return the position of the nearest holder of a row on a chain, and the row's storages to
        which it leads: most of them if no object on the chain leads to all.

        One array of each storage is enough. The other places of its arrays, such as those of a
        view, are searched later (``all_places.py``).
        """
        # Go up the chain from its end, until the objects below lead to all storages.
        storage_of = row.storage_by_object_id
        nearest = len(chain) - 1
        missing = set(storage_of.values())
        reached_ids = set[int]()
        for position in reversed(range(len(chain))):
            wanted = {key for key, storage in storage_of.items() if storage in missing}
            self._walk.reach(chain[position], reached_ids, wanted=wanted)
            newly_reached = wanted & reached_ids
            if newly_reached:
                nearest = position
            missing.difference_update(map(storage_of.__getitem__, newly_reached))
            if not missing:
                return nearest, row.storages
            if self._walk.is_at_limit:
                return len(chain) - 1, row.storages
        return nearest, row.storages & (set(storage_of.values()) - missing)


def _ids_leading_to(wanted: Container[int], owners_of: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the identities of the objects that lead to ``wanted`` ones, directly or not.

    Args:
        wanted: the identities of these.
        owners_of: the identities of the objects that refer to each object, by its identity.
    """
    leading_ids = set[int]()
    waiting = [key for key in owners_of if key in wanted]
    for key in waiting:  # the list grows
        new_owners = [owner for owner in owners_of.get(key, ()) if owner not in leading_ids]
        leading_ids.update(new_owners)
        waiting += new_owners
    return leading_ids


def _without_small(objects: Sequence[object]) -> list[object]:
    """Return objects without the smallest arrays: those on storages that together have at most
    ``_SMALL_SHARE`` of the bytes of all. Objects that are no arrays are all returned.
    """
    storage_of = dict[int, StorageKey]()
    sizes = dict[StorageKey, int]()
    for item, array in described(objects):
        storage_of[id(item)] = array.storage
        sizes[array.storage] = array.size_bytes
    dispensable_bytes = _SMALL_SHARE * sum(sizes.values())
    small_storages = set[StorageKey]()
    for storage in sorted(sizes, key=sizes.__getitem__):
        dispensable_bytes -= sizes[storage]
        if dispensable_bytes < 0:  # this storage is too large
            break
        small_storages.add(storage)
    return [item for item in objects if storage_of.get(id(item)) not in small_storages]


def _is_empty(value: object) -> bool:
    """Return True for an empty built-in container; False for one of a user's class, because its
    code may compute the length.
    """
    return is_exactly(value, *CONTAINERS, OrderedDict) and not value


def _are_parts_of_module(chain: Sequence[object]) -> bool:
    """Return True if a chain ends at the dict of a torch module's parameters or buffers."""
    if len(chain) < 3 or not is_of_library(chain[-3], "torch.nn", "Module"):
        return False
    attributes = instance_dict(chain[-3])
    if attributes is None or attributes is not chain[-2]:
        return False
    return any(attributes.get(name) is chain[-1] for name in ("_parameters", "_buffers"))


def _is_inner(owner: object, item: object) -> bool:
    """Return True for an object for which users write no name: the dict of its owner's attributes,
    and a part of a data frame, such as a block.
    """
    if type(item) is dict:
        return instance_dict(owner) is item
    name = type_name(item)
    return is_of_pandas(item) and name not in _OF_PANDAS and not name.endswith("Index")
