"""Says whether the memory of tensors and arrays is still alive, without keeping it so."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Container
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.objects.arrays import is_of_library, library_type, owner_of


def watch(item: object) -> Callable[[], bool]:
    """Return a function that says whether the memory of a tensor or array is still alive; it keeps nothing alive.

    A view that survives keeps its storage, so the storage is watched and not the object.
    """
    if is_of_library(item, "torch", "Tensor"):
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(Exception), torch._C.DisableTorchFunction():  # some have no storage
            return _WeakStorage(torch.Tensor.untyped_storage(item)).is_alive
    array_type = library_type("numpy", "ndarray")
    if array_type is not None and is_instance(item, array_type):
        item = owner_of(array_type, item)
        return watch(item) if not is_instance(item, array_type) else WatchedArray(item)
    reference = weakref.ref(item)
    return lambda: reference() is not None


Place = tuple[int, int, int]


def place_of(array: Any) -> Place:
    """Return what tells an array from others that are alive: its identity, and where its memory begins and ends."""
    read = library_type("numpy", "ndarray").__dict__
    start = int(read["__array_interface__"].__get__(array)["data"][0])
    return id(array), start, start + int(read["nbytes"].__get__(array))


class WatchedArray:
    """Says whether the memory of an array is still alive, without keeping it so.

    NumPy resizes no array that somebody refers to weakly. So we do that only until ``let_go``, while none of the user's
    code runs. From then on ``look`` has to be told which arrays there are.
    """

    def __init__(self, array: Any) -> None:
        self._reference: weakref.ref[Any] | None = weakref.ref(array)
        self._place = place_of(array)
        self._is_alive = True

    def __call__(self) -> bool:
        """Whether it is."""
        return self._is_alive if self._reference is None else self._reference() is not None

    def let_go(self, places: Container[Place]) -> None:
        """Refer to it no more if it is at one of ``places``, where ``look`` finds it again: the user's code goes on."""
        if self._place in places:
            self._is_alive, self._reference = self(), None

    def look(self, places: Container[Place]) -> None:
        """See whether it is among the arrays at ``places``; another one that took its place is not told from it."""
        if self._reference is None:
            self._is_alive = self._place in places


class _WeakStorage:
    """A weak reference to a storage of torch. torch's own has a finaliser, and cannot itself be referred to weakly."""

    def __init__(self, storage: Any) -> None:
        self._kind: Any = type(storage)
        self._key = storage._weak_ref()

    def is_alive(self) -> bool:
        return not self._kind._expired(self._key)

    def __del__(self) -> None:
        if hasattr(self, "_key"):
            self._kind._free_weak_ref(self._key)
