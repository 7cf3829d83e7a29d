"""Watches the memory of tensors and arrays without keeping it alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container
from typing import Any

from ipygpumem.heap.kinds.arrays import (
    ArraySpan,
    is_array,
    is_of_library,
    is_on_closed_map,
    owner_of,
    span_of,
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

    __slots__ = ("_is_alive", "_reference", "_span")  # an experiment may watch a million arrays

    def __init__(self, array: Any) -> None:
        self._reference: weakref.ref[Any] | None = weakref.ref(array)
        self._span: ArraySpan | None = None
        self._is_alive = True

    @property
    def span(self) -> ArraySpan | None:
        """The array's addresses; None if it died before anything asked for them."""
        if self._span is None and self._reference is not None:
            array = self._reference()
            self._span = None if array is None else span_of(array)
        return self._span

    def __call__(self) -> bool:
        """Return True if the memory is still alive."""
        if self._reference is None:
            return self._is_alive
        array = self._reference()
        return array is not None and not is_on_closed_map(array)

    def detach(self, spans: Container[ArraySpan | None]) -> None:
        """Drop the weak reference before user code runs, if the array has one of ``spans``,
        where ``update`` will look for it.
        """
        if self.span in spans:
            self._is_alive = self()
            self._reference = None

    def update(self, spans: Container[ArraySpan | None]) -> None:
        """Check whether the array is still at one of ``spans``; a new array at the same addresses
        is mistaken for it.
        """
        if self._reference is None:
            self._is_alive = self._span in spans
