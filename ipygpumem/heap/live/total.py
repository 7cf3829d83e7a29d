"""Measures all live objects together: their own memory, and the memory that libraries keep behind
them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import compress, filterfalse
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Batch, by_identity, chunks
from ipygpumem.heap.kinds.arrays import flat_elements, library_type, object_arrays, owner_of
from ipygpumem.heap.kinds.libraries import MemoryPiece, PieceReader, library_of
from ipygpumem.heap.kinds.tensors import Reader
from ipygpumem.heap.knowledge.own_bytes import STORAGE_BYTES, OwnBytes, of_tensors
from ipygpumem.heap.knowledge.text_keys import referents_of, text_keys
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.introspect import HAS_REFERENCES, flags_of, is_instance


class Total(NamedTuple):
    """The memory of all live objects without tensors' and NumPy arrays' data."""

    objects_bytes: int = 0
    """Memory that the interpreter has allocated for them."""
    pieces: Sequence[tuple[str, MemoryPiece]] = ()
    """Memory that libraries have allocated for them, such as a frame's columns, each with its
    library and once.
    """


def total() -> Total:
    """Return the memory of all live objects.

    No user code runs: instances of a class with a ``__sizeof__`` of its own count by their base's
    fields.

    >>> total().objects_bytes > 1_000_000
    True
    """
    count = ObjectCount()
    with undisturbed():
        heap = Heap(count)
        heap.drop()
    return count.total()


_NOT_READ = {"torch", "ipygpumem"} | sys.stdlib_module_names - {"_io", "sqlite3"}
"""Libraries whose memory behind objects is counted elsewhere: as tensors, objects or mapped files.
"""


class ObjectCount:
    """Counts the memory of all live objects during a heap's pass over them.

    Attributes:
        is_complete: True once it has seen all objects.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._size = 0
        self._own_bytes = OwnBytes()
        self._tensor_type = library_type("torch", "Tensor")
        self._types: set[int] = set()
        """Identities of the types that have been sorted into the next three."""
        self._leading: set[int] = set()
        """Types whose objects may refer to other objects, and types of arrays."""
        self._tensors: set[int] = set()
        """Types of tensors, which have C++ objects."""
        self._readers: dict[int, PieceReader] = {}
        """Functions that read the memory behind objects, by the identity of the type."""
        self._shared: set[int] = set()
        """Identities of the counted untracked objects with several references."""
        self._held_once = _references_if_held_once()
        self._array_owners: set[int] = set()
        """Identities of the arrays of objects whose elements are counted."""
        self._read: dict[int, object] = {}
        """Objects behind which memory was read; kept alive, so that no identity is reused."""
        self._pieces: dict[object, tuple[str, MemoryPiece]] = {}

    def total(self) -> Total:
        """Return the memory of the objects that it has seen."""
        return Total(self._size, tuple(self._pieces.values()))

    def see(
        self, tracked: Batch[object], untracked: Sequence[object], in_dicts: int
    ) -> list[object]:
        """Count tracked objects, and the untracked objects behind them that were not counted yet;
        return the arrays among these. The arguments are those of ``HeapObserver.see``.
        """
        to_count = self._not_counted(untracked)
        self._count(tracked)
        self._count(Batch(self._keys_not_counted(tracked, in_dicts)))
        arrays = []
        while to_count:
            batch = Batch(to_count)
            self._count(batch)
            arrays_of_batch = batch.of_types(self._own_bytes.arrays)
            arrays += arrays_of_batch
            leading = batch.of_types(self._leading)
            to_count = self._not_counted(self._untracked_in_arrays(arrays_of_batch))
            for part in map(Batch, chunks(leading)):
                referents, in_dicts = referents_of(part)
                untracked = list(filterfalse(gc.is_tracked, referents))
                del referents  # another reference to each of them
                to_count += self._not_counted(untracked)
                to_count += self._keys_not_counted(part, in_dicts)
        return arrays

    def _untracked_in_arrays(self, arrays: Sequence[object]) -> list[object]:
        """Return the untracked elements of arrays of objects, such as the text in a data frame.

        Views of one array show the same elements, which are read once: a later call leaves them
        out.
        """
        elements = list[object]()
        if not arrays:
            return elements
        for array in object_arrays(arrays):
            owner = owner_of(array)
            if id(owner) not in self._array_owners:
                self._array_owners.add(id(owner))
                elements += filterfalse(gc.is_tracked, flat_elements(owner) or ())
        return elements

    def _keys_not_counted(self, objects: Batch[object], in_dicts: int) -> list[object]:
        """Return the text keys that were not counted yet, each once, of the dicts among objects.

        Args:
            objects: any objects.
            in_dicts: number of references that the plain dicts among them report.
        """
        dicts = objects.of_types(self._own_bytes.dicts)
        if dicts:
            return self._not_counted(text_keys(dicts, self._own_bytes.dicts, in_dicts))
        return []

    def _not_counted(self, untracked: Sequence[object]) -> list[object]:
        """Return the objects that were not counted yet, each once; a later call leaves them out.

        Objects with one reference are met once, so that they need not be remembered: there may be
        millions.
        """
        by_key = by_identity(untracked)
        for identity in self._shared.intersection(by_key):
            del by_key[identity]
        new = list(by_key.values())
        are_shared = map(self._held_once.__lt__, map(sys.getrefcount, new))
        self._shared.update(compress(by_key, are_shared))
        return new

    def _count(self, batch: Batch[object]) -> None:
        """Add the bytes of objects themselves, and the memory behind them."""
        if not batch.types <= self._types:
            self._learn(batch)
        self._size += self._own_bytes.requested(batch)
        tensors = batch.of_types(self._tensors)
        if tensors:
            self._count_objects_of_torch(tensors)
        self._count_behind(batch.of_types(self._readers.keys()))

    def _learn(self, batch: Batch[object]) -> None:
        """Sort the types that were not seen yet."""
        examples = batch.one_of_each(batch.types - self._types)
        self._own_bytes.learn(list(examples.values()))
        for type_id, example in examples.items():
            self._learn_type(type_id, example)

    def _learn_type(self, type_id: int, example: object) -> None:
        """Sort a type that ``_own_bytes`` has learned.

        Args:
            type_id: the identity of the type.
            example: an object of the type.
        """
        self._types.add(type_id)
        if self._tensor_type is not None and is_instance(example, self._tensor_type):
            self._tensors.add(type_id)
        may_refer = flags_of(type(example)) & HAS_REFERENCES
        if may_refer or type_id in self._own_bytes.arrays:
            self._leading.add(type_id)
        reader = self._own_bytes.readers.get(type_id)
        if reader is not None and library_of(type(example)) not in _NOT_READ:
            self._readers[type_id] = reader

    def _count_objects_of_torch(self, tensors: Sequence[Any]) -> None:
        """Add the bytes of torch's C++ objects."""
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            self._size += of_tensors(Reader(torch), tensors) + STORAGE_BYTES * len(tensors)

    def _count_behind(self, items: Iterable[object]) -> None:
        """Count the memory that libraries keep behind objects, each piece once."""
        waiting = list(items)
        while waiting:
            item = waiting.pop()
            if id(type(item)) not in self._types:
                self._learn(Batch([item]))
            reader = self._readers.get(id(type(item)))
            if reader is None or id(item) in self._read:
                continue
            self._read[id(item)] = item
            # A thread may change it, or the library's version may be unknown.
            with contextlib.suppress(Exception):
                parts = list(reader(item))
                waiting += parts
                library = library_of(type(item)) or "other libraries"
                for part in parts:
                    if type(part) is MemoryPiece:
                        self._pieces.setdefault(part.key, (library, part))


def _references_if_held_once() -> int:
    """Return the reference count of an object with one holder, while ``ObjectCount`` has it in a
    list of referents, in a dict by identity, and in a list of new objects.
    """
    holder = [object()]
    untracked = list(filterfalse(gc.is_tracked, gc.get_referents(holder)))
    here = by_identity(untracked)
    new = list(here.values())
    (references,) = map(sys.getrefcount, new)
    return references
