"""Watches the memory of tensors and arrays without keeping it alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container
from typing import Any

from ipygpumem.heap.kinds.arrays import (
    Span,
    is_array,
    is_of_library,
    is_on_closed_map,
    owner_of,
    place_of,
)
from ipygpumem.heap.kinds.tensors import Storages, reader_of


def watch(item: object) -> Callable[[], bool]:
    """Return a function that returns True as long as the memory of a tensor or array is alive; the
    function does not keep it alive.

    A view that survives keeps its storage alive, so the storage is watched and not the object. An
    object without a storage, such as a sparse tensor, is watched itself.
    """
    if is_of_library(item, "torch", "Tensor"):
        torch: Any = sys.modules["torch"]
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
        ):  # no mode of the user, such as a profiler, sees the calls
            storages = Storages()
            without_storage = storages.add_of(reader_of(torch), [item])
            if not without_storage:
                return storages.any_alive
    if is_array(item):
        item = owner_of(item)
        if is_array(item):
            return WatchedNumpyArray(item)
        return watch(item)
    reference = weakref.ref(item)
    return lambda: reference() is not None


class WatchedNumpyArray:
    """Checks if the memory of an array is still alive, without keeping it alive.

    NumPy refuses to resize an array that has weak references. So the weak reference exists only
    until ``detach``, while no user code runs. After that, call ``update`` with the arrays that are
    alive.
    """

    __slots__ = ("_is_alive", "_place", "_reference")  # an experiment may watch a million arrays

    def __init__(self, array: Any) -> None:
        self._reference: weakref.ref[Any] | None = weakref.ref(array)
        self._place: Span | None = None
        self._is_alive = True

    @property
    def place(self) -> Span | None:
        """The array's place in memory; None if it died before anything asked for this."""
        if self._place is None and self._reference is not None:
            array = self._reference()
            self._place = None if array is None else place_of(array)
        return self._place

    def __call__(self) -> bool:
        """Return True if the memory is still alive."""
        if self._reference is None:
            return self._is_alive
        array = self._reference()
        return array is not None and not is_on_closed_map(array)

    def detach(self, places: Container[Span | None]) -> None:
        """Drop the weak reference before user code runs, if the array is at one of ``places``,
        where ``update`` will look for it.
        """
        if self.place in places:
            self._is_alive = self()
            self._reference = None

    def update(self, places: Container[Span | None]) -> None:
        """Check whether the array is still at one of ``places``; a new array at the same place is
        mistaken for it.
        """
        if self._reference is None:
            self._is_alive = self._place in places
