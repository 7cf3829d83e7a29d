"""Joins the rows of memory that one container holds into one, with one line that frees all of it.

Lines of their own would fail after the first one: ``del runs[0]`` moves the list's later items up.
The arrays of an object and its other memory, which are found separately, are one row, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import WITH_POSITIONS, Cut, Kind
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Root
from ipygpumem.heap.paths.statements import inside, statement_of
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.inventory.joined_lines import joined_by_lines
from ipygpumem.inventory.joint_rows import (
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
from ipygpumem.records import RetainedArray
from ipygpumem.units import format_bytes

_ITEM = re.compile(r"\[[^\[\]]*\]$")
"""The last item of a path."""
_MOST_OWNERS = 12
"""Maximum number of objects from which the line of a merged row removes something."""
_MOVING = {Kind.ITEM, Kind.ELEMENT, Kind.QUEUED}
"""References whose rows are merged even if they have names: removing one moves the rest."""


def merged(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, the largest first, with one row for each object and each container."""
    alone = list[HeldRow]()
    removable = list[HeldRow]()
    for row in _one_row_per_object(rows):
        if row.cuts:
            removable.append(row)
        else:
            alone.append(row)
    for group in _groups(_with_arrays_inside(removable)):
        alone += _rows_of_group(group)
    return rows_largest_first(joined_by_lines(alone))


def remarks_on_possibly_older(
    rows: Iterable[HeldRow],
    of_experiments: Sequence[HeldRow],
    of_any_age: Sequence[HeldRow],
) -> dict[str, str]:
    """Return the remark on each line that frees memory of experiments together with memory that may
    be older.

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
    """Return True if the line of a row removes all that the line of another row removes."""
    if part.holder is None or row.holder is None:
        return False
    if part.line == row.line:
        return True
    return bool(part.cuts) and set(part.cuts) <= set(row.cuts)


def holder_of_all(holders: Sequence[Holder]) -> Holder:
    """Return the holder of many objects, with one line that frees all of them if there is one."""
    first = holders[0]
    if holders.count(first) == len(holders):
        return first
    rows = list[HeldRow]()
    cuts = list[Cut]()
    for holder in holders:
        rows.append(HeldRow(RetainedArray("", "", None, "", "", 0), holder))
        cuts += holder.remedy.removed
    (row, *more) = merged(rows)
    if not more and row.holder is not None:
        return replace(row.holder, remedy=replace(row.holder.remedy, cuts=tuple(cuts)))
    of_all = replace(first, path=f"{first.path}, and {len(holders) - 1:,} more")
    if are_equal(holder.remedy.line for holder in holders):
        line = first.remedy.line  # such as ``mock.reset_mock()``
    elif all(holder.remedy.removed for holder in holders):
        line = statement_of(cuts)  # of several containers
    else:
        line = ""
    if not line:
        return replace(of_all, remedy=REMOVE_THEM)
    return replace(of_all, remedy=Remedy(line, comment_of(rows), tuple(cuts)))


def holder_of_registered(roots: Sequence[Root]) -> Holder:
    """Return the holder of objects of one registry, with one line that removes all of them.

    Args:
        roots: the root of each object, with its reference.
    """
    first = roots[0]
    cuts = [root.cut for root in roots if root.cut is not None]
    text = text_of_several(Holder(first.text, NO_REMEDY, (first,)), len(roots))
    return Holder(text, Remedy(statement_of(cuts), cuts=tuple(cuts)), (first,))


# -- objects --------------------------------------------------------------------------------------


def _one_row_per_object(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one in place of those that have the same name and the same holder."""
    by_object = dict[tuple[str, Holder], list[HeldRow]]()
    unnamed = list[HeldRow]()
    for row in rows:
        if row.row.name and row.holder is not None:
            by_object.setdefault((row.row.name, row.holder), []).append(row)
        else:
            unnamed.append(row)
    return [*map(_row_of_object, by_object.values()), *unnamed]


def _row_of_object(rows: Sequence[HeldRow]) -> HeldRow:
    """Return one row for the arrays of an object and for its other memory."""
    if len(rows) == 1:
        return rows[0]
    of_object = records_of(rows)
    shown = of_object[0]
    for row in reversed(of_object):
        if row.arrays:
            shown = row
    whole = replace(
        sum_of(of_object, shown), device=devices_of(of_object), parts=largest_parts(of_object)
    )
    return HeldRow(whole, rows[0].holder)


