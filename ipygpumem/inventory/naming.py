"""The names of tensors and arrays: a walk forward from namespaces, through attributes and containers.

No code of the user's runs: attributes are read from instance dicts and slots, containers through their base class.
Modules, and classes from elsewhere, are not entered: what lies behind them belongs to everybody.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice, repeat
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from ipygpumem.arrays import elements, library_type, slots
from ipygpumem.kinds import instance_dict, is_kind, key_text, text_of, type_name

_COLLAPSED = ("_parameters", "_buffers", "_modules")
"""Dicts of torch's modules that users never write: ``model.weight`` is in one of them."""
_CONTAINERS: tuple[tuple[type, str], ...] = (
    (list, "sequence"),
    (tuple, "sequence"),
    (deque, "sequence"),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "set"),
    (FunctionType, "function"),
    (MethodType, "method"),
    (functools.partial, "partial"),
    (CellType, "cell"),
    (type, "class"),
)

_NOT_ENTERED = (ModuleType, FrameType, CodeType, TracebackType, BuiltinFunctionType)

Label = Callable[[int], str]


class Names:
    """Finds arrays under names; each is found once, by its shortest path.

    Attributes:
        arrays: the tensors and arrays that were found.
        names: the path of each.
        roots: the name that each path begins with.
        complete: False if the walk ended before it had seen everything.
    """

    MOST_OBJECTS = 300_000
    """How many objects that are no arrays are looked into."""
    LONGEST = 10_000_000
    """How many items of one container are looked at."""

    def __init__(self) -> None:
        self.arrays: list[object] = []
        self.names: list[str] = []
        self.roots: list[str] = []
        self.complete = True
        self._entered: list[object] = []  # as long as they live here, no identity can come to mean something new
        self._seen: set[int] = set()
        self._places: dict[int, int] = {}
        self._how: dict[int, str] = {}
        """By a type's identity: ``tensor``, ``ndarray``, ``skip``, or how to look into its objects."""
        self._queue: deque[tuple[object, str, str]] = deque()
        bases = (("torch", "Tensor", "tensor"), ("numpy", "ndarray", "ndarray"), ("torch.nn", "Module", "module"))
        found = [(library_type(module, name), how) for module, name, how in bases]
        self._bases: list[tuple[type, str]] = [(base, how) for base, how in found if base is not None]

    def walk(self, roots: Iterable[tuple[str, object]]) -> None:
        """Find what is behind ``roots``, names and their objects, those that are reached first by the fewest steps."""
        for name, value in roots:
            self._take([value], [name].__getitem__, name)
        while self._queue:
            if len(self._entered) >= self.MOST_OBJECTS:
                self.complete = False
                self._queue.clear()
                return
            item, path, root = self._queue.popleft()
            try:
                self._enter(item, path, root)
            except RuntimeError:  # a thread changes a container while we look: its other items go unnamed
                self.complete = False

    # -- what to do with an object ----------------------------------------------------------------------------

    def _take(self, items: Sequence[object], label: Label, root: str) -> None:
        """Note the arrays among ``items`` and queue what may lead to more; most items are neither."""
        kinds = list(map(id, map(type, items)))
        for kind, item in dict(zip(kinds, items, strict=True)).items():
            if kind not in self._how:
                self._how[kind] = self._way(item)
        arrays = {kind for kind in set(kinds) if self._how[kind] in ("tensor", "ndarray")}
        others = {kind for kind in set(kinds) if self._how[kind] != "skip"} - arrays
        before = len(self.arrays)
        if arrays:
            self._take_arrays(items, list(compress(range(len(items)), map(arrays.__contains__, kinds))), label, root)
        self._queue_arrays(before)
        for position in compress(range(len(items)), map(others.__contains__, kinds)) if others else ():
            if id(items[position]) not in self._seen:
                self._seen.add(id(items[position]))
                self._queue.append((items[position], label(position), root))

    def _take_arrays(self, items: Sequence[object], positions: list[int], label: Label, root: str) -> None:
        found = [items[position] for position in positions]
        new = set(map(id, found))
        if len(new) == len(found) and self._seen.isdisjoint(new):  # nearly always, and there may be a million
            self._seen |= new
            self.arrays += found
            self.names += map(label, positions)
            self.roots += repeat(root, len(found))
            return
        for position, item in zip(positions, found, strict=True):
            if id(item) not in self._seen:
                self._seen.add(id(item))
                self.arrays.append(item)
                self.names.append(label(position))
                self.roots.append(root)

    def _way(self, item: object) -> str:
        if any(is_kind(item, kind) for kind in _NOT_ENTERED):
            return "skip"
        ways = (how for base, how in (*self._bases, *_CONTAINERS) if is_kind(item, base))
        how = next(ways, "object")
        if how == "object" and not type.__dict__["__flags__"].__get__(type(item)) & _HAS_REFERENCES:
            return "skip"
        return how

    def _queue_arrays(self, start: int) -> None:
        """Queue those of the new arrays that have attributes, or objects for elements."""
        new = self.arrays[start:]
        ndarrays = {kind for kind, how in self._how.items() if how == "ndarray"}
        if len(gc.get_referents(*new)) == len(new) and ndarrays.isdisjoint(map(id, map(type, new))):
            return  # tensors of which each leads to its type alone: a million of them costs nothing here
        for place, item in enumerate(new, start):
            if elements(item) is not None or len(gc.get_referents(item)) > 1:
                self._queue.append((item, self.names[place], self.roots[place]))

    def _enter(self, item: object, path: str, root: str) -> None:
        self._entered.append(item)
        kind = id(type(item))
        how = self._how[kind]
        if how == "sequence":
            self._sequence(item, path, root)
        elif how == "dict":
            self._dict(item, path, root)
        elif how == "set":
            base: Any = set if is_kind(item, set) else frozenset
            self._take(list(islice(base.__iter__(item), self.LONGEST)), lambda position: f"{path}{{…}}", root)
        elif how == "class":
            if text_of(_class_dict(item).get("__module__")) == "__main__":
                self._attributes(dict(_class_dict(item)), path, root)
        elif how == "ndarray" and (found := elements(item)) is not None:
            self._entered.append(found)
            self._sequence(found, path, root)
        else:
            self._object(item, path, root, is_module=how == "module")

    # -- what is inside ---------------------------------------------------------------------------------------

    def _sequence(self, item: object, path: str, root: str) -> None:
        base: Any = next(base for base in (list, tuple, deque) if is_kind(item, base))
        found = list(islice(base.__iter__(item), self.LONGEST))
        self._take(found, lambda position: f"{path}[{position}]", root)

    def _dict(self, item: Any, path: str, root: str) -> None:
        if "__builtins__" in dict.keys(item):
            return  # a namespace: it leads to everything
        pairs = list(islice(dict.items(item), self.LONGEST))
        keys = [key for key, _ in pairs]
        self._take([value for _, value in pairs], lambda position: f"{path}[{self._key(keys[position])}]", root)
        self._take(keys, lambda position: f"list({path})[{position}]", root)

    def _key(self, key: object) -> str:
        text = key_text(key)
        if text is not None:
            return text
        if (
            self._how.get(id(type(key))) == "tensor" and id(key) in self._seen
        ):  # an optimizer's state: its key has a name
            return self._name_of(key)
        return f"<{type_name(key)}>"

    def _name_of(self, array: object) -> str:
        new = range(len(self._places), len(self.arrays))
        self._places.update({id(self.arrays[place]): place for place in new})
        return self.names[self._places[id(array)]]

    def _object(self, item: Any, path: str, root: str, *, is_module: bool) -> None:
        if type(item) is FunctionType:
            cells = item.__closure__ or ()
            self._take(cells, lambda position: f"{path}.__closure__[{position}]", root)
            self._take(item.__defaults__ or (), lambda position: f"{path}.__defaults__[{position}]", root)
            self._take([item.__kwdefaults__], lambda position: f"{path}.__kwdefaults__", root)
        elif type(item) is CellType:
            self._take(gc.get_referents(item), lambda position: f"{path}.cell_contents", root)
        elif type(item) is MethodType:
            self._take([item.__self__, item.__func__], _labels(path, ["__self__", "__func__"]), root)
        elif is_kind(item, functools.partial):
            names = ["func", "args", "keywords"]
            parts = [functools.partial.__dict__[name].__get__(item) for name in names]
            self._take(parts, _labels(path, names), root)
        # A dict that is asked for is made, and stays: only objects that hold more than numbers and text are asked.
        if self._holds_something(item):
            self._attributes(instance_dict(item) or {}, path, root, is_module=is_module)
            if type(item) is not FunctionType:  # its slots lead to its module's names
                found = slots(item)
                self._take(list(found.values()), _labels(path, list(found)), root)

    def _holds_something(self, item: object) -> bool:
        return any(self._how.get(id(type(child))) != "skip" for child in gc.get_referents(item))

    def _attributes(self, found: dict[str, Any], path: str, root: str, *, is_module: bool = False) -> None:
        if is_module:
            for collapsed in _COLLAPSED:
                inner = found.get(collapsed)
                if inner is not None and is_kind(inner, dict) and id(inner) not in self._seen:
                    self._seen.add(id(inner))
                    self._entered.append(inner)
                    parts = dict(dict.items(inner))
                    self._take(list(parts.values()), _labels(path, list(parts)), root)
        self._take(list(found.values()), _labels(path, list(found)), root)


_HAS_REFERENCES = 1 << 14
"""Py_TPFLAGS_HAVE_GC: objects of other types refer to nothing."""


def _class_dict(kind: object) -> Any:
    return type.__dict__["__dict__"].__get__(kind)


def _labels(path: str, names: Sequence[object]) -> Label:
    return lambda position: path + _attribute(names[position])


def _attribute(name: object) -> str:
    """Return how an attribute is written; torch numbers the parts of a sequence."""
    text = text_of(name)
    if text.isidentifier():
        return f".{text}"
    return f"[{text}]" if text.isdecimal() else f".<{text!r}>"
