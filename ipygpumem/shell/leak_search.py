"""Searches for leaks: memory that survived experiments, or that no name of the notebook reaches."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import compress
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.array_search import ArraySearch
from ipygpumem.heap.arrays import StorageKey, holding_objects, library_type, storage_key
from ipygpumem.heap.bulk import Progress, by_identity, instances_among
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.cuts import Cut
from ipygpumem.heap.holders.frames import in_traceback
from ipygpumem.heap.holders.graphs import live_tensors, requiring_grad
from ipygpumem.heap.holders.references_of import items_of
from ipygpumem.heap.holders.registries import Registered, kept_by_registries
from ipygpumem.heap.holders.roots import NOTEBOOK
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.tasks import is_pending
from ipygpumem.heap.libraries import loaded_classes
from ipygpumem.heap.sizes import Size, Sizes, row_of
from ipygpumem.introspect import (
    is_atom,
    is_instance,
    is_users_module,
    module_dict,
    text_of,
    type_name,
)
from ipygpumem.inventory import unreached
from ipygpumem.inventory.merging import holder_of_registered, merged
from ipygpumem.inventory.remaining import (
    holder_of_several,
    is_searched_together,
    objects_to_search,
)
from ipygpumem.inventory.retained import Finding, Retained, caches, paths_of
from ipygpumem.inventory.roles import added_to_optimizers, optimizer_states
from ipygpumem.records import ReferencePath, RetainedArray
from ipygpumem.report.content import Kept
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.array_holders import MOST_EXPLAINED, Explained, Questions
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import in_run_modules, kept_outputs
from ipygpumem.shell.ipython.printed import Printed
from ipygpumem.shell.shared_memory import rows_of
from ipygpumem.shell.survivors import OtherAlive, Survivors
from ipygpumem.shell.watched_names import WatchedName, record_without_name, storages_of

_OF_MODULE = re.compile(r"module ([\w.]+), global [^:]+")
_QUOTED = re.compile(r"""(?<=\[)("[^"]*"|b?'(\\.|[^'\\])*')""")


class Leaks(NamedTuple):
    """The memory that a search has found."""

    leaks: list[RetainedArray]
    """The largest first."""
    beyond: list[RetainedArray]
    """Arrays that were too many to examine."""
    kept: list[Kept]
    """Memory that outputs, autograd graphs, caches and printed text keep."""
    has_all_graphs: bool
    """False if there were too many autograd graphs to examine."""


