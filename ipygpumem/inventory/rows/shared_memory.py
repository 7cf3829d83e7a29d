"""Makes one row of an array and a tensor that share memory, as after ``torch.from_numpy``.

NumPy and torch each know a storage of their own; only the address tells that these are the same.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from ipygpumem.heap.holders.explanation import OUT_OF_SIGHT
from ipygpumem.heap.kinds.arrays import StorageKey, describe, storage_key
from ipygpumem.heap.kinds.tensors import Reader
from ipygpumem.heap.kinds.watching import WatchedArray
from ipygpumem.heap.live.heap import Heap
from ipygpumem.inventory.remaining.watched_names import WatchedName, storages_of
from ipygpumem.inventory.rows.array_holders import Explained
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import holder_of_all


def rows_of(explained: Sequence[Explained], heap: Heap) -> list[HeldRow]:
    """Return the rows of arrays, with one row for an array and a tensor on its memory, such as one
    made by ``torch.from_numpy``.

    Args:
        explained: the arrays of names and their rows.
        heap: the live objects.
    """
    rows = [row for _, row in explained]
    arrays_below = _arrays_below([item for item, _ in explained], heap)
    if not arrays_below:
        return rows
    position_of_storage = dict[StorageKey, int]()
    """The position in ``rows`` of the row with each storage."""
    for position, (item, _) in enumerate(explained):
        position_of_storage.update(dict.fromkeys(item.live_storages(), position))
    joined_positions = set[int]()
    for position, (item, row) in enumerate(explained):
        owners = [arrays_below.get(storage, storage) for storage in item.live_storages()]
        positions_of_owners = set(map(position_of_storage.get, owners))
        if len(positions_of_owners) > 1:
            continue
        position_of_array = positions_of_owners.pop()
        if position_of_array is not None and position_of_array != position:
            rows[position_of_array] = _row_of_both(rows[position_of_array], row)
            joined_positions.add(position)
    return [row for position, row in enumerate(rows) if position not in joined_positions]


def _arrays_below(watched: Sequence[WatchedName], heap: Heap) -> dict[StorageKey, StorageKey]:
    """Return the storage of the array on whose memory a torch storage is, by the torch storage.

    Args:
        watched: names with tensors and arrays.
        heap: the live objects.
    """
    torch_storages = set[StorageKey]()
    for item in watched:
        torch_storages.update(storage for storage in item.live_storages() if storage[0] == "torch")
    places_of_arrays = _places_of_arrays(watched)
    if not torch_storages or not places_of_arrays:
        return {}
    array_storages = dict[StorageKey, StorageKey]()
    for torch_storage, address in _addresses(torch_storages, heap).items():
        for start, end, array_storage in places_of_arrays:
            if start <= address < end:
                array_storages[torch_storage] = array_storage
    return array_storages


def tensors_on_arrays(watched: Sequence[WatchedName], heap: Heap) -> list[WatchedName]:
    """Watch the tensors of any size on the memory of names' arrays, which they keep alive.

    An example is ``torch.from_numpy(x[:100])``: no object that Python sees leads from it to ``x``.
    """
    places = _places_of_arrays(watched)
    if not places or not heap.tensors:
        return []
    places.sort()
    starts = list(map(itemgetter(0), places))
    listed = storages_of(watched)
    on_arrays = list[WatchedName]()
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        reader = Reader(torch)
        for tensor in heap.tensors:
            key = storage_key(tensor)
            if key is None or key in listed:
                continue
            listed.add(key)
            address = reader.address_of_others(tensor) if reader.memory(tensor).is_plain else None
            array = describe(tensor)
            if address is None or array is None:
                continue
            position = bisect_right(starts, address) - 1
            if position >= 0 and address < places[position][1]:
                on_arrays.append(WatchedName.without_name(tensor, array))
    return on_arrays


def _places_of_arrays(watched: Sequence[WatchedName]) -> list[tuple[int, int, StorageKey]]:
    """Return the start and end of the memory of each live NumPy array, and its storage."""
    places = list[tuple[int, int, StorageKey]]()
    for item in watched:
        for is_alive, array in item.arrays:
            if isinstance(is_alive, WatchedArray) and is_alive() and is_alive.place:
                _, start, end = is_alive.place
                places.append((start, end, array.storage))
    return places


def _addresses(storages: set[StorageKey], heap: Heap) -> dict[StorageKey, int]:
    """Return the addresses of the torch storages that another library has allocated."""
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
    """Return an array's row with the name and the holder of a tensor on its memory."""
    rows = (of_array, of_tensor)
    names = [row.row.name for row in rows if row.row.name]
    holders = [row.holder for row in rows if row.holder is not None]
    holder = of_array.holder
    if of_array.holder == OUT_OF_SIGHT:
        holder = of_tensor.holder  # torch itself refers to the array
    elif len(holders) == 2:
        holder = holder_of_all(holders)
    return HeldRow(replace(of_array.row, name=", ".join(names)), holder)
