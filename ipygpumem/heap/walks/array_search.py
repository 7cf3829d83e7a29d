"""Finds the arrays that objects hold, each storage once, with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import by_identity, without_objects
from ipygpumem.heap.kinds.arrays import Array, describe, described
from ipygpumem.heap.knowledge.barriers import globals_among
from ipygpumem.heap.walks.walk import MOST_OBJECTS, Group, Walk
from ipygpumem.introspect import type_name
from ipygpumem.records import RetainedArray


class ArraySearch(Walk):
    """Finds the tensors and arrays that objects hold, each storage once; classes are not entered.

    Args:
        leaves_out: returns True for an array to leave out, such as one that is older.
        allowance: the walk's time and memory, if they are limited.
    """

    def __init__(
        self,
        leaves_out: Callable[[object, Array], bool] | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        super().__init__(find=("tensor", "ndarray"), allowance=allowance)
        self._leaves_out = leaves_out
        self._storages: set[tuple[str, int]] = set()
        """The keys of the storages that were found, or that ``ignore`` excludes."""
        self._pairs: list[tuple[object, Array]] = []
        """Arrays with their descriptions, of which the storages have not been compared yet."""

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays that lead to other objects, as in the base class, and wrappers, whose
        memory belongs to the tensors inside; record the arrays with memory for ``find``.
        """
        pairs = described(arrays)
        self._pairs += pairs
        described_ids = {id(item) for item, _ in pairs}
        wrappers = [item for item in arrays if id(item) not in described_ids]
        return list(by_identity([*wrappers, *super().that_lead_on(arrays)]).values())

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of some objects, as in the base class, but not those of the namespaces
        of modules, which lead to everything.
        """
        namespaces = globals_among(objects)
        if namespaces:
            self.pass_over(*namespaces)
            objects = without_objects(namespaces, objects)
        yield from super().enter(objects, path)

    def find(self, value: object) -> Iterator[tuple[object, Array]]:
        """Yield the arrays that ``value`` is or leads to, with their descriptions, but none on a
        storage that an earlier call has found.
        """
        # One value may use a third of the limit at most, so that enough is left for later values.
        for_later = max(0, self.left - MOST_OBJECTS // 3)
        self.left -= for_later
        for _ in self.walk_from([([value], None)]):
            pairs, self._pairs = self._pairs, []
            for item, array in pairs:
                if array.storage in self._storages:
                    continue
                self._storages.add(array.storage)
                if self._leaves_out is None or not self._leaves_out(item, array):
                    yield item, array
        self.left += for_later
        self.drop()

    def ignore(self, value: object) -> None:
        """Exclude the memory of ``value`` if it is an array itself, so that later calls of ``find``
        yield neither it nor a view of it.
        """
        array = describe(value)
        if array is not None:
            self._storages.add(array.storage)

    def retained_by(
        self, name: str, value: object, *, function: str = "", line: int = 0
    ) -> tuple[RetainedArray, list[tuple[object, Array]]] | None:
        """Return the row of a name, and its arrays with their descriptions; None if it has none on
        a storage that is new to the search.

        Args:
            name: the name.
            value: its object.
            function: the function of which it is a local name; empty if it is none.
            line: the line of the function at which it stands.
        """
        pairs = list(self.find(value))
        if not pairs:
            return None
        arrays = [array for _, array in pairs]
        is_array = describe(value) is not None
        row = summed(name, type_name(value), arrays, alone=is_array)
        return replace(row, function=function, line=line), pairs


def arrays_of_names(named: Mapping[str, object]) -> list[RetainedArray]:
    """Return a row for each name that leads to arrays; each storage counts in the first."""
    search = ArraySearch()
    rows = list[RetainedArray]()
    for name, value in list(named.items()):
        entry = search.retained_by(name, value)
        if entry is not None:
            rows.append(entry[0])
    return rows


def summed(name: str, kind: str, arrays: Sequence[Array], *, alone: bool) -> RetainedArray:
    """Return the row of all arrays to which a name leads.

    Args:
        name: the name.
        kind: the type of its object.
        arrays: the arrays.
        alone: True if the object is itself an array.
    """
    shape = None
    if alone and len(arrays) == 1:
        shape = arrays[0].shape
    dtypes = {array.dtype for array in arrays}
    devices = {array.device for array in arrays}
    return RetainedArray(
        name=name,
        type_name=kind,
        shape=shape,
        dtype=", ".join(sorted(dtypes)),
        device=", ".join(sorted(devices)),
        size_bytes=sum(array.size_bytes for array in arrays),
        arrays=len(arrays),
    )
