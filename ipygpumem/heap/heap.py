"""Lists all live objects, and finds referrers.

The garbage collector lists containers only. It lists no NumPy arrays, and no dict or tuple that
contains only arrays, numbers and text (CPython stops tracking it). Both are found as referents of
listed objects, and of running frames. C++ code cannot be seen here.

A heap has millions of objects, so every loop over them runs in C (see ``bulk``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from itertools import accumulate, chain, compress, count, filterfalse, islice, repeat, starmap
from operator import is_, not_
from typing import Any, Protocol

from ipygpumem.errors import GpuMemError
from ipygpumem.heap.arrays import (
    Reader,
    Span,
    StorageKey,
    describe,
    elements,
    flat_elements,
    holding_objects,
    is_array,
    library_type,
    places_of,
    read_array,
)
from ipygpumem.heap.bulk import (
    ROWS,
    by_identity,
    chunks,
    kinds_of,
    of_types,
    one_of_each,
    without_types,
)
from ipygpumem.heap.holders.frames import emptied_locals, running_locals
from ipygpumem.heap.large import LargeObjects
from ipygpumem.introspect import ATOMS, is_atom, is_instance
from ipygpumem.probes.accelerators import loaded_torch

_FEW = 100
"""Maximum number of objects for the collector's own search for referrers, which compares every
pair.
"""


class _Turn:
    """The process-wide lock for examining the heap; the collector is also one per process."""

    def __init__(self) -> None:
        self.lock, self.was_on = threading.RLock(), False

    def begin_in_child(self) -> None:
        """Release the lock in a forked process, because the thread that held it stayed in the
        parent.
        """
        if not self.lock.acquire(blocking=False) and self.was_on:
            gc.enable()
        self.lock = threading.RLock()


_TURN = _Turn()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_TURN.begin_in_child)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Open a block in which no other thread examines the heap and no garbage is collected.

    Two searches at once would each find the lists of the other, without end. Make a ``Heap`` in the
    block, and drop it before the block ends.
    """
    with _TURN.lock:
        was_on = _TURN.was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def refuse_while_traced(what: str) -> None:
    """Raise if torch traces or compiles the calling code, which would record our reading of
    tensors.
    """
    tracing = getattr(getattr(loaded_torch(), "_C", None), "_get_tracing_state", None)
    compiling = getattr(
        sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None
    )
    if any(state is not None and state() not in (None, False) for state in (tracing, compiling)):
        raise GpuMemError(
            f"torch is tracing this code (torch.jit.trace, torch.compile): {what} outside of it"
        )


class HeapObserver(Protocol):
    """Sees all objects during a heap's pass over them.

    Attributes:
        is_complete: set to True after the last objects.
    """

    is_complete: bool

    def see(
        self, tracked: Sequence[object], untracked: list[object], examples: Mapping[int, object]
    ) -> Sequence[object]:
        """Observe some tracked objects, and the untracked ones to which they refer.

        Args:
            tracked: objects that it has not seen before.
            untracked: an object for each reference to it. No other list of the heap contains these
                objects, except those of running functions.
            examples: a tracked object of each type, by the type's identity.

        Returns:
            The untracked objects that it sees for the first time; not all of those that refer to no
            other objects.
        """


