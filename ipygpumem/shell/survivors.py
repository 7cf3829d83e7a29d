"""Compares the live arrays at an experiment's start and end, and finds the holders of those that
outlived it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import chain, compress, filterfalse
from operator import attrgetter, itemgetter, not_
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.errors import describe_error
from ipygpumem.heap.arrays import (
    Array,
    Reader,
    Span,
    StorageKey,
    Storages,
    WatchedArray,
    describe,
    described,
    is_array,
    library_type,
    watch,
)
from ipygpumem.heap.bulk import kinds_of, of_types
from ipygpumem.heap.garbage import GcMark
from ipygpumem.heap.heap import Heap, large_tensors, undisturbed
from ipygpumem.heap.holders.cuts import Cut, Kind
from ipygpumem.heap.holders.frames import running_locals
from ipygpumem.heap.holders.graphs import live_tensors
from ipygpumem.heap.holders.registries import Registries
from ipygpumem.heap.holders.roots import LAST_ERROR, OF_IPYTHON, OF_MODULE, Root, Roots
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.objects_since import ObjectsSince
from ipygpumem.heap.sizes import Size, Sizes, row_of
from ipygpumem.heap.walk import MOST_AT_START, ArraySearch
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import (
    instance_dict,
    is_atom,
    is_instance,
    module_dict,
    text_of,
    type_name,
)
from ipygpumem.inventory.baseline import BaselineSnapshot
from ipygpumem.inventory.contents import Contents
from ipygpumem.inventory.merging import merged
from ipygpumem.inventory.remaining import Remaining, find, most_bytes
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.reclaim.name_snapshot import NameSnapshot
from ipygpumem.records import ReferencePath, RetainedArray
from ipygpumem.scope.ownable import ownable
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import cell_of_output, global_of_run, is_of_ipython
from ipygpumem.shell.ipython.sources import cell_of_file, cell_that_bound, running_cell
from ipygpumem.shell.recovery import MUCH

MOST_OLD = 20_000_000
"""Maximum number of objects to examine behind the notebook's names, to know which memory is older.
"""
MOST_EXPLAINED = 2000
"""Maximum number of arrays, largest first, whose holders are searched at once."""

_WORD = re.compile(r"\w+")
_DELETING_ANY = {"reset", "reset_selective"}
_DELETING = {"del", "xdel", *_DELETING_ANY}
"""Words of cells that delete names."""
_MOST_DELETED = 1000
_MOST_PLACES = 4
"""Maximum number of places to search for the arrays of one name."""


@dataclass(frozen=True)
class WatchedName:
    """A name with its arrays, none of which it keeps alive."""

    held: RetainedArray
    arrays: tuple[tuple[Callable[[], bool], Array], ...]
    """Arrays with functions that return True while their memory is alive."""
    tensors: tuple[Array, ...] = ()
    storages: Storages = field(default_factory=Storages)
    """Storages of ``tensors``; there may be very many."""
    is_old_perhaps: bool = False
    """True if its memory may be older than the experiment, because the baseline was incomplete."""
    object_id: int = 0
    """Identity of the object to which the name referred; 0 if unknown."""

    @classmethod
    def of(cls, held: RetainedArray, pairs: Sequence[tuple[object, Array]]) -> WatchedName:
        """Watch the described arrays of a name."""
        base, storages, items = (
            library_type("torch", "Tensor"),
            Storages(),
            [item for item, _ in pairs],
        )
        if base is not None and (tensors := of_types(kinds_of(items, base), items)):
            with sys.modules["torch"]._C.DisableTorchFunction():
                storages.add_of(Reader(sys.modules["torch"]), tensors)
        stored = [
            array.storage[0] == "torch" and array.storage[1] in storages for _, array in pairs
        ]
        rest = tuple((watch(item), array) for item, array in compress(pairs, map(not_, stored)))
        return cls(held, rest, tuple(array for _, array in compress(pairs, stored)), storages)

    def alive(self) -> list[Array]:
        """Return the arrays that are still alive, largest first."""
        found = [array for is_alive, array in self.arrays if is_alive()]
        if self.tensors:
            keys = map(itemgetter(1), map(attrgetter("storage"), self.tensors))
            found += compress(self.tensors, self.storages.alive(keys))
        return sorted(found, key=attrgetter("size_bytes"), reverse=True)

    def row(self, arrays: Iterable[Array]) -> Row:
        """Return the row of some of its arrays, whose holder is searched."""
        return Row([array.storage for array in arrays], self.object_id)

    def divided(self, storages: Container[StorageKey]) -> Iterator[WatchedName]:
        """Yield the arrays in ``storages``, then all other arrays; each part has its own holder."""
        for inside in (True, False):
            arrays = tuple(pair for pair in self.arrays if (pair[1].storage in storages) is inside)
            tensors = tuple(
                array for array in self.tensors if (array.storage in storages) is inside
            )
            yield replace(self, arrays=arrays, tensors=tensors)


@dataclass
class Questions:
    """Further storages and objects whose holders one search finds together with those of the
    survivors.
    """

    storages: Sequence[StorageKey] = ()
    objects: Sequence[object] = ()
    holders: dict[StorageKey, ReferencePath] = field(default_factory=dict)
    """The answers; the key of an object is "object" and its identity."""


class OtherAlive(NamedTuple):
    """An object without arrays that has outlived an experiment."""

    item: object
    held: RetainedArray
    """Its row in the report of the experiment."""
    row: RetainedArray
    """Its size now."""

    @property
    def is_alone(self) -> bool:
        """True if it is the only object of the row, so that its holder can be searched."""
        return self.held.objects == 1

    def with_holder(self, holders: Mapping[StorageKey, ReferencePath]) -> RetainedArray:
        """Return its row with the holder."""
        holder = (
            holders.get(("object", id(self.item)), self.held.holder)
            if self.is_alone
            else self.held.holder
        )
        return replace(self.row, name=self.held.name, cell=self.held.cell, holder=holder)


class Baseline:
    """The names and arrays at the start of an experiment."""

    def __init__(
        self,
        context: ShellContext,
        remarks: list[str],
        known: Iterable[Span],
        names: tuple[str, ...],
    ) -> None:
        self._namespace = context.namespace
        self._before: BaselineSnapshot | None = None
        self._failed = False
        if {"torch", "numpy"} & sys.modules.keys():
            try:
                self._before = BaselineSnapshot(context.namespace, context.garbage, known)
            except Exception as error:  # only needed for the report
                if is_from_signal(error):
                    raise
                self._failed = True
                why = f"because the baseline at the start failed: {describe_error(error)}"
                remarks.append(f"objects still alive will not be listed, {why}")
        self._names = NameSnapshot(context.namespace, names)
        self.contents = Contents(context.namespace)
        self._made, self._garbage = ObjectsSince(), context.garbage
        self._threads = frozenset(sys._current_frames())
        self._in_context = frozenset(map(id, copy_context().values()))
        self._mark = context.garbage.mark()
        context.garbage.list_from_now(self._made)

    @property
    def is_complete(self) -> bool:
        """Return True if it contains all arrays."""
        return self._before is None or self._before.complete

    def was_there(self, item: object, array: Array) -> bool:
        """Return True if the memory of ``item``, described by ``array``, may have been allocated at
        the start.
        """
        return self._failed or (self._before is not None and self._before.has(item, array))

    def mark_if_nothing_lingers(self) -> GcMark | None:
        """Return the start mark, or None if objects named at the start may have become garbage."""
        return None if self._names.some_may_live_on(self._namespace) else self._mark

    def forget(self) -> None:
        """Drop the recorded arrays."""
        self._garbage.made[:] = [made for made in self._garbage.made if made is not self._made]
        if self._before is not None:
            self._before.close()

    def surely_new(self, names: dict[str, object]) -> set[int]:
        """Return the identities of the objects that known ones have received since, and of those in
        new containers.
        """
        made, tracked = self.objects_since(), gc.get_objects()
        inside = gc.get_referents(*compress(tracked, map(made.__contains__, map(id, tracked))))
        received = self.contents.received(names, made)
        return set(map(id, [*inside, *chain.from_iterable(one.items for one in received)]))

    def objects_since(self) -> set[int]:
        """Return the identities of the tracked objects made since; none if they cannot be told
        apart.
        """
        return self._made.identities() or set()

    def elsewhere(self) -> list[object]:
        """Return the text and numbers in local names of new threads, and the new values of context
        variables.

        The age of the text in older threads is unknown.
        """
        values = [value for value in copy_context().values() if id(value) not in self._in_context]
        return [*filterfalse(gc.is_tracked, running_locals(self._threads)), *values]


class HostGrowth(NamedTuple):
    """RAM that an experiment leaves in use, and what is known about it."""

    size_bytes: int
    kept: Callable[[], list[object]]
    """Returns the objects of names that the user has kept."""
    names: dict[int, str]
    """The experiment's names, by the identity of their objects."""
    remarks: list[str]


