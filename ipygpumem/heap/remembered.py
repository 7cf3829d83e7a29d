"""Recognises objects again without keeping them alive.

An identity alone is not enough: CPython gives the memory of a dead object to the next one of its
size, which is often of its type, too. Objects that support no weak references, such as lists and
dicts, are recognised by some of the objects that they lead to. A cell that runs again often gets
the same places in memory; so small texts and numbers among these objects are kept alive.
"""

from __future__ import annotations

import gc
import sys
import weakref
from array import array
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from ipygpumem.heap.garbage import weak
from ipygpumem.introspect import is_atom

_MOST_SAMPLES = 300
"""Maximum number of objects to examine of one record."""
_FIRST = 32
"""Number of an object's parts among which some are remembered."""
_MOST_CLUES = 2
"""Maximum number of objects by which one is recognised."""
_MOST_STEPS = 4
"""Maximum number of references from an object to one by which it is recognised."""
_SMALL = 4096
"""Maximum bytes of an object to keep alive."""


class Remembered:
    """A weak record of some objects.

    Args:
        items: the objects. Of many, samples decide whether most are still alive.

    Attributes:
        identities: their identities.
    """

    def __init__(self, items: Sequence[object]) -> None:
        self.identities = array("Q", map(id, items))
        self._types = set(map(id, map(type, items)))
        distance = -(-len(items) // _MOST_SAMPLES) or 1
        self._are_all_samples = distance == 1
        self._samples = {id(item): _Sample(item) for item in items[::distance]}

    def alive(self, by_identity: Mapping[int, object]) -> list[object]:
        """Return the remembered objects among live ones, given by their identities."""
        items = dict[int, object]()
        for key in self.identities:
            if key in by_identity and id(type(by_identity[key])) in self._types:
                items[key] = by_identity[key]
        for key, sample in self._samples.items():
            if key in items and not sample.is_of(items[key]):
                del items[key]
        same = self._samples.keys() & items.keys()
        if not self._are_all_samples and 2 * len(same) < len(self._samples):
            return []
        return list(items.values())


class _Sample:
    """The weak record of one object."""

    __slots__ = ("_clues", "_reference")

    def __init__(self, item: object) -> None:
        self._reference = weak(item)
        self._clues = list[_Clue]()
        if self._reference is None:
            parts = _parts_of(item)
            self._clues = [_Clue.below(parts, place) for place in _rarest(parts)]

    def is_of(self, item: object) -> bool:
        """Return True if an object at the same place in memory is the remembered one."""
        if self._reference is not None:
            return self._reference() is item
        if not self._clues:
            return not _parts_of(item)
        return any(clue.is_below(item) for clue in self._clues)


class _Clue(NamedTuple):
    """An object by which another one, which leads to it, is recognised."""

    path: tuple[int, ...]
    """Its place among the parts of the other one, then among the parts of that part, and so on."""
    evidence: object
    """A weak reference, a small text or number itself, or at least an identity."""

    @classmethod
    def below(cls, parts: Sequence[object], place: int) -> _Clue:
        """Return the clue at a place among parts, or in the part there."""
        path = [place]
        while True:
            part = parts[path[-1]]
            if is_atom(part) and sys.getsizeof(part) <= _SMALL:
                return cls(tuple(path), part)
            reference = weak(part)
            if reference is not None:
                return cls(tuple(path), reference)
            parts = _parts_of(part)
            if not parts or len(path) == _MOST_STEPS:
                return cls(tuple(path), id(part))
            path.append(_rarest(parts)[0])

    def is_below(self, item: object) -> bool:
        """Return True if the path from an object leads to the clue."""
        for place in self.path:
            parts = _parts_of(item)
            if place >= len(parts):
                return False
            item = parts[place]
        if type(self.evidence) is weakref.ref:
            return self.evidence() is item
        return item is self.evidence or id(item) == self.evidence


def _parts_of(item: object) -> list[object]:
    """Return some of the objects to which one refers, always in the same order."""
    if type(item) is list or type(item) is tuple:
        parts = list(item[:_FIRST])  # ``gc.get_referents`` would copy all of them
    elif type(item) is dict:
        parts = list(islice(item.values(), _FIRST))
    else:
        parts = gc.get_referents(item)[:_FIRST]
    return [part for part in parts if part is not type(item)]


def _rarest(parts: Sequence[object]) -> list[int]:
    """Return the places of the parts with the fewest references: many objects refer to None, small
    numbers and short texts.
    """
    return nsmallest(
        _MOST_CLUES, range(len(parts)), key=lambda place: sys.getrefcount(parts[place])
    )
