"""Lists the tensors of torch, one record for each storage, and the arrays of NumPy and buffers, one
for the memory of each.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import not_
from typing import Any

from ipygpumem.heap.bulk import by_identity, chunks, type_names
from ipygpumem.heap.kinds.arrays import describe, is_array, library_type, memory_of, span_of
from ipygpumem.heap.kinds.tensors import Reader, TensorMemory, each
from ipygpumem.heap.knowledge.graphs import with_graph_or_gradient
from ipygpumem.heap.knowledge.nodes import has_graph
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.inventory.arrays.labels import Labels
from ipygpumem.inventory.arrays.records import Role, TensorRecord
from ipygpumem.inventory.arrays.roles import roles_of_each
from ipygpumem.probes.accelerators import loaded_torch

_MAPPED = "a memory map: bytes of the file, not all of them in RAM"


@contextlib.contextmanager
def torch_reader() -> Iterator[Reader | None]:
    """Open a block in which tensors can be read without running user code. It is given the reader,
    or None if torch is not loaded.
    """
    torch = loaded_torch()
    if torch is None or not _is_readable(torch):
        yield None
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield Reader(torch)


def _is_readable(torch: Any) -> bool:
    """Return True if torch is loaded completely, and has the switch by which subclasses of tensors
    run no code.
    """
    if library_type("torch", "Tensor") is None:
        return False
    return hasattr(getattr(torch, "_C", None), "DisableTorchFunction")


def add_gradients(reader: Reader, tensors: list[Any], labels: Labels) -> list[Any]:
    """Add the gradients of tensors to the list, and name them after their tensors: ``weight.grad``.
    Return the gradients. Reading a gradient may create its Python object, so it may not have been
    in the list.

    Args:
        reader: reads tensors without user code.
        tensors: the tensors, to which the gradients are added.
        labels: gets the names of the gradients.
    """
    gradients: list[Any] = []
    for tensor in with_graph_or_gradient(tensors):
        # A computed tensor has none unless it was told to retain it; reading the attribute would
        # print a warning.
        if not (reader.read("is_leaf", tensor) or reader.read("retains_grad", tensor)):
            continue
        gradient = reader.read("_grad", tensor)
        if gradient is None:
            continue
        gradients.append(gradient)
        path = labels.paths.get(id(tensor))
        if path is not None:
            labels.paths.setdefault(id(gradient), f"{path}.grad")
    if gradients:
        gradients_by_id = by_identity(gradients)
        unlisted = gradients_by_id.keys() - set(map(id, tensors))
        tensors += [gradient for key, gradient in gradients_by_id.items() if key in unlisted]
    return gradients


class TensorList:
    """The live tensors of torch, by their storages.

    Most tensors are *alone*: no other tensor is on their storage. A million of these are read
    column by column. Tensors that share a storage, or have several or none, are measured one by
    one. A sparse or wrapper tensor is a *whole*, and the tensors inside it are its parts.

    Args:
        reader: reads tensors without user code.
        tensors: the tensors.
        labels: the names of tensors.
    """

    def __init__(self, reader: Reader, tensors: Sequence[Any], labels: Labels) -> None:
        self._reader = reader
        self._labels = labels
        plain, complex_tensors = reader.plain(tensors)
        self._memories: list[tuple[Any, TensorMemory]] = []
        """The tensors that may share a storage, or have several or none."""
        self._wholes: dict[int, list[TensorMemory]] = {}
        """The sparse and wrapper tensors with a storage as a part, by the storage."""
        for tensor in complex_tensors:
            memory = reader.memory(tensor)
            self._memories.append((tensor, memory))
            for key in memory.storages:
                self._wholes.setdefault(key, []).append(memory)
        self._alone = plain
        """The tensors that share their storage with no other tensor."""
        # Plain tensors share a storage with a whole, or with each other: a view with its base.
        shared = self._wholes.keys() | _keys_that_repeat(plain.keys)
        if shared:
            is_shared = list(map(shared.__contains__, plain.keys))
            self._alone = plain.of(map(not_, is_shared))
            for tensor in compress(plain.tensors, is_shared):
                self._memories.append((tensor, reader.memory(tensor)))
        self._shown: Counter[int] = Counter()
        """Number of arrays that show a storage, by its key."""
        self._owners: dict[int, int] = {}
        """Identity of the array that owns a storage's memory, by the storage's key."""

    @property
    def unread(self) -> list[str]:
        """Reasons why the memory of tensors could not be read, one per tensor."""
        notes = [memory.note for _, memory in self._memories]
        return [note for note in notes if note.startswith("could not be read")]

    def match_arrays(self, arrays: Sequence[object]) -> set[int]:
        """Find the arrays that show a tensor's memory (``tensor.numpy()``), and the tensors that
        show an array's memory (``torch.from_numpy(array)``). Both are listed once: the array is
        counted in the tensor's record.

        Returns:
            The identities of the tensors and arrays that own this memory.
        """
        shown: set[int] = set()
        by_address: dict[int, tuple[int, int]] = {}
        for item in arrays:
            owner = memory_of(item)
            if is_instance(owner, self._reader.base):  # tensor.numpy()
                self._shown.update(self._reader.memory(owner).storages.keys())
                shown.add(id(owner))
            elif is_array(owner):
                _, start, end = span_of(owner)
                by_address[start] = end - start, id(owner)
        if by_address:
            shown |= self._match_storages(by_address)
        return shown

    def _match_storages(self, by_address: Mapping[int, tuple[int, int]]) -> set[int]:
        """Find the storages on the memory of arrays, and note the owner of each.

        Args:
            by_address: the bytes and the identity of each array that owns its memory, by address.

        Returns:
            The identities of the arrays.
        """
        shown: set[int] = set()
        addresses = sorted(by_address)
        for key, address in self._addresses().items():
            place = bisect_right(addresses, address) - 1
            start = addresses[max(0, place)]
            size, owner_id = by_address[start]
            if start <= address < start + size:
                self._shown[key] += 1
                self._owners[key] = owner_id
                shown.add(owner_id)
        return shown

    def _addresses(self) -> dict[int, int]:
        """Return the address of each storage on the host that another library has allocated, such
        as NumPy, by the storage's key.
        """
        reader = self._reader
        on_host = self._alone.of(map("cpu".__eq__, self._alone.devices))
        of_libraries = on_host.of(map(not_, reader.resizable(on_host.storages)))
        addresses = dict[int, int]()
        for key, tensor in zip(of_libraries.keys, of_libraries.tensors, strict=True):
            address = reader.address_of_others(tensor)
            if address is not None:
                addresses[key] = address
        for tensor, memory in self._memories:
            if not memory.is_plain:
                continue
            address = reader.address_of_others(tensor)
            if address is not None:
                addresses.update(dict.fromkeys(memory.storages, address))
        return addresses

    def records(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return one record for each storage, or for each set of storages that a tensor has.

        Args:
            roles: the roles of storages; the missing ones have the role "other".
        """
        return self._records_of_sharers(roles) + self._records_of_plain(roles)

    def _records_of_sharers(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return the records of the tensors that were measured one by one. Of several on the same
        storages, one stands for all.
        """
        sharers_by_storages = self._by_storages()
        tensors = list[Any]()
        memories = list[TensorMemory]()
        devices = list[str]()
        sizes = list[int]()
        aliases = list[int]()
        for keys, sharers in sharers_by_storages.items():
            tensor, memory = sharers[0]
            if len(sharers) > 1:
                tensor, memory = min(sharers, key=self._rank)
            tensors.append(tensor)
            memories.append(memory)
            devices.append(memory.device or self._reader.device(tensor))
            sizes.append(sum(memory.storages.values()))
            arrays = sum(map(self._shown.__getitem__, keys))
            aliases.append(len(sharers) - 1 + arrays)
        return self._records(
            tensors,
            [keys[0] for keys in sharers_by_storages],
            devices,
            sizes,
            roles_of_each(roles, sharers_by_storages, map(id, tensors)),
            aliases,
            [memory.shared for memory in memories],
            [memory.note for memory in memories],
        )

    def _by_storages(self) -> dict[tuple[int, ...], list[tuple[Any, TensorMemory]]]:
        """Return the tensors that were measured one by one, by their storages. The parts of sparse
        and wrapper tensors are left out.
        """
        sharers: dict[tuple[int, ...], list[tuple[Any, TensorMemory]]] = {}
        for tensor, memory in self._memories:
            if not self._is_part(memory):  # otherwise it is listed with the whole
                keys = tuple(memory.storages) or (id(tensor),)
                sharers.setdefault(keys, []).append((tensor, memory))
        return sharers

    def _records_of_plain(self, roles: Mapping[int, Role]) -> list[TensorRecord]:
        """Return the records of tensors that are alone on their storage. There may be a million, so
        they are read in parts, column by column.
        """
        records = list[TensorRecord]()
        for part, storages, keys, sizes, devices in zip(*map(chunks, self._alone), strict=True):
            kinds: Iterable[Role] = repeat("other", len(part))
            if roles:
                kinds = roles_of_each(roles, zip(keys), map(id, part))
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
        """Return the records of tensors on different storages. They are made in C from columns,
        because there may be a million.

        Args:
            tensors: the tensors.
            keys: of each tensor, the key of its storage; and so on for the further columns.
            devices: its device.
            sizes: bytes of its storages.
            kinds: its role.
            aliases: number of other tensors or arrays on its storage.
            shared: True if other processes may share its storage.
            notes: the reason why its size is missing.
        """
        reader = self._reader
        names = list(map(self._labels.paths.get, map(id, tensors)))
        dtypes = each(reader.base.dtype.__get__, tensors)
        requires, in_graph = self._gradient_columns(tensors)
        libraries, storages = self._owner_columns(keys)
        # In the order of the fields of ``TensorRecord``.
        columns = (
            names,
            type_names(tensors),
            reader.shapes(tensors),
            map(reader.text, dtypes),
            devices,
            sizes,
            kinds,
            requires,
            in_graph,
            self._labels.cells(names),
            aliases,
            shared,
            libraries,
            storages,
            notes,
        )
        # Calling ``TensorRecord`` would run its ``__new__`` in Python for each record.
        record_of = functools.partial(tuple.__new__, TensorRecord)
        return list(map(record_of, zip(*columns, strict=True)))

    def _gradient_columns(self, tensors: Sequence[Any]) -> tuple[Iterable[bool], Iterable[bool]]:
        """Return two columns of the records: for each tensor, True if it requires a gradient, and
        True if it has a graph.
        """
        number = len(tensors)
        requires_or_none = each(self._reader.base.requires_grad.__get__, tensors)
        if not any(requires_or_none):
            return repeat(False, number), repeat(False, number)
        requires = list(map(bool, requires_or_none))
        in_graph = [False] * number
        for place in compress(range(number), requires):
            in_graph[place] = has_graph(tensors[place])
        return requires, in_graph

    def _owner_columns(self, keys: Sequence[int]) -> tuple[Iterable[str], Sequence[int]]:
        """Return two columns of the records: for each storage, the library that owns its memory,
        and the key of the memory in that library.
        """
        if not self._owners:
            return repeat("torch", len(keys)), keys
        libraries = list[str]()
        storages = list[int]()
        for key in keys:
            owner_id = self._owners.get(key)
            if owner_id is None:
                libraries.append("torch")
                storages.append(key)
            else:
                libraries.append("numpy")
                storages.append(owner_id)
        return libraries, storages

    def _is_part(self, memory: TensorMemory) -> bool:
        """Return True if a tensor is inside a sparse or wrapper tensor, so that its memory is in
        that one's record.
        """
        if not self._wholes:
            return False
        wholes = list[TensorMemory]()
        for key in memory.storages:
            wholes += self._wholes.get(key, ())
        if memory.is_plain:
            return bool(wholes)
        return any(memory.storages.keys() < whole.storages.keys() for whole in wholes)

    def _rank(self, sharer: tuple[Any, TensorMemory]) -> tuple[bool, int]:
        """Return the sort key by which the tensor that stands for a storage comes first: a named
        one, then the largest.
        """
        tensor, memory = sharer
        has_no_name = id(tensor) not in self._labels.paths
        size = self._reader.read("nbytes", tensor) if memory.is_plain else 0
        return has_no_name, -(size or 0)


def _keys_that_repeat(keys: Sequence[int]) -> set[int]:
    """Return the keys that occur more than once."""
    if len(set(keys)) == len(keys):
        return set()
    return {key for key, number in Counter(keys).items() if number > 1}


def array_records(arrays: Sequence[object], labels: Labels, shown: set[int]) -> list[TensorRecord]:
    """Return one record for the memory of each NumPy array. Views of one array have one record.

    Args:
        arrays: the arrays.
        labels: the names of arrays.
        shown: identities of the owners of memory that records of tensors or of JAX have.
    """
    records: dict[int, TensorRecord] = {}
    for item in arrays:
        owner = memory_of(item)
        array = describe(item)
        key = id(owner)
        if key in shown or array is None:
            continue
        record = records.get(key)
        if record is not None:
            records[key] = record._replace(aliases=record.aliases + 1)
            continue
        library = "numpy" if is_array(owner) else "buffer"
        note = _MAPPED if type_name(owner) == "mmap" else ""
        records[key] = TensorRecord(
            name=labels.paths.get(id(item)),
            type_name=array.type_name,
            shape=array.shape,
            dtype=array.dtype,
            device="cpu",
            size_bytes=array.size_bytes,
            cell=labels.cell(item),
            library=library,
            storage=key,
            note=note,
        )
    return list(records.values())
