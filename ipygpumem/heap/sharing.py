"""Finds objects that share memory with a region although no reference leads from one to the other.

Libraries show the memory of other libraries' objects, so addresses are compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import itemgetter

from ipygpumem.heap.arrays import storage_key
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.graphs import kept_behind
from ipygpumem.heap.holders.nodes import Nodes
from ipygpumem.heap.libraries import BUFFERS, Piece, sharing_kinds, with_memory
from ipygpumem.heap.region import Region
from ipygpumem.introspect import type_name

_MOST_PARTNERS = 20
"""Maximum number of objects that share the memory of one object to look at."""

Partners = dict[int, list[tuple[Piece, list[object]]]]
"""Memory that objects from outside share, with these objects, by the identity of the region's
object.
"""


def types_to_compare() -> set[int]:
    """Return the identities of the types that a heap must find for ``partners``."""
    return sharing_kinds() | BUFFERS


def partners(region: Region, heap: Heap, held: Collection[int]) -> Partners:
    """Return the memory that a region shares with objects from outside.

    A tensor that a graph from outside has saved is its own partner.

    Args:
        region: has read some objects, with ``keeps_folded``.
        heap: the live objects, and those of the ``types_to_compare``.
        held: objects of the region that are held from outside. A tensor's storage is a partner of
            these only, because torch keeps its Python object while the tensor lives.
    """
    every = with_memory(list(region.objects.values()))
    own = {
        (piece.address or piece.key, piece.size_bytes): (item, piece) for item, piece in every
    }.values()
    if not own:
        return {}
    candidates = [*heap.of_types(), *heap.ndarrays, *heap.tensors]
    inside = region.objects.keys() | set(map(id, region.folded))
    outside = _Outside(with_memory([item for item in candidates if id(item) not in inside]))
    tensors = [tensor for tensor in heap.tensors if id(tensor) not in inside]
    nodes = Nodes()
    saved = {
        storage_key(item)
        for leaves in (True, False)
        for item in kept_behind(tensors, nodes, leaves=leaves)
    }
    found: Partners = {}
    for item, piece in own:
        same = outside.on_memory_of(piece)
        if id(item) not in held:
            same = [partner for partner in same if type_name(partner) != "UntypedStorage"]
        if piece.key in saved:
            same.append(item)
        if same:
            found.setdefault(id(item), []).append((piece, same))
    return found


class _Outside:
    """Objects with memory, by its address or key."""

    def __init__(self, found: Sequence[tuple[object, Piece]]) -> None:
        self._objects = [item for item, _ in found]
        self._by_key = dict[object, list[object]]()
        for item, piece in found:
            self._by_key.setdefault(piece.key, []).append(item)
        spans = [
            (piece.address, piece.address + piece.size_bytes, place)
            for place, (_, piece) in enumerate(found)
        ]
        self._spans = sorted(span for span in spans if span[0])
        self._starts = list(map(itemgetter(0), self._spans))
        self._furthest = list(accumulate(map(itemgetter(1), self._spans), max))
        """The largest end of each span and those before it."""

    def on_memory_of(self, piece: Piece) -> list[object]:
        """Return the objects, not too many, whose memory overlaps with a piece or has its key."""
        same = self._by_key.get(piece.key, [])[:_MOST_PARTNERS]
        place = bisect_left(self._starts, piece.address + piece.size_bytes)
        while (
            place > 0
            and self._furthest[place - 1] > piece.address > 0
            and len(same) < _MOST_PARTNERS
        ):
            place -= 1
            _, end, number = self._spans[place]
            if end > piece.address:
                same.append(self._objects[number])
        return same
