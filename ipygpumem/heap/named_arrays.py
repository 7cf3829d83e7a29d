"""Finds the arrays under names, with the paths that a user would type."""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

from ipygpumem.heap.arrays import (
    elements,
    inside_pandas,
    library_type,
)
from ipygpumem.heap.attributes import (
    attribute_name,
    attributes_in_dict,
    has_nameless_attributes,
    slot_descriptors,
    slots,
)
from ipygpumem.heap.bulk import (
    by_identity,
    types_of,
)
from ipygpumem.heap.walk import ARRAY_TYPES, LONGEST, MOST_OBJECTS, Group, Label, Walk
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    is_name,
    key_text,
    text_of,
    type_name,
)

_COLLAPSED = ("_parameters", "_buffers", "_modules")
"""Dicts of torch modules that users never write: ``model.weight`` is in one of them."""
_CONTAINERS: tuple[tuple[type, str], ...] = (
    *((kind, "sequence") for kind in (list, tuple, deque)),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "set"),
    (FunctionType, "function"),
    (CellType, "cell"),
    (BuiltinFunctionType, "builtin"),
    (type, "class"),
)


_MARK = "\0"
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")
_KEY_OF_DICT = re.compile(r'\.__dict__\["([^"]*)"\]')


def _key_as_attribute(match: re.Match[str]) -> str:
    return _attribute(match[1])


