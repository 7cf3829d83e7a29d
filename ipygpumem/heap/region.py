"""Reads everything that some objects lead to, as a graph, and knows what dies with each of them.

An object with one reference belongs to the object that refers to it, so it is *folded* into that one: most objects
are, in chunks whose loops run in C. What is left are the *nodes*: the roots, and the objects and pieces of memory with
several references. References are counted as CPython's garbage collector counts them: a node with more references than
those from inside is also held from outside. So it takes no search of the heap to know what dies with a name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import not_, or_
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    Reader,
    each,
    holding_objects,
    is_array,
    library_type,
    place_of,
    read_array,
    storage_key,
)
from ipygpumem.heap.bulk import (
    OBSERVERS,
    by_identity,
    chunks,
    held_once,
    kinds_of,
    of_types,
    one_of_each,
    without_types,
)
from ipygpumem.heap.knowledge.barriers import Barriers, is_left_out
from ipygpumem.heap.knowledge.own_bytes import OwnBytes, of_storages, of_tensors
from ipygpumem.heap.knowledge.references import COMMON_REFERENCES, ReferenceReader, References
from ipygpumem.heap.libraries import BUFFERS, Piece, pieces_behind
from ipygpumem.introspect import ATOMS, HAS_REFERENCES, is_atom

MOST_NODES = 20_000_000
"""Maximum number of objects, except numbers and text with one reference."""
_LARGEST_CONSTANT = 512
"""Maximum bytes of plain numbers and text that count as constants if many objects refer to them."""
_AT_ONCE, _FEW = 512, 8
"""Maximum number of nodes to read together, and the number from which they are; one by one, each takes 30 µs."""
_LARGE = 1 << 16
"""Smallest size in bytes of host memory that is compared by address, because a tensor and an array may share it."""

NodeKey = int | tuple[object, ...]
"""Identity of an object, or the key of a piece of memory."""


class Region:
    """All that ``roots`` lead to, without what is behind barriers; it keeps the nodes alive.

    Known limit: references that a C library holds without telling the collector count as references from outside.

    Attributes:
        objects: the nodes that are objects, by identity.
        pieces: the nodes that are memory of a library.
        folded: the folded objects that may lead to more, with ``keeps_folded``.
        complete: False if there were too many objects, or graphs with too many nodes.

    Raises:
        AllowanceError: the allowance is spent.

    >>> rows = [bytes(1_000_000), bytes(1_000_000)]
    >>> region = Region([rows])
    >>> region.bytes_of({id(rows)})["cpu"] > 2_000_000
    True
    """

    def __init__(
        self,
        roots: Sequence[object],
        allowance: Allowance | None = None,
        *,
        namespaces: Iterable[int] = (),
        keeps_folded: bool = False,
        keeps_arrays: bool = False,
        progress: Callable[[], object] = bool,
    ) -> None:
        self.objects: dict[int, Any] = {}
        self.pieces: dict[tuple[object, ...], Piece] = {}
        self.folded: list[object] = []
        self.complete = True
        self._keeps_folded = keeps_folded
        self._arrays: dict[NodeKey, list[Any]] | None = {} if keeps_arrays else None
        """The tensors and arrays that are folded into each node or are that node, if they are wanted."""
        self._allowance = allowance
        self._progress = progress
        self._barriers = Barriers(namespaces)
        self._references = ReferenceReader(self._barriers)
        self._own_bytes = OwnBytes()
        self._once = held_once()
        self._bytes: dict[NodeKey, Counter[str]] = {}
        """Bytes by device of each node with the objects folded into it; without leaves."""
        self._simple: set[int] = set()
        """The nodes that lead to no other node, and whose bytes are read when they are asked for."""
        self._edges: dict[NodeKey, dict[NodeKey, None]] = {}
        """The nodes to which each node leads; without leaves."""
        self._inside: Counter[int] = Counter()
        """Number of references from inside to each object."""
        self._inside_torch: Counter[int] = Counter()
        """Number of references from torch's C++ code inside to each tensor."""
        self._of_other_libraries: set[NodeKey] = set()
        """Pieces of torch's storages that another library has allocated, and whose owner is not inside."""
        self._has_graphs = False
        """True if there are nodes of autograd graphs, whose references cannot be counted."""
        self._waking: list[tuple[int, int]] = []
        """A node and the identity of a task that a future in this node wakes, for each such future."""
        self._tensor_types: set[int] = set()
        self._array_types: set[int] = set()
        self._segment_types: set[int] = set()
        """Types of shared memory, which stays alive without its object."""
        self._leaf_types: set[int] = set(ATOMS)
        """Types of objects that lead to nothing."""
        self._seen_types: set[int] = set()
        self._visited = 0
        self._read(roots)
        self.complete &= not self._references.is_full
        del self._references  # its nodes of graphs would count as references
        self._join_by_address()
        for key, task in self._waking:
            if task in self.objects:  # a future leads to no task but one to which something else leads, too
                self._inside[task] += 1
                self._edges[key][task] = None

    # -- questions ------------------------------------------------------------------------------------------------

    def held_from_outside(self, ours: Mapping[int, int]) -> set[int]:
        """Return the identities of the objects that something outside refers to.

        Args:
            ours: number of references that the caller holds or that do not count, by an object's identity.
        """
        probe = object()
        self.objects[id(probe)] = probe
        del probe
        counts = dict(zip(self.objects, map(sys.getrefcount, self.objects.values()), strict=True))
        self.objects.popitem()
        _, usual = counts.popitem()  # the references that each object has at this moment
        beyond: dict[int, int] = {}
        for key, number in counts.items():
            beyond[key] = number - usual - self._inside.get(key, 0) - ours.get(key, 0)
        self._add_references_in_torch(beyond)
        return {key for key, number in beyond.items() if number > 0}

    def in_hidden_cycles(self) -> set[int]:
        """Return the arrays of objects that lead to themselves.

        The garbage collector does not look into an array, so it never frees such a cycle.
        """
        arrays = of_types(self._array_types, list(self.objects.values()))
        with_objects = list(compress(arrays, holding_objects(arrays)))
        return {id(array) for array in with_objects if id(array) in self.reach(self._edges.get(id(array), ()))}

    def reach(self, keys: Iterable[NodeKey], without: Collection[NodeKey] = ()) -> set[NodeKey]:
        """Return some nodes and all nodes to which they lead, except those ``without`` and what only these lead to."""
        waiting = [key for key in keys if key not in without]
        found = set(waiting)
        while waiting:
            following = self._edges.get(waiting.pop(), {})
            new = [key for key in following if key not in found and key not in without]
            found.update(new)
            waiting += new
        return found

    def bytes_of(self, keys: Iterable[NodeKey]) -> Counter[str]:
        """Return the bytes by device of some nodes with the objects that are folded into them."""
        found = Counter[str]()
        leaves, simple = list[Any](), list[Any]()
        for key in keys:
            known = self._bytes.get(key)
            if known is not None:
                found.update(known)
            elif type(key) is int and key in self._simple:
                simple.append(self.objects[key])
            elif key in self.objects:
                leaves.append(self.objects[key])
        found["cpu"] += sum(map(self._own_bytes.of, chunks(leaves))) + self._bytes_of_simple(simple)
        return +found

    def freed_by(self, groups: Sequence[int], ours: Mapping[int, int]) -> list[Counter[str]]:
        """Return the bytes by device that die with each of some roots.

        One label on each node is enough, because roots do not dominate each other: a node that two roots lead to dies
        with neither.

        Args:
            groups: the identities of the roots.
            ours: as in ``held_from_outside``.
        """
        shared = self.reach(self.held_from_outside(ours) | self.in_hidden_cycles())
        labels: dict[NodeKey, int] = {}
        met_twice = list[NodeKey]()
        for label, root in enumerate(groups):
            if root in labels:
                met_twice.append(root)
            waiting: list[NodeKey] = [] if root in shared or root in labels else [root]
            labels.update(dict.fromkeys(waiting, label))
            while waiting:
                for key in self._edges.get(waiting.pop(), {}):
                    if key in shared or labels.get(key) == label:
                        continue
                    if key in labels:
                        met_twice.append(key)
                    else:
                        labels[key] = label
                        waiting.append(key)
        for key in self.reach(met_twice):
            labels.pop(key, None)
        by_label: list[list[NodeKey]] = [[] for _ in groups]
        for key, label in labels.items():
            by_label[label].append(key)
        return list(map(self.bytes_of, by_label))

    def arrays_of(self, keys: Collection[NodeKey]) -> list[Any]:
        """Return the tensors and arrays in some nodes; needs ``keeps_arrays``."""
        found = list[Any]()
        for key, arrays in (self._arrays or {}).items():
            if key in keys:
                found += arrays
        return found

    def tensors(self, keys: Collection[NodeKey] | None = None) -> list[Any]:
        """Return the tensors among the nodes, all or those with some identities."""
        found = of_types(self._tensor_types, list(self.objects.values()))
        return found if keys is None else [tensor for tensor in found if id(tensor) in keys]

    def node_of(self, piece: Piece, otherwise: int) -> NodeKey:
        """Return the node of some memory: a piece, or the array or bytes that own it."""
        if piece.key in self.pieces:
            return piece.key
        key = piece.key[1] if len(piece.key) == 2 else None
        return key if type(key) is int and key in self.objects else otherwise

    @property
    def may_share(self) -> bool:
        """True if objects from outside may show some of its memory without a reference that can be counted."""
        libraries = {piece.key[0] for piece in self.pieces.values()}
        counts_tensors = hasattr(getattr(sys.modules.get("torch"), "_C", None), "_storage_Use_Count")
        known = {"torch", "object"} if counts_tensors else {"object"}
        is_foreign = bool(libraries - known or self._of_other_libraries or self._has_graphs)
        return is_foreign or bool(of_types(self._segment_types, list(self.objects.values())))

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, roots: Sequence[object]) -> None:
        self.objects.update(by_identity(roots))
        waiting: list[Any] = [item for item in self.objects.values() if not is_left_out(item)]
        self._barriers.open(waiting)
        self._learn(waiting)
        while waiting:
            if self._visited > MOST_NODES:
                self.complete = False
                return
            part = waiting[-_AT_ONCE:]
            del waiting[-_AT_ONCE:]
            self._read_nodes(part, waiting)

    def _read_nodes(self, nodes: list[Any], waiting: list[Any]) -> None:
        """Read some nodes: together if none leads to another node, as the rows of two lists that share them."""
        if len(nodes) < _FEW:
            for node in nodes:
                self._visited += 1
                self._fold(node, waiting)
        elif self._are_simple(nodes):
            self._visited += len(nodes)
            self._simple.update(map(id, nodes))
        else:
            for part in chunks(nodes, max(1, len(nodes) // _FEW)):
                self._read_nodes(list(part), waiting)

    def _are_simple(self, nodes: list[Any]) -> bool:
        """Return True if some nodes refer to nothing but constants, and numbers and text of their own."""
        self._look_around()
        type_ids = self._learn(nodes)
        special = self._tensor_types | self._array_types | self._own_bytes.readers.keys()
        if not special.isdisjoint(type_ids):
            return False
        references = self._references.of(nodes, type_ids)
        if references.waking:
            return False
        for below in chunks(references.of_python):
            singles, shared = self._divided(below, self._learn(below))
            if shared or not self._learn(singles) <= self._leaf_types:
                return False
        return True

    def _bytes_of_simple(self, nodes: Sequence[Any]) -> int:
        """Return the bytes of nodes for which ``_are_simple`` is true, with their numbers and text."""
        references = ReferenceReader(self._barriers)
        size = 0
        for part in chunks(nodes):
            size += self._own_bytes.of(part)
            for below in chunks(references.of(part).of_python):
                singles, _ = self._divided(below, self._learn(below))
                size += self._own_bytes.of(singles)
        return size

    def _fold(self, node: Any, waiting: list[Any]) -> None:
        """Read a node and everything that only it leads to; add new nodes to ``waiting``."""
        key = id(node)
        size = self._bytes[key] = Counter[str]()
        edges = self._edges[key] = {}
        todo: list[tuple[Sequence[Any], set[int]]] = [([node], {id(type(node))})]
        while todo:
            part, type_ids = todo.pop()
            self._look_around()
            size.update(self._own(part, type_ids, key, edges))
            references = self._references.of(part, type_ids)
            self.complete &= references.is_complete
            self._waking += [(key, id(task)) for task in references.waking]
            for below in chunks(references.of_python):
                type_ids = self._learn(below)
                singles, shared = self._divided(below, type_ids)
                self._inside.update(map(id, shared))
                waiting += self._add_nodes(shared, edges)
                if not self._leaf_types.isdisjoint(type_ids):
                    leaves = of_types(self._leaf_types, singles)
                    size["cpu"] += self._own_bytes.of(leaves, type_ids & self._leaf_types)
                    singles = without_types(self._leaf_types, singles) if len(leaves) < len(singles) else ()
                if singles:
                    self._visited += len(singles)
                    todo.append((singles, type_ids - self._leaf_types))
                    if self._keeps_folded:
                        self.folded += singles
            if references.of_torch or references.of_graphs:
                waiting += self._add_references_of_torch(references)

    def _add_references_of_torch(self, references: References) -> list[Any]:
        """Add the edges of tensors and graphs; return the new tensors."""
        tensors = [tensor for _, tensor in references.of_torch]
        self._learn(tensors)
        self._inside_torch.update(map(id, tensors))
        for owner, node in references.of_graphs:
            self._edges.setdefault(owner, {})[node] = None
        for owner, tensor in references.of_torch:
            self._edges.setdefault(owner, {})[id(tensor)] = None
        self._has_graphs = self._has_graphs or bool(references.of_graphs)
        return self._add_nodes(tensors, {})

    def _own(self, items: Sequence[Any], type_ids: set[int], key: int, edges: dict[NodeKey, None]) -> Counter[str]:
        """Return the bytes of some objects of at most these types; add edges to the memory behind them."""
        size = Counter(cpu=self._own_bytes.of(items, type_ids))
        if self._arrays is not None:
            arrays = of_types(self._tensor_types | self._array_types, items)
            self._arrays.setdefault(key, []).extend(arrays)
        if not self._tensor_types.isdisjoint(type_ids):
            tensors = of_types(self._tensor_types, items)
            is_node = len(items) == 1 and id(items[0]) == key
            size.update(self._own_of_tensors(tensors, edges if is_node else None))
        if not self._array_types.isdisjoint(type_ids):
            for array in of_types(self._array_types, items):
                self._add_pieces(self._foreign_memory(array), edges)
        if not self._own_bytes.readers.keys().isdisjoint(type_ids):
            for item in of_types(self._own_bytes.readers, items):
                self._add_pieces(pieces_behind(item), edges)
        return size

    def _own_of_tensors(self, tensors: Sequence[Any], edges: dict[NodeKey, None] | None) -> Counter[str]:
        """Return the bytes of tensors; of a tensor that is a node, the storage is a node, to which ``edges`` lead."""
        with sys.modules["torch"]._C.DisableTorchFunction():
            reader = Reader(sys.modules["torch"])
            size = Counter(cpu=of_tensors(reader, tensors))
            plain, unusual = reader.plain(tensors)
            if edges is None:
                size.update(of_storages(plain.sizes, plain.devices))
                return size
            addresses = each(sys.modules["torch"].UntypedStorage.data_ptr, plain.storages)
            columns = zip(plain.keys, plain.sizes, plain.devices, addresses, strict=True)
            pieces = [Piece(("torch", key), *column) for key, *column in columns]
            self._add_pieces(pieces, edges)
            for piece, is_own in zip(pieces, reader.resizable(plain.storages), strict=True):
                if piece.device == "cpu" and not is_own:
                    self._of_other_libraries.add(piece.key)
            for tensor in unusual:
                memory = reader.memory(tensor)
                if memory.device != "meta":
                    parts = memory.storages.items()
                    self._add_pieces([Piece(("torch", key), bytes_, memory.device) for key, bytes_ in parts], edges)
        return size

    def _foreign_memory(self, array: Any) -> list[Piece]:
        """Return the memory that an array shows, if it belongs to an object of which nothing else is known."""
        owner = read_array("base", array)
        if owner is None or is_array(owner) or is_atom(owner):
            return []
        self._learn([owner])
        if id(type(owner)) not in self._leaf_types:
            return []
        _, start, end = place_of(array)
        return [Piece(("memory", id(owner)), end - start, address=start)]

    def _add_pieces(self, pieces: Sequence[Piece], edges: dict[NodeKey, None]) -> None:
        for piece in pieces:
            edges[piece.key] = None
            if piece.key not in self.pieces:
                self.pieces[piece.key] = piece
                self._edges[piece.key] = {}
                if piece.key[0] == "torch":
                    self._bytes[piece.key] = of_storages([piece.size_bytes], [piece.device])
                else:
                    self._bytes[piece.key] = Counter({piece.device: piece.size_bytes})

    def _join_by_address(self) -> None:
        """Count host memory once that several nodes show: arrays and buffers first, then the pieces of libraries.

        A library that shows an array's memory has a reference to the array that no Python object contains.
        """
        owner: NodeKey | None = None
        owner_end = 0
        for start, end, key in self._spans():
            if owner is not None and start < owner_end and type(key) is tuple:
                overlap = min(end, owner_end) - start
                self._bytes[key] = Counter(cpu=max(0, self._bytes[key]["cpu"] - overlap))
                self._edges[key][owner] = None
                self._of_other_libraries.discard(key)
                if type(owner) is int:
                    self._inside[owner] += 1
            if end > owner_end:
                owner, owner_end = key, end

    def _spans(self) -> list[tuple[int, int, NodeKey]]:
        """Return the start and end of large host memory, with its node; none if no library may show it.

        Of memory that begins at the same address, the largest comes first, and objects before pieces.
        """
        pieces = [piece for piece in self.pieces.values() if piece.address and piece.size_bytes >= _LARGE]
        spans: list[tuple[int, int, NodeKey]] = []
        if not pieces:
            return spans
        objects = list(self.objects.values())
        for array in of_types(self._array_types, objects):
            if read_array("base", array) is None and read_array("nbytes", array) >= _LARGE:
                _, start, end = place_of(array)
                spans.append((start, end, id(array)))
        numpy: Any = sys.modules.get("numpy")
        for data in of_types(BUFFERS, objects) if numpy is not None else ():
            if sys.getsizeof(data) >= _LARGE:
                _, start, end = place_of(numpy.frombuffer(data, "u1"))
                spans.append((start, end, id(data)))
        spans += [(piece.address, piece.address + piece.size_bytes, piece.key) for piece in pieces]
        return sorted(spans, key=lambda span: (span[0], -span[1], type(span[2]) is tuple))

    def _divided(self, items: Sequence[Any], type_ids: set[int]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the items with one reference, and those with several that are no constants.

        Shared memory, arrays of objects, and tensors to which torch's C++ code may refer count as those with several.
        """
        counts = list(map(sys.getrefcount, items))
        is_single = list(map(self._once.__ge__, counts))
        singles: Sequence[Any] = items
        shared: Sequence[Any] = ()
        if not all(is_single):
            singles = list(compress(items, is_single))
            shared = list(compress(items, map(not_, is_single)))
            if max(counts) >= COMMON_REFERENCES:
                common = of_types(ATOMS, list(compress(items, map(COMMON_REFERENCES.__le__, counts))))
                constants = {id(item) for item in common if sys.getsizeof(item) <= _LARGEST_CONSTANT}
                shared = list(compress(shared, map(not_, map(constants.__contains__, map(id, shared)))))
        apart = list[Any]()
        if not self._tensor_types.isdisjoint(type_ids):
            apart += _known_to_torch(of_types(self._tensor_types, singles))
        if not self._segment_types.isdisjoint(type_ids):
            apart += of_types(self._segment_types, singles)
        if not self._array_types.isdisjoint(type_ids):
            arrays = of_types(self._array_types, singles)
            apart += compress(arrays, holding_objects(arrays))
        if apart:
            keys = set(map(id, apart))
            singles = [item for item in singles if id(item) not in keys]
            shared = [*shared, *apart]
        return singles, shared

    def _add_nodes(self, shared: Sequence[Any], edges: dict[NodeKey, None]) -> list[Any]:
        """Add edges to some objects; return the new ones that may lead to more."""
        by_key = by_identity(shared)
        edges.update(dict.fromkeys(by_key))
        new = {key: item for key, item in by_key.items() if key not in self.objects}
        self.objects.update(new)
        return list(without_types(self._leaf_types, list(new.values())))

    def _learn(self, items: Sequence[object]) -> set[int]:
        """Return the identities of the items' types, after sorting new ones into leaves, tensors and arrays."""
        type_ids = self._own_bytes.learn(items)
        if type_ids <= self._seen_types:
            return type_ids
        self._seen_types |= type_ids
        tensor, array = library_type("torch", "Tensor"), library_type("numpy", "ndarray")
        if tensor is not None:
            self._tensor_types |= kinds_of(items, tensor)
        if array is not None:
            self._array_types |= kinds_of(items, array)
        segment = library_type("multiprocessing.shared_memory", "SharedMemory")
        if segment is not None:
            self._segment_types |= kinds_of(items, segment)
        leading = self._tensor_types | self._array_types | self._own_bytes.readers.keys()
        for type_id, example in one_of_each(items).items():
            may_refer = type.__dict__["__flags__"].__get__(type(example)) & HAS_REFERENCES
            if not may_refer and type_id not in leading:
                self._leaf_types.add(type_id)
        return type_ids

    def _add_references_in_torch(self, beyond: dict[int, int]) -> None:
        """Correct the references from outside for those in torch's C++ code, which Python's counts do not show."""
        tensors = self.tensors()
        if not tensors:
            return
        torch: Any = sys.modules["torch"]
        count: Any = getattr(torch.Tensor, "_use_count", None)  # neither is in every torch
        count_of_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
        with torch._C.DisableTorchFunction():
            one = torch.empty(0, device="meta")
            alone = sys.getrefcount(one)
            view = one[:]
            shows_one = sys.getrefcount(one) - alone  # from torch 2.10 on, the object has one for all of C++
            del view
            storage = torch.Tensor.untyped_storage(one)
            unnamed = sys.getrefcount(storage)
            for tensor in tensors if count is not None else ():
                in_torch = count(tensor) - 1
                if in_torch:
                    beyond[id(tensor)] -= shows_one
                beyond[id(tensor)] += max(0, in_torch - self._inside_torch.get(id(tensor), 0))
            by_storage: dict[Any, list[Any]] = {}
            for tensor in tensors if count_of_storage is not None else ():
                by_storage.setdefault(storage_key(tensor), []).append(tensor)
            by_storage.pop(None, None)
            for same in by_storage.values():
                storage = torch.Tensor.untyped_storage(same[0])
                has_name = id(storage) not in self.objects and sys.getrefcount(storage) > unnamed
                if has_name or count_of_storage(storage._cdata) > len(same) + 1:
                    beyond[id(same[0])] = 1

    def _look_around(self) -> None:
        for observe in OBSERVERS:
            observe()
        if self._allowance is not None:
            self._allowance.check()
        self._progress()


def _known_to_torch(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that torch's C++ code refers to, or may refer to, and those that share a storage."""
    torch: Any = sys.modules["torch"]
    count: Any = getattr(torch.Tensor, "_use_count", None)  # neither is in every torch
    count_of_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or count_of_storage is None:
        return list(tensors)
    with torch._C.DisableTorchFunction():
        reader = Reader(torch)
        plain, unusual = reader.plain(tensors)
        requires_grad = each(reader.base.requires_grad.__get__, plain.tensors)
        uses = each(count, plain.tensors)
        storage_uses = each(count_of_storage, plain.keys)
        # Storages on accelerators always belong to torch.
        is_own = map(or_, map("cpu".__ne__, plain.devices), reader.resizable(plain.storages))
        columns = zip(map(bool, requires_grad), uses, storage_uses, is_own, strict=True)
        is_alone = list(map(_IS_ALONE.__eq__, columns))
    return [*unusual, *compress(plain.tensors, map(not_, is_alone))]


_IS_ALONE = (False, 1, 2, True)
"""A tensor that requires no gradient, and is used once; one use of its storage is ours, and torch allocated it."""
