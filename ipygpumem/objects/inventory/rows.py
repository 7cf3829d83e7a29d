"""torch's tensors as records: one for each storage, with what the tensor is for.

Where a list may have a million items, it is handled by ``map`` and its like.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, islice, repeat
from operator import eq, is_not
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance, type_name
from ipygpumem.objects.arrays import library_type, samples
from ipygpumem.objects.columns import Column, Picked, all_different, at, places_of, type_identities
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.inventory.labels import NameColumn
from ipygpumem.objects.inventory.memory import Memory, Reader
from ipygpumem.objects.inventory.records import TensorKind, TensorRecord
from ipygpumem.objects.progress import Progress, unseen

_DEEPEST = 6
_MOST_PER_STATE = 1_000_000


@dataclass
class Subjects:
    """The objects to be listed, those with a name first; lists side by side."""

    items: list[Any]
    kinds: Column[int]
    """The identities of their types."""
    samples: dict[int, Any]
    """One object of each type."""
    names: NameColumn
    """The path that leads to each."""
    cells: Column[int | None]
    """The cell that bound the first part of the path."""
    requires_grad: Column[bool] = field(default_factory=Column)
    """Of torch's tensors only."""


def add_gradients(reader: Reader, subjects: Subjects) -> list[Any]:
    """Add the gradients, which may have had no object in Python so far, named after their tensors; return them."""
    subjects.requires_grad = Column(reader.column("requires_grad", subjects.items, subjects.kinds))
    if True not in subjects.requires_grad:
        return []
    requiring = list(compress(range(len(subjects.items)), subjects.requires_grad))
    # A tensor that is computed has none, unless it was asked to keep it; to ask it would print a warning.
    items = at(requiring, subjects.items)
    leaves, kept = reader.column("is_leaf", items), reader.column("retains_grad", items)
    asked = [place for place, is_leaf, keeps in zip(requiring, leaves, kept, strict=True) if is_leaf or keeps]
    found = zip(asked, reader.column("_grad", at(asked, subjects.items)), strict=True)
    with_gradient = [(place, gradient) for place, gradient in found if gradient is not None]
    if not with_gradient:
        return []
    places = {id(item): place for place, item in enumerate(subjects.items)}
    cells, new = list(subjects.cells), []
    for place, gradient in with_gradient:
        known = places.setdefault(id(gradient), len(cells))
        if known == len(cells):
            new.append(gradient)
            cells.append(None)
        if not subjects.names.is_named(known):
            subjects.names.add_gradient(known, place)
            cells[known] = cells[place]
    kinds = type_identities(new)
    subjects.items += new
    subjects.kinds.extend(kinds)
    subjects.samples.update(samples(kinds, new))
    subjects.cells = Column(cells)
    subjects.requires_grad.extend(reader.column("requires_grad", new))
    return [gradient for _, gradient in with_gradient]


