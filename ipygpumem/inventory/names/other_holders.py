"""Finds the holders that keep an object's memory alive without its name, and the nodes that each of
them keeps.

After ``model = Net(); runs = [model.layer]``, the list ``runs`` holds a part of the model. A *node*
is an object, or a piece of memory outside of objects.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.explanation import HIDDEN_CYCLE, NOT_REACHED, OUT_OF_SIGHT
from ipygpumem.heap.holders.kept_by_graphs import graph_holders
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import StorageKey, object_key, storage_key
from ipygpumem.heap.kinds.libraries import OUTLIVES, segments
from ipygpumem.heap.knowledge.graphs import with_graphs
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.cuts import Kind
from ipygpumem.heap.paths.hidden_cycles import lines_that_end_cycles
from ipygpumem.heap.paths.remedies import NO_REMEDY, Holder, Remedy
from ipygpumem.heap.paths.roots import EVENT_LOOP, NOTEBOOK, Root, RootOf, Roots
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.heap.sizes.graph import NodeKey
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sharing import Partners, partners, types_to_compare
from ipygpumem.introspect import is_atom, is_instance, loaded_object, target_of
from ipygpumem.inventory.names.holder_rows import Groups, HolderRows

LEAST_BYTES = 1 << 12
"""Minimum bytes of a holder's part for advice."""
LEAST_SHARE = 0.01
"""Minimum share of an object's bytes that is no small part of it."""
SMALL = Holder("small objects that something else uses, too", NO_REMEDY)
_MOST_SEARCHED = 2000
"""Maximum number of objects whose holders are searched, the nearest first."""
_NOT_REACHED = replace(NOT_REACHED, remedy=NO_REMEDY)
_OUT_OF_SIGHT = replace(OUT_OF_SIGHT, remedy=NO_REMEDY)
_GRAPH = Holder("the graph of another tensor", NO_REMEDY)


class OtherHolders(NamedTuple):
    """The holders of an object's memory other than its own name."""

    groups: Groups
    """The nodes that each holder keeps alive."""
    held_outside: set[NodeKey]
    """All nodes that something outside holds, also those whose holder is not known."""


@dataclass(frozen=True, slots=True)
class OwnedObject:
    """The object whose holders are searched, and everything to which it leads.

    References to the object are counted, so no variable of ours refers to it, only the list
    ``holding``.

    Attributes:
        name: the name of the object, or the expression for it.
        is_name: True if ``name`` is a name, which does not count as a holder.
        holding: a list of the object alone.
        region: has read the object.
    """

    name: str
    is_name: bool
    holding: list[object]
    region: Region

    def reached(self) -> set[NodeKey]:
        """Return all nodes to which the object leads, its own included."""
        return self.region.reach([id(self.holding[0])])

    def held_from_outside(self, references: int) -> set[NodeKey]:
        """Return the nodes to which something outside the object refers.

        Args:
            references: number of references to the object itself that do not count: those of its
                name, and ours.
        """
        return self.region.held_from_outside({id(self.holding[0]): references})

    def roots_without_ours(self, roots: Roots) -> Roots:
        """Return the roots for a search that does not pass our own references to the object."""
        our_ids = {id(self.region.objects), id(self.region.folded), id(self.holding)}
        return replace(roots, hidden=roots.hidden | our_ids)

    def roots_outside(self, roots: Roots) -> Roots:
        """Return the roots for a search for other holders.

        The search does not pass our own references to the object, its name, or references among the
        objects in it.
        """
        roots = self.roots_without_ours(roots)
        own_name = self.name if self.is_name else ""
        namespaces = {
            key: _roots_without_name(own_name, root_of) for key, root_of in roots.namespaces.items()
        }
        hidden = roots.hidden | self.region.all_ids()
        return replace(roots, namespaces=namespaces, hidden=hidden)


