"""Adds the bytes of objects, and the memory behind them, to a graph: each byte of host memory once.

A tensor, an array and a column of polars may show the same bytes, which addresses tell.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ipygpumem.heap.bulk import instances_among, of_types, types_of, without_objects
from ipygpumem.heap.kinds.arrays import (
    STRING_KIND,
    bases_of,
    is_array,
    is_of_library,
    library_type,
    map_bytes,
    memory_of,
    object_key,
    owner_of,
    plain_arrays,
    read_array,
    span_of,
    storage_key,
)
from ipygpumem.heap.kinds.libraries import (
    UNREAD,
    MemoryPiece,
    PieceKey,
    read_behind,
    spans_of_buffers,
    texts_of_numpy,
)
from ipygpumem.heap.kinds.mapped import MappedFiles
from ipygpumem.heap.kinds.tensors import PlainTensors, Reader, TensorMemory, each
from ipygpumem.heap.knowledge.own_bytes import of_storages, of_tensors
from ipygpumem.heap.knowledge.sorted_types import SortedTypes
from ipygpumem.heap.sizes.graph import Graph, GraphReading, NodeKey, NodeSpan, SmallPieces, Spans
from ipygpumem.introspect import is_atom

_COMPARED_BYTES = 1 << 16
"""Smallest size of host memory that is compared by address, because a tensor and an array may share
it.
"""


class MemoryReader:
    """Adds memory to a graph.

    Args:
        graph: the graph.
        types: the types of its objects.
        keeps_arrays: fill ``graph.arrays``.

    Attributes:
        reading: receives the pieces that are added.
    """

    def __init__(self, graph: Graph, types: SortedTypes, *, keeps_arrays: bool) -> None:
        self.reading = GraphReading()
        self._graph = graph
        self._types = types
        self._keeps_arrays = keeps_arrays
        self._spans = Spans()
        self._small_pieces = SmallPieces()
        """Small memory of libraries that is part of no large memory so far."""
        self._files = MappedFiles()
        self._excluded: list[object] = []
        """Arrays whose data is not counted; another reference to each, so that it becomes a node.
        """
        self._small_excluded: set[int] = set()
        """The small NumPy arrays among them, by identity."""

    def add(self, pieces: Sequence[MemoryPiece]) -> None:
        """Add pieces of a library's memory to which no object leads yet."""
        self._add_pieces(pieces, {})

    def exclude_data(self, arrays: Iterable[Any]) -> None:
        """Do not count the data of some tensors and arrays; other objects to which they lead, as by
        attributes, count when they are read.
        """
        arrays = list(arrays)
        self._excluded += arrays
        plain = plain_arrays(arrays)
        tensor_type = library_type("torch", "Tensor")
        tensors = list[Any]()
        if tensor_type is not None:
            tensors = instances_among(arrays, tensor_type)
            self._exclude_tensors(tensors)
        for array in without_objects(tensors, arrays):
            if id(array) in plain and _is_small(array):
                self._small_excluded.add(id(array))
            else:
                self._exclude_array(array)

    def _exclude_array(self, array: Any) -> None:
        """Do not count the data of an array: texts, a memory map, and the memory itself.

        Large memory is excluded by its addresses, so that other objects that show it do not count
        it either. Small memory is subtracted from the array's own bytes (``join_by_address``).
        """
        self._exclude_pieces(_keys_of_texts(array))
        owner = owner_of(array)
        if not is_array(owner):  # a tensor's memory
            owner = array
        if read_array("nbytes", owner) < _COMPARED_BYTES:
            self._small_excluded.add(id(array))
            return
        self._excluded += bases_of(array)
        self._exclude_pieces(_keys_of_maps(array))
        _, start, end = span_of(owner)
        self._spans.claim(start, end, owner=None)

    def _exclude_tensors(self, tensors: Sequence[Any]) -> None:
        """Do not count the storages of some tensors."""
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            plain, unusual = Reader(torch).plain(tensors)
        self._exclude_pieces(("torch", key) for key in plain.keys)
        for tensor in unusual:
            self._exclude_pieces(_keys_of_storages(tensor))

    def _exclude_pieces(self, keys: Iterable[PieceKey]) -> None:
        """Do not count the pieces with these keys: add them to the graph without bytes."""
        for key in keys:
            self._graph.pieces.setdefault(key, MemoryPiece(key, size_bytes=0))

    def measure(
        self, items: Sequence[Any], type_ids: set[int], key: int, edges: dict[NodeKey, None]
    ) -> tuple[Counter[str], list[object]]:
        """Measure the objects of a node, and add the memory behind them to the graph.

        Args:
            items: the objects.
            type_ids: at least the identities of their types.
            key: the node to which they belong.
            edges: the edges of this node; receives the edges to the memory behind the objects.

        Returns:
            The bytes of the objects themselves by device, and further objects, to which only
            libraries refer.
        """
        types = self._types
        size = Counter(cpu=types.own_bytes.of(items, type_ids))
        if self._keeps_arrays:
            arrays = of_types(types.tensors | types.arrays, items)
            self._graph.arrays.setdefault(key, []).extend(arrays)
        if not types.tensors.isdisjoint(type_ids):
            tensors = of_types(types.tensors, items)
            is_node = len(items) == 1 and id(items[0]) == key  # else folded into another node
            size.update(self._bytes_of_tensors(tensors, edges if is_node else None))
        if not types.arrays.isdisjoint(type_ids):
            for array in of_types(types.arrays, items):
                self._add_pieces(self._pieces_shown_by(array), edges)
        of_libraries = list[object]()
        if not types.own_bytes.readers.keys().isdisjoint(type_ids):
            of_libraries = self._add_behind_library_objects(items, edges)
        return size, of_libraries

    def keep_arrays(self, owners: Sequence[int], items: Sequence[Any]) -> None:
        """Fill ``graph.arrays`` with the tensors and NumPy arrays among some objects.

        Args:
            owners: the node that owns each object.
            items: the objects.
        """
        kinds = self._types.arrays | self._types.tensors
        if not self._keeps_arrays or kinds.isdisjoint(types_of(items)):
            return
        for owner, item in zip(owners, items, strict=True):
            if id(type(item)) in kinds:
                self._graph.arrays.setdefault(owner, []).append(item)

    def _add_behind_library_objects(
        self, items: Sequence[object], edges: dict[NodeKey, None]
    ) -> list[object]:
        """Add the memory that libraries keep behind objects; return further objects, to which only
        these libraries refer.
        """
        readers = self._types.own_bytes.readers
        of_libraries = list[object]()
        for item in of_types(readers, items):
            library_memory = read_behind(item, readers[id(type(item))])
            self._add_pieces(library_memory.pieces, edges)
            of_libraries += library_memory.objects
            if not library_memory.is_complete:
                self._graph.notes[UNREAD] = None
        return of_libraries

    def add_of_storage(self, storage: Any, edges: dict[NodeKey, None]) -> None:
        """Add the memory behind torch's Python object of a storage, and the edge to it."""
        read = self._types.own_bytes.readers[id(type(storage))]
        self._add_pieces(read_behind(storage, read).pieces, edges)

    def join_by_address(self) -> None:
        """Count host memory once that nodes of the reading show together with each other, or with
        older nodes: that of ``rows`` and of the tensor ``torch.from_numpy(rows)``.

        Arrays and buffers come first, then the pieces of libraries. A library that shows an array's
        memory has a reference to the array that no Python object contains. A small piece may be
        part of a large block that it keeps alive, such as ``frame.head()`` in polars.
        """
        added = self.reading.added
        for start, end, key in self._large_spans(added):
            for overlap in self._spans.claim(start, end, key):
                self._count_once(key, overlap.owner, overlap.size_bytes)
            for piece_key, size_bytes in self._small_pieces.taken(start, end):
                self._count_once(piece_key, key, size_bytes)
        for start, end, key in self._spans_of_small_pieces(added):
            overlaps = self._spans.overlaps(start, end)
            for overlap in overlaps:
                self._count_once(key, overlap.owner, overlap.size_bytes)
            if not overlaps:
                self._small_pieces.add(start, end, key)
        for key in self._small_excluded.intersection(added):
            array = self._graph.objects[key]
            self._graph.cpu_bytes[key] -= read_array("nbytes", array)

    def _bytes_of_tensors(
        self, tensors: Sequence[Any], edges: dict[NodeKey, None] | None
    ) -> Counter[str]:
        """Return the bytes of tensors by device: of torch's C++ objects, and of their storages if
        these are folded, too.

        Args:
            tensors: one that is a node, or several that are folded into a node.
            edges: receives the edges to the storages, which become nodes; None if the storages are
                folded, too.
        """
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            reader = Reader(torch)
            size = Counter(cpu=of_tensors(reader, tensors))
            plain, unusual = reader.plain(tensors)
            if edges is None:
                size.update(of_storages(plain.sizes, plain.devices))
                return size
            self._add_pieces(self._pieces_of_plain(reader, plain), edges)
            for tensor in unusual:
                self._add_pieces(_pieces_of_unusual(reader, tensor), edges)
        return size

    def of_plain_tensors(self, tensors: Sequence[Any]) -> tuple[int, list[NodeKey]]:
        """Add the storages of tensors without graphs that are no views; return the bytes of torch's
        C++ object of each, and the node of each storage.
        """
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            reader = Reader(torch)
            each_bytes = of_tensors(reader, tensors) // len(tensors)  # all are alike
            plain, _ = reader.plain(tensors)
            pieces = self._pieces_of_plain(reader, plain)
        self._add_pieces(pieces, {})
        return each_bytes, [piece.key for piece in pieces]

    def _pieces_of_plain(self, reader: Reader, plain: PlainTensors) -> list[MemoryPiece]:
        """Return the storages of tensors; note those that another library has allocated."""
        addresses = each(sys.modules["torch"].UntypedStorage.data_ptr, plain.storages)
        columns = zip(plain.keys, plain.sizes, plain.devices, addresses, strict=True)
        pieces = [MemoryPiece(("torch", key), *column) for key, *column in columns]
        are_torchs = reader.resizable(plain.storages)
        for piece, is_torchs in zip(pieces, are_torchs, strict=True):
            if piece.device == "cpu" and not is_torchs:
                self._graph.of_other_libraries.add(piece.key)
        return pieces

    def _pieces_shown_by(self, array: Any) -> list[MemoryPiece]:
        """Return the memory that an array shows, as a piece, if nothing else counts it, because it
        belongs to an object of an unknown C library; else none.
        """
        owner = read_array("base", array)
        if owner is None or is_array(owner) or is_atom(owner):
            return []
        self._types.learn([owner])
        if id(type(owner)) not in self._types.leaves:  # it leads to objects that are counted
            return []
        _, start, end = span_of(array)
        return [MemoryPiece(("memory", id(owner)), end - start, address=start)]

    def _add_pieces(self, pieces: Sequence[MemoryPiece], edges: dict[NodeKey, None]) -> None:
        """Add pieces of memory to the graph, each piece once.

        Args:
            pieces: the pieces.
            edges: receives the edges to them, from the node that leads to them.
        """
        graph = self._graph
        bytes_of_storages: dict[tuple[int, str], Counter[str]] = {}
        """The bytes by device of a storage with this size on this device: many are alike."""
        for piece in pieces:
            edges[piece.key] = None
            if piece.key in graph.pieces:
                self.reading.revisited.add(piece.key)
                continue
            graph.pieces[piece.key] = piece
            self.reading.added.append(piece.key)
            size = piece.size_bytes
            note = piece.note
            if piece.address and size >= _COMPARED_BYTES:
                in_ram = self._files.in_ram(piece.address, size)
                if in_ram is not None:  # a mapped file, of which only these pages count
                    size, note = in_ram
            if note:
                graph.notes[note] = None
            if piece.key[0] != "torch":
                graph.add_bytes(piece.key, {piece.device: size})
                continue
            # A storage has a C++ object, too, and malloc rounds its size.
            size_and_device = size, piece.device
            if size_and_device not in bytes_of_storages:
                bytes_of_storages[size_and_device] = of_storages([size], [piece.device])
            graph.add_bytes(piece.key, bytes_of_storages[size_and_device])

    def _count_once(self, key: NodeKey, owner: NodeKey | None, size_bytes: int) -> None:
        """Subtract memory that was counted at another node, and add an edge from the piece to the
        node with which it shares memory.

        At least one of the two is a piece. Two objects do not change: each has a size of its own.

        Args:
            key: the node whose bytes are reduced.
            owner: the node at which the memory was counted; None if it is excluded.
            size_bytes: the bytes that both show.
        """
        if type(key) is int and type(owner) is int:
            return
        self._subtract_bytes(key, size_bytes)
        if owner is None:
            return
        piece, sharer = owner, key
        if type(key) is tuple:  # the key of a piece
            piece, sharer = key, owner
        is_added = self._lead_from_piece(piece, sharer)
        if is_added:
            self.reading.revisited.add(owner)

    def _subtract_bytes(self, key: NodeKey, size_bytes: int) -> None:
        """Subtract bytes from a node's RAM; a leaf, such as a long text, has none stored yet."""
        graph = self._graph
        counted_bytes = graph.cpu_bytes.get(key)
        if counted_bytes is None and type(key) is int:
            counted_bytes = self._types.own_bytes.of([graph.objects[key]])
        remaining_bytes = (counted_bytes or 0) - size_bytes
        graph.cpu_bytes[key] = max(0, remaining_bytes)

    def _lead_from_piece(self, piece: NodeKey, sharer: NodeKey) -> bool:
        """Add an edge from a piece to the object or piece with which it shares memory; return True
        if it is a further edge.
        """
        graph = self._graph
        if sharer in graph.edges.get(piece, ()):
            return False
        graph.lead(piece, [sharer])
        graph.of_other_libraries.discard(piece)
        if type(sharer) is int:
            graph.inside[sharer] += 1
        return True

    def _large_spans(self, nodes: Sequence[NodeKey]) -> list[NodeSpan]:
        """Return the addresses of the large host memory of nodes.

        Of memory that begins at the same address, the largest comes first, and objects before
        pieces.
        """
        objects = [self._graph.objects[key] for key in nodes if type(key) is int]
        spans = self._spans_of_arrays(objects)
        if library_type("numpy", "ndarray") is not None:
            for data, start, end in spans_of_buffers(objects, _COMPARED_BYTES):
                spans.append((start, end, id(data)))
        for piece in self._pieces_with_address(nodes):
            if piece.size_bytes >= _COMPARED_BYTES:
                spans.append((piece.address, piece.address + piece.size_bytes, piece.key))
        return sorted(spans, key=_order_of_span)

    def _spans_of_arrays(self, objects: Sequence[object]) -> list[NodeSpan]:
        """Return the addresses of each large array among the objects of nodes. A view stands for
        its array if the array is folded into it.
        """
        spans = list[NodeSpan]()
        for array in of_types(self._types.arrays, objects):
            owner = owner_of(array)
            is_folded = owner is not array and id(owner) not in self._graph.objects
            if is_array(owner) and (owner is array or is_folded) and _owns_large_memory(owner):
                _, start, end = span_of(owner)
                spans.append((start, end, id(array)))
        return spans

    def _spans_of_small_pieces(self, nodes: Sequence[NodeKey]) -> list[NodeSpan]:
        """Return the addresses of the small pieces of host memory among nodes."""
        spans = list[NodeSpan]()
        for piece in self._pieces_with_address(nodes):
            if 0 < piece.size_bytes < _COMPARED_BYTES:
                spans.append((piece.address, piece.address + piece.size_bytes, piece.key))
        return spans

    def _pieces_with_address(self, keys: Sequence[NodeKey]) -> Iterator[MemoryPiece]:
        """Yield the pieces of host memory among some nodes."""
        for key in keys:
            if type(key) is tuple:
                piece = self._graph.pieces.get(key)
                if piece is not None and piece.address:
                    yield piece


