"""Finds arrays that are older than their memory.

``array.resize()`` and ``tensor.data = ...`` give new memory to an object that was there before. The
line that frees the new memory deletes the older object, too, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from ipygpumem.heap.bulk import instances_among
from ipygpumem.heap.holders.rows import objects_of_storages
from ipygpumem.heap.kinds.arrays import Array, StorageKey, library_type
from ipygpumem.heap.live.heap import Heap

_REMARK_ON_TENSOR = "also drops an older tensor, which has new memory"
_REMARK_ON_ARRAY = "also drops an older array, which has grown"


def remarks_on_grown(
    arrays: Mapping[StorageKey, Array],
    heap: Heap,
    new_ids: Container[int],
    had_other_size: Callable[[Array], bool],
    named: Container[int],
) -> dict[StorageKey, str]:
    """Return a remark for each storage whose array is older than this memory, for the line that
    frees it.

    Args:
        arrays: the arrays with new memory, by storage.
        heap: the live objects.
        new_ids: identities of the tracked objects made since the start of the experiment; empty if
            unknown.
        had_other_size: returns True if an array of another size had the identity of an array.
        named: the identities of the objects that the same names had at the start.
    """
    remarks = dict[StorageKey, str]()
    of_torch = set[StorageKey]()
    for key, array in arrays.items():
        if key[0] == "torch":
            of_torch.add(key)
        elif key[0] == "numpy" and key[1] in named and had_other_size(array):
            # Without the same name, it would often be a new array with the identity of one that has
            # died.
            remarks[key] = _REMARK_ON_ARRAY
    tensor_type = library_type("torch", "Tensor")
    if not new_ids or tensor_type is None:
        return remarks
    for key, item in objects_of_storages(heap, of_torch):
        if id(item) not in new_ids and instances_among([item], tensor_type):
            remarks[key] = _REMARK_ON_TENSOR
    return remarks
