"""Writes the steps of paths through containers: ``[3]`` of a list, deque or tuple, ``["key"]`` of
a dict, and those through sets and arrays of objects.
"""

from __future__ import annotations

import dis
import itertools
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

from ipygpumem.heap.kinds.arrays import (
    elements,
    flat_elements,
    is_array,
    library_type,
    read_array,
)
from ipygpumem.heap.paths.cuts import Cut, DictListing, Kind, as_one_cut, split
from ipygpumem.heap.paths.items_and_attributes import (
    attribute_names,
    index_of,
    items_of,
    position_of,
)
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import LONGEST_PATH, Path
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.introspect import (
    class_dict,
    is_instance,
    key_text,
    mro_of,
    type_name,
)


def append_item(path: Path, parent: Any, child: object) -> bool:
    """Append the step from a container to an item; return False if ``parent`` is no container, or
    has no such item.
    """
    if not _has_item(parent, child):
        return False
    if _refuses_removal(parent):  # the line removes the container itself
        path.set_fallback(_REFUSAL, f"remove the {type_name(parent)}: {_REFUSAL}")
    if is_instance(parent, dict):
        _append_dict_item(path, parent, child)
    elif is_instance(parent, list) or type(parent) is deque:
        _append_list_item(path, parent, child)
    elif is_instance(parent, tuple):
        index = f"[{position_of(parent, child)}]"
        path.append_fixed(index, path.code and f"{path.code}{index}")
    elif is_instance(parent, set) or is_instance(parent, frozenset):
        _append_set_item(path, parent, child)
    elif elements(parent) is not None:
        _append_array_item(path, parent, child)
    elif is_array(parent):
        path.append_fixed("")  # a view: its own path says enough
    else:
        return False
    return True


def _has_item(container: Any, child: object) -> bool:
    """Return True if an object is an item of a container; False if it is only an attribute of the
    container, such as ``runs.last`` of a ``class Runs(list)``.
    """
    if is_instance(container, dict):
        return _is_among(child, dict.values(container)) or _is_among(child, dict.keys(container))
    for base in (list, tuple, set, frozenset):
        if is_instance(container, base):
            return _is_among(child, base.__iter__(container))
    if type(container) is deque:
        return True
    if not is_array(container):
        return False
    return not attribute_names(container, child) or _is_among(child, flat_elements(container) or ())


def _is_among(child: object, items: Iterable[object]) -> bool:
    """Return True if an object is one of the items; compares identities only."""
    return id(child) in map(id, items)


_REFUSAL = "it deletes no items"
"""The reason for removing a whole container."""


def _refuses_removal(container: object) -> bool:
    """Return True for a container from which no line can remove an item: a read-only array, or an
    object of a class whose ``__delitem__`` never deletes, because it only raises an error.
    """
    if elements(container) is not None:
        return not read_array("flags", container).writeable
    if not is_instance(container, dict) and not is_instance(container, list):
        return False
    for kind in mro_of(type(container)):
        if "__delitem__" in class_dict(kind):
            return not _may_delete(class_dict(kind)["__delitem__"])
    return False


def has_plain_assignment(container: object) -> bool:
    """Return True for a list in which ``rows[3] = None`` replaces an item: its class has no
    ``__setitem__`` of its own.
    """
    if not is_instance(container, list):
        return False
    for kind in mro_of(type(container)):
        if "__setitem__" in class_dict(kind):
            return kind is list
    return False


def _may_delete(method: object) -> bool:
    """Return True if a ``__delitem__`` may delete an item: its code has ``del``, or the name of a
    method that removes items.
    """
    if type(method) is not FunctionType:  # a method in C, or ``__delitem__ = None``
        return method is not None
    if not _REMOVING.isdisjoint(method.__code__.co_names):
        return True
    return any(step.opname == "DELETE_SUBSCR" for step in dis.get_instructions(method))


_REMOVING = {"super", "__delitem__", "__setitem__", "pop", "popitem", "remove", "clear"}
"""Names in code that removes items."""


def _with_ending(cut: Cut | None, item: object) -> Cut | None:
    """Return the reference to an item. If deleting the item is not enough, such as for a task, the
    reference has the call that ends it first: ``tasks[0].cancel(); del tasks[0]``.
    """
    ending = ending_of(item)
    if cut is None or not ending:
        return cut
    return replace(cut, ending=ending)