def _with_arrays_inside(rows: Sequence[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one in place of those of an object and of the arrays inside it.

    Two frames in a dict are two objects, although each of their arrays was found by itself.
    """
    by_cuts = dict[tuple[Cut, ...], list[HeldRow]]()
    for row in rows:
        by_cuts.setdefault(row.cuts, []).append(row)
    whole = list[HeldRow]()
    for group in by_cuts.values():
        around = _object_around(group) if len(group) > 1 else None
        if around is None:
            whole += group
            continue
        of_group = records_of(group)
        joined = replace(sum_of(of_group, around.row), device=devices_of(of_group))
        remedy = Remedy(around.line, comment_of(group), around.cuts)
        whole.append(HeldRow(joined, around.holder).with_remedy(remedy))
    return whole


# -- groups ---------------------------------------------------------------------------------------


class _ChangedPlaces(NamedTuple):
    """Containers and references that the line of one row changes for the line of another, so that
    one line must free both.
    """

    containers: set[int]
    """Identities of the containers from which rows are removed: their other items move."""
    crowded: set[int]
    """Containers from which one line may remove several items by their positions."""
    registries: set[int]
    """Lists with a call that removes an item, such as a logger's handlers, from which rows are
    removed, and through which the lines of other rows lead.
    """
    conflicting: set[tuple[int, str]]
    """References after whose removal by one line another line would raise an error."""

    @classmethod
    def of(cls, rows: Sequence[HeldRow]) -> _ChangedPlaces:
        """Return the places that the lines of some rows change."""
        removals = Counter[int]()
        called = set[int]()
        led_through = set[int]()
        for row in rows:
            for cut in row.cuts:
                is_one_of_several_keys = cut.kind is Kind.KEY and len(row.cuts) > 1
                if _is_merged_by_container(row, cut) or is_one_of_several_keys:
                    removals[cut.owner_id] += 1
                if cut.kind is Kind.CALL and cut.owner_id:
                    called.add(cut.owner_id)
                for outer in _outer_references(cut):
                    if outer.kind is Kind.CALL:
                        led_through.add(outer.owner_id)
        crowded = {container for container, count in removals.items() if count > 1}
        return cls(set(removals), crowded, called & led_through, _conflicting_references(rows))


def _conflicting_references(rows: Sequence[HeldRow]) -> set[tuple[int, str]]:
    """Return the references that the lines of two rows both remove, or that one removes and another
    leads through.
    """
    number_of_lines = Counter[tuple[int, str]]()
    led_through = set[tuple[int, str]]()
    for row in rows:
        removed = set[tuple[int, str]]()
        for cut in row.cuts:
            removed.update(map(_key_of_reference, cut.each()))
            led_through.update(map(_key_of_reference, _outer_references(cut)))
        number_of_lines.update(removed)
    removed_twice = {reference for reference, number in number_of_lines.items() if number > 1}
    return removed_twice | (number_of_lines.keys() & led_through)


def _groups(rows: Sequence[HeldRow]) -> list[list[HeldRow]]:
    """Return the rows in groups that one line may free."""
    if len(rows) < 2:
        return [list(rows)] if rows else []
    changed = _ChangedPlaces.of(rows)
    group_of = dict[object, list[HeldRow]]()
    for row in rows:
        group = [row]
        for place in _keys_of_groups(row, changed):
            other = group_of.setdefault(place, group)
            if other is not group:
                other += group
                _replace_group(group_of, group, other)
                group = other
    groups = list[list[HeldRow]]()
    for row in rows:
        group = group_of[row.cuts]
        if group[0] is row:  # a group stands where its first row stood
            groups.append(group)
    return groups


def _replace_group(
    group_of: dict[object, list[HeldRow]], group: list[HeldRow], other: list[HeldRow]
) -> None:
    """Put a group that has been added to another one at all of its places."""
    for place, group_there in group_of.items():
        if group_there is group:
            group_of[place] = other


def _keys_of_groups(row: HeldRow, changed: _ChangedPlaces) -> Iterator[object]:
    """Yield the keys of the groups to which a row belongs."""
    yield row.cuts  # one line frees both
    for cut in row.cuts:
        if _is_merged_by_container(row, cut):
            yield cut.owner_id
        elif cut.kind is Kind.KEY and cut.owner_id in changed.crowded:
            yield cut.owner_id  # ``del outer["x"]`` moves the keys of the other line
        for other in (cut, *_outer_references(cut)):
            if other.kind is Kind.CALL and other.owner_id in changed.registries:
                yield other.owner_id
            if _key_of_reference(other) in changed.conflicting:
                yield _key_of_reference(other)
        for outer in _outer_references(cut):
            if outer.kind in WITH_POSITIONS and outer.owner_id in changed.containers:
                yield outer.owner_id  # another row's removal moves the items of this list
        container = cut.outer
        if container is not None and container.kind is Kind.ITEM and not row.row.name:
            # One loop over ``runs`` removes ``runs[0]["grad"]``, ``runs[1]["grad"]`` and so on.
            yield container.owner_id, inside(cut, container).statement


def _is_merged_by_container(row: HeldRow, cut: Cut) -> bool:
    """Return True if one line removes a row together with the other rows of its container.

    A row with a name has a line of its own, unless that line would move the other items, or one
    statement removes all of them.
    """
    if cut.size == 0:  # it is in no container
        return False
    return cut.kind in _MOVING or bool(cut.all_of) or not row.row.name


def _key_of_reference(cut: Cut) -> tuple[int, str]:
    """Return the key of a reference, which a row may remove, and another one's line lead
    through.
    """
    return cut.owner_id, cut.target


def _outer_references(cut: Cut) -> Iterator[Cut]:
    """Yield the references on the way to a reference."""
    outer = cut.outer
    while outer is not None:
        yield outer
        outer = outer.outer


# -- rows -----------------------------------------------------------------------------------------


def _rows_of_group(group: list[HeldRow]) -> list[HeldRow]:
    """Return one row for a group, or rows for its parts if no line can free all of it."""
    if len(group) == 1:
        return group
    whole = _row_with_one_line(group)
    if whole is not None:
        return [whole]
    by_owner = dict[int, list[HeldRow]]()
    for row in group:
        by_owner.setdefault(row.cuts[0].owner_id, []).append(row)
    if len(by_owner) == 1:
        return group
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


def _object_around(group: Sequence[HeldRow]) -> HeldRow | None:
    """Return the row of the object in which all other rows of a group are arrays without a name,
    such as a data frame; None if there is none.
    """
    if any(row.cuts != group[0].cuts for row in group):
        return None
    objects = [row for row in group if row.row.arrays == 0]
    has_named_arrays = any(row.row.name for row in group if row.row.arrays)
    if len(objects) != 1 or objects[0].row.objects > 1 or has_named_arrays:
        return None
    return objects[0]


def _path_to_group(group: Sequence[HeldRow], first: Holder) -> str:
    """Return the path to the object that holds all rows of a group.

    Args:
        group: the rows.
        first: the holder of the first one.
    """
    path = first.path
    cut = group[0].cuts[0]
    if cut.all_of:  # ``4 matplotlib figures``
        return text_of_several(first, len(set(cuts_of(group))))
    if are_equal(row.cuts for row in group):
        return path
    owners = {cut.owner_id for row in group for cut in row.cuts}
    if len(owners) > 1 and any(len(row.cuts) > 1 for row in group):
        if are_equal(row.holder.path for row in group if row.holder is not None):
            return path  # two keys of the same records
        return f"{path}, and {len(group) - 1} more"  # in several containers
    if are_equal(row.cuts[0].owner_id for row in group):
        if all(len(row.cuts) > 1 for row in group):
            return path  # that of the container already
        owner = _ITEM.sub("", path)
        if owner != path:  # ``runs`` of ``runs[0]`` and ``runs[1]``
            return owner
    elif cut.outer is not None:  # ``runs[…].model`` of ``runs[0].model`` and ``runs[1].model``
        before, index, after = path.rpartition(f"[{cut.outer.position}]")
        if index:
            return f"{before}[…]{after}"
    return first.with_more(str(len(group) - 1)).path
