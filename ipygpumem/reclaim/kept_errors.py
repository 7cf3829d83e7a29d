"""Lists the memory that errors keep alive although no frame of the last error does, with the lines that free it.

An error keeps its ``args`` and attributes, such as ``raise TooLarge("out of memory", batch)``, as long as something
refers to it: ``sys.last_value``, or a variable. An earlier error that the user stored also keeps its frames. Only the
notebook's names and the containers that they refer to directly are searched, never the heap.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import slots
from ipygpumem.heap.bulk import CONTAINERS, chunks, kinds_of, of_types, types_of
from ipygpumem.heap.holders.frames import FORGET_LAST_ERROR
from ipygpumem.introspect import ATOMS, instance_dict, is_instance, target_of, type_name
from ipygpumem.reclaim import tracebacks
from ipygpumem.reclaim.listing import Place, of_places
from ipygpumem.records import KeptError
from ipygpumem.units import MIB

_MOST_ITEMS = 10_000
"""Maximum number of items of a container to look at."""
_MOST_INSIDE = 100
"""Maximum number of items of a container in it."""
_MOST_STORED, _MOST_ERRORS = 4000, 200
"""Maximum number of stored errors to look at, and of those that hold more than numbers and text to examine."""
_ALL = object()
"""Stands for the keys of a container in which every item is an error, or contains one."""
_LONGEST_KEY = 80
_NAMES_SHOWN = 3
_CONTAINERS = set(map(id, CONTAINERS))
_ARGUMENTS, _CLASS = {id(tuple), id(dict)}, {id(type)}
"""Types of an error's arguments and attributes, and of its class."""
_WITH_PLACES, _CLEARABLE = (list, deque, dict), (list, deque, dict, set)


class Holder(NamedTuple):
    """A reference to an error by which the user can reach it."""

    place: str
    """``error``, ``errors[0]``; empty for the last error, kept by IPython and ``sys``."""
    statement: str
    """The statement that removes the reference."""
    target: str = ""
    """The place as the target of an assignment, if that removes the reference."""


@dataclass
class _Group:
    """Errors that keep each other alive, and everything that refers to one of them from outside."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    """Errors and everything in their chains, by identity."""
    holders: list[Holder] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Return the places of the errors in words."""
        return ", ".join(holder.place for holder in self.holders if holder.place)

    @property
    def remedy(self) -> str:
        """Return the line that removes all references to the errors."""
        targets = [holder.target for holder in self.holders if holder.target]
        statements = [holder.statement for holder in self.holders if not holder.target]
        if targets:
            statements.append(f"{' = '.join(targets)} = None")
        statements = list(dict.fromkeys(statements))
        if len(statements) == 1:
            return statements[0]
        return "; ".join(map(_as_code, statements))


def _as_code(statement: str) -> str:
    """Return a statement that can follow another one in a line, as a magic cannot."""
    name, _, argument = statement.removeprefix("%").partition(" ")
    return f"get_ipython().run_line_magic({name!r}, {argument!r})" if statement.startswith("%") else statement


def find(
    last: Sequence[BaseException], named: Mapping[str, object], own: Mapping[str, object], allowance: Allowance
) -> tuple[KeptError, ...]:
    """Return the memory that only errors keep alive, the largest first.

    Args:
        last: the errors that ``sys`` keeps.
        named: the notebook's names and outputs (``Out[5]``) that may hold errors.
        own: all of the notebook's names: memory that they hold without an error is left out.
        allowance: the time and memory for it.
    """
    reachable = list(islice(_reachable(last, named, allowance), _MOST_ERRORS))
    groups = _grouped(reachable)
    places = list[Place]()
    errors = [error for group in groups for error in group.errors.values()]
    for number, group in enumerate(groups):
        for place in _places_in(group.errors.values()):
            places.append(place._replace(line=number))  # the group, by which the rows are summed up below
    found = of_places(places, own, errors, [], allowance)
    rows: dict[int, list[tuple[int, str]]] = {}
    for row in found.rows:
        rows.setdefault(row.line, []).append((row.size_bytes, row.name))
    kept = [
        KeptError(
            place=groups[number].place,
            size_bytes=sum(size for size, _ in sizes),
            names=tuple(name for _, name in sizes[:_NAMES_SHOWN]),
            remedy=groups[number].remedy,
            is_complete=found.cut is None and len(reachable) < _MOST_ERRORS,
        )
        for number, sizes in rows.items()
    ]
    return tuple(sorted(kept, key=lambda one: -one.size_bytes))


# -- the errors that can be reached -----------------------------------------------------------------------------------


def _reachable(
    last: Sequence[BaseException], named: Mapping[str, object], allowance: Allowance
) -> Iterator[tuple[BaseException, Holder]]:
    """Yield errors with the references to them: those in ``sys``, in variables, and in containers of variables."""
    for error in last:
        yield error, Holder("", FORGET_LAST_ERROR)
    for entries in chunks(_stored(named, allowance)):
        if not _hold_more([entry[0] for entry in entries]):
            continue
        for error, name, container, key in entries:
            if _hold_more([error]):
                yield error, _holder_of(name, container, key)


_Stored = tuple[BaseException, str, Any, object]
"""An error, the name that leads to it, and the container and the key if it is in one: no class, whose constructor is
a Python call for each error."""