class Survivors:
    """Weak records of arrays that outlived the experiments of one shell."""

    def __init__(
        self,
        context: ShellContext,
        waiting: Callable[[], Iterable[tuple[str, object]]],
        ours: object,
    ) -> None:
        self._context, self._waiting, self._ours = context, waiting, ours
        self.known: list[WatchedName] = []
        self.known_others: list[tuple[tuple[int, ...], RetainedArray]] = []
        """The identities of other objects, and their rows."""
        self.cuts: dict[str, list[Cut]] = {}
        """The references that each line of the last report removes."""
        self._deleted: dict[str, tuple[int, WatchedName | None, Callable[[], object] | None]] = {}
        """For each name that a cell may have deleted: the cell's number, and the name's arrays and
        object.
        """

    def baseline(self, remarks: list[str], names: tuple[str, ...]) -> Baseline:
        """Return a baseline of the current state, with these names; a failure is added to
        ``remarks``.
        """
        watched = [is_alive for item in self.known for is_alive, _ in item.arrays]
        return Baseline(
            self._context,
            remarks,
            [one.place for one in watched if isinstance(one, WatchedArray)],
            names,
        )

    @staticmethod
    def watch(named: Iterable[tuple[str, object]], search: ArraySearch) -> list[WatchedName]:
        """Watch each name's arrays that no earlier name holds, without keeping them alive."""
        entries = [search.held(name, value) for name, value in named]
        return [WatchedName.of(*entry) for entry in entries if entry is not None]

    def of_experiment(
        self,
        watched: Iterable[WatchedName],
        known: Callable[[object, Array], bool],
        *,
        kept: Container[StorageKey],
        keepers: Container[str],
        baseline: Baseline,
        growth: HostGrowth,
        first_cell: int | None = None,
    ) -> tuple[RetainedArray, ...]:
        """Return the objects that outlive an experiment, largest first, with holders; keep them for
        %gpumem leaks.

        Args:
            watched: the arrays of the experiment's names.
            known: returns True for a tensor allocated before, or kept on purpose.
            kept: the storages kept on purpose; they are left out unless something else refers to
                them, too.
            keepers: the names that keep them.
            baseline: the objects at its start.
            growth: RAM that is searched for objects of any kind if arrays do not explain it.
            first_cell: number of the experiment's first cell; the running one unless given.
        """
        context = self._context
        smallest = context.config.min_held_bytes
        first = running_cell(context.shell) if first_cell is None else first_cell
        parts = [part for item in watched for part in item.divided(kept)] if kept else watched
        items = [item for item in parts if size_of(item.alive()) >= smallest]
        # an older object of a name is more than the leak
        made = baseline.objects_since() if items else set()
        object_ids = {name: key for key, name in growth.names.items() if key in made}
        items = [replace(item, object_id=object_ids.get(item.held.name, 0)) for item in items]
        new = baseline.surely_new(self._names()) if items and not baseline.is_complete else None
        alive = [self._with_cell(item, first, new) for item in items]
        named = {array.storage for item in alive for array in item.alive()}
        for key, tensors in large_tensors(live_tensors(context.garbage), smallest).items():
            tensor = describe(tensors[0]) if key not in named else None
            if tensor is not None and not known(tensors[0], tensor):
                alive.append(WatchedName.of(held_without_name(tensors[0]), [(tensors[0], tensor)]))
        arrays_alive = [
            array for item in alive for array in item.alive() if array.storage not in kept
        ]
        on_host = size_of(array for array in arrays_alive if array.device == "cpu")
        unnamed = growth.size_bytes - on_host
        if not alive and (
            unnamed < smallest or (unnamed < MUCH and self._most_others(baseline) < smallest)
        ):
            return ()
        # by an inner experiment
        reported = {array.storage for item in self.known for array in item.alive()}
        working, ours = (
            context.display.working("holders of memory that was not freed"),
            "the search for holders",
        )
        self.cuts.clear()
        with growth_for(ours), working as progress, undisturbed():
            heap = Heap()
            progress(0.5)
            alive += _without_name(
                heap, smallest, unnamed, lambda item, a: a.storage in named or known(item, a)
            )
            explained = self.explained(alive, heap, keepers)
            arrays, places = _of_numpy(alive, heap)
            alive, found = [item for item, _ in explained], tuple(row for _, row in explained)
            if unnamed >= smallest:
                progress(0.6)
                found = self._with_others(found, heap, alive, baseline, growth, first)
            heap.drop()
        found = tuple(merged(found, self.cuts))
        for array in arrays:
            array.detach(places)
        self.known += [
            item for item in alive if any(array.storage not in reported for array in item.alive())
        ]
        return found

    def watch_before_deletion(self, source: str) -> None:
        """Watch the objects of a cell's names that it may delete, without keeping them alive."""
        words, namespace = set(_WORD.findall(source)), self._context.namespace
        if words.isdisjoint(_DELETING):
            return
        names = ownable(namespace if words & _DELETING_ANY else words & namespace.keys())[
            -_MOST_DELETED:
        ]
        for name in names:
            value, search = namespace[name], ArraySearch()
            search.left = MOST_AT_START // len(names)
            self._deleted.pop(name, None)
            if not (is_atom(value) or is_instance(value, type) or is_instance(value, ModuleType)):
                found = self.watch([(name, value)], search)
                for array in _of_numpy(found)[0]:
                    array.detach({array.place})  # user code is about to run
                self._deleted[name] = (
                    self._context.shell.execution_count,
                    (*found, None)[0],
                    _weakly(value),
                )
        for name in list(self._deleted)[:-_MOST_DELETED]:
            del self._deleted[name]

    def left_by(self, name: str, cell: int | None) -> tuple[RetainedArray, ...]:
        """Return the live object of a name that is not defined, or the live arrays that it held.

        Args:
            name: the name.
            cell: the last cell that bound it; any object from before is another one.
        """
        self._context.garbage.collect()
        with undisturbed():
            heap = Heap()
            self.update(heap)
            number, item, reference = self._deleted.get(name, (0, None, None))
            if cell is not None and cell >= number:
                item = reference = None
            value = reference() if reference is not None else None
            known = [one for one in self.known if one.held.name == name] or (
                [] if item is None else [item]
            )
            arrays, places = _of_numpy(known, heap)
            for array in arrays:
                array.update(places)
            found = tuple(row for _, row in self.explained(known, heap))
            if value is not None and not found:
                holder = explain((), heap, self.roots(), more=[value])["object", id(value)]
                found = (
                    replace(row_of([value], Sizes().measure(value)), name=name, holder=holder),
                )
            heap.drop()
        return found

    def _names(self) -> dict[str, object]:
        namespace = self._context.namespace
        return {name: namespace[name] for name in ownable(list(namespace))}

    def _most_others(self, baseline: Baseline) -> int:
        """Return an upper bound of the memory without arrays that an experiment leaves."""
        with undisturbed():
            return most_bytes(
                self._names(), baseline.contents, baseline.objects_since(), baseline.elsewhere()
            )

    def _with_others(
        self,
        arrays: tuple[RetainedArray, ...],
        heap: Heap,
        alive: Iterable[WatchedName],
        baseline: Baseline,
        growth: HostGrowth,
        first: int,
    ) -> tuple[RetainedArray, ...]:
        """Return the rows of arrays and of all other memory that an experiment leaves, largest
        first.
        """
        roots, sizes = self.roots(), Sizes(limit=MOST_OLD)
        counted = {array.storage for item in alive for array in item.alive()}
        both = described([*heap.tensors, *heap.ndarrays])
        sizes.leave_out(item for item, array in both if array.storage in counted)
        rows = list(
            find(
                heap,
                self._names(),
                baseline.contents,
                baseline.objects_since(),
                elsewhere=baseline.elsewhere(),
                counted=sizes,
                kept=growth.kept(),
                smallest=self._context.config.min_held_bytes,
                size_bytes=growth.size_bytes
                - size_of(array for item in alive for array in item.alive()),
            )
        )
        searched = [item for row in rows for item in row.to_search()][:MOST_EXPLAINED]
        holders = explain((), heap, roots, more=searched, all_places=True)
        found = list(arrays)
        for row in rows:
            name = growth.names.get(id(row.items[0]), "") if len(row.items) == 1 else ""
            holder = _holder_of(row, holders, roots)
            holder = _perhaps_old(holder) if row.is_old_perhaps else holder
            cell = (
                cell_of_output(name) or cell_that_bound(self._context.shell, name, range(first))
                if name
                else None
            )
            held = replace(row.held, name=name, holder=holder, cell=cell)
            found.append(held)
            self.known_others.append((tuple(map(id, row.items)), held))
        return tuple(found)

    def others_alive(self, heap: Heap, sizes: Sizes, smallest: int) -> list[OtherAlive]:
        """Return the objects without arrays that are still alive, and forget the rest."""
        alive = heap.with_identities({key for keys, _ in self.known_others for key in keys})
        known = [
            ([alive[key] for key in keys if key in alive], held) for keys, held in self.known_others
        ]
        known = [
            (items, held)
            for items, held in known
            if items and row_of(items, Size({})).type_name == held.type_name
        ]
        self.known_others = [(tuple(map(id, items)), held) for items, held in known]
        found = list[OtherAlive]()
        for items, held in known:
            size = sizes.measure(items if len(items) > 1 else items[0])
            if size.size_bytes >= smallest:
                found.append(OtherAlive(items[0], held, row_of(items, size)))
        return found

    def update(self, heap: Heap) -> None:
        """Drop records of arrays that are no longer on the ``heap``."""
        arrays, places = _of_numpy(self.known, heap)
        for array in arrays:
            array.update(places)
        self.known = [item for item in self.known if item.alive()]

    def _with_cell(
        self, item: WatchedName, first_cell: int, new: Container[int] | None
    ) -> WatchedName:
        """Add the cell that bound the name, before later cells rebind it; ``new`` are certain
        identities, or None.
        """
        keys = [array.storage[1] for array in item.alive() if array.storage[0] == "numpy"]
        is_old_perhaps = new is not None and any(key not in new for key in keys)
        name = item.held.name
        cell = cell_of_output(name) or cell_that_bound(self._context.shell, name, range(first_cell))
        return replace(item, held=replace(item.held, cell=cell), is_old_perhaps=is_old_perhaps)

    def explained(
        self,
        watched: Sequence[WatchedName],
        heap: Heap,
        keepers: Container[str] = (),
        *,
        questions: Questions | None = None,
    ) -> list[tuple[WatchedName, RetainedArray]]:
        """Return the live arrays of each name, largest first, with the object that holds all of
        them.

        Arrays of one name in several places make several rows. Those to which only the names
        ``keepers`` lead are left out. The first search answers the ``questions``, too.
        """
        roots = self.roots(keepers)
        found = list[tuple[WatchedName, RetainedArray]]()
        waiting = list(watched)
        for number in range(_MOST_PLACES):
            alive = _largest_first(waiting)
            rows = {arrays[0].storage: item.row(arrays) for item, arrays in alive[:MOST_EXPLAINED]}
            if questions is None or number > 0:
                holders = explain(rows, heap, roots, rows=rows, all_places=True)
            else:
                holders = explain(
                    [*rows, *questions.storages],
                    heap,
                    roots,
                    more=questions.objects,
                    rows=rows,
                    all_places=True,
                )
                questions.holders.update(holders)
            waiting.clear()
            for item, arrays in alive:
                key = arrays[0].storage
                parts = self._parts(item, rows.get(key), may_divide=number < _MOST_PLACES - 1)
                waiting += parts[1:]
                holder = holders.get(key)
                if holder is not None and len(parts) == 1 and not rows[key].is_whole:
                    holder = replace(holder, path=f"{holder.path}, and other places")
                row = _row_of(parts[0], holder)
                if row is not None:
                    found.append((parts[0], row))
            if not waiting:
                break
        return sorted(found, key=lambda pair: -pair[1].size_bytes)

    def _parts(self, item: WatchedName, row: Row | None, *, may_divide: bool) -> list[WatchedName]:
        """Return the arrays to which the holder of a row leads, and the rest if both
        deserve rows.
        """
        if row is None or row.is_whole or not may_divide:
            return [item]
        parts = list(item.divided(row.held))
        least = min(size_of(part.alive()) for part in parts)
        return parts if least >= self._context.config.min_held_bytes else [item]

    def roots(self, keepers: Container[str] = ()) -> Roots:
        """Return the namespaces and objects from which the user can reach objects, the names
        ``keepers`` last.
        """
        shell, namespace = self._context.shell, self._context.namespace
        outputs = namespace.get("_oh")
        namespaces: dict[int, Callable[[object], Root | None]] = {
            id(namespace): lambda key: (
                _KEPT if keepers and text_of(key) in keepers else _variable(key)
            ),
            id(shell.user_ns_hidden): _hidden,
        }
        if type(outputs) is dict:
            namespaces[id(outputs)] = _output
        for name, waiting in self._waiting():
            namespaces[id(waiting)] = functools.partial(_waits_in, name)
        stored = instance_dict(getattr(shell, "InteractiveTB", None))
        if stored is not None:
            namespaces[id(stored)] = lambda key: LAST_ERROR
        for name, module in list(getattr(shell, "_main_mod_cache", {}).items()):
            namespaces[id(module_dict(module))] = functools.partial(_of_run, name)
        kept_in = Registries.read(namespace)
        namespaces.update(kept_in.namespaces)
        namespaces.update(_of_shell(shell))
        objects = {
            id(shell): Root("IPython's shell", OF_IPYTHON, "%gpumem free"),
            id(self._ours): Root("ipygpumem itself", 4, "please report this bug in ipygpumem"),
        }
        return Roots(
            namespaces,
            objects,
            kept_in.kept,
            frozenset(kept_in.hidden),
            cell_of=lambda filename: cell_of_file(shell, filename),
            names=namespace,
            cuts=self.cuts,
        )


