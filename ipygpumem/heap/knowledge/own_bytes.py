"""Measures the bytes of objects themselves, as allocators round them, without the objects to which
they refer: of a list, its header and its pointers.

No user code runs: objects are sized by the C code of their built-in or library base. Loops over
objects run in C, so that a million short strings take a quarter of a second.
"""

from __future__ import annotations

import functools
import gc
import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipygpumem.heap.bulk import (
    Batch,
    container_base,
    of_types,
    one_of_each,
    types_of,
    without_types,
)
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.kinds.libraries import (
    VISITS_BUFFER,
    LoadedReader,
    PieceReader,
    bulk_reader,
    loaded_readers,
    reader_for,
)
from ipygpumem.heap.kinds.tensors import Reader, each
from ipygpumem.heap.knowledge.certainty import UncountedLibraries
from ipygpumem.heap.knowledge.size_methods import size_method
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import MANAGED_DICT, flags_of

_LARGEST_BLOCK_BYTES = 512
"""Largest size that CPython's own allocator serves; larger blocks are malloc's."""
_MALLOC_HEADER_BYTES = 8
"""Bytes that malloc adds to a block."""
_GC_HEADER_BYTES = 16
"""Bytes that CPython adds to an object that the collector may track."""
TENSOR_BYTES = 192
STORAGE_BYTES = 144
_GRAPH_BYTES = 192
_VIEW_BYTES = 320
"""Bytes of torch's C++ objects: of each tensor and storage, and for autograd of a tensor that needs
a gradient, and of a view, as malloc rounds them.
"""
_GAP_BYTES = 40
"""Mean number of bytes that malloc leaves unused to align a tensor's data to 64 bytes."""
_TEXT_TYPE = {id(str)}
_TYPES_OF_TWO_BLOCKS = {id(kind) for kind in (list, set, bytearray)}
"""Types whose content is in a block of its own. ``sys.getsizeof`` returns the sum of both blocks;
8 bytes more account for the rounding of the instance, which is no multiple of 16 bytes.
"""


_item_bytes_of: Callable[[Any], int] = vars(type)["__itemsize__"].__get__
"""Returns the bytes of each item of a type whose instances differ in size, else 0; runs no code of
a metaclass.
"""


