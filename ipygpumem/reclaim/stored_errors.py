"""Finds the errors that the notebook's names refer to, directly or in a container.

Only the names, the containers that they refer to, and small containers in these are searched, never
the heap. Of 100,000 names without errors, few cost a Python call.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import Batch, chunks, kinds_of, of_types, types_of
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.paths.literals import literal
from ipygpumem.introspect import ATOMS, is_exactly

_MOST_ITEMS = 10_000
"""Maximum number of items of a container to look at."""
_MOST_INNER_ITEMS = 100
"""Maximum number of items of a container in it."""
_MOST_STORED = 4000
"""Maximum number of stored errors to return."""
_INNER_AT_ONCE = 40
"""Number of inner containers to read before another look at the allowance."""
_NAMES_AT_ONCE, _ITEMS_AT_ONCE = 2000, 1000
"""Number of names, and of items of a container, that are skipped together if none of them holds an
error.
"""
_DICTS = (dict, OrderedDict, defaultdict)
_ASSIGNABLE = (list, deque, *_DICTS)
DICT_TYPES = set(map(id, _DICTS))
"""Identities of the types whose items are values with keys."""
CLEARABLE_TYPES = set(map(id, (*_ASSIGNABLE, set)))
"""Identities of the types that have ``clear()``."""
READ_TYPES = CONTAINER_TYPES | DICT_TYPES
"""Identities of the types whose items are read."""
_TYPES_WITHOUT_ERRORS = READ_TYPES | ATOMS
"""Identities of types that are no errors, which most items have."""

KeyPath = tuple[object, ...]
"""Keys that lead to an error in a container: ``("first",)`` for ``runs["first"]``, ``("first", 0)``
for ``runs["first"][0]``. Empty if the whole container has to be emptied or deleted.
"""
Stored = tuple[BaseException, str, Any, KeyPath]
"""An error, the name that leads to it, and the container and the path if it is in one: no class,
whose constructor is a Python call for each error.
"""


def stored_errors(named: Mapping[str, object], allowance: Allowance) -> list[Stored]:
    """Return the errors in variables and in their containers.

    Args:
        named: the objects of the variables, by name.
        allowance: the time and memory for it; once it is spent, no further container is read.
    """
    stored = list[Stored]()
    # Containers that will be emptied: another name of one needs no statement of its own.
    ids_to_empty = set[int]()
    error_types = kinds_of(list(named.values()), BaseException)
    for names, values in _names_that_may_hold_errors(named, error_types):
        for name, value in zip(names, values, strict=True):
            type_id = id(type(value))
            if type_id in error_types and len(stored) < _MOST_STORED:
                stored.append((value, name, None, ()))
                continue
            if type_id not in READ_TYPES or not value or id(value) in ids_to_empty:
                continue
            if allowance.is_spent():
                return stored
            in_container = _errors_in_container(name, value, allowance)
            if in_container and type_id in CLEARABLE_TYPES:
                ids_to_empty.add(id(value))
            stored += in_container
    return stored


def _names_that_may_hold_errors(
    named: Mapping[str, object], error_types: set[int]
) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
    """Yield names and their objects, many at a time, but skip names that surely lead to no errors.

    Names are skipped together if all of their containers are short and have no containers in them,
    and none is an error or has one: so 100,000 names of short lists of numbers take no step each.

    Args:
        named: the objects of the variables, by name.
        error_types: identities of the types of errors among the objects.
    """
    all_names = chunks(list(named), _NAMES_AT_ONCE)
    all_values = chunks(list(named.values()), _NAMES_AT_ONCE)
    for names, values in zip(all_names, all_values, strict=True):
        containers = of_types(READ_TYPES, values)
        short_containers = _short_containers(containers)
        are_all_short = len(short_containers) == len(containers)
        if are_all_short and types_of(values).isdisjoint(error_types):
            items = Batch(gc.get_referents(*short_containers))
            if items.types.isdisjoint(READ_TYPES) and not _error_types(items):
                continue
        yield names, values


def _error_types(batch: Batch[Any]) -> set[int]:
    """Return the identities of the types of errors among many objects."""
    types_that_may_be_errors = batch.types - _TYPES_WITHOUT_ERRORS
    if not types_that_may_be_errors:
        return set()
    return kinds_of(list(batch.one_of_each(types_that_may_be_errors).values()), BaseException)


def _short_containers(containers: list[Any]) -> list[Any]:
    """Return the containers that are short enough to be read inside another one."""
    if max(map(len, containers), default=0) <= _MOST_INNER_ITEMS:
        return containers
    return list(compress(containers, map(_MOST_INNER_ITEMS.__ge__, map(len, containers))))


# -- errors in a container ----------------------------------------------------------------------


def _errors_in_container(name: str, container: Any, allowance: Allowance) -> list[Stored]:
    """Return the errors in a container of a variable, and in small containers in it, as in
    ``failures = [(step, error)]``.

    Their paths are empty if one statement removes all of them better than one for each: the
    container has only errors, so that emptying it loses nothing, or it has no keys that can be
    written.
    """
    items = items_of(container)
    keys: Sequence[object] = range(len(items))
    if id(type(container)) in DICT_TYPES:
        keys = list(islice(container, _MOST_ITEMS))
    contents = _ErrorsInContainer()
    contents.add_items(keys, items)
    contents.add_inner_errors(allowance)
    stored = contents.errors[:_MOST_STORED]
    if contents.is_all_of(container) or not contents.can_be_removed_from(container):
        return [(error, name, container, ()) for _, error in stored]
    return [(error, name, container, path) for path, error in stored]


@dataclass
class _ErrorsInContainer:
    """The errors in a container and in the small containers in it."""

    errors: list[tuple[KeyPath, BaseException]] = field(default_factory=list)
    inner_keys: list[object] = field(default_factory=list)
    """The keys of the small containers among the items."""
    inner_containers: list[Any] = field(default_factory=list)
    """The small containers, in the order of ``inner_keys``. A list of pairs would be 10,000 new
    tuples: so many make Python collect the young garbage, after which all young objects are old.
    """
    items_with_errors: int = 0
    """Number of the container's items that are errors or have some in them."""
    has_other_objects: bool = False
    """True if an inner container has more than errors, numbers and text."""

    def add_items(self, keys: Sequence[object], items: Sequence[Any]) -> None:
        """Add the errors among the items, and the small containers among them."""
        all_keys = chunks(keys, _ITEMS_AT_ONCE)
        all_items = chunks(items, _ITEMS_AT_ONCE)
        for keys_together, items_together in zip(all_keys, all_items, strict=True):
            batch = Batch(items_together)
            error_types = _error_types(batch)
            if not error_types and not _has_inner_errors(batch):
                continue  # without a step for each of many items
            for key, item in zip(keys_together, items_together, strict=True):
                type_id = id(type(item))
                if type_id in error_types:
                    self.errors.append(((key,), item))
                    self.items_with_errors += 1
                elif type_id in READ_TYPES and 0 < len(item) <= _MOST_INNER_ITEMS:
                    self.inner_keys.append(key)
                    self.inner_containers.append(item)

    def add_inner_errors(self, allowance: Allowance) -> None:
        """Add the errors in the small containers among the items.

        The collector tells in one call whether one of 40 containers has errors; only then is each
        of these read.
        """
        all_keys = chunks(self.inner_keys, _INNER_AT_ONCE)
        all_inner = chunks(self.inner_containers, _INNER_AT_ONCE)
        for keys, containers in zip(all_keys, all_inner, strict=True):
            if len(self.errors) >= _MOST_STORED or allowance.is_spent():
                break
            if not kinds_of(gc.get_referents(*containers), BaseException):
                continue
            for key, container in zip(keys, containers, strict=True):
                errors = _keyed_errors(container)
                if errors:
                    self._add_errors_of_inner(key, container, errors)

    def _add_errors_of_inner(
        self, key: object, container: Any, errors: list[tuple[object, BaseException]]
    ) -> None:
        """Add the errors of one inner container.

        Args:
            key: the key of the inner container.
            container: the inner container.
            errors: its errors, with their keys in it.
        """
        for inner_key, error in errors:
            self.errors.append(((key, inner_key), error))
        self.items_with_errors += 1
        if not _has_only_plain_objects(container, len(errors)):
            self.has_other_objects = True

    def is_all_of(self, container: Any) -> bool:
        """Return True if the container has nothing but errors, or errors with numbers and text in
        containers, as in ``[(step, error)]``: emptying it loses nothing. False for a single item,
        which is removed by its own key.
        """
        if self.has_other_objects or len(container) < 2:
            return False
        return self.items_with_errors == len(container)

    def can_be_removed_from(self, container: Any) -> bool:
        """Return True if the errors can be removed from the container one by one, as by
        ``runs["first"] = None``.
        """
        if not has_assignable_items(container):
            return False
        return all(key_code(path[0]) for path, _ in self.errors)