def _holder_of(
    row: Remaining, holders: Mapping[StorageKey, ReferencePath], roots: Roots
) -> ReferencePath:
    """Return the holder of a row, by its path from a name, unless several places
    hold its object.
    """
    searched = holders.get(("object", id(row.items[0])))
    if not row.chain and searched is not None:
        if len(row.items) == 1:
            return searched
        keys = [("object", id(item)) for item in row.items]
        return row.of_many([holders[key] for key in keys if key in holders], roots)
    from_name = row.holder(roots)
    if searched is not None and searched.path.startswith(f"{from_name.path}, "):
        return searched
    return from_name


def _largest_first(watched: Iterable[WatchedName]) -> list[tuple[WatchedName, list[Array]]]:
    """Return the names with live arrays, and these arrays."""
    both = [(item, item.alive()) for item in watched]
    alive = [(item, arrays) for item, arrays in both if arrays]
    return sorted(alive, key=lambda pair: -size_of(pair[1]))


def _row_of(item: WatchedName, holder: ReferencePath | None) -> RetainedArray | None:
    """Return the row of a name's arrays; None if only a name to keep leads to them."""
    if holder is not None and holder.path.startswith(_KEPT.text):
        return None
    if holder is not None and item.is_old_perhaps:
        holder = _perhaps_old(holder)
    arrays = item.alive()
    return replace(item.held, size_bytes=size_of(arrays), arrays=len(arrays), holder=holder)


