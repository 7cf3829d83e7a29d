"""Compares what is alive at an experiment's start and end, and finds who holds what outlived it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ipygpumem.errors import said
from ipygpumem.freeing.name_snapshot import NameSnapshot
from ipygpumem.freeing.reclaim import trim_host_heap
from ipygpumem.introspect import instance_dict, module_dict, text_of, type_name
from ipygpumem.model import Held, Holder
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.ipython.outputs import cell_of_output, is_of_ipython
from ipygpumem.notebook.ipython.sources import cell_of_file, cell_that_bound, running_cell
from ipygpumem.objects.arrays import Array, WatchedArray, describe, watch
from ipygpumem.objects.garbage import Mark
from ipygpumem.objects.heap import Heap, large_tensors, undisturbed
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.holders.graphs import live_tensors
from ipygpumem.objects.holders.search import LAST_ERROR, OF_MODULE, Place, Roots, explain
from ipygpumem.objects.inventory.before import Before
from ipygpumem.objects.walk import ArraySearch

MOST_EXPLAINED = 2000
"""Maximum number of arrays whose holders are searched at once, largest first."""


@dataclass(frozen=True)
class Watched:
    """What a name held, and for each of its arrays a function that says whether its memory is still alive."""

    held: Held
    arrays: tuple[tuple[Callable[[], bool], Array], ...]
    is_old_perhaps: bool = False
    """Whether its memory may be older than the experiment: the notebook held too much to look through at the start."""

    def alive(self) -> list[Array]:
        """Return the arrays that are still alive, largest first."""
        return sorted((array for is_alive, array in self.arrays if is_alive()), key=lambda array: -array.size_bytes)


class Baseline:
    """Names and arrays at the start of an experiment."""

    def __init__(self, context: Context, remarks: list[str]) -> None:
        self._namespace = context.namespace
        self._before: Before | None = None
        self._failed = False
        if {"torch", "numpy"} & sys.modules.keys():
            try:
                self._before = Before(context.namespace, context.garbage)
            except Exception as error:  # it only serves the report
                self._failed = True
                why = f"since the look at the start failed: {said(error)}"
                remarks.append(f"what is still alive cannot be listed at the end, {why}")
        self._names = NameSnapshot(context.namespace)
        self._mark = context.garbage.mark()

    @property
    def is_complete(self) -> bool:
        """Return True if all arrays were seen."""
        return self._before is None or self._before.complete

    def was_there(self, item: object, array: Array) -> bool:
        """Return True if the memory of a tensor or array, which ``array`` describes, was there, or may have been."""
        return self._failed or (self._before is not None and self._before.has(item, array))

    def mark_if_nothing_lingers(self) -> Mark | None:
        """Return the moment, unless something that had a name then may be garbage by now."""
        return None if self._names.some_may_live_on(self._namespace) else self._mark

    def forget(self) -> None:
        """Drop all that is known."""
        if self._before is not None:
            self._before.close()


class Survivors:
    """What outlived the experiments of one shell; nothing is kept alive by it."""

    def __init__(self, context: Context, waiting: Callable[[], Iterable[tuple[str, object]]], ours: object) -> None:
        self._context = context
        self._waiting = waiting
        self._ours = ours
        self.known: list[Watched] = []

    def baseline(self, remarks: list[str]) -> Baseline:
        """Return a baseline of the present state; a failure is a remark."""
        return Baseline(self._context, remarks)

    @staticmethod
    def watch(named: Iterable[tuple[str, object]], search: ArraySearch) -> list[Watched]:
        """Return the arrays that each name holds and no earlier one does, watched without keeping them alive."""
        entries = [search.held(name, value) for name, value in named]
        found = [entry for entry in entries if entry is not None]
        described = [(held, [(item, describe(item)) for item in items]) for held, items in found]
        return [
            Watched(held, tuple((watch(item), array) for item, array in pairs if array is not None))
            for held, pairs in described
        ]

    def of_experiment(
        self,
        watched: Iterable[Watched],
        known: Callable[[object, Array], bool],
        *,
        certain: bool = True,
        first_cell: int | None = None,
    ) -> tuple[Held, ...]:
        """Return what an experiment leaves behind, largest first, with its holders; remember it for %gpumem leaks.

        Args:
            watched: what the experiment's names held.
            known: says of a tensor whether its memory was there before, or stays on purpose.
            certain: whether all that was there before is known, NumPy's arrays too.
            first_cell: number of the experiment's first cell; the running one unless given.
        """
        context = self._context
        smallest = context.config.min_held_bytes
        first = running_cell(context.shell) if first_cell is None else first_cell
        items = [item for item in watched if size_of(item.alive()) >= smallest]
        alive = [self._with_cell(item, first, certain=certain) for item in items]
        named = {array.storage for item in alive for array in item.alive()}
        for key, tensors in large_tensors(live_tensors(context.garbage), smallest).items():
            tensor = describe(tensors[0]) if key not in named else None
            if tensor is not None and not known(tensors[0], tensor):
                alive.append(Watched(held_without_name(tensors[0]), ((watch(tensors[0]), tensor),)))
        if not alive:
            return ()
        reported = {array.storage for item in self.known for array in item.alive()}  # by an experiment inside this one
        self.known += [item for item in alive if any(array.storage not in reported for array in item.alive())]
        with context.screen.working("who holds what is still alive") as progress, undisturbed():
            heap = Heap(running_locals())
            progress(0.5)
            found = self.explained(alive, heap)
            arrays, places = _of_numpy(alive, heap)
            heap.drop()
        for array in arrays:
            array.let_go(places)
        trim_host_heap()  # what the search took must not be the next experiment's to give back
        return found

    def look(self, heap: Heap) -> None:
        """Forget what is no more, by what there is on the ``heap``."""
        arrays, places = _of_numpy(self.known, heap)
        for array in arrays:
            array.look(places)
        self.known = [item for item in self.known if item.alive()]

    def _with_cell(self, item: Watched, first_cell: int, *, certain: bool) -> Watched:
        """Add the cell that bound the name, before later cells bind it anew."""
        is_old_perhaps = not certain and any(array.storage[0] == "numpy" for array in item.alive())
        name = item.held.name
        cell = cell_of_output(name) or cell_that_bound(self._context.shell, name, range(first_cell))
        return replace(item, held=replace(item.held, cell=cell), is_old_perhaps=is_old_perhaps)

    def explained(self, watched: Sequence[Watched], heap: Heap) -> tuple[Held, ...]:
        """Return what is alive of each, largest first, with who holds its largest array."""
        alive = sorted(((item, item.alive()) for item in watched), key=lambda pair: -size_of(pair[1]))
        alive = [(item, arrays) for item, arrays in alive if arrays]
        holders = explain([arrays[0].storage for _, arrays in alive[:MOST_EXPLAINED]], heap, self.roots())
        found = []
        for item, arrays in alive:
            holder = holders.get(arrays[0].storage)
            if holder is not None and item.is_old_perhaps:
                holder = Holder(f"{holder.path}, perhaps since before the experiment", "")
            found.append(replace(item.held, size_bytes=size_of(arrays), arrays=len(arrays), holder=holder))
        return tuple(found)

    def roots(self) -> Roots:
        """Return what the user of a notebook can name."""
        shell, namespace = self._context.shell, self._context.namespace
        outputs = namespace.get("_oh")
        namespaces: dict[int, Callable[[object], Place]] = {id(namespace): _variable, id(shell.user_ns_hidden): _hidden}
        if type(outputs) is dict:
            namespaces[id(outputs)] = _output
        for name, waiting in self._waiting():
            namespaces[id(waiting)] = functools.partial(_waits_in, name)
        stored = instance_dict(getattr(shell, "InteractiveTB", None))
        if stored is not None:
            namespaces[id(stored)] = lambda key: LAST_ERROR
        for name, module in list(getattr(shell, "_main_mod_cache", {}).items()):
            namespaces[id(module_dict(module))] = functools.partial(_of_run, name)
        figures = getattr(getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None), "figs", None)
        plt = "plt" if namespace.get("plt", 0) is sys.modules.get("matplotlib.pyplot") else ""
        if figures is not None:
            namespaces[id(figures)] = functools.partial(_of_pyplot, plt or "import matplotlib.pyplot as plt; plt")
        objects = {
            id(shell): Place("IPython's shell", 3, "%gpumem free"),
            id(self._ours): Place("ipygpumem itself", 4, "report this: it is a fault of ipygpumem"),
        }
        return Roots(namespaces, objects, cell_of=lambda filename: cell_of_file(shell, filename), names=namespace)


def _of_numpy(watched: Iterable[Watched], heap: Heap) -> tuple[list[WatchedArray], Container[tuple[int, int, int]]]:
    """Return NumPy's arrays, which cannot be watched while the user's code runs, and where arrays are now."""
    pairs = [pair for item in watched for pair in item.arrays]
    arrays = [is_alive for is_alive, _ in pairs if isinstance(is_alive, WatchedArray)]
    return arrays, heap.places() if arrays else ()


def size_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of all ``arrays``."""
    return sum(array.size_bytes for array in arrays)


