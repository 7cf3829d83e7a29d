"""Records the objects of names, to detect later whether one is still alive without its name, as garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator
from itertools import chain, compress, repeat
from operator import is_, is_not, ne
from typing import Any

from ipygpumem.heap.arrays import library_type, watch
from ipygpumem.heap.bulk import one_of_each
from ipygpumem.heap.garbage import weak
from ipygpumem.introspect import is_instance
from ipygpumem.scope.scope import ownable

_GONE = object()
"""Stands for the object of a name that has been deleted."""


class NameSnapshot:
    """The objects of all names at one moment; detects later whether one may be still alive without its name.

    Dead objects may leave objects behind in reference cycles, except tensors, which refer to nothing. It keeps no
    object alive, and does not cover objects that only other objects refer to. There may be 100,000 names: only
    tensors cost a Python call each.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        now = dict(namespace)  # one object, where a list of 100,000 pairs makes the collector examine them
        names = ownable(chain(compress(now, map(gc.is_tracked, now.values())), _arrays_of_objects(now)))
        values = list(map(now.__getitem__, names))
        kinds, tensor_type = one_of_each(values), library_type("torch", "Tensor")
        array_type = library_type("numpy", "ndarray")  # NumPy does not resize an array that has weak references
        tensors = {kind for kind, one in kinds.items() if tensor_type is not None and is_instance(one, tensor_type)}
        arrays = {kind for kind, one in kinds.items() if array_type is not None and is_instance(one, array_type)}
        weakly = {kind for kind, one in kinds.items() if weak(one) is not None} - tensors - arrays
        self._tensors = {name: (id(value), watch(value)) for name, value in _of_kinds(tensors, names, values)}
        self._weakly = {name: weakref.ref(value) for name, value in _of_kinds(weakly, names, values)}
        self._others = {name: id(value) for name, value in _of_kinds(kinds.keys() - tensors - weakly, names, values)}

    def some_may_live_on(self, namespace: dict[str, Any]) -> bool:
        """Return True if an object has lost its name, and it or an object that it referred to may be still alive."""
        if any(map(ne, self._others.values(), map(id, map(namespace.get, self._others, repeat(_GONE))))):
            return True
        alive = list(map(weakref.ref.__call__, self._weakly.values()))
        now = map(namespace.get, self._weakly, repeat(_GONE))
        if any(map(is_, alive, repeat(None))) or any(map(is_not, alive, now)):
            return True
        return any(
            earlier != id(namespace.get(name)) and is_alive() for name, (earlier, is_alive) in self._tensors.items()
        )


def _of_kinds(kinds: Collection[int], names: list[str], values: list[Any]) -> Iterator[tuple[str, Any]]:
    """Return the names and values of these types, by the types' identities."""
    return compress(zip(names, values, strict=True), map(kinds.__contains__, map(id, map(type, values))))


def _arrays_of_objects(names: dict[str, Any]) -> list[str]:
    """Return the names of object arrays, which the collector does not look into."""
    array_type: Any = library_type("numpy", "ndarray")
    if array_type is None:
        return []
    arrays = compress(names.items(), map(is_, map(type, names.values()), repeat(array_type)))
    return [name for name, array in arrays if array.dtype.hasobject]