class OwnBytes:
    """Measures the RAM of objects of any type.

    Attributes:
        readers: functions that read the memory of a library behind an object, by the identity of
            its type.
        dicts: identities of types that derive from ``dict``.
        arrays: identities of types that derive from NumPy's array.
    """

    def __init__(self) -> None:
        self.readers: dict[int, PieceReader] = {}
        self.dicts: set[int] = set()
        self.arrays: set[int] = set()
        self._learned_types: set[int] = set()
        """Identities of the types that ``learn`` has seen."""
        self._sizers: dict[int, Callable[[Any], int]] = {}
        """C functions that size instances of classes with a ``__sizeof__`` of their own, by the
        type's identity.
        """
        self._bulk_readers: dict[int, Callable[[Sequence[Any]], int]] = {}
        """Functions that return the memory in C of many objects of a type, by the type's identity.
        """
        self._with_inline_attributes: set[int] = set()
        """Types of objects with attributes outside a dict."""
        self._size_of_each: dict[int, int] = {}
        """Result of ``sys.getsizeof`` for each instance of a type whose instances are all equally
        large, by the type's identity.
        """
        self._special_types: set[int] = set(_TYPES_OF_TWO_BLOCKS)
        """Types whose instances ``sys.getsizeof`` alone does not measure, for any reason above."""
        self._loaded_readers = loaded_readers()
        self._array_type: Any = library_type("numpy", "ndarray")
        # No bound method: a cycle would be garbage, after which the next look collects twice.
        self._uncounted_libraries = UncountedLibraries(
            functools.partial(_is_read, self._loaded_readers)
        )
        self._libraries: dict[int, str] = {}
        """The library that keeps uncounted memory of a type's instances, or an empty text, by the
        type's identity.
        """

    def learn(self, items: Sequence[object]) -> set[int]:
        """Learn how to measure the objects of new types; return the identities of all types of the
        objects.
        """
        examples = one_of_each(items)
        type_ids = set(examples)
        for type_id in type_ids - self._learned_types:
            self._learned_types.add(type_id)
            self._learn_type(type_id, examples[type_id])
        return type_ids

    def of(self, items: Sequence[Any], type_ids: set[int] | None = None) -> int:
        """Return the bytes of all objects together, with the attributes that they store outside a
        dict.

        Args:
            items: the objects.
            type_ids: the identities of their types, and possibly further ones, if ``learn`` has
                returned them: a tenth less work.
        """
        if type_ids is None:
            type_ids = self.learn(items)
        if self._special_types.isdisjoint(type_ids):
            return rounded(Counter(each(sys.getsizeof, items)))
        plain = without_types(self._special_types, items)
        size = rounded(Counter(each(sys.getsizeof, plain)))
        return size + self._of_special(of_types(self._special_types, items))

    def each(self, items: Sequence[Any]) -> list[int]:
        """Return the bytes of each object.

        Memory outside of the objects, which is read for all objects of a type at once, is divided
        equally among them.
        """
        type_ids = self.learn(items)
        # ``sys.getsizeof`` would run the code of a class with a ``__sizeof__`` of its own.
        special = (self._special_types - _TYPES_OF_TWO_BLOCKS) & type_ids
        plain_sizes = _sizes_of_plain(without_types(special, items))
        if not special:
            return plain_sizes
        mean_bytes = self._mean_bytes(items, special)
        sizes_of_arrays = self._sizes_of_arrays(items)
        sizes = list[int]()
        next_plain = iter(plain_sizes)
        for item, type_id in zip(items, map(id, map(type, items)), strict=True):
            if type_id in mean_bytes:
                sizes.append(mean_bytes[type_id])
            elif type_id in self.arrays:
                sizes.append(sizes_of_arrays[id(item)])
            elif type_id in special:
                sizes.append(self.of([item]))
            else:
                sizes.append(next(next_plain))
        return sizes

    def _sizes_of_arrays(self, items: Sequence[Any]) -> dict[int, int]:
        """Return the bytes of each array among some objects, by its identity."""
        arrays = of_types(self.arrays, items)
        if not arrays:
            return {}
        sizes = list(map(self._array_type.__dict__["__sizeof__"], arrays))
        rounded_sizes = {size: rounded({size: 1}, _MALLOC_HEADER_BYTES) for size in set(sizes)}
        return dict(zip(map(id, arrays), map(rounded_sizes.__getitem__, sizes), strict=True))

    def _mean_bytes(self, items: Sequence[Any], type_ids: set[int]) -> dict[int, int]:
        """Return the mean bytes of the objects of each type whose objects have memory outside of
        them, by the identity of the type.

        Args:
            items: the objects.
            type_ids: the identities of the types to measure.
        """
        mean_bytes: dict[int, int] = {}
        with_memory_outside = self._with_inline_attributes | self._bulk_readers.keys()
        for type_id in with_memory_outside & type_ids:
            objects_of_type = of_types({type_id}, items)
            mean_bytes[type_id] = self.of(objects_of_type) // len(objects_of_type)
        return mean_bytes

    def requested(self, batch: Batch[Any]) -> int:
        """Return the bytes that objects have requested from allocators, without rounding and
        without the data of arrays.

        It is for the whole heap, because ``of`` takes twice as long. ``learn`` must have returned
        the types.
        """
        size = 0
        with_inline_attributes = batch.of_types(self._with_inline_attributes)
        if with_inline_attributes:
            size += _bytes_of_inline_attributes(with_inline_attributes)
        for type_id in self._bulk_readers.keys() & batch.types:
            size += self._bulk_readers[type_id](batch.of_types({type_id}))
        size += sum(map(object.__sizeof__, batch.of_types(self.arrays)))
        with_sizer = self._sizers.keys() & batch.types - self.arrays
        for type_id in with_sizer:
            size += _sum_of(self._sizers[type_id], batch.of_types({type_id}))
        of_one_size = self._size_of_each.keys() & batch.types - self.arrays
        for type_id in of_one_size:
            size += self._size_of_each[type_id] * batch.number_of(type_id)
        texts = batch.of_types(_TEXT_TYPE)
        # Text is most of a heap, and ``sys.getsizeof`` takes four times as long as its own method.
        size += sum(map(str.__sizeof__, texts))
        measured = with_sizer | of_one_size | _TEXT_TYPE | self.arrays
        return size + _sum_of(sys.getsizeof, batch.without_types(measured))

    def uncounted(self, items: Sequence[object], type_ids: set[int] | None = None) -> set[str]:
        """Return the libraries that keep memory for some of the objects which nothing counts, such
        as ``{"faiss"}``.

        The bytes of these objects are at least those that ``of`` returns. Each type is examined
        once, so that many objects take as long as reading their types.

        Args:
            items: the objects, also objects that lead to nothing, such as a handle of a C library.
            type_ids: the identities of their types, and possibly further ones, if the caller has
                them: then types that were examined before cost nothing.

        >>> OwnBytes().uncounted([1, "text", [], object()])
        set()
        """
        if type_ids is None:
            type_ids = types_of(items)
        if not type_ids <= self._libraries.keys():
            for type_id, example in one_of_each(items).items():
                if type_id not in self._libraries:
                    self._libraries[type_id] = self._uncounted_libraries.library_of(
                        type(example), example
                    )
        return {self._libraries.get(type_id, "") for type_id in type_ids} - {""}

    def _of_special(self, items: Sequence[Any]) -> int:
        """Return the bytes of objects of the special types, all together."""
        type_ids = types_of(items)
        return self._of_blocks(items, type_ids) + self._of_memory_outside(items, type_ids)

    def _of_blocks(self, items: Sequence[Any], type_ids: set[int]) -> int:
        """Return the bytes of the blocks of objects, as allocators round them.

        Each object is measured in the first of these groups that has its type: arrays; classes with
        a ``__sizeof__`` of their own; lists and other types whose content is allocated apart; and
        all remaining types.

        Args:
            items: the objects.
            type_ids: the identities of their types.
        """
        size = 0
        arrays = self.arrays & type_ids
        if arrays:
            base: Any = library_type("numpy", "ndarray")
            sizes = map(base.__dict__["__sizeof__"], of_types(arrays, items))
            size += rounded(Counter(sizes), _MALLOC_HEADER_BYTES)
        with_sizer = self._sizers.keys() & type_ids - arrays
        for type_id in with_sizer:
            sizes_of_type = each(self._sizers[type_id], of_types({type_id}, items))
            size += rounded(Counter(sizes_of_type), _GC_HEADER_BYTES)
        measured = with_sizer | arrays
        two_block_types = _TYPES_OF_TWO_BLOCKS | self.dicts - {id(dict)}
        in_two_blocks = type_ids & two_block_types - measured
        if in_two_blocks:
            measured |= in_two_blocks
            size += rounded(
                Counter(each(sys.getsizeof, of_types(in_two_blocks, items))), _MALLOC_HEADER_BYTES
            )
        return size + rounded(Counter(each(sys.getsizeof, without_types(measured, items))))

    def _of_memory_outside(self, items: Sequence[Any], type_ids: set[int]) -> int:
        """Return the bytes that objects have outside of their blocks: for attributes that are in no
        dict, and in C for objects of libraries whose memory one call reads for many objects.
        """
        size = 0
        if not self._with_inline_attributes.isdisjoint(type_ids):
            size += _bytes_of_inline_attributes(of_types(self._with_inline_attributes, items))
        for type_id in self._bulk_readers.keys() & type_ids:
            size += self._bulk_readers[type_id](of_types({type_id}, items))
        return size

    def _learn_type(self, type_id: int, example: object) -> None:
        """Learn how to measure the objects of a new type.

        Args:
            type_id: the identity of the type.
            example: one of its objects.
        """
        kind = type(example)
        reader = reader_for(kind, self._loaded_readers)
        sizer = _sizer(kind, is_read=reader is not None)
        read_many = bulk_reader(kind)
        is_dict = type.__subclasscheck__(dict, kind)
        is_array = self._array_type is not None and type.__subclasscheck__(self._array_type, kind)
        has_inline_attributes = flags_of(kind) & MANAGED_DICT and container_base(kind) is None
        # The bytes that a ``BytesIO`` shares are a reference of it.
        if reader is not None and not type.__subclasscheck__(io.BytesIO, kind):
            self.readers[type_id] = reader
        if sizer is not None:
            self._sizers[type_id] = sizer
        if read_many is not None:
            self._bulk_readers[type_id] = read_many
        if is_dict:
            self.dicts.add(type_id)
        if is_array:
            self.arrays.add(type_id)
        if has_inline_attributes:
            self._with_inline_attributes.add(type_id)
        is_dict_of_subclass = is_dict and kind is not dict
        has_memory_outside = read_many is not None or has_inline_attributes
        if sizer is not None or is_array or is_dict_of_subclass or has_memory_outside:
            self._special_types.add(type_id)
        if sizer is None and not _item_bytes_of(kind) and size_method(kind).is_of_object:
            self._size_of_each[type_id] = sys.getsizeof(example)


