"""Lists the memory that errors keep alive although no frame of the last error does, with the lines
that free it.

An error keeps its ``args`` and attributes, such as ``raise TooLarge("out of memory", batch)``, as
long as something refers to it: ``sys.last_value``, or a variable. An earlier error that the user
stored also keeps its frames.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from types import FrameType, ModuleType, TracebackType

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import chunks, of_types, types_of
from ipygpumem.heap.knowledge.frames import FORGET_LAST_ERROR
from ipygpumem.introspect import ATOMS, instance_dict, is_instance, type_name
from ipygpumem.reclaim import exceptions
from ipygpumem.reclaim.error_references import ErrorReference, line_that_removes, reference_to
from ipygpumem.reclaim.frames import finished_frames, names_in
from ipygpumem.reclaim.listing import HeldObject, memory_behind
from ipygpumem.reclaim.stored_errors import READ_TYPES, stored_errors
from ipygpumem.records import KeptError, RetainedArray
from ipygpumem.units import MIB

_MOST_ERRORS = 200
"""Maximum number of errors that hold more than numbers and text to examine."""
_NAMES_SHOWN = 3
"""Maximum number of names of rows to show for an error."""


def find(
    last: Sequence[BaseException],
    named: Mapping[str, object],
    notebook: Mapping[str, object],
    allowance: Allowance,
) -> tuple[KeptError, ...]:
    """Return the memory that only errors keep alive, the largest first.

    Errors that keep each other alive are one group with one row, because only the removal of all
    references to them frees their memory.

    Args:
        last: the errors that ``sys`` keeps.
        named: the notebook's names and outputs (``Out[5]``) that may hold errors.
        notebook: all of its names: memory that they hold without an error is left out.
        allowance: the time and memory for it.
    """
    reachable = list(islice(_reachable(last, named, allowance), _MOST_ERRORS))
    groups = _grouped(reachable)
    held_objects = list[HeldObject]()
    errors = list[BaseException]()
    for number, group in enumerate(groups):
        errors += group.errors.values()
        for held in _objects_of_errors(list(group.errors.values())):
            # The number of the group instead of a line, which an attribute does not have: so each
            # row names its group below.
            held_objects.append(held._replace(line=number))
    memory = memory_behind(held_objects, notebook, errors, [], allowance)
    rows_by_group: dict[int, list[RetainedArray]] = {}
    for row in memory.rows:
        rows_by_group.setdefault(row.line, []).append(row)
    is_complete = memory.cut is None and len(reachable) < _MOST_ERRORS
    kept_errors = list[KeptError]()
    for number, rows in rows_by_group.items():
        kept_errors.append(_kept_error(groups[number], rows, notebook, is_complete=is_complete))
    kept_errors.sort(key=attrgetter("size_bytes"), reverse=True)
    return tuple(kept_errors)


def _kept_error(
    group: _ErrorGroup,
    rows: Sequence[RetainedArray],
    notebook: Mapping[str, object],
    *,
    is_complete: bool,
) -> KeptError:
    """Return the record of a group of errors.

    Args:
        group: the group.
        rows: the memory that it holds.
        notebook: the notebook's names.
        is_complete: False if not all memory of the errors was listed.
    """
    collects = any(_keeps_itself(error, notebook) for error in group.errors.values())
    places = [reference.place for reference in group.references]
    losses = [reference.loses for reference in group.references]
    names = [row.name for row in rows[:_NAMES_SHOWN]]
    return KeptError(
        place=_joined_once(places),
        size_bytes=sum(row.size_bytes for row in rows),
        names=tuple(names),
        remedy=line_that_removes(group.references, collects=collects),
        is_complete=is_complete,
        loses=_joined_once(losses),
    )


def _joined_once(texts: Iterable[str]) -> str:
    """Return the texts that are not empty, in order, each once, separated by commas."""
    unique = dict.fromkeys(text for text in texts if text)
    return ", ".join(unique)


# -- the errors that can be reached -------------------------------------------------------------

_CONTAINER_TYPES = {id(tuple), id(dict)}
"""Identities of the types of an error's arguments and attributes."""
_CLASS = {id(type)}


def _reachable(
    last: Sequence[BaseException], named: Mapping[str, object], allowance: Allowance
) -> Iterator[tuple[BaseException, ErrorReference]]:
    """Yield errors with the references to them: those in ``sys``, in variables, and in containers
    of variables.
    """
    for error in last:
        yield error, ErrorReference(place="", statement=FORGET_LAST_ERROR)
    for entries in chunks(stored_errors(named, allowance)):
        # One question for many errors first: most hold only a text.
        if not _may_hold_memory([error for error, *_ in entries]):
            continue
        for error, name, container, path in entries:
            if _may_hold_memory([error]):
                yield error, reference_to(name, container, path)


def _may_hold_memory(errors: Sequence[BaseException]) -> bool:
    """Return True if one of some errors may lead to more than numbers and text, or to a MiB of
    these, by its arguments, its attributes, or its traceback.
    """
    referents = gc.get_referents(*errors)
    contents = gc.get_referents(*of_types(_CONTAINER_TYPES, referents))
    types = (types_of(referents) - _CONTAINER_TYPES) | types_of(contents)
    if not types <= ATOMS | _CLASS:  # such as a traceback, or a list among the arguments
        return True
    numbers_and_texts = of_types(ATOMS, [*referents, *contents])
    return max(map(sys.getsizeof, numbers_and_texts), default=0) >= MIB