def other_holders_of(
    owned: OwnedObject, references: int, reached: Collection[NodeKey], roots: Roots
) -> OtherHolders:
    """Return the other holders of an object. If it is small, or held only by a cycle in itself,
    they are known without a search of the heap.

    Args:
        owned: the object.
        references: number of references to the object that do not count.
        reached: the nodes to which the object leads.
        roots: the names and objects from which the user can reach objects.
    """
    region = owned.region
    groups = Groups()
    held_outside = owned.held_from_outside(references).intersection(reached)
    ids_to_name = _ids_to_name(region, held_outside, reached)
    is_small = region.bytes_of(reached).total() < LEAST_BYTES
    if ids_to_name and is_small and not region.may_share:
        groups[SMALL] = set(ids_to_name)
    elif ids_to_name or region.may_share:
        groups, held_outside = _searched_holders(owned, held_outside, roots)
    cycles = region.in_hidden_cycles()
    if cycles:
        groups[_hidden_cycle(owned, cycles)] = set(cycles)
    return OtherHolders(groups, held_outside)


def _searched_holders(owned: OwnedObject, held_outside: set[NodeKey], roots: Roots) -> OtherHolders:
    """Search the heap for the holders of an object, also for those of memory that it shares with
    autograd graphs or with objects elsewhere.

    Args:
        owned: the object.
        held_outside: the nodes to which something outside refers by a reference that Python counts.
        roots: the names and objects from which the user can reach objects.
    """
    region = owned.region
    heap = Heap(types=types_to_compare())  # after counting, because it refers to every object
    shared = partners(region, heap, held_outside)
    held_outside = held_outside | _saved_by_graphs(region, shared)
    ids_to_name = _ids_to_name(region, held_outside, owned.reached())
    outside = owned.roots_outside(roots)
    held_nodes = _HeldNodes(region, shared, heap, outside)
    groups = held_nodes.by_holder(ids_to_name, is_name=owned.is_name)
    if owned.is_name:
        groups = _with_ending_by_name(groups, target_of(owned.name), owned.holding[0], roots)
    of_segments = _shared_segments(region, groups, heap, owned.roots_without_ours(roots))
    heap.drop()
    return OtherHolders({**of_segments, **groups}, held_outside)


def _hidden_cycle(owned: OwnedObject, cycles: set[int]) -> Holder:
    """Return the holder of arrays of objects that lead to themselves, which the collector cannot
    free. If the object has a name, the line ends the cycles.
    """
    if not owned.is_name:
        return HIDDEN_CYCLE
    arrays = [owned.region.objects[key] for key in cycles]
    named = [(target_of(owned.name), owned.holding[0])]
    lines = lines_that_end_cycles(named, arrays, owned.region.reader.barriers)
    if not lines:
        return HIDDEN_CYCLE
    return replace(HIDDEN_CYCLE, remedy=Remedy("; ".join(lines)))


def _ids_to_name(
    region: Region, held_outside: set[NodeKey], reached: Collection[NodeKey]
) -> set[int]:
    """Return the objects held from outside whose holders are worth a row, by identity: no small
    parts, such as a dtype. Storages are missing, because the objects that show them have the same
    holders.

    Args:
        region: has read the object.
        held_outside: the nodes held from outside.
        reached: the nodes to which the object leads.
    """
    held_ids = {key for key in held_outside if isinstance(key, int)}
    if len(held_ids) > _MOST_SEARCHED:
        return held_ids  # measuring each would take too long
    atoms = {key for key in held_ids if is_atom(region.objects[key])}
    if region.bytes_of(atoms).total() < LEAST_BYTES:
        held_ids -= atoms  # constants, such as names of attributes
    least_bytes = LEAST_SHARE * region.bytes_of(reached).total()
    large_ids = set[int]()
    for key in held_ids:
        size = region.bytes_of(region.reach([key])).total()
        # Many small parts may be large together: a list of 1,000 tensors.
        if size * len(held_ids) >= least_bytes:
            large_ids.add(key)
    return large_ids


def _roots_without_name(name: str, root_of: RootOf) -> RootOf:
    """Return ``root_of``, but for one name of the notebook, for which it returns None: the name
    itself is no other holder.
    """
    text = f"{NOTEBOOK}{name}"  # a module of %run may have a global of the same name

    def root_of_another(key: object) -> Root | None:
        root = root_of(key)
        if root is None or root.text == text:
            return None
        return root

    return root_of_another


