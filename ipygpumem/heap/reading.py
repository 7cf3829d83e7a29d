"""Reads objects and everything that they lead to, and adds the nodes and edges to a graph.

Loops over objects run in C, in chunks: most objects have one reference, and are folded into the node that refers to
them. No user code runs.
"""

from __future__ import annotations

import gc
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import not_, or_
from types import FrameType, FunctionType, ModuleType
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
    slots,
    storage_key,
)
from ipygpumem.heap.bulk import (
    CHUNK,
    CONTAINERS,
    OBSERVERS,
    by_identity,
    chunks,
    container_base,
    held_once,
    kinds_of,
    of_types,
    one_of_each,
    parts_of_container,
    types_of,
    without_types,
)
from ipygpumem.heap.graph import Graph, NodeKey, Spans
from ipygpumem.heap.holders.tasks import BUILTIN
from ipygpumem.heap.knowledge.barriers import Barriers, without_left_out
from ipygpumem.heap.knowledge.own_bytes import OwnBytes, of_storages, of_tensors
from ipygpumem.heap.knowledge.references import COMMON_REFERENCES, ReferenceReader, References, has_own_keys
from ipygpumem.heap.libraries import BUFFERS, UNREAD, Piece, behind_object
from ipygpumem.heap.mapped import MappedFiles
from ipygpumem.introspect import ATOMS, HAS_REFERENCES, instance_dict, is_atom, is_instance

MOST_NODES = 20_000_000
"""Maximum number of objects, except numbers and text with one reference."""
_LARGEST_CONSTANT = 512
"""Maximum bytes of plain numbers and text that count as constants if many objects refer to them."""
_FEW = 8
"""Fewer nodes are read one by one, which takes 30 µs each; more are read together, which takes 2 µs an object."""
_LARGE = 1 << 16
"""Smallest size in bytes of host memory that is compared by address, because a tensor and an array may share it."""
_MOST_INSIDE = 100_000
"""Maximum number of references to list at once: the list takes memory."""
_MOST_IN_LINK = 100
"""Maximum number of items of a container that may be a link of a list."""
SAMPLED = "estimated from a sample of its items"
_PLAIN_CONTAINERS = set(map(id, CONTAINERS))
_LEADS_TO_ALL = (FunctionType, ModuleType, FrameType, type)


class Types:
    """Sorts types by how their objects are read; types are known by their identities.

    Attributes:
        tensors: types of torch tensors.
        arrays: types of NumPy arrays.
        segments: types of shared memory, which stays alive without its object.
        streams: types of ``BytesIO``.
        leaves: types of objects that lead to nothing.
        containers: the built-in container from which a type derives.
        own_bytes: knows the bytes of objects.
    """

    def __init__(self) -> None:
        self.own_bytes = OwnBytes()
        self.tensors: set[int] = set()
        self.arrays: set[int] = set()
        self.segments: set[int] = set()
        self.streams: set[int] = set()
        self.leaves: set[int] = set(ATOMS)
        self.containers: dict[int, Any] = {}
        self._known: set[int] = set()

    def learn(self, items: Sequence[object]) -> set[int]:
        """Return the identities of the items' types, after sorting the new ones."""
        type_ids = self.own_bytes.learn(items)
        if type_ids <= self._known:
            return type_ids
        self._known |= type_ids
        bases = (
            (self.tensors, library_type("torch", "Tensor")),
            (self.arrays, library_type("numpy", "ndarray")),
            (self.segments, library_type("multiprocessing.shared_memory", "SharedMemory")),
            (self.streams, io.BytesIO),
        )
        for known, base in bases:
            if base is not None:
                known |= kinds_of(items, base)
        for type_id, example in one_of_each(items).items():
            base = container_base(type(example))
            if base is not None:
                self.containers[type_id] = base
            may_refer = type.__dict__["__flags__"].__get__(type(example)) & HAS_REFERENCES
            if not may_refer and type_id not in self.apart and type_id not in self.own_bytes.readers:
                self.leaves.add(type_id)
        return type_ids

    @property
    def apart(self) -> set[int]:
        """The types of objects that may have other references than those that Python counts."""
        return self.tensors | self.arrays | self.segments


