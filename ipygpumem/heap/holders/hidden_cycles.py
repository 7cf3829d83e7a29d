"""Writes the lines that end cycles through arrays of objects.

The garbage collector does not look into an array, so it never frees such a cycle: ``del x`` frees
nothing once ``x.rows`` is an array with ``x`` in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.attributes import attribute_name


def lines_that_end(target: str, item: object, arrays: Sequence[Any]) -> list[str]:
    """Return the lines that end the cycles of an object, before it is deleted; none if a cycle is
    further inside.

    Args:
        target: the code of the object, such as its name.
        item: the object.
        arrays: the arrays through which cycles lead.
    """
    lines = list[str]()
    for array in arrays:
        if array is item:
            lines.append(f"{target}.fill(None)")
            continue
        name = attribute_name(item, array)
        if name is None or not name.isidentifier():
            return []
        lines.append(f"{target}.{name} = None")
    return lines
