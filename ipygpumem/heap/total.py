"""Measures all live objects together: their own memory, and the memory that libraries keep behind them."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import and_, not_
from types import MethodDescriptorType
from typing import NamedTuple

from ipygpumem.heap.arrays import library_type
from ipygpumem.heap.bulk import by_identity, chunks, held_once, of_types, one_of_each, referents
from ipygpumem.heap.heap import undisturbed
from ipygpumem.heap.holders.frames import running_locals
from ipygpumem.heap.knowledge.own_bytes import STORAGE_BYTES, TENSOR_BYTES
from ipygpumem.heap.libraries import Behind, Piece, behind, library_of
from ipygpumem.introspect import class_dict


class Total(NamedTuple):
    """The memory of all live objects without tensors' and NumPy arrays' data."""

    objects_bytes: int = 0
    """Memory that the interpreter has allocated for them."""
    pieces: Sequence[tuple[str, Piece]] = ()
    """Memory that libraries have allocated for them, such as a frame's columns, each with its library and once."""


def total() -> Total:
    """Return the memory of all live objects.

    No user code runs: instances of a class with a ``__sizeof__`` of its own count by their base's fields.

    >>> total().objects_bytes > 1_000_000
    True
    """
    with undisturbed():
        return _Count().take()


class _Count:
    """One count in progress. It keeps types and pieces alive, because identities of dead ones may be used again."""

    def __init__(self) -> None:
        self._kinds: dict[int, type] = {}
        self._sized: set[int] = set()
        """Types whose size the interpreter knows."""
        self._dicts = set[int]()
        """Types that derive from ``dict``."""
        self._tensors = set[int]()
        """Types of tensors, which have C++ objects."""
        self._readers: dict[int, Behind] = {}
        self._read: dict[int, object] = {}
        self._pieces: dict[object, tuple[str, Piece]] = {}

    def take(self) -> Total:
        """Return the result."""
        waiting = list[Sequence[object]](chunks(gc.get_objects()))  # before all that grows below
        waiting.append([tuple(running_locals())])  # the collector does not list running frames
        size, shared, alone = 0, set[int](), held_once()
        while waiting:
            items = waiting.pop()
            for key, item in one_of_each(items).items():
                if key not in self._kinds:
                    self._note(key, type(item))
            known = of_types(self._sized, items)
            size += sum(map(sys.getsizeof, known))
            if len(known) < len(items):
                size += sum(map(object.__sizeof__, of_types(self._kinds.keys() - self._sized, items)))
            size += len(of_types(self._tensors, items)) * (TENSOR_BYTES + STORAGE_BYTES) if self._tensors else 0
            if self._readers:
                self._look_behind(of_types(self._readers, items))
            for below in chunks(referents(items, self._dicts)):
                # The collector has listed the tracked ones. Objects with one holder are met once.
                references = list(map(sys.getrefcount, below))
                untracked = list(map(not_, map(gc.is_tracked, below)))
                several = by_identity(list(compress(below, map(and_, untracked, map(alone.__lt__, references)))))
                fresh = several.keys() - shared
                shared |= fresh
                rest = compress(below, map(and_, untracked, map(alone.__ge__, references)))
                if found := [*rest, *map(several.__getitem__, fresh)]:
                    waiting.append(found)
        return Total(size, tuple(self._pieces.values()))

    def _note(self, key: int, kind: type) -> None:
        """Record how instances of a type are measured."""
        self._kinds[key] = kind
        if _is_sized_by_python(kind):
            self._sized.add(key)
        if type.__subclasscheck__(dict, kind):
            self._dicts.add(key)
        if (base := library_type("torch", "Tensor")) is not None and type.__subclasscheck__(base, kind):
            self._tensors.add(key)
        library = library_of(kind)
        reader = None if library in {"torch", "ipygpumem"} | sys.stdlib_module_names else behind(kind)
        if reader is not None:
            self._readers[key] = reader

    def _look_behind(self, items: Iterable[object]) -> None:
        waiting = list(items)
        while waiting:
            item = waiting.pop()
            if id(type(item)) not in self._kinds:
                self._note(id(type(item)), type(item))
            reader = self._readers.get(id(type(item)))
            if reader is not None and id(item) not in self._read:
                self._read[id(item)] = item
                with contextlib.suppress(Exception):  # a thread changes it, or an unknown version of a library
                    found = list(reader(item))
                    waiting += found
                    library = library_of(type(item)) or "other libraries"
                    for piece in found:
                        if type(piece) is Piece:
                            self._pieces.setdefault(piece.key, (library, piece))


def _is_sized_by_python(kind: type) -> bool:
    """Return True if the ``__sizeof__`` of a class is the interpreter's own code, and not another library's."""
    method = next(names["__sizeof__"] for names in map(class_dict, type.mro(kind)) if "__sizeof__" in names)
    if type(method) is not MethodDescriptorType:
        return False
    module = type.__dict__["__module__"].__get__(method.__objclass__)
    return type(module) is str and module.partition(".")[0] in sys.stdlib_module_names
