"""torch's tensors as records: one for each storage, with what the tensor is for.

Where a list may have a million items, it is handled by ``map`` and its like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import is_not, not_
from typing import Any, TypeVar

from ipygpumem.arrays import library_type, samples
from ipygpumem.heap import Heap
from ipygpumem.inventory.memory import Memory, Reader
from ipygpumem.kinds import instance_dict, is_kind, type_name
from ipygpumem.model import TensorKind, TensorRecord

T = TypeVar("T")

_DEEPEST = 6
_MOST_PER_STATE = 1_000_000


@dataclass
class Subjects:
    """The objects to be listed, those with a name first; lists side by side."""

    items: list[Any]
    names: list[str | None]
    """The path that leads to each, or None."""
    cells: list[int | None]
    """The cell that bound the first part of the path."""
    requires_grad: list[bool] = field(default_factory=list)
    """Of torch's tensors only."""


def add_gradients(reader: Reader, subjects: Subjects) -> list[Any]:
    """Add the gradients, which may have had no object in Python so far, named after their tensors; return them."""
    subjects.requires_grad = reader.column("requires_grad", subjects.items)
    requiring = list(compress(range(len(subjects.items)), subjects.requires_grad))
    gradients = []
    places = {id(item): place for place, item in enumerate(subjects.items)} if requiring else {}
    for place in requiring:
        # A tensor that is computed has none, unless it was asked to keep it; to ask it would print a warning.
        one = [subjects.items[place]]
        may_have_one = reader.column("is_leaf", one)[0] or reader.column("retains_grad", one)[0]
        gradient = reader.column("_grad", one)[0] if may_have_one else None
        if gradient is None:
            continue
        gradients.append(gradient)
        name = subjects.names[place]
        path = None if name is None else f"{name}.grad"
        known = places.setdefault(id(gradient), len(subjects.items))
        if known == len(subjects.items):
            subjects.items.append(gradient)
            subjects.names.append(path)
            subjects.cells.append(subjects.cells[place])
            subjects.requires_grad += reader.column("requires_grad", [gradient])
        elif subjects.names[known] is None:
            subjects.names[known], subjects.cells[known] = path, subjects.cells[place]
    return gradients