def _with_ending_by_name(groups: Groups, target: str, item: object, roots: Roots) -> Groups:
    """Return the groups, with the line that ends the object by its name if it has to be ended:
    ``w.close(); del w`` for a widget in a registry, ``task.cancel(); del task`` for a pending task
    that the event loop keeps.

    Args:
        groups: the nodes by holder.
        target: the code of the name.
        item: the object.
        roots: the names and objects from which the user can reach objects.
    """
    root = roots.registered.get(id(item))
    ending = ending_of(item)
    if ending:  # it is deleted, too, because a done task keeps its error
        start = EVENT_LOOP if root is None else root.text
    elif root is not None and root.cut is not None and root.cut.kind is Kind.CLOSED:
        start = root.text
        ending = root.cut.ending
    else:
        return groups
    ended = Groups()
    for holder, keys in groups.items():
        if holder.path.startswith(start):
            holder = replace(holder, remedy=Remedy(f"{target}.{ending}; del {target}"))
        ended[holder] = keys
    return ended


def _saved_by_graphs(region: Region, shared: Partners) -> set[int]:
    """Return the identities of the tensors that a graph from outside has saved. Such a tensor is
    its own partner: the graph's memory is shown by no other object.
    """
    saved = set[int]()
    for key in region.objects.keys() & shared.keys():
        for _, sharers in shared[key]:
            if sharers[-1] is region.objects[key]:
                saved.add(key)
    return saved