def _is_read(loaded_readers: Sequence[LoadedReader], kind: type) -> bool:
    """Return True if all memory of a type's objects is read: by a function in a table, or because
    they are arrays or tensors.
    """
    if bulk_reader(kind) is not None or reader_for(kind, loaded_readers) is not None:
        return True
    for base in (library_type("numpy", "ndarray"), library_type("torch", "Tensor")):
        if base is not None and type.__subclasscheck__(base, kind):
            return True
    return False


def _sizes_of_plain(items: Sequence[Any]) -> list[int]:
    """Return the bytes of each of some objects, all of a kind that ``sys.getsizeof`` measures.

    Each different size is rounded once, because most objects have one of a few sizes.
    """
    sizes = list(each(sys.getsizeof, items))
    in_one_block = {size: rounded({size: 1}) for size in set(sizes)}
    if _TYPES_OF_TWO_BLOCKS.isdisjoint(types_of(items)):
        return list(map(in_one_block.__getitem__, sizes))
    in_two_blocks = {size: rounded({size: 1}, _MALLOC_HEADER_BYTES) for size in in_one_block}
    rounded_sizes = list[int]()
    for size, type_id in zip(sizes, map(id, map(type, items)), strict=True):
        if type_id in _TYPES_OF_TWO_BLOCKS:
            rounded_sizes.append(in_two_blocks[size])
        else:
            rounded_sizes.append(in_one_block[size])
    return rounded_sizes


