"""Ends the cycles that a printed line would leave.

Nothing ever frees a cycle through an array of objects. So before ``del box["x"]``, the cycle of the
object there has to be ended: ``box["x"].rows = None; del box["x"]``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any

from ipygpumem.heap.arrays import flat_elements, holding_objects
from ipygpumem.heap.holders.cuts import Cut
from ipygpumem.heap.holders.hidden_cycles import lines_that_end
from ipygpumem.heap.holders.search import HIDDEN_CYCLE
from ipygpumem.heap.region import Region
from ipygpumem.records import COMMENT, ReferencePath, RetainedArray, line_of

_MOST_ROWS = 50
"""Maximum number of rows, the largest ones, whose lines are examined."""
_FREED = 0.9
"""Least share of a row's bytes that its line frees."""


def may_end_in_cycles(arrays: Sequence[Any]) -> bool:
    """Return True if some arrays contain more than text and numbers."""
    of_objects = compress(arrays, holding_objects(arrays))
    items = chain.from_iterable(flat_elements(array) or () for array in of_objects)
    return any(map(gc.is_tracked, items))


def with_ended_cycles(
    rows: Sequence[RetainedArray],
    cuts: dict[str, list[Cut]],
    removed: Mapping[int, object],
    namespaces: Iterable[int],
) -> list[RetainedArray]:
    """Return the rows, with lines that also end cycles through arrays of objects.

    Args:
        rows: the rows, the largest first.
        cuts: the references that each line removes; those of new lines are added.
        removed: the objects at the end of these references, by identity.
        namespaces: the identities of the dicts with the user's names, which lead to everything.
    """
    namespaces = list(namespaces)
    ended = list[RetainedArray]()
    for row in rows[:_MOST_ROWS]:
        if row.holder is not None:
            line, mark, comment = row.holder.advice.partition(COMMENT)
            of_line = cuts.get(line, [])
            ends = _ends_of_cycles(row.size_bytes, of_line, removed, namespaces)
            if ends is not None:
                first = "; ".join([*ends, line]) if ends else HIDDEN_CYCLE.advice
                cuts[line_of(first)] = of_line
                row = replace(row, holder=ReferencePath(row.holder.path, first + mark + comment))
        ended.append(row)
    return [*ended, *rows[_MOST_ROWS:]]


def _ends_of_cycles(
    size_bytes: int,
    cuts: Sequence[Cut],
    removed: Mapping[int, object],
    namespaces: Sequence[int],
) -> list[str] | None:
    """Return the lines that end the cycles which keep memory after a line; None if the line frees
    it, and no line if they are further inside.

    Args:
        size_bytes: the memory.
        cuts: the references that the line removes.
        removed: the objects at the end of these references, by identity.
        namespaces: as above.
    """
    codes = dict[int, str]()
    for cut in cuts:
        for reference in cut.each():
            if reference.removed_id in removed:
                codes[reference.removed_id] = reference.target
    if not codes:
        return None
    objects = [removed[key] for key in codes]
    region = Region(objects, namespaces=namespaces)
    cycles = region.in_hidden_cycles()
    freed = region.reach(codes.keys()) - region.reach(cycles)
    if not cycles or region.bytes_of(freed).total() >= _FREED * size_bytes:
        return None
    arrays = [region.objects[key] for key in cycles]
    lines = list[str]()
    for item, code in zip(objects, codes.values(), strict=True):
        lines += lines_that_end(code, item, arrays) if code else []
    return lines
