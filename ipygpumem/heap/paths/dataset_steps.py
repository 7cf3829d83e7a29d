"""Writes the steps of paths through xarray's data sets and labelled arrays.

Users write no names for the objects inside, and a data set breaks if one of them is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.kinds.arrays import is_array, is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.literals import literal
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.introspect import is_exactly, module_of

_DICTS_OF_USERS = {"._attrs": ".attrs", "._encoding": ".encoding"}
"""The public names of the attributes with a dict of the user."""
_INSIDE = ("pandas", "xarray")
"""Libraries whose objects hold the data of a variable."""


def append_dataset_step(path: Path, steps: Sequence[object]) -> int:
    """Append the step into an object of xarray, ``dataset["x"]``; return the number of references,
    0 if the object is of another library, or if the step is an attribute like any other.
    """
    parent, child = steps[0], steps[1]
    if module_of(parent).partition(".")[0] != "xarray":
        return 0
    name = attribute_text(parent, child)
    if name in _DICTS_OF_USERS and is_exactly(child, dict):
        shown = _DICTS_OF_USERS[name]
        code = path.code and f"{path.code}{shown}"
        cut = Cut(Kind.CALL, id(parent), path.code, f"{code} = {{}}") if code else None
        path.append_removable(shown, code, cut)
        return 1
    is_dataset = is_of_library(parent, "xarray", "Dataset")
    if not is_dataset and not is_of_library(parent, "xarray", "DataArray"):
        return _append_data(path, steps)  # from a variable or an index
    if name in ("._variables", "._coords", "._indexes") and len(steps) > 2:
        return _append_variable(path, steps, is_dataset=is_dataset)
    if name == "._variable":
        path.append_fixed(".variable", path.code and f"{path.code}.variable")
        return 1
    return 0


def _append_variable(path: Path, steps: Sequence[object], *, is_dataset: bool) -> int:
    """Append a variable of a data set, or a coordinate, which ``del`` removes together with its
    index; return 2, the number of references.

    Args:
        path: the path to the owner.
        steps: the data set or labelled array, the dict of its variables, coordinates or indexes,
            the variable or index, and the objects after it.
        is_dataset: True for a data set.
    """
    owner = steps[0]
    label = _code_of_label(owner, steps[1], steps[2])
    if not label:  # the whole data set is removed
        path.append_removable(" (in a coordinate)")
        return 2
    removed_from = path.code
    variables: Any = slots(owner).get("_variables")
    shown = f"[{label}]"
    if not is_dataset:
        removed_from = path.code and f"{path.code}.coords"
        variables = slots(owner).get("_coords")
        shown = f".coords[{label}]"
    cut = None
    code = path.code and f"{path.code}{shown}"
    if code:
        size = len(variables)
        cut = Cut(Kind.COLUMN, id(variables), removed_from, code, size=size, columns=(label,))
    path.append_removable(shown, code, cut)
    return 2


def _code_of_label(owner: object, items: object, item: object) -> str:
    """Return the code of the name of a variable, coordinate or index, ``"x"``.

    It is empty if ``del`` would remove more than this one: an index of several levels has several
    coordinates.

    Args:
        owner: the data set or labelled array.
        items: the dict in which the item is.
        item: the variable, coordinate or index.
    """
    indexes: Any = slots(owner).get("_indexes")
    if not is_exactly(items, dict) or not is_exactly(indexes, dict):
        return ""
    names = _keys_of(items, item)
    if len(names) != 1:
        return ""
    index = indexes.get(names[0])
    if index is not None and len(_keys_of(indexes, index)) > 1:
        return ""
    return literal(names[0])


def _keys_of(items: Any, value: object) -> list[object]:
    """Return the keys of a dict that have a value."""
    return [key for key, item in items.items() if item is value]


def _append_data(path: Path, steps: Sequence[object]) -> int:
    """Append the way from a variable or an index to its data as one step; return the number of
    references.
    """
    if is_array(steps[1]) and attribute_text(steps[0], steps[1]) == "._data":
        path.append_fixed("", path.code and f"{path.code}.data")
        return 1
    number = 1
    while number < len(steps) - 1 and module_of(steps[number]).partition(".")[0] in _INSIDE:
        number += 1
    path.append_fixed("", "")
    return number
