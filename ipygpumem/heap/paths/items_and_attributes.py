"""Finds the item, ``[3]``, or attribute, ``.model``, by which an object refers to another one. No
code of users runs.
"""

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

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import container_base
from ipygpumem.heap.containers import CONTAINERS, SEQUENCES
from ipygpumem.heap.kinds.arrays import flat_elements, is_array
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
    """Return the one of some items that comes first in their holder: a container, or an object with
    them as attributes.
    """
    wanted = set(map(id, items))
    for item in items_of(holder):
        if id(item) in wanted:
            return item
    return items[0]


def is_opaque(item: object) -> bool:
    """Return True for an object of a library that users remove as a whole, because they do not name
    its parts. An example is a ``ColumnDataSource`` of bokeh, which has its data in
    ``_property_values``.
    """
    if is_users_class(type(item)) or is_array(item) or is_instance(item, BaseException):
        return False
    if any(is_instance(item, kind) for kind in _FILLED_TYPES):
        return False
    return module_of(item).partition(".")[0] not in _FILLED_MODULES


def is_private(owner: object, item: object) -> bool:
    """Return True if an object refers to an item in a way that users do not write: by ``_name``, by
    no attribute, or because the item is the dict of its attributes.
    """
    if item is instance_dict(owner):
        return True
    attribute = attribute_text(owner, item)
    return not attribute.startswith(".") or attribute.startswith("._")


_FILLED_TYPES = (*CONTAINERS, type, ModuleType, FunctionType, MethodType)
"""Types to which users add items or attributes, so that they can name and remove these."""


_FILLED_MODULES = {
    "",
    "builtins",
    "collections",
    "functools",
    "logging",
    "queue",
    "types",
    "weakref",
}
"""Modules with further types of this kind, such as ``queue.Queue``."""


def position_of(items: Iterable[object], child: object) -> int:
    """Return the position of an item in a list, tuple or deque; 0 if it is not there."""
    base: Any = next(kind for kind in SEQUENCES if is_instance(items, kind))
    return max(0, index_of(child, base.__iter__(items)))


def index_of(child: object, items: Iterable[object]) -> int:
    """Return the position of an object among items; -1 if it is none of them.

    It runs in C, because a list of 25,000 items may be searched for each of 2,000 rows.
    """
    try:
        return indexOf(map(id, items), id(child))
    except ValueError:
        return -1


def attribute_names(owner: object, child: object) -> list[str]:
    """Return the names of the attributes by which an object refers to another one."""
    attributes = [*(instance_dict(owner) or {}).items(), *slots(owner).items()]
    return [text_of(name) for name, value in attributes if value is child]


def attribute_text(owner: object, child: object) -> str:
    """Return the first attribute by which an object refers to another one, ``.model``, or
    `` (in an attribute)`` if code cannot name it after a dot; empty if there is none.
    """
    names = attribute_names(owner, child)
    name = names[0] if names else ""
    if not name:
        return ""
    return f".{name}" if is_name(name) else " (in an attribute)"


def owns(owner: object, names: dict[str, object]) -> bool:
    """Return True if a dict is that of the attributes of an object or class."""
    if is_instance(owner, type):  # the dict is behind a mappingproxy
        return any(item is names for item in gc.get_referents(class_dict(owner)))
    # The dict of a function's attributes has a step of its own (``function_steps.py``).
    return type(owner) is not FunctionType and instance_dict(owner) is names
