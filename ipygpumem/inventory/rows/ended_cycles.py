"""Ends the cycles that a printed line would leave.

Nothing ever frees a cycle through an array of objects. So before ``del box["x"]``, the cycle of the
object there has to be ended: ``box["x"].rows = None; del box["x"]``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, NamedTuple

from ipygpumem.heap.holders.explanation import HIDDEN_CYCLE
from ipygpumem.heap.kinds.arrays import flat_elements, holding_objects
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.hidden_cycles import lines_that_end_cycles
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes.region import Region
from ipygpumem.inventory.rows.held_rows import HeldRow

_MOST_ROWS = 50
"""Maximum number of rows, the largest ones, whose lines are examined."""
_FREED = 0.9
"""Least share of a row's bytes that its line frees."""


class EndedCycles(NamedTuple):
    """Rows, with lines that also end cycles through arrays of objects."""

    rows: list[HeldRow]
    arrays: dict[str, set[int]]
    """The identities of the arrays in the cycles that each line ends."""


def with_ended_cycles(
    rows: list[HeldRow],
    removed_objects: Mapping[int, object],
    roots: Roots,
    arrays: Sequence[Any],
) -> EndedCycles:
    """Return the rows with the lines that end cycles in front of their own lines.

    Args:
        rows: the rows, the largest first.
        removed_objects: the objects at the end of the references that lines remove, by identity.
        roots: has the dicts with the user's names, which lead to everything.
        arrays: all NumPy arrays.
    """
    if not _may_be_in_cycles(arrays):
        return EndedCycles(rows, {})
    ended = EndedCycles([], {})
    for row in rows[:_MOST_ROWS]:
        end = _end_of_cycles(row.row.size_bytes, row.cuts, removed_objects, roots.namespaces)
        if end is not None and row.holder is not None:
            line = HIDDEN_CYCLE.remedy.line
            if end.lines:
                line = "; ".join([*end.lines, row.line])
                ended.arrays[line] = end.arrays
            row = row.with_remedy(replace(row.holder.remedy, line=line))
        ended.rows.append(row)
    return EndedCycles([*ended.rows, *rows[_MOST_ROWS:]], ended.arrays)


def _may_be_in_cycles(arrays: Sequence[Any]) -> bool:
    """Return True if an array contains more than text and numbers."""
    of_objects = compress(arrays, holding_objects(arrays))
    items = chain.from_iterable(flat_elements(array) or () for array in of_objects)
    return any(map(gc.is_tracked, items))


class _CycleEnd(NamedTuple):
    """The end of the cycles behind a line."""

    lines: list[str]
    """The lines that end them; none if they are further inside."""
    arrays: set[int]
    """The identities of the arrays through which they lead."""


def _end_of_cycles(
    size_bytes: int,
    cuts: Sequence[Cut],
    removed_objects: Mapping[int, object],
    namespaces: Iterable[int],
) -> _CycleEnd | None:
    """Return the end of the cycles that keep memory after a line; None if the line frees it.

    Args:
        size_bytes: the memory.
        cuts: the references that the line removes.
        removed_objects: the objects at the end of these references, by identity.
        namespaces: the identities of the dicts with the user's names.
    """
    codes = dict[int, str]()
    """The code of each removed object, by its identity."""
    for cut in cuts:
        for reference in cut.single_references():
            if reference.removed_id in removed_objects:
                codes[reference.removed_id] = reference.target
    if not codes:
        return None
    region = Region([removed_objects[key] for key in codes], namespaces=namespaces)
    cycles = region.in_hidden_cycles()
    if not cycles:
        return None
    kept = region.reach(cycles)
    freed = region.reach(codes.keys()) - kept
    # A removed object that is in a cycle cannot be reached afterwards, to end the cycle then.
    is_removed_kept = not kept.isdisjoint(codes)
    if not is_removed_kept and region.bytes_of(freed).total() >= _FREED * size_bytes:
        return None
    arrays = [region.objects[key] for key in cycles]
    with_code = [(code, removed_objects[key]) for key, code in codes.items() if code]
    return _CycleEnd(lines_that_end_cycles(with_code, arrays, region.reader.barriers), cycles)