def _append_list_item(path: Path, parent: Any, child: object) -> None:
    """Append an item of a list or deque."""
    base: Any = deque if type(parent) is deque else list
    position = position_of(parent, child)
    code = path.code and f"{path.code}[{position}]"
    cut = None
    if code:
        cut = Cut(
            Kind.ITEM,
            id(parent),
            path.code,
            code,
            position,
            base.__len__(parent),
            has_slices=type(parent) is not deque,
        )
    if _refuses_removal(parent):
        path.append_fixed(f"[{position}]", code)
    else:
        path.append_removable(f"[{position}]", code, _with_ending(cut, child))


def _append_dict_item(path: Path, parent: Any, child: object) -> None:
    """Append a value of a dict, ``runs["x"]``, or a key."""
    pairs = list(dict.items(parent))  # one copy: a thread may change the dict
    listing = listing_of(parent)
    position = index_of(child, map(itemgetter(1), pairs))
    is_value = position >= 0
    if not is_value:
        position = index_of(child, map(itemgetter(0), pairs))
    if is_value:
        entry = _entry_of_value(path.code, pairs[position][0], len(pairs), listing)
    elif position >= 0:
        entry = _entry_of_key(path.code, child, len(pairs), listing)
    else:  # an attribute of a dict's subclass, which no ``del`` of a key removes
        entry = _Entry(" (as an attribute)")
    cut = None
    if entry.target:
        cut = Cut(
            Kind.KEY,
            id(parent),
            path.code,
            entry.target,
            position,
            len(pairs),
            listing=listing,
        )
    if _refuses_removal(parent):
        path.append_fixed(entry.shown, entry.code)
    else:
        path.append_removable(entry.shown, entry.code, _with_ending(cut, child))


class _Entry(NamedTuple):
    """A value or key of a dict, as a path shows it and as code reads it."""

    shown: str
    """The text of the step, such as ``["x"]``."""
    code: str = ""
    """The expression for the value or key; empty if it cannot be typed."""
    target: str = ""
    """The expression to delete; empty if there is none."""


def _entry_of_value(owner: str, key: object, size: int, listing: DictListing) -> _Entry:
    """Return the value under a key of a dict: ``runs["x"]``, or
    ``runs[next(key for key in list(runs) if id(key) == 140...)]`` if the key cannot be typed.

    Args:
        owner: the code of the dict; empty if there is none.
        key: the key.
        size: the number of keys of the dict.
        listing: how code lists its keys.
    """
    written = literal(key)
    if written:
        shown = f"[{written}]"
        if len(shown) >= LONGEST_PATH // 4:
            shown = f"[{key_text(key)}]"
        code = owner and f"{owner}[{written}]"
        return _Entry(shown, code, code)
    # The key is an object, which the code finds again by its identity.
    shown = f" (under a key of type {type_name(key)})"
    if not owner:
        return _Entry(shown)
    imports, expression = split(owner)  # ``import m; m.x`` is no expression
    target = f"{imports}{expression}[{_expression_for_key(expression, key, size, listing)}]"
    code = f"{imports}{listing.values_of(expression)}[0]" if size == 1 else target
    return _Entry(shown, code, target)


def _entry_of_key(owner: str, key: object, size: int, listing: DictListing) -> _Entry:
    """Return a key of a dict, which is removed with its value; the arguments are those of
    ``_entry_of_value``.
    """
    if not owner:
        return _Entry(".keys()")
    imports, expression = split(owner)
    code = _expression_for_key(expression, key, size, listing)
    return _Entry(".keys()", f"{imports}{code}", f"{imports}{expression}[{code}]")


def _expression_for_key(owner: str, key: object, size: int, listing: DictListing) -> str:
    """Return the expression for a key of a dict that cannot be typed,
    ``next(key for key in list(runs) if id(key) == 140...)``; the arguments are those of
    ``_entry_of_value``.

    It is ``list(runs)[0]`` only if the dict has no other key: a position would be that of another
    key once a line has removed an earlier one.
    """
    keys = listing.keys_of(owner)
    return f"{keys}[0]" if size == 1 else f"next(key for key in {keys} if id(key) == {id(key)})"


def cuts_of_repeated(cut: Cut, parent: Any, child: object) -> list[Cut]:
    """Return all references from a container to an object: of ``runs = [x, y, x]``, those of
    ``runs[0]`` and ``runs[2]`` to ``x``.

    Args:
        cut: the first of these references.
        parent: the container.
        child: the object.
    """
    if is_instance(parent, dict) and cut.kind is Kind.KEY:
        return _cuts_of_repeated_value(cut, parent, child)
    if cut.kind not in (Kind.QUEUED, Kind.ITEM):
        return [cut]
    positions = [position for position, item in enumerate(items_of(parent)) if item is child]
    if cut.kind is Kind.QUEUED:
        return [replace(cut, position=position) for position in positions] or [cut]
    return [
        replace(cut, position=position, target=f"{cut.owner}[{position}]") for position in positions
    ]


