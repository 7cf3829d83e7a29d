"""References of a list's items that differ in nothing but the item, such as those of
``docs[0]["tokens"]``, ``docs[1]["tokens"]`` and so on: the line of one is written, and
stands for all.
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


class AlikeReferences:
    """The references of a list's items to objects of one type: each item is a dict with the same
    key, or an instance with the same attribute.

    Args:
        cut: the reference of one item, whose code stands for all.
        item_type: the type of the items.
        part_type: the type of the objects to which they refer.
        read: returns the object under the key or attribute of an item.
        is_in_slot: True for an attribute that is in no dict.

    Attributes:
        number: the number of references that were made or written.
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
        self.number = 1

    @classmethod
    def of(cls, way: Way, holder: object, item: Any, part: object) -> list[AlikeReferences]:
        """Return the references like that at the end of a way; nothing if each has to be written.

        Args:
            way: the way to ``part``.
            holder: the list.
            item: its item on the way.
            part: the object to which the item refers.
        """
        cut = way.cut
        if cut is None or cut.outer is None or cut.repeated or cut.protocol is not None:
            return []
        is_item = cut.outer.kind is Kind.ITEM and cut.outer.owner_id == id(holder)
        if not is_item or way.removed_references != {(id(item), id(part))}:
            return []
        read: Callable[[Any], object] | None = None
        is_in_slot = False
        if cut.kind is Kind.KEY and type(item) is dict:
            keys = [key for key, value in item.items() if value is part]
            if len(keys) == 1 and type(keys[0]) in (str, int):
                read = methodcaller("get", keys[0], MISSING)
        elif cut.kind in _OF_ATTRIBUTES:
            names = attribute_names(item, part)
            if len(names) == 1:
                read = reader_of(type(item), names[0])
                is_in_slot = names[0] in slot_descriptors(type(item))
        if read is None:
            return []
        return [cls(cut, type(item), type(part), read, is_in_slot=is_in_slot)]

    def cut(self, position: int, item: Any, part: object) -> Cut | None:
        """Return the reference of another item, without code of its own; None if it differs.

        Args:
            position: the position of the item.
            item: the item.
            part: the object to which it refers.
        """
        are_alike = type(item) is self._item_type and type(part) is self._part_type
        if not are_alike or self._read(item) is not part:
            return None
        places = [0]
        if self._item_type is dict:
            places = [place for place, value in enumerate(item.values()) if value is part]
        if len(places) > 1:
            return None
        size = len(item) if self._item_type is dict else 0
        self.number += 1
        return self._cut.of_other_item(position, item, part, places[0], size)

    def can_be_popped(self, items: Iterable[Any]) -> bool:
        """Return True if it is in dicts, and no further item of the type has it."""
        if self._is_in_slot:
            return False
        same = [item for item in items if type(item) is self._item_type]
        number_missing = sum(map(is_, map(self._read, same), repeat(MISSING)))
        return len(same) - number_missing == self.number


def first_alike(
    alike: Iterable[AlikeReferences], position: int, item: object, part: object
) -> Cut | None:
    """Return the reference of a list's item if an earlier item has one like it, else None."""
    for references in alike:
        cut = references.cut(position, item, part)
        if cut is not None:
            return cut
    return None


def with_only_places_marked(
    cuts: list[Cut], alike: Sequence[AlikeReferences], items: Sequence[object]
) -> list[Cut]:
    """Return references of a list's items, marked ``is_only_there`` if no further item has the key
    or attribute: then ``for _item in docs: _item.pop("tokens", None)`` removes no other object.

    Args:
        cuts: the references of some of the items.
        alike: the references that are alike, one group for each key or attribute.
        items: all items of the list.
    """
    if len(types_of(items)) > 1:
        return cuts
    if sum(references.number for references in alike) < len(cuts):
        return cuts  # some are in no group
    if not all(references.can_be_popped(items) for references in alike):
        return cuts
    return [replace(cut, is_only_there=True) for cut in cuts]
