"""Sorts the types of objects by how a walk reads their objects: tensors, arrays, containers,
leaves.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ipygpumem.heap.bulk import container_base, kinds_of, one_of_each
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.knowledge.own_bytes import OwnBytes
from ipygpumem.heap.knowledge.slices import may_have_slices
from ipygpumem.introspect import ATOMS, HAS_REFERENCES, flags_of


class SortedTypes:
    """Sorts types by how their objects are read; types are known by their identities.

    Attributes:
        tensors: types of torch tensors.
        storages: types of the Python objects of torch's storages.
        arrays: types of NumPy arrays.
        segments: types of shared memory, which stays alive without its object.
        streams: types of ``BytesIO``.
        with_slices: types of Cython's objects that may have slices.
        leaves: types of objects that lead to nothing.
        uncounted_leaves: types of leaves for which a library keeps memory that nothing counts.
        containers: the built-in container from which a type derives, by the identity of the type.
        own_bytes: measures the bytes of objects.
    """

    def __init__(self) -> None:
        self.own_bytes = OwnBytes()
        self.tensors: set[int] = set()
        self.storages: set[int] = set()
        self.arrays: set[int] = set()
        self.segments: set[int] = set()
        self.streams: set[int] = set()
        self.with_slices: set[int] = set()
        self.leaves: set[int] = set(ATOMS)
        self.uncounted_leaves: set[int] = set()
        self.containers: dict[int, Any] = {}
        self._sorted: set[int] = set()
        """All types that have been sorted."""

    def learn(self, items: Sequence[object]) -> set[int]:
        """Sort the new types among those of objects; return the identities of all types of the
        objects.
        """
        type_ids = self.own_bytes.learn(items)
        if type_ids <= self._sorted:
            return type_ids
        self._sorted |= type_ids
        bases = (
            (self.tensors, library_type("torch", "Tensor")),
            (self.storages, library_type("torch", "UntypedStorage")),
            (self.arrays, library_type("numpy", "ndarray")),
            (self.segments, library_type("multiprocessing.shared_memory", "SharedMemory")),
            (self.streams, io.BytesIO),
        )
        for types, base in bases:
            if base is not None:
                types |= kinds_of(items, base)
        for type_id, example in one_of_each(items).items():
            if may_have_slices(type(example)):
                self.with_slices.add(type_id)
            base = container_base(type(example))
            if base is not None:
                self.containers[type_id] = base
            if self._is_leaf(type_id, example):
                self.leaves.add(type_id)
                if self.own_bytes.uncounted([example]):
                    self.uncounted_leaves.add(type_id)
        return type_ids

    def _is_leaf(self, type_id: int, example: object) -> bool:
        """Return True for a type whose objects lead to nothing."""
        if flags_of(type(example)) & HAS_REFERENCES:
            return False
        return type_id not in self.apart and type_id not in self.own_bytes.readers

    @property
    def apart(self) -> set[int]:
        """The types of objects whose memory may be in use without a reference that Python counts:
        tensors, arrays and shared memory.
        """
        return self.tensors | self.arrays | self.segments