class LeakSearch:
    """Searches for leaks and for other memory that is kept by mistake.

    Args:
        context: the shell's.
        survivors: the objects that outlived experiments; those that were freed are forgotten.
        smallest: minimum bytes of each row.
    """

    def __init__(self, context: ShellContext, survivors: Survivors, smallest: int) -> None:
        self._context = context
        self._survivors = survivors
        self._smallest = smallest
        self._printed = Printed(context.shell)
        self._printed_texts: set[int] = set()
        """Identities of the texts that only IPython's record of the output keeps."""

    def find(self, progress: Progress) -> Leaks:
        """Return the leaks, after garbage was collected."""
        self._survivors.cuts.clear()
        live_tensors(self._context.garbage)  # gives each a Python object
        with undisturbed():
            # Before the heap refers to them, too.
            self._printed_texts = set(map(id, self._printed.own_texts()))
            outputs = _Outputs(self._context, ownable_objects(self._context.namespace))
            heap = Heap(
                smallest=self._smallest,
                of_libraries=loaded_classes(),
                instances_of=unreached.OF_PLACES,
            )
            progress(0.3)
            retained = outputs.retained(heap)
            progress(0.5)
            leaks = self._leaks_on(heap, retained, outputs, progress)
            heap.drop()
        kept = [*leaks.kept, *_sized(caches(), self._smallest)]
        kept += [Kept(*row) for row in self._printed.leaks(self._smallest)]
        return leaks._replace(kept=kept)

    def _leaks_on(
        self, heap: Heap, retained: Retained, outputs: _Outputs, progress: Progress
    ) -> Leaks:
        """Return the leaks on a heap; one search finds the holders of all of them."""
        smallest = self._smallest
        survivors = self._leaked_names(heap)
        listed = storages_of(survivors)
        graphs = [graph for graph in retained.graphs if graph.size_bytes >= smallest]
        # Before anything is measured, because ``Sizes`` remembers an object only if several objects
        # refer to it.
        large = _LargeObjects(self._context, heap)
        nameless = _OtherSurvivors(self._survivors, heap, smallest, listed)
        in_rows = listed.union(nameless.storages, *(graph.shares for graph in graphs))
        # Made after the heap: it would be a holder of all of them.
        namespace = self._context.namespace
        names = ownable_objects(namespace)
        user_modules = _users_modules(namespace)
        arrays = _UnnamedArrays(heap, names, smallest, in_rows)
        objects = _Objects(
            large, nameless, heap, names, user_modules, outputs.values, smallest, listed
        )
        # From 30,000 names on, the namespace is a large dict itself.
        objects.leave_out(self._printed_texts | {id(namespace)})
        progress(0.7)
        questions = Questions(arrays.to_explain, objects.to_explain, objects.rows_to_explain)
        of_survivors = self._survivors.explained(survivors, heap, questions)
        rows = rows_of(of_survivors, heap, self._survivors.cuts)
        rows += arrays.leaked(questions.holders, user_modules)
        rows += objects.leaked(questions.holders, of_survivors)
        rows += objects.of_registries(self._survivors.cuts)
        findings = [*graphs, *retained.outputs(heap.large(smallest))]
        kept = [*_sized(findings, smallest, listed), *objects.of_outputs()]
        return Leaks(
            merged(rows, self._survivors.cuts), arrays.beyond, _together(kept), retained.complete
        )

    def _leaked_names(self, heap: Heap) -> list[WatchedName]:
        """Return the large survivors, without state of training: what the user's live optimizer
        needs is no leak.
        """
        self._survivors.update(heap)
        large = [item for item in self._survivors.known if item.size_bytes >= self._smallest]
        of_training = _of_training(heap, storages_of(large))
        leaked = list[WatchedName]()
        for item in large:
            if item.record.name or not of_training.issuperset(item.live_storages()):
                leaked.append(item)
        return leaked


class _Outputs:
    """The outputs that IPython keeps. Make it before the heap, and drop the names.

    Args:
        context: the shell's.
        names: the user's names and their objects.

    Attributes:
        values: the outputs with memory, by the code of each.
    """

    def __init__(self, context: ShellContext, names: Mapping[str, object]) -> None:
        kept, keepers = kept_outputs(context.shell)
        self.values: dict[str, object] = {}
        for number, value in kept.items():
            if not is_atom(value):
                self.values[f"Out[{number}]"] = value
        self._paths, self._inside = paths_of(names, self.values)
        self._inside |= keepers | {id(kept), id(self.values)}

    def retained(self, heap: Heap) -> Retained:
        """Return the memory that names and outputs keep alive."""
        return Retained(heap, self._paths, self.values, self._inside)


class _UnnamedArrays:
    """Tensors and arrays without a row yet, of which those that a variable leads to are no leaks.

    Args:
        heap: the live objects.
        names: the notebook's names and their objects.
        smallest: minimum bytes of each.
        listed: storages that have rows of their own.

    Attributes:
        to_explain: the storages whose holders are searched, the largest first.
        beyond: the rows of further ones.
    """

    def __init__(
        self,
        heap: Heap,
        names: Mapping[str, object],
        smallest: int,
        listed: Set[StorageKey],
    ) -> None:
        self._rows: dict[StorageKey, RetainedArray] = {}
        large = {key: same for key, same in heap.large(smallest).items() if key not in listed}
        wanted = set[int]()
        for same in large.values():
            wanted.update(map(id, same))
        named = set(map(id, names.values()))
        named |= unreached.led_to_by_names(names.values(), wanted)
        for key, same in large.items():
            if named.isdisjoint(map(id, same)):
                self._rows[key] = record_without_name(same[0])
        ordered = sorted(self._rows, key=lambda key: -self._rows[key].size_bytes)
        self.to_explain = ordered[:MOST_EXPLAINED]
        self.beyond = [self._rows[key] for key in ordered[MOST_EXPLAINED:]]

    def leaked(
        self, holders: Mapping[StorageKey, ReferencePath], user_modules: Container[str]
    ) -> Iterator[RetainedArray]:
        """Yield the rows of leaks, given the holders of the storages ``to_explain``."""
        for key in self.to_explain:
            if not _is_plain(holders[key].path, user_modules):
                yield replace(self._rows[key], holder=holders[key])


