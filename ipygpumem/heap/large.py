"""Finds the objects that are large by themselves, such as long text, without a pass over the heap
of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from ipygpumem.heap.bulk import Batch, by_identity
from ipygpumem.introspect import mro_of

_SIZED = {id(kind) for kind in (list, dict, set, str, bytes, bytearray)}
"""Types whose objects are large by themselves if they hold much."""
_MOST_BYTES_EACH = 400
"""A letter, or an entry of the emptiest dict, takes less; ``len`` is several times faster than
``getsizeof``.
"""


def _of_size(items: Sequence[object], smallest: int) -> list[object]:
    are_large = map(smallest.__le__, map(sys.getsizeof, items))
    return list(compress(items, are_large))


class LargeObjects:
    """The objects that are large by themselves, and those with memory of a library, found while a
    heap is read.

    Args:
        smallest: minimum bytes of text and containers.
        of_libraries: types of objects with memory to which no Python object refers.
    """

    def __init__(self, smallest: int, of_libraries: Sequence[type]) -> None:
        self.leaves: dict[int, object] = {}
        """The untracked objects, and objects of libraries, by identity."""
        self.containers: dict[int, object] = {}
        """The tracked containers by identity."""
        self._smallest = smallest
        self._shortest = smallest // _MOST_BYTES_EACH
        self._bases = set(map(id, of_libraries))
        self._known: set[int] = set()
        """Types that were seen."""
        self._wanted: set[int] = set()
        """Identities of the types that derive from those of libraries."""

    def read(self, untracked: Batch[Any]) -> None:
        """Add the large ones among some objects that the garbage collector does not track."""
        if not untracked.types <= self._known:
            self._learn(untracked)
        sized = untracked.of_types(_SIZED)
        # Hardly any part of the heap has one, and there are a million texts to ask.
        if max(map(len, sized), default=0) >= self._shortest:
            are_long = map(self._shortest.__le__, map(len, sized))
            long_ones = list(compress(sized, are_long))
            large_ones = _of_size(long_ones, self._smallest)
            self.leaves.update(by_identity(large_ones))
        if not self._wanted.isdisjoint(untracked.types):
            self.leaves.update(by_identity(untracked.of_types(self._wanted)))

    def read_tracked(self, tracked: Batch[Any]) -> None:
        """Add the large ones among some tracked objects."""
        if not tracked.types <= self._known:
            self._learn(tracked)
        sized = tracked.of_types(_SIZED)
        if sized:
            self.containers.update(by_identity(_of_size(sized, self._smallest)))
        if not self._wanted.isdisjoint(tracked.types):
            self.leaves.update(by_identity(tracked.of_types(self._wanted)))

    def _learn(self, batch: Batch[Any]) -> None:
        """Note which of the types that were not seen yet derive from those of libraries."""
        examples = batch.one_of_each(batch.types - self._known)
        for type_id, example in examples.items():
            classes = mro_of(type(example))
            if not self._bases.isdisjoint(map(id, classes)):
                self._wanted.add(type_id)
        self._known |= batch.types