# -- groups of errors ---------------------------------------------------------------------------


@dataclass
class _ErrorGroup:
    """Errors that keep each other alive, and everything that refers to one of them from outside."""

    errors: dict[int, BaseException] = field(default_factory=dict)
    """Errors and all errors in their chains, by identity."""
    references: list[ErrorReference] = field(default_factory=list)
    """The references that the user has to remove."""


def _grouped(reachable: Iterable[tuple[BaseException, ErrorReference]]) -> list[_ErrorGroup]:
    """Return the errors in groups, so that no two groups share an error or a reference.

    For ``first = error; second = error.__cause__`` there is one group: the first error keeps the
    second alive. ``reachable`` are errors with the references to them.
    """
    groups = list[_ErrorGroup]()
    for error, reference in reachable:
        merged = _ErrorGroup({id(linked): linked for linked in exceptions.chain(error)})
        separate = list[_ErrorGroup]()
        for group in groups:
            if group.errors.keys().isdisjoint(merged.errors) and reference not in group.references:
                separate.append(group)
            else:
                merged.errors |= group.errors
                merged.references += group.references
        if reference not in merged.references:
            merged.references.append(reference)
        groups = [*separate, merged]
    return groups


_LONGEST_CYCLE = 2000
"""Maximum number of objects to follow from an error back to itself."""
_NOT_FOLLOWED = {*ATOMS, *map(id, (type, ModuleType, FrameType))}


def _keeps_itself(error: BaseException, notebook: Mapping[str, object]) -> bool:
    """Return True if a path leads from an error back to itself, or if the search takes too long.

    The path may be an attribute, as in ``error.first = error``, or the frame of a function that has
    caught the error, kept it in a local, and returned it.
    """
    reached_ids = {id(notebook), id(vars(builtins)), id(error)}
    newly_reached: list[object] = [error]
    while newly_reached:
        referents = _referents_of(newly_reached)
        if any(item is error for item in referents):
            return True
        newly_reached = []
        for item in referents:
            if id(item) in reached_ids or not _may_lead_to_error(item):
                continue
            reached_ids.add(id(item))
            newly_reached.append(item)
            if len(reached_ids) > _LONGEST_CYCLE:
                return True
    return False


def _referents_of(items: list[object]) -> list[object]:
    """Return the objects that some objects refer to, and the locals of tracebacks' functions, to
    which the collector reports no reference.
    """
    referents = gc.get_referents(*items)
    for item in items:
        if is_instance(item, TracebackType):
            referents += names_in(item.tb_frame).values()  # type: ignore[attr-defined]
    return referents


def _may_lead_to_error(item: object) -> bool:
    """Return True if an object is to be followed: not if it cannot lead to an error, leads to
    everything, or has so many items that a list of them would take long.
    """
    if id(type(item)) in _NOT_FOLLOWED:
        return False
    if type(item) is dict and "__builtins__" in item:  # the globals of a module
        return False
    return id(type(item)) not in READ_TYPES or len(item) <= _LONGEST_CYCLE  # type: ignore[arg-type]


# -- the memory behind errors -------------------------------------------------------------------


def _objects_of_errors(errors: Sequence[BaseException]) -> Iterator[HeldObject]:
    """Yield the attributes of errors, and the locals of their frames.

    Two errors may have the same names, so the identity of the error or frame stands for the
    function, which distinguishes the objects of one name.
    """
    ids_with_frames_listed = set[int]()
    for error in errors:
        prefix = f"{type_name(error)}." if len(errors) > 1 else ""
        for name, value in _attributes_of_error(error):
            if id(type(value)) not in ATOMS or sys.getsizeof(value) >= MIB:
                yield HeldObject(prefix + name, value, str(id(error)))
        if id(error) in ids_with_frames_listed:
            continue
        # The frames of an error include those of all errors in its chain.
        ids_with_frames_listed.update(map(id, exceptions.chain(error)))
        for frame, _ in finished_frames(error):
            for name, value in names_in(frame).items():
                label = f"{name} of {frame.f_code.co_name}()"
                yield HeldObject(label, value, str(id(frame)))


def _attributes_of_error(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an error, other than its traceback and other errors; runs no user
    code.
    """
    arguments = exceptions.field(error, "args")
    for number, value in enumerate(arguments):
        yield f"args[{number}]", value
    attributes = instance_dict(error)
    if attributes is None:
        attributes = {}
    for name, value in list(attributes.items()):
        if type(name) is str:
            yield name, value
    in_slots = slots(error)
    yield from in_slots.items()
    listed_ids = {id(arguments), id(attributes), id(type(error)), *map(id, in_slots.values())}
    for value in gc.get_referents(error):  # such as the text of a UnicodeError
        if id(value) in listed_ids:
            continue
        if is_instance(value, TracebackType) or is_instance(value, BaseException):
            continue
        yield "contents", value
