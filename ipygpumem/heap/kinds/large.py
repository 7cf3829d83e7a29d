"""Finds the objects that are large by themselves, such as long text, without a pass over the heap
of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from ipygpumem.heap.bulk import AddressFilter, Batch, TypesOfMany, by_identity, of_types, subtypes
from ipygpumem.heap.containers import LARGE

_DICT = {id(dict)}
_TEXT = AddressFilter({id(str)})
_BYTES = {id(bytes), id(bytearray)}
"""Types of objects that may be large by themselves."""
_MOST_BYTES_EACH = 400
"""A letter of a text, or an entry of the emptiest dict, takes less: so ``len`` excludes small
objects, several times faster than ``sys.getsizeof``.
"""


def _of_size(items: Sequence[object], smallest: int) -> list[object]:
    """Return the items of at least ``smallest`` bytes."""
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
        """Minimum ``len`` of an object that may be large."""
        self._of_libraries = set(subtypes(of_libraries))
        self._rare = AddressFilter(_BYTES | self._of_libraries)
        """Types of which there are few objects, so that each is measured."""

    def read(self, untracked: TypesOfMany[Any], containers: Sequence[Any]) -> None:
        """Add the large objects among objects that the garbage collector does not track.

        Args:
            untracked: the objects.
            containers: the dicts and tuples among them.
        """
        # Hardly any part of the heap has a large one, and there are a million texts to ask.
        texts = untracked.of_types(_TEXT)
        if max(map(len, texts), default=0) >= self._shortest:
            self.leaves.update(by_identity(_of_size(texts, self._smallest)))
        if max(map(len, containers), default=0) >= self._shortest:
            dicts = of_types(_DICT, containers)
            self.leaves.update(by_identity(_of_size(dicts, self._smallest)))
        rare = untracked.of_types(self._rare)
        if rare:
            plain_bytes = of_types(_BYTES, rare)
            self.leaves.update(by_identity(_of_size(plain_bytes, self._smallest)))
            self.leaves.update(by_identity(of_types(self._of_libraries, rare)))

    def read_tracked(self, tracked: Batch[Any]) -> None:
        """Add the large containers, and the objects of libraries, among tracked objects."""
        for kind in LARGE:
            same = tracked.of_types({id(kind)})
            # ``sys.getsizeof`` takes four times as long, and hardly any part has a large one.
            if max(map(kind.__sizeof__, same), default=0) >= self._smallest:
                self.containers.update(by_identity(_of_size(same, self._smallest)))
        if not self._of_libraries.isdisjoint(tracked.types):
            self.leaves.update(by_identity(tracked.of_types(self._of_libraries)))
