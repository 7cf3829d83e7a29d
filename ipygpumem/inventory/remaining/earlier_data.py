"""Recognises data that was there at some moment, wherever it has been moved since, and that the
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

_SHORTEST_TEXT = 1 << 6
"""Minimum length of a text that is recorded: a sentence, not a name."""
_MOST_RECORDED = 50_000
"""Maximum number of texts and containers that are recorded: 50 ms of work."""
_MOST_KEYS = 10
"""Maximum number of keys of a changed dict by which it is recognised."""
_SAMPLE_OF_EMPTY_DICT = hash(())
"""The sample of an empty dict."""
_LENGTH_COMPARED_IN_PARTS = 1 << 12
"""Length of texts of which only parts are compared."""
_TYPES_OF_CONSTANT_TEXT = {id(str), id(bytes)}
_TYPES_OF_TEXT = _TYPES_OF_CONSTANT_TEXT | {id(bytearray)}
_RECOGNISABLE_TYPES = _TYPES_OF_TEXT | UNTRACKED_TYPES


class EarlierData:
    """The data that the collector did not track at some moment, by identity; keeps none of it
    alive.

    Once an object has died, its address is used again. So an object counts as the one that was at
    its address only if both have the same *sample*, a hash of a small part: of a dict, its first
    two keys.
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
        """Record a sample of each piece of data that the collector does not track among objects."""
        data = _untracked_data_to_record(kinds)
        if not data:
            return
        most_to_add = _MOST_RECORDED - len(self._samples)
        if len(data) > most_to_add:
            self._is_complete = False
        for of_type, samples in _with_samples(data[:most_to_add]):
            self._samples.update(zip(map(id, of_type), samples, strict=True))

    def new_data_among(self, items: Sequence[object]) -> list[object]:
        """Return the data among the items that was made since and that the collector does not
        track, such as a text that was read from a file. Return nothing if there was too much
        earlier data to remember.
        """
        return self.new_among(_untracked_data(items))

    def new_among(self, items: Sequence[object]) -> list[object]:
        """Return the items that are surely no earlier data, each once. Return nothing if there was
        too much earlier data to remember.
        """
        if not self._is_complete:
            return []
        objects = by_identity(items)
        possible = by_identity(self.possibly_earlier_among(list(objects.values())))
        return [objects[key] for key in objects.keys() - possible.keys()]

    def possibly_earlier_among(self, items: Sequence[object]) -> list[object]:
        """Return the earlier data among the items, and the items that may be earlier data although
        their sample has changed: a bytearray, or a dict that was empty.
        """
        changeable: list[Any] = of_types({id(bytearray), id(dict)}, items)
        possible = [
            item
            for item in self._at_recorded_addresses(changeable)
            if type(item) is bytearray or self._samples[id(item)] == _SAMPLE_OF_EMPTY_DICT
        ]
        return [*self.earlier_among(items), *possible]

    def earlier_behind(self, items: Sequence[object]) -> list[object]:
        """Return the earlier data among the items, and the earlier data in those of them that are
        containers which the collector does not track.
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
        it may have got more of them since, as by ``row["score"] = 3``.
        """
        candidates = self._at_recorded_addresses(items)
        earlier = list[object]()
        if not candidates:
            return earlier
        for of_type, samples in _with_samples(candidates):
            earlier += self._with_same_sample(of_type, samples)
        dicts = of_types({id(dict)}, candidates)
        # A dict that had one key has a sample of that one.
        with_several_keys = [item for item in dicts if len(item) > 1]
        samples_of_one_key = _samples_of_first_keys(with_several_keys)
        earlier += self._with_same_sample(with_several_keys, samples_of_one_key)
        # The first keys may have moved.
        recognised = by_identity(earlier)
        unrecognised = [item for item in dicts if id(item) not in recognised]
        earlier += [item for item in unrecognised if self._has_earlier_keys(item)]
        return earlier

    def _at_recorded_addresses(self, items: Sequence[object]) -> list[Any]:
        """Return the items whose addresses earlier data had. They may be other objects, if that
        data has died since.
        """
        return list(compress(items, map(self._samples.__contains__, map(id, items))))

    def _has_earlier_keys(self, item: dict[Any, Any]) -> bool:
        """Return True for a dict that still has the keys of its sample, at any place: after
        ``row["id"] = row.pop("id")``, the first key is the last one.
        """
        sample = self._samples[id(item)]
        keys = list(islice(map(id, item), _MOST_KEYS))
        return any(
            hash(group) == sample for number in (1, 2) for group in permutations(keys, number)
        )

    def _with_same_sample(
        self, items: Sequence[object], samples: Iterable[int]
    ) -> Iterator[object]:
        """Return the items whose sample is that of the earlier object at their address: each is
        that object.

        Args:
            items: objects at addresses of earlier ones.
            samples: their samples now.
        """
        before = map(self._samples.__getitem__, map(id, items))
        return compress(items, map(eq, before, samples))


def _untracked_data_to_record(kinds: Kinds) -> list[Any]:
    """Return the data among objects that the collector does not track. Empty dicts and short
    bytearrays are included, because code may fill them later.
    """
    if kinds.examples.keys().isdisjoint(_RECOGNISABLE_TYPES):
        return []
    texts = kinds.of_types(_TYPES_OF_CONSTANT_TEXT)
    large = compress(texts, map(_SHORTEST_TEXT.__le__, map(len, texts)))
    untracked = filterfalse(gc.is_tracked, kinds.of_types(UNTRACKED_TYPES))
    without_empty_tuple = filter(functools.partial(is_not, ()), untracked)  # there is only one
    return [*large, *without_empty_tuple, *kinds.of_types({id(bytearray)})]


def _untracked_data(items: Sequence[object]) -> list[Any]:
    """Return the large texts among the items, and the containers that the collector does not track,
    without empty ones: these may be older, and are no memory to speak of.
    """
    untracked = filterfalse(gc.is_tracked, filter(None, of_types(UNTRACKED_TYPES, items)))
    return [*_large_texts(items), *untracked]


def _large_texts(items: Sequence[object]) -> list[Any]:
    """Return the large texts among the items; texts of subclasses are left out."""
    texts: list[Any] = of_types(_TYPES_OF_TEXT, items)
    return list(compress(texts, map(_SHORTEST_TEXT.__le__, map(len, texts))))


def _with_samples(items: Sequence[object]) -> Iterator[tuple[list[Any], Iterator[int]]]:
    """Yield, for each type, the texts or containers of this type among the items, and a sample of
    each. Empty tuples are left out.

    The sample of a text is its hash; that of a tuple, a hash of the identities of its first and
    last items; that of a dict, a hash of the identities of its first two keys, which stay the same
    if it gets more keys or other values.
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
    if max(map(len, texts)) < _LENGTH_COMPARED_IN_PARTS:
        return map(hash, texts)
    return (
        hash(text) if len(text) < _LENGTH_COMPARED_IN_PARTS else sample_of_text(text)
        for text in texts
    )


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
