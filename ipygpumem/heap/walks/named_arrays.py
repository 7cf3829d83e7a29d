"""Finds the arrays under names, with the paths that a user would type, such as
``model.layers[0].weight`` or ``results["loss"][3]``.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

from ipygpumem.heap.attributes import (
    MODULE_PARTS,
    attribute_name,
    attributes_in_dict,
    has_nameless_attributes,
    slot_descriptors,
    slots,
)
from ipygpumem.heap.bulk import (
    by_identity,
    types_of,
    without_objects,
)
from ipygpumem.heap.containers import SEQUENCES
from ipygpumem.heap.kinds.arrays import (
    elements,
    inside_pandas,
    library_type,
)
from ipygpumem.heap.knowledge.barriers import are_globals
from ipygpumem.heap.walks.walk import LONGEST, MOST_OBJECTS, Group, Label, Walk
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    is_name,
    key_text,
    text_of,
    type_name,
)

_CATEGORIES_OF_LIBRARIES = (
    ("torch", "Tensor", "tensor"),
    ("numpy", "ndarray", "ndarray"),
    ("torch.nn", "Module", "module"),
    ("pandas", "DataFrame", "frame"),
    ("pandas", "Series", "frame"),
)
"""Modules and names of classes of libraries, each with its category: the way to enter its
instances.
"""
_CATEGORIES_OF_PYTHON: tuple[tuple[type, str], ...] = (
    *((kind, "sequence") for kind in SEQUENCES),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "set"),
    (FunctionType, "function"),
    (CellType, "cell"),
    (BuiltinFunctionType, "builtin"),
    (type, "class"),
)
"""Python's own classes, each with its category. All other objects have the category ``object``."""


_MARK = "\0"
"""Encloses the number of an attribute whose name is read later."""
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")
_KEY_OF_DICT = re.compile(r'\.__dict__\["([^"]*)"\]')
"""An attribute that was found in the dict of attributes: ``.__dict__["weight"]``."""


def _key_as_attribute(match: re.Match[str]) -> str:
    """Return the source text of the attribute, ``.weight``, for a match of ``_KEY_OF_DICT``."""
    return _code_of_attribute(match[1])


