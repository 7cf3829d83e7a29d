"""Lists the memory that errors keep alive although no frame of the last error does, with the lines
that free it.

An error keeps its ``args`` and attributes, such as ``raise TooLarge("out of memory", batch)``, as
long as something refers to it: ``sys.last_value``, or a variable. An earlier error that the user
stored also keeps its frames. Only the notebook's names and the containers that they refer to
directly are searched, never the heap.
"""

from __future__ import annotations

import builtins
import gc
import math
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from types import FrameType, ModuleType, TracebackType
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
"""Maximum number of stored errors to look at, and of those that hold more than numbers and text to
examine.
"""
_LONGEST_KEY, _LONGEST_TUPLE = 80, 8
_NAMES_SHOWN = 3
_LONGEST_CYCLE = 2000
"""Maximum number of objects to follow from an error back to itself."""
_DICTS = (dict, OrderedDict, defaultdict)
_WITH_PLACES, _CLEARABLE = (list, deque, *_DICTS), (list, deque, *_DICTS, set)
_DICT_TYPES, _CLEARABLE_TYPES = set(map(id, _DICTS)), set(map(id, _CLEARABLE))
_CONTAINERS = set(map(id, CONTAINERS)) | _DICT_TYPES
_AT_ONCE = 40
"""Number of inner containers to read before another look at the allowance."""
_NAMES_AT_ONCE, _ITEMS_AT_ONCE = 2000, 1000
"""Number of names, and of items of a container, that are skipped together if none of them holds an
error.
"""
_ARGUMENTS, _CLASS = {id(tuple), id(dict)}, {id(type)}
"""Types of an error's arguments and attributes, and of its class."""
_NOT_FOLLOWED = {*ATOMS, *map(id, (type, ModuleType, FrameType))}
_COLLECT = "import gc; gc.collect()"


class Holder(NamedTuple):
    """A reference to an error by which the user can reach it."""

    place: str
    """``error``, ``errors[0]``; empty for the last error, kept by IPython and ``sys``."""
    statement: str
    """The statement that removes the reference."""
    target: str = ""
    """The place as the target of an assignment, if that removes the reference."""
    loses: str = ""
    """A container whose other items the statement removes, too."""

    @property
    def order(self) -> int:
        """Places before the containers' names; outputs last: ``%xdel`` deletes names that share the
        object.
        """
        if self.target:
            return 0
        return 2 if self.statement.startswith("%") else 1


