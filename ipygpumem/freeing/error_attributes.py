"""Removes tensors and arrays from exceptions: from their arguments, attributes and slots.

Python puts objects there (``AttributeError.obj``), and so do users, who may come back for them. Hence they are taken
off only where nothing of the user's refers to the exceptions any more, and what was taken is reported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FrameType

from ipygpumem.freeing.tracebacks import (
    chain,
    field,
    frame_of,
    frames,
    is_frozen,
    is_shells,
    members,
    running_here,
)
from ipygpumem.introspect import is_atom, type_name
from ipygpumem.model import Held
from ipygpumem.objects import interrupts
from ipygpumem.objects.arrays import slot_descriptors, slots
from ipygpumem.objects.holders.frames import running_locals
from ipygpumem.objects.walk import ArraySearch


def remove(
    error: BaseException, *, roots: Iterable[object], through: Iterable[object], least_bytes: int
) -> tuple[Held, ...]:
    """Remove what holds ``least_bytes`` from ``error`` and its chain, unless they are the user's; return what it was.

    ``roots`` may refer to exceptions without making them the user's; ``through`` do so if only ``roots`` refer to them.
    """
    errors = list(chain(error))
    if not any(True for item in errors for _ in _carried(item, least_bytes)):
        return ()
    if running_here() & {id(frame) for frame, _ in frames(error)}:
        return ()  # on its way to somebody who may catch it
    with interrupts.kept():
        gc.collect()  # what is garbage refers to nothing
    if _are_users(errors, list(roots), list(through)):
        return ()
    # Groups come after their members, which then carry nothing that a group would have to let go of.
    return tuple(held for item in reversed(errors) for held in _taken_off(item, least_bytes))


def _are_users(errors: list[BaseException], roots: list[object], through: list[object]) -> bool:
    """Whether anything but ``roots`` refers to the exceptions, directly or through lists, tuples and ``through``."""
    if is_frozen():
        return True
    parts = [part for error in errors for part in (field(error, "args"), field(error, "__dict__"), members(error))]
    known = {id(item) for item in (*errors, *roots, *parts, errors, roots, through, parts)}
    passing = {id(item) for item in through}
    levels: list[tuple[object, ...]] = [tuple(errors)]
    while levels[-1]:
        known.add(id(levels[-1]))
        level = []
        for item in gc.get_referrers(*levels[-1]):
            frame = item if type(item) is FrameType else frame_of(item)
            if id(item) in known or (frame is not None and is_shells(frame)):
                continue
            if type(item) is not list and type(item) is not tuple and id(item) not in passing:
                return True
            known.add(id(item))
            level.append(item)
        levels.append(tuple(level))
        del level
    reached = {id(item) for level in levels for item in level}
    return any(id(value) in reached for value in running_locals())


def _carried(error: BaseException, least_bytes: int) -> Iterator[tuple[str, Held]]:
    """Yield the attributes of ``error`` that hold ``least_bytes`` or more, with what they hold."""
    attributes = {name: value for name, value in list(field(error, "__dict__").items()) if type(name) is str}
    places = {**attributes, **slots(error), "args": field(error, "args")}
    for name, value in places.items():
        held = _held(f"{type_name(error)}.{name}", value, least_bytes)
        if held is not None:
            yield name, held


def _taken_off(error: BaseException, least_bytes: int) -> Iterator[Held]:
    attributes = field(error, "__dict__")
    for name, held in list(_carried(error, least_bytes)):
        if name == "args":
            args = [(part, _held("", part, least_bytes)) for part in field(error, "args")]
            kept = tuple(part if held is None else f"<{held.type_name}, released>" for part, held in args)
            BaseException.__dict__["args"].__set__(error, kept)
        elif name in attributes:
            del attributes[name]
        else:
            try:
                slot_descriptors(type(error))[name].__set__(error, None)
            except (AttributeError, TypeError):  # read-only
                continue
        yield held


def _held(name: str, value: object, least_bytes: int) -> Held | None:
    found = None if is_atom(value) else ArraySearch().held(name, value)
    return found[0] if found is not None and found[0].size_bytes >= least_bytes else None