class Table:
    """The storages of tensors, and the records made of them."""

    def __init__(self, reader: Reader, subjects: Subjects) -> None:
        self._reader, self._subjects = reader, subjects
        plain, storages = self._plain_ones()
        unfit = set(range(len(subjects.items))) - set(plain) if len(plain) < len(subjects.items) else set()
        self._memories: dict[int, Memory] = {place: reader.memory(subjects.items[place]) for place in sorted(unfit)}
        inside = {key for memory in self._memories.values() for key in memory.storages}
        keys: list[int] = reader.ask("_cdata", storages)
        if not inside.isdisjoint(keys):  # the parts of a sparse or wrapper tensor are listed with it
            own = [key not in inside for key in keys]
            plain, storages, keys = (list(compress(items, own)) for items in (plain, storages, keys))
        self._plain, self._storages, self._keys = plain, storages, keys
        self.aliases: Counter[int] = Counter()
        """How many more tensors or arrays show a storage."""

    def _plain_ones(self) -> tuple[list[int], list[Any]]:
        """Return the places of the tensors that have one storage of their own, and these storages."""
        items = self._subjects.items
        odd = self._reader.odd(items)
        places = list(compress(range(len(items)), map(not_, odd)))
        storages = self._reader.storages(items if len(places) == len(items) else [items[place] for place in places])
        if not all(readable := list(map(is_not, storages, repeat(None)))):
            places, storages = list(compress(places, readable)), list(compress(storages, readable))
        return places, storages

    @property
    def unread(self) -> list[str]:
        """Why the memory of some tensors could not be read, once for each."""
        return [memory.note for memory in self._memories.values() if memory.note.startswith("could not be read")]

    def foreign_addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the storages that other code than torch has allocated on the host, and their addresses."""
        resizable = self._reader.ask("resizable", self._storages)
        foreign = list(map(not_, resizable))
        for key, storage in zip(compress(self._keys, foreign), compress(self._storages, foreign), strict=True):
            if str(storage.device) == "cpu":
                yield key, int(storage.data_ptr())

    def rows(self, kinds: Mapping[int, TensorKind]) -> list[TensorRecord]:
        """Return one record for each storage, or set of storages; ``kinds`` tells what some storages are for."""
        return [*self._plain_rows(kinds), *self._odd_rows(kinds)]

    # -- plain tensors ----------------------------------------------------------------------------------------

    def _plain_rows(self, kinds: Mapping[int, TensorKind]) -> Iterator[TensorRecord]:
        reader, keys = self._reader, self._keys
        first = self._representatives()
        storages, kept, places = (_those(found, first) for found in (self._storages, keys, self._plain))
        subjects = self._subjects
        items, requires = _those(subjects.items, places), _those(subjects.requires_grad, places)
        devices = _texts(reader, reader.column("device", items))
        sizes = reader.ask("nbytes", storages)
        return map(
            tuple.__new__,
            repeat(TensorRecord),
            zip(
                _those(subjects.names, places),
                _type_names(items),
                reader.shapes(items),
                _texts(reader, reader.column("dtype", items)),
                devices,
                _counted(sizes, devices),
                [kinds.get(key, "other") for key in kept] if kinds else repeat("other"),
                requires,
                self._in_graph(items, requires),
                _those(subjects.cells, places),
                list(map(self.aliases.get, kept, repeat(0))) if self.aliases else repeat(0),
                reader.shared(storages, devices),
                repeat("torch"),
                kept,
                ["could not be read" if size is None else "" for size in sizes] if None in sizes else repeat(""),
            ),
        )

    def _representatives(self) -> Sequence[int]:
        """Return which tensor stands for each storage: one with a name before others, then the largest."""
        if len(set(self._keys)) == len(self._keys):
            return range(len(self._keys))
        first = dict(zip(reversed(self._keys), reversed(range(len(self._keys))), strict=True))
        sharing: dict[int, list[int]] = {}
        for index, key in enumerate(self._keys):
            if first[key] != index:
                sharing.setdefault(key, [first[key]]).append(index)
        for key, several in sharing.items():
            first[key] = min(several, key=self._rank)
            self.aliases[key] += len(several) - 1
        return sorted(first.values())

    def _rank(self, index: int) -> tuple[bool, int, int]:
        place = self._plain[index]
        (elements,) = self._reader.column("nbytes", [self._subjects.items[place]])
        return self._subjects.names[place] is None, -(elements or 0), place

    def _in_graph(self, items: Sequence[Any], requires: Sequence[bool]) -> Sequence[bool]:
        if True not in requires:
            return [False] * len(items)
        return list(map(is_not, self._reader.column("grad_fn", items), repeat(None)))

    # -- the others -------------------------------------------------------------------------------------------

    def _odd_rows(self, kinds: Mapping[int, TensorKind]) -> Iterator[TensorRecord]:
        reader, subjects = self._reader, self._subjects
        inside = self._inside_others()
        rows: dict[tuple[int, ...], TensorRecord] = {}
        for place, memory in self._memories.items():
            tensor = subjects.items[place]
            key = tuple(memory.storages) or (id(tensor),)
            if place in inside:
                continue
            if key in rows:
                rows[key] = rows[key]._replace(aliases=rows[key].aliases + 1)
                continue
            dtype, device, requires = (
                reader.column(name, [tensor])[0] for name in ("dtype", "device", "requires_grad")
            )
            rows[key] = TensorRecord(
                name=subjects.names[place],
                type_name=type_name(tensor),
                shape=reader.shape(tensor),
                dtype=reader.text(dtype),
                device=memory.device or reader.text(device),
                size_bytes=sum(memory.storages.values()),
                kind=next((kinds[part] for part in (*key, id(tensor)) if part in kinds), "other"),
                requires_grad=bool(requires),
                in_graph=bool(requires) and reader.column("grad_fn", [tensor])[0] is not None,
                cell=subjects.cells[place],
                aliases=sum(self.aliases[part] for part in key),
                shared=memory.shared,
                library="torch",
                storage=key[0],
                note=memory.note,
            )
        yield from rows.values()

    def _inside_others(self) -> set[int]:
        """Return the places of odd tensors all of whose storages belong to a larger one: a wrapper's sparse part."""
        return {
            place
            for place, memory in self._memories.items()
            for other in self._memories.values()
            if memory.storages and other is not memory and memory.storages.keys() < other.storages.keys()
        }


