"""Reads many nodes of a graph together, level by level: 2 µs an object instead of 30 µs.

A level has the objects that are one reference further from their nodes than those of the level
before. Parallel lists have each object and the node that owns it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, compress, repeat
from operator import and_, not_
from typing import Any

from ipygpumem.heap.bulk import CHUNK, ONCE_IN_LIST, chunks, of_types, types_of
from ipygpumem.heap.kinds.arrays import bases_of, plain_arrays
from ipygpumem.heap.knowledge.tasks import BUILTIN, CONTEXT_NODES
from ipygpumem.heap.knowledge.text_keys import has_own_keys
from ipygpumem.heap.knowledge.torch_references import plain_tensors
from ipygpumem.heap.sizes.folding import Folder, constants_among
from ipygpumem.heap.sizes.frontier import Context
from ipygpumem.heap.sizes.graph import NodeKey


class _Level:
    """Objects, each with the node that owns it.

    Attributes:
        items: the objects.
        owners: the identity of the node that owns each of them.
    """

    def __init__(self, items: Iterable[Any] = (), owners: Iterable[int] = ()) -> None:
        self.items = list(items)
        self.owners = list(owners)

    def parts(self) -> Iterator[_Level]:
        """Yield the objects in chunks."""
        for items, owners in zip(chunks(self.items), chunks(self.owners), strict=True):
            yield _Level(items, owners)

    def only(self, is_wanted: Sequence[bool]) -> _Level:
        """Return the objects for which ``is_wanted`` is true, as another level."""
        return _Level(compress(self.items, is_wanted), compress(self.owners, is_wanted))

    def add(self, level: _Level) -> None:
        """Add the objects of another level."""
        self.items += level.items
        self.owners += level.owners


class _BytesAndEdges:
    """The bytes and edges of the nodes that are read together, until they go into the graph.

    Attributes:
        edges: the nodes to which each node leads, in order, by its identity.
        sizes: the bytes of RAM of each node, by its identity.
    """

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


class LevelReader:
    """Reads many nodes together.

    Args:
        context: the graph, and what its readers share.
        folder: reads objects of special kinds one by one.
    """

    def __init__(self, context: Context, folder: Folder) -> None:
        self._context = context
        self._folder = folder
        self._types = context.types

    def read(self, nodes: Sequence[Any]) -> None:
        """Read nodes, and all objects to which only they lead; add the nodes to which these objects
        refer.
        """
        totals = _BytesAndEdges(nodes)
        level = _Level(nodes, list(map(id, nodes)))
        try:
            while level.items:
                level = self._read_level(level, totals)
        finally:  # a spent allowance leaves what was read so far
            self._add_to_graph(totals)

    def _read_level(self, level: _Level, totals: _BytesAndEdges) -> _Level:
        """Read the references of a level; return the objects to which only its objects refer, the
        next level.
        """
        following = _Level()
        for part in level.parts():
            self._context.limits.check()
            self._read_part(part, totals, following)
        self._context.limits.visit(len(following.items))
        if self._context.keeps_folded:
            self._context.graph.folded += following.items
        return following

    def _add_to_graph(self, totals: _BytesAndEdges) -> None:
        """Add the bytes and edges of nodes to the graph."""
        graph = self._context.graph
        for key, size in totals.sizes.items():
            graph.cpu_bytes[key] = graph.cpu_bytes.get(key, 0) + size
        for key, edges in totals.edges.items():
            if key in graph.edges:  # some of it was folded
                graph.lead(key, edges)
            elif edges:
                graph.edges[key] = tuple(edges)

    def _read_part(self, part: _Level, totals: _BytesAndEdges, following: _Level) -> None:
        """Read the references of some objects.

        Objects of special kinds, and objects that refer to such, are read one by one.

        Args:
            part: the objects, with the nodes that own them.
            totals: receives the bytes and edges of these nodes.
            following: receives the objects to which only they refer.
        """
        # Without the objects that are special themselves, then without those that refer to one.
        part = self._fold_special(self._positions_read_one_by_one(part.items), part)
        references = self._references_of(part.items)
        lengths = list(map(len, references))
        below = _Level(list(chain.from_iterable(references)))
        del references  # they refer to the objects, too
        special = self._referring_to_special(below.items, lengths)
        if special:
            del below  # its references would count in the second attempt
            self._read_part(self._fold_special(special, part), totals, following)
            return
        below.owners = list(chain.from_iterable(map(repeat, part.owners, lengths)))
        entered = set(map(id, self._context.barriers.enterable(below.items)))
        if len(entered) < len(below.items):
            below = below.only(list(map(entered.__contains__, map(id, below.items))))
        self._measure(part, totals)
        self._sort_by_references(below, totals, following)

    def _references_of(self, items: Sequence[Any]) -> list[list[Any]]:
        """Return the objects to which each of some objects refers.

        An array refers to the array of which it is a view, which the collector does not report.
        """
        references: list[list[Any]] = list(map(gc.get_referents, items))
        if not self._types.arrays.isdisjoint(types_of(items)):
            for position, item in enumerate(items):
                if id(type(item)) in self._types.arrays:
                    references[position] += bases_of(item)[:1]
        return references

    def _referring_to_special(self, referents: Sequence[Any], lengths: Sequence[int]) -> set[int]:
        """Return the positions of the objects of a level that refer to tensors, arrays or other
        objects that may have references which Python does not count.

        Args:
            referents: the objects to which the objects of the level refer, in their order.
            lengths: the number of ``referents`` of each object of the level.
        """
        apart = self._types.apart
        if apart.isdisjoint(self._types.learn(referents)):
            return set()
        plain = self._plain_arrays(referents)
        positions = chain.from_iterable(map(repeat, range(len(lengths)), lengths))
        special = set[int]()
        for position, item in zip(positions, referents, strict=True):
            if id(type(item)) in apart and id(item) not in plain:
                special.add(position)
        return special

    def _measure(self, level: _Level, totals: _BytesAndEdges) -> None:
        """Add the bytes of objects to the nodes that own them."""
        tensors = of_types(self._types.tensors, level.items)
        if tensors:
            self._measure_tensors(tensors, totals)
        if not self._types.storages.isdisjoint(types_of(level.items)):
            for owner, item in zip(level.owners, level.items, strict=True):
                if id(type(item)) in self._types.storages:
                    self._context.memory.add_of_storage(item, totals.edges[owner])
        totals.add(level.owners, self._types.own_bytes.each(level.items))
        self._context.memory.keep_arrays(level.owners, level.items)
        self._context.note_uncounted_of_each(level.owners, level.items)

    def _measure_tensors(self, tensors: Sequence[Any], totals: _BytesAndEdges) -> None:
        """Add the bytes of torch's C++ objects for plain tensors, each of which is a node, and the
        edges to their storages.
        """
        each_bytes, storages = self._context.memory.of_plain_tensors(tensors)
        nodes = list(map(id, tensors))
        totals.add(nodes, repeat(each_bytes, len(nodes)))
        for node, storage in zip(nodes, storages, strict=True):
            totals.edges[node][storage] = None

    def _sort_by_references(self, below: _Level, totals: _BytesAndEdges, following: _Level) -> None:
        """Add the objects to which the objects of a level refer.

        An object with one reference belongs to the same node: a number or text as bytes only, any
        other object as one to read next. An object with several references is a node of its own,
        but for constants, which belong to no node.

        Args:
            below: the objects, with the nodes that own the objects that refer to them.
            totals: receives the bytes and edges of these nodes.
            following: receives the objects to read next.
        """
        counts = list(map(sys.getrefcount, below.items))
        constants = constants_among(below.items, counts)
        is_single = list(map(ONCE_IN_LIST.__ge__, counts))
        is_leaf = list(map(self._types.leaves.__contains__, map(id, map(type, below.items))))
        is_own_leaf = list(map(and_, is_single, is_leaf))
        leads_on = list(map(and_, is_single, map(not_, is_leaf)))
        is_shared = [
            not single and id(item) not in constants
            for single, item in zip(is_single, below.items, strict=True)
        ]
        self._measure(below.only(is_own_leaf), totals)
        following.add(below.only(leads_on))
        shared = below.only(is_shared)
        self._context.graph.inside.update(map(id, shared.items))
        totals.lead(shared.owners, shared.items)
        self._context.frontier.add(shared.items)

    # -- special kinds ---------------------------------------------------------------------------

    def _positions_read_one_by_one(self, items: Sequence[Any]) -> set[int]:
        """Return the positions of the objects that are read one by one: they have references or
        memory of which the collector does not know, or very many items.
        """
        types = self._types
        type_ids = types.learn(items)
        special = self._positions_of_special_types(items, type_ids)
        dicts = {type_id for type_id in type_ids if types.containers.get(type_id) is dict}
        if dicts and has_own_keys(of_types(dicts, items)):
            for position, item in enumerate(items):
                if id(type(item)) in dicts and has_own_keys([item]):
                    special.add(position)
        if not types.containers.keys().isdisjoint(type_ids):
            for position, item in enumerate(items):
                base = types.containers.get(id(type(item)))
                if base is not None and base.__len__(item) > CHUNK:
                    special.add(position)
        return special

    def _positions_of_special_types(self, items: Sequence[Any], type_ids: Set[int]) -> set[int]:
        """Return the positions of the objects whose type tells that they are read one by one, but
        not of plain arrays and tensors.

        Args:
            items: the objects.
            type_ids: the identities of their types.
        """
        types = self._types
        kinds = types.apart | types.own_bytes.readers.keys() | types.streams
        kinds |= types.with_slices
        kinds -= types.storages
        kinds = (kinds | BUILTIN | CONTEXT_NODES) & type_ids
        special = set[int]()
        if kinds:
            is_special = map(kinds.__contains__, map(id, map(type, items)))
            special.update(compress(range(len(items)), is_special))
            plain = self._plain_arrays(items) | self._plain_tensors(items)
            if plain:
                special = {position for position in special if id(items[position]) not in plain}
        return special

    def _plain_arrays(self, items: Sequence[Any]) -> set[int]:
        """Return the identities of the arrays that are read like other objects: 20,000 arrays read
        one by one take 2 s.
        """
        if self._types.arrays.isdisjoint(types_of(items)):
            return set()
        return plain_arrays(items)

    def _plain_tensors(self, items: Sequence[Any]) -> set[int]:
        """Return the identities of the tensors among ``items`` that are read like other objects.
        Each of them is a node, because the objects that refer to tensors are read one by one.
        """
        tensors = of_types(self._types.tensors, items)
        if not tensors:
            return set()
        return plain_tensors(tensors)

    def _fold_special(self, special: set[int], level: _Level) -> _Level:
        """Read the objects at the ``special`` positions of a level one by one, and return the other
        objects of the level.
        """
        if not special:
            return level
        plain = _Level()
        for position, (item, owner) in enumerate(zip(level.items, level.owners, strict=True)):
            if position in special:
                self._folder.fold(owner, [item])
            else:
                plain.items.append(item)
                plain.owners.append(owner)
        return plain