def _cuts_of_repeated_value(cut: Cut, parent: Any, child: object) -> list[Cut]:
    """Return the references of a dict to an object: that of each key which is the object, or has it
    as its value.
    """
    listing = listing_of(parent)
    pairs = list(dict.items(parent))
    cuts = list[Cut]()
    for position, (key, value) in enumerate(pairs):
        if value is child or key is child:
            target = _entry_of_value(cut.owner, key, len(pairs), listing).target
            cuts.append(replace(cut, position=position, target=target))
    return cuts


def removal_of_repeated(cuts: Sequence[Cut], parent: object) -> str:
    """Return the statement that removes all references from a container to one object; empty if
    there is none.

    If they are too many to list, the statement compares the items:
    ``runs[:] = [item for item in runs if item is not runs[0]]``.

    Args:
        cuts: the references.
        parent: the container.
    """
    statement = statement_of(cuts)
    first = cuts[0]
    does_more_than_delete = first.ending or first.is_detached or first.copied_by
    if statement or does_more_than_delete:
        return statement
    imports, owner = split(first.owner)
    _, item = split(first.target)
    if first.kind is Kind.KEY:
        keys = f"[key for key, value in {owner}.items() if value is {item}]"
        return f"{imports}[{owner}.pop(key) for key in {keys}];"
    if first.kind is Kind.ITEM and is_instance(parent, list):
        if first.is_replaced:
            values = f"None if item is {item} else item for item in {owner}"
        else:
            values = f"item for item in {owner} if item is not {item}"
        return f"{imports}{owner}[:] = [{values}]"
    return ""


def cuts_of_elements(
    cut: Cut, array: Any, wanted: Container[int], columns_in_frame: Sequence[int] | None
) -> list[Cut]:
    """Return all references from an array of objects to the wanted elements: ``box[3]`` and
    ``box[7]``, or ``frame.iat[3, 0]`` if the array belongs to a data frame.

    Args:
        cut: the reference to one of them.
        array: the array.
        wanted: the identities of the elements.
        columns_in_frame: the position of each of the array's columns in the data frame to which the
            array belongs; empty for a series, None for an array that users know.
    """
    without_repeated = replace(cut, repeated=())
    cuts = list[Cut]()
    for field, index, item in _indexed_elements(array):
        if id(item) not in wanted:
            continue
        code_of_element = f"{field}{_code_of_index(index)}"
        if columns_in_frame is not None:
            code_of_element = f".iat{_code_of_index(_index_in_frame(index, columns_in_frame))}"
        cuts.append(without_repeated.of_item(0, item, f"{cut.owner}{code_of_element}"))
    return cuts


def _indexed_elements(array: Any) -> Iterator[tuple[str, tuple[int, ...], object]]:
    """Yield the index and the object of each element of an array, and before them the field of a
    structured array, ``['f']``; else it is empty.
    """
    names = read_array("dtype", array).names
    base: Any = library_type("numpy", "ndarray")
    plain = base.view(array, base)  # no code of a subclass runs
    fields = [("", plain)]
    if names is not None:
        fields = [(f"[{literal(name)}]", base.__getitem__(plain, name)) for name in names]
    for text, field in fields:
        indices = itertools.product(*map(range, read_array("shape", field)))
        for index, item in zip(indices, flat_elements(field) or (), strict=False):
            yield text, index, item


def _index_in_frame(index: tuple[int, ...], columns: Sequence[int]) -> tuple[int, ...]:
    """Return the row and column of a cell in a data frame, ``(3, 1)``, or in a series, ``(3,)``.

    Args:
        index: the index of the cell in pandas' array, in which each column of the frame is a row.
        columns: the position in the frame of each of these columns; empty for a series.
    """
    if not columns:
        return index
    column = index[0] if len(index) > 1 else 0
    return index[-1], columns[column]


