"""Lists all live tensors and arrays by storage, with their descriptions, names and bytes.

Memory that torch's C++ code keeps without a Python object is not seen: activations saved for
backward, and buffers inside operations. The device's reconciliation accounts for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, itemgetter, not_
from types import FrameType, ModuleType
from typing import Any

from ipygpumem.heap.arrays import describe, is_array, library_type, memory_of, place_of
from ipygpumem.heap.bulk import Kinds, Progress, chunks, kinds_of, no_progress, of_types, type_names
from ipygpumem.heap.heap import Heap, HeapObserver, refuse_while_traced, undisturbed
from ipygpumem.heap.holders.frames import peek
from ipygpumem.heap.holders.nodes import has_graph
from ipygpumem.heap.named_arrays import NamedArrays
from ipygpumem.heap.tensors import Memory, Reader, Storages, each
from ipygpumem.introspect import instance_dict, is_instance, loaded, module_dict, type_name
from ipygpumem.inventory.records import Inventory, Role, TensorRecord, first_part
from ipygpumem.probes.accelerators import loaded_torch

CellOf = Callable[[str], "int | None"]


def take(
    roots: Iterable[tuple[str, object]],
    *,
    cell_of: CellOf = lambda root: None,
    file: str | None = None,
    line: int | None = None,
    cell: int | None = None,
    storages: Storages | None = None,
    progress: Progress = no_progress,
) -> Inventory:
    """Return all live tensors and arrays, the largest first.

    Raises:
        GpuMemError: torch traces the calling code.
    """
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey(roots, cell_of, progress)
        try:
            return Inventory(
                tuple(survey.records(storages)), time.time(), file, line, cell, tuple(survey.notes)
            )
        finally:
            survey.drop()


def roles_of_objects(observer: HeapObserver | None = None) -> list[tuple[object, Role]]:
    """Return all live tensors and arrays, including those inside sparse and wrapper tensors, with
    their roles.

    The list keeps them alive: use it, then drop it.

    Args:
        observer: sees all objects during the pass over the heap.
    """
    refuse_while_traced("list tensors")
    with undisturbed():
        survey = _Survey((), lambda root: None, observer=observer)
        try:
            return survey.roles()
        finally:
            survey.drop()


def locals_of(frame: FrameType) -> dict[str, object]:
    """Return a function's local names; none for the top level of a script or cell."""
    return peek(frame) if frame.f_code.co_flags & inspect.CO_OPTIMIZED else {}


def names_in(frame: FrameType) -> Iterator[tuple[str, object]]:
    """Yield the names visible to code at a script's ``frame``, and those of the main program."""
    yield from locals_of(frame).items()
    main = sys.modules.get("__main__")
    for names in (frame.f_globals, module_dict(main) if type(main) is ModuleType else {}):
        yield from [
            (name, value) for name, value in list(names.items()) if not name.startswith("__")
        ]


