"""Finds the objects that are large by themselves, such as long text, without a pass over the heap
of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from ipygpumem.heap.bulk import by_identity, kinds_of, of_types

_SIZED = {id(kind) for kind in (list, dict, set, str, bytes, bytearray)}
"""Types whose objects are large by themselves if they hold much."""
_MOST_BYTES_EACH = 400
"""A letter, or an entry of the emptiest dict, takes less; ``len`` is several times faster than
``getsizeof``.
"""


def _of_size(items: Sequence[object], smallest: int) -> list[object]:
    return list(compress(items, map(smallest.__le__, map(sys.getsizeof, items))))


class LargeObjects:
    """The objects that are large by themselves, and those with memory of a library, found while a
    heap is read.

    Args:
        smallest: minimum bytes of text and containers.
        of_libraries: types of objects with memory to which no Python object refers.
    """

    def __init__(self, smallest: int, of_libraries: Sequence[type]) -> None:
        self.found: dict[int, object] = {}
        """The untracked objects, and objects of libraries, by identity."""
        self.containers: dict[int, object] = {}
        """The tracked containers by identity."""
        self._smallest = smallest
        self._shortest = smallest // _MOST_BYTES_EACH
        self._bases = of_libraries
        self._known: set[int] = set()
        """Types that were seen."""
        self._wanted: set[int] = set()
        """Identities of the types that derive from those of libraries."""

    def read(self, items: Sequence[object]) -> None:
        """Add the large ones among some objects that the garbage collector does not track."""
        type_ids = list(map(id, map(type, items)))  # once for all questions: there are millions
        here = set(type_ids)
        self._learn(here, items)
        sized: list[Any] = list(compress(items, map(_SIZED.__contains__, type_ids)))
        long = list(compress(sized, map(self._shortest.__le__, map(len, sized))))
        if long:
            self.found.update(by_identity(_of_size(long, self._smallest)))
        if not self._wanted.isdisjoint(here):
            of_libraries = list(compress(items, map(self._wanted.__contains__, type_ids)))
            self.found.update(by_identity(of_libraries))

    def read_tracked(self, items: Sequence[object], type_ids: set[int]) -> None:
        """Add the large ones among some tracked objects; ``type_ids`` are the identities of their
        types.
        """
        self._learn(type_ids, items)
        if not type_ids.isdisjoint(_SIZED):
            self.containers.update(by_identity(_of_size(of_types(_SIZED, items), self._smallest)))
        if not type_ids.isdisjoint(self._wanted):
            self.found.update(by_identity(of_types(self._wanted, items)))

    def _learn(self, type_ids: set[int], items: Sequence[object]) -> None:
        if not type_ids <= self._known:
            self._known |= type_ids
            self._wanted |= kinds_of(items, *self._bases)
