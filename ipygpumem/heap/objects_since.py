"""Lists the objects made since a moment, also when they are no longer young.

A collection of the middle generation or of all objects makes young ones old, which CPython does not
tell from older ones. So at the start of each, the identities of the young objects are saved, 8
bytes each.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

from ipygpumem import interrupts
from ipygpumem.introspect import ID_BYTES, identities_of_list

_MOST_SAVED_BYTES = 40_000_000
"""Maximum bytes of the identities to save."""
_FEW = 10_000
"""Number of identities of which a set takes little memory."""


class ObjectsSince:
    """The tracked objects made since ``start``.

    A container that the collector did not track at the start (a dict of numbers and text) counts as
    new once it is tracked, and so does the dict of an old object's attributes once it is read: a
    dict's age is uncertain.
    """

    def __init__(self) -> None:
        self._saved: list[bytes] | None = []
        """The ``identities`` of objects that are no longer young, of each collection; None if they
        are unknown.
        """
        self._collections = [-1, -1]
        """Collections of the middle generation and of all objects that it knows of."""

    def start(self) -> None:
        """Start here, right after a collection has made all existing objects old."""
        self._collections = _collections()

    def save(self, generation: int) -> None:
        """Save the identities of the young objects before a collection makes them old.

        An identity that is used again belongs to an object that is new, too.
        """
        saved = self._saved
        self._saved = None  # until all are saved: the handler of a signal may raise an error here
        if saved is None or not self._has_seen_all():
            return
        with contextlib.suppress(Exception):  # such as MemoryError: only the report needs them
            saved.append(_young())
            if sum(map(len, saved)) <= _MOST_SAVED_BYTES:
                self._saved = saved
        self._collections[generation - 1] += 1

    def identities(self) -> set[int] | None:
        """Return the identities of the new objects; None if unknown."""
        young = _young()
        if self._saved is None or not self._has_seen_all():
            return None
        return _alive(self._saved) | set(memoryview(young).cast("Q"))

    def _has_seen_all(self) -> bool:
        """Return False after a collection at whose start nothing was saved."""
        return self._collections == _collections()


def _young() -> bytes:
    """Return the ``identities`` of the objects that are not old."""
    # The youngest first: a collection between the two makes objects older, and they are then in
    # both.
    youngest = identities_of_list(gc.get_objects(generation=0))
    return identities_of_list(gc.get_objects(generation=1)) + youngest


def _alive(saved: Sequence[bytes]) -> set[int]:
    """Return the ``identities`` that tracked objects still have.

    Most saved objects have died when an experiment ends. A set of all would take ten times the
    memory of their identities, which would be the peak of the experiment's cell.
    """
    alive = set[int]()
    if not saved:
        return alive
    tracked = gc.get_objects()
    number_saved = sum(map(len, saved)) // ID_BYTES
    step = max(_FEW, number_saved // 20)
    for start in range(0, len(tracked), step):
        part = set(map(id, tracked[start : start + step]))
        for row in saved:
            alive.update(filter(part.__contains__, memoryview(row).cast("Q")))
    return alive


def _collections() -> list[int]:
    """Return the number of collections of the middle generation, and of all objects."""
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
        if generation == 0:
            return
        with interrupts.postponed():
            for made in self.lists:
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