def held_without_name(item: object) -> Held:
    """Return what a tensor or array without a name is."""
    array = describe(item)
    if array is None:  # it was readable a moment ago
        return Held("", type_name(item), None, "", "", 0)
    return Held("", array.type_name, array.shape, array.dtype, array.device, array.size_bytes)


def _variable(key: object) -> Place:
    name = text_of(key)
    if is_of_ipython(name):
        return Place(f"IPython's output {name}", 2, f"%xdel {name}")
    return Place.of_variable(key)


def _output(key: object) -> Place:
    # ``del`` and ``%reset -f out`` leave copies; %xdel knows where IPython keeps them.
    return Place(f"Out[{key}]", 1, f"%xdel _{key}")


def _of_pyplot(plt: str, number: object) -> Place:
    return Place(f"matplotlib figure {number}", OF_MODULE, f"{plt}.close({number})", is_all=True)


def _of_run(file: str, key: object) -> Place:
    code = f"get_ipython()._main_mod_cache[{file!r}].{text_of(key)}"
    return Place(f"module of %run {Path(file).name}, global {text_of(key)}", OF_MODULE, "", code=code)


def _hidden(key: object) -> Place:
    return Place(f"IPython's hidden copy of {text_of(key)}", 3, "%gpumem free")


def _waits_in(experiment: str, key: object) -> Place:
    restores = f"experiment {experiment}, which restores {text_of(key)} at its end"
    return Place(restores, 0, "end it, then delete the name")
