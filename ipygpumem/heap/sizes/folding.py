"""Reads one node of a graph: an object, and the objects to which only it leads. These are folded
into it, which means that their bytes and their references count as its own.

Loops over objects run in C, in chunks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import not_
from types import FrameType, FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import (
    CHUNK,
    ONCE_BY_INDEX,
    ONCE_IN_LIST,
    by_identity,
    chunks,
    held_once,
    lengths_of,
    linked_to,
    of_types,
    parts_of_container,
    types_of,
    without_objects,
    without_types,
)
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.kinds.arrays import (
    holding_objects,
    is_array,
    object_arrays,
    parts_of_array,
    read_array,
)
from ipygpumem.heap.knowledge.references import ReferenceReader, References
from ipygpumem.heap.knowledge.text_keys import COMMON_REFERENCES
from ipygpumem.heap.knowledge.torch_references import known_to_torch
from ipygpumem.heap.sizes.frontier import Context
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.introspect import ATOMS, instance_dict, is_instance

SAMPLED = "estimated from a sample of its items"
_LARGEST_CONSTANT = 512
"""Maximum bytes of plain numbers and text that count as constants if many objects refer to them."""
_REFERENCES_AT_ONCE = 100_000
"""Maximum number of references to list at once: the list takes memory."""
_MOST_IN_LINK = 100
"""Maximum number of items of a container that may be a link of a list."""
_LEADS_TO_ALL = (FunctionType, ModuleType, FrameType, type)
"""Types of objects that lead to a namespace, and so to everything."""
_NO_REFERENCES = References(())


class Folder:
    """Reads nodes one by one.

    Args:
        context: the graph, and what its readers share.

    Attributes:
        references: reads the objects' references.
    """

    def __init__(self, context: Context) -> None:
        self.references = ReferenceReader(context.barriers)
        self._context = context
        self._graph = context.graph
        self._types = context.types
        self._once = held_once()
        """The reference count of an object to which one object refers, in a part of a list."""
        self._with_items_read: set[int] = set()
        """Containers whose items have been read before them, by identity."""

    def fold(self, key: int, items: Sequence[Any]) -> None:
        """Read objects that belong to a node, and everything that only they lead to: add their
        bytes to the node, and references from it to the nodes to which they refer.
        """
        folding = _Folding(key, items)
        try:
            while folding.todo and not self._context.limits.is_reached():
                self._context.limits.check()
                self._fold_part(folding, *folding.todo.pop())
        finally:  # a spent allowance leaves what was read so far
            self._graph.add_bytes(key, folding.size)
            self._graph.lead(key, folding.edges)

    def fold_items(self, container: object, items: Sequence[Any]) -> None:
        """Read the items of a container, whose node is read later and then only needs its other
        references. Items to which only the container refers are folded into its node.
        """
        key = id(container)
        self._with_items_read.add(key)
        for part in chunks(self._context.barriers.enterable(items)):
            only_here, nodes = self._singles_and_nodes(part, self._types.learn(part))
            self._graph.inside.update(map(id, nodes))
            self._graph.lead(key, map(id, nodes))
            self._context.frontier.add(nodes)
            self.fold(key, only_here)

    def look_ahead(self, node: Any) -> None:
        """Add the links of the list to which a node belongs, so that they are read together."""
        self._context.frontier.add(self.links_behind(node))

    def links_behind(self, node: Any) -> list[Any]:
        """Return the nodes of the same type to which a node of a linked list leads, one after the
        other; nothing for another object.

        Each node of a doubly linked list leads to one new node: read one by one, a list of 50,000
        takes 2.7 s instead of 0.3 s.
        """
        if not self._may_be_link(node):
            return []
        links = self._shared_links(node)
        entered = set(map(id, self._context.barriers.enterable(links)))
        for position, link in enumerate(links):
            if id(link) not in entered:  # nothing behind a barrier is read
                del links[position:]
                break
        return links

    # -- one node --------------------------------------------------------------------------------

    def _fold_part(
        self, folding: _Folding, part: Sequence[Any], type_ids: set[int], times: int
    ) -> None:
        """Read some objects that belong to a node.

        Args:
            folding: the node.
            part: the objects.
            type_ids: at least the identities of their types.
            times: number of objects for which each of them stands.
        """
        if len(part) == 1:
            following = self._single_links(part[0])
            folding.linked.update(map(id, following))
            part = [*part, *following]
        self._measure(folding, part, type_ids, times)
        for references, stands_for in self.references_of(part, type_ids):
            self._context.limits.is_complete &= references.is_complete
            self._graph.waking += [(folding.key, id(task)) for task in references.waking]
            for below in chunks(references.of_python):
                if folding.linked:
                    below = [item for item in below if id(item) not in folding.linked]
                self._fold_below(folding, below, times * stands_for)
            if references.of_torch or references.of_graphs:
                self._add_references_of_torch(references)

    def _measure(
        self, folding: _Folding, part: Sequence[Any], type_ids: set[int], times: int
    ) -> None:
        """Add the bytes of objects, and the memory behind them, to their node."""
        size, of_libraries = self._context.memory.measure(
            part, type_ids, folding.key, folding.edges
        )
        folding.add(size, times)
        self._context.note_uncounted(folding.key, part, type_ids)
        if of_libraries:
            self._types.learn(of_libraries)
            self._lead_to(folding, of_libraries)

    def _fold_below(self, folding: _Folding, below: Sequence[Any], times: int) -> None:
        """Sort objects to which objects of a node refer.

        Objects with one reference belong to the node: numbers and text count at once, and other
        objects are read later. Objects with several references are nodes of their own.

        Args:
            folding: the node.
            below: the objects.
            times: number of objects for which each of them stands.
        """
        type_ids = self._types.learn(below)
        leaf_types = type_ids & self._types.leaves
        to_fold, nodes = self._singles_and_nodes(below, type_ids)
        if leaf_types:
            leaves = of_types(leaf_types, to_fold)
            folding.add(Counter(cpu=self._types.own_bytes.of(leaves, leaf_types)), times)
            self._context.note_uncounted(folding.key, leaves, leaf_types)
            has_other_objects = len(leaves) < len(to_fold)
            to_fold = without_types(leaf_types, to_fold) if has_other_objects else ()
        if to_fold:
            self._context.limits.visit(len(to_fold))
            folding.todo.append((to_fold, type_ids - leaf_types, times))
            if self._context.keeps_folded:
                self._graph.folded += to_fold
        self._lead_to(folding, nodes)

    def _lead_to(self, folding: _Folding, nodes: Sequence[Any]) -> None:
        """Add references from the node that is read to other nodes, which are read later."""
        self._graph.inside.update(map(id, nodes))
        folding.edges.update(dict.fromkeys(map(id, nodes)))
        self._context.frontier.add(nodes)

    def _add_references_of_torch(self, references: References) -> None:
        """Add the references that only torch knows: edges to tensors and to nodes of graphs, and
        these tensors as nodes that are read later.
        """
        graph = self._graph
        tensors = [tensor for _, tensor in references.of_torch]
        self._types.learn(tensors)
        graph.inside_torch.update(map(id, tensors))
        for owner, node in references.of_graphs:
            graph.lead(owner, [node])
        for owner, tensor in references.of_torch:
            graph.lead(owner, [id(tensor)])
        graph.has_autograd = graph.has_autograd or bool(references.of_graphs)
        self._context.frontier.add(tensors)

    def _singles_and_nodes(
        self, items: Sequence[Any], type_ids: set[int]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Divide objects to which a node refers by their reference counts.

        Constants, such as None or a short text that many objects share, are left out.

        Args:
            items: the objects; nothing but their node and this list may refer to one that is
                folded.
            type_ids: at least the identities of their types.

        Returns:
            The objects with one reference, which are folded into the node; and those that are
            nodes of their own: objects with several references, and ``_nodes_despite_count``.
        """
        counts = list(map(sys.getrefcount, items))
        # This check first takes half of the time for objects such as a list of None.
        are_all_common = bool(counts) and min(counts) >= COMMON_REFERENCES
        if are_all_common and _are_constants(items):
            return (), ()
        is_single = list(map(self._once.__ge__, counts))
        if all(is_single):
            singles = items
            shared = list[Any]()
        else:
            singles = list(compress(items, is_single))
            constants = constants_among(items, counts)
            shared = list(compress(items, map(not_, is_single)))
            if constants:
                shared = [item for item in shared if id(item) not in constants]
        nodes = self._nodes_despite_count(singles, type_ids)
        if nodes:
            singles = without_objects(nodes, singles)
            shared = [*shared, *nodes]
        return singles, shared

    def _nodes_despite_count(self, singles: Sequence[Any], type_ids: set[int]) -> list[Any]:
        """Return the objects that are nodes although Python counts one reference: tensors to which
        torch's C++ code may refer, shared memory, and arrays of objects.
        """
        types = self._types
        nodes = list[Any]()
        if not types.tensors.isdisjoint(type_ids):
            nodes += known_to_torch(of_types(types.tensors, singles))
        if not types.segments.isdisjoint(type_ids):
            nodes += of_types(types.segments, singles)
        if not types.arrays.isdisjoint(type_ids):
            arrays = of_types(types.arrays, singles)
            nodes += object_arrays(arrays)
        return nodes

    # -- references ------------------------------------------------------------------------------

    def references_of(
        self, part: Sequence[Any], type_ids: set[int]
    ) -> Iterator[tuple[References, int]]:
        """Yield the references of objects, not too many at once, each with the number of references
        for which it stands: more than one in a sample of a very long container.

        Args:
            part: the objects.
            type_ids: at least the identities of their types.
        """
        long_array = self._long_array(part, type_ids)
        if long_array is not None:
            yield from self._references_of_array(long_array)
        elif self._types.containers.keys().isdisjoint(type_ids):
            yield self.references.of(part, type_ids), 1
        elif len(part) == 1 and id(part[0]) in self._with_items_read:
            yield self._references_besides_items(part[0]), 1
        elif self._number_of_items_in(part) <= _REFERENCES_AT_ONCE:
            yield self.references.of(part, type_ids), 1
        elif len(part) > 1:
            middle = len(part) // 2
            yield from self.references_of(part[:middle], type_ids)
            yield from self.references_of(part[middle:], type_ids)
        else:
            yield from self._references_of_long(part[0])

    def _number_of_items_in(self, items: Sequence[Any]) -> int:
        """Return the number of items of all containers among ``items``."""
        containers = self._types.containers
        return sum(lengths_of(of_types(containers, items), containers))

    def _references_of_long(self, container: Any) -> Iterator[tuple[References, int]]:
        """Yield the references of a long container in chunks; of a very long container, the
        references of a sample of its items. The reading is incomplete if a thread changes it.
        """
        base = self._types.containers[id(type(container))]
        stands_for = self._stands_for(base.__len__(container))
        parts = parts_of_container(container, base, CHUNK * stands_for)
        try:
            yield from self._references_in_chunks(parts, stands_for)
        except RuntimeError:  # a thread changes the container: the rest is missing
            self._context.limits.is_complete = False
        yield self._references_besides_items(container), 1

    def _long_array(self, part: Sequence[Any], type_ids: set[int]) -> Any:
        """Return the array if ``part`` is one array with many objects, such as a column of a
        million texts; else None.

        Arrays of objects are nodes, which are read one by one.
        """
        if len(part) != 1 or self._types.arrays.isdisjoint(type_ids):
            return None
        (array,) = part
        if not is_array(array) or read_array("base", array) is not None:
            return None
        holds_objects = holding_objects(part)[0]
        if not holds_objects or read_array("size", array) <= _REFERENCES_AT_ONCE:
            return None
        return array

    def _references_of_array(self, array: Any) -> Iterator[tuple[References, int]]:
        """Yield the objects in a long array in chunks; of a very long array, a sample of them."""
        stands_for = self._stands_for(read_array("size", array))
        yield from self._references_in_chunks(
            parts_of_array(array, CHUNK, CHUNK * stands_for), stands_for
        )
        attributes = [instance_dict(array), *slots(array).values()]
        yield References(self._context.barriers.enterable(attributes)), 1

    def _stands_for(self, length: int) -> int:
        """Return the number of items for which each item of a sample stands, and note in the graph
        that its bytes are an estimate; 1 without a sample.
        """
        stands_for = max(1, -(-length // self._context.sampled_from))
        if stands_for > 1:
            self._graph.notes[SAMPLED] = None
        return stands_for

    def _references_in_chunks(
        self, parts: Iterable[Sequence[Any]], stands_for: int
    ) -> Iterator[tuple[References, int]]:
        """Yield chunks of items as references, without the items behind barriers.

        ``map`` keeps no reference to a chunk, which would count as another reference to its items.
        """
        for entered in map(self._context.barriers.enterable, parts):
            self._context.limits.check()
            yield References(entered), stands_for

    def _references_besides_items(self, container: Any) -> References:
        """Return the references that an instance of a container's subclass has besides its items:
        its attributes.
        """
        if id(type(container)) in CONTAINER_TYPES:
            return _NO_REFERENCES
        attributes = [instance_dict(container), *slots(container).values()]
        return References(self._context.barriers.enterable(attributes))

    # -- linked lists ----------------------------------------------------------------------------

    def _single_links(self, item: Any) -> list[Any]:
        """Return the next links of a linked list, as far as each has one reference, that of the
        link before it; nothing for an object that is no link.

        Reading them one by one would take long.
        """
        links = list[Any]()
        if not self._may_be_link(item) or not self._is_short(item):
            return links
        while len(links) < CHUNK:
            following = linked_to(item)
            if len(following) != 1 or sys.getrefcount(following[0]) > ONCE_BY_INDEX:
                break
            item = following[0]
            links.append(item)
        return links

    def _shared_links(self, node: Any) -> list[Any]:
        """Return the next unread links of a list whose links have several references, as those of a
        doubly linked list.
        """
        links = list[Any]()
        met_ids = {id(node)}
        passed_over = self._context.barriers.passed_over
        level = [node]
        while level and len(links) < CHUNK:
            following = self._shared_links_of(level)
            level = []
            for key, link in following.items():
                is_read = key in self._graph.objects or key in passed_over
                if key not in met_ids and not is_read:
                    level.append(link)
            met_ids.update(following)
            links += level
        return links

    def _shared_links_of(self, items: Sequence[Any]) -> dict[int, Any]:
        """Return the links with several references to which some links refer, by identity."""
        shared = list[Any]()
        for item in items:
            if not self._is_short(item):
                continue
            following = linked_to(item)
            # ``compress`` holds an item while it asks for the next selector, so count before.
            counts = list(map(sys.getrefcount, following))
            shared += compress(following, map(ONCE_IN_LIST.__lt__, counts))
        return by_identity(shared)

    def _may_be_link(self, item: Any) -> bool:
        """Return True if an object may be a link of a list: no container whose items were read
        before it, and none of the objects that lead to everything.
        """
        if id(item) in self._with_items_read:
            return False
        return not any(map(is_instance, repeat(item), _LEADS_TO_ALL))

    def _is_short(self, item: Any) -> bool:
        """Return True unless an object is a container with more items than a link of a list has."""
        base = self._types.containers.get(id(type(item)))
        if base is None:
            return True
        return bool(base.__len__(item) <= _MOST_IN_LINK)


class _Folding:
    """A node that is being read.

    Args:
        key: the node.
        items: the first objects to read.
    """

    def __init__(self, key: int, items: Sequence[Any]) -> None:
        self.key = key
        self.size = Counter[str]()
        self.edges: dict[NodeKey, None] = {}
        self.linked = set[int]()
        """Identities of the links of a list that were read together: the references to them from
        one another do not count.
        """
        self.todo: list[tuple[Sequence[Any], set[int], int]] = [(items, types_of(items), 1)]
        """Objects to read, with at least the identities of their types, and the number for which
        each stands.
        """

    def add(self, size: Counter[str], times: int) -> None:
        """Add the bytes of objects that stand for ``times`` objects each."""
        for device, number in size.items():
            self.size[device] += number * times


def _are_constants(items: Sequence[Any]) -> bool:
    """Return True if all items are constants as in ``constants_among``; the caller knows that each
    has many references.
    """
    distinct = list(by_identity(items).values())
    counts = list(map(sys.getrefcount, distinct))
    return len(constants_among(distinct, counts)) == len(distinct)


def constants_among(items: Sequence[Any], counts: Sequence[int]) -> set[int]:
    """Return the identities of small numbers and text with many references, which no user owns.

    Args:
        items: objects.
        counts: the reference count of each.
    """
    if not counts or max(counts) < COMMON_REFERENCES:
        return set()
    are_common = map(COMMON_REFERENCES.__le__, counts)
    common = of_types(ATOMS, list(compress(items, are_common)))
    return {
        key for key, item in by_identity(common).items() if sys.getsizeof(item) <= _LARGEST_CONSTANT
    }