def _of_numpy(
    watched: Iterable[WatchedName], heap: Heap | None = None
) -> tuple[list[WatchedArray], Container[tuple[int, int, int]]]:
    """Return NumPy arrays, which user code must not find weakly referenced, and the places of the
    heap's arrays.
    """
    pairs = [pair for item in watched for pair in item.arrays]
    arrays = [is_alive for is_alive, _ in pairs if isinstance(is_alive, WatchedArray)]
    return arrays, heap.places() if arrays and heap is not None else ()


def _without_name(
    heap: Heap, smallest: int, grown_bytes: int, is_known: Callable[[object, Array], bool]
) -> Iterator[WatchedName]:
    """Yield unknown NumPy arrays, largest first, as far as the host's growth ``grown_bytes`` can
    contain them.
    """
    if grown_bytes < MUCH:
        return
    left = grown_bytes * 5 // 4  # the end has freed older memory, too
    found = {array.storage: (item, array) for item, array in described(heap.ndarrays)}
    for item, array in sorted(found.values(), key=lambda pair: -pair[1].size_bytes):
        if (
            smallest <= array.size_bytes <= left
            and array.storage[0] == "numpy"
            and not is_known(item, array)
        ):
            left -= array.size_bytes
            yield WatchedName.of(held_without_name(item), [(item, array)])


