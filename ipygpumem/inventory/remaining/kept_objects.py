"""Finds the objects that an experiment keeps on purpose, with everything that their names lead to:
after ``%%experiment --keep model``, the model with its layers. The search for leaks need neither
measure these objects nor search for their holders.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from itertools import compress, filterfalse
from operator import not_
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import ONCE_IN_LIST, Batch, chunks, ids_of, of_types
from ipygpumem.heap.containers import UNTRACKED_TYPES
from ipygpumem.heap.knowledge.own_bytes import OwnBytes
from ipygpumem.inventory.remaining.new_objects import new_objects_behind


class KeptObjects(NamedTuple):
    """The objects to which kept names lead."""

    identities: set[int]
    """The tracked objects, and the untracked ones with several references."""
    size_bytes: int
    """At least their RAM without the data of arrays: most texts and numbers have one holder, and
    only these are counted.
    """


def kept_objects(kept: Sequence[object], new: set[int]) -> KeptObjects:
    """Return the new objects behind some kept ones: those to which new objects alone lead from
    there.

    Args:
        kept: the objects of the kept names.
        new: identities of the tracked objects made in the experiment.
    """
    own_bytes = OwnBytes()
    identities = set[int]()
    size = _add_untracked([kept], own_bytes, identities)
    for level in new_objects_behind(kept, new):
        for part in chunks(level):
            identities.update(ids_of(part))
            size += _requested_bytes(part, own_bytes) + _add_untracked(part, own_bytes, identities)
    return KeptObjects(identities, size)


def _add_untracked(objects: Sequence[object], own_bytes: OwnBytes, identities: set[int]) -> int:
    """Return the bytes of the untracked objects to which only ``objects`` lead. An untracked object
    with several references does not count: its identity is added to ``identities``.

    Args:
        objects: tracked objects, and untracked containers.
        own_bytes: measures objects.
        identities: gets identities.
    """
    size = 0
    waiting: Sequence[Any] = objects
    while waiting:
        untracked = list(filterfalse(gc.is_tracked, gc.get_referents(*waiting)))
        are_held_once = list(map(ONCE_IN_LIST.__ge__, map(sys.getrefcount, untracked)))
        identities.update(map(id, compress(untracked, map(not_, are_held_once))))
        waiting = list(compress(untracked, are_held_once))
        size += _requested_bytes(waiting, own_bytes)
        waiting = of_types(UNTRACKED_TYPES, waiting)
    return size


def _requested_bytes(objects: Sequence[object], own_bytes: OwnBytes) -> int:
    """Return the bytes that objects have requested from the allocator for themselves, without what
    they refer to.
    """
    own_bytes.learn(objects)
    return own_bytes.requested(Batch(objects))
