"""Statements that remove several items of one container by their positions: of a list, deque, dict
or set (``del rows[3:7]``), an array of objects (``box[3:7] = None``) or a data frame's cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ipygpumem.heap.paths.cuts import Cut, Kind, in_sequence, split, tuple_of, without_import
from ipygpumem.heap.paths.loop_variables import variable_for

MOST_ITEMS_ONE_BY_ONE = 4
"""Maximum number of items, or of runs of items, that a statement names one by one:
``del rows[9]; del rows[4]``.
"""
_MOST_POSITIONS = 40
"""Maximum number of positions that a loop lists: ``for _position in 9, 7, 4, 2, 1: ...``."""
_SLOT = re.compile(r"(?P<array>.*)\[(?P<index>\d+(?:, \d+)*)\]", re.DOTALL)
"""An element of an array, such as ``box[3, 4]``, or a cell, ``frame.iat[3, 4]``."""
_Span = tuple[int, int]
"""The start and end of neighbouring positions."""


# -- lists, dicts and sets ------------------------------------------------------------------------


def removal_at_positions(cut: Cut, positions: Sequence[int], *, is_alone: bool) -> str:
    """Return the statement that removes the items of a list, deque, dict or set at given positions,
    ``del rows[3:7]``.

    It is empty if there is none: the positions may be too many to list, or so few that the caller
    names the items one by one.

    Args:
        cut: the reference to one of the items, which are all alike.
        positions: the positions of all of them, in ascending order.
        is_alone: True if the statement may be a loop, because it stands alone.
    """
    if cut.is_replaced:
        return _replacement_by_none(cut, positions)
    if len(positions) == cut.size:
        return _removal_of_all(cut, is_alone=is_alone)
    start, end = positions[0], positions[-1] + 1
    if end - start == len(positions):
        return _removal_of_span(cut, start, end, is_alone=is_alone)
    is_listed = MOST_ITEMS_ONE_BY_ONE < len(positions) <= _MOST_POSITIONS
    if cut.kind is Kind.ITEM and is_listed and not cut.ending:
        return _removal_of_listed(cut, positions, is_alone=is_alone)
    return _removal_of_spans(cut, positions)


def _replacement_by_none(cut: Cut, positions: Sequence[int]) -> str:
    """Return the statement that sets items of a list to None, ``rows[3:5] = [None] * 2``; empty if
    they are too many or too few for it.

    These items have taken the positions of older ones. Deleting them would move the items after
    them.
    """
    imports, owner = split(cut.owner)
    spans = _spans(positions)
    if len(positions) == cut.size:
        return f"{imports}{owner}[:] = [None] * len({owner})"
    if len(spans) > 1 and len(positions) <= MOST_ITEMS_ONE_BY_ONE:
        return ""  # the caller names them one by one
    if len(spans) <= MOST_ITEMS_ONE_BY_ONE:
        statements = list[str]()
        for start, end in spans:
            assignment = f"[{start}:{end}] = [None] * {end - start}"
            if end - start == 1:
                assignment = f"[{start}] = None"
            statements.append(f"{owner}{assignment}")
        return imports + in_sequence(statements)
    every = _equally_spaced(positions)
    if every is not None:  # rows[0:100:2] = [None] * 50
        slice_of_all = f"{every.start}:{every.stop}:{every.step}"
        return f"{imports}{owner}[{slice_of_all}] = [None] * {len(every)}"
    if len(positions) > _MOST_POSITIONS:
        return ""
    listed = ", ".join(map(str, positions))
    return f"[{without_import(cut.owner)}.__setitem__(place, None) for place in ({listed})];"


def _removal_of_all(cut: Cut, *, is_alone: bool) -> str:
    """Return the statement that removes all items of a container: ``rows.clear()``, or
    ``while tasks: tasks.pop().cancel()`` if a call ends each item first.
    """
    if not cut.ending:
        imports, owner = split(cut.owner)
        return f"{imports}{owner}.clear()"
    owner = without_import(cut.owner)
    item = f"{owner}.popitem()[1]" if cut.kind is Kind.KEY else f"{owner}.pop()"
    if is_alone:
        return f"while {owner}: {item}.{cut.ending}"
    return f"[{item}.{cut.ending} for _ in range(len({owner}))];"


def _removal_of_listed(cut: Cut, positions: Sequence[int], *, is_alone: bool) -> str:
    """Return the loop that deletes the items of a list at listed positions, the last one first:
    ``for _position in 9, 7, 4, 2, 1: del rows[_position], _position``.
    """
    listed = ", ".join(map(str, reversed(positions)))
    owner = without_import(cut.owner)
    if is_alone:
        position = variable_for(owner, "_position")
        return f"for {position} in {listed}: del {owner}[{position}], {position}"
    return f"[{owner}.__delitem__(position) for position in ({listed})];"


def _removal_of_spans(cut: Cut, positions: Sequence[int]) -> str:
    """Return the statement that removes several runs of neighbouring items, the last one first:
    ``del rows[20:30]; del rows[:10]``; empty if the runs are too many, or the items too few.
    """
    spans = _spans(positions)
    if len(spans) > MOST_ITEMS_ONE_BY_ONE or len(positions) <= MOST_ITEMS_ONE_BY_ONE:
        return ""
    if cut.kind is Kind.ELEMENT:
        return _removal_from_set(cut, spans)
    last_first = [_removal_of_span(cut, *span, is_alone=False) for span in reversed(spans)]
    return in_sequence(last_first) if all(last_first) else ""


def _removal_of_span(cut: Cut, start: int, end: int, *, is_alone: bool) -> str:
    """Return the statement that removes neighbouring items of a container; empty if there is none.

    Args:
        cut: the reference to one of the items.
        start: the position of the first item.
        end: the position after the last one.
        is_alone: True if the statement may be a loop.
    """
    match cut.kind:
        case Kind.KEY:
            return _removal_of_keys(cut, start, end, is_alone=is_alone)
        case Kind.ELEMENT:
            return _removal_from_set(cut, [(start, end)])
        case _ if cut.ending or not cut.has_slices:
            return _removal_from_last(cut, start, end, is_alone=is_alone)
        case _:
            imports, owner = split(cut.owner)
            return f"{imports}del {owner}{_slice(start, end, cut.size)}"


def _removal_from_last(cut: Cut, start: int, end: int, *, is_alone: bool) -> str:
    """Return the loop that removes neighbouring items one at a time, the last one first.

    These are items of a deque, which has no slices, or items that a call ends::

        for _position in range(6, 2, -1): del queue[_position], _position
        for _position in range(6, 2, -1): tasks.pop(_position).cancel(); del _position
    """
    owner = without_import(cut.owner)
    position = variable_for(owner, "_position")
    call = f"{owner}.__delitem__({position})"
    body = f"del {owner}[{position}], {position}"
    if cut.ending:
        call = f"{owner}.pop({position}).{cut.ending}"
        body = f"{call}; del {position}"
    loop = f"for {position} in range({end - 1}, {start - 1}, -1)"
    return f"{loop}: {body}" if is_alone else f"[{call} {loop}];"


def _removal_of_keys(cut: Cut, start: int, end: int, *, is_alone: bool) -> str:
    """Return the loop that removes neighbouring keys of a dict:
    ``for _key in list(runs)[3:7]: del runs[_key], _key``.
    """
    owner = without_import(cut.owner)
    key = variable_for(owner, "_key")
    call = f"{owner}.pop({key})"
    body = f"del {owner}[{key}], {key}"
    if cut.ending:
        call += f".{cut.ending}"
        body = f"{call}; del {key}"
    loop = f"for {key} in {cut.listing.keys_of(owner)}{_slice(start, end, cut.size)}"
    return f"{loop}: {body}" if is_alone else f"[{call} {loop}];"


def _removal_from_set(cut: Cut, spans: Sequence[_Span]) -> str:
    """Return the statement that removes runs of elements of a set,
    ``names.difference_update(list(names)[3:7])``; empty if a call has to end each element.

    It is one call, because the first of several would give the other elements new positions.
    """
    if cut.ending:
        return ""
    imports, owner = split(cut.owner)
    runs = [f"list({owner}){_slice(start, end, cut.size)}" for start, end in spans]
    return f"{imports}{owner}.difference_update({', '.join(runs)})"


def detachment_of_values(cuts: Sequence[Cut]) -> str:
    """Return the statement that replaces neighbouring values of a dict by tensors without graphs,
    ``losses.update({key: losses[key].detach() for key in list(losses)[3:9]})``; empty if there are
    other values between them.
    """
    first = cuts[0]
    positions = sorted(cut.position for cut in cuts)
    start, end = positions[0], positions[-1] + 1
    if end - start != len(positions):
        return ""
    imports, owner = split(first.owner)
    keys = first.listing.keys_of(owner)
    if len(positions) < first.size:
        keys += f"[{start}:{end}]"
    return f"{imports}{owner}.update({{key: {owner}[key].detach() for key in {keys}}})"


# -- arrays of objects and data frames ------------------------------------------------------------


class _Elements(NamedTuple):
    """Elements of an array of objects, or cells of a data frame."""

    array: str
    """The code before the indices: ``box``, or ``frame.iat`` for cells."""
    indices: list[tuple[int, ...]]
    """Their indices in ascending order, such as ``(3, 0)``."""

    @classmethod
    def of(cls, cuts: Sequence[Cut]) -> _Elements | None:
        """Return the elements to which references lead; None if they are in different fields of a
        structured array, or if one is no single element.
        """
        arrays = set[str]()
        indices = set[tuple[int, ...]]()
        for cut in cuts:
            match = _SLOT.fullmatch(cut.target)
            if match is None:
                return None
            arrays.add(match["array"])
            indices.add(tuple(map(int, match["index"].split(", "))))
        return cls(arrays.pop(), sorted(indices)) if len(arrays) == 1 else None

    @property
    def axes(self) -> list[list[int]]:
        """The positions on each axis, in ascending order."""
        return [sorted(set(axis)) for axis in zip(*self.indices, strict=True)]

    @property
    def is_block(self) -> bool:
        """True if they are all elements of one slice, such as ``[3:7, 0:2]``."""
        size_of_slice = math.prod(axis[-1] + 1 - axis[0] for axis in self.axes)
        return size_of_slice == len(self.indices)


def emptying_of_elements(cuts: Sequence[Cut]) -> str:
    """Return the statement that sets elements of an array of objects, or cells of a data frame, to
    None; empty if they are too many or too few for it.
    """
    elements = _Elements.of(cuts)
    if elements is None:
        return ""
    if elements.array.endswith(".iat"):
        return _emptying_of_cells(elements)
    imports, owner = split(elements.array)
    axes = elements.axes
    if elements.is_block:  # box[3:7, 0:2] = None
        return f"{imports}{owner}[{', '.join(map(_index_of_span, axes))}] = None"
    if len(axes) == 1:
        return _emptying_of_one_axis(elements.array, axes[0])
    if len(elements.indices) > _MOST_POSITIONS:
        return ""
    indices = tuple_of(elements.indices)
    return f"[{without_import(elements.array)}.__setitem__(place, None) for place in {indices}];"


def _emptying_of_one_axis(array: str, positions: Sequence[int]) -> str:
    """Return the statement that sets elements of an array with one axis to None,
    ``box[1:4] = None; box[9] = None``; empty if they are too many for it.
    """
    imports, owner = split(array)
    spans = _spans(positions)
    if len(spans) <= MOST_ITEMS_ONE_BY_ONE:
        indices = [_index_of_span(range(*span)) for span in spans]
        return imports + in_sequence([f"{owner}[{index}] = None" for index in indices])
    every = _equally_spaced(positions)
    if every is not None:
        return f"{imports}{owner}[{every.start}:{every.stop}:{every.step}] = None"
    if len(positions) > _MOST_POSITIONS:
        return ""
    return f"{imports}{owner}[{list(positions)}] = None"


def _emptying_of_cells(cells: _Elements) -> str:
    """Return the statement that sets cells of a data frame or series to None; empty if they are too
    many for it.

    It is a loop, because pandas may copy the values that a slice assigns::

        [frame.iat.__setitem__((row, 2), None) for row in range(3, 7)];
    """
    setter = f"{without_import(cells.array)}.__setitem__"
    axes = cells.axes  # rows, and columns of a data frame
    if cells.is_block and len(axes[0]) > 1:
        rows = f"range({axes[0][0]}, {axes[0][-1] + 1})"
        if len(axes) == 1:
            return f"[{setter}(row, None) for row in {rows}];"
        if len(axes[1]) == 1:
            return f"[{setter}((row, {axes[1][0]}), None) for row in {rows}];"
        columns = f"range({axes[1][0]}, {axes[1][-1] + 1})"
        return f"[{setter}((row, column), None) for row in {rows} for column in {columns}];"
    if len(cells.indices) > _MOST_POSITIONS:
        return ""
    listed = cells.indices if len(axes) > 1 else axes[0]
    return f"[{setter}(place, None) for place in {tuple_of(listed)}];"


# -- positions ------------------------------------------------------------------------------------


def _spans(positions: Sequence[int]) -> list[_Span]:
    """Return the start and end of each run of neighbouring positions.

    >>> _spans([1, 2, 3, 7, 8])
    [(1, 4), (7, 9)]
    """
    spans = list[_Span]()
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


def _equally_spaced(positions: Sequence[int]) -> range | None:
    """Return two or more positions in ascending order as a range; None if their distances differ.

    >>> _equally_spaced([1, 3, 5]), _equally_spaced([1, 3, 4])
    (range(1, 6, 2), None)
    """
    every = range(positions[0], positions[-1] + 1, positions[1] - positions[0])
    return every if list(positions) == list(every) else None


def _slice(start: int, end: int, size: int) -> str:
    """Return the slice of neighbouring items of a container with ``size`` items: ``[3:7]``."""
    return f"[{start}:]" if end == size else f"[{start}:{end}]"


def _index_of_span(positions: Sequence[int]) -> str:
    """Return the index of neighbouring positions on one axis, ``3:7``, or of one, ``3``."""
    if len(positions) == 1:
        return f"{positions[0]}"
    return f"{positions[0]}:{positions[-1] + 1}"
