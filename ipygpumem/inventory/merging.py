"""Joins the rows of memory that one container holds into one, with one line that frees all of it.

Lines of their own would fail after the first one: ``del runs[0]`` moves the list's later items up.
The arrays of an object and its other memory, which are found separately, are one row, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.array_search import ArraySearch
from ipygpumem.heap.arrays import StorageKey
from ipygpumem.heap.parts import ObjectPart, parts_of
from ipygpumem.heap.paths.cuts import (
    WITH_POSITIONS,
    Cut,
    Kind,
    in_sequence,
    inside,
    split,
    statement_of,
)
from ipygpumem.heap.paths.remedies import (
    NO_REMEDY,
    REMOVE_THEM,
    Holder,
    Remedy,
    comments_of,
)
from ipygpumem.heap.paths.roots import Root
from ipygpumem.interrupts import is_from_signal
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.records import SEVERAL_TYPES, RetainedArray
from ipygpumem.units import format_bytes

_ITEM = re.compile(r"\[[^\[\]]*\]$")
"""The last item of a path."""
_MOST_NAMES = 3
"""Maximum number of names to show of a row of several."""
_MOST_COMPARED = 40
"""Maximum number of rows whose lines are compared with each other."""
_MOST_ITEMS = 4
"""Maximum number of items of a list that are deleted without a loop."""
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
    rows = _joined_by_lines(_joined_by_positions(_joined_by_deletion(alone)))
    return _rows_largest_first(rows)


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
    if _are_equal(holder.remedy.line for holder in holders):
        line = first.remedy.line  # such as ``mock.reset_mock()``
    elif all(holder.remedy.removed for holder in holders):
        line = statement_of(cuts)  # of several containers
    else:
        line = ""
    if not line:
        return replace(of_all, remedy=REMOVE_THEM)
    return replace(of_all, remedy=Remedy(line, _comment_of(rows), tuple(cuts)))


def holder_of_registered(roots: Sequence[Root]) -> Holder:
    """Return the holder of objects of one registry, with one line that removes all of them.

    Args:
        roots: the root of each object, with its reference.
    """
    of_roots = [root.cut for root in roots if root.cut is not None]
    text = _text_of_several(Holder(roots[0].text, NO_REMEDY, (roots[0],)), len(roots))
    return Holder(text, Remedy(statement_of(of_roots), cuts=tuple(of_roots)), (roots[0],))


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
    of_object = _records_of(rows)
    shown = of_object[0]
    for row in reversed(of_object):
        if row.arrays:
            shown = row
    whole = replace(
        _sum_of(of_object, shown), device=_devices_of(of_object), parts=_largest_parts(of_object)
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
        of_group = _records_of(group)
        joined = replace(_sum_of(of_group, around.row), device=_devices_of(of_group))
        remedy = Remedy(around.line, _comment_of(group), around.cuts)
        whole.append(HeldRow(joined, around.holder).with_remedy(remedy))
    return whole


def _records_of(rows: Iterable[HeldRow]) -> list[RetainedArray]:
    """Return the rows without their holders."""
    return [row.row for row in rows]


def _largest_parts(rows: Iterable[RetainedArray]) -> dict[str, int]:
    """Return the largest parts of rows, with the sum of those that have the same name."""
    parts = Counter[str]()
    for row in rows:
        parts.update(row.parts)
    return dict((+parts).most_common(_MOST_NAMES))


def _sum_of(rows: Sequence[RetainedArray], shown: RetainedArray) -> RetainedArray:
    """Return a row that looks like ``shown``, with the bytes and the certainty of all rows."""
    size_bytes = 0
    libraries = set[str]()
    for row in rows:
        size_bytes += row.size_bytes
        libraries.update(row.uncounted)
    return replace(
        shown,
        size_bytes=size_bytes,
        is_at_least=any(row.is_at_least for row in rows),
        uncounted=tuple(sorted(libraries)),
    )


def _devices_of(rows: Sequence[RetainedArray]) -> str:
    """Return the devices of rows, such as ``cpu, cuda:0``."""
    return ", ".join(dict.fromkeys(row.device for row in rows))


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
                if _is_in_container(row, cut) or (cut.kind is Kind.KEY and len(row.cuts) > 1):
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
        if _is_in_container(row, cut):
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
            yield container.owner_id, inside(cut, container).statement


def _is_in_container(row: HeldRow, cut: Cut) -> bool:
    """Return True if a row is removed from a container together with its other rows."""
    if cut.size == 0:
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
    cuts = _cuts_of(group)
    # A long line is better than two, of which the first moves the items of the second.
    statement = statement_of(cuts, most_owners=_MOST_OWNERS)
    first = group[0].holder
    if not statement or first is None:
        return None
    remedy = Remedy(statement, _comment_of(group), tuple(cuts))
    return _row_of_several(group, replace(first, path=_path_to_group(group, first), remedy=remedy))


def _comment_of(rows: Iterable[HeldRow]) -> str:
    """Return the comments on the lines of some rows."""
    return comments_of(row.holder.remedy for row in rows if row.holder is not None)


def _cuts_of(rows: Iterable[HeldRow]) -> list[Cut]:
    """Return the references that the lines of rows remove, as far as they are known."""
    return list(chain.from_iterable(row.cuts for row in rows))


def _row_of_several(rows: Sequence[HeldRow], holder: Holder) -> HeldRow:
    """Return one row for several, with the holder of all."""
    records = _records_of(rows)
    first = records[0]
    whole = replace(
        _sum_of(records, first),
        name=_names_of(records),
        arrays=sum(row.arrays for row in records),
        objects=sum(row.objects for row in records),
        cell=first.cell if _are_equal(row.cell for row in records) else None,
    )
    if _are_equal(map(_shown_fields, records)):
        whole = replace(whole, parts=_largest_parts(records))
    else:
        whole = _of_many_kinds(whole, records)
    return HeldRow(whole, holder)


def _rows_largest_first(rows: Sequence[HeldRow]) -> list[HeldRow]:
    return sorted(rows, key=attrgetter("row.size_bytes"), reverse=True)


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


def _are_equal(values: Iterable[object]) -> bool:
    return len(set(values)) == 1


def _of_many_kinds(whole: RetainedArray, rows: Sequence[RetainedArray]) -> RetainedArray:
    """Return a row of objects that differ, with the bytes of each type."""
    sizes = Counter[str]()
    for row in rows:
        if row.type_name == SEVERAL_TYPES and row.parts:
            sizes.update(row.parts)
        else:
            sizes[row.type_name] += row.size_bytes
    whole = replace(whole, shape=None, dtype="", device=_devices_of(rows), arrays=0, parts={})
    if len(sizes) == 1:
        if all(row.parts for row in rows):
            return replace(whole, parts=_largest_parts(rows))
        return whole
    return replace(whole, type_name=SEVERAL_TYPES, parts=dict(sizes.most_common(_MOST_NAMES)))


def _names_of(rows: Sequence[RetainedArray]) -> str:
    """Return the names of rows, or the first of them."""
    names = list(dict.fromkeys(row.name for row in rows if row.name))
    if len(names) > _MOST_NAMES:
        names = [*names[:_MOST_NAMES], "…"]
    return ", ".join(names)


def _shown_fields(row: RetainedArray) -> tuple[object, ...]:
    """Return all that a row shows besides its size and holder."""
    return row.type_name, row.dtype, row.shape, row.device


def _path_to_group(group: Sequence[HeldRow], first: Holder) -> str:
    """Return the path to the object that holds all rows of a group.

    Args:
        group: the rows.
        first: the holder of the first one.
    """
    path = first.path
    cut = group[0].cuts[0]
    if cut.all_of:
        return _text_of_several(first, len(set(_cuts_of(group))))
    if _are_equal(row.cuts for row in group):
        return path
    owners = {cut.owner_id for row in group for cut in row.cuts}
    if len(owners) > 1 and any(len(row.cuts) > 1 for row in group):
        if _are_equal(row.holder.path for row in group if row.holder is not None):
            return path  # two keys of the same records
        return f"{path}, and {len(group) - 1} more"  # in several containers
    if _are_equal(row.cuts[0].owner_id for row in group):
        if all(len(row.cuts) > 1 for row in group):
            return path  # that of the container already
        owner = _ITEM.sub("", path)
        if owner != path:
            return owner
    elif cut.outer is not None:
        before, index, after = path.rpartition(f"[{cut.outer.position}]")
        if index:
            return f"{before}[…]{after}"
    return first.with_more(str(len(group) - 1)).path


def _text_of_several(first: Holder, number: int) -> str:
    """Return the words for a number of references, given the holder of the first, such as ``4
    matplotlib figures``.
    """
    if number == 1:
        return first.path
    if first.roots[0].plural:
        return f"{number} {first.roots[0].plural}"
    return first.with_more(str(number - 1)).path


# -- lines that delete one object ----------------------------------------------------------------


def _joined_by_deletion(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one in place of those that the same line deletes or clears: run again,
    the line would fail or free nothing.

    Examples are ``%xdel _4`` for each part of a model that a cell has shown, and
    ``layers.zero_grad()`` for each module of a ``ModuleDict``.
    """
    of_line = dict[str, list[HeldRow]]()
    remaining = list[HeldRow]()
    for row in rows:
        if row.holder is not None and row.holder.remedy.works_once:
            of_line.setdefault(row.line, []).append(row)
        else:
            remaining.append(row)
    for of_same in of_line.values():
        if len(of_same) == 1:
            remaining += of_same
            continue
        largest_first = _rows_largest_first(of_same)
        holders = [row.holder for row in largest_first if row.holder is not None]
        path = _text_of_several(holders[0], len({holder.path for holder in holders}))
        remedy = replace(holders[0].remedy, comment=_comment_of(largest_first))
        remaining.append(
            _row_of_several(largest_first, replace(holders[0], path=path, remedy=remedy))
        )
    return remaining