class NamedArrays(Walk):
    """Finds arrays under names, by their shortest paths.

    Each object is entered by itself, so that its contents get paths, by its category.
    """

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
        self._bases_of_categories = [*_loaded_bases(), *_CATEGORIES_OF_PYTHON]
        self._categories: dict[int, str] = {}
        """How to enter a type's objects, by the type's identity."""

    def named(self, roots: Collection[tuple[str, object]]) -> dict[int, Any]:
        """Return the arrays behind names by identity, the arrays on the shortest paths first.

        Args:
            roots: the names with their objects.
        """
        return by_identity(self.arrays_behind(roots))

    def arrays_behind(self, roots: Collection[tuple[str, object]]) -> list[Any]:
        """Return the arrays behind names as a list; their identities are the keys of ``paths``.

        Args:
            roots: the names with their objects.
        """
        names = list(map(itemgetter(0), roots))
        values = list(map(itemgetter(1), roots))
        every_array = list[Any]()
        for arrays in self.walk_from([(values, names.__getitem__)]):
            every_array += arrays
        self._read_names()
        return every_array

    def drop(self) -> None:
        """Drop all references."""
        super().drop()
        self._attributes_unread.clear()

    def enter(self, objects: Sequence[Any], path: str) -> Iterator[Group]:
        """Yield the contents of an object, with their paths, by the category of its type.

        Args:
            objects: the object, in a list; or nothing.
            path: the path to the object.
        """
        if not objects:
            return
        (item,) = objects
        category = self._category_of(item)
        if category == "sequence":
            yield self._group_of_sequence(item, path)
        elif category == "dict":
            yield from self._groups_of_dict(item, path)
        elif category == "set":
            yield self._group_of_set(item, path)
        elif category == "class":
            yield _group_of_attributes(dict(class_dict(item)), path)
        elif category == "ndarray":
            yield from self._groups_of_ndarray(item, path)
        else:
            yield from self._groups_of_object(item, category, path)

    def _category_of(self, item: object) -> str:
        """Return the category of an object's type: the way to enter it, such as ``sequence``."""
        category = self._categories.get(id(type(item)))
        if category is not None:
            return category
        category = "object"
        for base, category_of_base in self._bases_of_categories:
            if is_instance(item, base):
                category = category_of_base
                break
        self._categories[id(type(item))] = category
        return category

    def _group_of_sequence(self, item: Any, path: str) -> Group:
        """Return the items of a sequence, such as ``x[3]``."""
        base: Any = next(base for base in SEQUENCES if is_instance(item, base))
        # In C, because there may be a million items.
        label = (path.replace("%", "%%") + "[%d]").__mod__
        return list(islice(base.__iter__(item), LONGEST)), label

    def _group_of_set(self, item: Any, path: str) -> Group:
        """Return the items of a set, all as ``x{…}``."""
        base: Any = frozenset
        if is_instance(item, set):
            base = set
        items = list(islice(base.__iter__(item), LONGEST))
        return items, _always(f"{path}{{…}}")

    def _groups_of_ndarray(self, item: Any, path: str) -> Iterator[Group]:
        """Yield the elements of an array of objects, or the attributes of any other array."""
        objects = elements(item)
        if objects is None:
            yield from self._groups_of_object(item, "ndarray", path)
        else:
            yield objects, _with_position(path)

    def _groups_of_dict(self, item: Any, path: str) -> Iterator[Group]:
        """Yield the values of a dict, such as ``x["a"]``, and its keys; nothing of a module's
        namespace.
        """
        if are_globals(item):
            return
        views: tuple[Iterable[object], ...] = (dict.keys(item), dict.values(item))
        # No Python code runs between the two lists, so that no thread changes the dict.
        keys, values = map(list, views)

        def by_key(position: int) -> str:
            key = self._code_of_key(keys[position], path)
            return f"{path}[{key}]"

        yield values, by_key
        yield keys, _with_position(f"list({path})")

    def _code_of_key(self, key: object, path: str) -> str:
        """Return the source text of a key of the dict at ``path``."""
        text = key_text(key)
        if text is not None:
            return text
        # An optimizer's state has parameters as keys, which other names lead to.
        path_of_key = self.paths.get(id(key))
        if path_of_key is not None and not path_of_key.startswith(f"{path}["):
            return path_of_key
        return f"<{type_name(key)}>"

    def _groups_of_object(self, item: Any, category: str, path: str) -> Iterator[Group]:
        """Yield the contents of an object that is no container: its fields in C, its attributes and
        slots.

        Attributes that are stored outside a dict have values without names here. Their paths get
        marks, and names are read only for marks in paths to arrays.

        Args:
            item: the object.
            category: the result of ``_category_of``.
            path: the path to the object.
        """
        yield from _groups_in_c_fields(item, category, path)
        referents = gc.get_referents(item)
        if types_of(referents) <= self._types.by_kind["skip"]:
            return
        if category == "module" or category == "frame":
            attributes = instance_dict(item) or {}
        else:
            attributes = attributes_in_dict(item, referents)
        if attributes:
            self.pass_over(attributes)
        if category == "module":
            yield from self._groups_of_module(attributes, path)
        yield _group_of_attributes(attributes, path)
        if category == "function":  # its slots lead to its module's namespace
            return
        in_slots = slots(item, self._slots_of(type(item)))
        yield _group_of_attributes(in_slots, path)
        if not has_nameless_attributes(item):
            return
        named = [attributes, type(item), *attributes.values(), *in_slots.values()]
        nameless = without_objects(named, referents)

        def by_mark(position: int) -> str:
            return self._path_with_mark(item, nameless[position], path)

        yield nameless, by_mark

    def _groups_of_module(self, attributes: dict[str, Any], path: str) -> Iterator[Group]:
        """Yield the contents of a torch module's own dicts as attributes of the module:
        ``model.weight``, not ``model._parameters["weight"]``.
        """
        for name in MODULE_PARTS:
            inner: Any = attributes.get(name)
            if is_instance(inner, dict) and id(inner) not in self.seen:
                self.pass_over(inner)
                yield _group_of_attributes(dict(dict.items(inner)), path)

    def _slots_of(self, kind: type) -> dict[str, Any]:
        """Return the cached ``slot_descriptors`` of a class."""
        descriptors = self._slots.get(id(kind))
        if descriptors is None:
            descriptors = slot_descriptors(kind)
            self._slots[id(kind)] = descriptors
        return descriptors

    def _path_with_mark(self, item: object, value: object, path: str) -> str:
        """Return the path of an attribute with a mark instead of its name, which ``_read_names``
        reads if the path leads to an array.
        """
        number = len(self._attributes_unread)
        self._attributes_unread.append((item, value))
        return f"{path}{_MARK}{number}{_MARK}"

    def _read_names(self) -> None:
        """Replace the marks in the paths of arrays by the names of attributes."""
        for key, path in self.paths.items():
            if _MARK in path:
                with_names = _MARKED.sub(self._name_for_mark, path)
                self.paths[key] = _KEY_OF_DICT.sub(_key_as_attribute, with_names)

    def _name_for_mark(self, mark: re.Match[str]) -> str:
        """Return the code of the attribute for which a mark stands."""
        number = int(mark[1])
        item, value = self._attributes_unread[number]
        names = self._names.setdefault(id(type(item)), {})
        name = attribute_name(item, value, list(names))
        if name is None:
            return f".<{type_name(value)}>"
        names[name] = None
        return _code_of_attribute(name)


