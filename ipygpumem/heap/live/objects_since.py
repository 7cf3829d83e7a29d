"""Lists the objects made since a moment, such as the start of an experiment, also when they are no
longer young.

A collection of the middle generation or of all objects makes young ones old, which CPython does not
tell from older ones. So at the start of each, the identities of the young objects are saved, 8
bytes each.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat
from operator import getitem, is_, itemgetter, methodcaller
from typing import Any

from ipygpumem.introspect import identities_of_list

_MOST_SAVED = 5_000_000
"""Maximum number of identities to save."""
_SMALL_SET = 10_000
"""Number of identities of which a set takes little memory."""
_END = object()
"""Its identity is saved after the identities of each collection, as a mark."""


class ObjectsSince:
    """The tracked objects made since a moment, which ``YoungSaver.add`` begins.

    A container that the collector did not track at the start (a dict of numbers and text) counts as
    new once it is tracked, and so does the dict of an old object's attributes once it is read: a
    dict's age is uncertain.
    """

    def __init__(self) -> None:
        self._saver: YoungSaver | None = None
        self._first = 0
        """Number of identities that the saver had saved at the start."""
        self._not_saved = 0
        """Number of collections at the start of which nothing was saved, before this moment."""

    def start(self, saver: YoungSaver) -> None:
        """Begin the list, right after a collection has made all existing objects old.

        Args:
            saver: saves the identities of the objects that become old from now on.
        """
        self._first = len(saver.saved)
        self._not_saved = saver.number_not_saved()
        self._saver = saver

    def are_known(self) -> bool:
        """Return True if new objects can be told from older ones."""
        return self._saver is not None and self._saver.number_not_saved() == self._not_saved

    def moment(self) -> int:
        """Return this moment, for ``identities``: the number of identities saved so far."""
        return 0 if self._saver is None else len(self._saver.saved)

    def identities(self, after: int = 0) -> set[int] | None:
        """Return the identities of the new objects; None if unknown.

        An identity that was used again belongs to an object that is new, too.

        Args:
            after: a moment: objects that were old then are left out.
        """
        saver = self._saver
        # First, because a collection between the two saves the identities of the objects that it
        # makes old: then they are in both.
        young = _young_identities()
        if saver is None or not self.are_known():
            return None
        first = max(self._first, after)
        young_ids = set(memoryview(young).cast("Q"))
        return _still_alive(saver.saved, first) | young_ids


def _young_identities() -> bytes:
    """Return the ``identities`` of the objects that are not old, as a row of bytes."""
    # The youngest first: a collection between the two makes objects older, and they are then in
    # both.
    youngest = identities_of_list(gc.get_objects(generation=0))
    return identities_of_list(gc.get_objects(generation=1)) + youngest


def _still_alive(saved: array[int], first: int) -> set[int]:
    """Return the saved identities, from position ``first`` on, that tracked objects still have.

    Most saved objects have died when an experiment ends. A set of all would take ten times the
    memory of their identities, which would be the peak of the experiment's cell.
    """
    alive = set[int]()
    if len(saved) == first:
        return alive
    tracked = gc.get_objects()
    step = max(_SMALL_SET, (len(saved) - first) // 8)
    for start in range(0, len(tracked), step):
        part = set(map(id, tracked[start : start + step]))
        # No slice: a collection may add identities here, which an array that is exported as a
        # buffer refuses.
        alive.update(filter(part.__contains__, islice(saved, first, None)))
    return alive


class YoungSaver:
    """Saves the identities of young objects at the start of collections that make them old.

    No Python code runs in a collection. It would be the first to meet a Ctrl-C that came during
    ``json.loads`` or in the collection itself, and CPython swallows the exceptions of
    ``gc.callbacks``. So the work is an endless chain of iterators of C, and each collection takes
    one step of it.

    Attributes:
        saved: the identities.
    """

    def __init__(self) -> None:
        self.saved = array("Q")
        self._lists: list[ObjectsSince] = []
        """The lists that have begun and not ended."""
        self._event: dict[str, Any] = {}
        """The collector's report of the start of the last collection, under "start"."""
        self._sources: list[tuple[Callable[[], Iterable[object]], ...]] = [(), (), ()]
        """Functions that list the objects to save, by the generation that is collected; none while
        there are no lists.
        """
        self._allowance: list[Iterator[bool]] = [repeat(True, _MOST_SAVED)]
        """One iterator, with a value for each identity that may still be saved."""
        # Made here, so that they are older than each experiment.
        self._callbacks: list[Callable[[str, Any], object]] = [
            self._event.__setitem__,
            partial(getattr, self._steps()),  # called with "start" or "stop", and a default
        ]

    def _steps(self) -> _Steps:
        """Return an iterator, each step of which saves identities at the start of a collection.

        A step does the same as this code, with ``allowance`` as the iterator in ``_allowance``::

            sources = self._sources[self._event["start"]["generation"]]
            objects = chain.from_iterable(source() for source in sources)
            self.saved.extend(id(item) for item in compress(objects, allowance))
        """
        starts = map(itemgetter("start"), repeat(self._event))
        sources = map(getitem, repeat(self._sources), map(itemgetter("generation"), starts))
        lists = map(map, repeat(methodcaller("__call__")), sources)
        allowances = map(getitem, repeat(self._allowance), repeat(0))
        objects = map(compress, map(chain.from_iterable, lists), allowances)
        return _Steps(self.saved.extend, map(map, repeat(id), objects))

    def number_not_saved(self) -> int:
        """Return the number of collections of the middle generation, and of all objects, at whose
        start not all was saved.
        """
        middle, full = (generation["collections"] for generation in gc.get_stats()[1:])
        return int(middle) + int(full) - self.saved.count(id(_END))

    def add(self, new_objects: ObjectsSince) -> None:
        """Begin a list of new objects at this moment."""
        if not self._lists:
            self._allowance[:] = [repeat(True, _MOST_SAVED)]
            self._sources[1:] = [_SOURCES, _SOURCES]
        are_called = all(
            any(map(is_, gc.callbacks, repeat(callback))) for callback in self._callbacks
        )
        if not are_called:  # at first, or if the user has cleared the list
            self._remove_callbacks()
            gc.callbacks += self._callbacks
        new_objects.start(self)
        self._lists.append(new_objects)

    def remove(self, new_objects: ObjectsSince) -> None:
        """End a list, if it was added.

        The callbacks stay: the places of the user's callbacks do not change, which a report may
        have named.
        """
        self._lists[:] = [item for item in self._lists if item is not new_objects]
        if not self._lists:
            self._sources[1:] = [(), ()]
            del self.saved[:]

    def stop(self) -> None:
        """End all lists, and remove the callbacks."""
        for new_objects in list(self._lists):
            self.remove(new_objects)
        self._remove_callbacks()
        self._event.clear()

    def _remove_callbacks(self) -> None:
        """Remove our callbacks of the collector by identity: comparing would run user code."""
        our_ids = set(map(id, self._callbacks))
        gc.callbacks[:] = [callback for callback in gc.callbacks if id(callback) not in our_ids]


class _Steps(map):  # type: ignore[type-arg]  # takes none at run time
    """Takes its next step when its attribute ``start`` is read."""

    start = property(next)


_SOURCES = (
    partial(gc.get_objects, generation=0),
    partial(gc.get_objects, generation=1),
    partial(iter, (_END,)),
)
"""Functions that list the objects to save: both young generations, and a mark at their end."""
