"""Writes the lines that end cycles through arrays of objects.

The garbage collector does not look into an array, so it never frees such a cycle: ``del x`` frees
nothing once ``x.rows`` is an array with ``x`` in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ipygpumem.heap.arrays import is_array, is_of_pandas, owner_of
from ipygpumem.heap.attributes import attribute_name, slots
from ipygpumem.heap.bulk import container_base
from ipygpumem.heap.holders.literals import literal
from ipygpumem.heap.holders.references_of import sets_attributes
from ipygpumem.introspect import instance_dict, is_name

_MOST_PASSED = 1000
"""Maximum number of objects to pass through on the way from an attribute to an array."""
_MOST_ITEMS = 100
"""Maximum number of items of a list or dict whose attributes are examined."""


def lines_that_end(objects: Iterable[tuple[str, object]], arrays: Sequence[Any]) -> list[str]:
    """Return the lines that end the cycles of some objects, and of the items of lists and dicts
    among them, before these objects are deleted; none if a cycle is further inside.

    Args:
        objects: each object's code, such as its name, and the object.
        arrays: the arrays through which cycles lead.
    """
    owners = list[tuple[str, object]]()
    for target, item in objects:
        owners += [(target, item), *_items_of(target, item)]
    lines = dict[str, None]()
    for array in arrays:
        lines_of_array = list[str]()
        for code, owner in owners:
            if array is owner:
                lines_of_array.append(f"{code}.fill(None)")
                continue
            for name in _attributes_leading_to(array, owner):
                lines_of_array.append(_clearing(code, owner, name))
        if not lines_of_array:
            return []
        lines.update(dict.fromkeys(lines_of_array))
    return list(lines)


def _items_of(target: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a list or dict with the code of each."""
    if type(item) is list and len(item) <= _MOST_ITEMS:
        for position, value in enumerate(item):
            yield f"{target}[{position}]", value
    if type(item) is dict and len(item) <= _MOST_ITEMS:
        for key, value in item.items():
            written = literal(key)
            if written:
                yield f"{target}[{written}]", value


def _clearing(code: str, owner: object, name: str) -> str:
    """Return the line that sets an attribute to None, also one of a frozen class."""
    if sets_attributes(owner):
        return f"{code}.{name} = None"
    return f"object.__setattr__({code}, {literal(name)}, None)"


def _attributes_leading_to(array: Any, item: object) -> list[str]:
    """Return the names of the attributes whose value is an array, or contains it."""
    name = attribute_name(item, array)
    if name is not None:
        return [name] if is_name(name) else []
    if container_base(type(item)) is not None or is_of_pandas(item):
        return []
    names = list[str]()
    attributes = slots(item) | (instance_dict(item) or {})
    for name, value in list(attributes.items()):
        if type(name) is str and is_name(name) and _contains(value, array):
            names.append(name)
    return names


def _contains(value: object, array: Any) -> bool:
    """Return True if a container or an object of pandas leads to an array.

    Objects of other classes are not entered: something else may hold these and their arrays.
    """
    waiting = [value]
    passed = set[int]()
    for item in waiting:  # the list grows
        if item is array or (is_array(item) and owner_of(item) is array):
            return True
        is_entered = container_base(type(item)) is not None or is_of_pandas(item)
        if not is_entered or id(item) in passed:
            continue
        if len(passed) == _MOST_PASSED:
            return False
        passed.add(id(item))
        waiting += gc.get_referents(item)
    return False
