"""Lists all tensors and arrays that are alive, by storage: what they are, their names and their bytes.

What torch's C++ code keeps without an object in Python is out of sight: activations saved for backward, and buffers
inside its operations. The device's reconciliation accounts for them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any

from ipygpumem.introspect import is_instance, module_dict
from ipygpumem.objects.arrays import library_type
from ipygpumem.objects.heap import Heap, undisturbed
from ipygpumem.objects.holders.frames import peek, running_locals
from ipygpumem.objects.inventory import jax_arrays
from ipygpumem.objects.inventory.listing import Labels, TensorList, add_gradients, array_records
from ipygpumem.objects.inventory.memory import Reader
from ipygpumem.objects.inventory.records import Inventory, Role, TensorRecord
from ipygpumem.objects.inventory.roles import roles_of
from ipygpumem.objects.inventory.selection import first_part
from ipygpumem.objects.inventory.storages import Storages
from ipygpumem.objects.progress import Progress, part, parts, unseen
from ipygpumem.objects.traced import refuse_while_traced
from ipygpumem.objects.walk import Names
from ipygpumem.probes.accelerators import loaded_torch

CellOf = Callable[[str], "int | None"]
_HEAPS_SHARE = 0.25
_MICROSECONDS = {"object": 5.0, "tensor": 3.0, "array": 40.0}
"""About so long it takes to walk over one of the objects, or to describe a tensor or array: only a bar's pace."""


def take(
    roots: Iterable[tuple[str, object]],
    *,
    cell_of: CellOf = lambda root: None,
    file: str | None = None,
    line: int | None = None,
    cell: int | None = None,
    storages: Storages | None = None,
    progress: Progress = unseen,
) -> Inventory:
    """Return all tensors and arrays that are alive now, the largest first.

    Args:
        roots: names and their objects, the most telling first; paths to tensors begin with them.
        cell_of: returns the cell that bound a name.
        file: the script that asks, and
        line: where in it; or
        cell: the notebook's cell that asks.
        storages: gets the storages of torch: none that comes later is taken for one of them while they are kept.
        progress: gets how much of it is done.

    Raises:
        GpuMemError: torch is tracing the code that asks.
    """
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey(roots, cell_of, progress)
        try:
            return Inventory(tuple(survey.records(storages)), time.time(), file, line, cell, tuple(survey.notes))
        finally:
            survey.drop()


def roles_of_objects() -> list[tuple[object, Role]]:
    """Return all live tensors and arrays, also those inside sparse and wrapper tensors, with their roles.

    It keeps them alive: use it, then drop it.
    """
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey((), lambda root: None, unseen)
        try:
            return survey.roles()
        finally:
            survey.drop()


def locals_of(frame: FrameType) -> dict[str, object]:
    """Return a function's local names; none for the top level of a script or cell."""
    return peek(frame) if frame.f_code.co_flags & inspect.CO_OPTIMIZED else {}


def names_in(frame: FrameType) -> Iterator[tuple[str, object]]:
    """Yield the names that code at a script's ``frame`` sees, and those of the main program."""
    yield from locals_of(frame).items()
    main = sys.modules.get("__main__")
    for names in (frame.f_globals, module_dict(main) if type(main) is ModuleType else {}):
        yield from [(name, value) for name, value in list(names.items()) if not name.startswith("__")]


class _Survey:
    """One look at everything; it keeps all of it alive, and is dropped with the call that made it."""

    def __init__(self, roots: Iterable[tuple[str, object]], cell_of: CellOf, progress: Progress) -> None:
        self.notes: list[str] = []
        roots = list(roots)  # before the heap is listed: ``peek`` counts references
        self._heap = Heap(running_locals(), part(progress, 0.0, _HEAPS_SHARE))
        tensors, arrays = len(self._heap.tensors), len(self._heap.ndarrays)
        number = self._heap.size + arrays
        counts = {"object": number - tensors, "tensor": tensors, "array": arrays}
        weights = [count * _MICROSECONDS[what] for what, count in counts.items()]
        walk, self._of_tensors, self._of_arrays = parts(part(progress, _HEAPS_SHARE, 1.0), weights)
        names = Names(number, walk)
        self._named = names.named(roots)
        parts_of_paths = {key: first_part(path.replace("list(", "")).rstrip(")") for key, path in names.paths.items()}
        cells = {root: cell_of(root) for root in dict.fromkeys(parts_of_paths.values())}
        self._labels = Labels(names.paths, {key: cells[root] for key, root in parts_of_paths.items()})
        names.drop()
        if not names.complete:
            self.notes.append("the search for names stopped early: some tensors are shown without their names")

    def drop(self) -> None:
        """Let go of everything but names: a collection that is due need not look at it."""
        self._heap.drop()
        self._named.clear()

    def _all(self, base: type, on_heap: Iterable[object]) -> list[Any]:
        """Return all objects of a library's class, those with a name first; ``on_heap`` the collector knows."""
        named = (item for item in self._named.values() if is_instance(item, base))
        return list({id(item): item for item in chain(named, on_heap)}.values())

    def records(self, storages: Storages | None) -> list[TensorRecord]:
        """Return the records of all tensors and arrays, the largest first; add torch's storages to ``storages``."""
        array_type = library_type("numpy", "ndarray")
        arrays = [] if array_type is None else self._all(array_type, self._heap.ndarrays)
        shown: set[int] = set()
        records: list[TensorRecord] = []
        with torch_reader() as reader:
            if reader is not None:
                tensors = self._all(reader.base, self._heap.tensors)
                gradients = add_gradients(reader, tensors, self._labels)
                if storages is not None:
                    storages.add_of(reader, tensors)
                roles = roles_of(reader, self._heap, tensors, gradients)
                self._of_tensors(0.2)
                listed = TensorList(reader, tensors, self._labels, part(self._of_tensors, 0.2, 0.6))
                shown = listed.match(array_type, arrays)
                records += listed.records(roles)
                if listed.unread:
                    self.notes.append(f"the memory of {len(listed.unread)} tensors {listed.unread[0]}")
        self._of_tensors(1.0)
        buffers = jax_arrays.records_of(self._named.values(), self._labels)
        shown |= jax_arrays.shown_by(array_type, arrays, buffers)
        records += buffers.values()
        records += array_records(array_type, arrays, self._labels, shown, self._of_arrays)
        return sorted(records, key=attrgetter("size_bytes"), reverse=True)

    def roles(self) -> list[tuple[object, Role]]:
        """Return each object that has memory, or parts that do, and what it is for."""
        other: Role = "other"
        found: list[tuple[object, Role]] = [(array, other) for array in self._heap.ndarrays]
        with torch_reader() as reader:
            if reader is not None:
                tensors = self._all(reader.base, self._heap.tensors)
                roles = roles_of(reader, self._heap, tensors, add_gradients(reader, tensors, self._labels))
                for tensor in tensors:
                    keys = (id(tensor), *reader.keys(tensor))
                    role = next((roles[key] for key in keys if key in roles), other)
                    found += [(item, role) for item in (tensor, *reader.parts(tensor))]
        return found


@contextlib.contextmanager
def torch_reader() -> Iterator[Reader | None]:
    """Open a block in which tensors are read without the user's code; None if torch is not loaded."""
    torch = loaded_torch()
    if (
        torch is None
        or library_type("torch", "Tensor") is None
        or not hasattr(getattr(torch, "_C", None), "DisableTorchFunction")
    ):
        yield None
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield Reader(torch)
