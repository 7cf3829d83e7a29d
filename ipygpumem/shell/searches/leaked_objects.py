"""Finds leaks of other kinds than arrays, such as a dict of texts that a closure keeps.

These are objects that outlived experiments (``SurvivingObjects``), that only functions, generators,
errors or libraries keep (``UnreachedObjects``), that registries keep (``rows_of_registries``), and
the outputs (``rows_of_outputs``).

Each byte is in one row, so the order counts: the surviving objects are measured first. ``Unlisted``
then measures the memory that is neither in their rows, nor in arrays, nor behind the user's names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

from ipygpumem.heap.bulk import by_identity, instances_among, types_of
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.holders.registries import Registered, figure_of, kept_by_registries
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.kinds.arrays import StorageKey, described, object_arrays, object_key
from ipygpumem.heap.knowledge.barriers import is_of_this_package
from ipygpumem.heap.knowledge.tasks import is_pending
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import MeasuredSize, Sizes, row_of
from ipygpumem.introspect import NUMBERS, is_users_module, module_dict, text_of
from ipygpumem.inventory.leaks import unreached
from ipygpumem.inventory.leaks.retained import words_on_output
from ipygpumem.inventory.rows.array_holders import MOST_EXPLAINED, HeldArrays
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import holder_of_registered
from ipygpumem.inventory.rows.searched_rows import holder_of_several, is_searched_together
from ipygpumem.report.leaks import ReclaimableItem
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.searches.survivors import ReportedObjects, Survivors

_MOST_LEVELS_OF_RECORD = 3
"""Maximum number of references from an object of this package to a record: one to the dict of its
attributes, one to a list in it, one to an item.
"""
Holders = Mapping[StorageKey, Holder]
"""The holders that a search has found; the key of an object is "object" and its identity."""


class NotebookOnHeap:
    """The live objects and the user's names, which keep many of them on purpose.

    Make it after the heap, else its dict would be a holder of all of the names' objects.

    Args:
        heap: the live objects.
        namespace: the notebook's globals.
        smallest: minimum bytes of each row.

    Attributes:
        names: the user's names and their objects.
        modules: names of the user's modules reachable by a name, such as ``package.module``.
    """

    def __init__(self, heap: Heap, namespace: dict[str, Any], smallest: int) -> None:
        self.heap = heap
        self.smallest = smallest
        self.names = ownable_objects(namespace)
        self.modules = _users_modules(namespace)

    def keeps_on_purpose(self, holder: Holder) -> bool:
        """Return True if the path of a holder consists of a variable's items and attributes only,
        or begins at a name that an experiment has kept on purpose.

        The variable may be a global of one of the user's modules:
        ``module.name[index].attribute``.
        """
        if holder.is_kept:
            return True
        if holder.is_variable and not holder.has_words:
            return True
        return holder.module in self.modules

    def count_names(self, sizes: Sizes, keepers: unreached.CodeKeepers) -> None:
        """Let ``sizes`` count all objects that names lead to, so that it measures none of them
        later. It takes long next to many objects.
        """
        modules = [sys.modules[name] for name in self.modules if name in sys.modules]
        unreached.count_named(sizes, keepers, self.names.values(), modules)


def _users_modules(namespace: dict[str, Any]) -> set[str]:
    """Return the user's modules reachable by a name in the notebook, such as ``package.module``."""
    names = set[str]()
    waiting = [namespace]
    while waiting:
        values = list(waiting.pop().values())
        for module in instances_among(values, ModuleType):
            if not is_users_module(module):
                continue
            attributes = module_dict(module)
            name = text_of(attributes.get("__name__"))
            if "__file__" in attributes and name not in names:
                names.add(name)
                waiting.append(attributes)
    return names


