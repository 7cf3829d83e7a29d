"""Finds the NumPy arrays behind some objects: walks forward, many objects at a time, up to a limit.

The collector does not list arrays. To look behind all that it lists takes three times as long as to follow what a
notebook can name, so that is followed: containers, attributes, closures, classes of the user's, DataFrames.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, compress, islice
from typing import Any

from ipygpumem.introspect import (
    HAS_REFERENCES,
    class_dict,
    is_instance,
    module_dict,
    module_of,
    named_objects,
    text_of,
    users_modules,
)
from ipygpumem.objects.arrays import NOT_ENTERED, TOOLS, flat_elements, library_type
from ipygpumem.objects.bulk import CHUNK, by_identity, chunks, of_types, one_of_each, types_of

_AT_ONCE = 500
_MANY = 20_000
"""A container of more comes last: a list of a million must not hide what is beside it. If so many of its items in a row
are plain numbers and the like, all of them are taken to be."""
_BARREN = 5_000
"""If so many objects behind such a container's items, in a row, lead to no array, the rest of it is left out."""
_FUNCTION = id(types.FunctionType)
_SIZED = {id(kind) for kind in (list, tuple, dict, set, frozenset)}


class Reach:
    """The arrays behind a notebook's names, in the modules among them, and in all modules of the user's.

    It keeps them alive: use it, then drop it. Of a container of very many items the first ones are followed, and more
    as long as some of them lead to arrays. The others are left out: ``complete`` is False then, unless what was seen of
    them are plain numbers and the like.

    Attributes:
        arrays: each once.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 50_000
    """How many objects that are no arrays are looked into, of those that are not in an installed module."""
    _MOST_INSTALLED = 300
    """How many in each module that was installed: such a module has its data on top, if at all; not in functions."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.arrays: list[Any] = []
        self.complete = True
        own = users_modules()
        self._users = {"__main__", *own}
        self._array_type: Any = library_type("numpy", "ndarray")
        self._seen = set(map(id, [namespace, *map(module_dict, own.values())]))
        """Of what is not entered any more, namespaces first: what lies in them belongs to everybody."""
        self._known: set[int] = set()
        self._entered: list[list[object]] = []
        """As long as they live here, no identity can come to mean something new."""
        self._left = self.MOST_OBJECTS
        self._types: set[int] = set()
        self._wanted: set[int] = set()
        """Identities of the types whose objects may lead to arrays."""
        self._classes: set[int] = set()
        self._modules: set[int] = set()
        self._array_types: set[int] = set()
        self._long: deque[Any] = deque()
        """Containers of many items."""
        if self._array_type is None:
            return
        named: list[Any] = [value for _, value in named_objects(namespace)]
        others = {id(names): names for names in map(module_dict, own.values()) if names is not namespace}
        self._walk([*named, *(value for names in others.values() for _, value in named_objects(names))])
        complete = self.complete
        parts = [part for part in chunks(named) if not self._modules.isdisjoint(types_of(part))]
        modules = [module for part in parts for module in of_types(self._modules, part)]
        for module in by_identity(modules).values():
            self._left = self._MOST_INSTALLED
            self._walk([item for item in list(module_dict(module).values()) if type(item) is not types.FunctionType])
        self.complete = complete

    def drop(self) -> None:
        """Let go of all objects."""
        self.arrays.clear()
        self._entered.clear()

    def _walk(self, values: list[Any]) -> None:
        """Follow ``values`` up to the limit, long containers last."""
        self._follow([item for part in chunks(values) for item in self._enter(part, self._left)])
        while self._long:
            self._go_through(self._long.popleft(), self._left // (len(self._long) + 1))

    def _follow(self, objects: list[object]) -> None:
        waiting = deque([objects])
        while waiting:
            for some in chunks(waiting.popleft(), _AT_ONCE):
                sized: list[Any] = of_types(_SIZED, some)
                later = {id(item): item for item, size in zip(sized, map(len, sized), strict=True) if size > _MANY}
                self._long += later.values()
                short = [item for item in some if id(item) not in later] if later else some
                waiting.append(self._enter(gc.get_referents(*short), self._left))

    def _go_through(self, container: Any, most: int) -> None:
        """Follow the items of a long container, as long as arrays are among them or behind them."""
        plain = barren = 0
        for some in _pieces(container):
            known, left = len(self.arrays), self._left
            self._follow(self._enter(some, most))
            most -= left - self._left
            if len(self.arrays) > known:
                plain = barren = 0
                continue
            plain += len(some) if left == self._left else 0
            barren += left - self._left
            self.complete &= barren < _BARREN
            if plain >= _MANY or barren >= _BARREN:
                return

    def _enter(self, items: Sequence[Any], most: int) -> list[object]:
        """Note the arrays among ``items``, and return at most so many others that may lead to more."""
        leading = self._sift(items)
        if len(leading) > most:
            self.complete = False
            del leading[max(0, most) :]
        self._left -= len(leading)
        self._entered.append(leading)
        return leading

    def _sift(self, items: Sequence[Any]) -> list[object]:
        """Note the arrays among ``items``, and return what may lead to more and was not seen before."""
        several = types_of(items)
        if not several <= self._types:
            for kind, item in one_of_each(items).items():
                if kind not in self._types:
                    self._classify(kind, item)
        leading: list[object] = []
        if _FUNCTION in several:
            self._seen.update(id(function.__globals__) for function in of_types({_FUNCTION}, items))
        if not self._wanted.isdisjoint(several):
            leading += self._new(of_types(self._wanted, items))
        if not self._classes.isdisjoint(several):
            leading += filter(self._is_users_class, self._new(of_types(self._classes, items)))
        if not self._array_types.isdisjoint(several):
            leading += self._take(of_types(self._array_types, items))
        return leading

    def _classify(self, kind: int, item: object) -> None:
        self._types.add(kind)
        if is_instance(item, self._array_type):
            self._array_types.add(kind)
        elif is_instance(item, type):
            self._classes.add(kind)
        elif is_instance(item, types.ModuleType):
            self._modules.add(kind)
        elif (
            type.__dict__["__flags__"].__get__(type(item)) & HAS_REFERENCES
            and not any(is_instance(item, base) for base in NOT_ENTERED)
            and module_of(item).partition(".")[0] not in TOOLS
        ):
            self._wanted.add(kind)

    def _is_users_class(self, kind: object) -> bool:
        return text_of(class_dict(kind).get("__module__")) in self._users

    def _new(self, items: list[object]) -> list[object]:
        by_key = by_identity(items)
        new = by_key.keys() - self._seen
        self._seen |= new
        return list(by_key.values()) if len(new) == len(by_key) else [by_key[key] for key in by_key if key in new]

    def _take(self, arrays: list[Any]) -> list[object]:
        """Note arrays, and return what may lead to more: attributes of a subclass, elements that are objects."""
        by_key = by_identity(arrays)
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


def _pieces(container: Any) -> Iterator[Sequence[Any]]:
    """Yield what a list, tuple, dict or set holds, some at a time."""
    if type(container) is list or type(container) is tuple:
        yield from chunks(container)
        return
    items = chain.from_iterable(container.items()) if type(container) is dict else iter(container)
    with contextlib.suppress(RuntimeError):  # a thread changes it while we look
        while some := list(islice(items, CHUNK)):
            yield some