class Heap:
    """The objects that were alive when it was made. It keeps all of them alive: use it, then drop
    it.

    Args:
        observer: sees the objects during the pass over them.

    Attributes:
        tensors: torch tensors, including those that only another object refers to.
        ndarrays: NumPy arrays.
        modules: torch modules.
        optimizers: torch optimizers.
        tasks: asyncio tasks.
        local: objects of the local names of running functions, and of the current context's
            variables.

    Args:
        smallest: minimum bytes of the objects that ``large_objects`` returns; None if it is not
            called.
        of_libraries: types of libraries whose objects it returns, too.
    """

    def __init__(
        self,
        observer: HeapObserver | None = None,
        *,
        smallest: int | None = None,
        of_libraries: Sequence[type] = (),
    ) -> None:
        # Before any list of ours refers to a frame's locals: ``peek`` counts references.
        self.local: list[object] = [*running_locals(), *copy_context().values()]
        emptied = emptied_locals()
        self._young: set[int] = set(map(id, gc.get_objects(generation=0)))
        """Identities of the youngest objects; younger ones were made later, unless a collection has
        run since.
        """
        self._collections = _collections()
        # Objects made from here on are ours. This object must not be in its own list, nor in a
        # variable that an inner function shares: that would be a cycle, and it must be freed as
        # soon as it is dropped.
        self._tracked: list[object] = gc.get_objects()
        """Keeps the objects alive, so that no identity is reused."""
        self._added: dict[int, object] = {}
        """Objects made later for older ones, by identity."""
        self._containers: list[object] = []
        """Untracked containers that hold more than plain numbers and text."""
        self.tensors: list[object] = []
        self.modules: list[object] = []
        self.optimizers: list[object] = []
        self.tasks: list[object] = []
        self.ndarrays: list[object] = []
        self._large = None if smallest is None else LargeObjects(smallest, of_libraries)
        self._one_of_each: dict[int, object] = {}
        """An object of each type, by the type's identity."""
        self._roles = [
            (base, found, set[int]()) for base, found in self._lists() if base is not None
        ]
        """Classes with the list of their instances, and the types that derive from them, by
        identity.
        """
        self._referrers: dict[int, list[Any]] = {}
        """The objects that refer to each object that was asked about, by its identity."""
        self._inside: list[tuple[object, set[int]]] | None = None
        """Object arrays, with the identities of the containers and arrays in them; views, with that
        of their base.
        """
        # Python 3.12's asyncio shows the collector objects that it has freed and keeps for reuse.
        # Putting one into a list frees it again, and every later collection would loop for ever.
        left_out = [self, self.local, sys.modules.get("_asyncio")]
        if sys.version_info < (3, 11):
            left_out.append(vars(self))
        for item in left_out:
            for place in islice(compress(count(), map(is_, self._tracked, repeat(item))), 1):
                self._tracked[place] = None
            self._young.discard(id(item))
        self._young -= emptied
        if emptied:
            for place in list(compress(count(), map(emptied.__contains__, map(id, self._tracked)))):
                self._tracked[place] = None
        self._look_behind(observer)

    def _lists(self) -> Iterator[tuple[type | None, list[object]]]:
        yield library_type("torch", "Tensor"), self.tensors
        yield library_type("torch.nn", "Module"), self.modules
        yield library_type("torch.optim", "Optimizer"), self.optimizers
        yield library_type("asyncio", "Task"), self.tasks
        yield library_type("numpy", "ndarray"), self.ndarrays

    def drop(self) -> None:
        """Drop all references. If the maker of the heap is in it, they would be a cycle."""
        found = self.tensors, self.modules, self.optimizers, self.tasks, self.ndarrays, self.local
        for objects in (self._tracked, self._containers, *found):
            objects.clear()
        self._added.clear()
        self._young.clear()
        self._collections.clear()
        self._one_of_each.clear()
        self._roles.clear()
        self._referrers.clear()
        self._inside = None
        self._large = None

    def _look_behind(self, observer: HeapObserver | None) -> None:
        """Find the arrays and the containers that the collector does not track, in one pass over
        all objects.
        """
        behind: dict[int, object] = {}
        leading: Sequence[object]
        for part in chunks(self._tracked):
            examples = one_of_each(part)
            self._sort(part, examples)
            # not our own rows
            leading = part if ROWS.isdisjoint(examples) else without_types(ROWS, part)
            untracked = list(filterfalse(gc.is_tracked, gc.get_referents(*leading)))
            if self._large is not None:
                self._large.read_tracked(part, set(examples))
            self._note_large(untracked)
            leading = untracked if observer is None else observer.see(part, untracked, examples)
            behind.update(_that_lead_on(leading))
        leading = untracked = list(filterfalse(gc.is_tracked, self.local))
        self._note_large(untracked)
        if observer is not None:
            leading = observer.see([], untracked, {})
            observer.is_complete = True
        behind.update(_that_lead_on(leading))
        new = list(behind.values())
        contents = _contents(self.ndarrays)
        while new or contents:
            arrays = of_types({id(library_type("numpy", "ndarray"))}, new)
            containers = of_types(_CONTAINERS, new)
            self.ndarrays += arrays
            self._containers += containers
            known = len(behind)
            for part in chunks([*containers, *contents, *_contents(arrays)]):
                untracked = list(filterfalse(gc.is_tracked, gc.get_referents(*part)))
                self._note_large(untracked)
                behind.update(_that_lead_on(untracked))
            new = list(islice(behind.values(), known, None))
            contents = []

    def _note_large(self, untracked: list[object]) -> None:
        if self._large is not None:
            self._large.read(untracked)

    def _sort(self, objects: Sequence[object], examples: dict[int, object]) -> None:
        """Collect the tensors, modules, optimizers, tasks and arrays among tracked objects."""
        type_ids = set(examples)
        for type_id in type_ids - self._one_of_each.keys():
            self._one_of_each[type_id] = examples[type_id]
            for base, _, kinds in self._roles:
                if is_instance(examples[type_id], base):
                    kinds.add(type_id)
        for _, found, kinds in self._roles:
            if not kinds.isdisjoint(type_ids):
                found += of_types(kinds, objects)

    def of_types(self, kinds: set[int]) -> list[object]:
        """Return the objects of some types, including those that the collector does not track."""
        found: dict[int, object] = {}
        for part in chunks([*self._tracked, *self._containers]):
            found.update(by_identity(of_types(kinds, [*part, *gc.get_referents(*part)])))
        return list(found.values())

    @property
    def tracked(self) -> Sequence[object]:
        """The objects that the collector tracks; None in the places of those that must not be
        touched.
        """
        return self._tracked

    def instances(self, *bases: type) -> list[Any]:
        """Return the tracked instances of classes, subclasses included."""
        kinds = kinds_of(list(self._one_of_each.values()), *bases)
        return list(
            chain.from_iterable(of_types(kinds, part) for part in chunks(self._tracked) if kinds)
        )

    @property
    def size(self) -> int:
        """Number of objects that a search for referrers examines."""
        return len(self._tracked) + len(self._containers)

    def large(self, smallest: int) -> dict[StorageKey, list[object]]:
        """Return the tensors and arrays of each storage of at least ``smallest`` bytes."""
        by_storage = large_tensors(self.tensors, smallest)
        for item in self.ndarrays:
            array = describe(item)
            if array is not None and array.size_bytes >= smallest:
                by_storage.setdefault(array.storage, []).append(item)
        return by_storage

    def large_objects(self) -> list[object]:
        """Return the objects that are large by themselves, without arrays."""
        if self._large is None:
            return []
        # Our own lists, to which only a running function refers, are left out.
        referrers = self.referrers_of(self._large.containers)
        containers = [item for key, item in self._large.containers.items() if referrers[key]]
        return [*containers, *self._large.found.values()]

    def places(self) -> set[Span]:
        """Return the places of the arrays that own the memory of arrays on the heap."""
        return places_of(self.ndarrays)

    def referred(self, wanted: Collection[int], without: Collection[int] = ()) -> list[Any]:
        """Return the objects with the ``wanted`` identities to which an object that is not among
        ``without`` refers.
        """
        found = dict[int, object]()
        parts = (
            compress(part, map(not_, map(without.__contains__, map(id, part))))
            for part in chunks(self._tracked)
        )
        for held in chain([self.local], starmap(gc.get_referents, parts)) if wanted else ():
            inside = gc.get_referents(*filterfalse(gc.is_tracked, of_types(_CONTAINERS, held)))
            for items in (held, inside):
                found.update(
                    by_identity(list(compress(items, map(wanted.__contains__, map(id, items)))))
                )
        return list(found.values())

    def with_identities(self, wanted: Collection[int]) -> dict[int, object]:
        """Return the live objects with the ``wanted`` identities; looks behind each object only for
        untracked ones.
        """
        found = dict[int, object]()
        large = [] if self._large is None else list(self._large.found.values())
        for items in (self._tracked, large) if wanted else ():
            found.update(
                by_identity(list(compress(items, map(wanted.__contains__, map(id, items)))))
            )
        missing = set(wanted).difference(found)
        return found | by_identity(self.referred(missing))

    def add(self, item: object) -> None:
        """Add an object that was made later for an older one, such as the dict of
        its attributes.
        """
        self._added[id(item)] = item

    def _alive(self, items: Sequence[object]) -> list[object]:
        """Return the items that were alive when the heap was made; a set of all identities would
        take seconds.
        """
        wanted = by_identity(items)
        if self._collections == _collections():
            later = wanted.keys() & map(id, gc.get_objects(generation=0))
            later -= self._young
            alive = wanted.keys() - later
        else:
            alive = set(filter(wanted.__contains__, map(id, self._tracked)))
        return [item for key, item in wanted.items() if key in alive or key in self._added]

    def referrers(self, objects: Mapping[int, object]) -> Iterator[tuple[object, list[int]]]:
        """Yield the objects that refer to some of ``objects`` (by identity), and the identities of
        those.

        Only objects that were alive when the heap was made count: a search must not find its own
        lists.
        """
        by_object = self.referrers_of(objects)
        children: dict[int, list[int]] = {}
        referrers: dict[int, object] = {}
        for key in objects:
            for referrer in by_object[key]:
                referrers[id(referrer)] = referrer
                children.setdefault(id(referrer), []).append(key)
        for key, referrer in referrers.items():
            yield referrer, children[key]

    def referrers_of(self, objects: Mapping[int, object]) -> Mapping[int, Sequence[Any]]:
        """Return the referrers of ``objects``, and of all that were asked about before, by
        identity.

        Several questions about one object take one search.
        """
        new = {key: item for key, item in objects.items() if key not in self._referrers}
        for key in new:
            self._referrers[key] = []
        for referrer in self._candidates(new) if new else ():
            for key in new.keys() & map(id, gc.get_referents(referrer)):
                self._referrers[key].append(referrer)
        if self._inside is None:
            self._inside = [(array, _identities_inside(array)) for array in self.ndarrays]
            self._inside = [(array, inside) for array, inside in self._inside if inside]
        for array, inside in self._inside:  # the collector does not look into an array
            for key in inside.intersection(new):
                self._referrers[key].append(array)
        atoms = {key for key, item in new.items() if is_atom(item)}
        if atoms:
            # Numbers and text are not kept for later questions, because there may be millions in an
            # array.
            for array in compress(self.ndarrays, holding_objects(self.ndarrays)):
                elements_here = (
                    () if read_array("base", array) is not None else flat_elements(array) or ()
                )
                for key in atoms.intersection(map(id, elements_here)):
                    self._referrers[key].append(array)
        return self._referrers

    def _candidates(self, objects: dict[int, object]) -> list[object]:
        """Return all objects that refer to some of ``objects``, and maybe more."""
        if len(objects) > _FEW:
            found = _that_refer_to(objects, self._tracked)
            found += _that_refer_to(objects, list(self._added.values()))
        else:
            # A task does not report to that search what its future refers to.
            found = self._alive(
                [*gc.get_referrers(*objects.values()), *_that_refer_to(objects, self.tasks)]
            )
        if not all(map(gc.is_tracked, objects.values())):
            # The collector's own search misses containers that it no longer tracks, some since the
            # heap was made.
            found += _that_refer_to(
                objects, [*self._containers, *filterfalse(gc.is_tracked, self._tracked)]
            )
        if any(map(is_atom, objects.values())):  # such as text in the dict of an lru_cache
            for part in _referents_of(self._tracked):
                plain = by_identity(list(filterfalse(gc.is_tracked, of_types(_CONTAINERS, part))))
                found += _that_refer_to(objects, list(plain.values()))
        return list(by_identity(found).values())