def _weakly(value: object) -> Callable[[], object] | None:
    """Return a weak reference; None where there are none, and for NumPy arrays, since user code may
    resize them.
    """
    with contextlib.suppress(TypeError):
        return None if is_array(value) else weakref.ref(value)
    return None


def _perhaps_old(holder: ReferencePath) -> ReferencePath:
    return ReferencePath(f"{holder.path}, possibly allocated before the experiment", "")


def size_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of all ``arrays``."""
    return sum(array.size_bytes for array in arrays)


def held_without_name(item: object) -> RetainedArray:
    """Describe a tensor or array without a name."""
    array = describe(item)
    if array is None:  # it was readable a moment ago
        return RetainedArray("", type_name(item), None, "", "", 0)
    return RetainedArray(
        "", array.type_name, array.shape, array.dtype, array.device, array.size_bytes
    )


_KEPT = Root("a name to keep", 5, "")
"""Root of the names kept on purpose; any other root is shown instead."""


_FREED_OF_SHELL = {
    "displayhook",
    "display_pub",
    "last_execution_result",
    "InteractiveTB",
    "history_manager",
    "_db",
    "db",
}
"""Attributes of IPython's shell whose copies of outputs and errors are freed by ``%gpumem free``.
"""


def _of_shell(shell: Any) -> dict[int, Callable[[object], Root]]:
    """Return the functions that name the attributes of IPython's shell, by the identities of the
    dicts with these.
    """
    attributes = instance_dict(shell) or {}
    spaces = [attributes, attributes.get("_trait_values")]
    return {id(space): _attribute_of_shell for space in spaces if type(space) is dict}


def _attribute_of_shell(key: object) -> Root:
    name = text_of(key)
    if name in _FREED_OF_SHELL or name.startswith("_"):
        return Root(f"IPython's shell, {name}", OF_IPYTHON, "%gpumem free")
    code = f"get_ipython().{name}"
    return Root(code, OF_IPYTHON, "", code)


def _variable(key: object) -> Root:
    name = text_of(key)
    if is_of_ipython(name):
        return Root(f"IPython's output {name}", 2, f"%xdel {name}")
    return Root.of_variable(key)


def _output(key: object) -> Root:
    # ``del`` and ``%reset -f out`` leave copies; %xdel knows where IPython keeps them.
    return Root(f"Out[{key}]", 1, f"%xdel _{key}")


def _of_run(file: str, key: object) -> Root:
    name = text_of(key)
    code = global_of_run(file, name)
    cut = Cut(Kind.ATTRIBUTE, 0, "", code)
    return Root(f"module of %run {Path(file).name}, global {name}", OF_MODULE, "", code, cut=cut)


def _hidden(key: object) -> Root:
    return Root(f"IPython's hidden copy of {text_of(key)}", 3, "%gpumem free")


def _waits_in(experiment: str, key: object) -> Root:
    restores = f"experiment {experiment}, which restores {text_of(key)} at its end"
    return Root(restores, 0, "end it, then delete the name")
