"""Collects garbage, and lists the objects made since a mark: CPython's young generations.

A collection of the young generations makes the survivors old. Until the next one runs, the young
objects are exactly those made since, so that a later collection finds their garbage alone. Both
take time in proportion to those objects, not to the heap: microseconds, where a full collection
takes a tenth of a second.

The mark is an object made at that moment: if it is no longer young, another collection ran and the
answer is unknown. CPython 3.14.0 to 3.14.4 collect in increments, of which the first makes old what
it reaches and may leave the mark young. There, a callback notes each collection, because
``gc.get_stats()`` does not count that one.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from math import prod
from operator import contains, is_
from types import BuiltinMethodType
from typing import Any, NamedTuple

from ipygpumem import interrupts
from ipygpumem.heap.bulk import by_identity, instances_among, of_types, one_of_each
from ipygpumem.heap.kinds.arrays import is_array
from ipygpumem.heap.knowledge.frames import (
    SUSPENDED,
    frames_of_other_threads,
    is_started,
    stack,
)
from ipygpumem.heap.live.heap import live_instances
from ipygpumem.heap.live.objects_since import ObjectsSince, YoungSaver
from ipygpumem.introspect import class_dict, is_exactly, mro_of
from ipygpumem.probes.host import decrease_during

_MOST_ROUNDS = 5
"""Maximum number of repetitions: finalisers may make more garbage, and another thread may have
collected between two steps.
"""
_MOST_ATTEMPTS = 50
"""Maximum number of attempts to run a collection."""
_MOST_OLD_INSTANCES = 100_000
"""Maximum number of weak references to keep; beyond it, a walk over the heap is cheaper."""
_COLLECTIONS_OF_CELLS = 4
"""Number of short cells whose garbage is collected from generation 0 before all young objects
become old; CPython itself would collect generation 1 after 10.
"""


class GcMark:
    """A moment: an object that is young as long as every object made since is young.

    Args:
        watch: notes collections, where one may leave the mark young; else None.
    """

    def __init__(self, watch: CollectionWatch | None = None) -> None:
        self._watch = watch
        self._collection = None if watch is None else watch.last()

    def is_before_collections(self) -> bool:
        """Return True if no collection has started since the mark was made.

        Without a watch, any collection makes the mark itself old, as the list of young objects
        shows.
        """
        return self._watch is None or self._watch.last() is self._collection


class CollectionWatch:
    """Notes the last collection of the process, until ``stop`` is called."""

    def __init__(self) -> None:
        self._events: dict[str, object] = {}
        self._note = self._events.__setitem__  # runs no Python code in a collection
        self.stop = weakref.finalize(self, _remove_callback, self._note)
        self.stop.atexit = False

    def last(self) -> object:
        """Return the collector's report of the start of the last collection; begin to listen for
        it if nothing does.
        """
        is_listening = any(map(is_, gc.callbacks, repeat(self._note)))
        if not is_listening:  # at first, or if the user has cleared the list
            self._events["start"] = object()
            gc.callbacks.append(self._note)
        return self._events["start"]


def _remove_callback(note: object) -> None:
    """Remove a callback of the collector by identity: comparing would run the user's code."""
    gc.callbacks[:] = [callback for callback in gc.callbacks if callback is not note]


def young_generations() -> tuple[int, ...]:
    """Return the generations that hold young objects: ``(0, 1)``, ``(0,)``, or none if no
    collection makes objects old.

    Tried and not read from the version: 3.14.0 to 3.14.4 have other generations than 3.14.5, and a
    free-threaded Python has none.
    """
    was_on = gc.isenabled()
    gc.disable()  # an automatic collection between two steps would make the new object old
    try:
        return _generations_by_trial()
    finally:
        if was_on:
            gc.enable()


def _generations_by_trial() -> tuple[int, ...]:
    """Return ``young_generations`` by collecting with a new object.

    With generations 0 and 1, the object is first in generation 0 and, after a collection of each of
    them, in 1 and then in none. With one young generation, it is in none after the first.
    """
    for _ in range(_MOST_ROUNDS):  # another thread may have collected between two steps
        new_object = _TrackedObject()
        try:
            generations_by_step = [_generations_with(new_object)]
            if generations_by_step == [[0, 1]]:  # a new object is in all generations
                return ()
            for generation in (0, 1):
                gc.collect(generation)
                generations_by_step.append(_generations_with(new_object))
        except TypeError:  # PyPy lists objects without generations
            return ()
        if generations_by_step == [[0], [1], []]:
            return 0, 1
        if generations_by_step == [[0], [], []]:
            return (0,)
    return ()


