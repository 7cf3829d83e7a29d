"""Makes the rows of new objects that remain after an experiment: one for each large object, and one
for many small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity, of_types, types_of
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.kinds.arrays import StorageKey, object_key
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes.sizes import MeasuredSize, Share, Sizes, row_of
from ipygpumem.introspect import type_name
from ipygpumem.inventory.remaining.contents import Received
from ipygpumem.records import SEVERAL_TYPES, RetainedArray

_MOST_ROWS = 50
"""Maximum number of objects of one type in a container to list one by one."""
_MOST_PLACES = 4
"""Maximum number of places with few of a row's objects that a row leaves out."""
_MOST_SHARE_ELSEWHERE = 0.01
"""Maximum share of a row's bytes in the places that it leaves out."""
_MOST_LABELS = 200
"""Maximum number of measurements that are compared with each other."""
_MOST_SHARED = 1_000_000
"""Maximum number of objects to examine behind an object that shares memory with another one."""


@dataclass(frozen=True)
class Remaining:
    """New objects that remain after an experiment, in one row: their memory, and where they are if
    that is known.
    """

    record: RetainedArray
    """Its size, without name and holder."""
    items: tuple[object, ...]
    """The objects, one of which the search for the holder starts from; keeps them alive."""
    name: str = ""
    chain: tuple[object, ...] = ()
    """The notebook's name that leads to the objects, and the objects on the way, if these are
    known.
    """
    may_be_older: bool = False
    """True if older objects are too many to be sure that they do not hold the memory, too."""

    def row(self) -> Row:
        """Return the row whose holder leads to all objects."""
        return Row.of_objects(self.items)

    def largest_place(
        self, holders: Mapping[StorageKey, Holder], smallest: int
    ) -> Remaining | None:
        """Return the row without its objects in small further places, so that one line frees it;
        None if it has no such places, or if too much is in these.

        Among a thousand new lists in older records may be one list of a few names elsewhere. It is
        not worth a row that says "and other places".

        Args:
            holders: the holder of each object that was searched.
            smallest: minimum bytes of a row.
        """
        places = dict[int, list[object]]()
        for item in self.items:
            holder = holders.get(object_key(item))
            places.setdefault(id(holder), []).append(item)
        in_largest, *in_other_places = sorted(places.values(), key=len, reverse=True)
        has_many_in_largest = len(in_largest) > _MOST_ROWS
        has_few_other_places = 1 <= len(in_other_places) <= _MOST_PLACES
        if not has_many_in_largest or not has_few_other_places or self.record.parts:
            return None
        elsewhere = list(chain.from_iterable(in_other_places))
        size = Sizes(limit=_MOST_SHARED).measure(elsewhere)
        most_bytes_elsewhere = min(_MOST_SHARE_ELSEWHERE * self.record.size_bytes, smallest - 1)
        if size.is_at_least or size.size_bytes > most_bytes_elsewhere:
            return None
        size_bytes = self.record.size_bytes - size.size_bytes
        record = replace(self.record, size_bytes=size_bytes, objects=len(in_largest))
        return replace(self, record=record, items=tuple(in_largest))

    def from_name(self, roots: Roots) -> Holder:
        """Return the holder of the objects by the known path from the name, with the line that
        removes them.
        """
        writer = PathWriter(roots, of_leaks=True)
        if len(self.items) == 1:
            return writer.holder_from_name(self.name, (*self.chain, self.items[0]))
        return writer.removal_of_items(self.name, self.chain, self.items)


class _NamedChain(NamedTuple):
    """The container of some objects and the name that leads to it, if these are known."""

    name: str = ""
    """The notebook's name; empty if none is known."""
    chain: tuple[object, ...] = ()
    """The name's object, and the objects from it to the container."""


_UNKNOWN_CHAIN = _NamedChain()


