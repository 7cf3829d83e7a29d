"""Joins the rows of memory that one container holds into one row, with one line that frees all of
it.

Lines of their own would fail after the first one: ``del runs[0]`` moves the list's later items up.
The arrays of an object and its other memory, which are found separately, become one row, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ipygpumem.heap.paths.cuts import Cut
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Root
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.joined_lines import joined_by_lines
from ipygpumem.inventory.rows.joint_rows import (
    are_equal,
    comment_of,
    cuts_of,
    devices_of,
    largest_parts,
    records_of,
    row_of_several,
    rows_largest_first,
    sum_of,
    text_of_several,
)
from ipygpumem.inventory.rows.row_groups import grouped
from ipygpumem.records import RetainedArray
from ipygpumem.units import format_bytes

_ITEM = re.compile(r"\[[^\[\]]*\]$")
"""The last item of a path."""
_MOST_OWNERS = 12
"""Maximum number of objects from which the line of a merged row removes something."""


def merged(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, the largest first: one row for each object, and for all memory that one line
    frees. ``row_groups.py`` decides which rows these are.
    """
    merged_rows = list[HeldRow]()
    with_lines = list[HeldRow]()
    for row in _one_row_per_object(rows):
        if row.cuts:
            with_lines.append(row)
        else:
            merged_rows.append(row)
    for group in grouped(_with_one_row_for_object_and_arrays(with_lines)):
        merged_rows += _rows_of_group(group)
    return rows_largest_first(joined_by_lines(merged_rows))


def remarks_on_possibly_older(
    rows: Iterable[HeldRow],
    of_experiments: Sequence[HeldRow],
    of_any_age: Sequence[HeldRow],
) -> dict[str, str]:
    """Return a remark for each line that frees memory of experiments together with memory of
    unknown age: ``8 MiB of it may be older than the experiment``.

    Args:
        rows: the merged rows.
        of_experiments: the rows of memory that experiments have left.
        of_any_age: the rows of other memory.
    """
    remarks = dict[str, str]()
    for row in rows:
        if not any(_is_freed_with(part, row) for part in of_experiments):
            continue
        size_bytes = sum(part.row.size_bytes for part in of_any_age if _is_freed_with(part, row))
        if size_bytes > 0 and row.holder is not None:
            size = format_bytes(size_bytes)
            remarks[row.line] = f"{size} of it may be older than the experiment"
    return remarks


def _is_freed_with(part: HeldRow, row: HeldRow) -> bool:
    """Return True if the line of a merged row also removes all that the line of a part removes.

    Args:
        part: a row before it was merged.
        row: the merged row.
    """
    if part.holder is None or row.holder is None:
        return False
    if part.line == row.line:
        return True
    return bool(part.cuts) and set(part.cuts) <= set(row.cuts)


def holder_of_all(holders: Sequence[Holder]) -> Holder:
    """Return one holder for many objects, given the holder of each. Its line frees all of them, if
    there is such a line; otherwise it is advice in words.
    """
    first = holders[0]
    if holders.count(first) == len(holders):
        return first
    # Only the lines of these rows are merged, so their memory does not matter.
    no_memory = RetainedArray("", type_name="", shape=None, dtype="", device="", size_bytes=0)
    rows = list[HeldRow]()
    cuts = list[Cut]()
    for holder in holders:
        rows.append(HeldRow(no_memory, holder))
        cuts += holder.remedy.removed
    merged_row, *further_rows = merged(rows)
    if not further_rows and merged_row.holder is not None:
        remedy = replace(merged_row.holder.remedy, cuts=tuple(cuts))
        return replace(merged_row.holder, remedy=remedy)
    first_and_more = replace(first, path=f"{first.path}, and {len(holders) - 1:,} more")
    if are_equal(holder.remedy.line for holder in holders):
        line = first.remedy.line  # such as ``mock.reset_mock()``
    elif all(holder.remedy.removed for holder in holders):
        line = statement_of(cuts)  # of several containers
    else:
        line = ""
    if not line:
        return replace(first_and_more, remedy=REMOVE_THEM)
    return replace(first_and_more, remedy=Remedy(line, comment_of(rows), tuple(cuts)))


def holder_of_registered(roots: Sequence[Root]) -> Holder:
    """Return the holder of objects that one registry keeps, such as ``4 matplotlib figures``, with
    the line that removes all of them.

    Args:
        roots: the root of each object, with its reference.
    """
    first = roots[0]
    cuts = [root.cut for root in roots if root.cut is not None]
    text = text_of_several(Holder(first.text, NO_REMEDY, (first,)), len(roots))
    return Holder(text, Remedy(statement_of(cuts), cuts=tuple(cuts)), (first,))


# -- objects --------------------------------------------------------------------------------------


