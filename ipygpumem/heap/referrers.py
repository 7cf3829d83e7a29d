"""Finds the objects that refer to given ones, among those that were alive at one moment.

The collector's own search compares each object that it tracks with each one that is asked about. It
misses containers that it no longer tracks, and everything that NumPy's arrays hold, so that these
are searched here.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from itertools import compress, filterfalse
from typing import Any

from ipygpumem.heap.arrays import flat_elements, holding_objects, is_array, library_type
from ipygpumem.heap.bulk import Batch, by_identity, chunks
from ipygpumem.heap.knowledge.text_keys import dicts_with_keys
from ipygpumem.introspect import is_atom

_FEW = 100
"""Maximum number of objects for the collector's own search for referrers, which compares every
pair.
"""
_CONTAINERS = {id(dict), id(tuple)}
"""Types that the collector stops tracking if they contain only arrays, numbers and text."""


class Moment:
    """Tells objects that were alive at a moment from those made later.

    Attributes:
        young: identities of the youngest objects; younger ones were made later, unless a collection
            has run since.
    """

    def __init__(self) -> None:
        self.young: set[int] = set(map(id, gc.get_objects(generation=0)))
        self._collections = _collections()

    def made_later(self, identities: set[int]) -> set[int] | None:
        """Return the identities of objects that were made since; None if a collection has run, so
        that they cannot be told apart.
        """
        if self._collections != _collections():
            return None
        later = identities.intersection(map(id, gc.get_objects(generation=0)))
        return later - self.young


def _collections() -> list[int]:
    """Return the number of collections so far of each generation."""
    return [generation["collections"] for generation in gc.get_stats()]


class Referrers:
    """The objects that refer to each object that was asked about.

    Args:
        moment: when the lists were made.
        tracked: the objects that the collector tracked then.
        containers: untracked containers that hold more than plain numbers and text.
        ndarrays: NumPy arrays.
        tasks: asyncio tasks.
    """

    def __init__(
        self,
        moment: Moment,
        tracked: list[object],
        containers: list[object],
        ndarrays: list[object],
        tasks: list[object],
    ) -> None:
        self._moment = moment
        self._tracked, self._containers = tracked, containers
        self._ndarrays, self._tasks = ndarrays, tasks
        self._added: dict[int, object] = {}
        """Objects made later for older ones, by identity."""
        self._referrers: dict[int, list[Any]] = {}
        """The objects that refer to each object that was asked about, by its identity."""
        self._inside_arrays: list[tuple[object, set[int]]] | None = None
        """Arrays, with the identities of the containers and arrays to which they refer; None until
        they are asked about.
        """
        self._containers_of_any: list[object] | None = None
        """Untracked containers, also those of numbers and text; None until one is asked about."""

    def drop(self) -> None:
        """Drop all references."""
        self._added.clear()
        self._referrers.clear()
        self._inside_arrays = None
        self._containers_of_any = None

    def add(self, item: object) -> None:
        """Add an object that was made later for an older one."""
        self._added[id(item)] = item

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
        self._add_arrays_of_atoms({key for key, item in new.items() if is_atom(item)})
        return self._referrers

    def _add_dicts_with_keys(self, texts: set[int]) -> None:
        """Add the dicts that have text as keys, which the collector omits."""
        if not texts:
            return
        for part in chunks([*self._tracked, *self._all_containers()]):
            for item in dicts_with_keys(part, texts):
                for key in texts.intersection(map(id, dict.__iter__(item))):
                    if all(referrer is not item for referrer in self._referrers[key]):
                        self._referrers[key].append(item)

    def _add_arrays(self, new: Mapping[int, object]) -> None:
        """Add the arrays that refer to containers and arrays: the collector does not look into
        one.
        """
        if self._inside_arrays is None:
            self._inside_arrays = []
            listed = set(map(id, self._ndarrays))
            for array in self._ndarrays:
                inside = _identities_inside(array, listed)
                if inside:
                    self._inside_arrays.append((array, inside))
        for array, inside in self._inside_arrays:
            for key in inside.intersection(new):
                self._referrers[key].append(array)

    def _add_arrays_of_atoms(self, atoms: set[int]) -> None:
        """Add the arrays that refer to numbers and text, which are not kept for later questions,
        because there may be millions in an array.
        """
        if not atoms:
            return
        listed = set(map(id, self._ndarrays))
        for array in compress(self._ndarrays, holding_objects(self._ndarrays)):
            if not listed.isdisjoint(_bases_of(array)):
                continue
            for key in atoms.intersection(map(id, flat_elements(array) or ())):
                self._referrers[key].append(array)

    def _candidates(self, objects: dict[int, object]) -> list[object]:
        """Return all objects that refer to some of ``objects``, and maybe more."""
        if len(objects) > _FEW:
            found = _that_refer_to(objects, self._tracked)
            found += _that_refer_to(objects, list(self._added.values()))
        else:
            # A task does not report to that search what its future refers to.
            of_tasks = _that_refer_to(objects, self._tasks)
            found = self._alive([*gc.get_referrers(*objects.values()), *of_tasks])
        if not all(map(gc.is_tracked, objects.values())):
            # The collector's own search misses containers that it no longer tracks, some since the
            # heap was made.
            untracked = filterfalse(gc.is_tracked, self._tracked)
            added = self._added.values()
            found += _that_refer_to(objects, [*self._containers, *added, *untracked])
        if any(map(is_atom, objects.values())):
            found += _that_refer_to(objects, self._all_containers())
        return list(by_identity(found).values())

    def _all_containers(self) -> list[object]:
        """Return the untracked containers, also those that hold only numbers and text, such as the
        dict of an ``lru_cache``.
        """
        if self._containers_of_any is None:
            found: dict[int, object] = {}
            for part in chunks(self._tracked):
                untracked = list(filterfalse(gc.is_tracked, gc.get_referents(*part)))
                found.update(by_identity(Batch(untracked).of_types(_CONTAINERS)))
            self._containers_of_any = list(found.values())
        return self._containers_of_any

    def _alive(self, items: Sequence[object]) -> list[object]:
        """Return the items that were alive at the moment; a set of all identities would take
        seconds.
        """
        wanted = by_identity(items)
        later = self._moment.made_later(set(wanted))
        if later is None:
            alive = set(filter(wanted.__contains__, map(id, self._tracked)))
        else:
            alive = wanted.keys() - later
        return [item for key, item in wanted.items() if key in alive or key in self._added]


def _that_refer_to(objects: dict[int, object], candidates: list[object]) -> list[object]:
    """Return the ``candidates`` that refer to some of ``objects``; fast for any number of
    objects.
    """
    found = list[object]()
    for part in chunks(candidates):
        if objects.keys().isdisjoint(map(id, gc.get_referents(*part))):
            continue
        found += [item for item in part if _refers_to(item, objects)]
    return found


def _refers_to(item: object, objects: dict[int, object]) -> bool:
    return not objects.keys().isdisjoint(map(id, gc.get_referents(item)))


def _identities_inside(array: object, listed: set[int]) -> set[int]:
    """Return the identities of the arrays of which an array is a view, or of the containers and
    arrays among its elements.

    If none of the former is among the ``listed`` arrays, both: nothing else leads to the elements.
    An example is the column of a data frame.
    """
    bases = _bases_of(array)
    if not listed.isdisjoint(bases):
        return bases
    return bases | {id(item) for item in flat_elements(array) or () if not is_atom(item)}


def _bases_of(array: object) -> set[int]:
    """Return the identities of the arrays of which an array is a view."""
    bases = set[int]()
    read_base = library_type("numpy", "ndarray").__dict__["base"].__get__
    while is_array(array):
        viewed = read_base(array)
        if viewed is None:
            break
        bases.add(id(viewed))
        array = viewed
    return bases