class _TrackedObject:
    """An object that the collector tracks."""


def _generations_with(item: object) -> list[int]:
    """Return the numbers of the generations 0 and 1 in whose lists an object is."""
    numbers = list[int]()
    for number in (0, 1):
        if any(map(is_, gc.get_objects(generation=number), repeat(item))):
            numbers.append(number)
    return numbers


_YOUNG = young_generations()


class Known(weakref.ref[object]):
    """A weak reference of this package. It is never shared with other code, whose weak references
    have another type.
    """

    __slots__ = ()


class _OldInstances(NamedTuple):
    """The instances of some classes, such as all tensors, that were alive when the young objects
    last became old.

    All live instances are then those of them that have not died, and the instances among the young
    objects: to list them takes no walk over the heap.
    """

    bases: tuple[type, ...]
    """The classes."""
    references: list[Known]

    @classmethod
    def of(cls, bases: tuple[type, ...], instances: Sequence[object]) -> _OldInstances | None:
        """Return a list of weak references to the instances; None if they are too many."""
        if len(instances) > _MOST_OLD_INSTANCES:
            return None
        return cls(bases, list(map(Known, instances)))

    def are_of(self, bases: tuple[type, ...]) -> bool:
        """Return True if they are the instances of the classes ``bases`` and no other ones."""
        return len(bases) == len(self.bases) and all(map(is_, bases, self.bases))

    def with_young(self, young_instances: Sequence[object]) -> _OldInstances | None:
        """Return the record of the instances once the young ones are old, too.

        None if there would be too many: most have died since, and nothing has asked for instances,
        which removes the dead ones.
        """
        if not young_instances:
            return self
        references = [*self.references, *map(Known, young_instances)]
        if len(references) > _MOST_OLD_INSTANCES:
            return None
        return _OldInstances(self.bases, references)

    def live(self) -> list[object]:
        """Return the instances that have not died."""
        return [item for reference in self.references if (item := reference()) is not None]


class _CollectionCosts:
    """Predicts the time of a collection of all objects, which grows with the heap, from the number
    of allocated blocks.
    """

    _FIRST_GUESS_SECONDS = 2e-7
    """Time that a collection takes for each allocated block, until one was timed."""

    def __init__(self) -> None:
        self._seconds_per_block = self._FIRST_GUESS_SECONDS
        self._cpu_at_last_cell = time.process_time()
        """The CPU time at the last call of ``worked_seconds``, in seconds."""

    def worked_seconds(self, cell_seconds: float) -> float:
        """Return the CPU time since the last call, but at most the duration of the cell that has
        ended.

        The CPU time says how much a cell has worked: one that only waited has made no garbage. It
        includes the short cells before, which are not timed.
        """
        cpu_now = time.process_time()
        cpu_since_last_cell = cpu_now - self._cpu_at_last_cell
        self._cpu_at_last_cell = cpu_now
        return min(cell_seconds, cpu_since_last_cell)

    def predicted_seconds(self, blocks: int) -> float:
        """Return the predicted time of a collection with so many allocated blocks."""
        return blocks * self._seconds_per_block

    def record(self, blocks: int, seconds: float) -> None:
        """Record the time that a collection has taken with so many allocated blocks."""
        self._seconds_per_block = seconds / blocks