def _collections() -> list[int]:
    """Return the number of collections so far of each generation."""
    return [generation["collections"] for generation in gc.get_stats()]


def _that_refer_to(objects: dict[int, object], candidates: list[object]) -> list[object]:
    """Return the ``candidates`` that refer to some of ``objects``; fast for any
    number of objects.
    """
    return [
        item
        for part in chunks(candidates)
        if not objects.keys().isdisjoint(map(id, gc.get_referents(*part)))
        for item in part
        if not objects.keys().isdisjoint(map(id, gc.get_referents(item)))
    ]


_CONTAINERS = {id(dict), id(tuple)}
"""Types that the collector stops tracking if they contain only arrays, numbers and text."""


def _that_lead_on(untracked: Sequence[object]) -> dict[int, object]:
    """Return the arrays among some objects, and the containers that hold more than numbers and
    text, by identity.
    """
    arrays = {id(library_type("numpy", "ndarray"))}
    found = of_types(arrays | _CONTAINERS, untracked)
    containers = _containers_of_more(of_types(_CONTAINERS, found))
    return by_identity(of_types(arrays, found)) | by_identity(containers)


def _containers_of_more(untracked: Sequence[object]) -> list[object]:
    """Return the containers that hold more than numbers and text.

    In C, because there are a hundred thousand: the place of each such object in the contents of all
    containers, one after the other, gives the container that holds it.
    """
    contents = list(map(gc.get_referents, untracked))
    ends = list(accumulate(map(len, contents)))
    type_ids = map(id, map(type, chain.from_iterable(contents)))
    places = compress(count(), map(not_, map(ATOMS.__contains__, type_ids)))
    positions = set(map(bisect_right, repeat(ends), places))
    return list(map(untracked.__getitem__, sorted(positions)))