class LeakCandidates:
    """The objects on a heap that may be leaks of other kinds than arrays.

    Make it before anything is measured, because ``Sizes`` remembers an object only if several
    objects refer to it.

    Args:
        heap: the live objects.
        of_scripts: objects of modules that ran as scripts, which no name leads to.

    Attributes:
        keepers: the functions, caches, generators and errors of the user's code.
        items: the objects that are large by themselves.
    """

    def __init__(self, heap: Heap, of_scripts: Sequence[object]) -> None:
        self.keepers = unreached.CodeKeepers(heap)
        self.keepers.contents.update(by_identity(of_scripts))
        self.items = [*heap.large_containers.values(), *heap.large_leaves]

    def largest(self, unlisted: Unlisted) -> list[object]:
        """Return the largest candidates to which no name refers; ``unlisted`` measures them."""
        notebook = unlisted.notebook
        return unreached.possible_leaks(
            self.keepers,
            self.items,
            unlisted.without_arrays(),
            notebook.names.values(),
            notebook.smallest,
            MOST_EXPLAINED,
        )


class SurvivingObjects:
    """The objects that outlived experiments without a name, with the arrays in them.

    Args:
        survivors: all that outlived experiments.
        notebook: the live objects and the user's names.
        keepers: the functions, caches, generators and errors of the user's code.
        listed: storages that have rows of their own: each byte is in one row.

    Attributes:
        sizes: has measured them, so that it counts none of them again.
        storages: the storages of the arrays in them.
        to_explain: the objects whose holders are searched.
        rows_to_explain: the rows of several objects, by the key of the first.
    """

    def __init__(
        self,
        survivors: Survivors,
        notebook: NotebookOnHeap,
        keepers: unreached.CodeKeepers,
        listed: Set[StorageKey],
    ) -> None:
        self._large_survivors = list[tuple[ReportedObjects, MeasuredSize]]()
        self.storages = set[StorageKey]()
        self.to_explain = list[object]()
        self.rows_to_explain: dict[StorageKey, Row] = {}
        self.sizes = _sizes_without_data(notebook.heap, listed)
        alive = survivors.reported_objects_alive(notebook.heap)
        if alive:
            # The survivors are not counted with the names: a new node of a tree may be the child of
            # an older one, which has a name.
            identities = {id(item) for survivor in alive for item in survivor.items}
            with self.sizes.passing_over(identities):
                notebook.count_names(self.sizes, keepers)
        sizes_with_named = _sizes_without_data(notebook.heap, listed)
        for survivor in alive:
            # Objects older than the experiment, to which the survivor leads, stay.
            with self.sizes.passing_over(survivors.older.identities(survivor.items)):
                size = survivor.size_now(self.sizes)
            if size.size_bytes < notebook.smallest:
                # Names lead to most of it by other new objects, too, and these are no reason to
                # leave it out: each call that a mock has recorded has the arguments.
                size = survivor.size_now(sizes_with_named)
            if size.size_bytes >= notebook.smallest:
                self._add(survivor, size)

    def _add(self, survivor: ReportedObjects, size: MeasuredSize) -> None:
        """Add the objects of one row, whose holders ``%gpumem leaks`` must search."""
        items = survivor.items
        self._large_survivors.append((survivor, size))
        # The walk that measures them enters tracebacks and closures, and so does this one.
        region = Region(keeps_arrays=True)
        region.reader.pass_through(items)
        arrays = region.arrays_of(region.objects.keys())
        self.storages.update(array.storage for _, array in described(arrays))
        if is_searched_together(items, len(self.to_explain)):
            self.rows_to_explain[object_key(items[0])] = Row.of_objects(items)
            self.to_explain += items
        else:
            self.to_explain.append(items[0])

    def rows(self, holders: Holders, of_arrays: Sequence[HeldArrays]) -> Iterator[HeldRow]:
        """Yield the rows of the objects that are large.

        Args:
            holders: the holders of the objects ``to_explain``.
            of_arrays: the rows of the survivors' arrays, some of which may be in the objects.
        """
        for survivor, size in self._large_survivors:
            yield survivor.row(size, self._holder_of(survivor, holders), of_arrays)

    def _holder_of(self, survivor: ReportedObjects, holders: Holders) -> Holder:
        """Return the holder of the objects of one row: the reported one, if no search can find it
        again.
        """
        key = object_key(survivor.items[0])
        if len(survivor.items) == 1:
            return holders[key]
        row = self.rows_to_explain.get(key)
        # The event loop keeps tasks, and the search ends there.
        cannot_be_searched = row is None or all(map(is_pending, survivor.items))
        if survivor.reported.holder is not None and cannot_be_searched:
            return survivor.reported.holder
        return holder_of_several(survivor.items, row, holders)


