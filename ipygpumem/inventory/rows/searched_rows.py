"""Decides for rows of several objects if one search finds the holder of each object, and names one
holder for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ipygpumem.heap.bulk import types_of
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.kinds.arrays import StorageKey, object_key
from ipygpumem.heap.knowledge.tasks import is_pending
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import EVENT_LOOP
from ipygpumem.heap.paths.task_endings import line_that_cancels
from ipygpumem.inventory.rows.merging import holder_of_all

_MOST_MIXED = 100
"""Maximum number of small objects of several types whose holders are all searched."""
MOST_SEARCHED = 20_000
"""Maximum number of objects whose holders are all searched at once."""


def is_searched_together(items: Sequence[object], number_searched: int) -> bool:
    """Return True if the holder of each object of a row is to be searched; otherwise that of the
    first one stands for all.

    Args:
        items: the objects.
        number_searched: the number of objects of other rows that the same search has.
    """
    if len(items) > _MOST_MIXED and len(types_of(items)) > 1:
        # No line removes them all, and the search takes half a minute after an import of sympy.
        return False
    return 1 < len(items) <= MOST_SEARCHED - number_searched


def holder_of_several(
    items: Sequence[object],
    row: Row | None,
    holders: Mapping[StorageKey, Holder],
) -> Holder:
    """Return one holder for several objects, with one line that frees all of them if there is one.

    Args:
        items: the objects.
        row: their row, whose holder may lead to all of them; None if they are too many.
        holders: the holder of each object that was searched.
    """
    if all(map(is_pending, items)):
        return Holder(EVENT_LOOP, Remedy(line_that_cancels(items)))
    of_first_item = holders[object_key(items[0])]
    and_more = replace(of_first_item, path=f"{of_first_item.path}, and more", remedy=REMOVE_THEM)
    if row is None:
        return and_more
    if row.is_whole and of_first_item.remedy != REMOVE_THEM:
        return of_first_item
    different_holders = dict[int, Holder]()
    for item in items:
        holder = holders.get(object_key(item))
        if holder is None:
            return and_more
        different_holders[id(holder)] = holder
    return holder_of_all(list(different_holders.values()))
