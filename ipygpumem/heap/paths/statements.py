"""Statements that remove several references at once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ipygpumem.heap.paths.cuts import (
    WITH_POSITIONS,
    Cut,
    Kind,
    in_sequence,
    split,
    statement_with_copy,
    tuple_of,
    without_columns,
    without_import,
)
from ipygpumem.heap.paths.loop_variables import variable_for

EACH = "_item"
"""The variable of a loop over items."""
_MOST_KEYS = 4
"""Maximum number of items that a statement names one by one."""
_MOST_POSITIONS = 40
"""Maximum number of positions that a statement lists."""
_MOST_CALLS = 4
"""Maximum number of calls that a statement makes one by one if a loop can make them."""
_CALL_WITH_NUMBER = re.compile(r"([\w.]+)\((\d+)\)")
"""A call such as ``plt.close(3)``."""
_SLOT = re.compile(r"(?P<array>.*)\[(?P<index>\d+(?:, \d+)*)\]", re.DOTALL)
"""An element of an array, such as ``box[3, 4]``, or a cell, ``frame.iat[3, 4]``."""
_ORDERED = {Kind.ITEM, Kind.KEY, Kind.ELEMENT}
"""References of containers with positions, several of which one statement can remove."""


def statement_of(cuts: Sequence[Cut], *, most_owners: int = _MOST_KEYS) -> str:
    """Return one statement that removes all of some references; empty if there is none.

    Args:
        cuts: the references.
        most_owners: maximum number of objects that refer, one statement for each.
    """
    if not cuts:
        return ""
    groups = _cuts_by_owner(outermost(cuts))
    loop = _in_each(groups)
    if loop:
        return loop
    if len(groups) > most_owners:
        return ""
    is_alone = len(groups) == 1
    statements = [
        _statement_for_one_owner(group, is_alone=is_alone) for group in _inner_first(groups)
    ]
    return in_sequence(statements) if all(statements) else ""


def _cuts_by_owner(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Return the references of each object, and those whose object one copy replaces everywhere."""
    copied = Counter(cut.removed_id for cut in cuts if cut.copied_by and cut.removed_id)
    groups = dict[tuple[bool, int], list[Cut]]()
    for cut in cuts:
        is_copied = cut.copied_by != "" and copied[cut.removed_id] > 1
        key = (True, cut.removed_id) if is_copied else (False, cut.owner_id)
        groups.setdefault(key, []).append(cut)
    return list(groups.values())