def _is_small(array: Any) -> bool:
    """Return True for an array that owns its small memory."""
    return read_array("base", array) is None and read_array("nbytes", array) < _COMPARED_BYTES


def _owns_large_memory(array: Any) -> bool:
    """Return True for an array that owns its large memory."""
    return read_array("base", array) is None and read_array("nbytes", array) >= _COMPARED_BYTES


def _order_of_span(span: NodeSpan) -> tuple[int, int, bool]:
    """Return the sort key of ``_large_spans``: by start, the largest first, and arrays before the
    pieces of libraries.
    """
    start, end, key = span
    is_piece = type(key) is tuple
    return start, -end, is_piece


def _pieces_of_unusual(reader: Reader, tensor: object) -> list[MemoryPiece]:
    """Return the memory of a sparse tensor or a wrapper, without that of tensors to which it
    refers.

    The tensors in a wrapper are Python objects to which it refers. Those in a sparse tensor are
    not, so their storages are pieces of it.
    """
    memory = _memory_of_unusual(reader, tensor)
    if memory is None or memory.device == "meta":
        return []
    device = memory.device
    return [MemoryPiece(("torch", key), size, device) for key, size in memory.storages.items()]


def _keys_of_storages(tensor: object) -> list[PieceKey]:
    """Return the keys of a tensor's storages: several of a sparse tensor."""
    key = storage_key(tensor)
    if key is not None:
        return [key]
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        return [piece.key for piece in _pieces_of_unusual(Reader(torch), tensor)]


def _keys_of_texts(array: Any) -> list[PieceKey]:
    """Return the key of the texts that an array's dtype keeps, if it keeps any."""
    dtype = read_array("dtype", array)
    if dtype.kind != STRING_KIND:
        return []
    return [piece.key for piece in read_behind(dtype, texts_of_numpy).pieces]


def _keys_of_maps(array: Any) -> list[PieceKey]:
    """Return the key of the memory map on which an array is, if the array shows nearly all of it:
    the map begins and ends with a page, the array need not.
    """
    mapped: Any = memory_of(array)
    if not is_of_library(mapped, "mmap", "mmap"):
        return []
    unshown_bytes = map_bytes(mapped) - read_array("nbytes", owner_of(array))
    if unshown_bytes >= _COMPARED_BYTES:
        return []
    return [object_key(mapped)]


def _memory_of_unusual(reader: Reader, tensor: object) -> TensorMemory | None:
    """Return the memory of a wrapper itself, or of all parts of a sparse tensor."""
    if reader.is_foreign(tensor):
        return reader.own(tensor)
    return reader.memory(tensor)
