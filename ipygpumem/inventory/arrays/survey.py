"""Lists all live tensors and arrays by storage, with their descriptions, names and bytes.

Memory that torch's C++ code keeps without a Python object is not seen: activations saved for
backward, and buffers inside operations. The device's reconciliation accounts for them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter, not_
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Kinds, Progress, no_progress
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.kinds.tensors import Storages
from ipygpumem.heap.knowledge.frames import peek
from ipygpumem.heap.live.heap import (
    Heap,
    HeapObserver,
    TrackedInstances,
    refuse_while_traced,
    undisturbed,
)
from ipygpumem.heap.walks.named_arrays import NamedArrays
from ipygpumem.introspect import module_dict
from ipygpumem.inventory.arrays.jax_records import jax_records, shown_by_jax
from ipygpumem.inventory.arrays.labels import CellOf, Labels
from ipygpumem.inventory.arrays.records import Inventory, Role, TensorRecord
from ipygpumem.inventory.arrays.roles import roles_of, roles_of_each
from ipygpumem.inventory.arrays.tensor_records import (
    TensorList,
    add_gradients,
    array_records,
    torch_reader,
)
from ipygpumem.reclaim.frames import is_function


def take_inventory(
    roots: Iterable[tuple[str, object]],
    outputs: Iterable[tuple[str, object]] = (),
    *,
    cell_of: CellOf = lambda root: None,
    file: str | None = None,
    line: int | None = None,
    cell: int | None = None,
    storages: Storages | None = None,
    progress: Progress = no_progress,
    has_arrays: bool = True,
    has_unnamed: bool = True,
) -> Inventory:
    """Return all live tensors and arrays, the largest first.

    Args:
        roots: names and their values.
        outputs: outputs and their values; an output names only arrays to which no root leads.
        cell_of: returns the cell that bound a name.
        file: the calling script.
        line: its running line.
        cell: the running cell.
        storages: gets torch's storages.
        progress: is called with the part that is done.
        has_arrays: False if only tensors of torch are asked for, which needs no pass over the heap.
        has_unnamed: False if only tensors with names are asked for, and not their roles, such as
            that of a buffer; that needs no pass over the collector's objects either.

    Raises:
        GpuMemError: torch traces the calling code.
    """
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey(
            roots,
            cell_of,
            progress,
            outputs=outputs,
            has_arrays=has_arrays,
            has_unnamed=has_unnamed,
        )
        try:
            records = tuple(survey.records(storages))
        finally:
            survey.drop()
        return Inventory(records, time.time(), file, line, cell, tuple(survey.notes))


def roles_of_objects(observer: HeapObserver | None = None) -> list[tuple[object, Role]]:
    """Return all live tensors and arrays with their roles. A sparse or wrapper tensor is followed
    by the tensors inside it.

    The list keeps them alive: use it, then drop it.

    Args:
        observer: sees all objects during the pass over the heap.
    """
    return _roles(observer, has_arrays=True)


def roles_of_tensors() -> list[tuple[object, Role]]:
    """Return all live tensors of torch with their roles, as ``roles_of_objects`` does, without a
    pass over the heap.
    """
    return _roles(has_arrays=False)


def _roles(observer: HeapObserver | None = None, *, has_arrays: bool) -> list[tuple[object, Role]]:
    """Return all live tensors with their roles, and arrays if ``has_arrays``."""
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey((), lambda root: None, observer=observer, has_arrays=has_arrays)
        try:
            return survey.roles()
        finally:
            survey.drop()


def function_locals(frame: FrameType) -> dict[str, object]:
    """Return the local variables of a frame if it is a function's; nothing for the top level of a
    script or cell, whose names are global.
    """
    return peek(frame) if is_function(frame) else {}


def visible_names(frame: FrameType) -> Iterator[tuple[str, object]]:
    """Yield the names visible to code at a script's ``frame``: the function's local ones, the
    globals of its module, and those of the main program.
    """
    yield from function_locals(frame).items()
    namespaces = [frame.f_globals]
    main = sys.modules.get("__main__")
    if type(main) is ModuleType:
        namespaces.append(module_dict(main))
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if not name.startswith("__"):
                yield name, value


class _TensorRecords(NamedTuple):
    """The records of torch tensors, and the arrays that are in them."""

    records: list[TensorRecord]
    owners_shown: set[int]
    """The identities of the owners of arrays' memory that need no record of their own: a tensor's
    record has the memory already.
    """


class _Survey:
    """One inventory in progress; it keeps all objects alive, and is dropped by the call that made
    it.

    Args:
        roots: as for ``take_inventory``, and so are the further arguments.
        observer: sees all objects during the pass over the heap.

    Attributes:
        notes: messages for the user about tensors that could not be read.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, object]],
        cell_of: CellOf,
        progress: Progress = no_progress,
        observer: HeapObserver | None = None,
        *,
        outputs: Iterable[tuple[str, object]] = (),
        has_arrays: bool = True,
        has_unnamed: bool = True,
    ) -> None:
        self.notes: list[str] = []
        roots = list(roots)  # before the heap is listed: ``peek`` counts references
        outputs = list(outputs)
        self._heap: Heap | TrackedInstances
        if has_arrays:
            self._heap = Heap(observer)
        else:
            self._heap = TrackedInstances(has_pass=has_unnamed)
        progress(0.25)
        names = NamedArrays()
        self._named = names.arrays_behind(roots)
        if outputs:
            self._named += names.arrays_behind(outputs)
        progress(0.7)
        self._labels = Labels(names.paths, cell_of)
        names.drop()
        if not names.complete:
            self.notes.append(
                "the search for names stopped early: some tensors are shown without their names"
            )

    def drop(self) -> None:
        """Drop everything but names: a garbage collection would have to examine it."""
        self._heap.drop()
        self._named.clear()

    def _instances(self, base: type, on_heap: Sequence[object]) -> list[Any]:
        """Return all instances of a library's class. The named ones come first, so that they stand
        for a storage that several objects share.

        Args:
            base: the class.
            on_heap: its instances that the collector lists.
        """
        instances = Kinds(self._named).instances(base)
        are_named = map(self._labels.paths.__contains__, map(id, on_heap))
        instances += compress(on_heap, map(not_, are_named))
        return instances

    def records(self, storages: Storages | None) -> list[TensorRecord]:
        """Return the records of all tensors and arrays, the largest first.

        Args:
            storages: gets torch's storages.
        """
        arrays: list[Any] = []
        array_type = library_type("numpy", "ndarray")
        if array_type is not None:
            arrays = self._instances(array_type, self._heap.ndarrays)
        records, owners_shown = self._tensor_records(arrays, storages)
        buffers = jax_records(self._named, self._labels)
        owners_shown |= shown_by_jax(arrays, buffers)
        records += buffers.values()
        records += array_records(arrays, self._labels, owners_shown)
        return sorted(records, key=attrgetter("size_bytes"), reverse=True)

    def _tensor_records(
        self, arrays: Sequence[object], storages: Storages | None
    ) -> _TensorRecords:
        """Return the records of torch tensors. If the memory of some could not be read, ``notes``
        gets a line about them.

        Args:
            arrays: all NumPy arrays.
            storages: gets torch's storages.
        """
        with torch_reader() as reader:
            if reader is None:
                return _TensorRecords([], set())
            tensors = self._instances(reader.base, self._heap.tensors)
            gradients = add_gradients(reader, tensors, self._labels)
            if storages is not None:
                storages.add_of(reader, tensors)
            roles = roles_of(reader, self._heap, tensors, gradients)
            tensor_list = TensorList(reader, tensors, self._labels)
            owners_shown = tensor_list.match_arrays(arrays)
            if tensor_list.unread:
                reason = tensor_list.unread[0]
                self.notes.append(f"the memory of {len(tensor_list.unread)} tensors {reason}")
            return _TensorRecords(tensor_list.records(roles), owners_shown)

    def roles(self) -> list[tuple[object, Role]]:
        """Return each tensor and array with its role. A tensor without memory of its own, such as a
        sparse one, is followed by its parts.
        """
        roles: list[tuple[object, Role]] = [(array, "other") for array in self._heap.ndarrays]
        with torch_reader() as reader:
            if reader is None:
                return roles
            tensors = self._instances(reader.base, self._heap.tensors)
            gradients = add_gradients(reader, tensors, self._labels)
            by_key = roles_of(reader, self._heap, tensors, gradients)
            keys = [(id(tensor), *reader.keys(tensor)) for tensor in tensors]
            roles_of_tensors = roles_of_each(by_key, keys, map(id, tensors))
            for tensor, role in zip(tensors, roles_of_tensors, strict=True):
                roles.append((tensor, role))
                roles += [(part, role) for part in reader.parts(tensor)]
        return roles
