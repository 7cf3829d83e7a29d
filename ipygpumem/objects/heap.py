"""Looks over everything that is alive, and sees who refers to whom.

The garbage collector lists containers only. NumPy arrays are not among them, and neither is a dict or tuple that
holds nothing but arrays, numbers and text (CPython stops tracking it): both are found as what listed objects refer to.
Running frames and C++ code are out of sight; ``holders`` asks for the former.

A heap has millions of objects, so whatever looks at each of them is a loop in C (see ``bulk``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, count, filterfalse, islice, repeat
from operator import is_
from typing import Any

from ipygpumem.introspect import ATOMS, is_atom, is_instance
from ipygpumem.objects.arrays import (
    Span,
    StorageKey,
    describe,
    elements,
    flat_elements,
    library_type,
    owner_of,
    place_of,
)
from ipygpumem.objects.bulk import by_identity, chunks, of_types, one_of_each, types_of
from ipygpumem.objects.holders.frames import emptied_locals

_FEW = 50
"""Up to so many objects the collector's own search for referrers is faster: it compares each reference with each."""


class _Turn:
    """The right to look over the heap. As the collector, it is one for the whole process."""

    def __init__(self) -> None:
        self.lock, self.was_on = threading.RLock(), False

    def begin_in_child(self) -> None:
        """End another thread's look in a forked process, because that thread stayed in the parent."""
        if not self.lock.acquire(blocking=False) and self.was_on:
            gc.enable()
        self.lock = threading.RLock()


_TURN = _Turn()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_TURN.begin_in_child)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Open a block in which no other thread looks over the heap, and no garbage is collected.

    Two looks at once would find the lists that the other makes, without end; and none may change what it sees. Make
    a ``Heap`` in here, and drop it before the end.
    """
    with _TURN.lock:
        was_on = _TURN.was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


class Heap:
    """What was alive when it was made. It keeps all of that alive too: use it, then drop it.

    Attributes:
        tensors: torch tensors, also those that only another object refers to.
        ndarrays: NumPy arrays.
        modules: torch's modules.
        optimizers: torch's optimizers.
        tasks: asyncio's tasks.
    """

    def __init__(self, beside: Iterable[object] = ()) -> None:
        # While no list of ours has what is peeked at: ``peek`` counts references.
        beside, emptied = list(beside), emptied_locals()
        # What is made from here on is ours. With itself in its own list, or a variable that an inner function shares,
        # it would be a cycle; it must go as soon as it is dropped.
        self._tracked: list[object] = gc.get_objects()
        """As long as it lives here, no identity can come to mean something new."""
        self._alive: set[int] = set()
        self._containers: list[object] = []
        """Untracked ones that hold more than plain numbers and text."""
        self.tensors: list[object] = []
        self.modules: list[object] = []
        self.optimizers: list[object] = []
        self.tasks: list[object] = []
        self.ndarrays: list[object] = []
        self._inside: list[tuple[object, set[int]]] | None = None
        """Arrays of objects, and the identities of the containers and arrays in them."""
        # Python 3.12's asyncio shows the collector objects that it has freed and keeps for later. To be in a list even
        # for a moment frees them again, and every collection from then on runs in a circle for ever.
        for item in (self, beside, sys.modules.get("_asyncio")):
            for place in islice(compress(count(), map(is_, self._tracked, repeat(item))), 1):
                self._tracked[place] = None
        if emptied:
            for place in list(compress(count(), map(emptied.__contains__, map(id, self._tracked)))):
                self._tracked[place] = None
        self._look_behind(beside)

    def drop(self) -> None:
        """Let go of everything. If the maker of the heap is in it, that would be a cycle otherwise."""
        found = self.tensors, self.modules, self.optimizers, self.tasks, self.ndarrays
        for objects in (self._tracked, self._containers, *found):
            objects.clear()
        self._alive.clear()
        self._inside = None

    def _look_behind(self, beside: list[object]) -> None:
        """Find the arrays and the containers that the collector does not track."""
        arrays = {id(library_type("numpy", "ndarray"))}
        behind: dict[int, object] = {}
        level: Iterator[Sequence[object]] = chain(self._referents(), [beside])
        while True:
            known = len(behind)
            for referents in level:
                behind.update(by_identity(list(filterfalse(gc.is_tracked, of_types(arrays, referents)))))
                behind.update(by_identity(_containers_of_more(referents)))
            new = list(islice(behind.values(), known, None))
            if not new:
                return
            of_new = of_types(arrays, new), of_types(_CONTAINERS, new)
            self.ndarrays += of_new[0]
            self._containers += of_new[1]
            level = _referents_of([*of_new[1], *_contents(of_new[0])])

    def _referents(self) -> Iterator[list[object]]:
        """Yield what tracked objects refer to, and note the tensors, arrays, modules and optimizers among them."""
        roles: list[tuple[type | None, list[object], set[int]]] = [
            (library_type("torch", "Tensor"), self.tensors, set()),
            (library_type("torch.nn", "Module"), self.modules, set()),
            (library_type("torch.optim", "Optimizer"), self.optimizers, set()),
            (library_type("asyncio", "Task"), self.tasks, set()),
            (library_type("numpy", "ndarray"), self.ndarrays, set()),
        ]
        known: set[int] = set()
        for part in chunks(self._tracked):
            referents = gc.get_referents(*part)
            if ATOMS.issuperset(types_of(referents)):
                continue  # what has a role would refer to its class
            several = one_of_each(part)
            new = several.keys() - known
            known |= new
            for base, those, kinds in roles:
                kinds.update(kind for kind in new if base is not None and is_instance(several[kind], base))
                if not kinds.isdisjoint(several):
                    those += of_types(kinds, part)
            yield referents
        yield from _referents_of(_contents(self.ndarrays))

    @property
    def size(self) -> int:
        """How many objects a look for referrers has to see."""
        return len(self._tracked) + len(self._containers)

    def large(self, smallest: int) -> dict[StorageKey, list[object]]:
        """Return the tensors and arrays of each storage of at least ``smallest`` bytes."""
        by_storage = large_tensors(self.tensors, smallest)
        for item in self.ndarrays:
            array = describe(item)
            if array is not None and array.size_bytes >= smallest:
                by_storage.setdefault(array.storage, []).append(item)
        return by_storage

    def places(self) -> set[Span]:
        """Return where the arrays are whose memory arrays on the heap show."""
        array_type: Any = library_type("numpy", "ndarray")
        owners = [owner_of(array_type, array) for array in self.ndarrays]
        return {place_of(owner) for owner in owners if is_instance(owner, array_type)}

    def add(self, item: object) -> None:
        """Note an object that has come into being since, and stands for what was there, as an object's own dict."""
        if id(item) not in self._alive:
            self._alive.add(id(item))
            self._tracked.append(item)

    def referrers(self, objects: dict[int, object]) -> Iterator[tuple[object, list[int]]]:
        """Yield the objects that refer to some of ``objects`` (by identity), and to which.

        Only what was alive when the heap was made counts: a search must not find its own lists.
        """
        if not self._alive:
            self._alive = set(map(id, self._tracked))
        if any(not gc.is_tracked(item) for item in objects.values()):
            # The collector's own search would miss containers that it has stopped to track since.
            referrers = _that_refer_to(objects, self._tracked) + _that_refer_to(objects, self._containers)
        elif len(objects) > _FEW:
            referrers = _that_refer_to(objects, self._tracked)
        else:
            # A task does not tell that search what a future refers to.
            found = [*gc.get_referrers(*objects.values()), *_that_refer_to(objects, self.tasks)]
            referrers = [item for item in by_identity(found).values() if id(item) in self._alive]
        for item in referrers:
            children = [id(child) for child in gc.get_referents(item) if id(child) in objects]
            if children:
                yield item, list(dict.fromkeys(children))
        if self._inside is None:
            self._inside = [(array, _identities_inside(array)) for array in self.ndarrays]
            self._inside = [(array, inside) for array, inside in self._inside if inside]
        for array, inside in self._inside:  # the collector does not see into an array
            if not inside.isdisjoint(objects):
                yield array, [key for key in objects if key in inside]