def _has_inner_errors(items: Batch[Any]) -> bool:
    """Return True if one of the small containers among some items has an error."""
    short_containers = _short_containers(items.of_types(READ_TYPES))
    return bool(_error_types(Batch(gc.get_referents(*short_containers))))


def _keyed_errors(container: Any) -> list[tuple[object, BaseException]]:
    """Return the errors in a small container, with their keys or positions in it."""
    items = items_of(container)
    error_types = kinds_of(items, BaseException)
    if not error_types:
        return []
    keys: Sequence[object] = range(len(items))
    if id(type(container)) in DICT_TYPES:
        keys = list(container)
    # Not strict, because another thread may have changed the container since.
    keyed_items = zip(keys, items, strict=False)
    return [(key, item) for key, item in keyed_items if id(type(item)) in error_types]


def _has_only_plain_objects(container: Any, errors: int) -> bool:
    """Return True if a container has only numbers and text, apart from a number of ``errors``."""
    items = items_of(container)
    return len(of_types(ATOMS, items)) + errors == len(items)


def items_of(container: Any) -> list[Any]:
    """Return the items of a container, or the values of a dict, up to a limit; none if another
    thread changes it now.
    """
    items = container.values() if id(type(container)) in DICT_TYPES else container
    try:
        return list(islice(items, _MOST_ITEMS))
    except RuntimeError:
        return []


# -- keys ---------------------------------------------------------------------------------------

_LONGEST_KEY = 80
"""Maximum number of letters of a key's source text."""
_LONGEST_TUPLE = 8
"""Maximum number of items of a tuple that is a key."""


def has_assignable_items(container: Any) -> bool:
    """Return True for a list, deque or dict: ``container[key] = None`` replaces an item of it."""
    return is_exactly(container, *_ASSIGNABLE)


def key_code(key: object) -> str:
    """Return the source text of a short key; empty for a long one, and for a user's object."""
    if type(key) is tuple and len(key) > _LONGEST_TUPLE:
        return ""
    code = literal(key)
    return code if len(code) <= _LONGEST_KEY else ""
