"""Measures all live objects together: their own memory, and the memory that libraries keep behind
them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, filterfalse
from operator import not_
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import Reader, library_type
from ipygpumem.heap.bulk import by_identity, chunks, of_types, one_of_each, types_of
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.knowledge.own_bytes import STORAGE_BYTES, OwnBytes, of_tensors
from ipygpumem.heap.knowledge.references import text_keys
from ipygpumem.heap.libraries import Behind, Piece, library_of
from ipygpumem.introspect import HAS_REFERENCES, is_instance


class Total(NamedTuple):
    """The memory of all live objects without tensors' and NumPy arrays' data."""

    objects_bytes: int = 0
    """Memory that the interpreter has allocated for them."""
    pieces: Sequence[tuple[str, Piece]] = ()
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
        self._types: set[int] = set()
        """Identities of the types that have been sorted into the next three."""
        self._leading: set[int] = set()
        """Types whose objects may refer to other objects, and types of arrays."""
        self._tensors: set[int] = set()
        """Types of tensors, which have C++ objects."""
        self._readers: dict[int, Behind] = {}
        """Functions that read the memory behind objects, by the identity of the type."""
        self._once = _references_if_held_once()
        self._shared: set[int] = set()
        """Identities of the counted untracked objects with several references. Objects with one are
        met once.
        """
        self._read: dict[int, object] = {}
        """Objects behind which memory was read; kept alive, so that no identity is reused."""
        self._pieces: dict[object, tuple[str, Piece]] = {}

    def total(self) -> Total:
        """Return the memory of the objects that it has seen."""
        return Total(self._size, tuple(self._pieces.values()))

    def see(
        self, tracked: Sequence[object], untracked: list[object], examples: Mapping[int, object]
    ) -> Sequence[object]:
        """Count tracked objects, and the untracked ones to which they refer; return the new ones
        that lead to more.
        """
        new = self._new(untracked)
        type_ids = self._add(tracked, examples)
        new_keys = self._new_keys(tracked, type_ids)
        found = leading = self._add_untracked(new)
        self._add_untracked(new_keys)
        while leading:
            new = []
            for part in chunks(leading):
                new += self._new(list(filterfalse(gc.is_tracked, gc.get_referents(*part))))
                new += self._new_keys(part, types_of(part))
            leading = self._add_untracked(new)
        return found

    def _add_untracked(self, items: Sequence[object]) -> Sequence[object]:
        """Add the bytes of untracked objects; return those that lead to more."""
        type_ids = self._add(items, one_of_each(items))
        return [] if self._leading.isdisjoint(type_ids) else of_types(self._leading, items)

    def _new_keys(self, objects: Sequence[object], type_ids: set[int]) -> list[object]:
        """Return the text keys of dicts that were not counted yet, each once."""
        dicts = self._own_bytes.dicts & type_ids
        if not dicts:
            return []
        # Dicts of instances share their keys, to which one reference may be left.
        keys = list(by_identity(text_keys(objects, dicts)).values())
        return self._new(keys)

    def _new(self, untracked: Sequence[object]) -> list[object]:
        """Return the objects that were not counted yet, each once."""
        references = map(sys.getrefcount, untracked)
        are_shared = list(map(self._once.__lt__, references))
        shared = by_identity(list(compress(untracked, are_shared)))
        new_keys = shared.keys() - self._shared
        self._shared |= new_keys
        return [*compress(untracked, map(not_, are_shared)), *map(shared.__getitem__, new_keys)]

    def _add(self, items: Sequence[object], examples: Mapping[int, object]) -> set[int]:
        """Add the bytes of objects themselves, and the memory behind them; return the identities of
        their types.
        """
        type_ids = set(examples)
        for type_id in type_ids - self._types:
            self._learn(type_id, examples[type_id])
        self._size += self._own_bytes.requested(items, type_ids)
        if not self._tensors.isdisjoint(type_ids):
            self._add_tensors(of_types(self._tensors, items))
        if not self._readers.keys().isdisjoint(type_ids):
            self._look_behind(of_types(self._readers, items))
        return type_ids

    def _learn(self, type_id: int, example: object) -> None:
        """Sort the type of an object."""
        self._types.add(type_id)
        self._own_bytes.learn([example])
        tensor = library_type("torch", "Tensor")
        if tensor is not None and is_instance(example, tensor):
            self._tensors.add(type_id)
        may_refer = type.__dict__["__flags__"].__get__(type(example)) & HAS_REFERENCES
        if may_refer or type_id in self._own_bytes.arrays:
            self._leading.add(type_id)
        reader = self._own_bytes.readers.get(type_id)
        if reader is not None and library_of(type(example)) not in _NOT_READ:
            self._readers[type_id] = reader

    def _add_tensors(self, tensors: Sequence[Any]) -> None:
        """Add the bytes of torch's C++ objects."""
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            self._size += of_tensors(Reader(torch), tensors) + STORAGE_BYTES * len(tensors)

    def _look_behind(self, items: Iterable[object]) -> None:
        """Read the memory that libraries keep behind objects."""
        waiting = list(items)
        while waiting:
            item = waiting.pop()
            self._learn(id(type(item)), item)
            reader = self._readers.get(id(type(item)))
            if reader is None or id(item) in self._read:
                continue
            self._read[id(item)] = item
            with contextlib.suppress(
                Exception
            ):  # a thread changes it, or an unknown version of a library
                found = list(reader(item))
                waiting += found
                library = library_of(type(item)) or "other libraries"
                for piece in found:
                    if type(piece) is Piece:
                        self._pieces.setdefault(piece.key, (library, piece))


def _references_if_held_once() -> int:
    """Return the reference count of an object with one holder, as it is seen in a list of
    referents.
    """
    holder = [object()]
    found = list(filterfalse(gc.is_tracked, gc.get_referents(holder)))
    (references,) = map(sys.getrefcount, found)
    return references
