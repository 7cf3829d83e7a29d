"""Makes one row of an array and a tensor that share memory, as after ``torch.from_numpy(array)``.

NumPy and torch each have a storage of their own for it; only the address tells that these are the
same memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from ipygpumem.heap.holders.explanation import OUT_OF_SIGHT
from ipygpumem.heap.kinds.arrays import StorageKey, describe, storage_key
from ipygpumem.heap.kinds.tensors import Reader
from ipygpumem.heap.kinds.watching import WatchedNumpyArray
from ipygpumem.heap.live.heap import Heap
from ipygpumem.inventory.remaining.watched_names import WatchedName, storages_of
from ipygpumem.inventory.rows.array_holders import HeldArrays
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import holder_of_all


def rows_of(held_arrays: Sequence[HeldArrays], heap: Heap) -> list[HeldRow]:
    """Return the rows of arrays, with one row for an array and the tensors on its memory.

    Args:
        held_arrays: the arrays of names, and their rows.
        heap: the live objects.
    """
    rows = [row for _, row in held_arrays]
    arrays_below = _arrays_below([item for item, _ in held_arrays], heap)
    if not arrays_below:
        return rows
    position_of_storage = dict[StorageKey, int]()
    """The position in ``rows`` of the row with each storage."""
    for position, (item, _) in enumerate(held_arrays):
        position_of_storage.update(dict.fromkeys(item.live_storages(), position))
    joined_positions = set[int]()
    """The positions of rows of tensors that have become a part of an array's row."""
    for position, (item, row) in enumerate(held_arrays):
        # The storages with the memory: of a tensor on an array, that of the array.
        owners = [arrays_below.get(storage, storage) for storage in item.live_storages()]
        positions_of_owners = set(map(position_of_storage.get, owners))
        if len(positions_of_owners) > 1:
            continue  # its tensors are on several arrays, or some on none
        position_of_array = positions_of_owners.pop()
        if position_of_array is not None and position_of_array != position:
            rows[position_of_array] = _row_of_both(rows[position_of_array], row)
            joined_positions.add(position)
    return [row for position, row in enumerate(rows) if position not in joined_positions]


def _arrays_below(watched: Sequence[WatchedName], heap: Heap) -> dict[StorageKey, StorageKey]:
    """Return the storage of the NumPy array on whose memory a torch storage lies, by the torch
    storage. Torch storages with memory of their own are missing.

    Args:
        watched: names with tensors and arrays.
        heap: the live objects.
    """
    torch_storages = set[StorageKey]()
    for item in watched:
        torch_storages.update(storage for storage in item.live_storages() if storage[0] == "torch")
    places_of_arrays = _places_in_memory(watched)
    if not torch_storages or not places_of_arrays:
        return {}
    array_storages = dict[StorageKey, StorageKey]()
    for torch_storage, address in _addresses_of_foreign(torch_storages, heap).items():
        for place in places_of_arrays:
            if place.start <= address < place.end:
                array_storages[torch_storage] = place.storage
    return array_storages


def tensors_on_arrays(watched: Sequence[WatchedName], heap: Heap) -> list[WatchedName]:
    """Watch the tensors on the memory of names' arrays, which they keep alive, however small they
    are.

    ``torch.from_numpy(x[:100])`` keeps all of ``x``, and no object that Python sees leads from one
    to the other.
    """
    places = _places_in_memory(watched)
    if not places or not heap.tensors:
        return []
    places.sort()
    starts = list(map(attrgetter("start"), places))
    storages_listed = storages_of(watched)
    on_arrays = list[WatchedName]()
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        reader = Reader(torch)
        for tensor in heap.tensors:
            key = storage_key(tensor)
            if key is None or key in storages_listed:
                continue
            storages_listed.add(key)
            address = None
            if reader.memory(tensor).is_plain:
                address = reader.address_of_others(tensor)
            array = describe(tensor)
            if address is None or array is None:
                continue
            position = bisect_right(starts, address) - 1
            if position >= 0 and address < places[position].end:
                on_arrays.append(WatchedName.without_name(tensor, array))
    return on_arrays


class _ArrayPlace(NamedTuple):
    """The place of a NumPy array in memory."""

    start: int
    end: int
    storage: StorageKey


def _places_in_memory(watched: Sequence[WatchedName]) -> list[_ArrayPlace]:
    """Return the places in memory of the names' live NumPy arrays."""
    places = list[_ArrayPlace]()
    for item in watched:
        for is_alive, array in item.arrays:
            if isinstance(is_alive, WatchedNumpyArray) and is_alive() and is_alive.span:
                _, start, end = is_alive.span
                places.append(_ArrayPlace(start, end, array.storage))
    return places


def _addresses_of_foreign(storages: set[StorageKey], heap: Heap) -> dict[StorageKey, int]:
    """Return the addresses of those torch storages whose memory another library has allocated, by
    the storage.
    """
    addresses = dict[StorageKey, int]()
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        reader = Reader(torch)
        for tensor in heap.tensors:
            key = storage_key(tensor)
            if key not in storages or not reader.memory(tensor).is_plain:
                continue
            address = reader.address_of_others(tensor)
            if key is not None and address is not None:
                addresses[key] = address
    return addresses


def _row_of_both(of_array: HeldRow, of_tensor: HeldRow) -> HeldRow:
    """Return the row of an array with a tensor on its memory: the array's size, with the names and
    holders of both.
    """
    rows = (of_array, of_tensor)
    names = [row.row.name for row in rows if row.row.name]
    holders = [row.holder for row in rows if row.holder is not None]
    holder = of_array.holder
    if of_array.holder == OUT_OF_SIGHT:
        holder = of_tensor.holder  # torch itself refers to the array
    elif len(holders) == 2:
        holder = holder_of_all(holders)
    return HeldRow(replace(of_array.row, name=", ".join(names)), holder)
