"""Reads by which attribute or item one object refers to another one. No code of users runs."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from operator import indexOf
from types import (
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from ipygpumem.heap.arrays import flat_elements, is_array
from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import container_base
from ipygpumem.heap.containers import CONTAINERS, SEQUENCES
from ipygpumem.introspect import (
    class_dict,
    instance_dict,
    is_instance,
    is_name,
    is_users_class,
    module_of,
    text_of,
)


def items_of(holder: Any) -> list[object]:
    """Return the items of a container, the elements of an array of objects, or the attributes of an
    object.
    """
    base = container_base(type(holder))
    if base is dict:
        return list(dict.values(holder))
    if base is not None:
        return list(base.__iter__(holder))
    elements = flat_elements(holder)
    if elements is not None:
        return elements
    return [*(instance_dict(holder) or {}).values(), *slots(holder).values()]


def first_in(holder: Any, items: Sequence[object]) -> object:
    """Return the item that comes first in a container, or among the attributes of an object."""
    wanted = set(map(id, items))
    for item in items_of(holder):
        if id(item) in wanted:
            return item
    return items[0]


def is_opaque(item: object) -> bool:
    """Return True for a library's object that keeps its data in private attributes.

    Users write no names for what is inside: ``source`` of bokeh has ``_property_values``.
    """
    if is_users_class(type(item)) or is_array(item) or is_instance(item, BaseException):
        return False
    if any(is_instance(item, kind) for kind in _OPEN):
        return False
    return module_of(item).partition(".")[0] not in _OPEN_MODULES


def is_private(owner: object, item: object) -> bool:
    """Return True if an object refers to an item, or has its attributes, out of users' sight."""
    if item is instance_dict(owner):
        return True
    return (
        not attribute_text(owner, item).startswith(".") or attribute_text(owner, item)[1:2] == "_"
    )


_OPEN = (*CONTAINERS, type, ModuleType, FunctionType, MethodType)
"""Types whose contents users name."""


_OPEN_MODULES = {"", "builtins", "collections", "functools", "logging", "queue", "types", "weakref"}
"""Modules of types that users fill step by step."""


def position_of(items: Iterable[object], child: object) -> int:
    """Return the position of an item in a list, tuple or deque."""
    base: Any = next(kind for kind in SEQUENCES if is_instance(items, kind))
    return max(0, index_of(child, base.__iter__(items)))


def index_of(child: object, items: Iterable[object]) -> int:
    """Return the position of an object among items; -1 if it is none of them.

    In C: a list of 25,000 is asked for each of 2,000 rows.
    """
    try:
        return indexOf(map(id, items), id(child))
    except ValueError:
        return -1


def attribute_names(owner: object, child: object) -> list[str]:
    """Return the names of the attributes of ``owner`` that are ``child``."""
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    return [text_of(name) for name, value in attributes if value is child]


def attribute_text(owner: object, child: object) -> str:
    """Return ``.name`` for the first attribute of ``owner`` that is ``child``; empty if it has no
    name.
    """
    names = attribute_names(owner, child)
    name = names[0] if names else ""
    if not name:
        return ""
    return f".{name}" if is_name(name) else " (in an attribute)"


def owns(owner: object, names: dict[str, object]) -> bool:
    """Return True if a dict contains the attributes of an object or class."""
    if is_instance(owner, type):
        return any(item is names for item in gc.get_referents(class_dict(owner)))
    return type(owner) is not FunctionType and instance_dict(owner) is names
