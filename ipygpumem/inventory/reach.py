"""The NumPy arrays that some objects lead to: a walk forward, many objects at a time, up to a limit.

The collector does not list arrays. To look behind all that it lists takes three times as long as to follow what a
notebook can name, so that is followed: containers, attributes, closures, classes of the user's, DataFrames.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, compress, islice
from typing import Any

from ipygpumem.arrays import TOOLS, flat_elements, library_type
from ipygpumem.columns import CHUNK, chunks, identities
from ipygpumem.kinds import is_kind, module_dict, module_of, text_of
from ipygpumem.whose import is_users_module

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
_MANY = 20_000
"""A container of more comes last: a list of a million must not hide what is beside it. If so many of its items in a row
are plain numbers and the like, all of them are taken to be."""
_SIZED = {id(kind) for kind in (list, tuple, dict, set, frozenset)}


class Reach:
    """The arrays behind a notebook's names, in the modules among them, and in all modules of the user's.

    It keeps them alive: use it, then drop it.

    Attributes:
        arrays: each once.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 50_000
    """How many objects that are no arrays are looked into, of those that are not in an installed module."""
    _MOST_INSTALLED = 300
    """How many in each module that was installed: such a module has its data on top, if at all."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.arrays: list[Any] = []
        self.complete = True
        modules = [(name, item) for name, item in list(sys.modules.items()) if is_kind(item, types.ModuleType)]
        users = [
            (name, item) for name, item in modules if name.partition(".")[0] not in TOOLS and is_users_module(item)
        ]
        self._users = {"__main__", *(name for name, _ in users)}
        self._array_type: Any = library_type("numpy", "ndarray")
        self._seen = {id(namespace), *(id(module_dict(module)) for _, module in modules)}
        """Identities of what is not entered any more, namespaces first: what lies in them belongs to everybody."""
        self._known: set[int] = set()
        self._entered: list[list[object]] = []
        """As long as they live here, no identity can come to mean something new."""
        self._left = 0
        self._types: set[int] = set()
        self._wanted: set[int] = set()
        """Identities of the types whose objects may lead to arrays."""
        self._classes: set[int] = set()
        self._array_types: set[int] = set()
        if self._array_type is None:
            return
        named = list(namespace.values())
        own = [list(module_dict(module).values()) for _, module in users]
        self._walk(list(chain(named, *own)), self.MOST_OBJECTS)
        complete = self.complete
        for module in {id(item): item for item in named if is_kind(item, types.ModuleType)}.values():
            self._walk(list(module_dict(module).values()), self._MOST_INSTALLED)
        self.complete = complete

    def drop(self) -> None:
        """Let go of all objects."""
        self.arrays.clear()
        self._entered.clear()

    def _walk(self, values: list[object], most: int) -> None:
        self._left = most
        waiting, long = deque([self._enter([values], self._left)]), deque[Any]()
        while waiting or long:
            if not waiting:
                waiting.append(self._enter(_pieces(long.popleft()), self._left // (len(long) + 1)))
            for some in chunks(waiting.popleft(), _AT_ONCE):
                sized: list[Any] = list(compress(some, map(_SIZED.__contains__, map(id, map(type, some)))))
                later = {id(item): item for item, size in zip(sized, map(len, sized), strict=True) if size > _MANY}
                long += later.values()
                short = [item for item in some if id(item) not in later] if later else some
                waiting.append(self._enter([gc.get_referents(*short)], self._left))

    def _enter(self, pieces: Iterable[list[Any]], most: int) -> list[object]:
        """Note the arrays in ``pieces``, and return at most so many that may lead to more and were not seen before."""
        found: list[object] = []
        alike = 0
        for some in pieces:
            known = len(self.arrays)
            new = self._sift(some)
            if len(found) + len(new) > most:
                self.complete = False
            found += new[: most - len(found)]
            alike = 0 if len(self.arrays) > known or (new and len(found) < most) else alike + len(some)
            if alike >= _MANY:
                break
        self._left -= len(found)
        self._entered.append(found)
        return found

    def _sift(self, items: list[Any]) -> list[object]:
        """Note the arrays among ``items``, and return what may lead to more and was not seen before."""
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
        by_key = dict(zip(identities(arrays), arrays, strict=True))
        new = list(map(by_key.__getitem__, by_key.keys() - self._known))
        self._known |= by_key.keys()
        self.arrays += new
        read: Any = self._array_type.__dict__["dtype"].__get__
        dtypes = list(map(read, new))
        several = {id(dtype): dtype for dtype in dtypes}
        leading = {key for key, dtype in several.items() if dtype.hasobject}
        found: list[object] = [array for array in new if gc.is_tracked(array)]
        for array in compress(new, [id(dtype) in leading for dtype in dtypes]) if leading else ():
            inside = flat_elements(array)
            self.complete &= inside is not None
            found += self._sift(inside or [])
        return found


def _pieces(container: Any) -> Iterator[list[Any]]:
    """Yield what a list, tuple, dict or set holds, some at a time."""
    if type(container) is list or type(container) is tuple:
        yield from chunks(container)
        return
    items = chain.from_iterable(container.items()) if type(container) is dict else iter(container)
    with contextlib.suppress(RuntimeError):  # a thread changes it while we look
        while some := list(islice(items, CHUNK)):
            yield some
