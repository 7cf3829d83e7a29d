"""Finds the arrays that objects hold, each storage once, with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    Array,
    describe,
    described,
)
from ipygpumem.heap.bulk import (
    of_types,
)
from ipygpumem.heap.walk import MOST_OBJECTS, Group, Walk
from ipygpumem.introspect import (
    type_name,
)
from ipygpumem.records import RetainedArray


class ArraySearch(Walk):
    """Finds the tensors and arrays that objects hold, each storage once; not behind arrays, and not
    in classes.
    """

    def __init__(
        self,
        leaves_out: Callable[[object, Array], bool] = lambda item, array: False,
        allowance: Allowance | None = None,
    ) -> None:
        super().__init__(find=("tensor", "ndarray"), allowance=allowance)
        self._leaves_out = leaves_out
        self._storages: set[tuple[str, int]] = set()
        self._found: list[tuple[object, Array]] = []

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Return the wrappers, whose memory belongs to the tensors inside; record
        the other arrays.
        """
        pairs = described(arrays)
        self._found += pairs
        known = {id(item) for item, _ in pairs}
        return [item for item in arrays if id(item) not in known]

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of some objects, without namespaces."""
        spaces = [item for item in of_types({id(dict)}, objects) if "__builtins__" in item]
        self.pass_over(*spaces)
        keys = set(map(id, spaces))
        yield from super().enter(
            [item for item in objects if id(item) not in keys] if keys else objects, path
        )

    def find(self, value: object) -> Iterator[tuple[object, Array]]:
        """Yield the arrays that ``value`` is or refers to, except those that an earlier call has
        found.
        """
        rest, self.left = self.left, min(self.left, MOST_OBJECTS // 3)
        rest -= self.left
        for _ in self.run([([value], None)]):
            found, self._found = self._found, []
            for item, array in found:
                if array.storage not in self._storages:
                    self._storages.add(array.storage)
                    if not self._leaves_out(item, array):
                        yield item, array
        self.left += rest
        self.drop()

    def ignore(self, value: object) -> None:
        """Exclude the memory of ``value``, and so all its views, if it is an array itself."""
        array = describe(value)
        if array is not None:
            self._storages.add(array.storage)

    def held(
        self, name: str, value: object, *, function: str = "", line: int = 0
    ) -> tuple[RetainedArray, list[tuple[object, Array]]] | None:
        """Return the memory held by ``name``, and the arrays with their descriptions; None if no
        array is new.
        """
        pairs = list(self.find(value))
        if not pairs:
            return None
        arrays = [array for _, array in pairs]
        held = summed(name, type_name(value), arrays, alone=describe(value) is not None)
        return replace(held, function=function, line=line), pairs


def summed(name: str, kind: str, arrays: Sequence[Array], *, alone: bool) -> RetainedArray:
    """Return the sum of the arrays held by ``name``; ``alone`` means that the object is itself an
    array.
    """
    return RetainedArray(
        name=name,
        type_name=kind,
        shape=arrays[0].shape if alone and len(arrays) == 1 else None,
        dtype=", ".join(sorted({array.dtype for array in arrays})),
        device=", ".join(sorted({array.device for array in arrays})),
        size_bytes=sum(array.size_bytes for array in arrays),
        arrays=len(arrays),
    )