def _referents_of(items: Sequence[object]) -> Iterator[list[object]]:
    return (gc.get_referents(*part) for part in chunks(items))


def _contents(arrays: Sequence[Any]) -> list[object]:
    """Return the elements of object arrays, row by row: the collector does not look
    into an array.
    """
    rows: list[object] = []
    waiting = [found for found in map(elements, arrays) if found is not None]
    while waiting:
        row = waiting.pop()
        inner = [item for item in row if type(item) is list]
        rows.append(row)
        # a row of lists looks like another dimension
        waiting += inner if len(inner) == len(row) else []
    return rows


def _identities_inside(array: object) -> set[int]:
    bases, read = set[int](), library_type("numpy", "ndarray").__dict__["base"].__get__
    while is_array(array) and (viewed := read(array)) is not None:
        bases.add(id(viewed))
        array = viewed
    if bases:
        return bases
    return {id(item) for item in flat_elements(array) or () if not is_atom(item)}


def live_instances(*bases: type) -> list[object]:
    """Return the live instances of classes written in Python, subclasses included.

    Takes 50 ns for each live object and next to no memory: an instance of such a class refers to
    the class, so the collector finds it as a referrer.
    """
    kinds: list[type] = list(bases)
    for kind in kinds:  # the list grows
        below: list[type] = type.__subclasses__(kind)
        kinds += [item for item in below if all(item is not known for known in kinds)]
    referrers = gc.get_referrers(*kinds)
    return of_types(kinds_of(referrers, *bases), referrers)


def large_tensors(tensors: Iterable[object], smallest: int) -> dict[StorageKey, list[object]]:
    """Return the ``tensors`` on each storage of at least ``smallest`` bytes."""
    base: Any = library_type("torch", "Tensor")
    by_storage: dict[StorageKey, list[object]] = {}
    if base is None or not (tensors := list(tensors)):
        return by_storage
    with sys.modules["torch"]._C.DisableTorchFunction():
        plain, rest = Reader(sys.modules["torch"]).plain(tensors)
        is_large = map(smallest.__le__, plain.sizes)
        for tensor, key in compress(zip(plain.tensors, plain.keys, strict=True), is_large):
            by_storage.setdefault(("torch", key), []).append(tensor)
        for tensor in rest:
            try:
                storage = base.untyped_storage(tensor)
                if storage.nbytes() >= smallest and storage.device.type != "meta":
                    by_storage.setdefault(("torch", storage._cdata), []).append(tensor)
            except (RuntimeError, NotImplementedError):  # noqa: PERF203  # sparse, or a wrapper
                continue
    return by_storage
