"""Finds the objects that refer to given ones, among those that were alive at one moment.

The collector's own search visits the whole heap for each question, compares each object with each
one that is asked about, and knows only what refers to them now. So the references are copied once,
while the heap is read. The copy lacks what the collector does not track, and what NumPy's arrays
hold: these are searched here, too.
"""

from __future__ import annotations

import gc
from array import array as number_array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import eq, not_
from typing import Any

from ipygpumem.heap.bulk import AddressFilter, by_identity, chunks
from ipygpumem.heap.kinds.arrays import bases_of, flat_elements, object_arrays
from ipygpumem.heap.knowledge.slices import having_slices, is_view, views_among
from ipygpumem.heap.knowledge.text_keys import dicts_with_keys
from ipygpumem.introspect import identities_of_list, is_atom

_SEARCHES_UNSORTED = 4
"""Number of searches for more objects than an ``AddressFilter`` takes after which the references
are sorted, which takes as long as some three of these searches.
"""
_NO_IDENTITY = 2**64 - 1
"""A number after all identities, so that a search in a sorted row always ends at an item."""


class CopiedReferences:
    """The identities of all objects to which each part of the heap refers."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        """The identities of the objects to which each part refers, as ``identities``."""
        self._sorted: list[number_array[int]] = []
        """The same identities in order, without duplicates, once there have been many searches:
        those of a drawn figure, in which everything refers to everything, are 60.
        """
        self._searches = 0
        """Number of searches for more identities than an ``AddressFilter`` takes."""

    def add(self, row: bytes) -> None:
        """Add the references of the next part, a row of ``identities``."""
        self._rows.append(row)

    def parts_with(self, wanted: Collection[int]) -> list[bool]:
        """Return for each part whether it referred to one of the ``wanted`` objects when it was
        copied.
        """
        if len(wanted) > AddressFilter.MOST:
            self._searches += 1
        if self._rows and self._searches > _SEARCHES_UNSORTED:
            self._sorted = list(map(_sorted_row, self._rows))
            self._rows.clear()
        if self._sorted:
            in_order = list(wanted)
            return [_is_any_in_sorted(in_order, row) for row in self._sorted]
        if len(wanted) > AddressFilter.MOST:
            identities = set(wanted)
            return [not identities.isdisjoint(memoryview(row).cast("Q")) for row in self._rows]
        few = AddressFilter(wanted)
        return [few.is_in(row) for row in self._rows]


def _sorted_row(row: bytes) -> number_array[int]:
    """Return the identities in a row in order, each once, and a last one that no object has."""
    return number_array("Q", [*sorted(set(memoryview(row).cast("Q"))), _NO_IDENTITY])


def _is_any_in_sorted(wanted: list[int], row: number_array[int]) -> bool:
    """Return True if one of some identities is in a sorted row."""
    positions = map(bisect_left, repeat(row), wanted)
    return any(map(eq, map(row.__getitem__, positions), wanted))


class Referrers:
    """The objects that refer to each object that was asked about.

    Args:
        tracked: the objects that the collector tracked at the moment.
        references: the objects to which each of their ``chunks`` refers.
        containers: untracked containers, such as the dict of an ``lru_cache``.
        ndarrays: NumPy arrays.
    """

    def __init__(
        self,
        tracked: list[object],
        references: CopiedReferences,
        containers: list[object],
        ndarrays: list[object],
    ) -> None:
        self._tracked = tracked
        self._references = references
        self._containers = containers
        self._references_of_containers: CopiedReferences | None = None
        """The objects to which each of the ``chunks`` of containers refers; None until an untracked
        object is asked about.
        """
        self._ndarrays = ndarrays
        self._added: dict[int, tuple[object, object]] = {}
        """Objects made later for older ones, each with the older one, by identity."""
        self._referrers: dict[int, list[Any]] = {}
        """The objects that refer to each object that was asked about, by its identity."""
        self._inside_arrays: list[tuple[object, set[int]]] | None = None
        """Arrays, with the identities of the containers and arrays to which they refer; None until
        they are asked about.
        """

    def drop(self) -> None:
        """Drop all references."""
        self._added.clear()
        self._referrers.clear()
        self._inside_arrays = None

    def add(self, item: object, owner: object) -> None:
        """Add an object that was made later for an older one, its owner, as the dict of its
        attributes.
        """
        self._added[id(item)] = item, owner

    def of(self, objects: Mapping[int, object]) -> Mapping[int, Sequence[Any]]:
        """Return the referrers of ``objects``, and of all that were asked about before, by
        identity.
        """
        new = {key: item for key, item in objects.items() if key not in self._referrers}
        if not new:
            return self._referrers
        for key in new:
            self._referrers[key] = []
        for referrer in self._candidates(new):
            for key in new.keys() & map(id, gc.get_referents(referrer)):
                self._referrers[key].append(referrer)
        self._add_dicts_with_keys({key for key, item in new.items() if type(item) is str})
        self._add_arrays(new)
        self._add_owners_of_slices(new)
        self._add_arrays_of_atoms({key for key, item in new.items() if is_atom(item)})
        return self._referrers

    def _add_dicts_with_keys(self, texts: set[int]) -> None:
        """Add the dicts that have some of the ``texts`` (identities) as keys: the collector does
        not report text keys.
        """
        if not texts:
            return
        for part in chunks([*self._tracked, *self._containers]):
            for item in dicts_with_keys(part, texts):
                for key in texts.intersection(map(id, dict.__iter__(item))):
                    if all(referrer is not item for referrer in self._referrers[key]):
                        self._referrers[key].append(item)

    def _add_arrays(self, new: Mapping[int, object]) -> None:
        """Add the arrays that refer to new objects other than numbers and text: the collector does
        not look into an array.
        """
        if self._inside_arrays is None:
            self._inside_arrays = []
            listed = set(map(id, self._ndarrays))
            for array in self._ndarrays:
                identities = _identities_inside(array, listed)
                if identities:
                    self._inside_arrays.append((array, identities))
        for array, identities in self._inside_arrays:
            # ``&`` goes through the shorter one, here for each of thousands of views.
            for key in new.keys() & identities:
                self._referrers[key].append(array)

    def _add_owners_of_slices(self, new: Mapping[int, object]) -> None:
        """Add the objects of Cython that refer to memoryviews by slices, which the collector does
        not know.
        """
        views = {key: item for key, item in new.items() if is_view(item)}
        if not views:
            return
        for part in chunks(self._tracked):
            for item in having_slices(part):
                for key in views_among(item, views):
                    self._referrers[key].append(item)

    def _add_arrays_of_atoms(self, atoms: set[int]) -> None:
        """Add the arrays that have some of the ``atoms``, which are identities of numbers and
        texts, as elements.

        The elements are not kept for later questions, because an array may have millions of them.
        """
        if not atoms:
            return
        listed = set(map(id, self._ndarrays))
        for array in object_arrays(self._ndarrays):
            if not listed.isdisjoint(map(id, bases_of(array))):
                continue
            for key in atoms.intersection(map(id, flat_elements(array) or ())):
                self._referrers[key].append(array)

    def _candidates(self, objects: dict[int, object]) -> list[object]:
        """Return all objects that refer to some of ``objects`` and report it to the collector, and
        maybe further objects.
        """
        added = [item for item, _ in self._added.values()]
        owners = [self._added[key][1] for key in objects if key in self._added]
        candidates = [*_referrers_in_parts(objects, self._tracked, self._references), *owners]
        candidates += _referrers_among(objects, added)
        if not all(map(gc.is_tracked, objects.values())):
            candidates += self._containers_that_refer_to(objects)
        return list(by_identity(candidates).values())

    def _containers_that_refer_to(self, objects: dict[int, object]) -> list[object]:
        """Return the untracked containers that refer to some of ``objects``."""
        if self._references_of_containers is None:
            self._references_of_containers = CopiedReferences()
            for part in chunks(self._containers):
                references = gc.get_referents(*part)
                self._references_of_containers.add(identities_of_list(references))
        return _referrers_in_parts(objects, self._containers, self._references_of_containers)


def _referrers_in_parts(
    objects: dict[int, object], candidates: list[object], references: CopiedReferences
) -> list[object]:
    """Return the ``candidates`` that refer to some of ``objects``; only parts that did so when
    their references were copied are searched.

    Args:
        objects: the objects by identity.
        candidates: the objects whose references were copied, in the same ``chunks``.
        references: the copied references of each chunk.
    """
    referrers = list[object]()
    for part in compress(chunks(candidates), references.parts_with(objects)):
        referrers += _referrers_in(objects, part)
    return referrers


def _referrers_among(objects: dict[int, object], candidates: list[object]) -> list[object]:
    """Return the ``candidates`` that refer to some of ``objects``; fast for any number of
    objects.
    """
    referrers = list[object]()
    for part in chunks(candidates):
        if not objects.keys().isdisjoint(map(id, gc.get_referents(*part))):
            referrers += _referrers_in(objects, part)
    return referrers


def _referrers_in(objects: dict[int, object], candidates: Sequence[object]) -> Iterator[object]:
    """Yield the ``candidates`` that refer to some of ``objects``.

    In C, because there are thousands in each part of the heap: a plain loop takes twice as long.
    """
    references = map(map, repeat(id), map(gc.get_referents, candidates))
    return compress(candidates, map(not_, map(objects.keys().isdisjoint, references)))


def _identities_inside(array: object, listed: set[int]) -> set[int]:
    """Return the identities of the arrays of which an array is a view, and of the objects among its
    elements except numbers and text.

    The elements of a view count only if none of those arrays is among the ``listed`` ones, so that
    nothing else leads to the elements. An example is the column of a data frame.
    """
    base_ids = set(map(id, bases_of(array)))
    if not listed.isdisjoint(base_ids):
        return base_ids
    return base_ids | {id(item) for item in flat_elements(array) or () if not is_atom(item)}