def _append_set_item(path: Path, parent: Any, child: object) -> None:
    """Append an element of a set."""
    base: Any = set if is_instance(parent, set) else frozenset
    items = list(base.__iter__(parent))
    position = next((number for number, item in enumerate(items) if item is child), 0)
    imports, owner = split(path.code)
    code = f"{imports}list({owner})[{position}]" if owner else ""
    if base is frozenset:
        path.append_fixed(" (in a set)", code)
    else:
        cut = Cut(Kind.ELEMENT, id(parent), path.code, code, position, len(items)) if code else None
        path.append_removable(" (in a set)", code, _with_ending(cut, child))


def _append_array_item(path: Path, parent: Any, child: object) -> None:
    """Append an element of an array of objects, ``box[3]``, or a field of a structured array."""
    cut = None
    target = ""
    dimensions = len(read_array("shape", parent))
    names = read_array("dtype", parent).names
    indices = _indices_in_array(elements(parent) or [], child, names, dimensions)
    if indices and path.code and dimensions > 0:
        target = f"{path.code}{indices[0]}"
        cut = _cut_of_elements(path.code, id(parent), indices)
    if _refuses_removal(parent):
        path.append_fixed(" (in an array of objects)", target)
    else:
        path.append_removable(" (in an array of objects)", target, cut)


def _cut_of_elements(code: str, array_id: int, indices: Sequence[str]) -> Cut | None:
    """Return the reference of an array to an object that one or more of its elements are: that of
    the first element, with the remaining ones as its ``repeated``.

    If they are too many to name, one statement finds all of them (``_code_of_same``).

    Args:
        code: the code of the array.
        array_id: its identity.
        indices: the index of each element with the object.
    """
    targets = [f"{code}{index}" for index in indices]
    if len(indices) > _MOST_ELEMENTS:
        first_indices = dict[str, str]()
        for index in indices:
            field, _, _ = index.rpartition("[")
            first_indices.setdefault(field, index)
        targets = [_code_of_same(code, field, index) for field, index in first_indices.items()]
    return as_one_cut([Cut(Kind.SLOT, array_id, code, target) for target in targets])


def _code_of_same(code: str, field: str, index: str) -> str:
    """Return the code for all elements of an array that are the same object as one of them:
    ``box.flat[[position for position, item in enumerate(box.flat) if item is box[3]]]``.

    Args:
        code: the code of the array.
        field: the index of a structured array's field, ``['a']``; else empty.
        index: the index of the element, with the field.
    """
    imports, array = split(code)
    flat = f"{array}{field}.flat"
    positions = f"position for position, item in enumerate({flat}) if item is {array}{index}"
    return f"{imports}{flat}[[{positions}]]"


_MOST_ELEMENTS = 10
"""Maximum number of elements that a line names one by one."""


def _indices_in_array(
    items: list[Any], child: object, names: Sequence[str] | None, dimensions: int
) -> list[str]:
    """Return the index of each element of an array that is an object: ``[3]``, ``[1, 2]``, or with
    its field ``['a'][3]``.

    Lists that are elements are not entered: such a list may contain itself.

    Args:
        items: the elements, in one list for each axis.
        child: the object.
        names: the names of the fields of a structured array; None for any other array.
        dimensions: the number of axes.
    """
    indices = list[str]()
    # Each list that waits has the index that leads to it: ``(1,)`` for the row 1.
    waiting: list[tuple[tuple[int, ...], Any]] = [((), items)]
    while waiting:
        index, item = waiting.pop()
        if names is None and item is child:
            indices.append(_code_of_index(index))
        if names is not None and type(item) is tuple:  # one value for each field
            for name, value in zip(names, item, strict=True):
                if value is child:
                    indices.append(f"[{literal(name)}]{_code_of_index(index)}")
        if len(index) < max(1, dimensions) and type(item) is list:
            waiting += [((*index, position), part) for position, part in enumerate(item)]
    return indices[::-1]  # the last one was found first


def _code_of_index(index: tuple[int, ...]) -> str:
    """Return the index of an element as code: ``[1, 2]``."""
    return f"[{', '.join(map(str, index))}]"


def listing_of(items: object) -> DictListing:
    """Return how code lists the keys of a dict in the order in which ``dict.items`` has them, from
    which positions come.

    For an OrderedDict after ``move_to_end``, ``list(ordered)`` has another order, and a subclass
    may list its keys by code of its own. We cannot use either order ourselves: an OrderedDict looks
    up each key, which runs the ``__hash__`` of a user's key.
    """
    for kind in mro_of(type(items)):
        if "__iter__" in class_dict(kind):
            return DictListing.PLAIN if kind is dict else DictListing.OF_DICT
    return DictListing.PLAIN