def _those(items: list[T], places: Sequence[int]) -> list[T]:
    """Return the items at ``places``, which are in order; all of them without a copy."""
    return items if len(places) == len(items) else [items[place] for place in places]


def _counted(sizes: list[int | None], devices: list[str]) -> list[int]:
    """Return the bytes that count: none where they could not be read or where there is no memory behind them."""
    if "meta" not in set(devices) and None not in set(sizes):
        return sizes  # type: ignore[return-value]  # no None is in it
    return [0 if size is None or device == "meta" else size for size, device in zip(sizes, devices, strict=True)]


def _texts(reader: Reader, values: list[Any]) -> list[str]:
    """Return dtypes or devices as text; there are few different ones."""
    texts = {value: reader.text(value) for value in set(values)}
    return list(map(texts.__getitem__, values))


def _type_names(items: Sequence[Any]) -> list[str]:
    kinds = list(map(id, map(type, items)))
    names = {kind: type_name(item) for kind, item in samples(kinds, items).items()}
    return list(map(names.__getitem__, kinds))


# -- what tensors are for -----------------------------------------------------------------------------------------


def kinds_of(reader: Reader, heap: Heap, tensors: Sequence[Any], gradients: Sequence[Any]) -> dict[int, TensorKind]:
    """Return what storages are for, by their identity; those that are not in it are for anything else."""
    kinds: dict[int, TensorKind] = {}
    groups: tuple[tuple[TensorKind, Iterator[Any]], ...] = (
        ("buffer", _buffers(reader, heap)),
        ("optimizer state", _states(reader, heap)),
        ("gradient", iter(gradients)),
        ("parameter", _parameters(tensors)),
    )
    for kind, found in groups:  # of several, the last one counts
        for tensor in found:
            for key in (*reader.memory(tensor).storages, id(tensor)):
                kinds[key] = kind
    return kinds


def _parameters(tensors: Sequence[Any]) -> Iterator[Any]:
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    kinds = list(map(id, map(type, tensors)))
    several = samples(kinds, tensors)
    known = {kind for kind, item in several.items() if is_kind(item, base)}
    yield from compress(tensors, map(known.__contains__, kinds))
    for kind, item in several.items():
        if kind not in known and type(item) is not base.__base__:  # torch marks a subclass's parameters so
            same = compress(tensors, map(kind.__eq__, kinds))
            yield from (one for one in same if (instance_dict(one) or {}).get("_is_param") is True)


def _buffers(reader: Reader, heap: Heap) -> Iterator[Any]:
    for module in heap.modules:
        buffers = (instance_dict(module) or {}).get("_buffers")
        if is_kind(buffers, dict):
            yield from (item for item in list(dict.values(buffers)) if is_kind(item, reader.base))  # type: ignore[arg-type]  # is_kind says so


def _states(reader: Reader, heap: Heap) -> Iterator[Any]:
    """Yield what live optimizers remember, which is not always one level deep."""
    for optimizer in heap.optimizers:
        waiting = [((instance_dict(optimizer) or {}).get("state"), 0)]
        for _ in range(_MOST_PER_STATE):
            if not waiting:
                break
            item, depth = waiting.pop()
            if is_kind(item, reader.base):
                yield item
            elif depth < _DEEPEST and is_kind(item, dict):
                waiting += [(value, depth + 1) for value in list(dict.values(item))]  # type: ignore[arg-type]  # is_kind says so
            elif depth < _DEEPEST and (type(item) is list or type(item) is tuple):
                waiting += [(value, depth + 1) for value in item]
