"""Records the names and the memory at the start of an experiment, which cannot be its own.

At the end, the baseline tells of each object whether it is older: arrays by their places in memory,
objects that the collector tracks by its generations, and data such as texts by the containers that
had it at the start.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import copy_context
from itertools import chain, compress, filterfalse
from operator import not_
from typing import Any

from ipygpumem.errors import describe_error
from ipygpumem.heap.bulk import by_identity, chunks, instances_among, of_types
from ipygpumem.heap.kinds.arrays import (
    Array,
    ArraySpan,
    StorageKey,
    library_type,
    owner_of,
    span_of,
)
from ipygpumem.heap.knowledge.frames import running_locals
from ipygpumem.heap.live.garbage import GcMark
from ipygpumem.heap.live.heap import Heap, take_out
from ipygpumem.heap.live.objects_since import ObjectsSince
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import module_dict, users_modules
from ipygpumem.inventory.remaining.baseline import BaselineSnapshot
from ipygpumem.inventory.remaining.contents import Contents
from ipygpumem.inventory.remaining.grown_arrays import remarks_on_grown
from ipygpumem.probes.mappings import ReadableAddresses
from ipygpumem.reclaim.name_snapshot import NameSnapshot
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.context import ShellContext


class Baseline:
    """The names, arrays and contents of containers at the start of an experiment.

    *Received* objects are new ones in containers that a name has led to since the start.

    Args:
        context: the shell's.
        remarks: receives a sentence if something could not be recorded.
        known: places in memory of arrays that outlived earlier experiments, and so are older.
        names: the notebook's names.
    """

    def __init__(
        self,
        context: ShellContext,
        remarks: list[str],
        known: Iterable[ArraySpan],
        names: tuple[str, ...],
    ) -> None:
        self._namespace = context.namespace
        self._arrays: BaselineSnapshot | None = None
        """The arrays at the start; None without a library of arrays."""
        self._has_failed = False
        """True if the arrays could not be listed: then each array may be older."""
        if {"torch", "numpy"} & sys.modules.keys():
            self._list_arrays(context, remarks, known)
        self._names = NameSnapshot(context.namespace, names)
        """The objects of the names, by identity."""
        self.contents = Contents(context.namespace, _names_of_users_modules(context.namespace))
        """The contents of the containers to which the names lead."""
        self._objects_since = ObjectsSince()
        """The tracked objects made since the start."""
        self._moment_of_list = 0
        """The moment of the collector at which ``objects_at_end`` was listed."""
        self._garbage = context.garbage
        self._threads_at_start = frozenset(sys._current_frames())
        """The threads that run already."""
        self._number_of_modules = len(sys.modules)
        self._context_values_at_start = frozenset(map(id, copy_context().values()))
        """Identities of the values of context variables."""
        self._addresses: ReadableAddresses | None = None
        """The addresses at the start; None if all arrays are known."""
        if self._arrays is not None and not self._arrays.is_certain:
            self._addresses = ReadableAddresses()
        self._arrays_in_new_containers = set[int]()
        """Identities of the NumPy arrays that only containers made since have, as of the end."""
        self._mark = context.garbage.mark()
        """The start, for the collector."""
        context.garbage.list_from_now(self._objects_since)

    def _list_arrays(
        self, context: ShellContext, remarks: list[str], known: Iterable[ArraySpan]
    ) -> None:
        """List the arrays at the start; a failure becomes a remark. The arguments are those of the
        constructor.
        """
        try:
            self._arrays = BaselineSnapshot(context.namespace, context.garbage, known)
        except Exception as error:  # only needed for the report
            if is_from_signal(error):
                raise
            self._has_failed = True
            why = f"because the baseline at the start failed: {describe_error(error)}"
            remarks.append(f"objects still alive will not be listed, {why}")

    @property
    def is_complete(self) -> bool:
        """True if it has all arrays of the start, so that any other one is new."""
        return self._arrays is None or self._arrays.complete

    def was_there(self, item: object, array: Array) -> bool:
        """Return True if the memory of an array may have been allocated at the start.

        Args:
            item: the array.
            array: its description.
        """
        if self._has_failed:
            return True
        if self._arrays is None or not self._arrays.has(item, array):
            return False
        if self._arrays.may_have_died(item):
            # A new array may have the identity and the place of an older one that has died.
            is_received = id(item) in self._received
            return not is_received and not self.is_surely_new(span_of(owner_of(item)))
        return True

    def remarks_on_grown(
        self, arrays: Mapping[StorageKey, Array], heap: Heap, new_ids: Set[int]
    ) -> dict[StorageKey, str]:
        """Return remarks, by storage, for the lines that free new arrays: if such a line drops a
        tensor or array which is older than its memory, the remark says so. ``older.resize_(10**8)``
        in the experiment makes one.

        Args:
            arrays: the new arrays by storage.
            heap: the live objects.
            new_ids: identities of the tracked objects made since.
        """
        if self._arrays is None:
            return {}
        named = self._names.identities_of_same(self._namespace)
        return remarks_on_grown(arrays, heap, new_ids, self._arrays.had_other_size, named)

    def note_new_containers(self) -> None:
        """Note the NumPy arrays to which only containers made since the start refer.

        Call it before the end makes lists, which would be such containers. If all arrays of the
        start are known, nothing is noted.
        """
        array_type = library_type("numpy", "ndarray")
        if self._addresses is None or array_type is None:
            return
        new_ids = self._made_after(0)
        tracked = gc.get_objects()
        take_out(tracked)
        are_new = list(map(new_ids.__contains__, map(id, tracked)))
        new_objects = list(compress(tracked, are_new))
        arrays = set(map(id, instances_among(gc.get_referents(*new_objects), array_type)))
        if arrays:
            older_objects = list(compress(tracked, map(not_, are_new)))
            arrays -= self._in_older(arrays, older_objects, new_objects, new_ids)
        self._arrays_in_new_containers = arrays

    def _in_older(
        self, arrays: set[int], older: list[Any], new: list[Any], new_ids: Set[int]
    ) -> set[int]:
        """Return the identities of the ``arrays`` to which an object from before the start refers,
        too: such an array may be old, although a new container, such as a tuple, also has it.

        Args:
            arrays: identities of the arrays in new containers.
            older: the tracked objects of the start; the notebook's names do not count.
            new: the tracked objects made since.
            new_ids: the identities of ``new``.
        """
        new_dicts = by_identity(of_types({id(dict)}, new))
        in_older = set[int]()
        dicts_in_older = set[int]()
        for part in chunks(older):
            referrers = [item for item in part if item is not self._namespace]
            referents = set(map(id, gc.get_referents(*referrers)))
            in_older |= arrays & referents
            dicts_in_older |= new_dicts.keys() & referents
        # A dict is tracked once it gets a container, so that an older one may seem new.
        if dicts_in_older:
            for key in dicts_in_older - self.received(new_ids):
                in_older.update(map(id, new_dicts[key].values()))
        return in_older

    def is_surely_new(self, span: ArraySpan) -> bool:
        """Return True if the NumPy array at some addresses was surely made since the start: only
        new containers refer to it, a container of the start has received it, or its memory was not
        mapped at the start.
        """
        identity, start, end = span
        return identity in self._received or self.is_new_memory(start, end)

    def is_new_memory(self, start: int, end: int) -> bool:
        """Return True if the addresses from ``start`` to ``end`` could not be read at the start of
        the experiment; False if that is not known.
        """
        return self._addresses is not None and not self._addresses.may_have_had(start, end)

    def is_in_new_container(self, array: object) -> bool:
        """Return True if only containers made since the start referred to a NumPy array when the
        end began; False if the baseline has all arrays of the start.
        """
        return id(array) in self._arrays_in_new_containers

    @functools.cached_property
    def _received(self) -> set[int]:
        """The identities of the objects that containers of the start have received since, and of
        the arrays that only new containers have, as of the end.
        """
        return self._arrays_in_new_containers | self.received(self._made_after(0))

    def mark_if_nothing_lingers(self) -> GcMark | None:
        """Return the collector's mark of the start, if all garbage must be newer; None if objects
        with a name at the start may have become garbage.
        """
        if self._names.some_may_live_on(self._namespace):
            return None
        return self._mark

    def forget(self) -> None:
        """Drop all lists, and stop listing new objects, because the experiment is over."""
        self._garbage.end_list(self._objects_since)
        self.drop_lists()
        if self._arrays is not None:
            self._arrays.close()

    def drop_lists(self) -> None:
        """Drop the lists of new objects, 60 MiB for a million of them."""
        vars(self).pop("objects_at_end", None)

    def received(
        self, new_ids: Set[int], is_older_array: Callable[[object], bool] | None = None
    ) -> set[int]:
        """Return the identities of received objects.

        Args:
            new_ids: identities of the tracked objects made since.
            is_older_array: returns True for an array that may be older; without it, arrays in the
                items of long containers are left out.
        """
        names = ownable_objects(self._namespace)
        parts = self.contents.received(
            names, new_ids, is_older_array=is_older_array, has_containers=True
        )
        return set(map(id, chain.from_iterable(part.items for part in parts)))

    def knows_new_objects(self) -> bool:
        """Return True if objects made since the start can be told from older ones."""
        return self._objects_since.are_known()

    def objects_since(self) -> set[int]:
        """Return the identities of the tracked objects made since, and maybe of some that have died
        during the search at the end; none if they cannot be told apart.
        """
        at_end = self.objects_at_end
        new_ids = at_end | self._made_after(self._moment_of_list)
        new_ids -= {id(vars(self).get("_received")), id(at_end)}  # ours
        return new_ids

    @functools.cached_property
    def objects_at_end(self) -> set[int]:
        """The ``objects_since`` when they were first asked for: listing a million takes a second.

        Our own work may make the dict of an object's attributes later, which only
        ``objects_since`` contains then.
        """
        self._moment_of_list = self._objects_since.moment()
        return self._made_after(0)

    def _made_after(self, moment: int) -> set[int]:
        """Return the identities of the tracked objects made since the start, without objects that
        the collector already counted as old at ``moment``; none if unknown.
        """
        return self._objects_since.identities(moment) or set()

    def number_of_new_modules(self) -> int:
        """Return the number of modules that were imported since the start."""
        return len(sys.modules) - self._number_of_modules

    def new_objects_elsewhere(self) -> list[object]:
        """Return new objects to which no tracked object refers: text and numbers in local names of
        new threads, and new values of context variables.

        Text in older threads is left out, because its age is unknown.
        """
        values = [
            value
            for value in copy_context().values()
            if id(value) not in self._context_values_at_start
        ]
        return [*filterfalse(gc.is_tracked, running_locals(self._threads_at_start)), *values]


def _names_of_users_modules(namespace: dict[str, Any]) -> list[str]:
    """Return the names of the user's modules, without the one of the notebook itself."""
    return [
        name for name, module in users_modules().items() if module_dict(module) is not namespace
    ]
