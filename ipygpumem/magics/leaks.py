"""``%gpumem leaks``: lists memory that was not freed, and its holders."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import compress
from types import ModuleType
from typing import Any

from ipygpumem.heap.arrays import StorageKey, holding_objects, library_type, storage_key
from ipygpumem.heap.bulk import Progress, by_identity, of_types, one_of_each
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.graphs import live_tensors, requiring_grad
from ipygpumem.heap.holders.roots import NOTEBOOK
from ipygpumem.heap.libraries import loaded_classes
from ipygpumem.heap.sizes import Sizes, row_of
from ipygpumem.introspect import (
    is_atom,
    is_instance,
    is_users_module,
    module_dict,
    text_of,
    type_name,
)
from ipygpumem.inventory import unreached
from ipygpumem.inventory.merging import merged
from ipygpumem.inventory.retained import Finding, Retained, caches, paths_of
from ipygpumem.inventory.survey import optimizer_states
from ipygpumem.records import ReferencePath, RetainedArray
from ipygpumem.report.content import Kept, leaks_report
from ipygpumem.report.layout import Report
from ipygpumem.scope.scope import ownable
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, byte_size, command, option
from ipygpumem.shell.ipython.caches import in_run_modules, kept_outputs
from ipygpumem.shell.ipython.printed import Printed
from ipygpumem.shell.survivors import (
    MOST_EXPLAINED,
    Questions,
    WatchedName,
    held_without_name,
    size_of,
)

_OF_MODULE = re.compile(r"module ([\w.]+), global [^:]+")
_QUOTED = re.compile(r"""(?<=\[)("[^"]*"|b?'(\\.|[^'\\])*')""")


@command(
    "%gpumem leaks",
    "list memory that was not freed, and what holds it",
    option("--min", "SIZE", "only memory of at least this size", to=byte_size()),
)
def leaks(app: App, options: Options) -> list[Report]:
    """Report memory that survived experiments or that no notebook name reaches, with
    its holders.
    """
    smallest = app.context.config.min_held_bytes if options.min is None else options.min
    app.context.garbage.collect()  # garbage is no leak
    with app.context.display.working("leaks") as progress:
        found, beyond, kept, is_all = _look(app, smallest, progress)
    kept += _sized(caches(), smallest)
    kept += Printed(app.context.shell).leaks(smallest)
    notes = [] if is_all else ["too many autograd graphs to examine: they are not listed"]
    segments = app.context.meter.now().get("shm")
    notes += [f"shared memory: {segments.note}"] if segments is not None and segments.note else []
    return [
        leaks_report(
            sorted(found, key=lambda held: -held.size_bytes), smallest, beyond, kept, notes
        )
    ]


