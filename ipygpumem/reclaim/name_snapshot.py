"""Detects whether objects of deleted or rebound names may be still alive: if none is, there can be
no garbage with them, and no search for it is needed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, count, repeat
from operator import eq, is_, ne
from typing import Any

from ipygpumem.heap.bulk import Kinds, differences
from ipygpumem.heap.kinds.arrays import holds_objects, library_type, read_array
from ipygpumem.heap.kinds.watching import watch
from ipygpumem.heap.live.garbage import weak
from ipygpumem.introspect import (
    HAS_REFERENCES,
    HEAP_TYPE,
    begins_with,
    flags_of,
    identities,
    is_exactly,
    is_instance,
)
from ipygpumem.scope.ownable import are_ownable

_GONE = object()
"""Stands for the object of a name that has been deleted."""


class NameSnapshot:
    """The objects of all names at one moment, to ask later whether one may be alive without its
    name.

    For example, ``model`` is in the snapshot, and ``del model`` follows: the model may be alive as
    part of a reference cycle. A dead object may have left other objects in cycles, too, but not a
    tensor, which refers to nothing.

    The snapshot keeps no object alive, and does not cover objects to which only other objects
    refer. There may be 100,000 names: only tensors, and objects that support weak references, cost
    a Python object each.
    """

    def __init__(self, namespace: dict[str, Any], names: tuple[str, ...] = ()) -> None:
        """Take a snapshot; ``names`` are those of the namespace, if the caller has a
        tuple of them.
        """
        values = tuple(namespace.values())
        while len(names) != len(values):  # again if a thread has added or deleted a name
            names = tuple(namespace)
            values = tuple(namespace.values())
        self._names = names
        self._identities = identities(values)
        """The identities of all objects, in the order of the names, as bytes."""
        self._tensors: dict[str, tuple[int, Callable[[], bool]]] = {}
        """The identity of each tensor, and a function that tells whether it is alive."""
        self._weak_references: dict[str, weakref.ref[Any]] = {}
        """Weak references to the objects of the user's names, by name, where they support some."""
        kinds = Kinds(values)
        self._leads_on = _may_lead_on(kinds)
        """For each name 1 if its object may refer to other objects, 0 for numbers and text."""
        array_kinds = _kinds_that_derive_from("numpy", "ndarray", kinds.examples)
        tensor_kinds = _kinds_that_derive_from("torch", "Tensor", kinds.examples)
        # NumPy does not resize an array that has weak references.
        weak_kinds = _kinds_with_weak_references(kinds.examples) - tensor_kinds - array_kinds
        for position in kinds.positions(array_kinds):  # most arrays have only numbers
            self._leads_on[position] = holds_objects(read_array("dtype", values[position]))
        self._watch_tensors(kinds.positions(tensor_kinds), values)
        for position in self._positions_of_users_names(kinds.positions(weak_kinds)):
            self._weak_references[self._names[position]] = weakref.ref(values[position])

    def _watch_tensors(self, positions: Iterable[int], values: Sequence[Any]) -> None:
        """Watch the user's tensors, of all tensors at some positions.

        A dead tensor leaves nothing behind, unlike other objects. So a tensor without its name only
        counts while it is alive itself.
        """
        for position in self._positions_of_users_names(positions):
            tensor = values[position]
            self._tensors[self._names[position]] = id(tensor), watch(tensor)
            self._leads_on[position] = False

    def some_may_live_on(self, namespace: dict[str, Any]) -> bool:
        """Return True if an object has lost its name, and it or an object that it referred to may
        be still alive.
        """
        if self._positions_of_users_names(self._changed_positions(namespace)):
            return True
        # A new object may have the identity of one that has died.
        if _any_dead(self._weak_references.values()):
            return True
        for name, (identity, is_alive) in self._tensors.items():
            if identity != id(namespace.get(name)) and is_alive():
                return True
        return False

    def identities_of_same(self, namespace: dict[str, Any]) -> set[int]:
        """Return the identities of the objects that still have their names."""
        identities_now = list(map(id, map(namespace.get, self._names, repeat(_GONE))))
        identities_before = memoryview(self._identities).cast("Q")
        return set(compress(identities_now, map(eq, identities_before, identities_now)))

    def _positions_of_users_names(self, positions: Iterable[int]) -> list[int]:
        """Return the positions, of some, whose names are the user's (not IPython's) and whose
        objects may refer to other objects.
        """
        leading_positions = [position for position in positions if self._leads_on[position]]
        names = list(map(self._names.__getitem__, leading_positions))
        return list(compress(leading_positions, are_ownable(names)))

    def _changed_positions(self, namespace: dict[str, Any]) -> Iterator[int]:
        """Yield the positions of the names that have another object now, or none."""
        names = tuple(namespace)
        # The same names in the same order, as after most cells: the identities of both moments are
        # compared as bytes, without a lookup of each name.
        if len(names) == len(self._names) and begins_with(names, self._names):
            values = tuple(namespace.values())
            if len(values) == len(names):  # a thread may have added a name since
                return differences(self._identities, values)
        identities_now = map(id, map(namespace.get, self._names, repeat(_GONE)))
        identities_before = memoryview(self._identities).cast("Q")
        return compress(count(), map(ne, identities_before, identities_now))


def _may_lead_on(kinds: Kinds) -> bytearray:
    """Return for each object 1 if the collector tracks it, because it may refer to other objects,
    else 0.

    Of 100,000 names, most have objects of the same few types, so that one answer is enough for
    many.
    """
    with_references = set[int]()
    always_tracked = set[int]()
    for type_id, example in kinds.examples.items():
        flags = flags_of(type(example))
        if flags & HAS_REFERENCES:
            with_references.add(type_id)
            # The collector tracks no tuple or dict of numbers and text, and no class written in C.
            if flags & HEAP_TYPE or is_exactly(example, list, set):
                always_tracked.add(type_id)
    answers = bytearray()
    for start, type_ids in kinds.parts():
        part = kinds.part(start)
        if type_ids <= always_tracked:
            answers += b"\1" * len(part)
        elif type_ids.isdisjoint(with_references):
            answers += bytes(len(part))
        else:
            answers += bytes(map(gc.is_tracked, part))
    return answers


def _any_dead(references: Iterable[weakref.ref[Any]]) -> bool:
    """Return True if one of the objects has died; in C, because there may be 100,000."""
    return any(map(is_, map(weakref.ref.__call__, references), repeat(None)))


def _kinds_that_derive_from(module: str, name: str, examples: Mapping[int, object]) -> set[int]:
    """Return the identities of the types that derive from a library's class, if it is loaded.

    Args:
        module: the library.
        name: the name of its class.
        examples: an object of each type, by the type's identity.
    """
    base = library_type(module, name)
    if base is None:
        return set()
    return {kind for kind, example in examples.items() if is_instance(example, base)}


def _kinds_with_weak_references(examples: Mapping[int, object]) -> set[int]:
    """Return the identities of the types whose objects support weak references."""
    return {kind for kind, example in examples.items() if weak(example) is not None}
