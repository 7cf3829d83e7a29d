"""Writes one statement that removes several references, such as ``runs.clear(); del best``.

``statement_of`` puts the references into groups, one for each owner. The statement of a group comes
from ``item_statements.py`` if these are items of a container. If each item of a list has the same
reference, it is one loop over the list.
"""

from __future__ import annotations

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
from ipygpumem.heap.paths.item_statements import (
    MOST_ITEMS_ONE_BY_ONE,
    detachment_of_values,
    emptying_of_elements,
    removal_at_positions,
)
from ipygpumem.heap.paths.loop_variables import variable_for

_ITEM = "_item"
"""The variable of a loop over items."""
_MOST_CALLS = 4
"""Maximum number of calls that a statement makes one by one if a loop can make them."""
_CALL_WITH_NUMBER = re.compile(r"([\w.]+)\((\d+)\)")
"""A call such as ``plt.close(3)``."""
_ORDERED = {Kind.ITEM, Kind.KEY, Kind.ELEMENT}
"""References of containers with positions, several of which one statement can remove."""


def statement_of(cuts: Sequence[Cut], *, most_owners: int = MOST_ITEMS_ONE_BY_ONE) -> str:
    """Return one statement that removes all of the references; empty if there is none.

    Args:
        cuts: the references.
        most_owners: maximum number of groups that have a statement each, joined by semicolons.
    """
    if not cuts:
        return ""
    groups = _groups_for_statements(outermost(cuts))
    loop = _loop_over_items(groups)
    if loop:
        return loop
    if len(groups) > most_owners:
        return ""
    is_alone = len(groups) == 1
    statements = [
        _statement_for_one_owner(group, is_alone=is_alone) for group in _inner_first(groups)
    ]
    return in_sequence(statements) if all(statements) else ""


# -- groups of references -------------------------------------------------------------------------


