"""Finds the objects that are large by themselves, such as long text, without a pass over the heap of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from ipygpumem.heap.bulk import by_identity, kinds_of, of_types

_SIZED = {id(kind) for kind in (list, dict, set, str, bytes, bytearray)}
"""Types whose objects are large by themselves if they hold much."""
_MOST_BYTES_EACH = 400
"""A letter, or an entry of the emptiest dict, takes less; ``len`` is several times faster than ``getsizeof``."""


def large_of(items: Sequence[object], smallest: int) -> list[object]:
    """Return the items that are built-in containers or text of at least ``smallest`` bytes, without their contents."""
    return _of_size(of_types(_SIZED, items), smallest)


def _of_size(items: Sequence[object], smallest: int) -> list[object]:
    return list(compress(items, map(smallest.__le__, map(sys.getsizeof, items))))


class LargeUntracked:
    """The large objects, and those with memory of a library, that the garbage collector does not list.

    Args:
        smallest: minimum bytes of text and containers.
        of_libraries: types of objects with memory to which no Python object refers.
    """

    def __init__(self, smallest: int, of_libraries: Sequence[type]) -> None:
        self.found: dict[int, object] = {}
        """The objects by identity."""
        self._smallest = smallest
        self._shortest = smallest // _MOST_BYTES_EACH
        self._bases = of_libraries
        self._known: set[int] = set()
        """Types that were seen."""
        self._wanted: set[int] = set()
        """Identities of the types that derive from those of libraries."""

    def read(self, items: Sequence[object]) -> None:
        """Add the large ones among some untracked objects."""
        type_ids = list(map(id, map(type, items)))  # once for all questions: there are millions
        here = set(type_ids)
        if not here <= self._known:
            self._known |= here
            self._wanted |= kinds_of(items, *self._bases)
        sized: list[Any] = list(compress(items, map(_SIZED.__contains__, type_ids)))
        long = list(compress(sized, map(self._shortest.__le__, map(len, sized))))
        if long:
            self.found.update(by_identity(_of_size(long, self._smallest)))
        if not self._wanted.isdisjoint(here):
            of_libraries = list(compress(items, map(self._wanted.__contains__, type_ids)))
            self.found.update(by_identity(of_libraries))