class _Survey:
    """One inventory in progress; it keeps all objects alive, and is dropped by the call that made
    it.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, object]],
        cell_of: CellOf,
        progress: Progress = no_progress,
        observer: HeapObserver | None = None,
    ) -> None:
        self.notes: list[str] = []
        roots = list(roots)  # before the heap is listed: ``peek`` counts references
        self._heap = Heap(observer)
        progress(0.25)
        names = NamedArrays()
        self._named = names.arrays_behind(roots)
        progress(0.7)
        self._labels = Labels(names.paths, cell_of)
        names.drop()
        if not names.complete:
            self.notes.append(
                "the search for names stopped early: some tensors are shown without their names"
            )

    def drop(self) -> None:
        """Drop everything but names, so that a collection need not examine it."""
        self._heap.drop()
        self._named.clear()

    def _all(self, base: type, on_heap: Sequence[object]) -> list[Any]:
        """Return all instances of a library's class, named ones first; ``on_heap`` are those the
        collector lists.
        """
        kinds = kinds_of(list(Kinds(self._named).examples.values()), base)
        more = compress(on_heap, map(not_, map(self._labels.paths.__contains__, map(id, on_heap))))
        return [*(of_types(kinds, self._named) if kinds else ()), *more]

    def records(self, storages: Storages | None) -> list[TensorRecord]:
        """Return the records of all tensors and arrays, the largest first; add torch's storages to
        ``storages``.
        """
        arrays: list[Any] = []
        array_type = library_type("numpy", "ndarray")
        if array_type is not None:
            arrays = self._all(array_type, self._heap.ndarrays)
        records, shown = self._tensor_records(arrays, storages)
        buffers = _jax_records(self._named, self._labels)
        shown |= _shown_by_jax(arrays, buffers)
        records += buffers.values()
        records += array_records(arrays, self._labels, shown)
        return sorted(records, key=attrgetter("size_bytes"), reverse=True)

    def _tensor_records(
        self, arrays: Sequence[object], storages: Storages | None
    ) -> tuple[list[TensorRecord], set[int]]:
        """Return the records of torch tensors, and the identities of the owners of arrays' memory
        that these records show.
        """
        with torch_reader() as reader:
            if reader is None:
                return [], set()
            tensors = self._all(reader.base, self._heap.tensors)
            gradients = add_gradients(reader, tensors, self._labels)
            if storages is not None:
                storages.add_of(reader, tensors)
            roles = roles_of(reader, self._heap, tensors, gradients)
            listed = TensorList(reader, tensors, self._labels)
            shown = listed.match(arrays)
            if listed.unread:
                reason = listed.unread[0]
                self.notes.append(f"the memory of {len(listed.unread)} tensors {reason}")
            return listed.records(roles), shown

    def roles(self) -> list[tuple[object, Role]]:
        """Return each object with memory, or with parts that have memory, and its role."""
        other: Role = "other"
        roles: list[tuple[object, Role]] = [(array, other) for array in self._heap.ndarrays]
        with torch_reader() as reader:
            if reader is None:
                return roles
            tensors = self._all(reader.base, self._heap.tensors)
            gradients = add_gradients(reader, tensors, self._labels)
            by_key = roles_of(reader, self._heap, tensors, gradients)
            for tensor in tensors:
                keys = (id(tensor), *reader.keys(tensor))
                role = next((by_key[key] for key in keys if key in by_key), other)
                roles += [(item, role) for item in (tensor, *reader.parts(tensor))]
        return roles


@contextlib.contextmanager
def torch_reader() -> Iterator[Reader | None]:
    """Open a block in which tensors are read without user code; None if torch is not loaded."""
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


_MAPPED = "a memory map: bytes of the file, not all of them in RAM"


class Labels:
    """The notebook's names of tensors and arrays, by identity.

    Attributes:
        paths: the name of each.
    """

    def __init__(self, paths: dict[int, str], cell_of: CellOf) -> None:
        self.paths = paths
        self._cell_of = cell_of
        self._cells: dict[str, int | None] = {"": None}
        """The cell that bound the first part of a path, by the path up to its first bracket."""

    def cells(self, paths: Sequence[str | None]) -> list[int | None]:
        """Return for each path the cell that bound its first part; None without a path."""
        texts = [path or "" for path in paths]
        first = texts[0].partition("[")[0] if texts else ""
        if (
            first in self._cells
            and first != "Out"
            and all(map(str.startswith, texts, repeat(f"{first}[")))
        ):
            # such as the items of a list of a million tensors
            return [self._cells[first]] * len(texts)
        heads = list(map(itemgetter(0), map(str.partition, texts, repeat("["))))
        if any(head == "Out" or head.startswith("list(") for head in set(heads)):
            heads = list(map(_head_of, texts))
        for head in set(heads) - self._cells.keys():
            self._cells[head] = self._cell_of(first_part(head.replace("list(", "")).rstrip(")"))
        return list(map(self._cells.__getitem__, heads))

    def cell(self, item: object) -> int | None:
        """Return the cell that bound the first part of an array's name."""
        return self.cells([self.paths.get(id(item))])[0]


def _head_of(path: str) -> str:
    return path if path.startswith(("Out[", "list(")) else path.partition("[")[0]


def add_gradients(reader: Reader, tensors: list[Any], labels: Labels) -> list[Any]:
    """Add the gradients, which may not have had a Python object, named after their tensors; return
    them.
    """
    known = set[int]()
    gradients: list[Any] = []
    for tensor in compress(list(tensors), each(reader.base.requires_grad.__get__, tensors)):
        # A computed tensor has none unless it was told to retain it; reading the attribute would
        # print a warning.
        if not (reader.read("is_leaf", tensor) or reader.read("retains_grad", tensor)):
            continue
        gradient = reader.read("_grad", tensor)
        if gradient is None:
            continue
        gradients.append(gradient)
        known = known or set(map(id, tensors))
        if id(gradient) not in known:
            known.add(id(gradient))
            tensors.append(gradient)
        if id(tensor) in labels.paths and id(gradient) not in labels.paths:
            labels.paths[id(gradient)] = f"{labels.paths[id(tensor)]}.grad"
    return gradients


