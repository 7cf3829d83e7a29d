"""Puts statements before a line that end the cycles which the line alone would leave.

The collector does not see the references of an array of objects, so nothing ever frees a cycle
through one. Before ``del box["x"]``, the cycle of the object there has to be ended:
``box["x"].rows = None; del box["x"]``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ipygpumem.heap.holders.explanation import HIDDEN_CYCLE
from ipygpumem.heap.kinds.arrays import flat_elements, object_arrays
from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.hidden_cycles import lines_that_end_cycles
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes.region import Region
from ipygpumem.inventory.rows.held_rows import HeldRow

_MOST_ROWS = 50
"""Maximum number of rows, the largest ones, whose lines are examined."""
_LEAST_FREED_SHARE = 0.9
"""Minimum share of a row's bytes that a line must free for it to be left as it is."""


class EndedCycles(NamedTuple):
    """The rows, whose lines now end the cycles through arrays of objects, too."""

    rows: list[HeldRow]
    arrays: dict[str, set[int]]
    """The identities of the arrays in the cycles that each line ends."""


def with_ended_cycles(
    rows: list[HeldRow],
    removed_objects: Mapping[int, object],
    roots: Roots,
    arrays: Sequence[Any],
) -> EndedCycles:
    """Return the rows; a line that would leave a cycle gets the statements that end it in front.

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
    """Return True if an array has objects as elements that may refer to the array: more than text
    and numbers.
    """
    with_objects = object_arrays(arrays)
    items = chain.from_iterable(flat_elements(array) or () for array in with_objects)
    return any(map(gc.is_tracked, items))


class _CycleEnd(NamedTuple):
    """The end of the cycles that would stay after a line."""

    lines: list[str]
    """The lines that end them; none if the cycles are so deep inside that no line can."""
    arrays: set[int]
    """The identities of the arrays through which they lead."""


def _end_of_cycles(
    size_bytes: int,
    cuts: Sequence[Cut],
    removed_objects: Mapping[int, object],
    namespaces: Iterable[int],
) -> _CycleEnd | None:
    """Return the end of the cycles that would keep memory after a line; None if the line frees the
    memory without that.

    Args:
        size_bytes: the memory.
        cuts: the references that the line removes.
        removed_objects: the objects at the end of these references, by identity.
        namespaces: the identities of the dicts with the user's names.
    """
    codes = _codes_of_removed(cuts, removed_objects)
    if not codes:
        return None
    region = Region([removed_objects[key] for key in codes], namespaces=namespaces)
    cycles = region.in_hidden_cycles()
    if not cycles:
        return None
    kept_by_cycles = region.reach(cycles)
    freed = region.reach(codes.keys()) - kept_by_cycles
    # A removed object that is in a cycle cannot be reached afterwards, to end the cycle then.
    is_removed_kept = not kept_by_cycles.isdisjoint(codes)
    is_enough_freed = region.bytes_of(freed).total() >= _LEAST_FREED_SHARE * size_bytes
    if is_enough_freed and not is_removed_kept:
        return None
    arrays = [region.objects[key] for key in cycles]
    with_code = [(code, removed_objects[key]) for key, code in codes.items() if code]
    return _CycleEnd(lines_that_end_cycles(with_code, arrays, region.reader.barriers), cycles)


def _codes_of_removed(cuts: Sequence[Cut], removed_objects: Mapping[int, object]) -> dict[int, str]:
    """Return the code of each object to which references lead, such as ``box["x"]``, by its
    identity. The arguments are those of ``_end_of_cycles``.
    """
    codes = dict[int, str]()
    for cut in cuts:
        for reference in cut.single_references():
            if reference.removed_id in removed_objects:
                codes[reference.removed_id] = reference.target
    return codes