class Garbage:
    """Collects all garbage, or only that made since a ``GcMark``; lists live instances of some
    classes.
    """

    SHORTEST_SECONDS = 0.02
    """Minimum duration of a cell after which more than young garbage may be collected."""

    def __init__(self) -> None:
        self._watch = CollectionWatch() if _YOUNG == (0,) else None
        self._costs = _CollectionCosts()
        self.last: GcMark | None = None
        """The last moment at which all existing objects became old."""
        self._old_instances: _OldInstances | None = None
        """The instances that are older than ``last``, of the classes for which ``instances`` was
        last called; None if unknown.
        """
        self._collections = 0
        """Collections of generation 0 that the collector had counted at the end of the last cell.
        """
        self._decreases: list[int] | None = None
        """Receives by how much each collection lowers RSS, while ``collect`` is asked for that."""
        self._uncounted = 0
        """Number of objects made by cells that the collector does not count towards a full
        collection, because our own collections came first.
        """
        self._saver = YoungSaver()

    # -- objects made since a mark ---------------------------------------------------------------

    def mark(self) -> GcMark | None:
        """Collect young garbage and return this moment; None if later objects could not be told
        from older ones: the user has disabled the collector, or it has no young generations.
        """
        self._collect_young()
        return self.last

    def list_from_now(self, new_objects: ObjectsSince) -> None:
        """Begin a list of new objects right after ``mark``, where the collector's lists keep their
        order.
        """
        if self.last is not None and _YOUNG == (0, 1):
            self._saver.add(new_objects)

    def end_list(self, new_objects: ObjectsSince) -> None:
        """End a list of new objects."""
        self._saver.remove(new_objects)

    def _collect_young(self) -> int:
        """Collect young garbage, which makes all other objects old; return the number of objects
        that died.
        """
        if not _YOUNG or not gc.isenabled():
            self.last = self._old_instances = None
            return 0
        died = self._collect_with_instances(_YOUNG[-1])
        self.last = GcMark(self._watch)
        self._collections = 0
        return died

    def _collect_with_instances(self, generation: int) -> int:
        """Collect a generation, and record which instances are old then; return the number of
        objects that died.
        """
        last = self.last
        progress = _progress_of_other_threads() if self._old_instances is not None else {}
        instances = self._old_and_young_instances()
        died = _collect_generation(generation, self._decreases)
        if self.last is not last:  # another thread has collected, too
            instances = None
        elif instances is not None and _progress_of_other_threads() != progress:
            instances = None  # another thread may have made instances that were not listed
        self._old_instances = instances
        return died

    # -- instances of classes --------------------------------------------------------------------

    def instances(self, *bases: type) -> list[object]:
        """Return the live instances of classes written in Python, subclasses included.

        Walks over the heap only for the first question about these classes, and when the old
        instances are not known.
        """
        old = self._old_instances
        if old is None or not old.are_of(bases):
            return self._instances_in_heap(bases)
        young_instances = self._young_instances(bases)
        old = self._old_instances  # another thread may have made the young ones old, or forgotten
        if young_instances is None or old is None or not old.are_of(bases):
            return self._instances_in_heap(bases)
        old_instances = old.live()
        if len(old_instances) < len(old.references):
            self._old_instances = _OldInstances.of(bases, old_instances)
        return list(by_identity([*old_instances, *young_instances]).values())

    def _instances_in_heap(self, bases: tuple[type, ...]) -> list[object]:
        """Return the live instances of classes by a walk over the heap, and record them as old
        ones.
        """
        last = GcMark(self._watch)
        instances = live_instances(*bases)
        self._old_instances = None  # an interrupt must leave none that are older than ``last``
        self.last = last
        self._old_instances = _OldInstances.of(bases, instances)
        return instances

    def _young_instances(self, bases: tuple[type, ...]) -> list[object] | None:
        """Return the instances that may be younger than ``last``; None if unknown."""
        young = objects_since(self.last)
        if young is None:
            return None
        return instances_among(young, *bases)

    def _old_and_young_instances(self) -> _OldInstances | None:
        """Return the record of the instances that will be old once the young objects are; None if
        unknown.
        """
        old = self._old_instances
        if old is None:
            return None
        young_instances = self._young_instances(old.bases)
        if young_instances is None:
            return None
        return old.with_young(young_instances)

    def forget(self) -> None:
        """Forget the old instances, and remove our callbacks of the collector."""
        self._old_instances = None
        self._saver.stop()
        if self._watch is not None:
            self._watch.stop()

    # -- collecting ------------------------------------------------------------------------------

    def collect(self, since: GcMark | None = None, decreases: list[int] | None = None) -> int:
        """Collect until nothing more dies, since finalisers may free more; return the number of
        objects that died.

        Args:
            since: collect only objects made after this mark, if they are still young; None to
                collect all objects.
            decreases: receives by how much each collection lowered RSS; nothing while other Python
                threads run.
        """
        self._decreases = decreases
        try:
            return self._collect_since(since)
        finally:
            self._decreases = None

    def _collect_since(self, since: GcMark | None) -> int:
        """Collect the garbage among objects that are younger than a mark; all garbage if that is
        not possible, or if a finaliser may have made older objects garbage. Return the number of
        objects that died.
        """
        young = objects_since(since)
        if young is None:
            return self._collect_all()
        watchers = _watchers_of_finalisers(young)
        del young  # the list keeps all of them alive
        died = self._collect_young()
        # A finaliser has run, which may have made old objects garbage.
        if any(watcher() is None for watcher in watchers):
            return died + self._collect_all()
        return died

    def _collect_all(self) -> int:
        """Collect all garbage until nothing more dies; return the number of objects that died."""
        total = 0
        for _ in range(_MOST_ROUNDS):
            total += self._collect_young()
            died = self._collect_old()
            total += died
            if died == 0:
                break
        return total

    def _collect_old(self) -> int:
        """Collect all generations once; return the number of objects that died.

        Objects that finalisers made in an earlier collection of young garbage are old afterwards.
        """
        all_generations = 2
        died = self._collect_with_instances(all_generations)
        if self.last is not None:
            # The objects that finalisers made in this collection are young again.
            self.last = GcMark(self._watch)
        return died

    def cell_ended(
        self, seconds: float, share: float, *, in_scope: bool, of_all_objects: bool = False
    ) -> None:
        """Collect the garbage of a cell that has ended, and all other garbage if that is cheap
        compared with the cell: after ``model.fit(data)`` that ran for a minute it is, and after
        ``x = 1`` only the few objects of that cell are examined.

        Args:
            seconds: duration of the cell.
            share: maximum share of the cell's work that a collection of all objects may take.
            in_scope: True if a scope is open, whose objects must stay young.
            of_all_objects: True to collect all garbage in any case.
        """
        if not gc.isenabled():
            return
        if of_all_objects:
            self._collect_all()
            return
        if seconds >= self.SHORTEST_SECONDS and self.collect_if_cheap(seconds, share):
            return
        # Without a middle generation, a collection would make the scope's objects old.
        has_middle = 1 in _YOUNG
        if _YOUNG and (has_middle or not in_scope):
            self._collect_of_short_cell(in_scope=in_scope)

    def _collect_of_short_cell(self, *, in_scope: bool) -> None:
        """Collect the garbage of a short cell. Outside a scope, all young objects become old now
        and then, and CPython decides about collecting the old ones when it would have done so
        without these calls.
        """
        has_middle = 1 in _YOUNG
        young, collections, _ = gc.get_count()
        self._uncounted += young
        # Without another collection since, the youngest generation is exactly what the cell has
        # made.
        is_only_of_cell = has_middle and collections == self._collections
        if is_only_of_cell and (in_scope or collections < _COLLECTIONS_OF_CELLS):
            with interrupts.reraise_swallowed():
                gc.collect(0)
        else:
            self._collect_young()
        self._collections = gc.get_count()[1]
        if not in_scope and self._uncounted > _objects_between_old_collections():
            self._uncounted = 0
            _let_old_be_collected()

    def collect_if_cheap(self, cell_seconds: float, share: float) -> bool:
        """Collect all garbage if that is predicted to take at most ``share`` of the time that code
        has worked; return True if it was collected.
        """
        worked = self._costs.worked_seconds(cell_seconds)
        if worked < self.SHORTEST_SECONDS or not gc.isenabled():
            return False
        blocks = sys.getallocatedblocks()
        if self._costs.predicted_seconds(blocks) > share * worked:
            return False
        self._collect_young()
        started = time.perf_counter()
        self._collect_old()
        self._costs.record(blocks, time.perf_counter() - started)
        return True


