"""Lists the objects made since a moment, also when they are no longer young.

CPython appends the survivors of each collection to the next generation's list. So everything behind
a mark in these lists is newer than the mark, until a full collection changes their order. Before
our own full collections, the identities of new objects are saved. After any other full collection,
new objects are unknown.
"""

from __future__ import annotations

import gc
from array import array
from itertools import compress, count, repeat
from operator import is_
from typing import Any

_MOST_SAVED = 5_000_000
"""Maximum number of identities to save, 8 bytes each."""


class _Mark:
    """An object in the collector's lists."""


class ObjectsSince:
    """The tracked objects made since ``start``.

    A container that the collector did not track at the start (a dict of numbers and text) counts as
    new once it is tracked, and so does the dict of an old object's attributes once it is read: a
    dict's age is uncertain.
    """

    def __init__(self) -> None:
        self._old = _Mark()
        self._mark = _Mark()
        """The old one is in front of this one, unless the lists have been rearranged."""
        self._saved: array[int] | None = array("Q")
        self._collections = -1

    def start(self) -> None:
        """Start here, right after a collection has made all existing objects old."""
        self._mark = _Mark()
        self._collections = _full_collections()

    def save(self) -> None:
        """Save the identities of the new objects before a full collection, which changes their
        order; ``start`` has to follow it.

        An identity that is used again belongs to an object that is new, too.
        """
        new = self._behind_mark()
        if self._saved is None or new is None or len(new) + len(self._saved) > _MOST_SAVED:
            self._saved = None
        else:
            self._saved.extend(map(id, new))

    def identities(self) -> set[int] | None:
        """Return the identities of the new objects, and maybe of some that have died; None if
        unknown.
        """
        new = self._behind_mark()
        if new is None or self._saved is None:
            return None
        return set(map(id, new)).union(self._saved)

    def _behind_mark(self) -> list[Any] | None:
        # The youngest first: a collection between two lists makes objects older, and they are then
        # in both. No inner function: a list or cell made before would be in the list, a cycle that
        # keeps every object alive.
        young = gc.get_objects(generation=0)
        middle = gc.get_objects(generation=1)
        tracked = [*gc.get_objects(generation=2), *middle, *young]
        if self._collections != _full_collections():
            return None
        old = _position(tracked, self._old)
        mark = _position(tracked, self._mark)
        if 0 <= old < mark:
            return tracked[mark + 1 :]
        return None


def _position(items: list[Any], wanted: object) -> int:
    return next(compress(count(), map(is_, items, repeat(wanted))), -1)


def _full_collections() -> int:
    collections: int = gc.get_stats()[2]["collections"]
    return collections
