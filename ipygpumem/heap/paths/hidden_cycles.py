"""Writes the lines that end cycles through arrays of objects.

The garbage collector does not look into an array, so it never frees such a cycle: ``del x`` frees
nothing once ``x.rows`` is an array with ``x`` in it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import by_identity, container_base
from ipygpumem.heap.kinds.arrays import flat_elements, is_array, is_of_pandas, owner_of, read_array
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.paths.attributes_to_remove import is_shadowed, sets_attributes
from ipygpumem.heap.paths.items_and_attributes import items_of
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import class_dict, instance_dict, is_instance, is_name

_MOST_PASSED_OBJECTS = 1000
"""Maximum number of objects to pass through on the way from an attribute to an array."""
_MOST_FOLLOWED_OBJECTS = 20_000
"""Maximum number of objects behind an array to follow, to find out if its cycle is ended."""
_MOST_ITEMS = 100
"""Maximum number of items of a list or dict whose attributes are examined."""


def lines_that_end_cycles(
    objects: Iterable[tuple[str, object]], arrays: Sequence[Any], barriers: Barriers
) -> list[str]:
    """Return the lines that end cycles before objects are deleted, ``x.rows = None`` before
    ``del x``; no lines if they would not end all of the cycles.

    Args:
        objects: the code of each object, such as its name, and the object. The lines may change the
            objects, and the items of lists and dicts among them.
        arrays: the arrays through which cycles lead.
        barriers: where walks stop.
    """
    owners = list[tuple[str, object]]()
    for code, item in objects:
        owners += [(code, item), *_items_with_code(code, item)]
    changes = _RemovingLines({}, {})
    for array in arrays:
        for code, owner in owners:
            if array is owner:
                changes.add_filling(code, array)
                continue
            for name in _attributes_leading_to(array, owner):
                changes.add_clearing(code, owner, name)
    if not all(changes.ends_cycle_of(array, barriers) for array in arrays):
        return []
    return list(changes.lines)


def _items_with_code(code: str, container: object) -> Iterator[tuple[str, object]]:
    """Yield the code and the object of each item of a short list or dict; none for anything
    else.
    """
    if type(container) is list and len(container) <= _MOST_ITEMS:
        for position, item in enumerate(container):
            yield f"{code}[{position}]", item
    if type(container) is dict and len(container) <= _MOST_ITEMS:
        for key, value in container.items():
            written_key = literal(key)
            if written_key:
                yield f"{code}[{written_key}]", value


class _RemovingLines(NamedTuple):
    """Lines that remove references of objects and arrays, and the references that they remove."""

    lines: dict[str, None]
    """The lines, each once, in the order in which they run."""
    attributes: dict[int, set[str]]
    """The names of the attributes that the lines set to None, by the identity of their object; an
    empty set for an array that a line fills.
    """

    def add_filling(self, code: str, array: Any) -> None:
        """Add the line ``x.fill(None)`` for an array of objects, unless it is read-only."""
        if read_array("flags", array).writeable:
            self.lines[f"{code}.fill(None)"] = None
            self.attributes[id(array)] = set()

    def add_clearing(self, code: str, owner: object, name: str) -> None:
        """Add the line that sets an attribute to None, if there is one."""
        line = _clearing(code, owner, name)
        if line:
            self.lines[line] = None
            self.attributes.setdefault(id(owner), set()).add(name)

    def ends_cycle_of(self, array: Any, barriers: Barriers) -> bool:
        """Return True if an array no longer leads to itself once the lines have run: follow all
        references from it that remain, level by level.
        """
        references = ReferenceReader(barriers, has_text_keys=False)
        level = by_identity(self._remaining_references(array))
        followed = set[int]()
        while level:
            followed.update(level)
            if id(array) in level or len(followed) > _MOST_FOLLOWED_OBJECTS:
                return False
            # The lines change some objects; of the remaining ones, all references are followed.
            unchanged = [level[key] for key in level.keys() - self.attributes.keys()]
            below = by_identity(references.of(unchanged).of_python)
            for key in level.keys() & self.attributes.keys():
                below.update(by_identity(self._remaining_references(level[key])))
            level = {key: below[key] for key in below.keys() - followed}
        return True

    def _remaining_references(self, item: Any) -> list[object]:
        """Return the objects to which an array or an object refers once the lines have run."""
        cleared_names = self.attributes.get(id(item))
        if is_array(item):
            is_filled = cleared_names is not None
            return [] if is_filled else list(flat_elements(item) or ())
        values = list[object]()
        for name, value in _attributes_of(item).items():
            if cleared_names is None or name not in cleared_names:
                values.append(value)
        if container_base(type(item)) is not None:
            values += items_of(item)
        return values


def _clearing(code: str, owner: object, name: str) -> str:
    """Return the line that sets an attribute to None; empty if there is none.

    It is ``x.rows = None``; ``object.__setattr__(x, "rows", None)`` for a frozen class; or
    ``vars(x)["rows"] = None`` if an assignment would not set the attribute.

    Args:
        code: the code of the object.
        owner: the object.
        name: the name of the attribute.
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
    """Return the names of the attributes of an object that are an array, or contain it."""
    if is_of_pandas(item):
        return []
    names = list[str]()
    for name, value in _attributes_of(item).items():
        if type(name) is str and _contains(value, array):
            names.append(name)
    return names


def _contains(value: object, array: Any) -> bool:
    """Return True if a value is an array, or leads to it through containers and objects of pandas.

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
        if len(passed) == _MOST_PASSED_OBJECTS:
            return False
        passed.add(id(item))
        waiting += gc.get_referents(item)
    return False
