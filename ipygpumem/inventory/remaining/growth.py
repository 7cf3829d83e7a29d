"""Finds old containers that have grown: a list of numbers, a ``bytearray``, a set, a text stream.

The collector knows neither numbers nor bytes, so that no new object shows this growth:
``buffer.extend(data)`` adds 64 MiB to an object that existed before.
"""

from __future__ import annotations

import io
import re
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import IdentityTable, Kinds, by_identity, of_types
from ipygpumem.heap.containers import GROWING
from ipygpumem.heap.kinds.libraries import VISITS_BUFFER
from ipygpumem.heap.kinds.tensors import each
from ipygpumem.heap.knowledge.own_bytes import rounded
from ipygpumem.introspect import loaded_object
from ipygpumem.records import COMMENT

_TYPES_OF_NUMBERS = frozenset(map(id, (int, float, complex)))
_FIRST_NOT_CACHED = 257
"""Smallest number above those that CPython has only once (-5 to 256): they cost nothing."""
_TYPES_WITH_ITEMS = frozenset(map(id, (*GROWING, Counter, OrderedDict, defaultdict)))
"""Types that have a number of items; no subclasses, whose ``clear`` may do anything."""
_TYPES_WITH_CLEAR = _TYPES_WITH_ITEMS | {id(bytearray)}
"""Types whose ``clear`` empties an object and does nothing else."""
_TYPED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*|\[(-?\d+|\"[^\"\\]*\")\])*")
"""Matches the paths that a user can type: names, attributes, positions and keys of text."""
_LONGEST_SHORT = 100
"""Length up to which a container is *short*: it is no memory to speak of."""
_MOST_WITH_SHORT = 1000
"""Maximum number of objects of which the lengths of short containers are recorded, too."""
_MOST_NUMBERS = 1_000_000
"""Maximum number of items of a container whose numbers are measured; the rest counts like these."""


class GrownContainer(NamedTuple):
    """An old container that has grown."""

    item: Any
    size_bytes: int
    """Bytes that it has grown by, with the numbers in it."""
    earlier_length: int
    """Its items, bytes or letters at the start; 0 if it was short, and the number is unknown."""
    length: int
    """Its items, bytes or letters now."""
    grown_items: int = 0
    """Number of its items that have grown, if only these have."""
    was_empty: bool = False
    """True if it had nothing at the start."""

    @property
    def items(self) -> str:
        """The number of its items at the start and now, such as ``from 1,000 to 9,000 items``;
        empty if it was short, or has no items.
        """
        if self.grown_items:
            return f"in {self.grown_items:,} of its items"
        if self.earlier_length <= _LONGEST_SHORT or id(type(self.item)) not in _TYPES_WITH_ITEMS:
            return ""
        return f"from {self.earlier_length:,} to {self.length:,} items"

    def line_to_empty(self, path: str) -> str:
        """Return the line that empties it, such as ``log.clear()``; empty if it was long at the
        start, so that the line would drop much older data, or if ``path`` is no code.
        """
        if self.earlier_length > _LONGEST_SHORT or self.grown_items:
            return ""
        if id(type(self.item)) not in _TYPES_WITH_CLEAR:
            return ""
        if not _TYPED_PATH.fullmatch(path):
            return ""
        if self.was_empty:
            return f"{path}.clear()"
        # Sorting may have mixed the older items with the new ones.
        older = f"older items, {_LONGEST_SHORT} at most"
        if self.earlier_length > 0:
            noun = "item" if self.earlier_length == 1 else "items"
            older = f"{self.earlier_length} older {noun}"
        return f"{path}.clear(){COMMENT}also drops {older}"


class Extents:
    """The lengths of containers at some moment, by identity; keeps none of them alive.

    The length of a container is its number of items; that of a buffer, its bytes, and that of a
    text stream, its letters.
    """

    def __init__(self) -> None:
        self._known_lengths = IdentityTable[int]()
        """The lengths of long containers, so that 10,000 short lists cost no entries; and those of
        short ones, if they are few.
        """
        self._bases = _measures_by_base()
        self._measures: dict[int, Callable[[Any], int] | None] = {}
        """The function that returns the length of a type's instances, by the type's identity; None
        if they have none.
        """

    @property
    def _lengths(self) -> Mapping[int, int]:
        """The length that each recorded container had, by identity."""
        return self._known_lengths.by_identity()

    def long_among(self, items: Sequence[object]) -> list[object]:
        """Return the containers among the items that were long when their lengths were recorded."""
        lengths = self._lengths
        return [item for item in items if lengths.get(id(item), 0) > _LONGEST_SHORT]

    def length_of(self, item: object) -> int | None:
        """Return the length that a container had; None if it is unknown."""
        return self._lengths.get(id(item))

    def add(self, kinds: Kinds, *, has_short: bool = False) -> None:
        """Record the lengths of the long containers among objects; of the short ones, too, with
        ``has_short`` or if the objects are few.
        """
        has_short |= len(kinds.items) <= _MOST_WITH_SHORT
        for of_type, measure in self._containers(kinds):
            if has_short:
                self._known_lengths.add(of_type, array("Q", _lengths_of(of_type, measure)))
            else:
                long, lengths = _long_with_lengths(of_type, measure)
                self._known_lengths.add(long, array("Q", lengths))

    def add_length(self, item: object, length: int) -> None:
        """Record the length that a container had."""
        self._known_lengths.add([item], [length])

    def grown_containers(self, items: Sequence[object], smallest: int) -> Iterator[GrownContainer]:
        """Yield the containers among ``items`` that have grown by at least ``smallest`` bytes since
        their lengths were recorded. A long container without a recorded length was short, so all
        ``items`` must have existed then.
        """
        lengths_before = self._lengths
        for of_type, measure in self._containers(Kinds(items)):
            for item, length in zip(*_long_with_lengths(of_type, measure), strict=True):
                recorded_length = lengths_before.get(id(item))
                earlier = recorded_length or 0
                if length <= earlier:
                    continue
                size = _grown_bytes(item, measure, earlier, length)
                if size >= smallest:
                    yield GrownContainer(
                        item, size, earlier, length, was_empty=recorded_length == 0
                    )

    def _containers(self, kinds: Kinds) -> Iterator[tuple[list[Any], Callable[[Any], int]]]:
        """Yield, for each type among objects, the containers of this type and the function that
        returns their length.
        """
        for type_id, example in kinds.examples.items():
            if type_id not in self._measures:  # inline: an experiment asks for each of its types
                self._measures[type_id] = None
                for base, measure_of_base in self._bases.items():
                    if type.__subclasscheck__(base, type(example)):
                        self._measures[type_id] = measure_of_base
            measure = self._measures[type_id]
            if measure is not None:
                yield kinds.of_types({type_id}), measure


def _lengths_of(containers: Sequence[Any], measure: Callable[[Any], int]) -> list[int]:
    """Return the lengths of containers of one type; 0 for a closed stream, which has none.

    Args:
        containers: the containers.
        measure: returns the length of one.
    """
    lengths = each(measure, containers)
    if None in lengths:
        return [length or 0 for length in lengths]
    return lengths


def _long_with_lengths(
    containers: Sequence[Any], measure: Callable[[Any], int]
) -> tuple[list[Any], list[int]]:
    """Return the long containers among some of one type, and the length of each."""
    lengths = _lengths_of(containers, measure)
    are_long = list(map(_LONGEST_SHORT.__lt__, lengths))
    if not any(are_long):
        return [], []
    return list(compress(containers, are_long)), list(compress(lengths, are_long))


def _measures_by_base() -> dict[Any, Callable[[Any], int]]:
    """Return, for each base class of containers, the C function that returns the length of an
    instance: a subclass's own ``__len__`` is never called.
    """
    bases = dict[Any, Callable[[Any], int]]()
    for base in GROWING:
        bases[base] = base.__len__
    bases[bytearray] = bytearray.__len__
    if not VISITS_BUFFER:  # else its bytes are a new object
        bases[io.BytesIO] = io.BytesIO.__sizeof__
    bases[io.StringIO] = io.StringIO.tell  # after a write, this is its length
    array: Any = loaded_object("array", "array")
    if type(array) is type:
        bases[array] = array.__dict__["__sizeof__"]
    return bases


def _grown_bytes(item: Any, measure: Callable[[Any], int], earlier: int, length: int) -> int:
    """Return the bytes that a container has grown by: of a list or dict, its share of references
    and the new numbers; of a buffer or stream, its letters.

    Args:
        item: the container.
        measure: the function that has returned its length.
        earlier: its length before.
        length: its length now.
    """
    for base in GROWING:
        if measure is base.__len__:
            new_share = (length - earlier) / length
            bytes_of_references = int(new_share * base.__sizeof__(item))
            return bytes_of_references + _numbers_bytes(item, base, earlier, length)
    return length - earlier


def _numbers_bytes(item: Any, base: Any, earlier: int, length: int) -> int:
    """Return the bytes of the numbers added to a container. A set does not tell which ones are new:
    the average of its numbers counts.

    Args:
        item: the container.
        base: the built-in type from which its type derives.
        earlier: its length before.
        length: its length now.
    """
    first_new = 0 if base is set else earlier
    items = list(islice(base.__iter__(item), first_new, first_new + _MOST_NUMBERS))
    sample = list(items)
    if base is dict:
        sample += islice(dict.values(item), first_new, first_new + _MOST_NUMBERS)
    numbers = by_identity(of_types(_TYPES_OF_NUMBERS, sample))
    numbers_by_size = Counter(
        sys.getsizeof(number)
        for number in numbers.values()
        if type(number) is not int or not -5 <= number < _FIRST_NOT_CACHED
    )
    new_items = length - earlier
    return int(rounded(numbers_by_size) * new_items / max(1, len(items)))