class _HeldNodes:
    """Finds the holders of the nodes that something outside keeps alive, and groups the nodes by
    holder.

    Args:
        region: the objects to which a name leads.
        shared: objects elsewhere on the same memory, whose holders also keep it.
        heap: the live objects.
        roots: the roots of other holders.
    """

    def __init__(self, region: Region, shared: Partners, heap: Heap, roots: Roots) -> None:
        self._region = region
        self._shared = shared
        self._heap = heap
        self._roots = roots

    def by_holder(self, held: set[int], *, is_name: bool) -> Groups:
        """Return the held nodes by their holder, with the memory that objects elsewhere share;
        variables come first.

        Args:
            held: the objects to which something outside refers: each is a node.
            is_name: True if the region is that of a name, not of an expression.
        """
        nearest_first = [key for key in self._region.objects if key in held]
        too_many = nearest_first[_MOST_SEARCHED:]
        objects_by_node = self._objects_to_search(nearest_first[:_MOST_SEARCHED])
        # 1. Holders that Python objects are: lists, attributes, variables.
        targets = list(chain.from_iterable(objects_by_node.values()))
        search = BackwardSearch(targets, self._heap, self._roots, for_all=True)
        rows = HolderRows(search, self._roots, too_many, is_name=is_name)
        for key, items in objects_by_node.items():
            rows.add(key, items)
        groups = rows.groups()
        # 2. Autograd graphs, which keep tensors in C++.
        sharers = self._tensors_of_partners()
        in_graphs = self._region.held_in_torch(sharers)
        in_graphs |= _saved_by_graphs(self._region, self._shared)
        in_graphs_too = in_graphs.intersection(held) - rows.without_holder
        of_graphs = self._add_tensors_of_graphs(groups, rows.without_holder)
        without_holder = rows.without_holder - of_graphs
        self._add_graphs_of_held_tensors(groups, in_graphs_too, sharers)
        # 3. Words for the remaining nodes: the search ended before it knew, or has found nothing.
        not_reached = without_holder
        if not search.is_limited:
            not_reached = without_holder.intersection(too_many)
        if not_reached:
            groups[_NOT_REACHED] = set(not_reached)
        if without_holder - not_reached:
            groups[_OUT_OF_SIGHT] = without_holder - not_reached
        return groups

    def _objects_to_search(self, held: Sequence[int]) -> dict[NodeKey, Sequence[object]]:
        """Return, for each node, the objects whose holders keep it alive: its own object, and
        objects elsewhere that show its memory.

        Args:
            held: the objects to which something outside refers.
        """
        region = self._region
        objects_by_node = dict[NodeKey, Sequence[object]]()
        for key in held:
            items = [region.objects[key]]
            for _, sharers in self._shared.get(key, ()):
                items += sharers
            objects_by_node[key] = items
        for owner, shared_pieces in self._shared.items():
            if owner in objects_by_node or len(objects_by_node) >= 2 * _MOST_SEARCHED:
                continue
            if type(owner) is int and is_atom(region.objects[owner]):
                continue
            for piece, sharers in shared_pieces:
                objects_by_node[region.node_of(piece, owner)] = sharers
        return objects_by_node

    def _tensors_of_partners(self) -> list[Any]:
        """Return the tensors from outside that show memory of the region."""
        tensor_type = loaded_object("torch", "Tensor")
        if tensor_type is None:
            return []
        tensors = dict[int, Any]()
        for _, sharers in chain.from_iterable(self._shared.values()):
            for sharer in sharers:
                if id(sharer) not in self._region.objects and is_instance(sharer, tensor_type):
                    tensors[id(sharer)] = sharer
        return list(tensors.values())

    def _add_tensors_of_graphs(self, groups: Groups, nodes: set[NodeKey]) -> set[NodeKey]:
        """Add the holders of the tensors among the nodes that only autograd keeps to the groups.
        Return the tensors among the nodes.

        Only the storage of such a tensor is held from outside. The storage may be in the groups
        already, with another tensor: that of ``rows[:10]`` with ``rows``.
        """
        tensors = _tensor_nodes_by_storage(self._region, nodes)
        grouped = set(chain.from_iterable(groups.values()))
        storages_in_groups = _tensor_nodes_by_storage(self._region, grouped)
        to_search = [storage for storage in tensors if storage not in storages_in_groups]
        if to_search:
            for storage, holder in explain(to_search, self._heap, self._roots).items():
                groups.setdefault(holder, set()).update(tensors[storage])
        return set(chain.from_iterable(tensors.values()))

    def _add_graphs_of_held_tensors(
        self, groups: Groups, nodes: set[int], sharers: Sequence[Any]
    ) -> None:
        """Add the graphs that keep the tensors among the nodes to the groups; Python objects hold
        these tensors, too.

        Args:
            groups: the groups so far.
            nodes: the nodes.
            sharers: the tensors from outside that show their memory, and are in the groups.
        """
        tensors = _tensor_nodes_by_storage(self._region, nodes)
        if not tensors:
            return
        holders = graph_holders(set(tensors), self._heap, self._roots)
        with_own_graphs = set(map(storage_key, with_graphs(sharers)))
        for storage, nodes_of_storage in tensors.items():
            holder = holders.get(storage)
            if holder is not None:
                groups.setdefault(holder, set()).update(nodes_of_storage)
            elif storage not in with_own_graphs:  # the graph of a view keeps the view's base
                groups.setdefault(_GRAPH, set()).update(nodes_of_storage)


def _tensor_nodes_by_storage(
    region: Region, keys: Collection[NodeKey]
) -> dict[StorageKey, set[NodeKey]]:
    """Return the nodes that are tensors, by their storage."""
    nodes = dict[StorageKey, set[NodeKey]]()
    for tensor in region.tensors(keys):
        storage = storage_key(tensor)
        if storage is not None:
            nodes.setdefault(storage, set()).add(id(tensor))
    return nodes


def _shared_segments(region: Region, groups: Groups, heap: Heap, roots: Roots) -> Groups:
    """Return the groups of shared memory, which stays until it is unlinked. The line deletes all
    views of it, and then unlinks it: ``del view; segment.close(); segment.unlink()``.
    """
    of_segments = Groups()
    shared = segments(list(region.objects.values()))
    if not shared:
        return of_segments
    holders = explain((), heap, roots, objects=shared)
    for segment in shared:
        holder = holders[object_key(segment)]
        reached = region.reach([id(segment)])
        lines = list[str]()
        for view, keys in groups.items():
            if keys & reached and view.remedy.deletes:
                lines.append(view.advice)
        lines.append(holder.advice)
        unlinked = Holder(f"{OUTLIVES}: {holder.path}", Remedy.of_text("; ".join(lines)))
        of_segments[unlinked] = {id(segment)}
    return of_segments
