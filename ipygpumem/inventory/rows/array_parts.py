"""Adds the bytes of arrays, which are found separately, to the parts of an object's row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace

from ipygpumem.heap.kinds.arrays import StorageKey
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.heap.walks.parts import ObjectPart, parts_of
from ipygpumem.interrupts import is_from_signal
from ipygpumem.inventory.rows.joint_rows import MOST_NAMES
from ipygpumem.records import RetainedArray


def with_arrays(
    row: RetainedArray, value: object, storages: Container[StorageKey]
) -> RetainedArray:
    """Return an object's row, with the bytes of its arrays added to its parts.

    The object was measured without the arrays of other rows. Once such a row becomes one with the
    object's, its bytes belong to parts of the object: for a data frame, to the column ``price``.

    Args:
        row: the row of the object without these arrays.
        value: the object.
        storages: the storages of the arrays.
    """
    sizes = Counter(row.parts)
    search = ArraySearch(lambda _, array: array.storage not in storages)
    for part in _parts_of_object(value):
        # ``search`` returns each array once. A part with unknown objects comes last, so that it
        # gets the arrays that no other part has.
        items = [value] if part.objects is None else part.objects
        part_bytes = 0
        for item in items:
            part_bytes += sum(array.size_bytes for _, array in search.find(item))
        for name in part.names:  # columns that share an array get equal shares
            sizes[name] += part_bytes // len(part.names)
    return replace(row, parts=dict((+sizes).most_common(MOST_NAMES)))


def _parts_of_object(value: object) -> Sequence[ObjectPart]:
    """Return the parts of an object, such as columns; those whose objects are unknown come last."""
    try:
        parts = list(parts_of(value))
    except Exception as error:  # a thread changes it, or an unknown version of a library
        if is_from_signal(error):
            raise
        return []
    return sorted(parts, key=lambda part: part.objects is None)