def _collect_generation(generation: int, decreases: list[int] | None = None) -> int:
    """Collect a generation as soon as no other thread collects; return the number of objects that
    died. Add to ``decreases`` by how much that lowered RSS, if it is known.
    """
    for _ in range(_MOST_ATTEMPTS):
        earlier = gc.get_stats()[generation]["collections"]
        with interrupts.reraise_swallowed():
            if decreases is None:
                died = gc.collect(generation)
            else:
                died, decrease = decrease_during(functools.partial(gc.collect, generation))
                if decrease is not None:
                    decreases.append(decrease)
        if gc.get_stats()[generation]["collections"] != earlier:
            return died
        time.sleep(0.001)
    return 0


def _objects_between_old_collections() -> int:
    """Return the number of new objects after which CPython itself collects old objects: with three
    generations the product of their thresholds. Where it collects in increments, it does one
    together with each collection of the youngest objects.
    """
    thresholds = gc.get_threshold()
    if 1 in _YOUNG:
        return prod(thresholds)
    return thresholds[0]


def _let_old_be_collected() -> None:
    """Make CPython decide whether a collection of old objects is due, by making so many new objects
    that it collects the youngest ones.
    """
    # Not lists: they may come from a free list, and would not count.
    [set() for _ in range(gc.get_threshold()[0] + 1)]