def of_tensors(reader: Reader, tensors: Sequence[Any]) -> int:
    """Return the bytes of torch's C++ objects of tensors, without their storages."""
    base = reader.base
    number_with_gradients = sum(map(bool, each(base.requires_grad.__get__, tensors)))
    number_of_views = sum(map(bool, each(base._is_view, tensors)))
    bytes_for_autograd = number_with_gradients * _GRAPH_BYTES + number_of_views * _VIEW_BYTES
    return len(tensors) * TENSOR_BYTES + bytes_for_autograd


def of_storages(sizes: Sequence[int], devices: Sequence[str]) -> Counter[str]:
    """Return the bytes of tensors' storages by device, as malloc rounds those in RAM, with their
    C++ objects.
    """
    device_bytes = Counter[str]()
    numbers = Counter(zip(sizes, devices, strict=True))
    for (size, device), number in numbers.items():
        device_bytes["cpu"] += STORAGE_BYTES * number
        if size and device == "cpu":
            size = aligned(size + _MALLOC_HEADER_BYTES) + _GAP_BYTES
        device_bytes[device] += size * number
    return device_bytes


def _sum_of(get: Callable[[Any], int], items: Sequence[object]) -> int:
    """Return the sum of ``get(item)`` for all items; an item for which it fails counts as 0."""
    try:
        return sum(map(get, items))
    except Exception as error:
        if is_from_signal(error):
            raise
        return sum(filter(None, each(get, items)))


def _bytes_of_inline_attributes(items: Sequence[object]) -> int:
    """Return the bytes of the attributes that objects store outside a dict.

    Args:
        items: the objects, all of types that can store attributes so.
    """
    number_of_objects = len(items)
    referents = gc.get_referents(*items)
    number_of_attributes = len(referents) - number_of_objects  # each refers to its class, too
    if number_of_attributes:
        # Each object refers to its dict of attributes instead, which is counted by itself.
        dicts = of_types({id(dict)}, referents)
        if len(dicts) >= number_of_attributes:
            return 0
    return _bytes_for_attributes(number_of_attributes // number_of_objects) * number_of_objects


def _sizer(kind: type, is_read: bool) -> Callable[[Any], int] | None:
    """Return the ``__sizeof__`` that measures instances of a class; None if ``sys.getsizeof`` does
    so.

    Args:
        kind: the class.
        is_read: True if the memory behind the instances is counted by other means.
    """
    if VISITS_BUFFER and type.__subclasscheck__(io.BytesIO, kind):
        return object.__sizeof__  # its own one adds the buffer, which is counted as bytes
    method = size_method(kind)
    # That of pandas' IndexEngine adds its table, which a reader counts.
    if is_read and method.is_of_cython:
        return object.__sizeof__
    if not method.is_overridden:
        return None
    return method.measure


def _bytes_for_attributes(number: int) -> int:
    """Return the bytes of the array in which CPython stores a number of attributes of an object,
    with one spare place.
    """
    header = 16
    if sys.version_info < (3, 13):
        header = (number + 10) & -8
    pointers_bytes = 8 * (number + 1)
    return aligned(header + pointers_bytes)


def aligned(size: int) -> int:
    """Return a size as CPython's allocator rounds it."""
    return (size + 15) & -16


def rounded(sizes: Mapping[Any, int], extra: int = 0) -> int:
    """Return the bytes that allocators use for all objects together.

    Args:
        sizes: the number of objects of each size; the size None is left out.
        extra: the bytes that each object needs in addition to its size.
    """
    total = 0
    for size, number in sizes.items():
        if size is None:
            continue
        block = size + extra
        if size > _LARGEST_BLOCK_BYTES:
            block += _MALLOC_HEADER_BYTES
        total += aligned(block) * number
    return total
