"""Lists the memory that errors keep alive although no frame of the last error does, with the lines that free it.

An error keeps its ``args`` and attributes, such as ``raise TooLarge("out of memory", batch)``, as long as something
refers to it: ``sys.last_value``, or a variable. An earlier error that the user stored also keeps its frames. Only the
notebook's names and the containers that they refer to directly are searched, never the heap.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import slots
from ipygpumem.heap.bulk import types_of
from ipygpumem.heap.holders.frames import FORGET_LAST_ERROR
from ipygpumem.introspect import ATOMS, instance_dict, is_instance, target_of, type_name
from ipygpumem.reclaim import tracebacks
from ipygpumem.reclaim.listing import Place, of_places
from ipygpumem.records import KeptError

_MOST_ITEMS = 10_000
"""Maximum number of items of a container to look at."""
_MOST_INSIDE = 100
"""Maximum number of items of a container in it."""
_MOST_ERRORS = 1000
_LONGEST_KEY = 80
_NAMES_SHOWN = 3
_CONTAINERS: tuple[Any, ...] = (list, deque, dict, set, tuple, frozenset)
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
    """By identity."""
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
    groups = _grouped(_reachable(last, named, allowance))
    places = list[Place]()
    errors = [error for group in groups for error in group.errors.values()]
    for number, group in enumerate(groups):
        for place in _places_in(group.errors.values()):
            places.append(place._replace(line=number))
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
            is_complete=found.cut is None,
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
    for name, value in named.items():
        if allowance.is_spent():
            return
        if is_instance(value, BaseException):
            yield value, Holder(name, _deletion(name))  # type: ignore[misc]  # is_instance says so
            continue
        base = next((base for base in _CONTAINERS if type(value) is base), None)
        if base is not None:
            yield from _in_container(name, value, base)


def _deletion(name: str) -> str:
    """Return the statement that deletes a name or an output."""
    if name.startswith("Out["):
        return f"%xdel _{name[4:-1]}"
    return f"del {target_of(name)}"


def _in_container(name: str, container: Any, base: Any) -> Iterator[tuple[BaseException, Holder]]:
    """Yield the errors in a container, or in small containers in it, each with the reference that leads to it."""
    try:
        items = list(islice(container.values() if base is dict else container, _MOST_ITEMS))
        keys = list(islice(container, _MOST_ITEMS)) if base is dict else range(len(items))
    except RuntimeError:  # a thread changes it
        return
    if types_of(items) <= ATOMS:
        return
    errors_by_key = [(key, errors) for key, item in zip(keys, items, strict=False) if (errors := _errors_in(item))]
    may_assign = not name.startswith("Out[") and any(base is kind for kind in _WITH_PLACES)
    is_clearable = not name.startswith("Out[") and any(base is kind for kind in _CLEARABLE)
    if is_clearable and len(errors_by_key) == len(container) > 1:
        holder = Holder(name, f"{target_of(name)}.clear()")
        yield from ((error, holder) for _, errors in errors_by_key for error in errors)
        return
    for key, errors in errors_by_key:
        holder = Holder(name, _deletion(name))
        code = _key_code(key)
        if may_assign and code:
            holder = Holder(f"{name}[{code}]", "", f"{target_of(name)}[{code}]")
        yield from ((error, holder) for error in errors)


def _errors_in(item: Any) -> list[BaseException]:
    """Return the errors that an item of a container is or contains, as in ``(step, error)``."""
    if is_instance(item, BaseException):
        return [item]
    base = next((base for base in _CONTAINERS if type(item) is base), None)
    if base is None or len(item) > _MOST_INSIDE:
        return []
    values = list(item.values()) if base is dict else list(item)
    return [value for value in values if is_instance(value, BaseException)]


def _key_code(key: object) -> str:
    """Return the source text of a plain key; empty for any other key."""
    if type(key) is int or (type(key) is str and len(key) <= _LONGEST_KEY):
        return repr(key)
    return ""


def _grouped(found: Iterable[tuple[BaseException, Holder]]) -> list[_Group]:
    """Return the errors in groups, so that the errors of different groups do not refer to each other."""
    groups = list[_Group]()
    for error, holder in islice(found, _MOST_ERRORS):
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