def _holder_of(name: str, container: Any, key: object) -> Holder:
    """Return the reference to a stored error."""
    if container is None or name.startswith("Out["):
        return Holder(name, _deletion(name))
    base = type(container)
    if key is _ALL and any(base is kind for kind in _CLEARABLE):
        return Holder(name, f"{target_of(name)}.clear()")
    code = _key_code(key)
    if code and any(base is kind for kind in _WITH_PLACES):
        return Holder(f"{name}[{code}]", "", f"{target_of(name)}[{code}]")
    return Holder(name, _deletion(name))


def _deletion(name: str) -> str:
    """Return the statement that deletes a name or an output."""
    if name.startswith("Out["):
        return f"%xdel _{name[4:-1]}"
    return f"del {target_of(name)}"


def _stored(named: Mapping[str, object], allowance: Allowance) -> list[_Stored]:
    """Return the errors in variables and in their containers; of 100,000 names, few cost a Python call."""
    found = list[_Stored]()
    error_types = kinds_of(list(named.values()), BaseException)
    for name, value in named.items():
        type_id = id(type(value))
        if type_id in error_types and len(found) < _MOST_STORED:
            found.append((value, name, None, None))  # type: ignore[arg-type]  # its type says so
        elif type_id in _CONTAINERS and value:
            if allowance.is_spent():
                break
            found += _in_container(name, value)
    return found


def _in_container(name: str, container: Any) -> list[_Stored]:
    """Return the errors in a container, and in small containers in it, as in ``[(step, error)]``."""
    items = _items(container)
    error_types = kinds_of(items, BaseException)
    if types_of(items).isdisjoint(error_types | _CONTAINERS):
        return []
    keys = list(islice(container, _MOST_ITEMS)) if type(container) is dict else range(len(items))
    found = list[tuple[object, BaseException]]()
    inner = list[tuple[object, Any]]()
    for key, item in zip(keys, items, strict=False):
        type_id = id(type(item))
        if type_id in error_types:
            found.append((key, item))
        elif type_id in _CONTAINERS and 0 < len(item) <= _MOST_INSIDE:
            inner.append((key, item))
    for some in chunks(inner):
        if not kinds_of(gc.get_referents(*[item for _, item in some]), BaseException):
            continue
        for key, item in some:
            values = _items(item)
            found += [(key, error) for error in of_types(kinds_of(values, BaseException), values)]
    with_errors = {id(key) if type(container) is dict else key for key, _ in found}
    if len(with_errors) == len(container) > 1:
        return [(error, name, container, _ALL) for _, error in found[:_MOST_STORED]]
    return [(error, name, container, key) for key, error in found[:_MOST_STORED]]


def _items(container: Any) -> list[Any]:
    """Return the first items of a container, of a dict its values; none while a thread changes it."""
    try:
        return list(islice(container.values() if type(container) is dict else container, _MOST_ITEMS))
    except RuntimeError:
        return []


def _hold_more(errors: Sequence[BaseException]) -> bool:
    """Return True if one of some errors may lead to more than numbers and text."""
    referents = gc.get_referents(*errors)
    inside = gc.get_referents(*of_types(_ARGUMENTS, referents))
    types = (types_of(referents) - _ARGUMENTS) | types_of(inside)
    large = max(map(sys.getsizeof, of_types(ATOMS, [*referents, *inside])), default=0) >= MIB
    return large or not types <= ATOMS | _CLASS


def _key_code(key: object) -> str:
    """Return the source text of a plain key; empty for any other key."""
    if type(key) is int or (type(key) is str and len(key) <= _LONGEST_KEY):
        return repr(key)
    return ""


def _grouped(found: Iterable[tuple[BaseException, Holder]]) -> list[_Group]:
    """Return the errors in groups, so that the errors of different groups do not refer to each other."""
    groups = list[_Group]()
    for error, holder in found:
        merged = _Group({id(one): one for one in tracebacks.chain(error)}, [])
        separate = list[_Group]()
        for group in groups:
            if group.errors.keys().isdisjoint(merged.errors):
                separate.append(group)
            else:
                merged.errors |= group.errors
                merged.holders += group.holders
        if holder not in merged.holders:
            merged.holders.append(holder)
        groups = [*separate, merged]
    return groups


# -- what they hold ---------------------------------------------------------------------------------------------------


def _places_in(errors: Iterable[BaseException]) -> Iterator[Place]:
    """Yield the attributes of errors, and the locals of their frames; two errors may have the same names."""
    covered = set[int]()
    several = list(errors)
    for error in several:
        before = f"{type_name(error)}." if len(several) > 1 else ""
        for name, value in _attributes(error):
            yield Place(before + name, value, str(id(error)))
        if id(error) in covered:
            continue
        covered.update(map(id, tracebacks.chain(error)))
        for frame, _ in tracebacks.finished(error):
            for name, value in tracebacks.names_in(frame).items():
                yield Place(f"{name} of {frame.f_code.co_name}()", value, str(id(frame)))


def _attributes(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield what an error keeps besides its traceback and other errors, with names; runs no user code."""
    arguments = tracebacks.field(error, "args")
    attributes = instance_dict(error) or {}
    yield from ((f"args[{number}]", value) for number, value in enumerate(arguments))
    yield from ((name, value) for name, value in list(attributes.items()) if type(name) is str)
    in_slots = slots(error)
    yield from in_slots.items()
    listed = {id(arguments), id(attributes), id(type(error)), *map(id, in_slots.values())}
    for value in gc.get_referents(error):  # such as the text of a UnicodeError
        is_linked = is_instance(value, TracebackType) or is_instance(value, BaseException)
        if id(value) not in listed and not is_linked:
            yield "contents", value
