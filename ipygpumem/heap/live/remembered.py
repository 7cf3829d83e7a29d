"""Recognises objects again without keeping them alive.

An identity alone is not enough: CPython gives the memory of a dead object to the next one of its
size, which is often of its type, too. Objects that support no weak references, such as lists and
dicts, are recognised by some of the objects that they lead to. A cell that runs again often gets
the same addresses; so small texts and numbers among these objects are kept alive.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ipygpumem.heap.live.garbage import Known, lasting_weak
from ipygpumem.introspect import is_atom

_MOST_SAMPLES = 300
"""Maximum number of objects to examine of one record."""
_MOST_CANDIDATES = 32
"""Maximum number of an object's first, and of its last parts among which one is remembered."""
_MOST_PARTS = 10_000
"""Maximum number of an object's first, and of its last parts among which one is found again."""
_MOST_STEPS = 4
"""Maximum number of references from an object to one by which it is recognised."""
_MOST_KEPT_BYTES = 4096
"""Maximum bytes of a number or text to keep alive."""
_PART_LENGTH = 64
"""Length of each part of a text that is compared."""


def sample_of_text(text: Any) -> int:
    """Return a hash of the length and some parts of a ``str``, ``bytes`` or ``bytearray``."""
    middle = len(text) // 2
    parts = [text[:_PART_LENGTH], text[middle : middle + _PART_LENGTH], text[-_PART_LENGTH:]]
    if type(text) is bytearray:
        parts = list(map(bytes, parts))
    return hash((len(text), *parts))


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
        distance = -(-len(items) // _MOST_SAMPLES) or 1  # rounded up
        self._are_all_samples = distance == 1
        self._samples = {id(item): _Sample(item) for item in items[::distance]}

    def alive(self, by_identity: Mapping[int, object]) -> list[object]:
        """Return the remembered objects among live objects.

        Args:
            by_identity: the live objects, by identity; some may be new ones at the same addresses.
        """
        items = dict[int, object]()
        for key in self.identities:
            if key in by_identity and id(type(by_identity[key])) in self._types:
                items[key] = by_identity[key]
        for key, sample in self._samples.items():
            if key in items and not sample.is_of(items[key]):
                del items[key]
        # If most samples are other objects now, so are most objects without a sample.
        same_samples = self._samples.keys() & items.keys()
        if not self._are_all_samples and 2 * len(same_samples) < len(self._samples):
            return []
        return list(items.values())


class _Sample:
    """The weak record of one object: a weak reference, else the hash of a text, else clues."""

    __slots__ = ("_clues", "_of_text", "_reference")

    def __init__(self, item: object) -> None:
        self._reference = lasting_weak(item)
        self._of_text = _sample_of_constant(item)
        self._clues = list[_Clue]()
        if self._reference is None:
            self._clues = _clues_of(_parts_of(item))

    def is_of(self, item: object) -> bool:
        """Return True if an object that has the remembered identity is the remembered one."""
        if self._reference is not None:
            return self._reference() is item
        if self._of_text is not None:
            return _sample_of_constant(item) == self._of_text
        if not self._clues:
            return not _parts_of(item)
        return any(clue.is_below(item) for clue in self._clues)


class _Clue(NamedTuple):
    """A part by which an object is recognised, such as a text in a list of records."""

    path: tuple[int, ...]
    """The position among the parts of the object, then the position among the parts of that part,
    and so on, down to the clue.

    The first position changes when the earlier items of a list are removed.
    """
    evidence: object
    """A weak reference to the clue, the clue itself if it is a small text or number, or at least
    its identity, with a sample if it is a text.
    """

    @classmethod
    def below(cls, parts: Sequence[object], position: int) -> _Clue:
        """Return the clue at a position among the parts of an object, or inside of the part there
        if that is no text, number, or object with weak references.
        """
        path = [position]
        while True:
            part = parts[path[-1]]
            if is_atom(part) and sys.getsizeof(part) <= _MOST_KEPT_BYTES:
                return cls(tuple(path), part)
            reference = lasting_weak(part)
            if reference is not None:
                return cls(tuple(path), reference)
            parts = _parts_of(part)
            if not parts or len(path) == _MOST_STEPS:
                return cls(tuple(path), (id(part), _sample_of_constant(part)))
            path.append(_rarest(parts, range(min(len(parts), _MOST_CANDIDATES))))

    def is_below(self, item: object) -> bool:
        """Return True if an object leads to the clue by the path, or by the path with another
        first position.
        """
        parts = _parts_of(item)
        position = self.path[0]
        if position < len(parts) and self._is_below_part(parts[position]):
            return True
        return any(map(self._is_below_part, parts))

    def _is_below_part(self, part: object) -> bool:
        """Return True if the path after its first position leads from a part to the clue."""
        for position in self.path[1:]:
            parts = _parts_of(part)
            if position >= len(parts):
                return False
            part = parts[position]
        if isinstance(self.evidence, Known):
            return self.evidence() is part
        if part is self.evidence:
            return True
        return self.evidence == (id(part), _sample_of_constant(part))


def _sample_of_constant(item: object) -> int | None:
    """Return the sample of a text that cannot change; None for any other object."""
    if type(item) is str or type(item) is bytes:
        return sample_of_text(item)
    return None


def _clues_of(parts: Sequence[object]) -> list[_Clue]:
    """Return two clues among the parts of an object, one in each half: users append to a list, or
    remove its first items.
    """
    middle = (len(parts) + 1) // 2
    first = range(min(middle, _MOST_CANDIDATES))
    last = range(max(middle, len(parts) - _MOST_CANDIDATES), len(parts))
    rarest = [_rarest(parts, positions) for positions in (first, last) if positions]
    return [_Clue.below(parts, position) for position in rarest]


def _parts_of(item: object) -> Sequence[object]:
    """Return the first and last objects to which an object refers, always in the same order."""
    if type(item) is list or type(item) is tuple:
        return _ends_of(item)  # ``gc.get_referents`` would copy all of them
    if type(item) is dict:
        values = item.values()
        if len(values) <= 2 * _MOST_PARTS:
            return list(values)
        last = list(islice(reversed(values), _MOST_PARTS))
        return [*islice(values, _MOST_PARTS), *reversed(last)]
    referents = gc.get_referents(item)
    return _ends_of([part for part in referents if part is not type(item)])


def _ends_of(items: Sequence[object]) -> Sequence[object]:
    """Return the first and the last items."""
    if len(items) <= 2 * _MOST_PARTS:
        return items
    return [*items[:_MOST_PARTS], *items[-_MOST_PARTS:]]


def _rarest(parts: Sequence[object], positions: Iterable[int]) -> int:
    """Return the position of the part with the fewest references: many objects refer to None, small
    numbers and short texts.
    """
    return min(positions, key=lambda position: sys.getrefcount(parts[position]))