class _LargeObjects:
    """The objects on a heap that may be leaks of other kinds than arrays.

    Attributes:
        places: places outside the names in which the user's code keeps objects.
        items: the objects that are large by themselves.
    """

    def __init__(self, context: ShellContext, heap: Heap) -> None:
        self.places = unreached.Places(heap)
        self.places.contents.update(by_identity(list(in_run_modules(context.shell))))
        self.items = [*heap.large_containers.values(), *heap.large_leaves]


class _OtherSurvivors:
    """The objects that outlived experiments without a name, with the arrays in them.

    Args:
        survivors: the objects that outlived experiments.
        heap: the live objects.
        smallest: minimum bytes of each row.
        listed: storages that have rows of their own: each byte is in one row.

    Attributes:
        sizes: has measured them.
        alive: those that are large.
        cuts: the references that a line removes, by the line.
        storages: the storages of the arrays in them.
    """

    def __init__(
        self, survivors: Survivors, heap: Heap, smallest: int, listed: Set[StorageKey]
    ) -> None:
        self.sizes = Sizes()
        self.sizes.leave_out(heap.on_storages(listed))
        self.alive = survivors.others_alive(heap, self.sizes, smallest)
        self.cuts = survivors.cuts
        self.storages = set[StorageKey]()
        search = ArraySearch()
        for other in self.alive:
            for item in other.items:
                whole = [item, *_locals_of_errors(item)]
                self.storages.update(array.storage for _, array in search.find(whole))


def _locals_of_errors(item: object) -> list[object]:
    """Return the objects of local names in the tracebacks of an exception, or of those in a
    container: an array search does not enter them, but they count as its memory.
    """
    values = list[object]()
    errors = by_identity([item, *items_of(item)])
    waiting: list[Any] = [error for error in errors.values() if is_instance(error, BaseException)]
    for error in waiting:  # the list grows by causes and contexts
        values += [value for _, value in in_traceback(error)]
        for other in gc.get_referents(error):
            if is_instance(other, BaseException) and id(other) not in errors:
                errors[id(other)] = other
                waiting.append(other)
    return values


