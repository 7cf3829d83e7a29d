"""Recognises large texts that were there at some moment, wherever they have moved since.

The collector does not track text, so that nothing else tells its age: ``log.rows = log.rows + new``
moves the earlier texts into a new list.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import compress, filterfalse, islice
from typing import Any

from ipygpumem.heap.bulk import by_identity, of_types
from ipygpumem.heap.remembered import sample_of_text

_LARGE = 1 << 9
"""Minimum length of a text that is recorded: one of prose, not a name."""
_MOST = 20_000
"""Maximum number of texts that are recorded: 20 ms of work."""
_CONTAINERS = {id(tuple), id(dict)}
"""Types of containers that the collector does not track while they have nothing but text and
numbers.
"""
_KINDS = {id(str), id(bytes), id(bytearray)}


class EarlierTexts:
    """The large texts at some moment, by identity; keeps none of them alive.

    A text counts as the one that was at its place if the two are alike: the place of one that has
    died is used again.
    """

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if there was none."""
        return not self._samples

    def add(self, items: Sequence[object]) -> None:
        """Add the large texts among some objects."""
        for text in islice(_large_texts(items), _MOST - len(self._samples)):
            self._samples[id(text)] = sample_of_text(text)

    def behind(self, items: Sequence[object]) -> list[object]:
        """Return the texts that were there, among some objects and in containers among them that
        the collector does not track.
        """
        earlier = list[object]()
        waiting = () if self.is_empty else items
        while waiting:
            earlier += self.among(waiting)
            untracked = filterfalse(gc.is_tracked, of_types(_CONTAINERS, waiting))
            waiting = gc.get_referents(*by_identity(list(untracked)).values())
        return earlier

    def among(self, items: Sequence[object]) -> list[object]:
        """Return the texts among some objects that were there."""
        earlier = list[object]()
        for text in _large_texts(items):
            if self._samples.get(id(text)) == sample_of_text(text):
                earlier.append(text)
        return earlier


def _large_texts(items: Sequence[object]) -> list[Any]:
    """Return the large texts among some objects, but for those of subclasses."""
    texts: list[Any] = of_types(_KINDS, items)
    return list(compress(texts, map(_LARGE.__le__, map(len, texts))))