class TensorList:
    """Torch tensors by their storages."""

    def __init__(self, reader: Reader, tensors: Sequence[Any], labels: Labels) -> None:
        self._reader, self._labels = reader, labels
        plain, rest = reader.plain(tensors)
        wholes = [(tensor, reader.memory(tensor)) for tensor in rest]
        self._wholes: dict[int, list[Memory]] = {}
        """The tensors with this storage as a part: sparse and wrapper tensors."""
        for _, memory in wholes:
            for key in memory.storages:
                self._wholes.setdefault(key, []).append(memory)
        shared = set(self._wholes)
        if len(set(plain.keys)) < len(plain.keys):
            shared.update(key for key, number in Counter(plain.keys).items() if number > 1)
        is_shared = list(map(shared.__contains__, plain.keys)) if shared else []
        self._memories = [
            *wholes,
            *((tensor, reader.memory(tensor)) for tensor in compress(plain.tensors, is_shared)),
        ]
        self._alone = plain.of(map(not_, is_shared)) if shared else plain
        """The tensors that share their storage with no other tensor."""
        self._shown: Counter[int] = Counter()
        """Number of arrays on a storage."""
        self._owners: dict[int, int] = {}
        """Identity of the array that owns a storage's memory."""

    @property
    def unread(self) -> list[str]:
        """Reasons why the memory of tensors could not be read, one per tensor."""
        return [
            memory.note
            for _, memory in self._memories
            if memory.note.startswith("could not be read")
        ]

    def match(self, arrays: Sequence[object]) -> set[int]:
        """Count arrays on tensors' memory, and tensors on arrays' memory; return the identities of
        the owners.
        """
        shown: set[int] = set()
        by_address: dict[int, tuple[int, int]] = {}
        for item in arrays:
            owner = memory_of(item)
            if is_instance(owner, self._reader.base):  # tensor.numpy()
                self._shown.update(self._reader.memory(owner).storages.keys())
                shown.add(id(owner))
            elif is_array(owner):
                _, start, end = place_of(owner)
                by_address[start] = end - start, id(owner)
        addresses = sorted(by_address)
        for key, address in self._addresses() if addresses else ():  # torch.from_numpy(array)
            start = addresses[max(0, bisect_right(addresses, address) - 1)]
            size, owner_id = by_address[start]
            if start <= address < start + size:
                self._shown[key] += 1
                self._owners[key] = owner_id
                shown.add(owner_id)
        return shown

    def _addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the host storages that another library allocated, once each, with
        their addresses.
        """
        found, here = dict[int, int](), self._alone.of(map("cpu".__eq__, self._alone.devices))
        of_others = here.of(map(not_, self._reader.resizable(here.storages)))
        waiting: list[tuple[Any, Iterable[int]]] = list(
            zip(of_others.tensors, zip(of_others.keys), strict=True)
        )
        waiting += [(one, memory.storages) for one, memory in self._memories if memory.is_plain]
        for tensor, keys in waiting:
            address = self._reader.address_of_others(tensor)
            if address is not None:
                found.update(dict.fromkeys(keys, address))
        yield from found.items()

    def records(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return one record per storage or set of storages; ``roles`` maps some storages to
        roles.
        """
        return [*self._records_of_sharers(roles), *self._records_of_plain(roles)]

    def _records_of_sharers(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return the records of tensors that share storages, and of those with several or none."""
        together: dict[tuple[int, ...], list[tuple[Any, Memory]]] = {}
        for tensor, memory in self._memories:
            if not self._is_part(memory):  # otherwise it is listed with the whole
                keys = tuple(memory.storages) or (id(tensor),)
                together.setdefault(keys, []).append((tensor, memory))
        tensors, memories = list[Any](), list[Memory]()
        for same in together.values():
            tensor, memory = min(same, key=self._rank) if len(same) > 1 else same[0]
            tensors.append(tensor)
            memories.append(memory)
        aliases = []
        for keys, same in together.items():
            aliases.append(len(same) - 1 + sum(map(self._shown.__getitem__, keys)))
        devices = []
        for tensor, memory in zip(tensors, memories, strict=True):
            devices.append(memory.device or self._reader.device(tensor))
        return self._records(
            tensors,
            [keys[0] for keys in together],
            devices,
            [sum(memory.storages.values()) for memory in memories],
            _roles(roles, together, map(id, tensors)),
            aliases,
            [memory.shared for memory in memories],
            [memory.note for memory in memories],
        )

    def _records_of_plain(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return the records of tensors that are alone on their storage: there may be a million."""
        records = list[TensorRecord]()
        for part, storages, keys, sizes, devices in zip(*map(chunks, self._alone), strict=True):
            kinds: Iterable[Role] = repeat("other", len(part))
            if roles:
                kinds = _roles(roles, zip(keys), map(id, part))
            aliases: Iterable[int] = repeat(0, len(part))
            if self._shown:
                aliases = map(self._shown.__getitem__, keys)
            shared = self._reader.are_shared(storages, devices)
            notes = repeat("", len(part))
            records += self._records(part, keys, devices, sizes, kinds, aliases, shared, notes)
        return records

    def _records(
        self,
        tensors: Sequence[Any],
        keys: Sequence[int],
        devices: Sequence[str],
        sizes: Sequence[int],
        kinds: Iterable[Role],
        aliases: Iterable[int],
        shared: Sequence[bool],
        notes: Iterable[str],
    ) -> list[TensorRecord]:
        """Return the records of tensors on different storages: read column by column in C; there
        may be a million.
        """
        reader, owners = self._reader, self._owners
        names = list(map(self._labels.paths.get, map(id, tensors)))
        requires: Iterable[bool] = repeat(False, len(tensors))
        in_graph: Iterable[bool] = repeat(False, len(tensors))
        if any(given := each(reader.base.requires_grad.__get__, tensors)):
            requires = list(map(bool, given))
            in_graph = [
                is_so and has_graph(one) for is_so, one in zip(requires, tensors, strict=True)
            ]
        libraries: Iterable[str] = repeat("torch", len(tensors))
        if owners:
            libraries = ["numpy" if key in owners else "torch" for key in keys]
            keys = [owners.get(key, key) for key in keys]
        columns = (
            names,
            type_names(tensors),
            reader.shapes(tensors),
            map(reader.text, each(reader.base.dtype.__get__, tensors)),
            devices,
            sizes,
            kinds,
            requires,
            in_graph,
            self._labels.cells(names),
            aliases,
            shared,
            libraries,
            keys,
            notes,
        )
        return list(map(functools.partial(tuple.__new__, TensorRecord), zip(*columns, strict=True)))

    def _is_part(self, memory: Memory) -> bool:
        wholes = self._wholes and [
            whole for key in memory.storages for whole in self._wholes.get(key, ())
        ]
        if not wholes or memory.is_plain:
            return bool(wholes)
        return any(memory.storages.keys() < whole.storages.keys() for whole in wholes)

    def _rank(self, found: tuple[Any, Memory]) -> tuple[bool, int]:
        """Return the sort key for the tensors of a storage: named ones first, then the largest."""
        tensor, memory = found
        size = self._reader.read("nbytes", tensor) if memory.is_plain else 0
        return id(tensor) not in self._labels.paths, -(size or 0)


def array_records(arrays: Sequence[object], labels: Labels, shown: set[int]) -> list[TensorRecord]:
    """Return one record for the memory of each array, except memory already ``shown`` as a
    tensor's.
    """
    records: dict[int, TensorRecord] = {}
    for item in arrays:
        owner = memory_of(item)
        found, key = describe(item), id(owner)
        if key in shown or found is None:
            continue
        if key in records:
            records[key] = records[key]._replace(aliases=records[key].aliases + 1)
            continue
        records[key] = TensorRecord(
            name=labels.paths.get(id(item)),
            type_name=found.type_name,
            shape=found.shape,
            dtype=found.dtype,
            device="cpu",
            size_bytes=found.size_bytes,
            cell=labels.cell(item),
            library="numpy" if is_array(owner) else "buffer",
            storage=key,
            note=_MAPPED if type_name(owner) == "mmap" else "",
        )
    return list(records.values())


_DEEPEST = 6
_MOST_PER_STATE = 1_000_000


def roles_of(
    reader: Reader, heap: Heap, tensors: Sequence[Any], gradients: Sequence[Any]
) -> dict[int, Role]:
    """Return the roles of storages, by ``Reader.keys``; the missing ones have the role "other"."""
    roles: dict[int, Role] = {}
    groups: tuple[tuple[Role, Iterable[Any]], ...] = (
        ("buffer", _buffers(reader, heap)),
        ("optimizer state", (tensor for _, tensor in optimizer_states(heap, reader.base))),
        ("gradient", gradients),
        ("parameter", _parameters(tensors)),
    )
    for role, tensors_of_role in groups:  # the last role wins
        roles.update(
            (key, role) for tensor in tensors_of_role for key in (id(tensor), *reader.keys(tensor))
        )
    return roles


def _roles(
    roles: Mapping[int, Role], keys: Iterable[tuple[int, ...]], ids: Iterable[int]
) -> list[Role]:
    """Return the role of each tensor, by the identities of its storages and its own."""
    parts = ((*key, one) for key, one in zip(keys, ids, strict=True))
    return [next((roles[part] for part in some if part in roles), "other") for some in parts]


def _parameters(tensors: Sequence[Any]) -> Iterator[Any]:
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    examples = Kinds(tensors).examples
    own = kinds_of(list(examples.values()), base)
    subclasses = examples.keys() - own - {id(base.__base__)}
    if own:
        yield from of_types(own, tensors)
    for tensor in of_types(subclasses, tensors) if subclasses else ():
        if (instance_dict(tensor) or {}).get("_is_param") is True:
            yield tensor  # torch's mark on a subclass's parameters


def _buffers(reader: Reader, heap: Heap) -> Iterator[Any]:
    for module in heap.modules:
        buffers = (instance_dict(module) or {}).get("_buffers")
        if is_instance(buffers, dict):
            values = list(dict.values(buffers))  # type: ignore[arg-type]  # is_instance says so
            yield from (item for item in values if is_instance(item, reader.base))


def optimizer_states(heap: Heap, base: Any) -> Iterator[tuple[object, Any]]:
    """Yield each tensor in a live optimizer's state, with its key in the state, usually a
    parameter.
    """
    for optimizer in heap.optimizers:
        waiting: list[tuple[object, Any, int]] = [
            (None, (instance_dict(optimizer) or {}).get("state"), 0)
        ]
        for _ in range(_MOST_PER_STATE):
            if not waiting:
                break
            owner, item, depth = waiting.pop()  # not always one level deep
            if is_instance(item, base):
                yield owner, item
            elif depth < _DEEPEST and is_instance(item, dict):
                waiting += [
                    (owner if depth else key, value, depth + 1)
                    for key, value in list(dict.items(item))
                ]
            elif depth < _DEEPEST and (type(item) is list or type(item) is tuple):
                waiting += [(owner, value, depth + 1) for value in item]


_JAX = "jax._src.array", "ArrayImpl"
"""The class of arrays that have memory; ``jax.Array`` also covers tracers, which have none."""


def _jax_records(named: Iterable[object], labels: Labels) -> dict[int, TensorRecord]:
    """Return one record per buffer, by its address; by the array's identity if it is on several
    devices.
    """
    kind = library_type(*_JAX)
    own = [] if kind is None else [array for array in named if is_instance(array, kind)]
    records: dict[int, TensorRecord] = {}
    for array in {id(array): array for array in [*own, *_live_of_jax()]}.values():
        found = None
        with contextlib.suppress(
            Exception
        ):  # deleted in the meantime, or its computation has failed
            found = None if array.is_deleted() else _jax_record(array, labels)
        if found is not None and found.storage in records:
            before = records[found.storage]
            records[found.storage] = before._replace(aliases=before.aliases + 1)
        elif found is not None:
            records[found.storage] = found
    return records


def _live_of_jax() -> list[Any]:
    """Return all arrays of JAX's backend, if there is one; asking JAX would create it."""
    jax = loaded("jax")
    has_begun = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    return (
        list(jax.live_arrays()) if jax is not None and has_begun is not None and has_begun() else []
    )


def _jax_record(array: Any, labels: Labels) -> TensorRecord:
    devices = sorted(array.devices(), key=lambda device: int(device.id))
    first, is_spread = devices[0], len(devices) > 1
    number = getattr(first, "local_hardware_id", None)
    return TensorRecord(
        name=labels.paths.get(id(array)),
        type_name=type_name(array),
        shape=tuple(map(int, array.shape)),
        dtype=str(array.dtype),
        device="cpu"
        if first.platform == "cpu"
        else f"jax:{first.id if number is None else number}",
        size_bytes=int(array.on_device_size_in_bytes()),
        cell=labels.cell(array),
        library="jax",
        storage=id(array)
        if is_spread or not array.is_ready()
        else int(array.unsafe_buffer_pointer()),
        note=f"on {len(devices)} devices: the bytes of all" if is_spread else "",
    )


def _shown_by_jax(arrays: Sequence[object], records: dict[int, TensorRecord]) -> set[int]:
    """Count the NumPy arrays on JAX host buffers; return the identities of their owners."""
    starts = sorted(key for key, record in records.items() if record.device == "cpu")
    shown: set[int] = set()
    for owner in map(memory_of, arrays) if starts else ():
        if is_array(owner):
            _, address, _ = place_of(owner)
            start = starts[max(0, bisect_right(starts, address) - 1)]
            if start <= address < start + records[start].size_bytes:
                shown.add(id(owner))
                records[start] = records[start]._replace(aliases=records[start].aliases + 1)
    return shown
