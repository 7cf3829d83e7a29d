"""Tells whether a full collection is needed to free the objects that a traceback held, without looking at the heap.

Most of these objects die when the traceback's frames are cleared. Objects that refer to each other in a cycle, such as
a trainer and its callbacks, wait for the garbage collector. If they are young, as after a short cell, it finds them in
milliseconds. If they became old while the cell ran, only a full collection frees them, which takes time in proportion
to the whole heap. So the objects behind the frames are listed before the frames are cleared. Afterwards the references
inside the list are counted, as the collector counts them: an object with more references is still in use, and so is
everything behind it. The rest is dead. The dead objects die with the list, unless they are in or behind a cycle.

Not seen are cycles that lead through a module, a class of a module, a running frame, or a container of more than 10,000
items, and old cycles that only a finaliser of a dead object frees. Their objects stay until Python itself runs a full
collection.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from types import FrameType, ModuleType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import NOT_ENTERED, library_type
from ipygpumem.heap.bulk import by_identity, chunks, container_base, kinds_of, of_types, one_of_each
from ipygpumem.heap.garbage import young_objects
from ipygpumem.introspect import is_instance
from ipygpumem.reclaim import tracebacks

_MOST = 100_000
"""Maximum number of objects to list."""
_FEW = 1000
"""Maximum number of objects to follow even if the notebook's names keep them."""
_LONG = 10_000
"""Minimum length of a container that is not entered: its items are data, which hardly ever refers to the container."""


def behind_frames(error: BaseException, own: Mapping[str, object], allowance: Allowance) -> list[object] | None:
    """Return the tracked objects that the locals of an error's ended frames lead to; None if there are too many.

    The list keeps them alive. Of many objects, those in ``own``, the notebook's names, are left out.
    """
    barrier = {id(own)}
    found = dict[int, object]()
    level = list[object]()
    for frame, _ in tracebacks.finished(error):
        barrier |= {id(frame.f_globals), id(frame.f_builtins)}
        for value in tracebacks.names_in(frame).values():
            if not _is_locals_of(frame, value):
                level.append(value)
    while level:
        if len(level) > _FEW and len(barrier) < len(own):
            barrier.update(map(id, list(own.values())))  # there may be 100,000 names, so only if it saves a long walk
        new = _entered(level, found, barrier)
        found.update(new)
        if len(found) > _MOST or allowance.is_spent():
            return None
        level = list(chain.from_iterable(map(gc.get_referents, _short(list(new.values())))))
    return list(found.values())


def _is_locals_of(frame: FrameType, value: object) -> bool:
    """Return True for the dict of a frame's ``locals()``: with one more reference ``release`` would not empty it.

    If a local name refers to it, as in ``names = locals()``, it contains itself.
    """
    if type(value) is not dict or not any(item is value for item in list(value.values())):
        return False
    return value is frame.f_locals


def _entered(items: Sequence[object], found: Collection[int], barrier: Collection[int]) -> dict[int, object]:
    """Return the tracked objects among ``items`` that are not known yet and do not lead to everything."""
    tracked = by_identity(list(compress(items, map(gc.is_tracked, items))))
    new = {key: item for key, item in tracked.items() if key not in found and key not in barrier}
    left_out = _kinds_left_out(list(new.values()))
    return {key: item for key, item in new.items() if id(type(item)) not in left_out and not _is_left_out(item)}


def _kinds_left_out(items: Sequence[object]) -> set[int]:
    """Return the identities of the types whose objects lead to everything."""
    bases = [ModuleType, *NOT_ENTERED]
    bases.remove(FrameType)  # see ``_is_left_out``
    event_loop = library_type("asyncio", "AbstractEventLoop")
    if event_loop is not None:
        bases.append(event_loop)
    return kinds_of(items, *bases)


def _is_left_out(item: Any) -> bool:
    """Return True for a module's globals and classes, and for frames; a class made in a function is a cycle."""
    if type(item) is dict:
        return "__builtins__" in item
    if type(item) is FrameType:
        return not tracebacks.is_resumed(item)  # until 3.10, a generator refers to its frame
    return is_instance(item, type) and "<locals>" not in _qualified_name(item)


_qualified_name = type.__dict__["__qualname__"].__get__


def _short(items: Sequence[Any]) -> list[Any]:
    """Return the items without long containers."""
    long = set[int]()
    for key, one in one_of_each(items).items():
        base = container_base(type(one))
        if base is not None:
            containers = of_types({key}, items)
            long.update(map(id, compress(containers, map(_LONG.__lt__, map(base.__len__, containers)))))
    if not long:
        return list(items)
    return [item for item in items if id(item) not in long]


def any_old_cycle(objects: list[object]) -> bool:
    """Return True if some of the ``objects`` only wait for a full collection.

    Args:
        objects: from ``behind_frames``. Nothing else of ours may refer to them, because their references are counted.
    """
    if not objects:
        return False
    dead = _dead(objects)
    if not dead:
        return False
    in_cycles = _without_ends(dead)
    return not in_cycles.keys() <= set(map(id, young_objects()))


def _dead(objects: list[object]) -> dict[int, object]:
    """Return the objects to which only the list and its objects refer, and to which no object in use leads."""
    objects.append(object())  # only the list refers to it: how many references the list and the count itself make
    references = list(map(sys.getrefcount, objects))
    objects.pop()
    ours = references.pop()
    identities = list(map(id, objects))
    inside = Counter(_inner_references(objects, set(identities)))
    in_use = [item for item, count in zip(objects, references, strict=True) if count - ours > inside[id(item)]]
    dead = by_identity(objects)
    while in_use:
        for item in in_use:
            dead.pop(id(item), None)
        behind = by_identity(gc.get_referents(*in_use))
        in_use = [item for key, item in behind.items() if key in dead]
    return dead


def _inner_references(objects: Sequence[object], identities: Collection[int]) -> Iterable[int]:
    """Yield the identity of the referent of each reference from one of the ``objects`` to another."""
    for part in chunks(objects):
        yield from filter(identities.__contains__, map(id, gc.get_referents(*part)))


def _without_ends(dead: dict[int, object]) -> dict[int, object]:
    """Return the dead objects in or behind cycles: without those that die once nothing refers to them."""
    left = dict(dead)
    inside = Counter(_inner_references(list(left.values()), left.keys()))
    ending = [item for key, item in left.items() if not inside[key]]
    while ending:
        item = ending.pop()
        del left[id(item)]
        for child in gc.get_referents(item):
            if id(child) in left:
                inside[id(child)] -= 1
                if not inside[id(child)]:
                    ending.append(child)
    return left
