"""Makes one row of the rows that one container holds, with one line that frees them all.

Lines of their own would fail after the first one: ``del runs[0]`` moves the list's later items up.
The arrays of an object and its other memory, which are found separately, are one row, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.array_search import ArraySearch
from ipygpumem.heap.arrays import StorageKey
from ipygpumem.heap.parts import ObjectPart, parts_of
from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence, inside, split, statement_of
from ipygpumem.heap.paths.roots import REMOVE_THEM, Root
from ipygpumem.heap.paths.ways import MORE_THERE, comments_of, is_simple
from ipygpumem.interrupts import is_from_signal
from ipygpumem.records import (
    SEVERAL_TYPES,
    ReferencePath,
    RetainedArray,
    line_of,
)
from ipygpumem.units import format_bytes

_ITEM = re.compile(r"\[[^\[\]]*\]$")
"""The last item of a path."""
_MOST_NAMES = 3
"""Maximum number of names to show of a row of several."""
_MOST_CALLS = 4
"""Maximum number of calls that one line makes if another call does the work of all of them."""
_MOST_COMPARED = 40
"""Maximum number of rows whose lines are compared with each other."""
_MOST_ITEMS = 4
"""Maximum number of items of a list that are deleted without a loop."""
_DELETED_ITEM = re.compile(r"del ([^;#]+)\[(\d+)\]")
_CLEARED_ITEM = re.compile(r"([^;#]+)\[(\d+)\](\.zero_grad\(\)|\.grad = None)")
_MOST_OWNERS = 12
"""Maximum number of objects from which the line of a merged row removes something."""
_MOVING = {Kind.ITEM, Kind.ELEMENT, Kind.QUEUED}
"""References whose rows are merged even if they have names: removing one moves the rest."""

_WITH_POSITIONS = {Kind.ITEM, Kind.QUEUED}
"""References that the code of a path names by a position."""


@dataclass(frozen=True)
class _Removable:
    """A row, and the references that its line removes."""

    row: RetainedArray
    cuts: tuple[Cut, ...]

    @property
    def cut(self) -> Cut:
        """The first reference."""
        return self.cuts[0]


def merged(rows: Sequence[RetainedArray], cuts: dict[str, list[Cut]]) -> list[RetainedArray]:
    """Return the rows, the largest first, those of one object and of one container as one.

    Args:
        rows: the rows, each with its holder.
        cuts: the references that a line removes, by the line; those of new lines are added.
    """
    alone = list[RetainedArray]()
    removable = list[_Removable]()
    for row in _one_of_each_object(rows):
        cuts_of_row: Sequence[Cut] = ()
        if row.holder is not None:
            cuts_of_row = cuts.get(line_of(row.holder.advice), ())
        if cuts_of_row:
            removable.append(_Removable(row, tuple(cuts_of_row)))
        else:
            alone.append(row)
    for group in _groups(_with_arrays_inside(removable)):
        alone += _rows_of(group, cuts)
    rows = _joined_by_positions(_joined_by_deletion(alone), cuts)
    rows = _joined_by_lines(rows, cuts)
    return sorted(rows, key=attrgetter("size_bytes"), reverse=True)


def remarks_on_possibly_older(
    rows: Iterable[RetainedArray],
    of_experiments: Sequence[RetainedArray],
    of_any_age: Sequence[RetainedArray],
    cuts: Mapping[str, Sequence[Cut]],
) -> dict[str, str]:
    """Return the remark on each line that frees memory of experiments together with memory that may
    be older.

    Args:
        rows: the merged rows.
        of_experiments: the rows of memory that experiments have left.
        of_any_age: the rows of other memory.
        cuts: the references that a line removes.
    """
    remarks = dict[str, str]()
    for row in rows:
        if not any(_is_freed_with(part, row, cuts) for part in of_experiments):
            continue
        size_bytes = sum(part.size_bytes for part in of_any_age if _is_freed_with(part, row, cuts))
        if size_bytes > 0 and row.holder is not None:
            size = format_bytes(size_bytes)
            remarks[line_of(row.holder.advice)] = f"{size} of it may be older than the experiment"
    return remarks


def _is_freed_with(
    part: RetainedArray, row: RetainedArray, cuts: Mapping[str, Sequence[Cut]]
) -> bool:
    """Return True if the line of a row removes all that the line of another row removes."""
    if part.holder is None or row.holder is None:
        return False
    lines = [line_of(part.holder.advice), line_of(row.holder.advice)]
    if lines[0] == lines[1]:
        return True
    of_part, of_row = (set(cuts.get(line, ())) for line in lines)
    return bool(of_part) and of_part <= of_row


def holder_of_all(holders: Sequence[ReferencePath], cuts: dict[str, list[Cut]]) -> ReferencePath:
    """Return the holder of many objects, with one line that frees all of them if there is one.

    Args:
        holders: the holder of each object.
        cuts: the references that a line removes, by the line; those of the new line are added.
    """
    first = holders[0]
    if holders.count(first) == len(holders):
        return first
    rows = [RetainedArray("", "", None, "", "", 0, holder=holder) for holder in holders]
    (row, *more) = merged(rows, cuts)
    cuts_of_all = list[Cut]()
    for holder in holders:
        cuts_of_all += cuts.get(line_of(holder.advice), ())
    if not more and row.holder is not None:
        cuts[line_of(row.holder.advice)] = cuts_of_all
        return row.holder
    path = f"{first.path}, and {len(holders) - 1:,} more"
    line = ""
    if _are_equal(line_of(holder.advice) for holder in holders):
        line = first.advice  # such as ``mock.reset_mock()``
    elif all(line_of(holder.advice) in cuts for holder in holders):
        line = statement_of(cuts_of_all)  # of several containers
    if not line:
        return ReferencePath(path, REMOVE_THEM)
    cuts[line_of(line)] = cuts_of_all
    return ReferencePath(path, line_of(line) + _comments(rows))


def holder_of_registered(roots: Sequence[Root], cuts: dict[str, list[Cut]]) -> ReferencePath:
    """Return the holder of objects of one registry, with one line that removes all of them.

    Args:
        roots: the root of each object, with its reference.
        cuts: receives the references that the line removes.
    """
    of_roots = [root.cut for root in roots if root.cut is not None]
    text = _text_of_several(roots[0].text, len(roots))
    advice = statement_of(of_roots)
    if len(of_roots) > _MOST_CALLS and of_roots[0].kind is Kind.CALL:
        advice = of_roots[0].all_of  # ``plt.close("all")`` instead of a call for each of 95 figures
    cuts[advice] = of_roots
    return ReferencePath(text, advice)


# -- objects --------------------------------------------------------------------------------------


def _one_of_each_object(rows: Sequence[RetainedArray]) -> list[RetainedArray]:
    """Return the rows, those of one name with one holder as one."""
    by_object = dict[tuple[str, ReferencePath], list[RetainedArray]]()
    unnamed = list[RetainedArray]()
    for row in rows:
        if row.name and row.holder is not None:
            by_object.setdefault((row.name, row.holder), []).append(row)
        else:
            unnamed.append(row)
    return [*map(_whole_object, by_object.values()), *unnamed]


def _whole_object(rows: Sequence[RetainedArray]) -> RetainedArray:
    """Return one row for the arrays of an object and for its other memory."""
    if len(rows) == 1:
        return rows[0]
    shown = rows[0]
    for row in reversed(rows):
        if row.arrays:
            shown = row
    return replace(_sum_of(rows, shown), device=_devices_of(rows), parts=_parts_of(rows))


def _with_arrays_inside(rows: Sequence[_Removable]) -> list[_Removable]:
    """Return the rows, those of an object and of the arrays inside it as one.

    Two frames in a dict are two objects, although each of their arrays was found by itself.
    """
    by_cuts = dict[tuple[Cut, ...], list[_Removable]]()
    for row in rows:
        by_cuts.setdefault(row.cuts, []).append(row)
    whole = list[_Removable]()
    for group in by_cuts.values():
        around = _object_around(group) if len(group) > 1 else None
        if around is None:
            whole += group
            continue
        of_group = [row.row for row in group]
        joined = replace(_sum_of(of_group, around), device=_devices_of(of_group))
        if joined.holder is not None:
            advice = line_of(joined.holder.advice) + _comments(of_group)
            joined = replace(joined, holder=replace(joined.holder, advice=advice))
        whole.append(_Removable(joined, group[0].cuts))
    return whole


def _parts_of(rows: Iterable[RetainedArray]) -> dict[str, int]:
    """Return the largest parts of rows, those with equal names as one."""
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


class _Moved(NamedTuple):
    """The identities of containers whose other items move when a row is removed."""

    containers: set[int]
    """Containers from which rows are removed."""
    crowded: set[int]
    """Containers from which one line may remove several items by their positions."""
    registries: set[int]
    """Lists with a call that removes an item, such as a logger's handlers, from which rows are
    removed, and through which the lines of other rows lead.
    """
    passed: set[tuple[int, str]]
    """References that the lines of two rows both remove, or that one removes and another leads
    through: the second line would raise an error.
    """

    @classmethod
    def of(cls, rows: Sequence[_Removable]) -> _Moved:
        """Return the containers and lists to which the lines of some rows lead."""
        containers = Counter[int]()
        called, passed = set[int](), set[int]()
        removed, on_the_way = Counter[tuple[int, str]](), set[tuple[int, str]]()
        for row in rows:
            for cut in row.cuts:
                if _is_in_container(row, cut) or (cut.kind is Kind.KEY and len(row.cuts) > 1):
                    containers[cut.owner_id] += 1
                if cut.kind is Kind.CALL and cut.owner_id:
                    called.add(cut.owner_id)
                passed.update(outer.owner_id for outer in _outer(cut) if outer.kind is Kind.CALL)
                on_the_way.update(map(_reference, _outer(cut)))
            of_row = chain.from_iterable(cut.each() for cut in row.cuts)
            removed.update(set(map(_reference, of_row)))
        twice = {reference for reference, count in removed.items() if count > 1}
        crowded = {owner_id for owner_id, count in containers.items() if count > 1}
        return cls(set(containers), crowded, called & passed, twice | removed.keys() & on_the_way)


def _groups(rows: Sequence[_Removable]) -> list[list[_Removable]]:
    """Return the rows in groups that one line may free."""
    if len(rows) < 2:
        return [list(rows)] if rows else []
    moved = _Moved.of(rows)
    group_of = dict[object, list[_Removable]]()
    for row in rows:
        group = [row]
        for place in _places(row, moved):
            other = group_of.setdefault(place, group)
            if other is not group:
                other += group
                _replace(group_of, group, other)
                group = other
    groups = list[list[_Removable]]()
    for row in rows:
        group = group_of[row.cuts]
        if group[0] is row:  # a group stands where its first row stood
            groups.append(group)
    return groups


def _replace(
    group_of: dict[object, list[_Removable]], group: list[_Removable], other: list[_Removable]
) -> None:
    """Put a group that has been added to another one at all of its places."""
    for place, group_there in group_of.items():
        if group_there is group:
            group_of[place] = other


def _places(row: _Removable, moved: _Moved) -> Iterator[object]:
    """Yield the keys of the groups to which a row belongs."""
    yield row.cuts  # one line frees both
    for cut in row.cuts:
        if _is_in_container(row, cut):
            yield cut.owner_id
        elif cut.kind is Kind.KEY and cut.owner_id in moved.crowded:
            yield cut.owner_id  # ``del outer["x"]`` moves the keys of the other line
        for other in (cut, *_outer(cut)):
            if other.kind is Kind.CALL and other.owner_id in moved.registries:
                yield other.owner_id
            if _reference(other) in moved.passed:
                yield _reference(other)
        for outer in _outer(cut):
            if outer.kind in _WITH_POSITIONS and outer.owner_id in moved.containers:
                yield outer.owner_id  # another row's removal moves the items of this list
        container = cut.outer
        if container is not None and container.kind is Kind.ITEM and not row.row.name:
            yield container.owner_id, inside(cut, container).statement


def _is_in_container(row: _Removable, cut: Cut) -> bool:
    """Return True if a row is removed from a container together with its other rows."""
    if cut.size == 0:
        return False
    return cut.kind in _MOVING or bool(cut.all_of) or not row.row.name


def _reference(cut: Cut) -> tuple[int, str]:
    """Return the key of a reference, which a row may remove, and another one's line lead
    through.
    """
    return cut.owner_id, cut.target


def _outer(cut: Cut) -> Iterator[Cut]:
    """Yield the references on the way to a reference."""
    outer = cut.outer
    while outer is not None:
        yield outer
        outer = outer.outer


# -- rows -----------------------------------------------------------------------------------------


def _rows_of(group: list[_Removable], cuts: dict[str, list[Cut]]) -> list[RetainedArray]:
    """Return one row for a group, or rows for its parts if no line can free all of it."""
    if len(group) == 1:
        return [group[0].row]
    whole = _as_one(group, cuts)
    if whole is not None:
        return [whole]
    by_owner = dict[int, list[_Removable]]()
    for row in group:
        by_owner.setdefault(row.cut.owner_id, []).append(row)
    if len(by_owner) == 1:
        return [row.row for row in group]
    rows = list[RetainedArray]()
    for part in by_owner.values():
        rows += _rows_of(part, cuts)
    return rows


def _as_one(group: list[_Removable], cuts: dict[str, list[Cut]]) -> RetainedArray | None:
    """Return one row for a group; None if no line can free all of it."""
    cuts_of_all, rows = list[Cut](), list[RetainedArray]()
    for item in group:
        cuts_of_all += item.cuts
        rows.append(item.row)
    first = rows[0]
    # A long line is better than two, of which the first moves the items of the second.
    statement = statement_of(cuts_of_all, most_owners=_MOST_OWNERS)
    if not statement or first.holder is None:
        return None
    cuts[statement] = cuts_of_all
    return _whole(rows, ReferencePath(_path(group), statement + _comments(rows)))


def _comments(rows: Iterable[RetainedArray]) -> str:
    """Return the comments on the lines of some rows."""
    return comments_of(row.holder.advice for row in rows if row.holder is not None)


def _cuts_of(rows: Iterable[RetainedArray], cuts: Mapping[str, Sequence[Cut]]) -> list[Cut]:
    """Return the references that the lines of rows remove, as far as they are known."""
    cuts_of_all = list[Cut]()
    for row in rows:
        if row.holder is not None:
            cuts_of_all += cuts.get(line_of(row.holder.advice), ())
    return cuts_of_all


def _whole(rows: Sequence[RetainedArray], holder: ReferencePath) -> RetainedArray:
    """Return one row for several, with the holder of all."""
    first = rows[0]
    whole = replace(
        _sum_of(rows, first),
        name=_names_of(rows),
        arrays=sum(row.arrays for row in rows),
        objects=sum(row.objects for row in rows),
        cell=first.cell if _are_equal(row.cell for row in rows) else None,
        holder=holder,
    )
    if _are_equal(map(_look, rows)):
        return replace(whole, parts=_parts_of(rows))
    return _of_many_kinds(whole, rows)


def _object_around(group: Sequence[_Removable]) -> RetainedArray | None:
    """Return the row of the object in which all other rows of a group are arrays without a name,
    such as a data frame; None if there is none.
    """
    if any(row.cuts != group[0].cuts for row in group):
        return None
    objects = [row.row for row in group if row.row.arrays == 0]
    has_named_arrays = any(row.row.name for row in group if row.row.arrays)
    if len(objects) != 1 or objects[0].objects > 1 or has_named_arrays:
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
            return replace(whole, parts=_parts_of(rows))
        return whole
    return replace(whole, type_name=SEVERAL_TYPES, parts=dict(sizes.most_common(_MOST_NAMES)))


def _names_of(rows: Sequence[RetainedArray]) -> str:
    """Return the names of rows, or the first of them."""
    names = list(dict.fromkeys(row.name for row in rows if row.name))
    if len(names) > _MOST_NAMES:
        names = [*names[:_MOST_NAMES], "…"]
    return ", ".join(names)


def _look(row: RetainedArray) -> tuple[object, ...]:
    """Return all that a row shows besides its size and holder."""
    return row.type_name, row.dtype, row.shape, row.device


def _path(group: Sequence[_Removable]) -> str:
    """Return the path to the object that holds all rows of a group."""
    path = _path_of_first(group)
    cut = group[0].cut
    if cut.all_of:
        return _path_of_registry(group)
    if _are_equal(row.cuts for row in group):
        return path
    owners = {cut.owner_id for row in group for cut in row.cuts}
    if len(owners) > 1 and any(len(row.cuts) > 1 for row in group):
        return f"{path}, and {len(group) - 1} more"  # in several containers
    if _are_equal(row.cut.owner_id for row in group):
        if all(len(row.cuts) > 1 for row in group):
            return path  # that of the container already
        owner = _ITEM.sub("", path)
        if owner != path:
            return owner
    elif cut.outer is not None:
        before, index, after = path.rpartition(f"[{cut.outer.position}]")
        if index:
            return f"{before}[…]{after}"
    return f"{path}, and {len(group) - 1}{MORE_THERE}"


def _path_of_first(group: Sequence[_Removable]) -> str:
    holder = group[0].row.holder
    return "" if holder is None else holder.path


def _path_of_registry(group: Sequence[_Removable]) -> str:
    """Return the words for several objects of a registry, such as ``4 matplotlib figures``."""
    cuts = set[Cut]()
    for row in group:
        cuts.update(row.cuts)
    return _text_of_several(_path_of_first(group), len(cuts))


def _text_of_several(path: str, number: int) -> str:
    """Return the words for a number of references, given those for the first."""
    if number == 1:
        return path
    if path.startswith("matplotlib figure "):
        return f"{number} matplotlib figures"
    return f"{path}, and {number - 1}{MORE_THERE}"


# -- lines that delete one object ----------------------------------------------------------------


def _joined_by_deletion(rows: list[RetainedArray]) -> list[RetainedArray]:
    """Return the rows, as one those that the same line deletes or clears: run again, it would fail
    or free nothing.

    Examples are ``%xdel _4`` for each part of a model that a cell has shown, and
    ``layers.zero_grad()`` for each module of a ``ModuleDict``.
    """
    of_line = dict[str, list[RetainedArray]]()
    remaining = list[RetainedArray]()
    for row in rows:
        line = "" if row.holder is None else line_of(row.holder.advice)
        if line.startswith(_DELETING) or line.endswith(_CLEARING):
            of_line.setdefault(line, []).append(row)
        else:
            remaining.append(row)
    for line, of_same in of_line.items():
        if len(of_same) == 1:
            remaining += of_same
            continue
        largest_first = sorted(of_same, key=attrgetter("size_bytes"), reverse=True)
        paths = [row.holder.path for row in largest_first if row.holder is not None]
        path = _text_of_several(paths[0], len(set(paths)))
        holder = ReferencePath(path, line + _comments(largest_first))
        remaining.append(_whole(largest_first, holder))
    return remaining


_DELETING = ("%xdel ", "del ")
_CLEARING = ".zero_grad()"


# -- lines for items of one list ------------------------------------------------------------------


class _ItemLine(NamedTuple):
    """A line that deletes an item of a list, or that clears the gradients of one."""

    owner: str
    """The code of the list."""
    position: int
    ending: str
    """Empty to delete the item, else the code after it, such as ``.zero_grad()``."""

    @classmethod
    def of(cls, line: str) -> _ItemLine | None:
        """Return a line of advice; None if it is another one."""
        if not is_simple(line):
            return None
        deleted = _DELETED_ITEM.fullmatch(line)
        if deleted is not None:
            return cls(deleted[1], int(deleted[2]), "")
        cleared = _CLEARED_ITEM.fullmatch(line)
        if cleared is not None:
            return cls(cleared[1], int(cleared[2]), cleared[3])
        return None


def _joined_by_positions(
    rows: list[RetainedArray], cuts: dict[str, list[Cut]]
) -> list[RetainedArray]:
    """Return the rows, as one those whose lines delete items of one list, or clear their gradients.

    After ``del runs[0]``, ``del runs[1]`` would delete another item. A list may have a hundred
    modules, each with a gradient.
    """
    of_list = dict[tuple[str, str], dict[int, list[RetainedArray]]]()
    remaining = list[RetainedArray]()
    for row in rows:
        line = None if row.holder is None else _ItemLine.of(line_of(row.holder.advice))
        removes_key = any(cut.kind is Kind.KEY for cut in _cuts_of([row], cuts))
        if line is None or removes_key:  # ``del d[1]`` moves no other value of a dict
            remaining.append(row)
        else:
            of_owner = of_list.setdefault((line.owner, line.ending), {})
            of_owner.setdefault(line.position, []).append(row)
    for (owner, ending), of_owner in of_list.items():
        remaining += _row_of_items(owner, ending, of_owner, cuts)
    return remaining


def _row_of_items(
    owner: str,
    ending: str,
    rows_at: Mapping[int, list[RetainedArray]],
    cuts: dict[str, list[Cut]],
) -> list[RetainedArray]:
    """Return one row for those whose lines are about items of a list, or the only row.

    Args:
        owner: the code of the list.
        ending: that of ``_ItemLine``.
        rows_at: the rows by the position of their item.
        cuts: the references that a line removes; those of the row's line are added.
    """
    rows = [row for of_item in rows_at.values() for row in of_item]
    if len(rows) == 1:
        return rows
    holders = [row.holder for row in rows if row.holder is not None]
    positions = sorted(rows_at, reverse=not ending)
    advice = in_sequence([_statement_of_item(owner, ending, position) for position in positions])
    if len(positions) > _MOST_ITEMS:
        listed = ", ".join(map(str, positions))
        if ending and positions[-1] - positions[0] == len(positions) - 1:
            listed = f"range({positions[0]}, {positions[-1] + 1})"
        statement = _statement_of_item(owner, ending, "_position")
        deletion = "; del _position" if ending else ", _position"
        advice = f"for _position in {listed}: {statement}{deletion}"
    cuts[advice] = _cuts_of(rows, cuts)
    path = _text_of_several(holders[0].path, len(positions))
    largest_first = sorted(rows, key=attrgetter("size_bytes"), reverse=True)
    return [_whole(largest_first, ReferencePath(path, advice + _comments(rows)))]


def _statement_of_item(owner: str, ending: str, position: int | str) -> str:
    item = f"{owner}[{position}]"
    return f"{item}{ending}" if ending else f"del {item}"


# -- lines that name what another line removes ----------------------------------------------------


def _joined_by_lines(rows: list[RetainedArray], cuts: dict[str, list[Cut]]) -> list[RetainedArray]:
    """Return the rows, as one those of which one's line names an object that another's removes.

    Run in any order, one of their lines would fail: ``del runs["opt"]`` and
    ``runs["opt"].zero_grad()``.
    """
    if len(rows) > _MOST_COMPARED:
        return rows
    remaining = list(rows)
    while True:
        pair = _user_and_remover(remaining, cuts)
        if pair is None:
            return remaining
        user, remover = pair
        lines = [line_of(row.holder.advice) for row in pair if row.holder is not None]
        paths = list(dict.fromkeys(row.holder.path for row in pair if row.holder is not None))
        line = in_sequence(lines)
        cuts[line] = _cuts_of(pair, cuts)
        holder = ReferencePath(", ".join(paths), line + _comments(pair))
        remaining = [row for row in remaining if row is not user and row is not remover]
        largest_first = sorted(pair, key=attrgetter("size_bytes"), reverse=True)
        remaining.append(_whole(largest_first, holder))


def _user_and_remover(
    rows: Sequence[RetainedArray], cuts: Mapping[str, Sequence[Cut]]
) -> tuple[RetainedArray, RetainedArray] | None:
    """Return a row whose line names an object, and the row whose line removes it."""
    with_lines = list[tuple[RetainedArray, str, _Expressions]]()
    for row in rows:
        line = "" if row.holder is None else line_of(row.holder.advice)
        if is_simple(line):
            with_lines.append((row, line, _Expressions.of(line, cuts.get(line, ()))))
    for user, line_of_user, of_user in with_lines:
        for remover, line_of_remover, of_remover in with_lines:
            if line_of_user != line_of_remover and of_user.fails_after(of_remover):
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
    def of(cls, line: str, cuts: Iterable[Cut]) -> _Expressions:
        """Return the objects that a line uses and removes.

        Args:
            line: the line.
            cuts: the references that it removes, as far as they are known.
        """
        expressions = cls(set(), set(), set(), set())
        # A dict may have integers as keys: ``del d[1]``.
        dicts = {cut.owner for cut in cuts if cut.kind is Kind.KEY}
        code_of_dicts = {ast.unparse(ast.parse(split(owner)[1])) for owner in dicts}
        for node in ast.walk(ast.parse(line)):
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
    for part in _parts(value):
        items = [value] if part.objects is None else part.objects
        part_bytes = 0
        for item in items:
            part_bytes += sum(array.size_bytes for _, array in search.find(item))
        for name in part.names:  # columns that share an array get equal shares
            sizes[name] += part_bytes // len(part.names)
    return replace(row, parts=dict((+sizes).most_common(_MOST_NAMES)))


def _parts(value: object) -> Sequence[ObjectPart]:
    """Return the parts of an object, those with unknown objects last."""
    try:
        parts = list(parts_of(value))
    except Exception as error:  # a thread changes it, or an unknown version of a library
        if is_from_signal(error):
            raise
        return []
    return sorted(parts, key=lambda part: part.objects is None)
