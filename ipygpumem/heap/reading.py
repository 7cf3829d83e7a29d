"""Reads objects and everything that they lead to, and adds the nodes and edges to a graph.

Loops over objects run in C, in chunks: most objects have one reference, and are folded into the
node that refers to them. No user code runs.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import not_
from types import FrameType, FunctionType, ModuleType
from typing import Any

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.arrays import (
    holding_objects,
    slots,
)
from ipygpumem.heap.bulk import (
    CHUNK,
    CONTAINERS,
    OBSERVERS,
    by_identity,
    chunks,
    held_once,
    of_types,
    parts_of_container,
    types_of,
    without_types,
)
from ipygpumem.heap.graph import Graph, NodeKey
from ipygpumem.heap.holders.tasks import BUILTIN
from ipygpumem.heap.knowledge.barriers import Barriers, without_left_out
from ipygpumem.heap.knowledge.kinds import Types
from ipygpumem.heap.knowledge.references import (
    COMMON_REFERENCES,
    ReferenceReader,
    References,
    has_own_keys,
)
from ipygpumem.heap.knowledge.torch_references import known_to_torch
from ipygpumem.heap.memory import MemoryReader
from ipygpumem.introspect import ATOMS, instance_dict, is_instance

MOST_NODES = 20_000_000
"""Maximum number of objects, except numbers and text with one reference."""
_LARGEST_CONSTANT = 512
"""Maximum bytes of plain numbers and text that count as constants if many objects refer to them."""
_FEW = 8
"""Fewer nodes are read one by one, which takes 30 µs each; more are read together, which takes 2 µs
an object.
"""
_MOST_INSIDE = 100_000
"""Maximum number of references to list at once: the list takes memory."""
_MOST_IN_LINK = 100
"""Maximum number of items of a container that may be a link of a list."""
SAMPLED = "estimated from a sample of its items"
_PLAIN_CONTAINERS = set(map(id, CONTAINERS))
_LEADS_TO_ALL = (FunctionType, ModuleType, FrameType, type)


class GraphReader:
    """Adds objects to a graph.

    Args:
        graph: the graph.
        namespaces: identities of further dicts that are not entered, because they contain the
            user's names.
        allowance: limits the time and memory.
        most: maximum number of objects to read at once.
        sampled_from: number of items from which a container is read in part: an evenly spread
            sample stands for all.
        keeps_folded: fill ``graph.folded``.
        keeps_arrays: fill ``graph.arrays``.
        progress: called again and again.

    Attributes:
        complete: False if a limit was reached.
        new: the nodes that the last reading has added.
        met: nodes of earlier readings to which nodes of the last one refer, and some of the last
            one.
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
        self.memory = MemoryReader(graph, self.types, keeps_arrays=keeps_arrays)
        self._graph = graph
        self._most = most
        self._sampled_from = sampled_from
        self._keeps_folded = keeps_folded
        self._progress = progress
        self._references = ReferenceReader(self.barriers)
        self._once = held_once()
        self._visited = 0
        self._unread: dict[int, Any] = {}
        """Nodes that an interrupted reading has not read."""
        self._with_items_read: set[int] = set()
        """Containers whose items have been read before them, by identity."""

    def read(self, roots: Sequence[object]) -> list[NodeKey]:
        """Add objects and everything that they lead to; return the new nodes.

        Raises:
            AllowanceError: the allowance is spent. The nodes so far stay in the graph.
        """
        graph = self._graph
        self._begin()
        waiting = []
        for key, item in by_identity(roots).items():
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
        """Add items of a reserved container before the container itself is read; return the new
        nodes.

        What only the container refers to is folded into it.

        Raises:
            AllowanceError: the allowance is spent.
        """
        key = id(container)
        self._begin()
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

    def _begin(self) -> None:
        self.new, self.met = [], set()
        self._visited = 0
        self.memory.begin()

    def reserve(self, objects: Sequence[object]) -> None:
        """Add objects as nodes that no reading enters before they are released."""
        self._graph.objects.update(by_identity(objects))

    def release(self, objects: Sequence[object]) -> None:
        """Let readings enter reserved objects."""
        self._unread.update(by_identity(objects))

    def owned(self, objects: Sequence[Any]) -> list[Any]:
        """Return the objects that belong to an object that refers to them: no constants, and not
        behind barriers.
        """
        entered = self.barriers.entered(objects)
        constants = _constants(entered, list(map(sys.getrefcount, entered)))
        return [item for item in entered if id(item) not in constants]

    # -- nodes -----------------------------------------------------------------------------------

    def _read(self, waiting: list[Any]) -> None:
        """Read nodes until none is waiting."""
        graph = self._graph
        tasks_known = len(graph.waking)
        try:
            self._read_all(waiting)
        finally:
            self._unread.update(by_identity(waiting))
            self.complete &= not self._references.is_full
            self._references.drop_graphs()
            self.new += self.memory.new
            self.memory.join_by_address(self.new)
            self.met |= self.memory.met
            for key, task in graph.waking[tasks_known:]:
                if (
                    task in graph.objects
                ):  # a future leads to no task but one to which something else leads, too
                    graph.inside[task] += 1
                    graph.lead(key, [task])

    def _read_all(self, waiting: list[Any]) -> None:
        while waiting:
            if self._visited > self._most:
                self.complete = False
                return
            if len(waiting) < _FEW:
                node = waiting.pop()
                nodes = [node, *self._neighbours(node)]
            else:
                nodes = waiting[-CHUNK:]
                del waiting[-CHUNK:]
            self._visited += len(nodes)
            if len(nodes) < _FEW:
                for node in nodes:
                    self._fold(id(node), [node], waiting)
            else:
                self._read_together(nodes, waiting)

    def _neighbours(self, node: Any) -> list[Any]:
        """Add nodes of the same type that follow a node, and return them.

        Each node of a doubly linked list leads to one new node: read one by one, a list of 50,000
        takes 2.7 s instead of 0.3 s.
        """
        kind = type(node)
        if any(is_instance(node, base) for base in _LEADS_TO_ALL):
            return []
        met = {id(node)}
        neighbours = list[Any]()
        level = [node]
        while level and len(neighbours) < CHUNK:
            following = list[Any]()
            for item in level:
                same = _of_same_kind(item, kind) if self._is_short(item) else []
                has_several = map(_ONCE_IN_LIST.__lt__, map(sys.getrefcount, same))
                following += compress(same, has_several)
            new = {key: item for key, item in by_identity(following).items() if key not in met}
            met.update(new)
            level = [item for key, item in new.items() if key not in self._graph.objects]
            neighbours += level
        entered = set(map(id, self.barriers.entered(neighbours)))
        is_left_out = [id(item) not in entered for item in neighbours]
        if any(is_left_out):
            del neighbours[is_left_out.index(True) :]
        return self._add_nodes(neighbours)

    def _fold(self, key: int, items: Sequence[Any], waiting: list[Any]) -> None:
        """Read objects that belong to a node, and everything that only they lead to; add new nodes
        to ``waiting``.
        """
        folding = _Folding(key, items)
        try:
            while folding.todo:
                if self._visited > self._most:
                    self.complete = False
                    break
                self._look_around()
                self._fold_part(folding, *folding.todo.pop(), waiting)
        finally:  # a spent allowance leaves what was read so far
            self._graph.add_bytes(key, folding.size)
            self._graph.lead(key, folding.edges)

    def _fold_part(
        self,
        folding: _Folding,
        part: Sequence[Any],
        type_ids: set[int],
        times: int,
        waiting: list[Any],
    ) -> None:
        """Read some objects that belong to a node; each stands for ``times`` objects."""
        if len(part) == 1:
            following = self._linked(part[0])
            folding.linked.update(map(id, following))
            part = [*part, *following]
        size, of_libraries = self.memory.of(part, type_ids, folding.key, folding.edges)
        folding.add(size, times)
        self._note_uncounted(folding.key, part, type_ids)
        if of_libraries:
            self.types.learn(of_libraries)
            waiting += self._shared_nodes(folding, of_libraries)
        for references, stands_for in self._references_of(part, type_ids):
            self.complete &= references.is_complete
            self._graph.waking += [(folding.key, id(task)) for task in references.waking]
            for below in chunks(references.of_python):
                if folding.linked:
                    below = [item for item in below if id(item) not in folding.linked]
                waiting += self._fold_below(folding, below, times * stands_for)
            if references.of_torch or references.of_graphs:
                waiting += self._add_references_of_torch(references)

    def _fold_below(self, folding: _Folding, below: Sequence[Any], times: int) -> list[Any]:
        """Read objects to which objects of a node refer; return the new nodes among them."""
        type_ids = self.types.learn(below)
        leaf_types = type_ids & self.types.leaves
        singles, shared = self._divided(below, type_ids)
        if leaf_types:
            leaves = of_types(leaf_types, singles)
            folding.add(Counter(cpu=self.types.own_bytes.of(leaves, leaf_types)), times)
            self._note_uncounted(folding.key, leaves, leaf_types)
            singles = without_types(leaf_types, singles) if len(leaves) < len(singles) else ()
        if singles:
            self._visited += len(singles)
            folding.todo.append((singles, type_ids - leaf_types, times))
            if self._keeps_folded:
                self._graph.folded += singles
        return self._shared_nodes(folding, shared)

    def _note_uncounted(self, key: int, items: Sequence[Any], type_ids: set[int]) -> None:
        """Note the libraries that keep memory of a node's objects; ``type_ids`` are at least those
        of their types.
        """
        own_bytes = self.types.own_bytes
        if own_bytes.uncounted(items, type_ids):
            libraries = own_bytes.uncounted(items, types_of(items))
            self._graph.uncounted.setdefault(key, set()).update(libraries)

    def _shared_nodes(self, folding: _Folding, shared: Sequence[Any]) -> list[Any]:
        """Add references of a node to objects that are nodes; return those that have to be read."""
        self._graph.inside.update(map(id, shared))
        folding.edges.update(dict.fromkeys(map(id, shared)))
        return self._add_nodes(shared)

    def _linked(self, item: Any) -> list[Any]:
        """Return the next objects of a linked list to which only the list refers: one by one would
        take long.
        """
        kind = type(item)
        linked = list[Any]()
        is_read = id(item) in self._with_items_read
        leads_to_all = any(is_instance(item, base) for base in _LEADS_TO_ALL)
        if is_read or leads_to_all or not self._is_short(item):
            return linked
        while len(linked) < CHUNK:
            following = _of_same_kind(item, kind)
            if len(following) != 1 or sys.getrefcount(following[0]) > _ONCE_BY_INDEX:
                break
            item = following[0]
            linked.append(item)
        return linked

    def _is_short(self, item: Any) -> bool:
        """Return False for a container with more items than a link of a list has."""
        base = self.types.containers.get(id(type(item)))
        return base is None or base.__len__(item) <= _MOST_IN_LINK

    def _references_of(
        self, part: Sequence[Any], type_ids: set[int]
    ) -> Iterator[tuple[References, int]]:
        """Yield the references of objects, not too many at once, each with the number for which it
        stands.
        """
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
        """Return the number of items of each container; those of plain ones in C, because there may
        be a million.
        """
        sized = of_types(self.types.containers, items)
        if types_of(sized) <= _PLAIN_CONTAINERS:
            return list(map(len, sized))
        return [self.types.containers[id(type(item))].__len__(item) for item in sized]

    def _references_of_long(self, container: Any) -> Iterator[tuple[References, int]]:
        """Yield the references of a long container in chunks; of a very long one, those of a
        sample.
        """
        base = self.types.containers[id(type(container))]
        stands_for = max(1, -(-base.__len__(container) // self._sampled_from))
        if stands_for > 1:
            self._graph.notes[SAMPLED] = None
        # ``map`` keeps no reference to a chunk, which would count as another reference to its
        # items.
        try:
            for entered in map(
                self.barriers.entered, parts_of_container(container, base, CHUNK * stands_for)
            ):
                self._look_around()
                yield References(entered, (), (), (), True), stands_for
        except RuntimeError:  # a thread changes the container: the rest is missing
            self.complete = False
        yield self._references_besides_items(container), 1

    def _references_besides_items(self, container: Any) -> References:
        """Return the references that an instance of a container's subclass has
        besides its items.
        """
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
        new = (
            by_key if not known else {key: item for key, item in by_key.items() if key not in known}
        )
        graph.objects.update(new)
        self.new += new
        self.met |= known
        waiting = list(without_types(self.types.leaves, list(new.values())))
        if self._unread:
            again = known & self._unread.keys()
            waiting += map(self._unread.pop, again)
            self.new += again
        return waiting

    def _divided(
        self, items: Sequence[Any], type_ids: set[int]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the items with one reference, and those with several that are no constants.

        Shared memory, arrays of objects, and tensors to which torch's C++ code may refer count as
        those with several.
        """
        counts = list(map(sys.getrefcount, items))
        if counts and min(counts) >= COMMON_REFERENCES:  # such as many times None: half of the time
            distinct = list(by_identity(items).values())
            if len(_constants(distinct, list(map(sys.getrefcount, distinct)))) == len(distinct):
                return (), ()
        is_single = list(map(self._once.__ge__, counts))
        singles: Sequence[Any] = items
        shared: Sequence[Any] = ()
        if not all(is_single):
            singles = list(compress(items, is_single))
            constants = _constants(items, counts)
            shared = list(compress(items, map(not_, is_single)))
            if constants:
                shared = list(
                    compress(shared, map(not_, map(constants.__contains__, map(id, shared))))
                )
        apart = list[Any]()
        if not self.types.tensors.isdisjoint(type_ids):
            apart += known_to_torch(of_types(self.types.tensors, singles))
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

    # -- many nodes at once ----------------------------------------------------------------------

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
        """Read the references of objects, each with the node that owns it; add what only they lead
        to to ``following``.

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
            below, owners_below = (
                list(compress(below, is_entered)),
                list(compress(owners_below, is_entered)),
            )
        belonging.add(owners, self.types.own_bytes.each(items))
        self._note_uncounted_of_each(owners, items)
        self._divide_level(below, owners_below, belonging, following, waiting)

    def _divide_level(
        self,
        below: Sequence[Any],
        owners_below: Sequence[int],
        belonging: _Belonging,
        following: tuple[list[Any], list[int]],
        waiting: list[Any],
    ) -> None:
        """Add the objects to which the objects of a level refer: as bytes, as objects to read next,
        or as nodes.
        """
        counts = list(map(sys.getrefcount, below))
        constants = _constants(below, counts)
        is_single = list(map(_ONCE_IN_LIST.__ge__, counts))
        is_leaf = list(map(self.types.leaves.__contains__, map(id, map(type, below))))
        leads_on = [single and not leaf for single, leaf in zip(is_single, is_leaf, strict=True)]
        is_own_leaf = [single and leaf for single, leaf in zip(is_single, is_leaf, strict=True)]
        is_shared = [
            not single and id(item) not in constants
            for single, item in zip(is_single, below, strict=True)
        ]
        leaves = list(compress(below, is_own_leaf))
        leaf_owners = list(compress(owners_below, is_own_leaf))
        belonging.add(leaf_owners, self.types.own_bytes.each(leaves))
        self._note_uncounted_of_each(leaf_owners, leaves)
        following[0].extend(compress(below, leads_on))
        following[1].extend(compress(owners_below, leads_on))
        shared = list(compress(below, is_shared))
        self._graph.inside.update(map(id, shared))
        belonging.lead(list(compress(owners_below, is_shared)), shared)
        waiting += self._add_nodes(shared)

    def _note_uncounted_of_each(self, owners: Sequence[int], items: Sequence[Any]) -> None:
        """Note the libraries that keep memory of objects, for the node that owns each."""
        if self.types.own_bytes.uncounted(items):
            for owner, item in zip(owners, items, strict=True):
                self._note_uncounted(owner, [item], {id(type(item))})

    def _special(self, items: Sequence[Any]) -> set[int]:
        """Return the positions of the objects that have references or memory of which the collector
        does not know.
        """
        types = self.types
        type_ids = types.learn(items)
        kinds = (types.apart | types.own_bytes.readers.keys() | types.streams | BUILTIN) & type_ids
        special = set[int]()
        if kinds:
            special.update(
                compress(range(len(items)), map(kinds.__contains__, map(id, map(type, items))))
            )
        dicts = {type_id for type_id in type_ids if types.containers.get(type_id) is dict}
        if dicts and has_own_keys(of_types(dicts, items)):
            special.update(
                position
                for position, item in enumerate(items)
                if id(type(item)) in dicts and has_own_keys([item])
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
        """Fold the objects at some positions into their nodes one by one; return the rest, with
        their nodes.
        """
        rest, rest_owners = list[Any](), list[int]()
        for position, (item, owner) in enumerate(zip(items, owners, strict=True)):
            if position in special:
                self._fold(owner, [item], waiting)
            else:
                rest.append(item)
                rest_owners.append(owner)
        return rest, rest_owners

    def _look_around(self) -> None:
        for observe in OBSERVERS:
            observe()
        if self.allowance is not None:
            self.allowance.check()
        self._progress()


class _Folding:
    """A node that is being read."""

    def __init__(self, key: int, items: Sequence[Any]) -> None:
        self.key = key
        self.size = Counter[str]()
        self.edges: dict[NodeKey, None] = {}
        self.linked = set[int]()
        """Links of a list that were read together, by identity."""
        self.todo: list[tuple[Sequence[Any], set[int], int]] = [(items, types_of(items), 1)]
        """Objects to read, with at least the identities of their types, and the number for which
        each stands.
        """

    def add(self, size: Counter[str], times: int) -> None:
        """Add the bytes of objects that stand for ``times`` objects each."""
        for device, number in size.items():
            self.size[device] += number * times


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
    return {
        key for key, item in by_identity(common).items() if sys.getsizeof(item) <= _LARGEST_CONSTANT
    }


def _of_same_kind(item: object, kind: type) -> list[Any]:
    """Return the objects of a type to which an object refers, if need be by the dict of its
    attributes.
    """
    references = gc.get_referents(item)
    same = of_types({id(kind)}, references)
    if not same and kind is not dict:
        is_own = map(_ONCE_IN_LIST.__ge__, map(sys.getrefcount, references))
        own_dicts = of_types({id(dict)}, list(compress(references, is_own)))
        same = of_types({id(kind)}, gc.get_referents(*own_dicts))
    return same


def _counts_of_one_holder() -> tuple[int, int]:
    """Return the reference counts of an object with one holder, in a list of referents: by ``map``,
    and by index.
    """
    holder = [object()]
    references = gc.get_referents(holder)
    return next(map(sys.getrefcount, references)), sys.getrefcount(references[0])


_ONCE_IN_LIST, _ONCE_BY_INDEX = _counts_of_one_holder()