class GraphReader:
    """Adds objects to a graph.

    Args:
        graph: the graph.
        namespaces: identities of further dicts that are not entered, because they contain the user's names.
        allowance: limits the time and memory.
        most: maximum number of objects to read.
        sampled_from: number of items from which a container is read in part: an evenly spread sample stands for all.
        keeps_folded: fill ``graph.folded``.
        keeps_arrays: fill ``graph.arrays``.
        progress: called again and again.

    Attributes:
        complete: False if a limit was reached.
        new: the nodes that the last reading has added.
        met: nodes of earlier readings to which nodes of the last one refer, and some of the last one.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        namespaces: Iterable[int],
        allowance: Allowance | None,
        most: int,
        sampled_from: int,
        keeps_folded: bool,
        keeps_arrays: bool,
        progress: Callable[[], object],
    ) -> None:
        self.allowance = allowance
        self.complete = True
        self.new: list[NodeKey] = []
        self.met: set[NodeKey] = set()
        self.types = Types()
        self.barriers = Barriers(namespaces)
        self.spans = Spans()
        self._graph = graph
        self._most = most
        self._sampled_from = sampled_from
        self._keeps_folded = keeps_folded
        self._keeps_arrays = keeps_arrays
        self._progress = progress
        self._references = ReferenceReader(self.barriers)
        self._files = MappedFiles()
        self._once = held_once()
        self._visited = 0
        self._unread: dict[int, Any] = {}
        """Nodes that an interrupted reading has not read."""
        self._with_items_read: set[int] = set()
        """Containers whose items have been read before them, by identity."""
        self._left_out: list[object] = []
        """Arrays whose data is not counted; another reference to each, so that it becomes a node."""
        self._small_left_out: set[int] = set()
        """The small NumPy arrays among them, by identity."""

    def read(self, roots: Sequence[object]) -> list[NodeKey]:
        """Add objects and everything that they lead to; return the new nodes.

        Raises:
            AllowanceError: the allowance is spent. The nodes so far stay in the graph.
        """
        graph = self._graph
        self.new, self.met = [], set()
        waiting = []
        for key, item in by_identity(roots).items():
            if key in self.barriers.passed_over:
                continue
            if key not in graph.objects:
                graph.objects[key] = item
                self.new.append(key)
                waiting.append(item)
            elif key in self._unread:
                self.new.append(key)
                waiting.append(self._unread.pop(key))
        self.types.learn(waiting)
        waiting = list(without_left_out(without_types(self.types.leaves, waiting)))
        self.barriers.open(waiting)
        self._read(waiting)
        return self.new

    def read_items(self, container: object, items: Sequence[Any]) -> list[NodeKey]:
        """Add items of a reserved container before the container itself is read; return the new nodes.

        What only the container refers to is folded into it.

        Raises:
            AllowanceError: the allowance is spent.
        """
        key = id(container)
        self.new, self.met = [], set()
        waiting = list[Any]()
        self._with_items_read.add(key)
        for part in chunks(self.barriers.entered(items)):
            singles, shared = self._divided(part, self.types.learn(part))
            self._graph.inside.update(map(id, shared))
            self._graph.lead(key, map(id, shared))
            waiting += self._add_nodes(shared)
            self._fold(key, singles, waiting)
        self._read(waiting)
        return self.new

    def reserve(self, objects: Sequence[object]) -> None:
        """Add objects as nodes that no reading enters before they are released."""
        self._graph.objects.update(by_identity(objects))

    def release(self, objects: Sequence[object]) -> None:
        """Let readings enter reserved objects."""
        self._unread.update(by_identity(objects))

    def owned(self, objects: Sequence[Any]) -> list[Any]:
        """Return the objects that belong to an object that refers to them: no constants, and not behind barriers."""
        entered = self.barriers.entered(objects)
        constants = _constants(entered, list(map(sys.getrefcount, entered)))
        return [item for item in entered if id(item) not in constants]

    def leave_out(self, arrays: Iterable[Any]) -> None:
        """Do not count the data of some tensors and arrays; what else they lead to counts when it is read."""
        for array in arrays:
            self._left_out.append(array)
            if not is_array(array):
                key = storage_key(array)
                if key is not None:
                    self._graph.pieces.setdefault(key, Piece(key, 0))
            elif read_array("nbytes", array) >= _LARGE:
                _, start, end = place_of(array)
                self.spans.claim(start, end, None)
            else:
                self._small_left_out.add(id(array))

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _read(self, waiting: list[Any]) -> None:
        """Read nodes until none is waiting."""
        graph = self._graph
        tasks_known = len(graph.waking)
        try:
            self._read_all(waiting)
        finally:
            self._unread.update(by_identity(waiting))
            self.complete &= not self._references.is_full
            self._references = ReferenceReader(self.barriers)  # its nodes of graphs would count as references
            self._join_by_address()
            for key in self._small_left_out.intersection(self.new):
                graph.cpu_bytes[key] -= read_array("nbytes", graph.objects[key])
            for key, task in graph.waking[tasks_known:]:
                if task in graph.objects:  # a future leads to no task but one to which something else leads, too
                    graph.inside[task] += 1
                    graph.lead(key, [task])

    def _read_all(self, waiting: list[Any]) -> None:
        while waiting:
            if self._visited > self._most:
                self.complete = False
                return
            if len(waiting) < _FEW:
                node = waiting.pop()
                self._visited += 1
                self._fold(id(node), [node], waiting)
            else:
                nodes = waiting[-CHUNK:]
                del waiting[-CHUNK:]
                self._visited += len(nodes)
                self._read_together(nodes, waiting)

    def _fold(self, key: int, items: Sequence[Any], waiting: list[Any]) -> None:
        """Read objects that belong to a node, and everything that only they lead to; add new nodes to ``waiting``."""
        graph = self._graph
        size = Counter[str]()
        edges: dict[NodeKey, None] = {}
        linked = set[int]()
        todo: list[tuple[Sequence[Any], set[int], int]] = [(items, types_of(items), 1)]
        while todo:
            part, type_ids, times = todo.pop()
            self._look_around()
            if len(part) == 1:
                following = self._linked(part[0])
                linked.update(map(id, following))
                part = [*part, *following]
            for device, own in self._own(part, type_ids, key, edges, waiting).items():
                size[device] += own * times
            for references, stands_for in self._references_of(part, type_ids):
                times_below = times * stands_for
                self.complete &= references.is_complete
                graph.waking += [(key, id(task)) for task in references.waking]
                for below in chunks(references.of_python):
                    if linked:
                        below = [item for item in below if id(item) not in linked]
                    type_ids_below = self.types.learn(below)
                    singles, shared = self._divided(below, type_ids_below)
                    graph.inside.update(map(id, shared))
                    edges.update(dict.fromkeys(map(id, shared)))
                    waiting += self._add_nodes(shared)
                    if not self.types.leaves.isdisjoint(type_ids_below):
                        leaves = of_types(self.types.leaves, singles)
                        leaf_types = type_ids_below & self.types.leaves
                        size["cpu"] += self.types.own_bytes.of(leaves, leaf_types) * times_below
                        singles = without_types(self.types.leaves, singles) if len(leaves) < len(singles) else ()
                    if singles:
                        self._visited += len(singles)
                        todo.append((singles, type_ids_below - self.types.leaves, times_below))
                        if self._keeps_folded:
                            graph.folded += singles
                if references.of_torch or references.of_graphs:
                    waiting += self._add_references_of_torch(references)
            if self._visited > self._most:
                self.complete = False
                break
        graph.add_bytes(key, size)
        graph.lead(key, edges)

    def _linked(self, item: Any) -> list[Any]:
        """Return the next objects of a linked list to which only the list refers: one by one would take long."""
        kind = type(item)
        linked = list[Any]()
        base = self.types.containers.get(id(kind))
        is_long = base is not None and base.__len__(item) > _MOST_IN_LINK
        if is_long or any(is_instance(item, base) for base in _LEADS_TO_ALL):
            return linked
        while len(linked) < CHUNK:
            following = _of_same_kind(item, kind)
            if len(following) != 1 or sys.getrefcount(following[0]) > _ONCE_BY_INDEX:
                break
            item = following[0]
            linked.append(item)
        return linked

    def _references_of(self, part: Sequence[Any], type_ids: set[int]) -> Iterator[tuple[References, int]]:
        """Yield the references of objects, not too many at once, each with the number for which it stands."""
        if self.types.containers.keys().isdisjoint(type_ids):
            yield self._references.of(part, type_ids), 1
            return
        if len(part) == 1 and id(part[0]) in self._with_items_read:
            yield self._references_besides_items(part[0]), 1
            return
        if sum(self._lengths(part)) <= _MOST_INSIDE:
            yield self._references.of(part, type_ids), 1
        elif len(part) > 1:
            middle = len(part) // 2
            yield from self._references_of(part[:middle], type_ids)
            yield from self._references_of(part[middle:], type_ids)
        else:
            yield from self._references_of_long(part[0])

    def _lengths(self, items: Sequence[Any]) -> Sequence[int]:
        """Return the number of items of each container; those of plain ones in C, because there may be a million."""
        sized = of_types(self.types.containers, items)
        if types_of(sized) <= _PLAIN_CONTAINERS:
            return list(map(len, sized))
        return [self.types.containers[id(type(item))].__len__(item) for item in sized]

    def _references_of_long(self, container: Any) -> Iterator[tuple[References, int]]:
        """Yield the references of a long container in chunks; of a very long one, those of a sample."""
        base = self.types.containers[id(type(container))]
        stands_for = max(1, -(-base.__len__(container) // self._sampled_from))
        if stands_for > 1:
            self._graph.notes[SAMPLED] = None
        # ``map`` keeps no reference to a chunk, which would count as another reference to its items.
        for entered in map(self.barriers.entered, parts_of_container(container, base, CHUNK * stands_for)):
            self._look_around()
            yield References(entered, (), (), (), True), stands_for
        yield self._references_besides_items(container), 1

    def _references_besides_items(self, container: Any) -> References:
        """Return the references that an instance of a container's subclass has besides its items."""
        if id(type(container)) in _PLAIN_CONTAINERS:
            return References((), (), (), (), True)
        attributes = [instance_dict(container), *slots(container).values()]
        return References(self.barriers.entered(attributes), (), (), (), True)

    def _add_references_of_torch(self, references: References) -> list[Any]:
        """Add the edges of tensors and graphs; return the new tensors."""
        graph = self._graph
        tensors = [tensor for _, tensor in references.of_torch]
        self.types.learn(tensors)
        graph.inside_torch.update(map(id, tensors))
        for owner, node in references.of_graphs:
            graph.lead(owner, [node])
        for owner, tensor in references.of_torch:
            graph.lead(owner, [id(tensor)])
        graph.has_autograd = graph.has_autograd or bool(references.of_graphs)
        return self._add_nodes(tensors)

    def _add_nodes(self, shared: Sequence[Any]) -> list[Any]:
        """Add objects as nodes; return those that have to be read."""
        graph = self._graph
        by_key = by_identity(shared)
        known = by_key.keys() & graph.objects.keys()
        new = by_key if not known else {key: item for key, item in by_key.items() if key not in known}
        graph.objects.update(new)
        self.new += new
        self.met |= known
        waiting = list(without_types(self.types.leaves, list(new.values())))
        if self._unread:
            again = known & self._unread.keys()
            waiting += map(self._unread.pop, again)
            self.new += again
        return waiting

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
            constants = _constants(items, counts)
            shared = list(compress(items, map(not_, is_single)))
            if constants:
                shared = list(compress(shared, map(not_, map(constants.__contains__, map(id, shared)))))
        apart = list[Any]()
        if not self.types.tensors.isdisjoint(type_ids):
            apart += _known_to_torch(of_types(self.types.tensors, singles))
        if not self.types.segments.isdisjoint(type_ids):
            apart += of_types(self.types.segments, singles)
        if not self.types.arrays.isdisjoint(type_ids):
            arrays = of_types(self.types.arrays, singles)
            apart += compress(arrays, holding_objects(arrays))
        if apart:
            keys = set(map(id, apart))
            singles = [item for item in singles if id(item) not in keys]
            shared = [*shared, *apart]
        return singles, shared

    # -- many nodes at once ----------------------------------------------------------------------------------------

    def _read_together(self, nodes: Sequence[Any], waiting: list[Any]) -> None:
        """Read many nodes at once; add new nodes to ``waiting``."""
        graph = self._graph
        belonging = _Belonging(nodes)
        items, owners = nodes, list(map(id, nodes))
        while items:
            following: tuple[list[Any], list[int]] = [], []
            for part, part_owners in zip(chunks(items), chunks(owners), strict=True):
                self._look_around()
                self._read_level(part, part_owners, belonging, following, waiting)
            items, owners = following
            self._visited += len(items)
            if self._keeps_folded:
                graph.folded += items
        for key, size in belonging.sizes.items():
            graph.cpu_bytes[key] = graph.cpu_bytes.get(key, 0) + size
        for key, edges in belonging.edges.items():
            if key in graph.edges:  # some of it was folded
                graph.lead(key, edges)
            elif edges:
                graph.edges[key] = tuple(edges)

    def _read_level(
        self,
        items: Sequence[Any],
        owners: Sequence[int],
        belonging: _Belonging,
        following: tuple[list[Any], list[int]],
        waiting: list[Any],
    ) -> None:
        """Read the references of objects, each with the node that owns it; add what only they lead to to ``following``.

        Objects of special kinds, and those that refer to such, are read one by one.
        """
        special = self._special(items)
        if special:
            items, owners = self._without_special(items, owners, special, waiting)
        references = list(map(gc.get_referents, items))
        numbers = list(map(len, references))
        below = list(chain.from_iterable(references))
        del references  # they refer to the objects, too
        apart = self.types.apart
        if not apart.isdisjoint(self.types.learn(below)):
            positions = chain.from_iterable(map(repeat, range(len(items)), numbers))
            special = set(compress(positions, map(apart.__contains__, map(id, map(type, below)))))
            del below
            rest, rest_owners = self._without_special(items, owners, special, waiting)
            self._read_level(rest, rest_owners, belonging, following, waiting)
            return
        owners_below = list(chain.from_iterable(map(repeat, owners, numbers)))
        entered = set(map(id, self.barriers.entered(below)))
        if len(entered) < len(below):
            is_entered = list(map(entered.__contains__, map(id, below)))
            below, owners_below = list(compress(below, is_entered)), list(compress(owners_below, is_entered))
        belonging.add(owners, self.types.own_bytes.each(items))

        counts = list(map(sys.getrefcount, below))
        constants = _constants(below, counts)
        is_single = list(map(_ONCE_IN_LIST.__ge__, counts))
        is_leaf = list(map(self.types.leaves.__contains__, map(id, map(type, below))))
        leads_on = [single and not leaf for single, leaf in zip(is_single, is_leaf, strict=True)]
        is_own_leaf = [single and leaf for single, leaf in zip(is_single, is_leaf, strict=True)]
        is_shared = [not single and id(item) not in constants for single, item in zip(is_single, below, strict=True)]
        leaves = list(compress(below, is_own_leaf))
        belonging.add(list(compress(owners_below, is_own_leaf)), self.types.own_bytes.each(leaves))
        following[0].extend(compress(below, leads_on))
        following[1].extend(compress(owners_below, leads_on))
        shared = list(compress(below, is_shared))
        self._graph.inside.update(map(id, shared))
        belonging.lead(list(compress(owners_below, is_shared)), shared)
        waiting += self._add_nodes(shared)

    def _special(self, items: Sequence[Any]) -> set[int]:
        """Return the positions of the objects that have references or memory of which the collector does not know."""
        types = self.types
        type_ids = types.learn(items)
        kinds = (types.apart | types.own_bytes.readers.keys() | types.streams | BUILTIN) & type_ids
        special = set[int]()
        if kinds:
            special.update(compress(range(len(items)), map(kinds.__contains__, map(id, map(type, items)))))
        dicts = {type_id for type_id in type_ids if types.containers.get(type_id) is dict}
        if dicts and has_own_keys(of_types(dicts, items)):
            special.update(
                position for position, item in enumerate(items) if id(type(item)) in dicts and has_own_keys([item])
            )
        if not types.containers.keys().isdisjoint(type_ids):
            for position, item in enumerate(items):
                base = types.containers.get(id(type(item)))
                if base is not None and base.__len__(item) > CHUNK:
                    special.add(position)
        return special

    def _without_special(
        self, items: Sequence[Any], owners: Sequence[int], special: set[int], waiting: list[Any]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """Fold the objects at some positions into their nodes one by one; return the objects at the others."""
        rest, rest_owners = list[Any](), list[int]()
        for position, (item, owner) in enumerate(zip(items, owners, strict=True)):
            if position in special:
                self._fold(owner, [item], waiting)
            else:
                rest.append(item)
                rest_owners.append(owner)
        return rest, rest_owners

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _own(
        self, items: Sequence[Any], type_ids: set[int], key: int, edges: dict[NodeKey, None], waiting: list[Any]
    ) -> Counter[str]:
        """Return the bytes of objects of at most these types; add edges to the memory behind them."""
        types = self.types
        size = Counter(cpu=types.own_bytes.of(items, type_ids))
        if self._keeps_arrays:
            arrays = of_types(types.tensors | types.arrays, items)
            self._graph.arrays.setdefault(key, []).extend(arrays)
        if not types.tensors.isdisjoint(type_ids):
            tensors = of_types(types.tensors, items)
            is_node = len(items) == 1 and id(items[0]) == key
            size.update(self._own_of_tensors(tensors, edges if is_node else None))
        if not types.arrays.isdisjoint(type_ids):
            for array in of_types(types.arrays, items):
                self._add_pieces(self._foreign_memory(array), edges)
        if not types.own_bytes.readers.keys().isdisjoint(type_ids):
            for item in of_types(types.own_bytes.readers, items):
                content = behind_object(item, types.own_bytes.readers[id(type(item))])
                self._add_pieces(content.pieces, edges)
                if not content.is_complete:
                    self._graph.notes[UNREAD] = None
                if content.objects:
                    # Only the library refers to them.
                    types.learn(content.objects)
                    self._graph.inside.update(map(id, content.objects))
                    edges.update(dict.fromkeys(map(id, content.objects)))
                    waiting += self._add_nodes(content.objects)
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
                    self._graph.of_other_libraries.add(piece.key)
            for tensor in unusual:
                # The tensors in a wrapper are references of it; those in a sparse tensor are not.
                memory = reader.own(tensor) if reader.is_foreign(tensor) else reader.memory(tensor)
                if memory is not None and memory.device != "meta":
                    parts = memory.storages.items()
                    self._add_pieces([Piece(("torch", key), bytes_, memory.device) for key, bytes_ in parts], edges)
        return size

    def _foreign_memory(self, array: Any) -> list[Piece]:
        """Return the memory that an array shows, if it belongs to an object of which nothing else is known."""
        owner = read_array("base", array)
        if owner is None or is_array(owner) or is_atom(owner):
            return []
        self.types.learn([owner])
        if id(type(owner)) not in self.types.leaves:
            return []
        _, start, end = place_of(array)
        return [Piece(("memory", id(owner)), end - start, address=start)]

    def _add_pieces(self, pieces: Sequence[Piece], edges: dict[NodeKey, None]) -> None:
        graph = self._graph
        for piece in pieces:
            edges[piece.key] = None
            if piece.key in graph.pieces:
                self.met.add(piece.key)
                continue
            graph.pieces[piece.key] = piece
            self.new.append(piece.key)
            size, note = piece.size_bytes, piece.note
            if piece.address and size >= _LARGE:
                in_ram = self._files.in_ram(piece.address, size)
                if in_ram is not None:
                    size, note = in_ram
            if note:
                graph.notes[note] = None
            if piece.key[0] == "torch":
                graph.add_bytes(piece.key, of_storages([size], [piece.device]))
            else:
                graph.add_bytes(piece.key, Counter({piece.device: size}))

    # -- memory by address -----------------------------------------------------------------------------------------

    def _join_by_address(self) -> None:
        """Count host memory once that several nodes show: arrays and buffers first, then the pieces of libraries.

        A library that shows an array's memory has a reference to the array that no Python object contains.
        """
        for start, end, key in self._new_spans():
            overlaps = self.spans.claim(start, end, key)
            for overlap in overlaps:
                self._count_once(key, overlap.owner, overlap.size_bytes)

    def _count_once(self, key: NodeKey, owner: NodeKey | None, size_bytes: int) -> None:
        """Take memory that belongs to another node off a node; memory that is not counted has no owner."""
        graph = self._graph
        if type(key) is int and type(owner) is int:
            return  # both have a size of their own
        known_bytes = graph.cpu_bytes.get(key)
        if known_bytes is None and type(key) is int:
            known_bytes = self.types.own_bytes.of([graph.objects[key]])
        graph.cpu_bytes[key] = max(0, (known_bytes or 0) - size_bytes)
        if owner is None:
            return
        piece, end = (key, owner) if type(key) is tuple else (owner, key)
        if end in graph.edges.get(piece, ()):
            return
        self.met.add(owner)
        graph.lead(piece, [end])
        graph.of_other_libraries.discard(piece)
        if type(end) is int:
            graph.inside[end] += 1

    def _new_spans(self) -> list[tuple[int, int, NodeKey]]:
        """Return the start and end of large host memory of new nodes, with the node.

        Of memory that begins at the same address, the largest comes first, and objects before pieces.
        """
        graph = self._graph
        spans: list[tuple[int, int, NodeKey]] = []
        objects = [graph.objects[key] for key in self.new if type(key) is int]
        for array in of_types(self.types.arrays, objects):
            if read_array("base", array) is None and read_array("nbytes", array) >= _LARGE:
                _, start, end = place_of(array)
                spans.append((start, end, id(array)))
        numpy: Any = sys.modules.get("numpy")
        for data in of_types(BUFFERS, objects) if numpy is not None else ():
            if sys.getsizeof(data) >= _LARGE:
                _, start, end = place_of(numpy.frombuffer(data, "u1"))
                spans.append((start, end, id(data)))
        for key in self.new:
            piece = graph.pieces.get(key) if type(key) is tuple else None
            if piece is not None and piece.address and piece.size_bytes >= _LARGE:
                spans.append((piece.address, piece.address + piece.size_bytes, key))
        return sorted(spans, key=lambda span: (span[0], -span[1], type(span[2]) is tuple))

    def _look_around(self) -> None:
        for observe in OBSERVERS:
            observe()
        if self.allowance is not None:
            self.allowance.check()
        self._progress()


class _Belonging:
    """The bytes and edges of nodes that are read together."""

    def __init__(self, nodes: Sequence[object]) -> None:
        self.edges: dict[int, dict[NodeKey, None]] = {id(node): {} for node in nodes}
        self.sizes = dict.fromkeys(self.edges, 0)

    def add(self, owners: Iterable[int], sizes: Iterable[int]) -> None:
        """Add the bytes of objects to their owners."""
        for owner, size in zip(owners, sizes, strict=True):
            self.sizes[owner] += size

    def lead(self, owners: Iterable[int], ends: Iterable[object]) -> None:
        """Add an edge from each owner to a node."""
        for owner, end in zip(owners, map(id, ends), strict=True):
            self.edges[owner][end] = None


def _constants(items: Sequence[Any], counts: Sequence[int]) -> set[int]:
    """Return the identities of small numbers and text with many references, which no user owns."""
    if not counts or max(counts) < COMMON_REFERENCES:
        return set()
    common = of_types(ATOMS, list(compress(items, map(COMMON_REFERENCES.__le__, counts))))
    return {id(item) for item in common if sys.getsizeof(item) <= _LARGEST_CONSTANT}


def _of_same_kind(item: object, kind: type) -> list[Any]:
    """Return the objects of a type to which an object refers, if need be by the dict of its attributes."""
    references = gc.get_referents(item)
    same = [one for one in references if type(one) is kind]
    if not same and kind is not dict:
        spaces = [one for one in references if type(one) is dict]
        same = [one for one in gc.get_referents(*spaces) if type(one) is kind]
    return same


def _counts_of_one_holder() -> tuple[int, int]:
    """Return the reference counts of an object with one holder, in a list of referents: by ``map``, and by index."""
    holder = [object()]
    references = gc.get_referents(holder)
    return next(map(sys.getrefcount, references)), sys.getrefcount(references[0])


_ONCE_IN_LIST, _ONCE_BY_INDEX = _counts_of_one_holder()


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
