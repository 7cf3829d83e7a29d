"""The NumPy arrays that some objects lead to: a walk forward, many objects at a time, up to a limit.

The collector does not list arrays. To look behind all that it lists takes three times as long as to follow what a
notebook can name, so that is followed: containers, attributes, closures, classes of the user's, DataFrames.
"""

from __future__ import annotations

import gc
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

from ipygpumem.arrays import TOOLS, elements, library_type
from ipygpumem.kinds import is_kind, module_dict, module_of, text_of

_NOT_ENTERED = (
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.BuiltinFunctionType,
)
_HAS_REFERENCES = 1 << 14
"""Py_TPFLAGS_HAVE_GC: objects of other types refer to nothing."""
_AT_ONCE = 500
_MANY = 5000
"""So many objects behind a few come last: a list of a million must not hide what is beside it."""


class Reach:
    """What is found behind ``values``; it keeps all of that alive: use it, then drop it.

    Attributes:
        arrays: by identity.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 50_000
    """How many objects that are no arrays are looked into."""
    LONGEST = 1_000_000
    """How many items of one container, or of a few together, are looked at."""

    def __init__(self, values: Iterable[object]) -> None:
        self.arrays: dict[int, Any] = {}
        self.complete = True
        self._array_type: Any = library_type("numpy", "ndarray")
        self._seen = {id(module_dict(module)) for module in _modules().values()}
        """Identities of what is not entered any more, namespaces first: what lies in them belongs to everybody."""
        self._users = {"__main__", *_users_modules()}
        self._entered: list[list[object]] = []
        """As long as they live here, no identity can come to mean something new."""
        self._types: set[int] = set()
        self._wanted: set[int] = set()
        """Identities of the types whose objects may lead to arrays."""
        self._classes: set[int] = set()
        self._array_types: set[int] = set()
        self._object_dtypes: dict[int, bool] = {}
        if self._array_type is not None:
            self._walk(list(values))

    def drop(self) -> None:
        """Let go of all objects."""
        self.arrays.clear()
        self._entered.clear()

    def _walk(self, values: list[object]) -> None:
        waiting, later = deque([self._sift(values)]), deque[list[object]]()
        left = self.MOST_OBJECTS
        while waiting or later:
            level = waiting.popleft() if waiting else later.popleft()
            if len(level) > left:
                self.complete = False
                del level[left:]
            left -= len(level)
            self._entered.append(level)
            for start in range(0, len(level), _AT_ONCE):
                found = self._sift(gc.get_referents(*level[start : start + _AT_ONCE]))
                (later if len(found) > _MANY else waiting).append(found)

    def _sift(self, items: list[Any]) -> list[object]:
        """Note the arrays among ``items``, and return what may lead to more and was not seen before."""
        if len(items) > self.LONGEST:
            self.complete = False
            del items[self.LONGEST :]
        kinds = list(map(id, map(type, items)))
        several = set(kinds)
        if not several <= self._types:
            new = {kind: item for kind, item in zip(kinds, items, strict=True) if kind not in self._types}
            for kind, item in new.items():
                self._classify(kind, item)
        found: list[object] = []
        if not self._wanted.isdisjoint(several):
            found += self._new(compress(items, map(self._wanted.__contains__, kinds)))
        if not self._classes.isdisjoint(several):
            classes = self._new(compress(items, map(self._classes.__contains__, kinds)))
            found += [item for item in classes if self._is_users_class(item)]
        if not self._array_types.isdisjoint(several):
            found += self._take(list(compress(items, map(self._array_types.__contains__, kinds))))
        return found

    def _classify(self, kind: int, item: object) -> None:
        self._types.add(kind)
        if is_kind(item, self._array_type):
            self._array_types.add(kind)
        elif is_kind(item, type):
            self._classes.add(kind)
        elif (
            type.__dict__["__flags__"].__get__(type(item)) & _HAS_REFERENCES
            and not any(is_kind(item, base) for base in _NOT_ENTERED)
            and module_of(item).partition(".")[0] not in TOOLS
        ):
            self._wanted.add(kind)

    def _is_users_class(self, kind: object) -> bool:
        return text_of(type.__dict__["__dict__"].__get__(kind).get("__module__")) in self._users

    def _new(self, items: Iterable[object]) -> list[object]:
        found = {id(item): item for item in items}
        new = found.keys() - self._seen
        self._seen |= new
        return list(found.values()) if len(new) == len(found) else [found[key] for key in found if key in new]

    def _take(self, arrays: list[Any]) -> list[object]:
        """Note arrays, and return what may lead to more: attributes of a subclass, elements that are objects."""
        new = {id(array): array for array in arrays if id(array) not in self.arrays}
        self.arrays.update(new)
        read: Any = self._array_type.__dict__["dtype"].__get__
        dtypes = list(map(read, new.values()))
        several = {id(dtype): dtype for dtype in dtypes}
        leading = {key for key, dtype in several.items() if dtype.hasobject}
        found: list[object] = [array for array in new.values() if gc.is_tracked(array)]
        for array in compress(new.values(), [id(dtype) in leading for dtype in dtypes]) if leading else ():
            inside = elements(array)
            self.complete &= inside is not None
            found += self._sift(_flat(inside or []))
        return found


def _flat(items: list[Any]) -> list[Any]:
    """Return the elements of nested lists, as an array of objects in several dimensions gives them."""
    while items and all(type(item) is list for item in items):
        items = [part for item in items for part in item]
    return items


def values_of(namespace: dict[str, Any]) -> Iterator[object]:
    """Yield what a notebook's names refer to, what is in the modules among them, and in all modules of the user's."""
    named = list(namespace.values())
    yield from named
    found = {id(item): item for item in named if is_kind(item, types.ModuleType)}
    found.update((id(module), module) for module in _users_modules().values())
    for module in found.values():
        yield from list(module_dict(module).values())


def _modules() -> dict[str, types.ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if is_kind(module, types.ModuleType)}


def _users_modules() -> dict[str, types.ModuleType]:
    """Return the modules that are not Python's own and were not installed: from files elsewhere, or made by hand."""
    paths = sysconfig.get_paths()
    places = (*map(paths.__getitem__, ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages())

    def is_users(names: dict[str, Any]) -> bool:
        file = text_of(names.get("__file__"))
        return not file.startswith(places) if file else names.get("__spec__") is None

    return {name: module for name, module in _modules().items() if is_users(module_dict(module))}