class _Objects:
    """Memory of any other kind than arrays: that of survivors, in places that no name leads to, and
    of outputs.

    Args:
        large: objects that may be leaks.
        nameless: survivors without a name.
        heap: the live objects.
        names: the notebook's names and their objects.
        user_modules: names of the user's modules.
        outputs: the outputs that IPython keeps.
        smallest: minimum bytes of each row.
        listed: storages that have rows of their own: each byte is in one row.

    Attributes:
        rows_to_explain: the rows of several survivors, by the key of the first.
    """

    def __init__(
        self,
        large: _LargeObjects,
        nameless: _OtherSurvivors,
        heap: Heap,
        names: Mapping[str, object],
        user_modules: Collection[str],
        outputs: Mapping[str, object],
        smallest: int,
        listed: Set[StorageKey],
    ) -> None:
        self._heap = heap
        self._names = names
        self._user_modules = user_modules
        self._outputs = outputs
        self._smallest = smallest
        self._large = large
        self._listed = listed
        self._survivors = nameless.alive
        self._cuts = nameless.cuts
        self.rows_to_explain: dict[StorageKey, Row] = {}
        for other in self._survivors:
            if is_searched_together(other.items):
                self.rows_to_explain["object", id(other.items[0])] = Row.of_objects(other.items)
        self._sizes = nameless.sizes
        self._pass_over_arrays(self._sizes)
        alone = self._without_arrays()
        self._candidates = unreached.candidates(
            large.places, large.items, alone, names.values(), smallest, MOST_EXPLAINED
        )
        wanted = set(map(id, self._candidates))
        named = unreached.led_to_by_names(names.values(), wanted)
        self._candidates = [item for item in self._candidates if id(item) not in named]
        self._has_names = False
        """True once ``_sizes`` has measured what names lead to."""

    def leave_out(self, identities: Container[int]) -> None:
        """List no row for these objects, which have a row of their own."""
        self._candidates = [item for item in self._candidates if id(item) not in identities]

    @property
    def to_explain(self) -> list[object]:
        """The objects whose holders are searched."""
        objects = list[object]()
        for other in self._survivors:
            objects += objects_to_search(other.items)
        return objects + self._candidates

    def _holder_of_survivor(
        self, other: OtherAlive, holders: Mapping[StorageKey, ReferencePath]
    ) -> ReferencePath:
        """Return the holder of the objects of a survivor's row."""
        key = ("object", id(other.items[0]))
        if len(other.items) == 1:
            return holders[key]
        row = self.rows_to_explain.get(key)
        # The event loop keeps tasks, and the search ends there.
        is_fixed = row is None or all(map(is_pending, other.items))
        if other.reported.holder is not None and is_fixed:
            return other.reported.holder
        return holder_of_several(other.items, row, holders, self._cuts)

    def leaked(
        self,
        holders: Mapping[StorageKey, ReferencePath],
        of_survivors: Sequence[Explained],
    ) -> list[RetainedArray]:
        """Return the rows of leaks, given the holders of the objects ``to_explain``, and the rows
        of the survivors' arrays.
        """
        rows = list[RetainedArray]()
        for other in self._survivors:
            holder = self._holder_of_survivor(other, holders)
            rows.append(other.with_holder(holder, of_survivors))
        candidates = list[object]()
        for item in self._candidates:
            if id(item) in self._heap.large_containers and not self._heap.is_referred(item):
                continue  # one of our own lists
            path = holders["object", id(item)].path
            is_in_module = _OF_MODULE.fullmatch(_QUOTED.sub("", path)) is not None
            if not is_in_module and not _is_plain(path, self._user_modules):
                candidates.append(item)
        if candidates:
            self._measure_names()
        for item in candidates:
            if self._sizes.has_counted(item):
                continue
            size = self._sizes.together([item])
            if size >= self._smallest:
                # Only a large object's parts are worth the time.
                measured = Sizes().measure(item)._replace(device_bytes={"cpu": size})
                holder = holders["object", id(item)]
                rows.append(replace(row_of([item], measured), holder=holder))
        return rows

    def of_registries(self, cuts: dict[str, list[Cut]]) -> list[RetainedArray]:
        """Return the other memory that registries keep alive without a name: each has one row.

        Call it after ``leaked``.

        Args:
            cuts: receives the references that the row's line removes, by the line.
        """
        registries = kept_by_registries(self._names)
        everything = list[object]()
        for registry in registries:
            for kept in registry:
                everything += kept.objects
        if self._without_arrays().together(everything) < self._smallest:
            return []  # so it need not be known what names lead to
        self._measure_names()
        rows = list[RetainedArray]()
        for registry in registries:
            row = self._of_registry(registry, cuts)
            if row is not None:
                rows.append(row)
        return rows

    def _of_registry(
        self, registry: Sequence[Registered], cuts: dict[str, list[Cut]]
    ) -> RetainedArray | None:
        """Return the row of a registry; None if nothing in it is large."""
        named = set(map(id, self._names.values()))
        unnamed = [kept for kept in registry if named.isdisjoint(map(id, kept.objects))]
        objects = list[object]()
        for kept in unnamed:
            objects += kept.objects
        size = self._sizes.together(objects)
        if size < self._smallest:
            return None
        holder = holder_of_registered([kept.root for kept in unnamed], cuts)
        return replace(row_of(objects, Size({"cpu": size})), holder=holder)

    def of_outputs(self) -> list[Kept]:
        """Return the other memory of outputs; call it after ``leaked``."""
        if not self._outputs:
            return []
        alone = self._without_arrays()
        if alone.together(list(self._outputs.values())) < self._smallest:
            return []  # so it need not be known what names lead to
        self._measure_names()
        # Tensors in outputs are listed by storage, as are large arrays.
        self._sizes.together(self._heap.tensors)
        rows = list[Kept]()
        for name, value in self._outputs.items():
            size = self._sizes.together([value])
            if size >= self._smallest:
                what = f"{name}: {type_name(value)} that only IPython holds"
                remedy = f"to free it: %xdel _{name[4:-1]}"
                is_at_least = Sizes().measure(value).is_at_least
                rows.append(Kept(size, "cpu", what, remedy, size, is_at_least))
        return rows

    def _without_arrays(self) -> Sizes:
        """Return sizes without the arrays that have rows of their own, and without large ones."""
        sizes = Sizes()
        self._pass_over_arrays(sizes)
        return sizes

    def _pass_over_arrays(self, sizes: Sizes) -> None:
        """Count the arrays that have rows of their own, and large ones, so that no later
        measurement does.
        """
        large = self._heap.large(self._smallest)
        sizes.leave_out(self._heap.on_storages(self._listed - large.keys()))
        items = list[Any]()
        arrays = list[Any]()
        for (library, _), same in large.items():
            items += same
            if library == "numpy":
                arrays += same
        of_objects = by_identity(list(compress(arrays, holding_objects(arrays))))
        sizes.leave_out(of_objects.values())  # not their elements
        sizes.together([item for item in items if id(item) not in of_objects])

    def _measure_names(self) -> None:
        """Count all that names lead to, which takes long next to many objects."""
        if self._has_names:
            return
        self._has_names = True
        modules = [sys.modules[name] for name in self._user_modules if name in sys.modules]
        unreached.count_named(self._sizes, self._large.places, self._names.values(), modules)