# -- lines for items of one list ------------------------------------------------------------------


def _joined_by_positions(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one in place of those whose lines delete items of one list, or clear
    their gradients.

    After ``del runs[0]``, ``del runs[1]`` would delete another item. A list may have a hundred
    modules, each with a gradient.
    """
    of_list = dict[tuple[str, str], dict[int, list[HeldRow]]]()
    remaining = list[HeldRow]()
    for row in rows:
        item = None if row.holder is None else row.holder.remedy.item
        removes_key = any(cut.kind is Kind.KEY for cut in row.cuts)
        if item is None or removes_key:  # ``del d[1]`` moves no other value of a dict
            remaining.append(row)
        else:
            of_owner = of_list.setdefault((item.owner, item.ending), {})
            of_owner.setdefault(item.position, []).append(row)
    for (owner, ending), of_owner in of_list.items():
        remaining += _row_of_items(owner, ending, of_owner)
    return remaining


def _row_of_items(owner: str, ending: str, rows_at: Mapping[int, list[HeldRow]]) -> list[HeldRow]:
    """Return one row for those whose lines are about items of a list, or the only row.

    Args:
        owner: the code of the list.
        ending: that of ``ItemLine``.
        rows_at: the rows by the position of their item.
    """
    rows = [row for of_item in rows_at.values() for row in of_item]
    if len(rows) == 1:
        return rows
    first = rows[0].holder
    if first is None:
        return rows
    positions = sorted(rows_at, reverse=not ending)
    line = in_sequence([_statement_of_item(owner, ending, position) for position in positions])
    if len(positions) > _MOST_ITEMS:
        listed = ", ".join(map(str, positions))
        if ending and positions[-1] - positions[0] == len(positions) - 1:
            listed = f"range({positions[0]}, {positions[-1] + 1})"
        statement = _statement_of_item(owner, ending, "_position")
        deletion = "; del _position" if ending else ", _position"
        line = f"for _position in {listed}: {statement}{deletion}"
    remedy = Remedy(line, _comment_of(rows), tuple(_cuts_of(rows)))
    path = _text_of_several(first, len(positions))
    return [_row_of_several(_rows_largest_first(rows), replace(first, path=path, remedy=remedy))]


def _statement_of_item(owner: str, ending: str, position: int | str) -> str:
    item = f"{owner}[{position}]"
    return f"{item}{ending}" if ending else f"del {item}"


# -- lines that name what another line removes ----------------------------------------------------


def _joined_by_lines(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one in place of two if the line of the first names an object that the
    line of the second removes.

    Run in any order, one of their lines would fail: ``del runs["opt"]`` and
    ``runs["opt"].zero_grad()``.
    """
    if len(rows) > _MOST_COMPARED:
        return rows
    remaining = list(rows)
    while True:
        pair = _user_and_remover(remaining)
        if pair is None:
            return remaining
        holders = [row.holder for row in pair if row.holder is not None]
        remedies = [holder.remedy for holder in holders]
        paths = {holder.path: holder.roots for holder in holders}
        line = in_sequence([remedy.line for remedy in remedies])
        holder = Holder(
            ", ".join(paths),
            Remedy(line, comments_of(remedies), tuple(_cuts_of(pair))),
            tuple(chain.from_iterable(paths.values())),
        )
        remaining = [row for row in remaining if all(row is not other for other in pair)]
        remaining.append(_row_of_several(_rows_largest_first(pair), holder))


def _user_and_remover(rows: Sequence[HeldRow]) -> tuple[HeldRow, HeldRow] | None:
    """Return a row whose line names an object, and the row whose line removes it."""
    with_lines = list[tuple[HeldRow, _Expressions]]()
    for row in rows:
        if row.holder is not None and row.holder.remedy.is_simple:
            with_lines.append((row, _Expressions.of(row.holder.remedy)))
    for user, of_user in with_lines:
        for remover, of_remover in with_lines:
            if user.line != remover.line and of_user.fails_after(of_remover):
                return user, remover
    return None


class _Expressions(NamedTuple):
    """The code of objects in a line."""

    used: set[str]
    """Objects of which the line uses an attribute or item."""
    removed: set[str]
    """Objects that it deletes, or replaces by None."""
    containers: set[str]
    """Objects of which it uses an attribute or item of an item: ``rows`` in ``rows[0].x``."""
    emptied: set[str]
    """Objects from which it removes items by position, or all of them."""

    @classmethod
    def of(cls, remedy: Remedy) -> _Expressions:
        """Return the objects that a line uses and removes."""
        expressions = cls(set(), set(), set(), set())
        # A dict may have integers as keys: ``del d[1]``.
        dicts = {cut.owner for cut in remedy.removed if cut.kind is Kind.KEY}
        code_of_dicts = {ast.unparse(ast.parse(split(owner)[1])) for owner in dicts}
        for node in ast.walk(ast.parse(remedy.line)):
            match node:
                case ast.Attribute(value=owner) | ast.Subscript(value=owner):
                    expressions.used.add(ast.unparse(owner))
                    if isinstance(owner, ast.Subscript):
                        expressions.containers.add(ast.unparse(owner.value))
                case ast.Delete(targets=targets):
                    expressions.removed.update(map(ast.unparse, targets))
                    expressions.emptied.update(set(_lists_of(targets)) - code_of_dicts)
                case ast.Assign(targets=targets, value=ast.Constant(value=None)):
                    expressions.removed.update(map(ast.unparse, targets))
                case ast.Call(func=ast.Attribute(value=owner, attr="clear" | "pop")):
                    expressions.emptied.add(ast.unparse(owner))
        return expressions

    def fails_after(self, other: _Expressions) -> bool:
        """Return True if this line would fail after another one, or be about another object."""
        if not self.used.isdisjoint(other.removed):
            return True
        return not self.containers.isdisjoint(other.emptied)


def _lists_of(targets: Iterable[ast.expr]) -> Iterator[str]:
    """Yield the lists from which ``del`` removes items by position."""
    for target in targets:
        match target:
            case ast.Subscript(value=owner, slice=ast.Slice() | ast.Constant(value=int())):
                yield ast.unparse(owner)


# -- parts -----------------------------------------------------------------------------------------


def with_arrays(
    row: RetainedArray, value: object, storages: Container[StorageKey]
) -> RetainedArray:
    """Return an object's row whose parts have the bytes of arrays that other rows list.

    Args:
        row: the row of the object without these arrays.
        value: the object.
        storages: the storages of the arrays.
    """
    sizes = Counter(row.parts)
    search = ArraySearch(lambda _, array: array.storage not in storages)
    for part in _parts_of_object(value):
        items = [value] if part.objects is None else part.objects
        part_bytes = 0
        for item in items:
            part_bytes += sum(array.size_bytes for _, array in search.find(item))
        for name in part.names:  # columns that share an array get equal shares
            sizes[name] += part_bytes // len(part.names)
    return replace(row, parts=dict((+sizes).most_common(_MOST_NAMES)))


def _parts_of_object(value: object) -> Sequence[ObjectPart]:
    """Return the parts of an object, those with unknown objects last."""
    try:
        parts = list(parts_of(value))
    except Exception as error:  # a thread changes it, or an unknown version of a library
        if is_from_signal(error):
            raise
        return []
    return sorted(parts, key=lambda part: part.objects is None)
