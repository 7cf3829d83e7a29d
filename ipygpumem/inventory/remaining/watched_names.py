"""Watches the arrays of names without keeping them alive.

Before an experiment deletes ``batch``, the arrays in its object are described and watched. Those
that are still alive afterwards have another holder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter, itemgetter

from ipygpumem.heap.bulk import instances_among
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.kinds.arrays import (
    Array,
    ArraySpan,
    StorageKey,
    describe,
    library_type,
    owner_of,
)
from ipygpumem.heap.kinds.tensors import Reader, Storages
from ipygpumem.heap.kinds.watching import WatchedNumpyArray, watch
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.introspect import type_name
from ipygpumem.records import RetainedArray


@dataclass(frozen=True)
class WatchedName:
    """A name with its arrays, none of which it keeps alive."""

    record: RetainedArray
    """The name, and the sum of its arrays when they were found."""
    arrays: tuple[tuple[Callable[[], bool], Array], ...]
    """Arrays with functions that return True while their memory is alive."""
    tensors: tuple[Array, ...] = ()
    """Tensors that are watched by their storages, not by functions."""
    storages: Storages = field(default_factory=Storages)
    """Storages of ``tensors``; there may be very many."""
    may_be_older: bool = False
    """True if its memory may be older than the experiment, because the baseline was incomplete."""
    object_id: int = 0
    """Identity of the object to which the name referred; 0 if unknown."""
    remarks: Mapping[StorageKey, str] = field(default_factory=dict)
    """Remarks on lines that free some of its arrays, by storage."""

    @classmethod
    def of(cls, record: RetainedArray, pairs: Sequence[tuple[object, Array]]) -> WatchedName:
        """Watch the arrays of a name: a tensor by its storage, a NumPy array by its owner, any
        other one by itself.

        Args:
            record: the name, and the sum of its arrays.
            pairs: the arrays and their descriptions.
        """
        storages = Storages()
        items = [item for item, _ in pairs]
        base = library_type("torch", "Tensor")
        tensors = [] if base is None else instances_among(items, base)
        if tensors:
            with sys.modules["torch"]._C.DisableTorchFunction():
                storages.add_of(Reader(sys.modules["torch"]), tensors)
        arrays = list[tuple[Callable[[], bool], Array]]()
        tensors_with_storage = list[Array]()
        for item, array in pairs:
            library, key = array.storage
            if library == "torch" and key in storages:
                tensors_with_storage.append(array)
            elif library == "numpy":
                arrays.append((WatchedNumpyArray(owner_of(item)), array))
            else:
                arrays.append((watch(item), array))
        return cls(record, tuple(arrays), tuple(tensors_with_storage), storages)

    @classmethod
    def without_name(cls, item: object, array: Array) -> WatchedName:
        """Watch a described array that has no name."""
        return cls.of(record_without_name(item), [(item, array)])

    def live_arrays(self) -> list[Array]:
        """Return the arrays that are still alive, largest first."""
        arrays = [array for is_alive, array in self.arrays if is_alive()]
        if self.tensors:
            keys = map(itemgetter(1), map(attrgetter("storage"), self.tensors))
            arrays += compress(self.tensors, self.storages.alive(keys))
        return sorted(arrays, key=attrgetter("size_bytes"), reverse=True)

    def live_storages(self) -> list[StorageKey]:
        """Return the storages of the live arrays, that of the largest array first."""
        return [array.storage for array in self.live_arrays()]

    def remark(self) -> str:
        """Return the remarks that the line has which frees the live arrays; empty if there are
        none.
        """
        remarks = [self.remarks.get(storage, "") for storage in self.live_storages()]
        return "; ".join(dict.fromkeys(filter(None, remarks)))

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays that are still alive."""
        return size_of(self.live_arrays())

    def row(self, arrays: Iterable[Array]) -> Row:
        """Return the row of some arrays of this name, for a search for their holder."""
        return Row([array.storage for array in arrays], self.object_id)

    def divided(self, storages: Container[StorageKey]) -> Iterator[WatchedName]:
        """Yield the name twice: with its arrays in ``storages``, and with its other arrays. Each
        part has its own holder.
        """
        for is_inside in (True, False):
            arrays = tuple(
                pair for pair in self.arrays if (pair[1].storage in storages) is is_inside
            )
            tensors = tuple(
                array for array in self.tensors if (array.storage in storages) is is_inside
            )
            yield replace(self, arrays=arrays, tensors=tensors)


def watch_names(named: Iterable[tuple[str, object]], search: ArraySearch) -> list[WatchedName]:
    """Watch the arrays of names. An array that several names hold is watched for the first of them.

    Args:
        named: the names and their objects.
        search: finds arrays, each once.
    """
    records_and_arrays = [search.retained_by(name, value) for name, value in named]
    return [WatchedName.of(*entry) for entry in records_and_arrays if entry is not None]


def storages_of(watched: Iterable[WatchedName]) -> set[StorageKey]:
    """Return the storages of names' live arrays."""
    storages = set[StorageKey]()
    for item in watched:
        storages.update(item.live_storages())
    return storages


def size_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of all ``arrays``."""
    return sum(array.size_bytes for array in arrays)


def record_without_name(item: object) -> RetainedArray:
    """Return the record of a tensor or array that has no name."""
    array = describe(item)
    if array is None:  # it was readable a moment ago
        return RetainedArray("", type_name(item), shape=None, dtype="", device="", size_bytes=0)
    return RetainedArray(
        "", array.type_name, array.shape, array.dtype, array.device, array.size_bytes
    )


# -- NumPy's arrays, which user code must not find weakly referenced ------------------------------


def spans_of_numpy(watched: Iterable[WatchedName]) -> list[ArraySpan]:
    """Return the addresses of names' NumPy arrays that are alive."""
    spans = [array.span for array in _numpy_arrays(watched) if array()]
    return [span for span in spans if span is not None]


def update_numpy(watched: Sequence[WatchedName], heap: Heap) -> None:
    """Note which of the names' NumPy arrays are still alive, because they are on the ``heap``."""
    arrays = _numpy_arrays(watched)
    if not arrays:
        return
    spans = heap.spans()
    for array in arrays:
        array.update(spans)


def detach_numpy(watched: Iterable[WatchedName], heap: Heap | None = None) -> None:
    """End the weak references to names' NumPy arrays. From now on, an array is recognised by its
    addresses: NumPy does not resize an array with a weak reference.

    Args:
        watched: the names.
        heap: the live objects, of which those arrays remain watched that are not on it; None if all
            arrays are alive.
    """
    arrays = _numpy_arrays(watched)
    if not arrays:
        return
    spans = {array.span for array in arrays} if heap is None else heap.spans()
    for array in arrays:
        array.detach(spans)


def _numpy_arrays(watched: Iterable[WatchedName]) -> list[WatchedNumpyArray]:
    """Return names' NumPy arrays."""
    numpy_arrays = list[WatchedNumpyArray]()
    for item in watched:
        for is_alive, _ in item.arrays:
            if isinstance(is_alive, WatchedNumpyArray):
                numpy_arrays.append(is_alive)
    return numpy_arrays
