"""Recognises fields of a list's items: keys or attributes that many items have, such as
``"tokens"`` in ``docs[0]["tokens"]``, ``docs[1]["tokens"]`` and so on.

A path is written for the first item only. The references of all further items are recognised by
their field, which is faster: ``for _item in docs: del _item["tokens"]; del _item`` removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from operator import is_, methodcaller
from typing import Any

from ipygpumem.heap.attributes import MISSING, reader_of, slot_descriptors
from ipygpumem.heap.bulk import types_of
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.items_and_attributes import attribute_names
from ipygpumem.heap.paths.ways import Way

_OF_ATTRIBUTES = {Kind.ATTRIBUTE, Kind.DELETED_ATTRIBUTE}


class ItemField:
    """A key of dicts, or an attribute of instances, by which the items of a list refer to objects
    of one type, such as ``["tokens"]`` to lists.

    Args:
        cut: the reference of the first item in which it was found, with the code for all.
        item_type: the type of the items.
        part_type: the type of the objects to which they refer.
        read: returns the object in the field of an item; ``MISSING`` if the item has none.
        is_in_slot: True for an attribute in ``__slots__``, which ``vars(_item).pop`` cannot remove.

    Attributes:
        number_found: the number of items in which it was found.
    """

    def __init__(
        self,
        cut: Cut,
        item_type: type,
        part_type: type,
        read: Callable[[Any], object],
        *,
        is_in_slot: bool,
    ) -> None:
        self._cut = cut
        self._item_type = item_type
        self._part_type = part_type
        self._read = read
        self._is_in_slot = is_in_slot
        self.number_found = 1

    @classmethod
    def at_end(cls, way: Way, items: object, item: Any, part: object) -> ItemField | None:
        """Return the field with which a way ends; None if further items cannot be recognised by it,
        so that the path of each has to be written.

        Args:
            way: the way through the list and its item to ``part``.
            items: the list.
            item: the item.
            part: the object to which the item refers.
        """
        cut = way.cut
        if cut is None or cut.outer is None or cut.repeated or cut.protocol is not None:
            return None  # its line does more than to delete one key or attribute of an item
        is_in_list = cut.outer.kind is Kind.ITEM and cut.outer.owner_id == id(items)
        if not is_in_list or way.removed_references != {(id(item), id(part))}:
            return None
        if cut.kind is Kind.KEY and type(item) is dict:
            read_key = _reader_of_key(item, part)
            if read_key is not None:
                return cls(cut, dict, type(part), read_key, is_in_slot=False)
        if cut.kind in _OF_ATTRIBUTES:
            names = attribute_names(item, part)
            read = reader_of(type(item), names[0]) if len(names) == 1 else None
            if read is not None:
                is_in_slot = names[0] in slot_descriptors(type(item))
                return cls(cut, type(item), type(part), read, is_in_slot=is_in_slot)
        return None

    def recognise(self, position: int, item: Any, part: object) -> Cut | None:
        """Count a further item with this field, and return its reference to an object, with the
        code of the first item; None if the reference is not by this field.

        Args:
            position: the position of the item.
            item: the item.
            part: the object.
        """
        have_types = type(item) is self._item_type and type(part) is self._part_type
        if not have_types or self._read(item) is not part:
            return None
        position_in_item, size = 0, 0
        if self._item_type is dict:
            positions = [number for number, value in enumerate(item.values()) if value is part]
            if len(positions) > 1:  # another key refers to it, too
                return None
            position_in_item, size = positions[0], len(item)
        self.number_found += 1
        return self._cut.of_same_field(position, item, part, position_in_item, size)

    def can_be_popped(self, items: Iterable[Any]) -> bool:
        """Return True if a loop over all items may remove the field from those that have it,
        ``_item.pop("tokens", None)``: it was found in each of them, and it is in dicts.
        """
        if self._is_in_slot:
            return False
        same_type = [item for item in items if type(item) is self._item_type]
        number_missing = sum(map(is_, map(self._read, same_type), repeat(MISSING)))
        return len(same_type) - number_missing == self.number_found


def _reader_of_key(item: dict[Any, object], part: object) -> Callable[[Any], object] | None:
    """Return the function that reads, from any dict, the key that has an object in one dict; None
    if several keys have it, or if the key is neither a text nor a number.
    """
    keys = [key for key, value in item.items() if value is part]
    if len(keys) != 1 or type(keys[0]) not in (str, int):
        return None
    return methodcaller("get", keys[0], MISSING)


def cut_by_field(
    fields: Iterable[ItemField], position: int, item: object, part: object
) -> Cut | None:
    """Return the reference from a list's item to an object, if it is by one of the fields that
    earlier items have, and count the item for this field; None otherwise.
    """
    for field in fields:
        cut = field.recognise(position, item, part)
        if cut is not None:
            return cut
    return None


def with_only_places_marked(
    cuts: list[Cut], fields: Sequence[ItemField], items: Sequence[object]
) -> list[Cut]:
    """Return references of a list's items, marked ``is_only_there`` if no further item of the list
    has one of their fields.

    Then a loop over the whole list may remove the field where an item has it, ``for _item in docs:
    _item.pop("tokens", None)``. Otherwise that would also remove objects that must stay.

    Args:
        cuts: the references of some of the items.
        fields: the fields of these references.
        items: all items of the list.
    """
    if len(types_of(items)) > 1:
        return cuts
    if sum(field.number_found for field in fields) < len(cuts):
        return cuts  # some are by no field
    if not all(field.can_be_popped(items) for field in fields):
        return cuts
    return [replace(cut, is_only_there=True) for cut in cuts]