def _loaded_bases() -> Iterator[tuple[type, str]]:
    """Yield the classes of ``_CATEGORIES_OF_LIBRARIES`` that are loaded, with their categories."""
    for module, name, category in _CATEGORIES_OF_LIBRARIES:
        base = library_type(module, name)
        if base is not None:
            yield base, category


def _groups_in_c_fields(item: Any, category: str, path: str) -> Iterator[Group]:
    """Yield the objects in an object's fields in C, such as a function's closure, with the
    attribute that shows them.
    """
    if category == "function":
        yield item.__closure__ or (), _with_position(f"{path}.__closure__")
        yield item.__defaults__ or (), _with_position(f"{path}.__defaults__")
        yield [item.__kwdefaults__], _always(f"{path}.__kwdefaults__")
    elif category == "cell":
        yield gc.get_referents(item), _always(f"{path}.cell_contents")
    elif category == "builtin":  # such as ``[].append``
        yield [item.__self__], _always(f"{path}.__self__")
    elif category == "frame":
        yield from _groups_in_frame(item, path)


def _groups_in_frame(item: object, path: str) -> Iterator[Group]:
    """Yield the arrays of a DataFrame or Series with the path of the frame itself, because the real
    paths, as ``df._mgr.blocks[0].values``, are none that users write. The index and the columns get
    ``.index`` and ``.columns``.
    """
    attributes = instance_dict(item) or {}
    for part in gc.get_referents(attributes.get("_mgr")):
        if type(part) is tuple:  # the blocks
            yield inside_pandas(part), _always(path)
        elif type(part) is list:  # the axes
            ends = [".columns", ".index"]
            if len(part) == 1:
                ends = [".index"]
            for axis, end in zip(part, ends, strict=False):
                yield inside_pandas(axis), _always(path + end)


def _group_of_attributes(attributes: dict[str, Any], path: str) -> Group:
    """Return the values of attributes, such as ``x.a``."""
    names = list(attributes)

    def by_name(position: int) -> str:
        return path + _code_of_attribute(names[position])

    return list(attributes.values()), by_name


def _with_position(path: str) -> Label:
    """Return the label of an item: its position in the container at ``path``."""

    def label(position: int) -> str:
        return f"{path}[{position}]"

    return label


def _always(path: str) -> Label:
    """Return a label that is the same for all items."""

    def label(_: int) -> str:
        return path

    return label


def _code_of_attribute(name: object) -> str:
    """Return the source text of an attribute: ``.weight``, but ``[0]`` for a part of
    ``torch.nn.Sequential``, which is an attribute named ``0``.
    """
    text = text_of(name)
    if is_name(text):
        return f".{text}"
    if text.isdecimal():
        return f"[{text}]"
    return f".<{text!r}>"
