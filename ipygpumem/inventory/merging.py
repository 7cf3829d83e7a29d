"""Makes one row of the rows that one container holds, with one line that frees them all.

Lines of their own would fail after the first one: ``del runs[0]`` moves the list's later items up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ipygpumem.heap.holders.cuts import Cut, Kind, inside, statement_of
from ipygpumem.records import ReferencePath, RetainedArray

_ITEM = re.compile(r"\[[^\[\]]*\]$")
"""The last item of a path."""
_COMMENT = "  # "
_MOST_NAMES = 3
"""Maximum number of names to show of a row of several."""
_MOVING = {Kind.ITEM, Kind.ELEMENT, Kind.FIGURE}
"""References whose rows are merged even if they have names: removing one moves the rest."""

_Group = list[tuple[RetainedArray, Cut]]


def merged(rows: Sequence[RetainedArray], cuts: Mapping[str, Sequence[Cut]]) -> list[RetainedArray]:
    """Return the rows, the largest first, those of one container as one.

    Args:
        rows: the rows, each with its holder.
        cuts: the references that a line removes, by the line.
    """
    alone = list[RetainedArray]()
    removable: _Group = []
    for row in rows:
        advice = "" if row.holder is None else row.holder.advice.partition(_COMMENT)[0]
        of_row = cuts.get(advice, ())
        if len(of_row) == 1:
            removable.append((row, of_row[0]))
        else:
            alone.append(row)
    for group in _groups(removable):
        whole = _as_one(group)
        alone += [row for row, _ in group] if whole is None else [whole]
    return sorted(alone, key=lambda row: -row.size_bytes)


def _groups(rows: _Group) -> Iterator[_Group]:
    """Yield the rows in groups that one line can free."""
    by_owner = dict[object, _Group]()
    for row, cut in rows:
        is_shared = cut.size > 0 and (cut.kind in _MOVING or not row.name)
        by_owner.setdefault(cut.owner_id if is_shared else id(row), []).append((row, cut))
    by_place = dict[object, _Group]()
    for group in by_owner.values():
        by_place.setdefault(_place(group, by_owner), []).extend(group)
    yield from by_place.values()


def _place(group: _Group, by_owner: Mapping[object, _Group]) -> object:
    """Return the key of the rows that go together with a group of one owner."""
    row, cut = group[0]
    for way in _outer(cut):
        if way.owner_id in by_owner and way.kind is Kind.ITEM:
            return way.owner_id  # the list from which another row is removed
    if len(group) > 1:
        return cut.owner_id
    outer = cut.outer
    if outer is not None and outer.kind is Kind.ITEM and not row.name:
        return outer.owner_id, inside(cut, outer)
    return cut.owner_id if cut.size else id(row)


def _outer(cut: Cut) -> Iterator[Cut]:
    """Yield the references on the way to a reference."""
    outer = cut.outer
    while outer is not None:
        yield outer
        outer = outer.outer


def _as_one(group: _Group) -> RetainedArray | None:
    """Return one row for a group; None if no line can free all of it."""
    first, _ = group[0]
    if len(group) == 1:
        return first
    statement = statement_of([cut for _, cut in group])
    if not statement or first.holder is None:
        return None
    comment = "".join(first.holder.advice.partition(_COMMENT)[1:])
    holder = ReferencePath(_path(group), statement + comment)
    rows = [row for row, _ in group]
    names = list(dict.fromkeys(row.name for row in rows if row.name))
    shown = ", ".join([*names[:_MOST_NAMES], *["…"][: len(names) > _MOST_NAMES]])
    row = replace(
        first,
        name=shown,
        size_bytes=sum(row.size_bytes for row in rows),
        arrays=sum(row.arrays for row in rows),
        objects=sum(row.objects for row in rows),
        cell=first.cell if all(row.cell == first.cell for row in rows) else None,
        holder=holder,
        is_at_least=any(row.is_at_least for row in rows),
        uncounted=tuple(sorted({library for row in rows for library in row.uncounted})),
    )
    if all(_looks_like(other, first) for other in rows):
        return row
    kinds = {row.type_name for row in rows}
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    type_name = first.type_name if len(kinds) == 1 else "object"
    parts = Counter[str]()
    for other in rows:
        parts[other.type_name] += other.size_bytes
    shown_parts = dict(parts.most_common(_MOST_NAMES)) if len(kinds) > 1 else {}
    return replace(
        row, type_name=type_name, shape=None, dtype="", device=devices, arrays=0, parts=shown_parts
    )


def _looks_like(row: RetainedArray, other: RetainedArray) -> bool:
    """Return True if two rows differ in nothing but their size and holder."""
    return (row.type_name, row.dtype, row.shape, row.device) == (
        other.type_name,
        other.dtype,
        other.shape,
        other.device,
    )


def _path(group: _Group) -> str:
    """Return the path to the object that holds all rows of a group."""
    row, cut = group[0]
    path = "" if row.holder is None else row.holder.path
    if cut.kind is Kind.FIGURE:
        figures = {other.position for _, other in group}
        return f"{len(figures)} matplotlib figures" if len(figures) > 1 else path
    if all(other.owner_id == cut.owner_id for _, other in group):
        owner = _ITEM.sub("", path)
        return owner if owner != path else f"{path}, and {len(group) - 1} more there"
    if cut.outer is not None:
        before, index, after = path.rpartition(f"[{cut.outer.position}]")
        if index:
            return f"{before}[…]{after}"
    return f"{path}, and {len(group) - 1} more there"