class NamedArrays(Walk):
    """Finds arrays under names, by their shortest paths."""

    def __init__(self) -> None:
        super().__init__(MOST_OBJECTS, classes={"__main__"})
        self._slots: dict[int, dict[str, Any]] = {}
        """Cached ``slot_descriptors``, by a type's identity."""
        self._attributes_unread: list[tuple[object, object]] = []
        """Objects and the values of their attributes whose names were not read; their places are in
        the marks.
        """
        self._names: dict[int, dict[str, None]] = {}
        """Names of attributes that led to arrays, by the identity of the object's type."""
        known = (
            ("torch.nn", "Module", "module"),
            ("pandas", "DataFrame", "frame"),
            ("pandas", "Series", "frame"),
        )
        bases = [*((*ARRAY_TYPES[name], name) for name in ("tensor", "ndarray")), *known]
        found = [(library_type(module, name), category) for module, name, category in bases]
        self._ways = [
            *((base, category) for base, category in found if base is not None),
            *_CONTAINERS,
        ]
        self._categories: dict[int, str] = {}
        """How to enter a type's objects, by the type's identity."""

    def named(self, roots: Collection[tuple[str, object]]) -> dict[int, Any]:
        """Return the arrays and other objects behind names, by identity; those on the shortest
        paths first.
        """
        return by_identity(self.arrays_behind(roots))

    def arrays_behind(self, roots: Collection[tuple[str, object]]) -> list[Any]:
        """Return the same as a list; their identities are the keys of ``paths``, too."""
        names, values = list(map(itemgetter(0), roots)), list(map(itemgetter(1), roots))
        found = list[Any]()
        for arrays in self.run([(values, names.__getitem__)]):
            found += arrays
        self._read_names()
        return found

    def drop(self) -> None:
        """Drop all references."""
        super().drop()
        self._attributes_unread.clear()

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of an object, with their paths."""
        if not objects:
            return
        (item,) = objects
        category = self._categories.get(id(type(item)))
        if category is None:
            category = next(
                (category for base, category in self._ways if is_instance(item, base)), "object"
            )
            self._categories[id(type(item))] = category
        if category == "sequence":
            base: Any = next(base for base in (list, tuple, deque) if is_instance(item, base))
            label = (path.replace("%", "%%") + "[%d]").__mod__  # in C: there may be a million items
            yield list(islice(base.__iter__(item), LONGEST)), label
        elif category == "dict":
            yield from self._dict(item, path)
        elif category == "set":
            base = set if is_instance(item, set) else frozenset
            yield list(islice(base.__iter__(item), LONGEST)), lambda position: f"{path}{{…}}"
        elif category == "class":
            yield from self._attributes(dict(class_dict(item)), path)
        elif category == "ndarray" and (found := elements(item)) is not None:
            yield found, lambda position: f"{path}[{position}]"
        else:
            yield from self._object(item, category, path)

    def _dict(self, item: Any, path: str) -> Iterator[Group]:
        if "__builtins__" in dict.keys(item):
            return  # a namespace: it leads to everything
        both: tuple[Iterable[object], ...] = (dict.keys(item), dict.values(item))
        # one call in C, because a thread may change the dict in between
        keys, values = map(list, both)
        yield values, lambda position: f"{path}[{self._key(keys[position], path)}]"
        yield keys, lambda position: f"list({path})[{position}]"

    def _key(self, key: object, path: str) -> str:
        """Return the source text of a key of the dict at ``path``."""
        text = key_text(key)
        named = self.paths.get(id(key)) if text is None else None
        if named is not None and not named.startswith(
            f"{path}["
        ):  # an optimizer's state: its key is a named parameter
            return named
        return f"<{type_name(key)}>" if text is None else text

    def _object(self, item: Any, category: str, path: str) -> Iterator[Group]:
        yield from self._fields(item, category, path)
        referents = gc.get_referents(item)
        if self._kinds["skip"].issuperset(types_of(referents)):
            return
        if category == "module" or category == "frame":
            attributes = instance_dict(item) or {}
        else:
            attributes = attributes_in_dict(item, referents)
        if attributes:
            self.pass_over(attributes)
        for name in _COLLAPSED if category == "module" else ():
            inner = attributes.get(name)
            if inner is not None and is_instance(inner, dict) and id(inner) not in self.seen:
                self.pass_over(inner)
                yield from self._attributes(dict(dict.items(inner)), path)
        yield from self._attributes(attributes, path)
        if category == "function":  # its slots lead to its module's namespace
            return
        kind = id(type(item))
        if kind not in self._slots:
            self._slots[kind] = slot_descriptors(type(item))
        in_slots = slots(item, self._slots[kind])
        yield from self._attributes(in_slots, path)
        if has_nameless_attributes(item):
            known = set(map(id, [attributes, type(item), *attributes.values(), *in_slots.values()]))
            nameless = [value for value in referents if id(value) not in known]
            yield nameless, lambda position: self._unread(item, nameless[position], path)

    def _unread(self, item: object, value: object, path: str) -> str:
        """Return the path of an attribute with a mark instead of its name, which is read if it
        leads to an array.
        """
        self._attributes_unread.append((item, value))
        return f"{path}{_MARK}{len(self._attributes_unread) - 1}{_MARK}"

    def _read_names(self) -> None:
        """Replace the marks in the paths of arrays by the names of attributes."""
        for key, path in self.paths.items():
            if _MARK in path:
                self.paths[key] = _KEY_OF_DICT.sub(
                    _key_as_attribute, _MARKED.sub(self._read_name, path)
                )

    def _read_name(self, mark: re.Match[str]) -> str:
        item, value = self._attributes_unread[int(mark[1])]
        names = self._names.setdefault(id(type(item)), {})
        name = attribute_name(item, value, list(names))
        if name is None:
            return f".<{type_name(value)}>"
        names[name] = None
        return _attribute(name)

    def _fields(self, item: Any, category: str, path: str) -> Iterator[Group]:
        if category == "function":
            yield item.__closure__ or (), lambda position: f"{path}.__closure__[{position}]"
            yield item.__defaults__ or (), lambda position: f"{path}.__defaults__[{position}]"
            yield [item.__kwdefaults__], lambda position: f"{path}.__kwdefaults__"
        elif category == "cell":
            yield gc.get_referents(item), lambda position: f"{path}.cell_contents"
        elif category == "builtin":  # such as ``[].append``
            yield [item.__self__], lambda position: f"{path}.__self__"
        elif category == "frame":
            yield from self._frame(item, path)

    def _frame(self, item: object, path: str) -> Iterator[Group]:
        """Label the arrays of a DataFrame or Series with its own name: users never write their real
        paths.
        """
        for part in gc.get_referents((instance_dict(item) or {}).get("_mgr")):
            if type(part) is tuple:  # the blocks
                yield inside_pandas(part), _same(path)
            elif type(part) is list:  # the axes
                ends = (".index",) if len(part) == 1 else (".columns", ".index")
                for axis, end in zip(part, ends, strict=False):
                    yield inside_pandas(axis), _same(path + end)

    def _attributes(self, attributes: dict[str, Any], path: str) -> Iterator[Group]:
        yield list(attributes.values()), _labels(path, list(attributes))


def _same(path: str) -> Label:
    return lambda position: path


def _labels(path: str, names: Sequence[object]) -> Label:
    return lambda position: path + _attribute(names[position])


def _attribute(name: object) -> str:
    """Return the source text of an attribute; torch numbers the parts of a sequence."""
    text = text_of(name)
    if is_name(text):
        return f".{text}"
    return f"[{text}]" if text.isdecimal() else f".<{text!r}>"
