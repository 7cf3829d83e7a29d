"""Recognises data that was there at some moment, wherever it has moved since, and that the
collector does not track: large texts, and dicts and tuples of text and numbers.

Nothing else tells its age: ``log.rows = [row for row in log.rows if row["level"] > 3]`` moves the
earlier rows into a new list.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, filterfalse, islice, permutations, repeat
from operator import eq, is_not, itemgetter
from typing import Any

from ipygpumem.heap.bulk import Kinds, by_identity, of_types, types_of
from ipygpumem.heap.containers import UNTRACKED_TYPES
from ipygpumem.heap.live.remembered import sample_of_text

_LARGE = 1 << 6
"""Minimum length of a text that is recorded: a sentence, not a name."""
_MOST = 50_000
"""Maximum number of texts and containers that are recorded: 50 ms of work."""
_MOST_KEYS = 10
"""Maximum number of keys of a changed dict by which it is recognised."""
_OF_EMPTY = hash(())
"""The sample of an empty dict."""
_LONG = 1 << 12
"""Length of texts of which only parts are compared."""
_CONSTANT_TEXTS = {id(str), id(bytes)}
_TEXTS = _CONSTANT_TEXTS | {id(bytearray)}
_RECOGNISED = _TEXTS | UNTRACKED_TYPES


class EarlierData:
    """The untracked data at some moment, by identity; keeps none of it alive.

    An object counts as the one that was at its address if both have the same *sample*, a hash of a
    small part: the address of an object that has died is used again.
    """

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        """The sample of each object at that moment, by its identity."""
        self._is_complete = True
        """False if there was too much data to record."""

    @property
    def is_empty(self) -> bool:
        """True if there was no data."""
        return not self._samples

    def add(self, kinds: Kinds) -> None:
        """Record a sample of each piece of untracked data among objects."""
        data = _recognisable(kinds)
        if not data:
            return
        most_to_add = _MOST - len(self._samples)
        if len(data) > most_to_add:
            self._is_complete = False
        for of_type, samples in _with_samples(data[:most_to_add]):
            self._samples.update(zip(map(id, of_type), samples, strict=True))

    def new_data_among(self, items: Sequence[object]) -> list[object]:
        """Return the untracked data among the items that was made since, such as a text that was
        read from a file; nothing if there was too much earlier data to remember.
        """
        return self.new_among(_untracked_data(items))

    def new_among(self, items: Sequence[object]) -> list[object]:
        """Return the items that are surely no earlier data, each once; nothing if there was too
        much earlier data to remember.
        """
        if not self._is_complete:
            return []
        objects = by_identity(items)
        possible = by_identity(self.possibly_earlier_among(list(objects.values())))
        return [objects[key] for key in objects.keys() - possible.keys()]

    def possibly_earlier_among(self, items: Sequence[object]) -> list[object]:
        """Return the earlier data among the items, and the items that may be earlier data: a
        bytearray whose bytes have changed, or a dict that was empty.
        """
        changeable: list[Any] = of_types({id(bytearray), id(dict)}, items)
        possible = [
            item
            for item in self._at_recorded_addresses(changeable)
            if type(item) is bytearray or self._samples[id(item)] == _OF_EMPTY
        ]
        return [*self.earlier_among(items), *possible]

    def earlier_behind(self, items: Sequence[object]) -> list[object]:
        """Return the earlier data among the items, and in containers among them that the collector
        does not track.
        """
        earlier = list[object]()
        waiting = () if self.is_empty else items
        while waiting:
            earlier += self.earlier_among(waiting)
            untracked = filterfalse(gc.is_tracked, of_types(UNTRACKED_TYPES, waiting))
            waiting = gc.get_referents(*by_identity(list(untracked)).values())
        return earlier

    def earlier_among(self, items: Sequence[object]) -> list[object]:
        """Return the items that are data of that moment. A dict is recognised by its first keys, so
        it may have got more, as by ``row["score"] = 3``.
        """
        candidates = self._at_recorded_addresses(items)
        earlier = list[object]()
        if not candidates:
            return earlier
        for of_type, samples in _with_samples(candidates):
            earlier += self._with_same_sample(of_type, samples)
        dicts = of_types({id(dict)}, candidates)
        with_several_keys = [item for item in dicts if len(item) > 1]  # may have had one key
        samples_of_one_key = _samples_of_first_keys(with_several_keys)
        earlier += self._with_same_sample(with_several_keys, samples_of_one_key)
        recognised = by_identity(earlier)
        changed = [item for item in dicts if id(item) not in recognised]
        earlier += [item for item in changed if self._has_earlier_keys(item)]
        return earlier

    def _at_recorded_addresses(self, items: Sequence[object]) -> list[Any]:
        """Return the items at the addresses of earlier data, which may have died since."""
        return list(compress(items, map(self._samples.__contains__, map(id, items))))

    def _has_earlier_keys(self, item: dict[Any, Any]) -> bool:
        """Return True for a dict that has the keys of its sample, wherever they are now: they are
        the last ones after ``row["id"] = row.pop("id")``.
        """
        sample = self._samples[id(item)]
        keys = list(islice(map(id, item), _MOST_KEYS))
        return any(
            hash(group) == sample for number in (1, 2) for group in permutations(keys, number)
        )

    def _with_same_sample(
        self, items: Sequence[object], samples: Iterable[int]
    ) -> Iterator[object]:
        """Return the objects with the sample that an object at their address had: the same ones.

        Args:
            items: objects at addresses of remembered ones.
            samples: their samples now.
        """
        before = map(self._samples.__getitem__, map(id, items))
        return compress(items, map(eq, before, samples))


def _recognisable(kinds: Kinds) -> list[Any]:
    """Return the untracked data among objects, with empty dicts and short bytearrays, which later
    code may fill.
    """
    if kinds.examples.keys().isdisjoint(_RECOGNISED):
        return []
    texts = kinds.of_types(_CONSTANT_TEXTS)
    large = compress(texts, map(_LARGE.__le__, map(len, texts)))
    untracked = filterfalse(gc.is_tracked, kinds.of_types(UNTRACKED_TYPES))
    without_empty_tuple = filter(functools.partial(is_not, ()), untracked)  # there is only one
    return [*large, *without_empty_tuple, *kinds.of_types({id(bytearray)})]


def _untracked_data(items: Sequence[object]) -> list[Any]:
    """Return the large texts among the items, and the containers that the collector does not track,
    without empty ones.
    """
    untracked = filterfalse(gc.is_tracked, filter(None, of_types(UNTRACKED_TYPES, items)))
    return [*_large_texts(items), *untracked]


def _large_texts(items: Sequence[object]) -> list[Any]:
    """Return the large texts among the items, but for texts of subclasses."""
    texts: list[Any] = of_types(_TEXTS, items)
    return list(compress(texts, map(_LARGE.__le__, map(len, texts))))


def _with_samples(items: Sequence[object]) -> Iterator[tuple[list[Any], Iterator[int]]]:
    """Yield for each type the texts and containers among the items, without empty tuples, and a
    sample of each: a hash of a text, or of the identities of two items of a tuple or keys of a
    dict.

    A dict's first keys stay the same if it gets more, or other values.
    """
    type_ids = types_of(items)
    for kind, samples_of in _SAMPLES.items():
        if id(kind) not in type_ids:
            continue
        same: list[Any] = of_types({id(kind)}, items)
        if kind is tuple:
            same = list(filter(None, same))
        if same:
            yield same, samples_of(same)


# Loops in C: an experiment takes the samples of 50,000 objects.
def _samples_of_dicts(dicts: list[dict[Any, Any]]) -> Iterator[int]:
    """Yield the sample of each dict: its first two keys."""
    return _hashes_of_identities(map(islice, dicts, repeat(2)))


def _samples_of_first_keys(dicts: list[dict[Any, Any]]) -> Iterator[int]:
    """Yield the sample that each dict had if it had only one key."""
    return _hashes_of_identities(map(islice, dicts, repeat(1)))


def _samples_of_tuples(tuples: list[tuple[Any, ...]]) -> Iterator[int]:
    """Yield the sample of each tuple, which is not empty: its first and last items."""
    return _hashes_of_identities(map(itemgetter(0, -1), tuples))


def _hashes_of_identities(groups: Iterator[Iterable[object]]) -> Iterator[int]:
    """Yield a hash of the identities of each group of objects."""
    return map(hash, map(tuple, map(map, repeat(id), groups)))


def _samples_of_texts(texts: list[Any]) -> Iterator[int]:
    """Yield the hash of each text; of a long one, the hash of parts of it."""
    if max(map(len, texts)) < _LONG:
        return map(hash, texts)
    return (hash(text) if len(text) < _LONG else sample_of_text(text) for text in texts)


def _samples_of_bytearrays(arrays: list[bytearray]) -> Iterator[int]:
    """Return the sample of each bytearray: a hash of parts of it."""
    return map(sample_of_text, arrays)


_SAMPLES: dict[type, Callable[[list[Any]], Iterator[int]]] = {
    str: _samples_of_texts,
    bytes: _samples_of_texts,
    bytearray: _samples_of_bytearrays,
    dict: _samples_of_dicts,
    tuple: _samples_of_tuples,
}
"""The function that returns the samples of the objects of each type."""