class RemainingRows:
    """Makes rows of new objects until these explain enough memory.

    Args:
        counted: has measured everything that is named already, and the old objects.
        smallest: minimum bytes of a row.
        size_bytes: the memory to explain.

    Attributes:
        remaining: the rows.
    """

    def __init__(self, counted: Sizes, smallest: int, size_bytes: int) -> None:
        self.remaining: list[Remaining] = []
        self._counted = counted
        self._smallest = smallest
        self._bytes_to_explain = size_bytes
        self._may_be_older = not counted.complete
        self._measured = 0
        """Number of measurements, each of which has its number as its label."""
        self._position_of_label: dict[str, int] = {}
        """The position in ``remaining`` of the row of a single object, by the label of its
        measurement.
        """
        self._with_row = set[int]()
        """The identities of the objects that are in a row."""
        self._scattered = _SmallObjects()
        """Objects that are too small for a row where they are."""

    def is_done(self) -> bool:
        """Return True if less than a row's bytes are left to explain."""
        return self._bytes_to_explain < self._smallest

    def add_received(self, received: Iterable[Received]) -> None:
        """Add rows for the new objects in older ones."""
        for part in received:
            # Asked once for all items: each question goes through all nodes.
            not_counted = self._counted.not_counted(set(map(id, part.items)))
            items = list[object]()
            for item in part.items:
                if id(item) in not_counted or self._is_counted_by_other_row(item):
                    items.append(item)
            self._add_rows_of(items, _NamedChain(part.name, part.chain))
        self._add_scattered()

    def add_rows(self, items: Sequence[object]) -> None:
        """Add rows for new objects whose containers are unknown."""
        self._add_rows_of(items, _UNKNOWN_CHAIN)

    def _is_counted_by_other_row(self, item: object) -> bool:
        """Return True for an object whose memory is in the row of another object that leads to
        it.
        """
        return (
            self._counted.label_of(item) in self._position_of_label
            and id(item) not in self._with_row
        )

    def _add_rows_of(self, items: Sequence[object], container: _NamedChain) -> None:
        """Add rows for new objects: one for each large object, one for many of the same type, and
        one for all small ones together.

        Args:
            items: new objects.
            container: the name and the chain of the container that has them.
        """
        small = _SmallObjects()
        for group in self._groups(items):
            size, label = self._measure(group)
            if size.size_bytes >= self._smallest:
                if len(group) == 1 and label:  # later objects may lead to the same memory
                    self._position_of_label[label] = len(self.remaining)
                self._add(row_of(group, size), group, container)
                continue
            position = self._row_with_same_memory(group, size)
            if position is not None:
                self._add_to_row(position, group[0], size, container)
            else:
                small.add(group, size.size_bytes)
        if small.sizes.total() >= self._smallest:
            self._add(small.row(), small.items, container)
        else:
            self._scattered.extend(small)

    def _groups(self, items: Sequence[object]) -> Iterator[Sequence[object]]:
        """Yield the objects that have no row yet: of each type all together if they are many, else
        one by one.
        """
        # An object with one reference is found twice: in the old object that has received it, and
        # among the new objects.
        unique = [item for key, item in by_identity(items).items() if key not in self._with_row]
        for type_id in types_of(unique):
            of_type = of_types({type_id}, unique)
            if len(of_type) > _MOST_ROWS:
                yield of_type
            else:
                for item in of_type:
                    yield [item]

    def _add_scattered(self) -> None:
        """Add rows for the objects that were too small for a row where they are: one for each type
        that is large in all places together, such as a list in each of 60 older objects, and one
        for all other types.
        """
        scattered, self._scattered = self._scattered, _SmallObjects()
        mixed = _SmallObjects()
        for of_type in scattered.by_type():
            if of_type.sizes.total() >= self._smallest:
                self._add(of_type.row(), of_type.items, _UNKNOWN_CHAIN)
            else:
                mixed.extend(of_type)
        if mixed.sizes.total() >= self._smallest:
            self._add(mixed.row(), mixed.items, _UNKNOWN_CHAIN)

    def _measure(self, group: Sequence[object]) -> tuple[MeasuredSize, str]:
        """Count the memory of a group of objects that nothing has counted yet. Return it, and the
        label of this measurement. The label is empty after ``_MOST_LABELS``
        measurements: each compares all labels.
        """
        self._measured += 1
        label = ""
        if self._measured <= _MOST_LABELS:
            label = str(self._measured)
        measured = group[0] if len(group) == 1 else group
        return self._counted.measure(measured, label), label

    def _add(self, row: RetainedArray, items: Sequence[object], container: _NamedChain) -> None:
        """Add a row with its objects. Its bytes need no further explanation."""
        self._bytes_to_explain -= row.size_bytes
        self._with_row.update(map(id, items))
        self.remaining.append(Remaining(row, tuple(items), *container, self._may_be_older))

    def _row_with_same_memory(self, group: Sequence[object], size: MeasuredSize) -> int | None:
        """Return the position of a row whose object leads to the same memory as an object alone;
        None if there is none.

        The memory is freed only without both. After ``results.append((i, model))`` in a loop, only
        the first tuple's row has the model's bytes, and the other tuples belong to that row.
        """
        if len(group) > 1:
            return None
        labels = [*size.also_in, self._counted.label_of(group[0])]
        positions = [
            self._position_of_label[label] for label in labels if label in self._position_of_label
        ]
        if not positions:
            return None
        # With the memory that other rows have counted; measured last, because it takes long.
        whole_size = Sizes(limit=_MOST_SHARED).measure(group[0])
        if whole_size.size_bytes < self._smallest:
            return None
        return positions[0]

    def _add_to_row(
        self, position: int, item: object, size: MeasuredSize, container: _NamedChain
    ) -> None:
        """Add an object to the row at a position, whose objects lead to the same memory.

        Args:
            position: the position in ``remaining``.
            item: the object.
            size: its memory that nothing has counted yet.
            container: the name and the chain of the container that has it.
        """
        row = self.remaining[position]
        chain_of_row = _NamedChain(row.name, row.chain)
        if list(map(id, container.chain)) != list(map(id, row.chain)):
            chain_of_row = _UNKNOWN_CHAIN  # the search for holders finds each of them
        self._bytes_to_explain -= size.size_bytes
        self._with_row.add(id(item))
        self.remaining[position] = replace(
            row,
            record=_record_with(row, item, size),
            items=(*row.items, item),
            name=chain_of_row.name,
            chain=chain_of_row.chain,
        )


