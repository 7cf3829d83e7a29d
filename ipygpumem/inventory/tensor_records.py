"""Lists the tensors of torch by storage, and the arrays of NumPy and buffers by memory."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import not_
from typing import Any

from ipygpumem.heap.arrays import describe, is_array, library_type, memory_of, place_of
from ipygpumem.heap.bulk import chunks, type_names
from ipygpumem.heap.holders.nodes import has_graph
from ipygpumem.heap.tensors import Memory, Reader, each
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.inventory.labels import Labels
from ipygpumem.inventory.records import Role, TensorRecord
from ipygpumem.inventory.roles import roles_of_each
from ipygpumem.probes.accelerators import loaded_torch

_MAPPED = "a memory map: bytes of the file, not all of them in RAM"


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
            roles_of_each(roles, together, map(id, tensors)),
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