def _one_row_per_object(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for all that have the same name and the same holder: the
    columns of a data frame were found as arrays, its other memory by itself.
    """
    by_object = dict[tuple[str, Holder], list[HeldRow]]()
    """The rows by their name and holder."""
    unnamed = list[HeldRow]()
    for row in rows:
        if row.row.name and row.holder is not None:
            by_object.setdefault((row.row.name, row.holder), []).append(row)
        else:
            unnamed.append(row)
    return [*map(_row_of_object, by_object.values()), *unnamed]


def _row_of_object(rows: Sequence[HeldRow]) -> HeldRow:
    """Return one row for the arrays of an object and for its other memory. It looks like the first
    row with arrays, if there is one.
    """
    if len(rows) == 1:
        return rows[0]
    of_object = records_of(rows)
    row_to_show = of_object[0]
    for row in reversed(of_object):
        if row.arrays:
            row_to_show = row
    whole = replace(
        sum_of(of_object, row_to_show), device=devices_of(of_object), parts=largest_parts(of_object)
    )
    return HeldRow(whole, rows[0].holder)


def _with_one_row_for_object_and_arrays(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for an object and all arrays inside it, if one line frees all
    of them.

    Two frames in a dict stay two rows, although each of their arrays was found by itself.
    """
    by_cuts = dict[tuple[Cut, ...], list[HeldRow]]()
    for row in rows:
        by_cuts.setdefault(row.cuts, []).append(row)
    rows_of_objects = list[HeldRow]()
    for group in by_cuts.values():
        around = _object_around(group) if len(group) > 1 else None
        if around is None:
            rows_of_objects += group
            continue
        of_group = records_of(group)
        joined = replace(sum_of(of_group, around.row), device=devices_of(of_group))
        remedy = Remedy(around.line, comment_of(group), around.cuts)
        rows_of_objects.append(HeldRow(joined, around.holder).with_remedy(remedy))
    return rows_of_objects


def _object_around(group: Sequence[HeldRow]) -> HeldRow | None:
    """Return the row of the object, such as a data frame, inside which all other rows of a group
    are: arrays without a name. Return None if the group is not of that kind.
    """
    if any(row.cuts != group[0].cuts for row in group):
        return None
    rows_without_arrays = [row for row in group if row.row.arrays == 0]
    has_named_arrays = any(row.row.name for row in group if row.row.arrays)
    if has_named_arrays or len(rows_without_arrays) != 1:
        return None
    (around,) = rows_without_arrays
    if around.row.objects > 1:
        return None
    return around


# -- rows of groups -------------------------------------------------------------------------------


def _rows_of_group(group: list[HeldRow]) -> list[HeldRow]:
    """Return one row for a group. If no line can free all of it, return rows for its parts, one for
    each container.
    """
    if len(group) == 1:
        return group
    whole = _row_with_one_line(group)
    if whole is not None:
        return [whole]
    by_owner = dict[int, list[HeldRow]]()
    for row in group:
        by_owner.setdefault(row.cuts[0].owner_id, []).append(row)
    if len(by_owner) == 1:
        return group  # it cannot be divided further
    rows = list[HeldRow]()
    for part in by_owner.values():
        rows += _rows_of_group(part)
    return rows


def _row_with_one_line(group: list[HeldRow]) -> HeldRow | None:
    """Return one row for a group; None if no line can free all of it."""
    cuts = cuts_of(group)
    # A long line is better than two, of which the first moves the items of the second.
    statement = statement_of(cuts, most_owners=_MOST_OWNERS)
    first = group[0].holder
    if not statement or first is None:
        return None
    remedy = Remedy(statement, comment_of(group), tuple(cuts))
    return row_of_several(group, replace(first, path=_path_to_group(group, first), remedy=remedy))


def _path_to_group(group: Sequence[HeldRow], first: Holder) -> str:
    """Return the path to show for a group.

    ========================================  ==================================================
    the lines of the rows remove              path
    ========================================  ==================================================
    items of a registry                       ``4 matplotlib figures``
    all the same references                   that of each row
    several items each of several containers  that of each row, or ``runs[0]["x"], and 1 more``
    several items each of one container       that of each row, which is the container's already
    one item each of one container            ``runs`` for ``runs[0]`` and ``runs[1]``
    one part of each item of one container    ``runs[…].model`` for ``runs[0].model`` ...
    anything else                             ``runs[0].model, and 2 more``
    ========================================  ==================================================

    Args:
        group: the rows.
        first: the holder of the first one.
    """
    path = first.path
    cut = group[0].cuts[0]
    if cut.removal_of_all:
        return text_of_several(first, len(set(cuts_of(group))))
    if are_equal(row.cuts for row in group):
        return path
    owners = {cut.owner_id for row in group for cut in row.cuts}
    have_several_items = [len(row.cuts) > 1 for row in group]
    if len(owners) > 1 and any(have_several_items):
        if are_equal(row.holder.path for row in group if row.holder is not None):
            return path  # two keys of the same records
        return f"{path}, and {len(group) - 1} more"
    if are_equal(row.cuts[0].owner_id for row in group):
        if all(have_several_items):
            return path
        path_to_container = _ITEM.sub("", path)
        if path_to_container != path:
            return path_to_container
    elif cut.outer is not None:
        before, position, after = path.rpartition(f"[{cut.outer.position}]")
        if position:
            return f"{before}[…]{after}"
    return first.with_more(str(len(group) - 1)).path
