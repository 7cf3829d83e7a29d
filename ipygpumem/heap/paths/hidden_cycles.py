"""Writes the lines that end cycles through arrays of objects.

The garbage collector does not look into an array, so it never frees such a cycle: ``del x`` frees
nothing once ``x.rows`` is an array with ``x`` in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import flat_elements, is_array, is_of_pandas, owner_of, read_array
from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import by_identity, container_base
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.paths.attributes_to_remove import is_shadowed, sets_attributes
from ipygpumem.heap.paths.items_and_attributes import items_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import class_dict, instance_dict, is_instance, is_name

_MOST_PASSED = 1000
"""Maximum number of objects to pass through on the way from an attribute to an array."""
_MOST_FOLLOWED = 20_000
"""Maximum number of objects behind an array to follow, to find out if its cycle is ended."""
_MOST_ITEMS = 100
"""Maximum number of items of a list or dict whose attributes are examined."""


def lines_that_end(
    objects: Iterable[tuple[str, object]], arrays: Sequence[Any], barriers: Barriers
) -> list[str]:
    """Return the lines that end the cycles of some objects, and of the items of lists and dicts
    among them, before these objects are deleted; none if a cycle goes another way, too.

    Args:
        objects: each object's code, such as its name, and the object.
        arrays: the arrays through which cycles lead.
        barriers: where walks stop.
    """
    owners = list[tuple[str, object]]()
    for target, item in objects:
        owners += [(target, item), *_items_of(target, item)]
    cleared = _Cleared({}, {})
    for array in arrays:
        for code, owner in owners:
            if array is owner:
                cleared.fill(code, array)
                continue
            for name in _attributes_leading_to(array, owner):
                cleared.clear(code, owner, name)
    if not all(cleared.ends(array, barriers) for array in arrays):
        return []
    return list(cleared.lines)


def _items_of(target: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield the items of a list or dict with the code of each."""
    if type(item) is list and len(item) <= _MOST_ITEMS:
        for position, value in enumerate(item):
            yield f"{target}[{position}]", value
    if type(item) is dict and len(item) <= _MOST_ITEMS:
        for key, value in item.items():
            written = literal(key)
            if written:
                yield f"{target}[{written}]", value


class _Cleared(NamedTuple):
    """References that some lines remove."""

    lines: dict[str, None]
    attributes: dict[int, set[str]]
    """The names of the attributes that are set to None, by the identity of their object; no names
    for an array that is filled.
    """

    def fill(self, code: str, array: Any) -> None:
        """Add the line that fills an array, which must not be read-only."""
        if read_array("flags", array).writeable:
            self.lines[f"{code}.fill(None)"] = None
            self.attributes[id(array)] = set()

    def clear(self, code: str, owner: object, name: str) -> None:
        """Add the line that sets an attribute to None, if there is one."""
        line = _clearing(code, owner, name)
        if line:
            self.lines[line] = None
            self.attributes.setdefault(id(owner), set()).add(name)

    def ends(self, array: Any, barriers: Barriers) -> bool:
        """Return True if an array no longer leads to itself once the lines have run."""
        references = ReferenceReader(barriers, has_text_keys=False)
        waiting = by_identity(self._behind(array))
        followed = set[int]()
        while waiting:
            followed.update(waiting)
            if id(array) in waiting or len(followed) > _MOST_FOLLOWED:
                return False
            unchanged = [waiting[key] for key in waiting.keys() - self.attributes.keys()]
            below = by_identity(references.of(unchanged).of_python)
            for key in waiting.keys() & self.attributes.keys():
                below.update(by_identity(self._behind(waiting[key])))
            waiting = {key: below[key] for key in below.keys() - followed}
        return True

    def _behind(self, item: Any) -> list[object]:
        """Return the objects to which an array or an object still refers."""
        names = self.attributes.get(id(item))
        if is_array(item):
            return [] if names is not None else list(flat_elements(item) or ())
        kept = [value for name, value in _attributes_of(item).items() if name not in (names or ())]
        if container_base(type(item)) is not None:
            kept += items_of(item)
        return kept


def _clearing(code: str, owner: object, name: str) -> str:
    """Return the line that sets an attribute to None, also one of a frozen class; empty if the
    class may do something else then.
    """
    is_stored = name in (instance_dict(owner) or {})
    if not is_name(name) or is_shadowed(owner, name):
        return f"vars({code})[{literal(name)}] = None" if is_stored else ""
    if sets_attributes(owner):
        return f"{code}.{name} = None"
    return f"object.__setattr__({code}, {literal(name)}, None)"


def _attributes_of(item: object) -> dict[str, object]:
    """Return the attributes of an object; of a class, without its bases."""
    if is_instance(item, type):
        return dict(class_dict(item))
    return slots(item) | (instance_dict(item) or {})


def _attributes_leading_to(array: Any, item: object) -> list[str]:
    """Return the names of the attributes whose value is an array, or contains it."""
    if is_of_pandas(item):
        return []
    names = list[str]()
    for name, value in _attributes_of(item).items():
        if type(name) is str and _contains(value, array):
            names.append(name)
    return names


def _contains(value: object, array: Any) -> bool:
    """Return True if a container or an object of pandas leads to an array.

    Objects of other classes are not entered: something else may hold these and their arrays.
    """
    waiting = [value]
    passed = set[int]()
    for item in waiting:  # the list grows
        if item is array or (is_array(item) and owner_of(item) is array):
            return True
        is_entered = container_base(type(item)) is not None or is_of_pandas(item)
        if not is_entered or id(item) in passed:
            continue
        if len(passed) == _MOST_PASSED:
            return False
        passed.add(id(item))
        waiting += gc.get_referents(item)
    return False