def _record_with(row: Remaining, item: object, size: MeasuredSize) -> RetainedArray:
    """Return the record of a row after one more object was added.

    Args:
        row: the row without the object.
        item: the object.
        size: the memory of the object.
    """
    record = row.record
    sizes_by_type = Counter({record.type_name: record.size_bytes})
    if record.type_name == SEVERAL_TYPES:
        sizes_by_type = Counter(record.parts)
    sizes_by_type[type_name(item)] += size.size_bytes
    return replace(
        row_of((*row.items, item), _size_of_types(sizes_by_type)),
        size_bytes=record.size_bytes + size.size_bytes,
        device=record.device,
        is_at_least=record.is_at_least or size.is_at_least,
        uncounted=tuple(sorted({*record.uncounted, *size.uncounted})),
    )


class _SmallObjects:
    """Objects that are too small for rows of their own.

    Attributes:
        items: the objects.
        sizes: their bytes, by the name of their type.
    """

    def __init__(self) -> None:
        self.items: list[object] = []
        self.sizes = Counter[str]()

    def add(self, group: Sequence[object], size_bytes: int) -> None:
        """Add objects of one type, which have ``size_bytes`` together."""
        self.items += group
        self.sizes[type_name(group[0])] += size_bytes

    def extend(self, small: _SmallObjects) -> None:
        """Add all objects of another collection."""
        self.items += small.items
        self.sizes += small.sizes

    def by_type(self) -> Iterator[_SmallObjects]:
        """Yield the objects of each type as a collection of their own."""
        for type_id in types_of(self.items):
            of_type = list(by_identity(of_types({type_id}, self.items)).values())
            group = _SmallObjects()
            group.add(of_type, self.sizes[type_name(of_type[0])])
            yield group

    def row(self) -> RetainedArray:
        """Return one row for all of them."""
        return row_of(self.items, _size_of_types(self.sizes))


def _size_of_types(sizes: Counter[str]) -> MeasuredSize:
    """Return the memory of objects of several types, given the bytes of each type."""
    parts = list[Share]()
    for name, size_bytes in sizes.most_common():
        parts.append(Share(name, "items", name, 1, size_bytes))
    return MeasuredSize({"cpu": sizes.total()}, tuple(parts))