def _together(rows: Iterable[Kept]) -> list[Kept]:
    """Return the rows, those of one object together."""
    together: dict[tuple[str, str, str], Kept] = {}
    for row in rows:
        place = row.device, row.what, row.remedy
        before = together.get(place)
        if before is None:
            together[place] = row
        else:
            together[place] = row._replace(
                size_bytes=before.size_bytes + row.size_bytes,
                new_bytes=before.new_bytes + row.new_bytes,
                is_at_least=before.is_at_least or row.is_at_least,
            )
    return list(together.values())


def _sized(
    findings: Iterable[Finding], smallest: int, leaked: Container[StorageKey] = ()
) -> list[Kept]:
    """Return the rows of findings; the bytes of ``leaked`` storages are in rows of leaks."""
    rows = []
    for finding in findings:
        size = finding.size_bytes
        if size >= smallest:
            new = sum(share for key, share in finding.shares.items() if key not in leaked)
            rows.append(Kept(size, finding.device, finding.what, finding.remedy, new))
    return rows


def _of_training(heap: Heap, survivors: set[StorageKey]) -> set[StorageKey | None]:
    """Return the storages of gradients and optimizer state of tensors not among the
    ``survivors``.
    """
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return set()
    owned = list(optimizer_states(heap, base))
    with sys.modules["torch"]._C.DisableTorchFunction():
        for tensor in requiring_grad(heap.tensors):
            with contextlib.suppress(RuntimeError):  # raised for some views changed in place
                if base.is_leaf.__get__(tensor):  # torch warns for non-leaves
                    owned.append((tensor, base.grad.__get__(tensor)))
    storages = set[StorageKey | None]()
    for owner, tensor in owned:
        if tensor is None or not is_instance(owner, base):
            continue
        if storage_key(owner) not in survivors:
            storages.add(storage_key(tensor))
    return storages - set(map(storage_key, added_to_optimizers(heap, base)))


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


def _is_plain(path: str, modules: Container[str]) -> bool:
    """Return True if a path consists of a variable's items and attributes only: such data is kept
    on purpose.

    The variable may be a global of one of the user's ``modules``: ``module.name[index].attribute``.
    """
    path = _QUOTED.sub("", path)  # a key may hold anything
    if path.startswith(NOTEBOOK) and ": " not in path:
        return True
    module = _OF_MODULE.fullmatch(path)
    return module is not None and module[1] in modules