class Table:
    """The storages of tensors, and the records made of them.

    Args:
        reader: reads the tensors.
        subjects: the tensors.
        with_addresses: whether storages of other code's memory are wanted.
        progress: told how much is read.
    """

    def __init__(
        self, reader: Reader, subjects: Subjects, *, with_addresses: bool, progress: Progress = unseen
    ) -> None:
        self._reader, self._subjects = reader, subjects
        places = reader.own(subjects.kinds, subjects.samples)
        items, kinds = at(places, subjects.items), at(places, subjects.kinds)
        plain = reader.read(items, kinds, with_addresses=with_addresses, progress=progress)
        odd_dtypes = {dtype for dtype in plain.dtypes.different() if reader.is_odd(dtype)}
        if odd_dtypes or None in plain.sizes:
            read = enumerate(zip(plain.sizes, plain.dtypes, strict=True))
            fit = [index for index, (size, dtype) in read if size is not None and dtype not in odd_dtypes]
            places = at(fit, list(places))
            plain.keep(fit)
        unfit = set(range(len(subjects.items))).difference(places) if len(places) < len(subjects.items) else ()
        self._memories: dict[int, Memory] = {place: reader.memory(subjects.items[place]) for place in sorted(unfit)}
        inside = {key for memory in self._memories.values() for key in memory.storages}
        if inside and not inside.isdisjoint(plain.keys):  # the parts of a sparse or wrapper tensor are listed with it
            own = [index for index, key in enumerate(plain.keys) if key not in inside]
            places = at(own, list(places))
            plain.keep(own)
        self._plain, self._places = plain, places
        self.is_unshared = all_different(plain.keys) and not self._memories
        """Whether it is certain that no storage belongs to two of the tensors."""
        self.addresses = plain.addresses
        """Of storages on the host that other code than torch has allocated."""
        self.aliases: Counter[int] = Counter()
        """How many more tensors or arrays show a storage."""

    @property
    def unread(self) -> list[str]:
        """Why the memory of some tensors could not be read, once for each."""
        return [memory.note for memory in self._memories.values() if memory.note.startswith("could not be read")]

    # -- plain tensors ----------------------------------------------------------------------------------------

    def plain_columns(self, kinds: Mapping[int, TensorKind]) -> list[Column[Any]]:
        """Return one field of the records after the other, for the storages of plain tensors.

        Args:
            kinds: what some storages are for.
        """
        subjects, plain = self._subjects, self._plain
        first = self._representatives()
        plain.keep(first)
        places = self._places if len(first) == len(self._places) else at(first, list(self._places))
        items, requires = at(places, subjects.items), at(places, subjects.requires_grad)
        number = len(places)
        keys: list[Any] = plain.keys
        names: Column[str | None] = Column()
        names.join(Picked(subjects.names, places))
        storages: Column[int] = Column()
        storages.join(array("Q", keys))  # later inventories look at each object of a list
        type_names = {kind: type_name(item) for kind, item in subjects.samples.items()}
        return [
            names,
            at(places, subjects.kinds).map(type_names.__getitem__),
            plain.shapes,
            plain.dtypes,
            plain.devices,
            _counted(plain.sizes, plain.devices),
            Column(list(map(kinds.get, keys, repeat("other")))) if kinds else Column.same("other", number),
            requires,
            self._in_graph(items, requires),
            at(places, subjects.cells),
            Column(list(map(self.aliases.get, keys, repeat(0)))) if self.aliases else Column.same(0, number),
            Column(list(map(plain.shared.__contains__, keys))) if plain.shared else Column.same(False, number),
            Column.same("torch", number),
            storages,
            Column.same("", number),
        ]

    def _representatives(self) -> Sequence[int]:
        """Return which tensor stands for each storage: one with a name before others, then the largest."""
        keys: list[Any] = self._plain.keys
        if self.is_unshared:
            return range(len(keys))
        ordered = sorted(range(len(keys)), key=keys.__getitem__)
        sorted_keys = list(map(keys.__getitem__, ordered))
        shared = {
            index
            for position in compress(count(), map(eq, sorted_keys, islice(sorted_keys, 1, None)))
            for index in ordered[position : position + 2]
        }
        spare: set[int] = set()
        before = None
        for key, *_, index in sorted(self._ranks(list(shared))):
            if key == before:
                spare.add(index)
                self.aliases[key] += 1
            before = key
        return [index for index in range(len(keys)) if index not in spare]

    def _ranks(self, indices: list[int]) -> Iterator[tuple[int, bool, int, int]]:
        """Yield the storage of each tensor, what puts one before the others of it, and its index."""
        places = list(map(self._places.__getitem__, indices))
        sizes = self._reader.column("nbytes", list(map(self._subjects.items.__getitem__, places)))
        for index, place, size in zip(indices, places, sizes, strict=True):
            yield self._plain.keys[index], not self._subjects.names.is_named(place), -(size or 0), index

    def _in_graph(self, items: list[Any], requires: Column[bool]) -> Column[bool]:
        if True not in requires:
            return Column.same(False, len(items))
        return Column(list(map(is_not, self._reader.column("grad_fn", items), repeat(None))))

    # -- the others -------------------------------------------------------------------------------------------

    def odd_rows(self, kinds: Mapping[int, TensorKind]) -> list[TensorRecord]:
        """Return one record for each set of storages of the tensors that are not plain."""
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
        return list(rows.values())

    def _inside_others(self) -> set[int]:
        """Return the places of odd tensors all of whose storages belong to a larger one: a wrapper's sparse part."""
        return {
            place
            for place, memory in self._memories.items()
            for other in self._memories.values()
            if memory.storages and other is not memory and memory.storages.keys() < other.storages.keys()
        }


def _counted(sizes: Column[Any], devices: Column[str]) -> Column[int]:
    """Return the bytes that count: none where there is no memory behind them."""
    if "meta" not in devices:
        return sizes
    return Column([0 if device == "meta" else size for size, device in zip(sizes, devices, strict=True)])


# -- what tensors are for -----------------------------------------------------------------------------------------


def kinds_of(reader: Reader, heap: Heap, subjects: Subjects, gradients: Sequence[Any]) -> dict[int, TensorKind]:
    """Return what storages are for, by ``Reader.keys``; those that are not in it are for anything else."""
    kinds: dict[int, TensorKind] = {}
    groups: tuple[tuple[TensorKind, Iterable[Any]], ...] = (
        ("buffer", _buffers(reader, heap)),
        ("optimizer state", _states(reader, heap)),
        ("gradient", gradients),
        ("parameter", _parameters(subjects)),
    )
    for kind, found in groups:  # of several, the last one counts
        kinds.update(zip(reader.keys(list(found)), repeat(kind)))
    return kinds


def _parameters(subjects: Subjects) -> Iterator[Any]:
    base = library_type("torch.nn", "Parameter")
    if base is None:
        return
    several = subjects.samples
    known = {kind for kind, item in several.items() if is_instance(item, base)}
    yield from at(places_of(known, subjects.kinds), subjects.items)
    for kind, item in several.items():
        if kind not in known and type(item) is not base.__base__:  # torch marks a subclass's parameters so
            same = at(places_of({kind}, subjects.kinds), subjects.items)
            yield from (one for one in same if (instance_dict(one) or {}).get("_is_param") is True)


def _buffers(reader: Reader, heap: Heap) -> Iterator[Any]:
    for module in heap.modules:
        buffers = (instance_dict(module) or {}).get("_buffers")
        if is_instance(buffers, dict):
            yield from (item for item in list(dict.values(buffers)) if is_instance(item, reader.base))  # type: ignore[arg-type]  # is_instance says so


def _states(reader: Reader, heap: Heap) -> Iterator[Any]:
    """Yield what live optimizers remember, which is not always one level deep."""
    for optimizer in heap.optimizers:
        waiting = [((instance_dict(optimizer) or {}).get("state"), 0)]
        for _ in range(_MOST_PER_STATE):
            if not waiting:
                break
            item, depth = waiting.pop()
            if is_instance(item, reader.base):
                yield item
            elif depth < _DEEPEST and is_instance(item, dict):
                waiting += [(value, depth + 1) for value in list(dict.values(item))]  # type: ignore[arg-type]  # is_instance says so
            elif depth < _DEEPEST and (type(item) is list or type(item) is tuple):
                waiting += [(value, depth + 1) for value in item]