def _sizes_without_data(heap: Heap, storages: Set[StorageKey]) -> Sizes:
    """Return sizes that leave out the data of the arrays on some storages."""
    sizes = Sizes()
    sizes.exclude_data(heap.on_storages(storages))
    return sizes


class Unlisted:
    """Measures the memory that has no row yet. It counts each object once: measured again, the
    object has 0 bytes.

    Args:
        notebook: the live objects and the user's names.
        keepers: the functions, caches, generators and errors of the user's code.
        sizes: has counted the objects that have a row.
        listed: storages that have rows of their own.
    """

    def __init__(
        self,
        notebook: NotebookOnHeap,
        keepers: unreached.CodeKeepers,
        sizes: Sizes,
        listed: Set[StorageKey],
    ) -> None:
        self.notebook = notebook
        self._keepers = keepers
        self._sizes = sizes
        self._listed = listed
        self._has_counted_names = False
        self._pass_over_arrays(sizes)

    def bytes_of(self, objects: Sequence[object]) -> int:
        """Return the bytes of ``objects``, with all they lead to, that are in no row and to which
        no name leads; they count as listed from now on.
        """
        self._count_names()
        return self._sizes.together(objects)

    def leave_out(self, objects: Sequence[object]) -> None:
        """Count ``objects`` and all they lead to as listed, so that no later measurement has
        them.
        """
        self._count_names()
        self._sizes.exclude(objects)

    def has_counted(self, item: object) -> bool:
        """Return True if an object is in a row, or if a name leads to it."""
        self._count_names()
        return self._sizes.has_counted(item)

    def is_large(self, objects: Sequence[object]) -> bool:
        """Return True if objects may be large enough for a row. It is quick, because it counts
        objects to which names lead, too.
        """
        return self.without_arrays().together(objects) >= self.notebook.smallest

    def without_arrays(self) -> Sizes:
        """Return new sizes that leave out large arrays, and arrays that have rows of their own."""
        sizes = Sizes()
        self._pass_over_arrays(sizes)
        return sizes

    def _pass_over_arrays(self, sizes: Sizes) -> None:
        """Let ``sizes`` leave out large arrays, and those that have rows of their own, in all later
        measurements.
        """
        heap = self.notebook.heap
        large = heap.large(self.notebook.smallest)
        sizes.exclude_data(heap.on_storages(self._listed - large.keys()))
        large_arrays = list[Any]()
        numpy_arrays = list[Any]()
        for (library, _), on_storage in large.items():
            large_arrays += on_storage
            if library == "numpy":
                numpy_arrays += on_storage
        # An array of objects is left out without its elements, which may be leaks of their own.
        with_objects = by_identity(object_arrays(numpy_arrays))
        sizes.exclude_data(with_objects.values())
        sizes.exclude([array for array in large_arrays if id(array) not in with_objects])

    def _count_names(self) -> None:
        """Count all objects that names lead to, once: it takes long next to many objects."""
        if self._has_counted_names:
            return
        self._has_counted_names = True
        self.notebook.count_names(self._sizes, self._keepers)