def outermost(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the references, each once, without those of objects that another one removes."""
    unique = dict[Cut, None]()
    for cut in cuts:
        for reference in cut.each():
            unique[reference] = None
    outermost = list[Cut]()
    # By the identity of each outer reference, which a million items of a list may share.
    are_removed = dict[int, bool]()
    for cut in unique:
        outer = cut.outer
        if id(outer) not in are_removed:
            are_removed[id(outer)] = _is_any_among(outer, unique)
        if not are_removed[id(outer)]:
            outermost.append(cut)
    return outermost


def _is_any_among(outer: Cut | None, cuts: Mapping[Cut, None]) -> bool:
    """Return True if a reference, or one further out, is among some references."""
    while outer is not None:
        if not cuts.keys().isdisjoint(outer.each()):
            return True
        outer = outer.outer
    return False


def _inner_first(groups: list[list[Cut]]) -> list[list[Cut]]:
    """Return the groups in an order in which each statement still works after the earlier ones:
    later positions first, variables last.
    """
    last_first = sorted(groups, key=lambda group: _positions(group[0]), reverse=True)

    def names_it_deletes(group: list[Cut]) -> int:
        """Return the number of groups whose code begins with an object that a group removes."""
        return sum(_is_below(other, group) for other in groups if other is not group)

    return sorted(
        last_first, key=lambda group: (group[0].kind is Kind.NAME, names_it_deletes(group))
    )


def _is_below(group: list[Cut], outer: list[Cut]) -> bool:
    """Return True if a statement for ``outer`` would break the code of ``group``: it removes the
    object at which that code begins, or moves an item that it names by position.
    """
    owners = {cut.owner for cut in group}  # often one for thousands of references
    for prefix in {cut.target for cut in outer}:
        for owner in owners:
            after = owner.removeprefix(prefix)
            if prefix and after != owner and after[:1] in ("", ".", "["):
                return True
    lists = {f"{cut.owner}[" for cut in outer if cut.kind in WITH_POSITIONS}
    return any(owner.startswith(tuple(lists)) for owner in owners)


def _positions(cut: Cut) -> tuple[int, ...]:
    """Return the positions on the way to a reference, the outermost first."""
    before = () if cut.outer is None else _positions(cut.outer)
    return (*before, cut.position)


def _statement_for_one_owner(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes some references of one object; empty if there is none.

    It is a loop only if it stands alone: no loop can follow another statement in a line.
    """
    first = cuts[0]
    if first.protocol is not None:  # such as ``queue.get()``
        if first.protocol.is_compound and not is_alone:
            return ""
        positions = sorted({cut.position for cut in cuts})
        return first.protocol.statement(first, positions)
    # The only element of a set has no name: ``items.clear()``.
    is_only_element = first.kind is Kind.ELEMENT and first.size == 1
    if len(cuts) == 1 and not is_only_element:
        return first.statement
    if len(cuts) == first.size and first.all_of:  # such as ``plt.close("all")``
        return first.all_of
    if first.kind is Kind.COLUMN:
        return _of_columns(cuts)
    if any(cut.copied_by for cut in cuts):
        return _of_copied(cuts)
    if all(_is_alike(cut, first) for cut in cuts):
        statement = _of_alike(cuts, is_alone=is_alone)
        if statement:
            return statement
    if len(cuts) <= _MOST_KEYS or first.kind in (Kind.CALL, Kind.CLOSED):
        return _one_by_one(cuts)
    return ""


def _of_copied(cuts: list[Cut]) -> str:
    """Return the statement that puts copies in the places of some objects, one for each object;
    empty if they are too many.
    """
    if len(cuts) > _MOST_KEYS:
        return ""
    objects = {cut.removed_id for cut in cuts}
    if len(objects) == 1 and 0 not in objects:
        return statement_with_copy(cuts)
    return _one_by_one(cuts)


def _of_alike(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes some alike references of one object at once, such as
    ``rows.clear()``, ``del rows[3:7]``, or a loop; empty if there is none.
    """
    first = cuts[0]
    if first.is_detached:
        is_short = first.kind is not Kind.KEY or len(cuts) <= _MOST_KEYS
        return "" if is_short else _of_detached(cuts)
    if first.kind is Kind.CALL and is_alone and len(cuts) > _MOST_CALLS:
        return _loop_of_calls(cuts)
    if first.kind is Kind.SLOT and len(cuts) > _MOST_KEYS:
        return _of_slots(cuts)
    if first.kind not in _ORDERED:
        return ""
    # A reference may occur twice: as the only one, and as one of many, which has no code.
    positions = sorted({cut.position for cut in cuts})
    return _of_positions(first, positions, is_alone=is_alone)


def _one_by_one(cuts: Sequence[Cut]) -> str:
    """Return the statements that remove some references of one object, the last one first."""
    last_first = sorted(cuts, key=lambda cut: cut.position, reverse=True)
    return in_sequence(list(dict.fromkeys(cut.statement for cut in last_first)))


def _loop_of_calls(cuts: Sequence[Cut]) -> str:
    """Return the loop for calls with a number each, such as ``plt.close(3)``; empty if there is
    none.
    """
    numbers = set[int]()
    calls = set[tuple[str, str]]()
    for cut in cuts:
        imports, code = split(cut.target)
        call = _CALL_WITH_NUMBER.fullmatch(code)
        if call is None:
            return ""
        calls.add((imports, call[1]))
        numbers.add(int(call[2]))
    if len(calls) != 1:
        return ""
    imports, function = calls.pop()
    first, last = min(numbers), max(numbers)
    values = tuple_of(sorted(numbers))
    if len(numbers) == last - first + 1:
        values = f"range({first}, {last + 1})"
    return f"{imports}[{function}(number) for number in {values}];"


def _of_columns(cuts: Sequence[Cut]) -> str:
    """Return the statement that removes some columns of a frame, or the frame if these are all."""
    first = cuts[0]
    labels = list(dict.fromkeys(label for cut in cuts for label in cut.columns))
    is_name = first.outer is None or first.outer.kind is Kind.NAME
    if len(labels) == first.size and first.outer is not None and not is_name:
        return first.outer.statement
    return without_columns(first.owner, labels)


def _is_alike(cut: Cut, other: Cut) -> bool:
    kinds = [(each.kind, each.ending, each.is_detached, each.is_replaced) for each in (cut, other)]
    return kinds[0] == kinds[1]


def _of_detached(cuts: Sequence[Cut]) -> str:
    """Return the statement that replaces neighbouring values of a dict by tensors without graphs;
    empty if there are other values between them.
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


def _of_positions(first: Cut, positions: list[int], *, is_alone: bool) -> str:
    """Return the statement that removes the references of a container at some positions."""
    if first.is_replaced:
        return _of_replaced(first, positions)
    imports, owner = split(first.owner)
    start, end = positions[0], positions[-1] + 1
    is_span = end - start == len(positions)
    if len(positions) == first.size:
        if first.ending:
            return _ending_all(first, is_alone=is_alone)
        return f"{imports}{owner}.clear()"
    if is_span:
        return _of_span(first, start, end, is_alone=is_alone)
    may_list = _MOST_KEYS < len(positions) <= _MOST_POSITIONS
    if first.kind is Kind.ITEM and may_list and not first.ending:
        listed = ", ".join(map(str, reversed(positions)))
        in_loop = without_import(first.owner)
        if is_alone:
            place = variable_for(in_loop, "_position")
            return f"for {place} in {listed}: del {in_loop}[{place}], {place}"
        return f"[{in_loop}.__delitem__(position) for position in ({listed})];"
    spans = _spans(positions)
    if len(spans) > _MOST_KEYS or len(positions) <= _MOST_KEYS:
        return ""
    if first.kind is Kind.ELEMENT:
        return _of_elements(first, spans)
    last_first = [_of_span(first, *span, is_alone=False) for span in reversed(spans)]
    return in_sequence(last_first) if all(last_first) else ""


def _of_replaced(first: Cut, positions: list[int]) -> str:
    """Return the statement that sets the items of a list at some positions to None; empty if they
    are too many or too few for it.
    """
    imports, owner = split(first.owner)
    spans = _spans(positions)
    if len(positions) == first.size:
        return f"{imports}{owner}[:] = [None] * len({owner})"
    if len(spans) > 1 and len(positions) <= _MOST_KEYS:
        return ""
    if len(spans) <= _MOST_KEYS:
        statements = list[str]()
        for start, end in spans:
            place = f"[{start}:{end}] = [None] * {end - start}"
            if end - start == 1:
                place = f"[{start}] = None"
            statements.append(f"{owner}{place}")
        return imports + in_sequence(statements)
    step = positions[1] - positions[0]
    every = range(positions[0], positions[-1] + 1, step)
    if positions == list(every):
        return f"{imports}{owner}[{every.start}:{every.stop}:{step}] = [None] * {len(every)}"
    if len(positions) > _MOST_POSITIONS:
        return ""
    listed = ", ".join(map(str, positions))
    return f"[{without_import(first.owner)}.__setitem__(place, None) for place in ({listed})];"


def _of_slots(cuts: Sequence[Cut]) -> str:
    """Return the statement that sets some elements of an array of objects, or some cells of a data
    frame, to None; empty if they are too many or too few for it.
    """
    arrays = set[str]()
    indices = set[tuple[int, ...]]()
    for cut in cuts:
        match = _SLOT.fullmatch(cut.target)
        if match is None:
            return ""
        arrays.add(match["array"])
        indices.add(tuple(map(int, match["index"].split(", "))))
    if len(arrays) > 1:  # two fields
        return ""
    array = arrays.pop()
    places = sorted(indices)
    axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
    is_block = math.prod(axis[-1] + 1 - axis[0] for axis in axes) == len(places)
    if array.endswith(".iat"):
        return _of_cells(array, places, axes, is_block=is_block)
    imports, owner = split(array)
    if is_block:
        return f"{imports}{owner}[{', '.join(map(_index_of_span, axes))}] = None"
    if len(axes) == 1:
        return _of_elements_in_a_row(array, axes[0])
    if len(places) > _MOST_POSITIONS:
        return ""
    return f"[{without_import(array)}.__setitem__(place, None) for place in {tuple_of(places)}];"


def _index_of_span(positions: Sequence[int]) -> str:
    """Return the index of neighbouring positions on one axis: ``3:7``."""
    if len(positions) == 1:
        return f"{positions[0]}"
    return f"{positions[0]}:{positions[-1] + 1}"


def _of_elements_in_a_row(array: str, positions: Sequence[int]) -> str:
    """Return the statement that sets elements of an array with one axis to None; empty if they are
    too many for it.
    """
    imports, owner = split(array)
    spans = _spans(positions)
    if len(spans) <= _MOST_KEYS:
        places = [_index_of_span(range(*span)) for span in spans]
        return imports + in_sequence([f"{owner}[{place}] = None" for place in places])
    every = range(positions[0], positions[-1] + 1, positions[1] - positions[0])
    if positions == list(every):
        return f"{imports}{owner}[{every.start}:{every.stop}:{every.step}] = None"
    if len(positions) > _MOST_POSITIONS:
        return ""
    return f"{imports}{owner}[{list(positions)}] = None"


def _of_cells(
    cells: str,
    places: Sequence[tuple[int, ...]],
    axes: Sequence[Sequence[int]],
    *,
    is_block: bool,
) -> str:
    """Return the statement that sets cells of a data frame or series to None; empty if they are too
    many for it. A loop does so, because pandas may copy what a slice assigns.

    Args:
        cells: the code of the frame's cells.
        places: the positions of the cells.
        axes: the positions on each axis.
        is_block: True if the cells are all of those at these positions.
    """
    setter = f"{without_import(cells)}.__setitem__"
    if is_block and len(axes[0]) > 1:
        rows = f"range({axes[0][0]}, {axes[0][-1] + 1})"
        if len(axes) == 1:
            return f"[{setter}(row, None) for row in {rows}];"
        if len(axes[1]) == 1:
            return f"[{setter}((row, {axes[1][0]}), None) for row in {rows}];"
        columns = f"range({axes[1][0]}, {axes[1][-1] + 1})"
        return f"[{setter}((row, column), None) for row in {rows} for column in {columns}];"
    if len(places) > _MOST_POSITIONS:
        return ""
    listed = places if len(axes) > 1 else axes[0]
    return f"[{setter}(place, None) for place in {tuple_of(listed)}];"


def _spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and end of each run of neighbouring positions.

    >>> _spans([1, 2, 3, 7, 8])
    [(1, 4), (7, 9)]
    """
    spans = list[tuple[int, int]]()
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return spans


def _ending_all(cut: Cut, *, is_alone: bool) -> str:
    """Return the loop that ends and removes all objects of a container."""
    owner = without_import(cut.owner)
    removal = f"{owner}.popitem()[1]" if cut.kind is Kind.KEY else f"{owner}.pop()"
    if is_alone:
        return f"while {owner}: {removal}.{cut.ending}"
    return f"[{removal}.{cut.ending} for _ in range(len({owner}))];"


def _of_span(cut: Cut, start: int, end: int, *, is_alone: bool) -> str:
    """Return the statement that removes neighbouring items of a container."""
    imports, owner = split(cut.owner)
    span = f"[{start}:]" if end == cut.size else f"[{start}:{end}]"
    in_loop = without_import(cut.owner)
    match cut.kind:
        case Kind.ITEM:
            place = variable_for(in_loop, "_position")
            if cut.ending:
                loop = f"for {place} in range({end - 1}, {start - 1}, -1)"
                removal = f"{in_loop}.pop({place}).{cut.ending}"
                if is_alone:
                    return f"{loop}: {removal}; del {place}"
                return f"[{removal} {loop}];"
            if not cut.has_slices:
                loop = f"for {place} in range({end - 1}, {start - 1}, -1)"
                if is_alone:
                    return f"{loop}: del {in_loop}[{place}], {place}"
                return f"[{in_loop}.__delitem__({place}) {loop}];"
            return f"{imports}del {owner}{span}"
        case Kind.KEY:
            key = variable_for(in_loop, "_key")
            loop = f"for {key} in {cut.listing.keys_of(in_loop)}{span}"
            removal = f"{in_loop}.pop({key})"
            if cut.ending:
                removal += f".{cut.ending}"
            elif is_alone:
                return f"{loop}: del {in_loop}[{key}], {key}"
            return f"{loop}: {removal}; del {key}" if is_alone else f"[{removal} {loop}];"
        case _:
            return _of_elements(cut, [(start, end)])


def _of_elements(cut: Cut, spans: Sequence[tuple[int, int]]) -> str:
    """Return the statement that removes some runs of elements of a set; empty if there is none.

    It is one call, because the first of several would give the other elements new positions.
    """
    if cut.ending:
        return ""
    imports, owner = split(cut.owner)
    runs = list[str]()
    for start, end in spans:
        runs.append(f"list({owner})" + (f"[{start}:]" if end == cut.size else f"[{start}:{end}]"))
    return f"{imports}{owner}.difference_update({', '.join(runs)})"


def _in_each(groups: list[list[Cut]]) -> str:
    """Return the loop that removes the same reference of neighbouring items of a list.

    It is empty if the references differ. An example is a list of results, each of which holds an
    array: ``for _item in runs: del _item["data"]; del _item``.
    """
    outer = _outer_of_each(groups)
    if len(outer) < 2:
        return ""
    first = outer[0]
    if first.kind is not Kind.ITEM or any(cut.owner_id != first.owner_id for cut in outer):
        return ""
    statements = _statements_of_items(groups, outer)
    positions = sorted(cut.position for cut in outer)
    start, end = positions[0], positions[-1] + 1
    if len(statements) == 1 and end - start != len(groups):
        statements = _statements_if_there(groups, outer[0])
        start, end = 0, first.size
    if len(statements) != 1 or not all(statements):
        return ""
    span = f"[{start}:]" if end == first.size else f"[{start}:{end}]"
    if (start, end) == (0, first.size):
        span = ""
    items = without_import(first.owner)
    if span and not first.has_slices:
        items = f"list({items})"
    # The loop takes none of the user's names, and leaves none that keeps the last item.
    variable = variable_for(first.target, EACH)
    body = in_sequence([*statements, f"del {variable}"])
    return f"for {variable} in {items}{span}: {body}"


def _statements_of_items(groups: list[list[Cut]], outer: Sequence[Cut]) -> set[str]:
    """Return the statements that remove each group's references in a loop, where all may be alike.

    Args:
        groups: the references of each item.
        outer: the reference to each item.
    """
    statements = set[str]()
    written = set[tuple[object, ...]]()
    for group, around in zip(groups, outer, strict=True):
        code = tuple((cut.target, cut.ending, cut.position, cut.size) for cut in group)
        if (around.target, code) not in written:  # else it has the code of another item
            written.add((around.target, code))
            inner = [inside(cut, around) for cut in group]
            statements.add(_of_one_item(inner))
    return statements


def _statements_if_there(groups: list[list[Cut]], outer: Cut) -> set[str]:
    """Return the statement that removes references from the items that have them, if no other item
    has one there: ``for _item in docs: _item.pop("tokens", None)``.

    Args:
        groups: the references of each item.
        outer: the reference to the item of the first group.
    """
    if not all(cut.is_only_there for group in groups for cut in group):
        return set()
    statements = [inside(cut, outer).statement_if_there for cut in groups[0]]
    return {in_sequence(statements)} if all(statements) else set()


def _of_one_item(cuts: list[Cut]) -> str:
    """Return the statement that removes some references of a loop's item: by their keys, because
    the keys of other items may have other positions, and in the order of the text, because the
    references come in the order of addresses.
    """
    if len(cuts) <= _MOST_KEYS and all(cut.kind is Kind.KEY for cut in cuts):
        return in_sequence(sorted(cut.statement for cut in cuts))
    return _statement_for_one_owner(cuts, is_alone=False)


def _outer_of_each(groups: list[list[Cut]]) -> list[Cut]:
    """Return the reference to the owner of each group; nothing if some have none."""
    outer = list[Cut]()
    for group in groups:
        around = group[0].outer
        if around is None or any(cut.outer != around for cut in group):
            return []
        outer.append(around)
    return outer


def inside(cut: Cut, outer: Cut) -> Cut:
    """Return a reference of an item that a loop calls ``_item``; as it is if its code differs."""
    prefix = outer.target
    variable = variable_for(prefix, EACH)
    if not prefix or not cut.owner.startswith(prefix) or not cut.target.startswith(prefix):
        return cut
    owner = f"{variable}{cut.owner[len(prefix) :]}"
    return replace(cut, owner=owner, target=f"{variable}{cut.target[len(prefix) :]}")