def _that_refer_to(objects: dict[int, object], candidates: list[object]) -> list[object]:
    """Return which of ``candidates`` refer to some of ``objects``; their number does not matter here."""
    return [
        item
        for part in chunks(candidates)
        if not objects.keys().isdisjoint(map(id, gc.get_referents(*part)))
        for item in part
        if not objects.keys().isdisjoint(map(id, gc.get_referents(item)))
    ]


_CONTAINERS = {id(dict), id(tuple)}
"""Of which the collector stops tracking those that hold nothing but arrays, numbers and text."""


def _containers_of_more(items: Sequence[object]) -> list[object]:
    """Return the untracked containers among ``items`` that hold more than numbers and text: there are few."""
    untracked = list(filterfalse(gc.is_tracked, of_types(_CONTAINERS, items)))
    if ATOMS.issuperset(types_of(gc.get_referents(*untracked))):
        return []
    return [item for item in untracked if not ATOMS.issuperset(types_of(gc.get_referents(item)))]


def _referents_of(items: Sequence[object]) -> Iterator[list[object]]:
    return (gc.get_referents(*part) for part in chunks(items))


def _contents(arrays: Sequence[Any]) -> list[object]:
    """Return the elements of object arrays, row by row: the collector does not see into an array."""
    rows: list[object] = []
    waiting = [found for found in map(elements, arrays) if found is not None]
    while waiting:
        row = waiting.pop()
        inner = [item for item in row if type(item) is list]
        rows.append(row)
        waiting += inner if len(inner) == len(row) else []  # a row of lists is what a further dimension looks like
    return rows


def _identities_inside(array: object) -> set[int]:
    return {id(item) for item in flat_elements(array) or () if not is_atom(item)}


def live_instances(*bases: type) -> list[object]:
    """Return the live objects of classes written in Python and of those derived from them.

    It takes 50 ns for each object that is alive, and next to no memory: each object of such a class refers to its
    class, so the collector finds them as those that refer to theirs.
    """
    kinds: list[type] = list(bases)
    for kind in kinds:  # the list grows
        below: list[type] = type.__subclasses__(kind)
        kinds += [item for item in below if all(item is not known for known in kinds)]
    return [item for item in gc.get_referrers(*kinds) if any(is_instance(item, base) for base in bases)]


def large_tensors(tensors: Iterable[object], smallest: int) -> dict[StorageKey, list[object]]:
    """Return which of ``tensors`` show each storage of at least ``smallest`` bytes."""
    base: Any = library_type("torch", "Tensor")
    by_storage: dict[StorageKey, list[object]] = {}
    if base is None or not (tensors := list(tensors)):
        return by_storage
    untyped_storage = base.untyped_storage
    with sys.modules["torch"]._C.DisableTorchFunction():
        for tensor in tensors:
            try:
                storage = untyped_storage(tensor)
                if storage.nbytes() >= smallest and storage.device.type != "meta":
                    by_storage.setdefault(("torch", storage._cdata), []).append(tensor)
            except (RuntimeError, NotImplementedError):  # noqa: PERF203  # sparse, or a wrapper
                continue
    return by_storage
