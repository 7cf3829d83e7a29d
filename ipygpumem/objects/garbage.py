"""Collects garbage, and knows what was made since some moment: what CPython's collector calls young.

A collection of generation 1 looks at young objects only, and makes those that survive it old. As long as none like it
runs again, what is young is exactly what was made since, and the next one finds exactly its garbage. Both cost what was
made, however much the process holds: microseconds, where a full collection takes a tenth of a second.

Whether that still holds is seen from an object that was made at that moment: it is young itself, or nobody knows.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from math import prod
from operator import is_
from typing import Any

from ipygpumem.introspect import class_dict
from ipygpumem.objects import interrupts
from ipygpumem.objects.bulk import of_types, one_of_each
from ipygpumem.objects.heap import live_instances
from ipygpumem.objects.holders.frames import stack

_HAS_GENERATIONS = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)  # whose generations are others
    and (not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled())
)
_ROUNDS = 5
_TIMES = 50
"""A collection that did not run is tried so often."""
_FEW = 4
"""Of 10 collections of generation 0 after which CPython makes all that is young old by itself."""


class Mark:
    """A moment. It is young for as long as everything is that was made since."""


class Known(weakref.ref[object]):
    """A weak reference to a known instance; nobody else shares it."""

    __slots__ = ()


class Garbage:
    """Collects garbage, all of it or what was made since a ``Mark``; and lists live objects of some classes."""

    SHORTEST_SECONDS = 0.02
    """Of a cell after which more than young garbage may be collected."""
    _FIRST_GUESS_SECONDS = 2e-7
    _MOST_KNOWN = 100_000
    """Of more objects no weak references are kept: to walk over the heap costs less than those do."""

    def __init__(self) -> None:
        self._seconds_per_block = self._FIRST_GUESS_SECONDS
        self._cpu_seen = time.process_time()
        self.last: Mark | None = None
        """The last moment at which all that was there became old."""
        self._bases: tuple[type, ...] = ()
        self._known: list[Known] | None = None
        """The live instances of ``_bases`` that are older than ``last``; None if that is not known."""
        self._collections = 0
        """How many collections of generation 0 the collector has counted by the end of the last cell."""
        self._made = 0
        """How many objects cells have made that the collector has not counted towards a full collection."""

    # -- what was made since ----------------------------------------------------------------------------------

    def mark(self) -> Mark | None:
        """Collect young garbage, and return this moment; None where nobody could tell what is made from now on.

        That is so where the user has switched the collector off, and on other Pythons than CPython 3.10 to 3.13.
        """
        self._make_old()
        return self.last

    def _make_old(self) -> int:
        """Collect young garbage, and know the instances that are old from now on; return how many objects died."""
        if not _HAS_GENERATIONS or not gc.isenabled():
            self.last = self._known = None
            return 0
        last, known = self.last, self._known
        others = _progress_of_others() if known is not None else {}
        if known is not None:
            new = self._new_instances()
            known = None if new is None else [*known, *map(Known, new)] if new else known
            del new  # as long as they are listed, none is garbage
            if known is not None and len(known) > self._MOST_KNOWN:
                known = None  # most have died: nobody has asked for instances since
        died = _run(1)
        # Somebody else has done the same meanwhile, or another thread may have made some that were not listed.
        if self.last is not last or (known is not None and _progress_of_others() != others):
            known = None
        self._known, self.last, self._collections = known, Mark(), 0
        return died

    def instances(self, *bases: type) -> list[object]:
        """Return the live objects of classes written in Python, and of those derived from them.

        It walks over the heap only if it has lost track of what is there, and the first time.
        """
        is_asked_again = len(bases) == len(self._bases) and all(map(is_, bases, self._bases))
        new = self._new_instances() if self._known is not None and is_asked_again else None
        if new is None or self._known is None:
            last = Mark()
            instances = live_instances(*bases)
            self._bases, self.last = bases, last
            self._known = list(map(Known, instances)) if len(instances) <= self._MOST_KNOWN else None
            return instances
        known = [item for reference in self._known if (item := reference()) is not None]
        if len(known) < len(self._known):
            self._known = list(map(Known, known))
        return list({id(item): item for item in (*known, *new)}.values())

    def forget(self) -> None:
        """Know no instances any more."""
        self._known = None

    def _new_instances(self) -> list[object] | None:
        """Return the instances of ``_bases`` that may be younger than what is known; None if nobody can tell."""
        young = made_since(self.last)
        return None if young is None else _of_kinds(young, lambda kind: _derives(kind, self._bases))

    # -- collecting -------------------------------------------------------------------------------------------

    def collect(self, since: Mark | None = None) -> int:
        """Collect until nothing more dies, since finalisers may free more; return how many died.

        Only what was made ``since`` need be looked at, if that is still known.
        """
        young = made_since(since)
        if young is None:
            return self._collect_all()
        run_code = _that_run_code(young)
        del young
        died = self._make_old()
        # What a finaliser lets go of may be old.
        return died + self._collect_all() if any(reference() is None for reference in run_code) else died

    def _collect_all(self) -> int:
        total = 0
        for _ in range(_ROUNDS):
            total += self._make_old()
            died = self._collect_old()
            total += died
            if died == 0:
                break
        return total

    def _collect_old(self) -> int:
        died = _run(2)
        self.last = self.last and Mark()  # what finalisers have made is young
        return died

    def cell_ended(self, seconds: float, share: float, *, in_scope: bool) -> None:
        """Collect what garbage a cell has made, and all that there is if that is cheap beside it."""
        if not gc.isenabled() or (seconds >= self.SHORTEST_SECONDS and self.collect_if_cheap(seconds, share)):
            return
        if _HAS_GENERATIONS:
            self._made += gc.get_count()[0]
            # If nothing else has been collected meanwhile, the youngest are all that the cell has made.
            if gc.get_count()[1] == self._collections and (in_scope or self._collections < _FEW):
                with interrupts.kept():
                    gc.collect(0)
            else:
                self._make_old()
            self._collections = gc.get_count()[1]
            if not in_scope and self._made > prod(gc.get_threshold()):
                self._made = 0
                _let_collect()

    def collect_if_cheap(self, cell_seconds: float, share: float) -> bool:
        """Collect all if the predicted time is at most ``share`` of the work; return whether it did.

        The cost grows with the heap, so it is predicted from the number of allocated blocks and the time that earlier
        collections took per block. The work is the CPU time since the last call, so that short cells need not be
        timed, but no more than the cell took: one that only waited has made no garbage.
        """
        cpu, earlier = time.process_time(), self._cpu_seen
        self._cpu_seen = cpu
        worked = min(cell_seconds, cpu - earlier)
        if worked < self.SHORTEST_SECONDS or not gc.isenabled():
            return False
        blocks = sys.getallocatedblocks()
        if blocks * self._seconds_per_block > share * worked:
            return False
        self._make_old()
        started = time.perf_counter()
        self._collect_old()
        self._seconds_per_block = (time.perf_counter() - started) / blocks
        return True


def _run(generation: int) -> int:
    """Collect a generation as soon as nobody else collects, and return how many objects died."""
    for _ in range(_TIMES):
        earlier = gc.get_stats()[generation]["collections"]
        with interrupts.kept():
            died = gc.collect(generation)
        if gc.get_stats()[generation]["collections"] != earlier:
            return died
        time.sleep(0.001)
    return 0


def _let_collect() -> None:
    """Let CPython decide whether a full collection is due."""
    [Mark() for _ in range(gc.get_threshold()[0] + 1)]  # lists may come from a store, and do not count then


def _progress_of_others() -> dict[int, list[int]]:
    """Return where the other threads are in their code."""
    own = threading.get_ident()
    tops = {thread: top for thread, top in sys._current_frames().items() if thread != own}
    return {thread: [frame.f_lasti for frame in stack(top)] for thread, top in tops.items()}


def made_since(mark: Mark | None) -> list[object] | None:
    """Return the objects that were made since ``mark``, and maybe others; None if nobody can tell.

    Only what the collector tracks is among them. They are kept alive by the list.
    """
    if mark is None or not gc.isenabled():
        return None
    young = gc.get_objects(generation=0)  # with itself in it, as a new list would have, it would be a cycle
    young += gc.get_objects(generation=1)
    return young if any(map(is_, young, repeat(mark))) else None


def _of_kinds(items: Sequence[object], is_wanted: Callable[[type], bool]) -> list[Any]:
    return of_types({key for key, item in one_of_each(items).items() if is_wanted(type(item))}, items)


def _derives(kind: type, bases: Sequence[type]) -> bool:
    return any(type.__subclasscheck__(base, kind) for base in bases)


def _that_run_code(items: Sequence[object]) -> list[Callable[[], object]]:
    """Return functions that return None once one of ``items`` has died and run code: a finaliser, or a callback."""
    ending = _of_kinds(items, _has_finaliser)
    references = _of_kinds(items, lambda kind: _derives(kind, [weakref.ref]))
    callback = weakref.ref.__dict__["__callback__"].__get__
    targets = [weakref.ref.__call__(item) for item in references if callback(item) is not None]
    return [weak(item) or _gone for item in (*ending, *targets) if item is not None]


def _has_finaliser(kind: type) -> bool:
    return any("__del__" in class_dict(base) for base in type.mro(kind))


def weak(item: object) -> weakref.ref[object] | None:
    """Return a weak reference, or None to an object that has no room for one."""
    try:
        return weakref.ref(item)
    except TypeError:
        return None


def _gone() -> None:
    """Answer as a weak reference whose object has died."""
