"""Makes records of tensors and arrays: one for each storage."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipygpumem.introspect import is_instance, type_name
from ipygpumem.objects.arrays import describe, is_map, memory_of
from ipygpumem.objects.inventory.memory import Memory, Reader
from ipygpumem.objects.inventory.records import Role, TensorRecord
from ipygpumem.objects.progress import Progress, every, unseen

_STEP = 1000
_MAPPED = "a memory map: bytes of the file, not all of them in RAM"


@dataclass(frozen=True)
class Labels:
    """What the notebook calls tensors and arrays, by their identities."""

    paths: dict[int, str]
    cells: dict[int, int | None]
    """The cell that bound the first part of the path."""


def add_gradients(reader: Reader, tensors: list[Any], labels: Labels) -> list[Any]:
    """Add the gradients, which may have had no object in Python so far, named after their tensors; return them."""
    known = set(map(id, tensors))
    gradients: list[Any] = []
    for tensor in list(tensors):
        # A tensor that is computed has none, unless it was asked to keep it; to ask it would print a warning.
        if not reader.read("requires_grad", tensor) or not (
            reader.read("is_leaf", tensor) or reader.read("retains_grad", tensor)
        ):
            continue
        gradient = reader.read("_grad", tensor)
        if gradient is None:
            continue
        gradients.append(gradient)
        if id(gradient) not in known:
            known.add(id(gradient))
            tensors.append(gradient)
        if id(tensor) in labels.paths and id(gradient) not in labels.paths:
            labels.paths[id(gradient)] = f"{labels.paths[id(tensor)]}.grad"
            labels.cells[id(gradient)] = labels.cells[id(tensor)]
    return gradients


class TensorList:
    """torch's tensors by their storages.

    Args:
        reader: reads the tensors.
        tensors: those with a name first.
        labels: their names.
        progress: gets how much is read.
    """

    def __init__(self, reader: Reader, tensors: Sequence[Any], labels: Labels, progress: Progress = unseen) -> None:
        self._reader, self._labels = reader, labels
        self._memories = [(tensor, reader.memory(tensor)) for tensor in every(_STEP, tensors, progress)]
        self._wholes: dict[int, list[Memory]] = {}
        """What a storage is a part of: sparse, quantized and wrapper tensors."""
        for _, memory in self._memories:
            for key in () if memory.is_plain else memory.storages:
                self._wholes.setdefault(key, []).append(memory)
        self._shown: Counter[int] = Counter()
        """How many arrays show a storage."""
        self._owners: dict[int, int] = {}
        """The arrays, by identity, whose memory a storage is."""

    @property
    def unread(self) -> list[str]:
        """Why the memory of some tensors could not be read, once for each."""
        return [memory.note for _, memory in self._memories if memory.note.startswith("could not be read")]

    def match(self, array_type: Any, arrays: Sequence[object]) -> set[int]:
        """Find the arrays that show a tensor's memory, or a tensor an array's: such memory counts once.

        Returns:
            The identities of what owns the memory of such arrays.
        """
        shown: set[int] = set()
        by_address: dict[int, tuple[int, int]] = {}
        for item in arrays:
            owner = memory_of(array_type, item)
            if is_instance(owner, self._reader.base):  # tensor.numpy()
                self._shown.update(self._reader.memory(owner).storages.keys())
                shown.add(id(owner))
            elif is_instance(owner, array_type):
                interface: Any = array_type.__dict__["__array_interface__"].__get__(owner)
                by_address[interface["data"][0]] = (int(array_type.__dict__["nbytes"].__get__(owner)), id(owner))
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
        """Yield the storages on the host that other code than torch has allocated, once each, and where they begin."""
        found: dict[int, int] = {}
        for tensor, memory in self._memories:
            if memory.is_plain and memory.device == "cpu":
                address = self._reader.address_of_others(tensor)
                if address is not None:
                    found.update(dict.fromkeys(memory.storages, address))
        yield from found.items()

    def records(self, roles: Mapping[int, Role]) -> Iterator[TensorRecord]:
        """Yield one record for each storage, or set of storages; ``roles`` are those of some storages."""
        together: dict[tuple[int, ...], list[tuple[Any, Memory]]] = {}
        for tensor, memory in self._memories:
            if not self._is_part(memory):  # it is listed with the whole
                together.setdefault(tuple(memory.storages) or (id(tensor),), []).append((tensor, memory))
        for key, found in together.items():
            tensor, memory = found[0] if len(found) == 1 else min(found, key=self._rank)
            yield self._record(key, tensor, memory, roles, len(found) - 1)

    def _is_part(self, memory: Memory) -> bool:
        wholes = self._wholes and [whole for key in memory.storages for whole in self._wholes.get(key, ())]
        if not wholes or memory.is_plain:
            return bool(wholes)
        return any(memory.storages.keys() < whole.storages.keys() for whole in wholes)

    def _rank(self, found: tuple[Any, Memory]) -> tuple[bool, int]:
        """Return what puts one tensor before the others of a storage: a name, then its size."""
        tensor, memory = found
        size = self._reader.read("nbytes", tensor) if memory.is_plain else 0
        return id(tensor) not in self._labels.paths, -(size or 0)

    def _record(
        self, key: tuple[int, ...], tensor: Any, memory: Memory, roles: Mapping[int, Role], others: int
    ) -> TensorRecord:
        reader, read, identity = self._reader, self._reader.read, id(tensor)
        requires = bool(read("requires_grad", tensor))
        # By position: with names it takes twice as long.
        return TensorRecord(
            self._labels.paths.get(identity),
            type_name(tensor),
            reader.shape(tensor),
            reader.text(read("dtype", tensor)),
            memory.device or reader.device(tensor),
            sum(memory.storages.values()),
            next((roles[part] for part in (*key, identity) if part in roles), "other") if roles else "other",
            requires,
            requires and read("grad_fn", tensor) is not None,
            self._labels.cells.get(identity),
            others + (sum(self._shown[part] for part in key) if self._shown else 0),
            memory.shared,
            "numpy" if key[0] in self._owners else "torch",
            self._owners.get(key[0], key[0]),
            memory.note,
        )


def array_records(
    array_type: Any, arrays: Sequence[object], labels: Labels, shown: set[int], progress: Progress
) -> list[TensorRecord]:
    """Return one record for the memory of each array, but for that which was ``shown`` as a tensor's."""
    records: dict[int, TensorRecord] = {}
    for item in every(_STEP, arrays, progress):
        owner = memory_of(array_type, item)
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
            cell=labels.cells.get(id(item)),
            library="numpy" if is_instance(owner, array_type) else "buffer",
            storage=key,
            note=_MAPPED if is_map(owner) else "",
        )
    return list(records.values())
