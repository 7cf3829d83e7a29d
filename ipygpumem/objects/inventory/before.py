"""Remembers the memory that is in use before an experiment: none of it can be the experiment's."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.objects.arrays import Array, library_type, owner_of
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.graphs import live_tensors
from ipygpumem.objects.inventory.memory import Reader
from ipygpumem.objects.inventory.reach import Reach
from ipygpumem.objects.inventory.storages import Storages

_LARGE = 1 << 16
"""Bytes of an array that is worth a reference of its own, which the garbage collector has to look at."""


class Before:
    """The memory of all tensors, and of the arrays that a notebook can name, at the moment when it is made.

    It keeps none of it alive. What was alive then has no other's identity later: storages of torch are referred to
    weakly, so that their places are not taken again, and of arrays it is asked whether they are the same objects.

    Args:
        namespace: the notebook's names.
        garbage: knows the tensors.

    Attributes:
        complete: False if there was too much to follow: then there may be arrays that it does not know.
    """

    def __init__(self, namespace: dict[str, Any], garbage: Garbage) -> None:
        self._storages = Storages()
        self._objects: dict[int, weakref.ref[Any]] = {}
        """Large arrays that own their memory, and tensors that have no storage, by identity."""
        self._small: set[int] = set()
        """Identities of small arrays. A new one that got an old one's is taken for that, which is a trifle."""
        self._spans: list[tuple[int, int, weakref.ref[Any]]] | None = None
        self.complete = True
        base: Any = library_type("torch", "Tensor")
        if base is not None:
            self._add_tensors(live_tensors(garbage))
        array_type = library_type("numpy", "ndarray")
        if array_type is not None:
            reach = Reach(namespace)
            self.complete = reach.complete
            self._add_arrays(array_type, reach.arrays)
            reach.drop()

    def _add_tensors(self, tensors: list[Any]) -> None:
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            odd = self._storages.add_of(Reader(torch), tensors)
            self._objects.update((id(tensor), weakref.ref(tensor)) for tensor in odd)

    def _add_arrays(self, array_type: Any, arrays: Sequence[Any]) -> None:
        base = array_type.__dict__["base"].__get__
        owners = [array if base(array) is None else owner_of(array_type, array) for array in arrays]
        large = list(map(_LARGE.__lt__, map(array_type.__dict__["nbytes"].__get__, arrays)))
        self._objects.update((id(owner), weakref.ref(owner)) for owner in compress(owners, large))
        self._small = set(map(id, compress(owners, map(not_, large))))

    def has(self, item: object, array: Array) -> bool:
        """Whether the memory of a tensor or array, which ``array`` describes, was there."""
        library, key = array.storage
        if library == "torch":
            return key in self._storages or self._shows_old_array(item)
        reference = self._objects.get(key)
        if reference is None:
            return library == "numpy" and key in self._small and array.size_bytes <= _LARGE
        return reference() is not None

    def _shows_old_array(self, item: Any) -> bool:
        """Whether a tensor shows the memory of an array that was there, as one from ``torch.from_numpy`` does."""
        base: Any = library_type("torch", "Tensor")
        if not is_instance(item, base):
            return False
        with sys.modules["torch"]._C.DisableTorchFunction():
            storage = base.untyped_storage(item)
            if storage.device.type != "cpu" or storage.resizable():
                return False
            address = storage.data_ptr()
        if self._spans is None:
            self._spans = sorted(_spans(self._objects.values()), key=lambda span: span[:2])
        place = bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        return place >= 0 and address < self._spans[place][1] and self._spans[place][2]() is not None

    def close(self) -> None:
        """Forget all of it."""
        self._storages.close()
        self._objects.clear()
        self._small.clear()
        self._spans = None


def _spans(references: Iterable[weakref.ref[Any]]) -> Iterable[tuple[int, int, weakref.ref[Any]]]:
    """Yield where the memory of arrays begins and ends."""
    array_type: Any = library_type("numpy", "ndarray")
    for reference in references:
        array = reference()
        if array_type is not None and is_instance(array, array_type):
            start = array_type.__dict__["__array_interface__"].__get__(array)["data"][0]
            yield start, start + int(array_type.__dict__["nbytes"].__get__(array)), reference
