"""Lists the objects made since a moment, also when they are no longer young.

CPython appends the survivors of each collection to the next generation's list. So everything behind
a mark in these lists is newer than the mark, until a full collection changes their order. At the
start of each full collection, the identities of new objects are saved, and another mark is made
when the next objects are about to become old.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

from ipygpumem import interrupts
from ipygpumem.introspect import ID_BYTES, identities_of_list

_MOST_SAVED_BYTES = 40_000_000
"""Maximum bytes of the identities to save."""
FULL = 2
"""The generation of a full collection."""


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
        self._mark: _Mark | None = None
        """The old one is in front of this one, unless the lists have been rearranged; None if all
        objects made since the last full collection are young.
        """
        self._saved: bytearray | None = bytearray()
        """The ``identities`` of objects made before the mark; None if they are unknown."""
        self._collections = [-1, -1]
        """Collections of old and of all objects that it knows of."""

    def start(self) -> None:
        """Start here, right after a collection has made all existing objects old."""
        self._mark = _Mark()
        self._collections = _collections()

    def needs_to_save(self, generation: int) -> bool:
        """Return True if a collection would change the order of the new objects, or append them to
        the old ones without a mark.
        """
        return generation == FULL or (generation == 1 and self._mark is None)

    def save(self, generation: int) -> None:
        """Save the identities of the new objects before a collection.

        An identity that is used again belongs to an object that is new, too.
        """
        try:
            self._append_new()
        except Exception:  # such as MemoryError: only the report needs them
            self._saved = None
        self._collections = _collections()
        self._collections[generation - 1] += 1
        self._mark = None if generation == FULL else _Mark()

    def _append_new(self) -> None:
        new = self._new()
        if self._saved is None or new is None or len(self._saved) + len(new) > _MOST_SAVED_BYTES:
            self._saved = None
        else:
            self._saved += new

    def identities(self) -> set[int] | None:
        """Return the identities of the new objects, and maybe of some that have died; None if
        unknown.
        """
        new = self._new()
        if new is None or self._saved is None:
            return None
        return set(memoryview(self._saved + new).cast("Q"))

    def _new(self) -> bytes | None:
        """Return the ``identities`` of the objects behind the mark; None if unknown."""
        # The youngest first: a collection between two lists makes objects older, and they are then
        # in both.
        youngest = identities_of_list(gc.get_objects(generation=0))
        new = identities_of_list(gc.get_objects(generation=1)) + youngest
        if self._mark is None:
            return new if _collections() == self._collections else None
        tracked = identities_of_list(gc.get_objects(generation=2)) + new
        if _collections()[-1] != self._collections[-1]:
            return None
        old = _place(tracked, self._old)
        mark = _place(tracked, self._mark)
        if 0 <= old < mark:
            return tracked[mark + ID_BYTES :]
        return None


def _place(row: bytes, item: object) -> int:
    """Return the place of an object's identity in a row of ``identities``; -1 if it is not in it.

    Searching the bytes takes a fifth of the time that comparing all objects takes, and a collection
    waits for it.
    """
    identity = id(item).to_bytes(ID_BYTES, sys.byteorder)
    place = row.find(identity)
    while place % ID_BYTES and place >= 0:  # parts of two identities
        place = row.find(identity, place + 1)
    return place


def _collections() -> list[int]:
    """Return the number of collections that have appended to the old objects, and of full ones."""
    return [generation["collections"] for generation in gc.get_stats()[1:]]


class _Saver:
    """Lets lists of new objects save these: its attribute ``start`` does so.

    Attributes:
        lists: the lists.
        event: the collector's report of the start of a collection, under ``start``.
    """

    def __init__(self) -> None:
        self.lists: list[ObjectsSince] = []
        self.event: dict[str, Any] = {}

    @property
    def start(self) -> None:
        """Save new objects at the start of a collection."""
        generation = self.event["start"]["generation"]
        waiting = [made for made in self.lists if made.needs_to_save(generation)]
        if not waiting:
            return
        with interrupts.postponed():
            for made in waiting:
                made.save(generation)


class CollectionListener:
    """Lets lists of new objects save these before collections.

    Python code that runs at the end of a long collection would be the first to meet a Ctrl-C that
    came in the meantime, and CPython swallows the exceptions of ``gc.callbacks``. So ``getattr`` is
    called there: the start of a collection is a property of the saver, its end is none.
    """

    def __init__(self) -> None:
        self._saver = _Saver()
        # Made here, so that they are older than each experiment.
        self._callbacks: list[Callable[[str, Any], object]] = [
            self._saver.event.__setitem__,
            functools.partial(getattr, self._saver),
        ]

    def add(self, made: ObjectsSince) -> None:
        """Add a list of new objects."""
        if not self._saver.lists:
            gc.callbacks += self._callbacks
        self._saver.lists.append(made)

    def remove(self, made: ObjectsSince) -> None:
        """Remove a list, if it was added."""
        lists = self._saver.lists
        lists[:] = [item for item in lists if item is not made]
        if not lists:
            self.stop()

    def stop(self) -> None:
        """Remove all lists, and the callbacks."""
        self._saver.lists.clear()
        ours = set(map(id, self._callbacks))
        gc.callbacks[:] = [callback for callback in gc.callbacks if id(callback) not in ours]
        self._saver.event.clear()
