"""Remembers the memory that is in use before an experiment: none of it can be the experiment's."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, compress
from operator import not_
from types import FunctionType
from typing import Any

from ipygpumem.introspect import is_instance, module_dict, named_objects, users_modules
from ipygpumem.objects.arrays import Array, Reader, Span, Storages, library_type, owner_of, place_of
from ipygpumem.objects.bulk import by_identity
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.graphs import live_tensors
from ipygpumem.objects.walk import MOST_AT_START, Walk

_LARGE = 1 << 16
"""Bytes of an array that is worth a reference of its own, which the garbage collector has to look at."""

_MOST_INSTALLED = 300
"""How many objects in each module that was installed: it has its data on top, if at all; not in functions."""


def within_reach(namespace: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return the NumPy arrays behind a notebook's names, in the modules among them, and in all modules of the user's.

    The collector does not list arrays. To look behind all that it lists takes three times as long.

    Returns:
        The arrays, each once, and whether all were seen.
    """
    own = users_modules()
    others = {id(names): names for names in map(module_dict, own.values()) if names is not namespace}
    walk = Walk(MOST_AT_START, ("ndarray",), {"__main__", *own}, is_hasty=True)
    walk.pass_over(namespace, *others.values())  # what lies in them belongs to everybody
    named = [value for _, value in named_objects(namespace)]
    values = [*named, *(value for names in others.values() for _, value in named_objects(names))]
    arrays = list(chain.from_iterable(walk.run([(values, None)])))
    complete = walk.complete
    for module in by_identity(walk.of_kind("module", named)).values():
        walk.left = _MOST_INSTALLED
        found = [item for item in list(module_dict(module).values()) if type(item) is not FunctionType]
        arrays += chain.from_iterable(walk.run([(found, None)]))
    walk.drop()
    return arrays, complete


class Before:
    """The memory of all tensors, and of the arrays that a notebook can name, at the moment when it is made.

    It keeps none of it alive. What was alive then has no other's identity later: storages of torch are referred to
    weakly, so that their places are not taken again. Of arrays their own places are known.

    Attributes:
        complete: False if there was too much to follow: then there may be arrays that it does not know.
    """

    def __init__(self, namespace: dict[str, Any], garbage: Garbage) -> None:
        self._storages = Storages()
        self._objects: dict[int, weakref.ref[Any]] = {}
        """Tensors that have no storage, by identity."""
        self._large: set[Span] = set()
        """Where large arrays are that own their memory: NumPy resizes none that somebody refers to weakly. So a new
        one that got the identity and the memory of an old one is taken for that, and an old one that moved for new."""
        self._spans: list[tuple[int, int]] = []
        self._small: set[int] = set()
        """Identities of small arrays. A new one that got an old one's is taken for that."""
        self.complete = True
        base: Any = library_type("torch", "Tensor")
        if base is not None:
            self._add_tensors(live_tensors(garbage))
        array_type = library_type("numpy", "ndarray")
        if array_type is not None:
            arrays, self.complete = within_reach(namespace)
            self._add_arrays(array_type, arrays)

    def _add_tensors(self, tensors: list[Any]) -> None:
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            odd = self._storages.add_of(Reader(torch), tensors)
            self._objects.update((id(tensor), weakref.ref(tensor)) for tensor in odd)

    def _add_arrays(self, array_type: Any, arrays: Sequence[Any]) -> None:
        base = array_type.__dict__["base"].__get__
        owners = [array if base(array) is None else owner_of(array_type, array) for array in arrays]
        large = list(map(_LARGE.__lt__, map(array_type.__dict__["nbytes"].__get__, arrays)))
        self._large.update(place_of(owner) for owner in compress(owners, large) if is_instance(owner, array_type))
        self._spans = sorted((start, end) for _, start, end in self._large)
        self._small = set(map(id, compress(owners, map(not_, large))))

    def has(self, item: object, array: Array) -> bool:
        """Whether the memory of a tensor or array, which ``array`` describes, was there."""
        library, key = array.storage
        if library == "torch":
            return key in self._storages or self._shows_old_array(item)
        array_type = library_type("numpy", "ndarray")
        if array_type is not None and is_instance(item, array_type):
            owner = owner_of(array_type, item)
            if is_instance(owner, array_type) and array.size_bytes > _LARGE:
                return place_of(owner) in self._large
            return key in self._small and array.size_bytes <= _LARGE
        reference = self._objects.get(key)
        return reference is not None and reference() is not None

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
        place = bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        return place >= 0 and address < self._spans[place][1]

    def close(self) -> None:
        """Forget all of it."""
        self._storages.close()
        self._objects.clear()
        self._large.clear()
        self._small.clear()
        self._spans.clear()