def _look(
    app: App, smallest: int, progress: Progress
) -> tuple[list[RetainedArray], list[RetainedArray], list[Kept], bool]:
    """Return leaks, memory too small to examine, and memory that caches keep; drop freed survivors.

    The last item is False if there are too many autograd graphs to examine.
    """
    app.experiments.survivors.cuts.clear()
    live_tensors(app.context.garbage)  # gives each a Python object
    with undisturbed():
        namespace = dict(app.context.namespace)
        names = {name: namespace[name] for name in ownable(namespace)}
        del namespace  # it would be another holder of the outputs
        kept, keepers = kept_outputs(app.context.shell)
        outputs = {f"Out[{number}]": value for number, value in kept.items() if not is_atom(value)}
        paths, inside = paths_of(names, outputs)
        inside |= keepers | {id(kept), id(outputs)}
        printed = set(map(id, Printed(app.context.shell).own_texts()))
        heap = Heap(
            smallest=smallest,
            of_libraries=loaded_classes(),
            instances_of=unreached.OF_PLACES,
        )
        progress(0.3)
        retained = Retained(heap, paths, outputs, inside)
        progress(0.5)
        app.experiments.survivors.update(heap)
        known = [
            item for item in app.experiments.survivors.known if size_of(item.alive()) >= smallest
        ]
        expected = _of_training(heap, {key for item in known for key in _storages(item)})
        # State that the user's live optimizer needs is no leak.
        known = [
            item for item in known if item.held.name or not expected.issuperset(_storages(item))
        ]
        listed = {key for item in known for key in _storages(item)}
        graphs = [one for one in retained.graphs if sum(one.shares.values()) >= smallest]
        skipped = listed.union(*(one.shares for one in graphs))
        unnamed = {
            key: held_without_name(same[0])
            for key, same in heap.large(smallest).items()
            if key not in skipped
        }
        ordered = sorted(unnamed, key=lambda key: -unnamed[key].size_bytes)
        of_objects = _Objects(app, heap, names, outputs, smallest, listed)
        of_objects.leave_out(printed)
        progress(0.7)
        questions = Questions(ordered[:MOST_EXPLAINED], of_objects.to_explain)
        of_survivors = app.experiments.survivors.explained(known, heap, questions=questions)
        modules = _users_modules(app.context.namespace)
        found = [row for _, row in of_survivors]
        without_name = [
            key for key in questions.storages if not _is_plain(questions.holders[key].path, modules)
        ]
        found += [replace(unnamed[key], holder=questions.holders[key]) for key in without_name]
        beyond = [unnamed[key] for key in ordered[MOST_EXPLAINED:]]
        found += of_objects.leaked(questions.holders, modules)
        found_kept = _sized([*graphs, *retained.outputs(heap.large(smallest))], smallest, listed)
        found_kept += of_objects.of_outputs()
        heap.drop()
    found = merged(found, app.experiments.survivors.cuts)
    return found, beyond, _together(found_kept), retained.complete


class _Objects:
    """Memory of any other kind than arrays: that of survivors, in places that no name leads to, and
    of outputs.

    Args:
        app: the extension.
        heap: the live objects.
        names: the notebook's names and their objects.
        outputs: the outputs that IPython keeps.
        smallest: minimum bytes of each row.
        listed: storages that have rows of their own: each byte is in one row.
    """

    def __init__(
        self,
        app: App,
        heap: Heap,
        names: Mapping[str, object],
        outputs: Mapping[str, object],
        smallest: int,
        listed: Container[StorageKey],
    ) -> None:
        self._app, self._heap, self._names, self._outputs = app, heap, names, outputs
        self._smallest = smallest
        self._places = unreached.Places(heap)
        self._places.contents.update(by_identity(list(in_run_modules(app.context.shell))))
        # Before anything is measured, because each is remembered only if something else refers to
        # it, too.
        self._large = heap.large_objects()
        self._listed = listed
        self._sizes = self._without_arrays()
        self._survivors = app.experiments.survivors.others_alive(heap, self._sizes, smallest)
        alone = self._without_arrays()
        self._candidates = unreached.candidates(
            self._places, self._large, alone, names.values(), smallest, MOST_EXPLAINED
        )
        self._has_names = False
        """True once ``_sizes`` has measured what names lead to."""

    def leave_out(self, identities: Container[int]) -> None:
        """List no row for these objects, which have a row of their own."""
        self._candidates = [item for item in self._candidates if id(item) not in identities]

    @property
    def to_explain(self) -> list[object]:
        """The objects whose holders are searched."""
        return [*(other.item for other in self._survivors if other.is_alone), *self._candidates]

    def leaked(
        self, holders: Mapping[StorageKey, ReferencePath], user_modules: Container[str]
    ) -> list[RetainedArray]:
        """Return the rows of leaks, given the holders of the objects ``to_explain``."""
        rows = [other.with_holder(holders) for other in self._survivors]
        left = list[object]()
        for item in self._candidates:
            path = holders["object", id(item)].path
            is_in_module = _OF_MODULE.fullmatch(_QUOTED.sub("", path)) is not None
            if not is_in_module and not _is_plain(path, user_modules):
                left.append(item)
        if left:
            self._measure_names()
        for item in left:
            if not self._sizes.has_counted(item):
                size = self._sizes.together([item])
                if size >= self._smallest:
                    # Only a large object's parts are worth the time.
                    parts = Sizes().measure(item)._replace(device_bytes={"cpu": size})
                    rows.append(replace(row_of([item], parts), holder=holders["object", id(item)]))
        return rows

    def of_outputs(self) -> list[Kept]:
        """Return the other memory of outputs; call it after ``leaked``."""
        alone = self._without_arrays()
        if alone.together(list(self._outputs.values())) < self._smallest:
            return []  # so it need not be known what names lead to
        self._measure_names()
        # those of outputs are listed by storage, as are large arrays
        self._sizes.together(self._heap.tensors)
        rows = list[Kept]()
        for name, value in self._outputs.items():
            size = self._sizes.together([value])
            if size >= self._smallest:
                what = f"{name}: {type_name(value)} that only IPython holds"
                rows.append((size, "cpu", what, f"to free it: %xdel _{name[4:-1]}", size))
        return rows

    def _without_arrays(self) -> Sizes:
        """Return sizes without the arrays that have rows of their own, and without large ones."""
        sizes = Sizes()
        items = self._heap.large(self._smallest)
        sizes.leave_out(_with_storage(self._heap, self._listed, items.keys()))
        arrays = [
            array for (library, _), same in items.items() if library == "numpy" for array in same
        ]
        of_objects = set(map(id, compress(arrays, holding_objects(arrays))))
        sizes.leave_out(array for array in arrays if id(array) in of_objects)  # not their elements
        sizes.together(
            [item for same in items.values() for item in same if id(item) not in of_objects]
        )
        return sizes

    def _measure_names(self) -> None:
        """Count all that names lead to, which takes long next to many objects."""
        if self._has_names:
            return
        self._has_names = True
        namespace = self._app.context.namespace
        modules = [sys.modules[name] for name in _users_modules(namespace) if name in sys.modules]
        unreached.count_named(self._sizes, self._places, self._names.values(), modules)


