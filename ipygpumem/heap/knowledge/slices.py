"""Finds the memoryviews to which objects of Cython refer without telling the collector.

A class that Cython compiles may have slices, such as ``double[:, ::1] data`` of scikit-learn's
``KDTree``. Each begins with a pointer to a memoryview in the object's C struct; all slices of a
memoryview share one reference to it. No code of the user runs, and only the struct itself is read:
a pointer counts if a memoryview is at its address.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ipygpumem.heap.bulk import Batch, by_identity, chunks, of_types, one_of_each
from ipygpumem.heap.kinds.structs import IS_KNOWN, fields_of
from ipygpumem.introspect import class_dict, mro_of, name_of

T = TypeVar("T")

_CLASS_ATTRIBUTES = ("__pyx_vtable__", "__reduce_cython__")
"""Attributes of classes, of which Cython gives each class one or both."""
_VIEWS = ("memoryview", "_memoryviewslice")
"""Names of Cython's classes of memoryviews; older versions give each library its own."""
_BYTES_OF_SLICE = 208
"""Bytes of a slice: the memoryview, its data, and three numbers for each of eight dimensions."""
_FIELD = ctypes.sizeof(ctypes.c_size_t)
"""Bytes of a pointer in a C struct."""
_SIZE_OF: Callable[[Any], int] = vars(type)["__basicsize__"].__get__
"""Returns the bytes of the C struct of a class's instances."""


def may_have_slices(kind: type) -> bool:
    """Return True for a class that Cython has compiled, and whose struct has room for a slice."""
    if not IS_KNOWN or _SIZE_OF(kind) < object.__basicsize__ + _BYTES_OF_SLICE:
        return False
    return _is_of_cython(kind)


def having_slices(items: Sequence[T]) -> list[T]:
    """Return the objects of which ``may_have_slices`` is True."""
    types = set[int]()
    for type_id, example in one_of_each(items).items():
        if may_have_slices(type(example)):
            types.add(type_id)
    return of_types(types, items) if types else []


def _is_of_cython(kind: type) -> bool:
    """Return True for a class that Cython has compiled, or that derives from one."""
    for base in mro_of(kind):
        attributes = class_dict(base)
        if any(name in attributes for name in _CLASS_ATTRIBUTES):
            return True
    return False


def is_view(item: object) -> bool:
    """Return True for a memoryview of Cython."""
    kind = type(item)
    return kind is not memoryview and name_of(kind) in _VIEWS and _is_of_cython(kind)


class Slices:
    """Finds the memoryviews to which objects refer by slices.

    It passes over the heap once, when it is first asked, and keeps all memoryviews alive: use it,
    then drop it.
    """

    def __init__(self) -> None:
        self._views: dict[int, object] | None = None

    def of(self, items: Sequence[Any]) -> list[object]:
        """Return the memoryviews to which objects refer by slices, once for each reference."""
        with_slices = having_slices(items)
        if not with_slices:
            return []
        if self._views is None:
            self._views = _live_views()
        views = list[object]()
        for item in with_slices:
            views += views_among(item, self._views).values()
        return views


def views_among(item: Any, views: Mapping[int, object]) -> dict[int, object]:
    """Return the memoryviews to which an object of Cython refers by slices, by their identities.

    Args:
        item: the object.
        views: the memoryviews to look for, by their identities.
    """
    number_of_fields = (_SIZE_OF(type(item)) - object.__basicsize__) // _FIELD
    view_ids = views.keys() & set(fields_of(item, number_of_fields))
    if view_ids:  # the object may also have memoryviews as attributes, which the collector reports
        view_ids -= set(map(id, gc.get_referents(item)))
    return {view_id: views[view_id] for view_id in view_ids}


def _live_views() -> dict[int, object]:
    """Return all memoryviews of Cython, by identity."""
    views = dict[int, object]()
    examined_types = set[int]()
    view_types = set[int]()
    for chunk in chunks(gc.get_objects()):
        batch = Batch(chunk)
        new_types = batch.types - examined_types
        examined_types |= new_types
        for type_id, example in batch.one_of_each(new_types).items():
            if is_view(example):
                view_types.add(type_id)
        views.update(by_identity(batch.of_types(view_types)))
    return views