@dataclass
class _Group:
    """Errors that keep each other alive, and everything that refers to one of them from outside."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    """Errors and everything in their chains, by identity."""
    holders: list[Holder] = field(default_factory=list)
    collects: bool = False
    """True if only the garbage collector frees them."""

    @property
    def place(self) -> str:
        """Return the places of the errors in words."""
        return ", ".join(dict.fromkeys(holder.place for holder in self.holders if holder.place))

    @property
    def loses(self) -> str:
        """Return the containers whose other items the line removes, too."""
        return ", ".join(dict.fromkeys(holder.loses for holder in self.holders if holder.loses))

    @property
    def remedy(self) -> str:
        """Return the line that removes all references to the errors."""
        holders = sorted(self.holders, key=lambda holder: holder.order)
        targets = list(dict.fromkeys(holder.target for holder in holders if holder.target))
        statements = [f"{' = '.join(targets)} = None"] if targets else []
        statements += [holder.statement for holder in holders if not holder.target]
        if self.collects:
            statements.append(_COLLECT)
        statements = list(dict.fromkeys(statements))
        if len(statements) == 1:
            return statements[0]
        return "; ".join(map(_as_code, statements))


def _as_code(statement: str) -> str:
    """Return a statement that can follow another one in a line, as a magic cannot."""
    name, _, argument = statement.removeprefix("%").partition(" ")
    return (
        f"get_ipython().run_line_magic({name!r}, {argument!r})"
        if statement.startswith("%")
        else statement
    )


def find(
    last: Sequence[BaseException],
    named: Mapping[str, object],
    own: Mapping[str, object],
    allowance: Allowance,
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
            # the group, by which the rows are summed up below
            places.append(place._replace(line=number))
    found = of_places(places, own, errors, [], allowance)
    rows: dict[int, list[tuple[int, str]]] = {}
    for row in found.rows:
        rows.setdefault(row.line, []).append((row.size_bytes, row.name))
    for number in rows:
        groups[number].collects = any(
            _keeps_itself(error, own) for error in groups[number].errors.values()
        )
    kept = [
        KeptError(
            place=groups[number].place,
            size_bytes=sum(size for size, _ in sizes),
            names=tuple(name for _, name in sizes[:_NAMES_SHOWN]),
            remedy=groups[number].remedy,
            is_complete=found.cut is None and len(reachable) < _MOST_ERRORS,
            loses=groups[number].loses,
        )
        for number, sizes in rows.items()
    ]
    return tuple(sorted(kept, key=lambda one: -one.size_bytes))


# -- the errors that can be reached -------------------------------------------------------------


def _reachable(
    last: Sequence[BaseException], named: Mapping[str, object], allowance: Allowance
) -> Iterator[tuple[BaseException, Holder]]:
    """Yield errors with the references to them: those in ``sys``, in variables, and in containers
    of variables.
    """
    for error in last:
        yield error, Holder("", FORGET_LAST_ERROR)
    for entries in chunks(_stored(named, allowance)):
        if not _hold_more([entry[0] for entry in entries]):
            continue
        for error, name, container, path in entries:
            if _hold_more([error]):
                yield error, _holder_of(name, container, path)


_Path = tuple[object, ...]
"""Keys that lead to an error in a container: one, or two for a container in it; none if all of it
has to go.
"""
_Stored = tuple[BaseException, str, Any, _Path]
"""An error, the name that leads to it, and the container and the path if it is in one: no class,
whose constructor is a Python call for each error.
"""


def _holder_of(name: str, container: Any, path: _Path) -> Holder:
    """Return the reference to a stored error."""
    if container is None:
        return Holder(name, _deletion(name))
    if not path:
        loses = name if _has_other_items(container) else ""
        if id(type(container)) in _CLEARABLE_TYPES:
            return Holder(name, f"{_code_of(name)}.clear()", loses=loses)
        return Holder(name, _deletion(name), loses=loses)
    steps, inner = "", container
    for key in path:
        code = _key_code(key)
        if not code or not any(type(inner) is kind for kind in _WITH_PLACES):
            loses = f"{name}{steps}" if _has_other_items(inner) else ""
            return Holder(f"{name}{steps}", "", f"{_code_of(name)}{steps}", loses)
        steps += f"[{code}]"
        inner = _item_at(inner, key)
    return Holder(f"{name}{steps}", "", f"{_code_of(name)}{steps}")


def _item_at(container: Any, key: object) -> Any:
    """Return an item of a list, deque or dict; a lookup in a dict may compare the user's keys with
    this one.
    """
    if id(type(container)) not in _DICT_TYPES:
        return container[key]
    return next((value for one, value in list(container.items()) if one is key), None)


def _code_of(name: str) -> str:
    """Return the code for a named object or an output."""
    return name if name.startswith("Out[") else target_of(name)


def _deletion(name: str) -> str:
    """Return the statement that deletes a name or an output."""
    if name.startswith("Out["):
        return f"%xdel _{name[4:-1]}"
    return f"del {target_of(name)}"


def _has_other_items(container: Any) -> bool:
    """Return True if a container also has items that are no errors, nor parts of
    ``sys.exc_info()``.
    """
    items = _items(container)
    some_kinds = kinds_of(items, BaseException, type, TracebackType)
    return len(of_types(some_kinds, items)) < len(items)


def _stored(named: Mapping[str, object], allowance: Allowance) -> list[_Stored]:
    """Return the errors in variables and in their containers; of 100,000 names, few cost a Python
    call.
    """
    found = list[_Stored]()
    cleared = set[int]()
    error_types = kinds_of(list(named.values()), BaseException)
    for names, values in _that_may_hold_errors(named, error_types):
        for name, value in zip(names, values, strict=True):
            type_id = id(type(value))
            if type_id in error_types and len(found) < _MOST_STORED:
                found.append((value, name, None, ()))
            elif type_id in _CONTAINERS and value and id(value) not in cleared:
                if allowance.is_spent():
                    return found
                some = _in_container(name, value, allowance)
                if type_id in _CLEARABLE_TYPES and some:
                    cleared.add(id(value))  # its other names need no statement of their own
                found += some
    return found


def _that_may_hold_errors(
    named: Mapping[str, object], error_types: set[int]
) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
    """Yield names and their objects, without most of those that hold no errors.

    So 100,000 names of short lists of numbers take no step each.
    """
    names, values = list(named), list(named.values())
    for some_names, some in zip(
        chunks(names, _NAMES_AT_ONCE), chunks(values, _NAMES_AT_ONCE), strict=True
    ):
        containers = of_types(_CONTAINERS, some)
        short = _short(containers)
        if types_of(some).isdisjoint(error_types) and len(short) == len(containers):
            inside = gc.get_referents(*short)
            if types_of(inside).isdisjoint(kinds_of(inside, BaseException) | _CONTAINERS):
                continue
        yield some_names, some


def _short(containers: Sequence[Any]) -> list[Any]:
    """Return the containers that are read if they are in another one."""
    return list(compress(containers, map(_MOST_INSIDE.__ge__, map(len, containers))))


def _in_container(name: str, container: Any, allowance: Allowance) -> list[_Stored]:
    """Return the errors in a container, and in small containers in it, as in
    ``[(step, error)]``.
    """
    items = _items(container)
    error_types = kinds_of(items, BaseException)
    if types_of(items).isdisjoint(error_types | _CONTAINERS):
        return []
    is_dict = id(type(container)) in _DICT_TYPES
    keys = list(islice(container, _MOST_ITEMS)) if is_dict else range(len(items))
    found = list[tuple[_Path, BaseException]]()
    # Two lists: ten thousand pairs would make Python collect the young garbage, which makes all
    # that is young old.
    inner_keys, inner = list[object](), list[Any]()
    for some_keys, some in zip(
        chunks(keys, _ITEMS_AT_ONCE), chunks(items, _ITEMS_AT_ONCE), strict=True
    ):
        short = _short(of_types(_CONTAINERS, some))
        if types_of(some).isdisjoint(error_types) and not kinds_of(
            gc.get_referents(*short), BaseException
        ):
            continue  # without a step for each of many items
        for key, item in zip(some_keys, some, strict=True):
            type_id = id(type(item))
            if type_id in error_types:
                found.append(((key,), item))
            elif type_id in _CONTAINERS and 0 < len(item) <= _MOST_INSIDE:
                inner_keys.append(key)
                inner.append(item)
    direct = len(found)
    containers, are_only_errors = _in_inner(inner_keys, inner, found, allowance)
    if direct + containers == len(container) > 1 and are_only_errors:
        return [(error, name, container, ()) for _, error in found[:_MOST_STORED]]
    if not any(type(container) is kind for kind in _WITH_PLACES) or not all(
        _key_code(path[0]) for path, _ in found
    ):
        return [(error, name, container, ()) for _, error in found[:_MOST_STORED]]
    return [(error, name, container, path) for path, error in found[:_MOST_STORED]]


def _in_inner(
    keys: Sequence[object],
    inner: Sequence[Any],
    found: list[tuple[_Path, BaseException]],
    allowance: Allowance,
) -> tuple[int, bool]:
    """Add the errors in the inner containers of a container, which have these ``keys``, to
    ``found``.

    Returns:
        The number of inner containers with errors, and True if these have only numbers and text
        besides.
    """
    containers, are_only_errors = 0, True
    for some_keys, some in zip(chunks(keys, _AT_ONCE), chunks(inner, _AT_ONCE), strict=True):
        if len(found) >= _MOST_STORED or allowance.is_spent():
            break
        if not kinds_of(gc.get_referents(*some), BaseException):
            continue
        for key, item in zip(some_keys, some, strict=True):
            errors = _errors_in(item)
            if not errors:
                continue
            found += [((key, inner_key), error) for inner_key, error in errors]
            containers += 1
            are_only_errors = are_only_errors and _is_plain_besides(item, len(errors))
    return containers, are_only_errors


def _errors_in(container: Any) -> list[tuple[object, BaseException]]:
    """Return the errors that a small container refers to, with their keys."""
    items = _items(container)
    error_types = kinds_of(items, BaseException)
    if not error_types:
        return []
    keys = list(container) if id(type(container)) in _DICT_TYPES else range(len(items))
    return [
        (key, item) for key, item in zip(keys, items, strict=False) if id(type(item)) in error_types
    ]


def _is_plain_besides(container: Any, errors: int) -> bool:
    """Return True if a container of some errors has only numbers and text besides them."""
    items = _items(container)
    return len(of_types(ATOMS, items)) + errors == len(items)


def _items(container: Any) -> list[Any]:
    """Return the first items of a container, of a dict its values; none while a
    thread changes it.
    """
    try:
        return list(
            islice(
                container.values() if id(type(container)) in _DICT_TYPES else container, _MOST_ITEMS
            )
        )
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
    kind = type(key)
    if key is None or kind is int or kind is bool or (kind is float and math.isfinite(key)):  # type: ignore[arg-type]
        return repr(key)
    if kind is str and len(key) <= _LONGEST_KEY:  # type: ignore[arg-type]
        return repr(key)
    if kind is tuple and 0 < len(key) <= _LONGEST_TUPLE:  # type: ignore[arg-type]
        codes = list(map(_key_code, key))  # type: ignore[call-overload]
        if all(codes):
            return f"({', '.join(codes)}{',' * (len(codes) == 1)})"
    return ""


def _grouped(found: Iterable[tuple[BaseException, Holder]]) -> list[_Group]:
    """Return the errors in groups, so that no two groups share an error or a statement."""
    groups = list[_Group]()
    for error, holder in found:
        merged = _Group({id(one): one for one in tracebacks.chain(error)}, [])
        separate = list[_Group]()
        for group in groups:
            if group.errors.keys().isdisjoint(merged.errors) and holder not in group.holders:
                separate.append(group)
            else:
                merged.errors |= group.errors
                merged.holders += group.holders
        if holder not in merged.holders:
            merged.holders.append(holder)
        groups = [*separate, merged]
    return groups


def _keeps_itself(error: BaseException, own: Mapping[str, object]) -> bool:
    """Return True if an error refers to itself, as in ``error.first = error``, or if that takes too
    long to find out.

    So does an error that a function has caught, kept in a local, and returned.
    """
    seen = {id(own), id(vars(builtins)), id(error)}
    waiting: list[object] = [error]
    while waiting:
        referents = gc.get_referents(*waiting)
        for link in waiting:
            if is_instance(link, TracebackType):
                referents += tracebacks.names_in(link.tb_frame).values()  # type: ignore[attr-defined]
        if any(item is error for item in referents):
            return True
        waiting = []
        for item in referents:
            if (
                id(type(item)) in _NOT_FOLLOWED
                or id(item) in seen
                or _is_namespace(item)
                or _is_long(item)
            ):
                continue
            seen.add(id(item))
            waiting.append(item)
            if len(seen) > _LONGEST_CYCLE:
                return True
    return False


def _is_long(value: Any) -> bool:
    """Return True for a container with so many items that a list of them would take long."""
    return id(type(value)) in _CONTAINERS and len(value) > _LONGEST_CYCLE


def _is_namespace(value: object) -> bool:
    """Return True for the globals of a module."""
    return type(value) is dict and "__builtins__" in value


# -- what they hold -----------------------------------------------------------------------------


def _places_in(errors: Iterable[BaseException]) -> Iterator[Place]:
    """Yield the attributes of errors, and the locals of their frames; two errors may have the same
    names.
    """
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
    """Yield the attributes of an error, other than its traceback and other errors; runs no user
    code.
    """
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