def outermost(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the references, each once, without those inside objects that another one removes: of
    ``runs[3]`` and ``runs[3]["model"]`` only the former.
    """
    unique = dict[Cut, None]()
    for cut in cuts:
        for reference in cut.single_references():
            unique[reference] = None
    outermost = list[Cut]()
    # Asked once for each outer reference, by its identity: a million items may share one.
    are_removed = dict[int, bool]()
    for cut in unique:
        outer = cut.outer
        if id(outer) not in are_removed:
            are_removed[id(outer)] = _is_removed_by(unique, outer)
        if not are_removed[id(outer)]:
            outermost.append(cut)
    return outermost


def _is_removed_by(cuts: Mapping[Cut, None], outer: Cut | None) -> bool:
    """Return True if the line that removes ``cuts`` also removes a reference, because they contain
    it or one of its outer ones: ``runs[3]`` for ``runs[3]["model"]``.
    """
    while outer is not None:
        if not cuts.keys().isdisjoint(outer.single_references()):
            return True
        outer = outer.outer
    return False


def _groups_for_statements(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Return references in groups, each of which gets one statement: the references of one owner.

    If a copy takes an object's place in several owners, all references to that object are one
    group instead: ``models["a"] = best.model = clone(models["a"])``.
    """
    copied_places = Counter(cut.removed_id for cut in cuts if cut.copied_by and cut.removed_id)
    groups = dict[tuple[bool, int], list[Cut]]()
    for cut in cuts:
        is_copied = cut.copied_by != "" and copied_places[cut.removed_id] > 1
        key = (True, cut.removed_id) if is_copied else (False, cut.owner_id)
        groups.setdefault(key, []).append(cut)
    return list(groups.values())


def _inner_first(groups: list[list[Cut]]) -> list[list[Cut]]:
    """Return the groups in an order in which each statement still works after the earlier ones:
    later positions first, variables last.
    """
    # Sorting keeps the order of equals, so the most important key comes last.
    last_first = sorted(groups, key=lambda group: _positions(group[0]), reverse=True)

    def number_of_broken(group: list[Cut]) -> int:
        """Return the number of other groups whose statements would not work after a group's."""
        return sum(_breaks(group, other) for other in groups if other is not group)

    return sorted(
        last_first, key=lambda group: (group[0].kind is Kind.NAME, number_of_broken(group))
    )


def _breaks(earlier: list[Cut], later: list[Cut]) -> bool:
    """Return True if the statement for ``later`` would not work after that for ``earlier``.

    There are two cases: its code begins with an object that is gone, as ``run.model`` after ``del
    run``; or it names an item by its position, which has changed, as ``runs[1].model`` after ``del
    runs[0]``.
    """
    owners = {cut.owner for cut in later}  # often one for thousands of references
    for prefix in {cut.target for cut in earlier}:
        for owner in owners:
            after = owner.removeprefix(prefix)
            begins_with_it = prefix != "" and after != owner
            if begins_with_it and after[:1] in ("", ".", "["):  # ``runs`` is not in ``runs2``
                return True
    lists = {f"{cut.owner}[" for cut in earlier if cut.kind in WITH_POSITIONS}
    return any(owner.startswith(tuple(lists)) for owner in owners)


def _positions(cut: Cut) -> tuple[int, ...]:
    """Return the positions on the way to a reference, the outermost first: ``(3, 0)`` for that of
    ``runs[3][0]``.
    """
    before = () if cut.outer is None else _positions(cut.outer)
    return (*before, cut.position)


# -- the references of one object -----------------------------------------------------------------


def _statement_for_one_owner(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes references of one object; empty if there is none.

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
    if len(cuts) == first.size and first.removal_of_all:  # such as ``plt.close("all")``
        return first.removal_of_all
    if first.kind is Kind.COLUMN:
        return _removal_of_columns(cuts)
    if any(cut.copied_by for cut in cuts):
        return _replacement_by_copies(cuts)
    if all(_are_alike(cut, first) for cut in cuts):
        statement = _removal_of_alike(cuts, is_alone=is_alone)
        if statement:
            return statement
    if len(cuts) <= MOST_ITEMS_ONE_BY_ONE or first.kind in (Kind.CALL, Kind.CLOSED):
        return _one_by_one(cuts)
    return ""


def _removal_of_columns(cuts: Sequence[Cut]) -> str:
    """Return the statement that removes columns of a data frame, ``del frame["a"], frame["b"]``. If
    these are all columns, it is the one that removes the whole frame, unless that is a variable.
    """
    first = cuts[0]
    labels = list(dict.fromkeys(label for cut in cuts for label in cut.columns))
    frame = first.outer  # the reference to the frame itself
    are_all_columns = len(labels) == first.size
    if are_all_columns and frame is not None and frame.kind is not Kind.NAME:
        return frame.statement
    return without_columns(first.owner, labels)


def _replacement_by_copies(cuts: list[Cut]) -> str:
    """Return the statement that puts a copy of each object in its places, ``models[0] =
    clone(models[0])``; empty if the places are too many.
    """
    if len(cuts) > MOST_ITEMS_ONE_BY_ONE:
        return ""
    object_ids = {cut.removed_id for cut in cuts}
    if len(object_ids) == 1 and 0 not in object_ids:
        return statement_with_copy(cuts)
    return _one_by_one(cuts)


def _are_alike(cut: Cut, other: Cut) -> bool:
    """Return True if two references of one owner are removed in the same way, so that one slice or
    loop can remove both.
    """
    kinds = [(each.kind, each.ending, each.is_detached, each.is_replaced) for each in (cut, other)]
    return kinds[0] == kinds[1]


def _removal_of_alike(cuts: list[Cut], *, is_alone: bool) -> str:
    """Return the statement that removes references of one owner at once, which are removed in the
    same way: ``rows.clear()``, ``del rows[3:7]``, or a loop. Empty if there is none.
    """
    first = cuts[0]
    are_many = len(cuts) > MOST_ITEMS_ONE_BY_ONE
    if first.is_detached:
        return detachment_of_values(cuts) if first.kind is Kind.KEY and are_many else ""
    if first.kind is Kind.CALL:
        return _loop_of_calls(cuts) if is_alone and len(cuts) > _MOST_CALLS else ""
    if first.kind is Kind.SLOT:
        return emptying_of_elements(cuts) if are_many else ""
    if first.kind not in _ORDERED:
        return ""
    # A reference may occur twice: as the only one, and as one of many, which has no code.
    positions = sorted({cut.position for cut in cuts})
    return removal_at_positions(first, positions, is_alone=is_alone)


def _one_by_one(cuts: Sequence[Cut]) -> str:
    """Return one line with a statement for each reference of an owner, the last one first:
    ``del rows[7]; del rows[3]``.
    """
    last_first = sorted(cuts, key=lambda cut: cut.position, reverse=True)
    return in_sequence(list(dict.fromkeys(cut.statement for cut in last_first)))


def _loop_of_calls(cuts: Sequence[Cut]) -> str:
    """Return the loop for calls with a number each,
    ``[plt.close(number) for number in range(3, 9)];``; empty if there is none.
    """
    numbers = set[int]()
    functions = set[tuple[str, str]]()
    for cut in cuts:
        imports, code = split(cut.target)
        call = _CALL_WITH_NUMBER.fullmatch(code)
        if call is None:
            return ""
        functions.add((imports, call[1]))
        numbers.add(int(call[2]))
    if len(functions) != 1:
        return ""
    imports, function = functions.pop()
    lowest, highest = min(numbers), max(numbers)
    values = tuple_of(sorted(numbers))
    if len(numbers) == highest - lowest + 1:
        values = f"range({lowest}, {highest + 1})"
    return f"{imports}[{function}(number) for number in {values}];"


# -- a loop over the items of a list --------------------------------------------------------------


def _loop_over_items(groups: list[list[Cut]]) -> str:
    """Return the loop that removes the same references from each of several items of a list; empty
    if the items differ.

    If ``runs`` is a list of results, each of which has an array, it is
    ``for _item in runs: del _item["data"]; del _item``.

    Args:
        groups: the references of each item.
    """
    items = _references_to_items(groups)
    if len(items) < 2:
        return ""
    first = items[0]
    are_in_one_list = all(item.owner_id == first.owner_id for item in items)
    if first.kind is not Kind.ITEM or not are_in_one_list:
        return ""
    statements = _statements_of_items(groups, items)
    if len(statements) != 1:
        return ""  # the items differ
    statement = statements.pop()
    # Over a slice of neighbouring items, or over the whole list with a check.
    positions = sorted(item.position for item in items)
    start, end = positions[0], positions[-1] + 1
    if end - start != len(groups):  # items between them have no such references
        statement = _statement_if_there(groups, first)
        start, end = 0, first.size
    if not statement:
        return ""
    # The loop takes none of the user's names, and leaves none that keeps the last item.
    variable = variable_for(first.target, _ITEM)
    body = in_sequence([statement, f"del {variable}"])
    return f"for {variable} in {_code_of_items(first, start, end)}: {body}"


def _code_of_items(item: Cut, start: int, end: int) -> str:
    """Return the code of neighbouring items of a container, for a loop: ``runs[3:7]`` of a list,
    ``list(runs)[3:7]`` of a deque, or ``runs`` for all items.

    Args:
        item: the reference to one of the items.
        start: the position of the first item.
        end: the position after the last one.
    """
    container = without_import(item.owner)
    if (start, end) == (0, item.size):
        return container
    if not item.has_slices:
        container = f"list({container})"
    return f"{container}[{start}:]" if end == item.size else f"{container}[{start}:{end}]"


def _references_to_items(groups: list[list[Cut]]) -> list[Cut]:
    """Return the container's reference to the item of each group: the owner of the group's
    references, or an object around it. Nothing if a group is inside no item.
    """
    items = list[Cut]()
    for group in groups:
        item = group[0].outer
        if item is None or any(cut.outer != item for cut in group):
            return []
        items.append(item)
    return items


def _statements_of_items(groups: list[list[Cut]], items: Sequence[Cut]) -> set[str]:
    """Return the different statements for the items of a loop: only one if all items are alike.

    Args:
        groups: the references of each item.
        items: the reference to each item.
    """
    statements = set[str]()
    # Thousands of items may have the same code: the statement of each is written once.
    written = set[tuple[object, ...]]()
    for group, item in zip(groups, items, strict=True):
        code = tuple((cut.target, cut.ending, cut.position, cut.size) for cut in group)
        if (item.target, code) not in written:
            written.add((item.target, code))
            statements.add(_statement_of_one_item([inside_loop(cut, item) for cut in group]))
    return statements


def _statement_if_there(groups: list[list[Cut]], first_item: Cut) -> str:
    """Return the statement that removes references from a loop's item if it has them,
    ``_item.pop("tokens", None)``; empty if there is none, or if it would remove the references of
    further items.

    Args:
        groups: the references of each item.
        first_item: the reference to the item of the first group.
    """
    if not all(cut.is_only_there for group in groups for cut in group):
        return ""
    statements = [inside_loop(cut, first_item).statement_if_there for cut in groups[0]]
    return in_sequence(statements) if all(statements) else ""


def _statement_of_one_item(cuts: list[Cut]) -> str:
    """Return the statement that removes references from a loop's item.

    Keys of a dict are named, because the same key of another item may have another position. They
    are sorted, because the references come in the order of addresses, which changes.
    """
    if len(cuts) <= MOST_ITEMS_ONE_BY_ONE and all(cut.kind is Kind.KEY for cut in cuts):
        return in_sequence(sorted(cut.statement for cut in cuts))
    return _statement_for_one_owner(cuts, is_alone=False)


def inside_loop(cut: Cut, item: Cut) -> Cut:
    """Return a reference of a list's item with the code that it has in a loop over the list,
    ``_item["data"]`` instead of ``runs[3]["data"]``. It stays as it is if its code does not begin
    with that of the item.

    Args:
        cut: the reference.
        item: the list's reference to the item.
    """
    prefix = item.target
    variable = variable_for(prefix, _ITEM)
    if not prefix or not cut.owner.startswith(prefix) or not cut.target.startswith(prefix):
        return cut
    owner = f"{variable}{cut.owner[len(prefix) :]}"
    return replace(cut, owner=owner, target=f"{variable}{cut.target[len(prefix) :]}")
