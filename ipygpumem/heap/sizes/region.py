"""Reads everything that some objects lead to, as a graph, and knows what dies with each of them.

An object with one reference belongs to the object that refers to it, so it is *folded* into that
one: most objects are, in chunks whose loops run in C. What is left are the *nodes*: the roots, and
the objects and pieces of memory with several references. References are counted as CPython's
garbage collector counts them: a node with more references than those from inside is also held from
outside. So it takes no search of the heap to know what dies with a name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import is_not, sub
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.bulk import chunks, of_types
from ipygpumem.heap.kinds.arrays import object_arrays, storage_key
from ipygpumem.heap.kinds.libraries import MemoryPiece
from ipygpumem.heap.kinds.tensors import each
from ipygpumem.heap.knowledge.nodes import has_graph
from ipygpumem.heap.sizes.graph import Graph, NodeKey
from ipygpumem.heap.sizes.reading import MOST_NODES, GraphReader
from ipygpumem.introspect import loaded_object

_SAMPLED_FROM = 10_000_000
"""Number of items from which a container is measured by a sample of its items."""
_NO_OBJECT = object()
"""Stands for the object of a node that is a piece of memory."""


class Region:
    """All that some roots lead to, without what is behind barriers; it keeps the nodes alive.

    Known limit: references that a C library holds without telling the collector count as references
    from outside.

    Args:
        roots: objects to read at once; ``reader.read`` adds more.
        allowance: limits the time and memory.
        namespaces: identities of further dicts that are not entered, because they contain the
            user's names.
        most: maximum number of objects to read at once.
        sampled_from: number of items from which a container is read in part.
        keeps_folded: fill ``folded``.
        keeps_arrays: let ``arrays_of`` know the arrays.
        progress: called again and again.

    Attributes:
        graph: the nodes.
        reader: adds objects to the graph.

    Raises:
        AllowanceError: the allowance is spent.

    >>> rows = [bytes(1_000_000), bytes(1_000_000)]
    >>> region = Region([rows])
    >>> region.bytes_of({id(rows)})["cpu"] > 2_000_000
    True
    """

    def __init__(
        self,
        roots: Sequence[object] = (),
        allowance: Allowance | None = None,
        *,
        namespaces: Iterable[int] = (),
        most: int = MOST_NODES,
        sampled_from: int = _SAMPLED_FROM,
        keeps_folded: bool = False,
        keeps_arrays: bool = False,
        progress: Callable[[], object] = bool,
    ) -> None:
        self.graph = Graph()
        self.reader = GraphReader(
            self.graph,
            namespaces=namespaces,
            allowance=allowance,
            most=most,
            sampled_from=sampled_from,
            keeps_folded=keeps_folded,
            keeps_arrays=keeps_arrays,
            progress=progress,
        )
        self.reader.read(roots)

    @property
    def objects(self) -> dict[int, Any]:
        """The nodes that are objects, by identity."""
        return self.graph.objects

    @property
    def folded(self) -> list[object]:
        """The folded objects that may lead to more, with ``keeps_folded``."""
        return self.graph.folded

    @property
    def complete(self) -> bool:
        """False if there were too many objects, or graphs with too many nodes."""
        return self.reader.limits.is_complete

    def all_ids(self) -> set[int]:
        """Return the identities of all objects in the region, the folded ones included."""
        return self.objects.keys() | set(map(id, self.folded))

    def reach(self, keys: Iterable[NodeKey], without: Collection[NodeKey] = ()) -> set[NodeKey]:
        """Return the nodes ``keys`` and all nodes to which they lead, except the nodes ``without``
        and nodes to which only these lead.
        """
        return self.graph.reach(keys, without)

    def nodes_of_graphs(self) -> set[NodeKey]:
        """Return the nodes of autograd graphs."""
        of_graphs = set[NodeKey]()
        for key in self.graph.edges:
            if isinstance(key, tuple) and key not in self.graph.pieces:
                of_graphs.add(key)
        return of_graphs

    # -- questions -------------------------------------------------------------------------------

    def held_from_outside(self, ours: Mapping[int, int]) -> set[NodeKey]:
        """Return the objects to which something outside the region refers, and the storages of
        tensors with a graph that tensors outside show, too.

        Args:
            ours: number of references that do not count, such as those of the caller's lists, by
                an object's identity.
        """
        from_outside = self._references_from_outside()
        for key in ours.keys() & from_outside.keys():
            from_outside[key] -= ours[key]
        self._correct_for_torch(from_outside)
        return {key for key, number in from_outside.items() if number > 0}

    def _references_from_outside(self) -> dict[NodeKey, int]:
        """Return the number of references from outside to each tensor, and to each object that has
        any: its reference count, less the references from inside and those of this function.

        The loops run in C, because two lists may share a million numbers, each of which is a node.
        """
        # A new last object, to which nothing else refers, shows the references that the region and
        # this function have to each object.
        probe = object()
        self.objects[id(probe)] = probe
        del probe
        counts = list(map(sys.getrefcount, self.objects.values()))
        self.objects.popitem()
        count_of_probe = counts.pop()
        from_inside = map(self.graph.inside.get, self.objects, repeat(0))
        not_from_inside = list(map(sub, counts, from_inside))
        has_some = list(map(count_of_probe.__lt__, not_from_inside))
        from_outside: dict[NodeKey, int] = dict.fromkeys(map(id, self.tensors()), 0)
        for key, number in zip(
            compress(self.objects, has_some), compress(not_from_inside, has_some), strict=True
        ):
            from_outside[key] = number - count_of_probe
        # ``arrays_of`` needs the arrays: one more reference to each that is a node.
        for array in chain.from_iterable(self.graph.arrays.values()):
            if id(array) in from_outside:
                from_outside[id(array)] -= 1
        return from_outside

    def in_hidden_cycles(self) -> set[int]:
        """Return the identities of the arrays of objects that lead to themselves, as after
        ``rows[0] = rows``.

        The garbage collector does not look into an array, so it never frees such a cycle.
        """
        arrays = of_types(self.reader.types.arrays, list(self.objects.values()))
        with_objects = object_arrays(arrays)
        in_cycles = set[int]()
        for array in with_objects:
            reached = self.reach(self.graph.edges.get(id(array), ()))
            if id(array) in reached:
                in_cycles.add(id(array))
        return in_cycles

    def bytes_of(self, keys: Iterable[NodeKey]) -> Counter[str]:
        """Return the bytes by device of some nodes with the objects that are folded into them."""
        keys = set(keys)
        size = self.read_bytes(keys)
        size["cpu"] += self.leaf_bytes(keys)
        return +size

    def read_bytes(self, keys: set[NodeKey]) -> Counter[str]:
        """Return the bytes by device of some nodes, without leaves, whose bytes are not stored in
        the graph.
        """
        graph = self.graph
        size = Counter[str]()
        for key in graph.device_bytes.keys() & keys:
            size.update(graph.device_bytes[key])
        size["cpu"] += sum(map(graph.cpu_bytes.get, keys, repeat(0)))
        return size

    def leaf_bytes(self, keys: set[NodeKey]) -> int:
        """Return the RAM of the leaves among some nodes: numbers and texts with several references,
        which are measured here. It takes 0.5 s for a million.
        """
        return sum(map(self.reader.types.own_bytes.of, chunks(self._leaves(keys))))

    def _leaves(self, keys: set[NodeKey]) -> list[Any]:
        """Return the leaves among some nodes, as objects.

        They are the objects whose bytes the graph does not store: ``leaf_bytes`` measures them.
        """
        return self._objects_of(keys.difference(self.graph.cpu_bytes))

    def _objects_of(self, keys: Iterable[NodeKey]) -> list[Any]:
        """Return the objects of some nodes, without the nodes that are pieces of memory.

        The loops run in C, because two lists may share a million numbers, each of which is a node.
        """
        object_of: Callable[[NodeKey, object], object] = self.graph.objects.get  # type: ignore[assignment]
        objects = list(map(object_of, keys, repeat(_NO_OBJECT)))
        return list(compress(objects, map(is_not, objects, repeat(_NO_OBJECT))))

    def uncounted_by(self, keys: Iterable[NodeKey]) -> set[str]:
        """Return the libraries that keep memory of some nodes' objects which nothing counts, such
        as ``{"faiss"}``.
        """
        keys = set(keys)
        libraries = set[str]()
        uncounted_types = self.reader.types.uncounted_leaves
        if uncounted_types:
            leaves = of_types(uncounted_types, self._leaves(keys))
            libraries |= self.reader.types.own_bytes.uncounted(leaves)
        for key in self.graph.uncounted.keys() & keys:
            libraries |= self.graph.uncounted[key]
        return libraries

    def freed_by(self, root_ids: Sequence[int], ours: Mapping[int, int]) -> list[Counter[str]]:
        """Return the bytes by device that die with each of some roots.

        A node to which two roots lead dies with neither. So the walk from each root stops at nodes
        of earlier roots. These, and all nodes behind them, are subtracted at the end.

        Args:
            root_ids: the identities of the roots.
            ours: as in ``held_from_outside``.
        """
        surviving = self.reach(self.held_from_outside(ours) | self.in_hidden_cycles())
        of_earlier_roots = set[NodeKey]()
        of_several_roots = set[NodeKey]()  # at first only those at which a walk has stopped
        nodes_by_root = list[set[NodeKey]]()
        for root_id in root_ids:
            nodes = set[NodeKey]()
            level = set[NodeKey]([root_id]) - surviving
            while level:
                of_several_roots |= level & of_earlier_roots
                level -= of_earlier_roots
                nodes |= level
                level = self.graph.ends_of(level)
                level -= surviving  # in place: there may be a million nodes
                level -= nodes
            of_earlier_roots |= nodes
            nodes_by_root.append(nodes)
        of_several_roots = self.reach(of_several_roots)
        return [self.bytes_of(nodes - of_several_roots) for nodes in nodes_by_root]

    def arrays_of(self, keys: Collection[NodeKey]) -> list[Any]:
        """Return the tensors and arrays in some nodes; needs ``keeps_arrays``."""
        arrays_in_keys = list[Any]()
        for key, arrays in self.graph.arrays.items():
            if key in keys:
                arrays_in_keys += arrays
        return arrays_in_keys

    def tensors(self, keys: Collection[NodeKey] | None = None) -> list[Any]:
        """Return the tensors among the nodes with the keys ``keys``, or among all nodes."""
        tensors = of_types(self.reader.types.tensors, list(self.objects.values()))
        if keys is None:
            return tensors
        return [tensor for tensor in tensors if id(tensor) in keys]

    def node_of(self, piece: MemoryPiece, otherwise: NodeKey) -> NodeKey:
        """Return the node that has a piece of memory: the piece itself, the array or bytes that own
        it, or ``otherwise`` if neither is a node.
        """
        if piece.key in self.graph.pieces:
            return piece.key
        # The key of memory that an object owns has the object's identity.
        owner_id = piece.key[1] if len(piece.key) == 2 else None
        if type(owner_id) is int and owner_id in self.objects:
            return owner_id
        return otherwise

    @property
    def may_share(self) -> bool:
        """True if objects from outside may show some of its memory without a reference that can be
        counted.
        """
        libraries = {piece.key[0] for piece in self.graph.pieces.values()}
        # Memory that a Python object owns is shown by references to it; torch counts the uses of a
        # storage, if its version has the function.
        counts_tensors = hasattr(loaded_object("torch", "_C"), "_storage_Use_Count")
        counted_libraries = {"torch", "object"} if counts_tensors else {"object"}
        if libraries - counted_libraries:
            return True
        if self.graph.of_other_libraries or self.graph.has_autograd:
            return True
        segments = of_types(self.reader.types.segments, list(self.objects.values()))
        return bool(segments)

    def _correct_for_torch(self, from_outside: dict[NodeKey, int]) -> None:
        """Correct the numbers of references from outside for the references in torch's C++ code,
        which Python's counts do not show, or not as many as there are.
        """
        tensors = self.tensors()
        if not tensors:
            return
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            # neither function is in every torch
            if hasattr(torch.Tensor, "_use_count"):
                self._correct_for_uses_of_tensors(torch, tensors, from_outside)
            if hasattr(torch._C, "_storage_Use_Count"):
                self._add_references_to_storages(torch, tensors, from_outside)

    def _correct_for_uses_of_tensors(
        self, torch: Any, tensors: Sequence[Any], from_outside: dict[NodeKey, int]
    ) -> None:
        """Correct the numbers of references from outside to tensors for those of C++ code, such as
        autograd's nodes: each from outside the region counts, and none from inside.
        """
        counted_for_all_uses = _references_counted_for_uses(torch)
        for tensor in tensors:
            # Python's object of the tensor is one of its uses in C++.
            uses = torch.Tensor._use_count(tensor) - 1
            if uses:
                from_outside[id(tensor)] -= counted_for_all_uses
            from_outside[id(tensor)] += self._uses_outside(tensor, uses)

    def _uses_outside(self, tensor: Any, uses: int) -> int:
        """Return how many of the ``uses`` of a tensor in C++ are not those of the region's own
        graphs, views and gradients.
        """
        return max(0, uses - self.graph.inside_torch.get(id(tensor), 0))

    def held_in_torch(self, sharers: Sequence[Any] = ()) -> set[int]:
        """Return the identities of the tensors to which C++ code outside the region refers, such as
        the nodes of another tensor's graph.

        Args:
            sharers: the tensors outside that show the same memory. The views among them do not
                count: each keeps its base in C++, as ``rows[:10]`` keeps ``rows``.
        """
        tensors = self.tensors()
        held_ids = set[int]()
        torch: Any = sys.modules.get("torch")
        if not tensors or not hasattr(torch.Tensor, "_use_count"):
            return held_ids
        with torch._C.DisableTorchFunction():
            bases = each(torch.Tensor._base.__get__, sharers)
            number_of_views = Counter(map(id, bases))
            del bases  # they would count as references
            for tensor in tensors:
                uses = torch.Tensor._use_count(tensor) - 1 - number_of_views[id(tensor)]
                if self._uses_outside(tensor, uses):
                    held_ids.add(id(tensor))
        return held_ids

    def _add_references_to_storages(
        self, torch: Any, tensors: Sequence[Any], from_outside: dict[NodeKey, int]
    ) -> None:
        """Count a tensor as held from outside if the Python object of its storage has a name there
        (``x.untyped_storage()``), or if its storage has more tensors than the region has.

        Of a tensor with a graph only the storage counts: after ``shown = loss.detach()``, ``shown``
        keeps the memory of ``loss``, and not its graph.
        """
        tensors_by_storage: dict[Any, list[Any]] = {}
        for tensor in tensors:
            tensors_by_storage.setdefault(storage_key(tensor), []).append(tensor)
        tensors_by_storage.pop(None, None)  # tensors without a storage of their own
        # A storage that nothing else refers to shows the references of this function.
        example = torch.empty(0, device="meta")
        storage = torch.Tensor.untyped_storage(example)
        count_without_name = sys.getrefcount(storage)
        for key, tensors_of_storage in tensors_by_storage.items():
            storage = torch.Tensor.untyped_storage(tensors_of_storage[0])
            references = sys.getrefcount(storage)
            has_name = id(storage) not in self.objects and references > count_without_name
            # one more is that of ``storage``
            uses_inside = len(tensors_of_storage) + 1
            if has_name or torch._C._storage_Use_Count(storage._cdata) > uses_inside:
                first_tensor = tensors_of_storage[0]
                is_storage_held = key in self.graph.pieces and has_graph(first_tensor)
                from_outside[key if is_storage_held else id(first_tensor)] = 1


def _references_counted_for_uses(torch: Any) -> int:
    """Return the number of references that Python counts for all uses of a tensor in C++ together:
    1 from torch 2.10 on, else 0.

    Since torch 2.10, C++ code holds one reference to the Python object of a tensor that it uses,
    however often. A trial shows it: a view such as ``tensor[:]`` uses its tensor in C++.
    """
    example = torch.empty(0, device="meta")
    count_without_view = sys.getrefcount(example)
    view = example[:]
    count_with_view = sys.getrefcount(example)
    del view
    return count_with_view - count_without_view
