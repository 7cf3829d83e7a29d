"""Joins rows whose lines depend on each other.

Run one after the other, the second line would fail (``del runs["opt"]``, then
``runs["opt"].zero_grad()``) or remove another object (``del runs[0]``, then ``del runs[1]``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import Kind, in_sequence, split
from ipygpumem.heap.paths.loop_variables import variable_for
from ipygpumem.heap.paths.remedies import Holder, Remedy, comments_of
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.joint_rows import (
    comment_of,
    cuts_of,
    row_of_several,
    rows_largest_first,
    text_of_several,
)

_MOST_COMPARED = 40
"""Maximum number of rows whose lines are compared with each other."""
_MOST_WITHOUT_LOOP = 4
"""Maximum number of items of a list that are deleted without a loop."""


def joined_by_lines(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for all whose lines depend on each other."""
    rows = _joined_by_positions(_joined_by_deletion(rows))
    return _joined_by_names(rows)


# -- lines that delete one object ----------------------------------------------------------------


def _joined_by_deletion(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for all whose line is the same and works only once: run for the
    second row, it would fail or free nothing.

    Examples are ``%xdel _4`` for each part of a model that a cell has shown, and
    ``layers.zero_grad()`` for each module of a ``ModuleDict``.
    """
    rows_by_line = dict[str, list[HeldRow]]()
    """The rows whose lines work only once."""
    remaining = list[HeldRow]()
    for row in rows:
        if row.holder is not None and row.holder.remedy.works_once:
            rows_by_line.setdefault(row.line, []).append(row)
        else:
            remaining.append(row)
    for rows_of_line in rows_by_line.values():
        if len(rows_of_line) == 1:
            remaining += rows_of_line
            continue
        largest_first = rows_largest_first(rows_of_line)
        holders = [row.holder for row in largest_first if row.holder is not None]
        path = text_of_several(holders[0], len({holder.path for holder in holders}))
        remedy = replace(holders[0].remedy, comment=comment_of(largest_first))
        remaining.append(
            row_of_several(largest_first, replace(holders[0], path=path, remedy=remedy))
        )
    return remaining


# -- lines for items of one list ------------------------------------------------------------------


def _joined_by_positions(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for all whose lines delete items of the same list, or clear the
    gradients of its items.

    After ``del runs[0]``, ``del runs[1]`` would delete another item. And a list may have a hundred
    modules with gradients, whose lines would fill a page.
    """
    rows_by_list = dict[tuple[str, str], dict[int, list[HeldRow]]]()
    """The rows by the code of their list and the ending of their line, then by position."""
    remaining = list[HeldRow]()
    for row in rows:
        item = None if row.holder is None else row.holder.remedy.item
        removes_key = any(cut.kind is Kind.KEY for cut in row.cuts)
        if item is None or removes_key:  # ``del d[1]`` moves no other value of a dict
            remaining.append(row)
        else:
            rows_at = rows_by_list.setdefault((item.owner, item.ending), {})
            rows_at.setdefault(item.position, []).append(row)
    for (owner, ending), rows_at in rows_by_list.items():
        remaining += _row_of_items(owner, ending, rows_at)
    return remaining


def _row_of_items(owner: str, ending: str, rows_at: Mapping[int, list[HeldRow]]) -> list[HeldRow]:
    """Return, in a list, one row for the rows whose lines are about items of a list. A single row
    is returned unchanged.

    Args:
        owner: the code of the list.
        ending: the end of each statement, as in ``ItemLine``.
        rows_at: the rows by the position of their item.
    """
    rows = [row for of_item in rows_at.values() for row in of_item]
    if len(rows) == 1:
        return rows
    first = rows[0].holder
    if first is None:
        return rows
    line = _line_for_items(owner, ending, list(rows_at))
    remedy = Remedy(line, comment_of(rows), tuple(cuts_of(rows)))
    path = text_of_several(first, len(rows_at))
    return [row_of_several(rows_largest_first(rows), replace(first, path=path, remedy=remedy))]


def _line_for_items(owner: str, ending: str, positions: Sequence[int]) -> str:
    """Return the line about several items of a list: ``del runs[3]; del runs[0]``, or a loop if
    they are many: ``for _position in 9, 7, 5, 3, 1: del runs[_position], _position``.

    Args:
        owner: the code of the list.
        ending: the end of the statement for one item, such as ``.zero_grad()``; empty to delete it.
        positions: the positions of the items.
    """
    # Deleting an item moves the later ones up, so the last one is deleted first.
    in_order = sorted(positions, reverse=not ending)
    if len(in_order) <= _MOST_WITHOUT_LOOP:
        return in_sequence([_statement_of_item(owner, ending, position) for position in in_order])
    positions_text = ", ".join(map(str, in_order))
    if ending and in_order[-1] - in_order[0] == len(in_order) - 1:
        positions_text = f"range({in_order[0]}, {in_order[-1] + 1})"
    variable = variable_for(owner, "_position")
    statement = _statement_of_item(owner, ending, variable)
    deletion_of_variable = f"; del {variable}" if ending else f", {variable}"
    return f"for {variable} in {positions_text}: {statement}{deletion_of_variable}"


def _statement_of_item(owner: str, ending: str, position: int | str) -> str:
    """Return the statement about one item of a list: ``del runs[0]`` without an ending,
    ``layers[0].zero_grad()`` with one.

    Args:
        owner: the code of the list.
        ending: the end of the statement; empty to delete the item.
        position: the position, or the variable for it in a loop.
    """
    item = f"{owner}[{position}]"
    return f"{item}{ending}" if ending else f"del {item}"


# -- lines that name what another line removes ----------------------------------------------------


def _joined_by_names(rows: list[HeldRow]) -> list[HeldRow]:
    """Return the rows, with one row for each two of which the line of the first names an object
    that the line of the second removes.

    In the wrong order, one of the lines would fail: ``del runs["opt"]``, then
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
            Remedy(line, comments_of(remedies), tuple(cuts_of(pair))),
            tuple(chain.from_iterable(paths.values())),
        )
        remaining = [row for row in remaining if row is not pair[0] and row is not pair[1]]
        remaining.append(row_of_several(rows_largest_first(pair), holder))


def _user_and_remover(rows: Sequence[HeldRow]) -> tuple[HeldRow, HeldRow] | None:
    """Return the row whose line uses an object, and the row whose line removes that object; None if
    there are no two such rows.
    """
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
    """The code of the objects that a line uses and removes."""

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
                # ``rows[0].x`` uses ``rows[0]`` and its container ``rows``.
                case ast.Attribute(value=owner) | ast.Subscript(value=owner):
                    expressions.used.add(ast.unparse(owner))
                    if isinstance(owner, ast.Subscript):
                        expressions.containers.add(ast.unparse(owner.value))
                # ``del rows[0]`` removes ``rows[0]`` and moves the other items of ``rows``.
                case ast.Delete(targets=targets):
                    expressions.removed.update(map(ast.unparse, targets))
                    expressions.emptied.update(set(_lists_of(targets)) - code_of_dicts)
                # ``app.x = None`` removes ``app.x``.
                case ast.Assign(targets=targets, value=ast.Constant(value=None)):
                    expressions.removed.update(map(ast.unparse, targets))
                # ``rows.clear()`` removes all items of ``rows``.
                case ast.Call(func=ast.Attribute(value=owner, attr="clear" | "pop")):
                    expressions.emptied.add(ast.unparse(owner))
        return expressions

    def fails_after(self, other: _Expressions) -> bool:
        """Return True if this line would fail, or be about another object, once another one has
        run.
        """
        if not self.used.isdisjoint(other.removed):
            return True
        return not self.containers.isdisjoint(other.emptied)


def _lists_of(targets: Iterable[ast.expr]) -> Iterator[str]:
    """Yield the code of each list from which ``del`` removes items by position: ``rows`` for
    ``del rows[0], rows[2:5]``.

    Args:
        targets: the targets of the statement.
    """
    for target in targets:
        match target:
            case ast.Subscript(value=owner, slice=ast.Slice() | ast.Constant(value=int())):
                yield ast.unparse(owner)
