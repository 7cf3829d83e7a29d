"""Finds objects that share memory with a region although no reference leads from one to the other.

Libraries show the memory of other libraries' objects, so addresses are compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import itemgetter

from ipygpumem.heap.kinds.arrays import storage_key
from ipygpumem.heap.kinds.libraries import BUFFERS, MemoryPiece, sharing_kinds, with_memory
from ipygpumem.heap.knowledge.graphs import kept_by_many
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.introspect import type_name

_MOST_PARTNERS = 20
"""Maximum number of objects that share the memory of one object to look at."""

Partners = dict[NodeKey, list[tuple[MemoryPiece, list[object]]]]
"""Memory of a region that objects from outside show, too: each piece with these objects, by the
identity of the region's object, or by the key of the memory if its object is folded into another
one.

For ``shown = torch.from_numpy(rows)``, the memory of ``rows`` has the tensor ``shown``.
"""


def types_to_compare() -> set[int]:
    """Return the identities of the types of objects that may show other objects' memory: a heap
    must collect their objects for ``partners``.
    """
    return sharing_kinds() | BUFFERS


def partners(region: Region, heap: Heap, held: Collection[NodeKey]) -> Partners:
    """Return the memory that a region shares with objects from outside.

    A tensor that a graph from outside has saved is its own partner.

    Args:
        region: has read some objects, with ``keeps_folded``.
        heap: the live objects, and those of the ``types_to_compare``.
        held: objects and storages of the region that are held from outside. Only these have the
            Python object of a storage as a partner: torch keeps that object while a tensor lives.
    """
    own_pieces = _own_pieces(region)
    if not own_pieces:
        return {}
    region_ids = region.all_ids()
    candidates = [*heap.of_types(), *heap.ndarrays, *heap.tensors]
    outside = _Outside(with_memory([item for item in candidates if id(item) not in region_ids]))
    saved = _saved_by_graphs([item for item in heap.tensors if id(item) not in region_ids])
    pieces_by_owner: Partners = {}
    for key, piece in own_pieces:
        sharers = outside.on_memory_of(piece)
        if key not in held and piece.key not in held:
            sharers = [sharer for sharer in sharers if type_name(sharer) != "UntypedStorage"]
        if piece.key in saved and key in region.objects:
            sharers.append(region.objects[key])
        if sharers:
            pieces_by_owner.setdefault(key, []).append((piece, sharers))
    return pieces_by_owner


def _own_pieces(region: Region) -> Sequence[tuple[NodeKey, MemoryPiece]]:
    """Return the memory of a region, with the identity of its object, or its own key if the object
    is folded into another one, such as the column of a frame.
    """
    by_place = dict[tuple[object, int], tuple[NodeKey, MemoryPiece]]()
    for item, piece in with_memory(list(region.objects.values())):
        by_place[_place(piece)] = (id(item), piece)
    for key, piece in region.graph.pieces.items():
        if piece.key[0] != "torch":  # whose tensors are never folded
            by_place.setdefault(_place(piece), (key, piece))
    return list(by_place.values())


def _place(piece: MemoryPiece) -> tuple[object, int]:
    """Return a piece's address and its size; its key instead of an address that is not known."""
    return piece.address or piece.key, piece.size_bytes


def _saved_by_graphs(tensors: Sequence[object]) -> set[tuple[str, int] | None]:
    """Return the keys of the storages that the autograd graphs of tensors keep."""
    nodes = Nodes()
    storages = set[tuple[str, int] | None]()
    for leaves in (True, False):
        storages.update(map(storage_key, kept_by_many(tensors, nodes, leaves=leaves)))
    return storages


class _Outside:
    """Objects outside of a region, which are found by the addresses or keys of their memory."""

    def __init__(self, objects_with_pieces: Sequence[tuple[object, MemoryPiece]]) -> None:
        self._objects = list(map(itemgetter(0), objects_with_pieces))
        self._by_key = dict[object, list[object]]()
        self._spans = list[tuple[int, int, int]]()
        """The start and end of each object's host memory, with the object's position; sorted."""
        for position, (item, piece) in enumerate(objects_with_pieces):
            self._by_key.setdefault(piece.key, []).append(item)
            if piece.address:
                self._spans.append((piece.address, piece.address + piece.size_bytes, position))
        self._spans.sort()
        self._starts = list(map(itemgetter(0), self._spans))
        ends = map(itemgetter(1), self._spans)
        self._furthest = list(accumulate(ends, max))
        """The largest end of each span and those before it."""

    def on_memory_of(self, piece: MemoryPiece) -> list[object]:
        """Return the objects, not too many, whose memory overlaps with a piece or has its key."""
        sharers = self._by_key.get(piece.key, [])[:_MOST_PARTNERS]
        if not piece.address:
            return sharers
        # The spans that begin before the piece ends, from the last one back, until no earlier one
        # reaches into the piece.
        end_of_piece = piece.address + piece.size_bytes
        spans_before_end = bisect_left(self._starts, end_of_piece)
        for number in reversed(range(spans_before_end)):
            if len(sharers) >= _MOST_PARTNERS:
                break
            if self._furthest[number] <= piece.address:
                break
            _, end, position = self._spans[number]
            if end > piece.address:
                sharers.append(self._objects[position])
        return sharers