def _with_storage(
    heap: Heap, storages: Container[StorageKey], without: Container[StorageKey]
) -> Iterator[object]:
    """Yield the tensors and arrays on some storages, but not ``without`` some."""
    for item in [*heap.tensors, *heap.ndarrays]:
        key = storage_key(item)
        if key is not None and key in storages and key not in without:
            yield item


def _together(rows: Iterable[Kept]) -> list[Kept]:
    """Return the rows, those of one object together."""
    found: dict[tuple[str, str, str], Kept] = {}
    for size, device, what, remedy, own in rows:
        known = found.get((device, what, remedy), (0, device, what, remedy, 0))
        found[device, what, remedy] = (known[0] + size, device, what, remedy, known[4] + own)
    return list(found.values())


def _sized(
    findings: Iterable[Finding], smallest: int, leaked: Container[StorageKey] = ()
) -> list[Kept]:
    sized = [(sum(one.shares.values()), one) for one in findings]
    return [
        (
            size,
            one.device,
            one.what,
            one.remedy,
            sum(n for key, n in one.shares.items() if key not in leaked),
        )
        for size, one in sized
        if size >= smallest
    ]


def _storages(item: WatchedName) -> list[StorageKey]:
    return [array.storage for array in item.alive()]


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
    return {
        storage_key(tensor)
        for owner, tensor in owned
        if tensor is not None and is_instance(owner, base) and storage_key(owner) not in survivors
    }


def _users_modules(namespace: dict[str, Any]) -> set[str]:
    """Return the user's modules reachable by a name in the notebook, such as ``package.module``."""
    waiting, names = [namespace], set[str]()
    while waiting:
        values = list(waiting.pop().values())
        kinds = {kind for kind, one in one_of_each(values).items() if is_instance(one, ModuleType)}
        found = [module_dict(item) for item in of_types(kinds, values) if is_users_module(item)]
        new = {text_of(inside.get("__name__")): inside for inside in found if "__file__" in inside}
        waiting += [inside for name, inside in new.items() if name not in names]
        names |= new.keys()
    return names


def _is_plain(path: str, modules: Container[str]) -> bool:
    """Return True if a path consists of a variable's items and attributes only: such data is kept
    on purpose.

    The variable may be a global of one of the user's ``modules``: ``module.name[index].attribute``.
    """
    path = _QUOTED.sub("", path)  # a key may hold anything
    module = _OF_MODULE.fullmatch(path)
    return (path.startswith(NOTEBOOK) and ": " not in path) or (
        module is not None and module[1] in modules
    )
