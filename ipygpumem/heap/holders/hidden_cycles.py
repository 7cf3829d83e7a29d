"""Writes the lines that end cycles through arrays of objects.

The garbage collector does not look into an array, so it never frees such a cycle: ``del x`` frees
nothing once ``x.rows`` is an array with ``x`` in it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.arrays import is_array, is_of_pandas, owner_of
from ipygpumem.heap.attributes import attribute_name, slots
from ipygpumem.heap.bulk import container_base
from ipygpumem.introspect import instance_dict

_MOST_PASSED = 1000
"""Maximum number of objects to pass through on the way from an attribute to an array."""


def lines_that_end(target: str, item: object, arrays: Sequence[Any]) -> list[str]:
    """Return the lines that end the cycles of an object, before it is deleted; none if a cycle is
    further inside.

    Args:
        target: the code of the object, such as its name.
        item: the object.
        arrays: the arrays through which cycles lead.
    """
    lines = dict[str, None]()
    for array in arrays:
        if array is item:
            lines[f"{target}.fill(None)"] = None
            continue
        names = _attributes_leading_to(array, item)
        if not names:
            return []
        lines.update(dict.fromkeys(f"{target}.{name} = None" for name in names))
    return list(lines)


def _attributes_leading_to(array: Any, item: object) -> list[str]:
    """Return the names of the attributes whose value is an array, or contains it."""
    name = attribute_name(item, array)
    if name is not None:
        return [name] if name.isidentifier() else []
    if container_base(type(item)) is not None or is_of_pandas(item):
        return []
    names = list[str]()
    attributes = slots(item) | (instance_dict(item) or {})
    for name, value in list(attributes.items()):
        if type(name) is str and name.isidentifier() and _contains(value, array):
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
