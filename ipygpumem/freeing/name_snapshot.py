"""Records the objects of names, to detect later whether one is still alive without its name, as garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, compress, repeat
from operator import is_
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.objects.arrays import library_type, watch
from ipygpumem.objects.garbage import weak
from ipygpumem.scopes.scope import is_ownable

_Seen = weakref.ref[object] | int | tuple[int, Callable[[], bool]]


class NameSnapshot:
    """The objects of all names at one moment; detects later whether one may be still alive without its name.

    Dead objects may leave objects behind in reference cycles, except tensors, which refer to nothing. It keeps no
    object alive, and does not cover objects that only other objects refer to.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        now = dict(namespace)  # one object, where a list of 100,000 pairs makes the collector examine them
        leading = chain(compress(now.items(), map(gc.is_tracked, now.values())), _arrays_of_objects(now))
        tensor_type = library_type("torch", "Tensor")
        self._values = {name: _seen(value, tensor_type) for name, value in leading if is_ownable(name)}

    def some_may_live_on(self, namespace: dict[str, Any]) -> bool:
        """Return True if an object has lost its name, and it or an object that it referred to may be still alive."""
        return any(_lingers(value, namespace.get(name)) for name, value in self._values.items())


def _arrays_of_objects(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the object arrays, which the collector does not look into."""
    array_type: Any = library_type("numpy", "ndarray")
    if array_type is not None:
        arrays = compress(names.items(), map(is_, map(type, names.values()), repeat(array_type)))
        yield from ((name, array) for name, array in arrays if array.dtype.hasobject)


def _seen(value: object, tensor_type: type | None) -> _Seen:
    if tensor_type is not None and is_instance(value, tensor_type):
        return id(value), watch(value)
    array_type = library_type("numpy", "ndarray")
    if array_type is not None and is_instance(value, array_type):
        return id(value)  # NumPy does not resize an array that has weak references
    return weak(value) or id(value)


def _lingers(earlier: _Seen, now: object) -> bool:
    if isinstance(earlier, int):
        return earlier != id(now)
    if isinstance(earlier, tuple):
        return earlier[0] != id(now) and earlier[1]()
    item = earlier()
    return item is None or item is not now