def _progress_of_other_threads() -> dict[int, list[int]]:
    """Return the positions in the code of the functions that each other thread runs, by thread: if
    these are the same later, the thread has made no objects.
    """
    progress = dict[int, list[int]]()
    for thread, top in frames_of_other_threads().items():
        progress[thread] = [frame.f_lasti for frame in stack(top)]
    return progress


def objects_since(mark: GcMark | None) -> list[object] | None:
    """Return the objects made since ``mark``, and maybe older ones; None if unknown.

    Contains only objects that the collector tracks. The list keeps them alive.
    """
    if mark is None or not gc.isenabled():
        return None
    young = young_objects()
    if any(map(is_, young, repeat(mark))) and mark.is_before_collections():
        return young
    return None


def young_objects() -> list[object]:
    """Return the tracked objects that a collection of the young generations examines. The list
    keeps them alive.
    """
    # A new list, ``[*objects_0, *objects_1]``, would be young, too, and contain itself: a cycle.
    young = gc.get_objects(generation=0)
    if 1 in _YOUNG:
        young += gc.get_objects(generation=1)
    return young


def _watchers_of_finalisers(items: Sequence[object]) -> list[Callable[[], object]]:
    """Return a function for each object whose death runs a finaliser or a callback; it returns None
    once the object is dead.
    """
    ending = list(filter(_runs_finaliser, of_types(_types_with_finaliser(items), items)))
    references: list[Any] = instances_among(items, weakref.ref)
    targets = [weakref.ref.__call__(item) for item in references if _runs_callback(item)]
    return [weak(item) or _gone for item in (*ending, *targets) if item is not None]


def _types_with_finaliser(items: Sequence[object]) -> set[int]:
    """Return the identities of the types with a ``__del__``."""
    with_finaliser = set[int]()
    for type_id, example in one_of_each(items).items():
        spaces = map(class_dict, mro_of(type(example)))
        if any(map(contains, spaces, repeat("__del__"))):  # in C: each cell asks for some types
            with_finaliser.add(type_id)
    return with_finaliser


def _runs_finaliser(item: object) -> bool:
    """Return True if an object with ``__del__`` runs code when it dies: not a generator or
    coroutine that has ended or never begun, such as those of IPython's context managers.
    """
    return not is_exactly(item, *SUSPENDED) or is_started(item)


def _runs_callback(reference: Any) -> bool:
    """Return True for a weak reference with a callback.

    The method of a set, such as ``discard``, only drops the reference itself.
    """
    callback = weakref.ref.__dict__["__callback__"].__get__(reference)
    is_method = is_exactly(callback, BuiltinMethodType)
    is_of_set = is_method and is_exactly(callback.__self__, set)
    return callback is not None and not is_of_set


def weak(item: object) -> weakref.ref[object] | None:
    """Return a weak reference to an object; None if it does not support one."""
    try:
        return weakref.ref(item)
    except TypeError:
        return None


def lasting_weak(item: object) -> Known | None:
    """Return a weak reference that may exist while user code runs; None for a NumPy array, too:
    NumPy refuses to resize one that has any.
    """
    try:
        return None if is_array(item) else Known(item)
    except TypeError:
        return None


def _gone() -> None:
    """Return None, like the weak reference of a dead object."""
