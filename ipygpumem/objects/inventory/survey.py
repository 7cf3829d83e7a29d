"""All tensors and arrays that are alive, by storage: what they are, which name leads to them, how many bytes they take.

What torch's C++ code keeps without an object in Python is out of sight: activations saved for backward, and buffers
inside its operations. The device's reconciliation accounts for them.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import not_
from types import FrameType, ModuleType
from typing import Any

from ipygpumem.introspect import is_instance, module_dict
from ipygpumem.objects.arrays import describe, is_map, library_type, memory_of, samples
from ipygpumem.objects.columns import Column, Picked, Rows, all_different, at, identities, places_of, type_identities
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.frames import peek, running_locals
from ipygpumem.objects.inventory.labels import NameColumn
from ipygpumem.objects.inventory.memory import Reader
from ipygpumem.objects.inventory.naming import Names
from ipygpumem.objects.inventory.records import Inventory, TensorKind, TensorRecord
from ipygpumem.objects.inventory.rows import Subjects, Table, add_gradients, kinds_of
from ipygpumem.objects.progress import Progress, every, part, parts, unseen
from ipygpumem.probes.accelerators import loaded_torch

CellOf = Callable[[str], "int | None"]
_TELLING = 1000
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
    progress: Progress = unseen,
) -> Inventory:
    """Return all tensors and arrays that are alive now, the largest first.

    Args:
        roots: names and their objects, the most telling first; paths to tensors begin with them.
        cell_of: returns the cell that bound a name.
        file: the script that asks, and
        line: where in it; or
        cell: the notebook's cell that asks.
        progress: told how much of it is done.
    """
    with _collector_paused():
        survey = _Survey(roots, cell_of, progress)
        try:
            columns = survey.columns()
        finally:
            survey.drop()
        sizes = columns[TensorRecord._fields.index("size_bytes")]
        order: Sequence[int] = range(len(sizes))
        if len(sizes.different()) > 1:
            order = array("Q", sorted(order, key=list(sizes).__getitem__, reverse=True))
        return Inventory(Rows(TensorRecord, columns, order), time.time(), file, line, cell, tuple(survey.notes))


def kinds_of_objects() -> list[tuple[object, TensorKind]]:
    """Return all tensors and arrays that are alive, those inside sparse and wrapper tensors too, and their kinds.

    It keeps them alive: use it, then drop it.
    """
    with _collector_paused():
        survey = _Survey((), lambda root: None, unseen)
        try:
            return survey.kinds()
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


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep garbage from being collected meanwhile: an inventory must not change what it lists."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Survey:
    """One look at everything; it keeps all of it alive, and is dropped with the call that made it."""

    def __init__(self, roots: Iterable[tuple[str, object]], cell_of: CellOf, progress: Progress) -> None:
        self.notes: list[str] = []
        self._cell_of = cell_of
        self._cells: dict[str, int | None] = {}
        self._heap = Heap(running_locals(), part(progress, 0.0, _HEAPS_SHARE))
        walk = self._divide(part(progress, _HEAPS_SHARE, 1.0))
        self._names = Names(None if gc.get_freeze_count() else self._heap.leading)  # the heap is without what is frozen
        self._names.walk(roots, self._number, walk)
        self._shown: set[int] = set()
        """Identities of what owns the memory that was listed as a tensor's."""
        if not self._names.complete:
            self.notes.append("the search for names ended early: some tensors that have one are listed without")

    def _divide(self, progress: Progress) -> Progress:
        """Divide what is left to do by how many objects, tensors and arrays there are; return the walk's part."""
        tensors, arrays = len(self._heap.tensors), len(self._heap.ndarrays)
        self._number = self._heap.size + arrays
        counts = {"object": self._number - tensors, "tensor": tensors, "array": arrays}
        weights = [count * _MICROSECONDS[what] for what, count in counts.items()]
        walk, self._of_tensors, self._of_arrays = parts(progress, weights)
        return walk

    def drop(self) -> None:
        """Let go of everything but names, so that a collection that was due needs not look at it."""
        self._heap.drop()
        self._names.drop()

    def _subjects(self, base: type, on_heap: Sequence[object], *, exactly: bool = True) -> Subjects:
        """Return all objects of one library, those with a name first.

        Args:
            base: the library's class.
            on_heap: those that the collector knows.
            exactly: if not, as many with a name as there are on the heap are taken for all. That is wrong if one of
                them has two names, which shows later without a search among a million: its storage comes twice.
        """
        found = self._names
        several = {kind: item for kind, item in found.samples.items() if is_instance(item, base)}
        places = places_of(several.keys(), found.kinds)
        named, rest = at(places, found.arrays), []
        if exactly or len(named) != len(on_heap) or gc.get_freeze_count():
            places = found.once(places)
            named = at(places, found.arrays)
            known = set(identities(named))
            rest = list(compress(on_heap, map(not_, map(known.__contains__, identities(on_heap)))))
        kinds, cells = at(places, found.kinds), at(places, found.roots).map(self._cell)
        other_kinds = type_identities(rest)
        return Subjects(
            named + rest,
            Column.joined(kinds, other_kinds),
            {**several, **samples(other_kinds, rest)},
            NameColumn(Picked(found.names, places), len(rest)),
            Column.joined(cells, Column.same(None, len(rest))),
        )

    def _cell(self, root: str) -> int | None:
        if root not in self._cells:
            self._cells[root] = self._cell_of(root)
        return self._cells[root]

    def columns(self) -> list[Column[Any]]:
        """Return the fields of the records of all tensors and arrays, one after the other."""
        array_type = library_type("numpy", "ndarray")
        arrays = None if array_type is None else self._subjects(array_type, self._heap.ndarrays)
        columns, records = self._tensors([] if arrays is None else arrays.items)
        self._of_tensors(1.0)
        records += [] if arrays is None else self._ndarrays(arrays)
        for column, values in zip(columns, zip(*records, strict=True), strict=True) if records else ():
            column.extend(values)
        return columns

    def _tensors(self, arrays: list[object], *, exactly: bool = False) -> tuple[list[Column[Any]], list[TensorRecord]]:
        """Return torch's plain tensors as columns, and the others; ``arrays`` may show their memory."""
        base, torch = library_type("torch", "Tensor"), loaded_torch()
        if base is None or torch is None or not hasattr(getattr(torch, "_C", None), "DisableTorchFunction"):
            return [Column() for _ in TensorRecord._fields], []  # not imported, or not yet
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # no code of the user's must run
            reader = Reader(torch)
            subjects = self._subjects(base, self._heap.tensors, exactly=exactly)
            gradients = add_gradients(reader, subjects)
            kinds = kinds_of(reader, self._heap, subjects, gradients)
            self._of_tensors(0.2)
            reading = part(self._of_tensors, 0.2, 0.8)
            table = Table(reader, subjects, with_addresses=bool(arrays), progress=reading)
            if not (exactly or table.is_unshared or all_different(map(id, subjects.items))):
                return self._tensors(arrays, exactly=True)
            self._match(arrays, reader, table)
            found = table.plain_columns(kinds), table.odd_rows(kinds)
        if table.unread:
            self.notes.append(f"the memory of {len(table.unread)} tensors {table.unread[0]}")
        return found

    def kinds(self) -> list[tuple[object, TensorKind]]:
        """Return each object that has memory, or parts that do, and what it is for."""
        other: TensorKind = "other"
        found: list[tuple[object, TensorKind]] = [(array, other) for array in self._heap.ndarrays]
        base, torch = library_type("torch", "Tensor"), loaded_torch()
        if base is None or torch is None or not hasattr(getattr(torch, "_C", None), "DisableTorchFunction"):
            return found
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            reader, subjects = Reader(torch), self._subjects(base, self._heap.tensors)
            kinds = kinds_of(reader, self._heap, subjects, add_gradients(reader, subjects))
            for tensor in subjects.items:
                keys = [id(tensor), *reader.memory(tensor).storages]
                kind = next((kinds[key] for key in keys if key in kinds), other)
                found += [(part, kind) for part in (tensor, *reader.inside(tensor))]
        return found

    # -- NumPy ------------------------------------------------------------------------------------------------

    def _match(self, arrays: list[object], reader: Reader, table: Table) -> None:
        """Find the arrays that show a tensor's memory, or a tensor an array's: such memory counts once."""
        array_type: Any = library_type("numpy", "ndarray")
        by_address: dict[int, tuple[int, int]] = {}
        for item in arrays:
            owner = memory_of(array_type, item)
            if is_instance(owner, reader.base):  # tensor.numpy()
                table.aliases.update(reader.memory(owner).storages.keys())
                self._shown.add(id(owner))
            elif is_instance(owner, array_type):
                interface: Any = array_type.__dict__["__array_interface__"].__get__(owner)
                by_address[interface["data"][0]] = (int(array_type.__dict__["nbytes"].__get__(owner)), id(owner))
        addresses = sorted(by_address)
        for key, address in table.addresses.items() if addresses else ():  # torch.from_numpy(array)
            start = addresses[max(0, bisect_right(addresses, address) - 1)]
            size, owner_id = by_address[start]
            if start <= address < start + size:
                table.aliases[key] += 1
                self._shown.add(owner_id)

    def _ndarrays(self, subjects: Subjects) -> list[TensorRecord]:
        """Return NumPy's arrays; those that show a tensor's memory were counted there."""
        array_type: Any = library_type("numpy", "ndarray")
        rows: dict[int, TensorRecord] = {}
        for place, item in enumerate(every(_TELLING, subjects.items, self._of_arrays)):
            owner = memory_of(array_type, item)
            found, key = describe(item), id(owner)
            if key in self._shown or found is None:
                continue
            if key in rows:
                rows[key] = rows[key]._replace(aliases=rows[key].aliases + 1)
                continue
            rows[key] = TensorRecord(
                name=subjects.names[place],
                type_name=found.type_name,
                shape=found.shape,
                dtype=found.dtype,
                device="cpu",
                size_bytes=found.size_bytes,
                cell=subjects.cells[place],
                library="numpy" if is_instance(owner, array_type) else "buffer",
                storage=key,
                note=_MAPPED if is_map(owner) else "",
            )
        return list(rows.values())


_MAPPED = "a memory map: bytes of the file, not all of them in RAM"
