"""Groups rows that one line must free, or frees better than several lines.

Lines of their own would fail after the first one, or remove something else: ``del runs[0]`` moves
the list's later items up, so that ``del runs[1]`` removes another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import WITH_POSITIONS, Cut, Kind
from ipygpumem.heap.paths.statements import inside_loop
from ipygpumem.inventory.rows.held_rows import HeldRow

_MOVING = {Kind.ITEM, Kind.ELEMENT, Kind.QUEUED}
"""References whose rows are merged even if they have names: removing one moves the rest."""
_Reference = tuple[int, str]
"""The identity of a reference's owner, and the code of its target."""


def grouped(rows: Sequence[HeldRow]) -> list[list[HeldRow]]:
    """Return the rows, which all have lines, in groups that one line may free.

    Rows with a common key are in one group, also by a chain of rows: the first has a key in common
    with the second, and the second another one with the third.
    """
    if len(rows) < 2:
        return [list(rows)] if rows else []
    changed_places = _ChangedPlaces.of(rows)
    group_of_key = dict[object, list[HeldRow]]()
    for row in rows:
        group = [row]
        for key in _keys_of_groups(row, changed_places):
            earlier_group = group_of_key.setdefault(key, group)
            if earlier_group is not group:
                # This row belongs to two groups: they become one.
                earlier_group += group
                _replace_group(group_of_key, group, earlier_group)
                group = earlier_group
    groups = list[list[HeldRow]]()
    for row in rows:
        group = group_of_key[row.cuts]
        if group[0] is row:  # a group stands where its first row stood
            groups.append(group)
    return groups


def _replace_group(
    group_of_key: dict[object, list[HeldRow]], group: list[HeldRow], joined_group: list[HeldRow]
) -> None:
    """Let all keys of a group lead to another one that now has its rows, too.

    Args:
        group_of_key: the group of each key.
        group: the group whose rows have been added to the other one.
        joined_group: the other one.
    """
    for key, group_there in group_of_key.items():
        if group_there is group:
            group_of_key[key] = joined_group


# -- keys of groups -------------------------------------------------------------------------------


def _keys_of_groups(row: HeldRow, changed: _ChangedPlaces) -> Iterator[object]:
    """Yield the keys of a row: rows with a common key are freed by one line.

    Args:
        row: the row.
        changed: the places that the lines of all rows change.
    """
    yield row.cuts  # the same line frees all rows with these references
    for cut in row.cuts:
        outer_references = list(_outer_references(cut))
        # ``runs[1]`` and ``runs[2]``: one line removes both, with the container as their key.
        is_key_by_position = cut.kind is Kind.KEY and cut.owner_id in changed.crowded
        if _is_merged_by_container(row, cut) or is_key_by_position:
            yield cut.owner_id
        for reference in (cut, *outer_references):
            # A handler, and an array behind this handler.
            if reference.kind is Kind.CALL and reference.owner_id in changed.registries:
                yield reference.owner_id
            # ``runs["a"]`` and ``runs["a"].model``: the second line fails after the first one.
            if _comparable(reference) in changed.conflicting:
                yield _comparable(reference)
        for outer in outer_references:
            # ``runs[1].model = None`` is about another item after ``del runs[0]``.
            if outer.kind in WITH_POSITIONS and outer.owner_id in changed.containers:
                yield outer.owner_id
        if not row.row.name:
            yield from _keys_of_loop(cut)


def _keys_of_loop(cut: Cut) -> Iterator[object]:
    """Yield the key of the rows that one loop frees: ``for _item in runs: del _item["grad"]``, for
    the references ``runs[0]["grad"]``, ``runs[1]["grad"]`` and so on. Other references have no such
    key.
    """
    item = cut.outer
    if item is not None and item.kind is Kind.ITEM:
        # The statement is the same for each item.
        yield item.owner_id, inside_loop(cut, item).statement


def _is_merged_by_container(row: HeldRow, cut: Cut) -> bool:
    """Return True if one line removes a row together with the other rows of its container.

    A row with a name has a line of its own; unless that line would move the other items of the
    container, or one statement removes all of them.
    """
    if cut.size == 0:  # it is in no container
        return False
    return cut.kind in _MOVING or bool(cut.removal_of_all) or not row.row.name


# -- places that lines change ---------------------------------------------------------------------


class _ChangedPlaces(NamedTuple):
    """Places that the line of one row changes, so that the line of another row may fail or remove
    something else.
    """

    containers: set[int]
    """Identities of the containers from which lines remove items: their other items move."""
    crowded: set[int]
    """Containers from which two or more items are removed. A line names several keys of a dict
    by their positions in it, ``list(runs)[2]``, which the line of another key changes.
    """
    registries: set[int]
    """Registries, such as the list of a logger's handlers, from which one line removes an item by a
    call, and through which the reference that another line removes is reached.
    """
    conflicting: set[_Reference]
    """References after whose removal by one line another line would raise an error."""

    @classmethod
    def of(cls, rows: Sequence[HeldRow]) -> _ChangedPlaces:
        """Return the places that the lines of rows change."""
        number_of_items = _number_of_removed_items(rows)
        crowded = {container for container, number in number_of_items.items() if number > 1}
        return cls(
            set(number_of_items), crowded, _shared_registries(rows), _conflicting_references(rows)
        )


def _number_of_removed_items(rows: Sequence[HeldRow]) -> Counter[int]:
    """Return the number of items that all lines together remove from each container, by the
    container's identity.
    """
    number_of_items = Counter[int]()
    for row in rows:
        for cut in row.cuts:
            is_one_of_several_keys = cut.kind is Kind.KEY and len(row.cuts) > 1
            if _is_merged_by_container(row, cut) or is_one_of_several_keys:
                number_of_items[cut.owner_id] += 1
    return number_of_items


def _shared_registries(rows: Sequence[HeldRow]) -> set[int]:
    """Return the registries from which one line removes an item by a call
    (``logger.removeHandler(...)``), and through which another line leads
    (``logger.handlers[0].rows.clear()``).
    """
    called = set[int]()
    led_through = set[int]()
    for row in rows:
        for cut in row.cuts:
            if cut.kind is Kind.CALL and cut.owner_id:
                called.add(cut.owner_id)
            for outer in _outer_references(cut):
                if outer.kind is Kind.CALL:
                    led_through.add(outer.owner_id)
    return called & led_through


def _conflicting_references(rows: Sequence[HeldRow]) -> set[_Reference]:
    """Return the references because of which one line would fail after another: both lines remove
    it, or one removes it and the other leads through it (``runs["a"]`` and ``runs["a"].model``).
    """
    number_of_lines = Counter[_Reference]()
    led_through = set[_Reference]()
    for row in rows:
        removed = set[_Reference]()
        for cut in row.cuts:
            removed.update(map(_comparable, cut.single_references()))
            led_through.update(map(_comparable, _outer_references(cut)))
        number_of_lines.update(removed)
    removed_twice = {reference for reference, number in number_of_lines.items() if number > 1}
    return removed_twice | (number_of_lines.keys() & led_through)


def _comparable(cut: Cut) -> _Reference:
    """Return a reference in a form that is equal for the same reference in different lines."""
    return cut.owner_id, cut.target


def _outer_references(cut: Cut) -> Iterator[Cut]:
    """Yield the references on the way to a reference, the nearest first: those to ``runs[0]`` and
    ``runs`` for ``runs[0].model``.
    """
    outer = cut.outer
    while outer is not None:
        yield outer
        outer = outer.outer