class UnreachedObjects:
    """Large objects that no name leads to by items and attributes.

    Args:
        candidates: the objects that may be leaks.
        unlisted: measures them.
        not_leaked: identities of objects to which names lead, or that have a row of their own.

    Attributes:
        to_explain: the objects whose holders are searched.
    """

    def __init__(
        self, candidates: Iterable[object], unlisted: Unlisted, not_leaked: Container[int]
    ) -> None:
        self._unlisted = unlisted
        self.to_explain = [item for item in candidates if id(item) not in not_leaked]

    def rows(self, holders: Holders) -> Iterator[HeldRow]:
        """Yield the rows of leaks, given the holders of the objects ``to_explain``."""
        for item in self._not_kept_on_purpose(holders):
            if self._unlisted.has_counted(item):
                continue
            size = self._unlisted.bytes_of([item])
            if size >= self._unlisted.notebook.smallest:
                # Only a large object's parts are worth the time.
                measured = Sizes().measure(item)._replace(device_bytes={"cpu": size})
                yield HeldRow(row_of([item], measured), holders[object_key(item)])

    def _not_kept_on_purpose(self, holders: Holders) -> list[object]:
        """Return the objects ``to_explain`` whose holders are neither variables nor modules."""
        notebook = self._unlisted.notebook
        leaked = list[object]()
        for item in self.to_explain:
            is_container = id(item) in notebook.heap.large_containers
            if is_container and not notebook.heap.is_referred(item):
                continue  # one of our own lists
            if _is_our_record(item, notebook.heap):
                continue
            holder = holders[object_key(item)]
            if not holder.module and not notebook.keeps_on_purpose(holder):
                leaked.append(item)
        return leaked


def _is_our_record(item: object, heap: Heap) -> bool:
    """Return True for a container of numbers to which only objects of this package refer, perhaps
    through plain containers, such as the identities that the first look at a growing cell notes.
    """
    if id(type(item)) not in CONTAINER_TYPES or types_of(gc.get_referents(item)) - NUMBERS:
        return False
    level = {id(item): item}
    for _ in range(_MOST_LEVELS_OF_RECORD):
        referrers_by_id = heap.referrers_of(level)
        containers = dict[int, object]()
        for key in level:
            referrers = referrers_by_id[key]
            if not referrers:
                return False
            for referrer in referrers:
                if type(referrer) in (dict, list, tuple):
                    containers[id(referrer)] = referrer
                elif not is_of_this_package(referrer):
                    return False
        if not containers:
            return True
        level = containers
    return False


def rows_of_registries(unlisted: Unlisted) -> list[HeldRow]:
    """Return a row for each registry of a library that keeps much memory without a name, such as
    pyplot's open figures.

    Args:
        unlisted: has measured all other leaks.
    """
    registries = kept_by_registries(unlisted.notebook.names)
    all_registered = list[object]()
    for registry in registries:
        for registered in registry:
            all_registered += registered.objects
    rows = list[HeldRow]()
    if unlisted.is_large(all_registered):
        for registry in registries:
            row = _row_of_registry(registry, unlisted)
            if row is not None:
                rows.append(row)
    return rows


def _row_of_registry(registry: Sequence[Registered], unlisted: Unlisted) -> HeldRow | None:
    """Return the row of a registry; None if nothing in it is large."""
    named = set(map(id, unlisted.notebook.names.values()))
    for value in unlisted.notebook.names.values():
        figure = figure_of(value)  # an axis leads to its figure
        if figure is not None:
            named.add(id(figure))
    unnamed = list[Registered]()
    for registered in registry:
        if named.isdisjoint((*map(id, registered.objects), *registered.also_in_use)):
            unnamed.append(registered)
    objects = list[object]()
    for registered in unnamed:
        objects += registered.objects
    size = unlisted.bytes_of(objects)
    if size < unlisted.notebook.smallest:
        return None
    holder = holder_of_registered([registered.root for registered in unnamed])
    return HeldRow(row_of(objects, MeasuredSize({"cpu": size})), holder)


def rows_of_outputs(unlisted: Unlisted, outputs: Mapping[str, object]) -> list[ReclaimableItem]:
    """Return the rows of outputs, such as ``Out[5]``, that alone keep much memory without arrays.

    Args:
        unlisted: has measured all leaks.
        outputs: the outputs with memory, by the code of each.
    """
    if not outputs or not unlisted.is_large(list(outputs.values())):
        return []
    unlisted.leave_out(unlisted.notebook.heap.tensors)  # they are listed by storage
    rows = list[ReclaimableItem]()
    for name, value in outputs.items():
        size = unlisted.bytes_of([value])
        if size >= unlisted.notebook.smallest:
            what, remedy = words_on_output(name, value)
            is_at_least = Sizes().measure(value).is_at_least
            rows.append(ReclaimableItem(size, "cpu", what, remedy, size, is_at_least))
    return rows
