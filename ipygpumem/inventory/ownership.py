"""Computes the memory that deleting a name would free, and finds the holders of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ipygpumem.heap.arrays import StorageKey, object_key, storage_key
from ipygpumem.heap.graph import NodeKey
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.explanation import HIDDEN_CYCLE, NOT_REACHED, OUT_OF_SIGHT
from ipygpumem.heap.holders.kept_by_graphs import graph_holders
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.knowledge.barriers import is_never_followed
from ipygpumem.heap.knowledge.graphs import with_graphs
from ipygpumem.heap.libraries import OUTLIVES, segments
from ipygpumem.heap.paths.cuts import WITH_POSITIONS, Cut, Kind
from ipygpumem.heap.paths.hidden_cycles import lines_that_end
from ipygpumem.heap.paths.remedies import MORE_THERE, NO_REMEDY, Holder, Remedy
from ipygpumem.heap.paths.roots import EVENT_LOOP, NOTEBOOK, RemovedByLines, Root, RootOf, Roots
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.heap.region import Region
from ipygpumem.heap.sharing import Partners, partners, types_to_compare
from ipygpumem.heap.sizes import Sizes
from ipygpumem.introspect import is_atom, is_instance, loaded_object, target_of, type_name
from ipygpumem.inventory.dropped_data import OtherData
from ipygpumem.inventory.holder_rows import Groups, HolderRows
from ipygpumem.inventory.top import notes_on
from ipygpumem.records import Record, ReferencePath

_MOST_SEARCHED = 2000
"""Maximum number of objects whose holders are searched, the nearest first."""
_LEAST_BYTES = 1 << 12
"""Minimum bytes of a holder's part for advice."""
_LEAST_DROPPED_BYTES = 1 << 16
"""Minimum bytes of other data that a line drops to mention."""
_PARTS_SHOWN = 5
_LEAST_SHARE = 0.01
_ALL_LINES = "all lines"
_SMALL = Holder("small objects that something else uses, too", NO_REMEDY)
_NOT_REACHED = replace(NOT_REACHED, remedy=NO_REMEDY)
_OUT_OF_SIGHT = replace(OUT_OF_SIGHT, remedy=NO_REMEDY)


@dataclass(frozen=True)
class HeldPart(Record):
    """Memory behind a name that something else keeps alive too."""

    holder: ReferencePath
    """The holder of the largest object; ``advice`` is the line that frees it."""
    objects: int
    """Number of objects to which it refers; they lead to the rest."""
    device_bytes: dict[str, int]
    """Bytes by device that no earlier part counts."""
    is_shared: bool = False
    """True if an earlier part counts memory that this holder keeps alive too."""
    shared_bytes: int = 0
    """Bytes of such memory on all devices."""

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())

    def keeps_much_of(self, size_bytes: int) -> bool:
        """Return True if the line of all holders must contain this one's, to free an object of
        ``size_bytes``: the holder keeps more than a small part of it alive.
        """
        return self.size_bytes + self.shared_bytes >= _LEAST_SHARE * size_bytes

    @property
    def has_further_references(self) -> bool:
        """True if the holder has references that its line does not remove."""
        deletes_variables = bool(Remedy.of_text(self.holder.advice).deleted_names)
        return self.holder.path.endswith(MORE_THERE) and not deletes_variables


@dataclass(frozen=True)
class Ownership(Record):
    """The memory behind an object, the part that deleting its name frees, and the holders of the
    rest.
    """

    name: str
    """The name or expression."""
    is_name: bool
    """True if a name refers to the object; it does not count as a holder."""
    type_name: str
    device_bytes: dict[str, int]
    """Bytes by device that the object leads to."""
    freed_bytes: dict[str, int]
    """Bytes by device that deleting the name frees; of an expression, those that nothing else
    holds.
    """
    parts: tuple[tuple[str, int], ...]
    """The largest parts of the object with their bytes."""
    held: tuple[HeldPart, ...] = ()
    """Other holders, the largest first."""
    complete: bool = True
    """False if there were too many objects to follow all; then ``freed_bytes`` is empty."""
    followed: bool = True
    """False for a module, class, frame or part of IPython: its content is not counted."""
    notes: tuple[str, ...] = ()
    """Notes on the size, such as the libraries that keep memory which is not counted."""
    is_at_least: bool = False
    """True if the bytes are lower bounds."""
    has_graph: bool = False
    """True if an autograd graph is a part of it: graphs of other tensors may share its nodes, which
    are no Python objects.
    """
    in_graphs_bytes: int = 0
    """Bytes that are freed with it, and to which it leads through autograd graphs alone: these keep
    them for ``backward()``.
    """
    remark: str = ""
    """The other data that is dropped if the lines of all holders are run; empty if there is none.
    """
    outputs: tuple[str, ...] = ()
    """IPython's names of the outputs that are the object itself: ``%xdel`` of any of its names
    deletes all of them.
    """

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())

    @property
    def is_small(self) -> bool:
        """True if it is too small for advice, and no holder of it is named."""
        if self.size_bytes >= _LEAST_BYTES:
            return False
        return all(part.holder == _SMALL.record() for part in self.held)


def ownership_of(
    name: str, holding: list[object], roots: Roots, references: int, *, is_name: bool
) -> Ownership:
    """Return the memory behind an object, the part that only its name keeps alive, and the holders
    of the rest.

    Args:
        name: the name of the object, or the expression for it.
        holding: a list of the object alone: the only reference to it that our callers hold.
        roots: the names and objects from which the user can reach objects.
        references: number of references to the object that do not count: of the list, and of the
            name.
        is_name: True if the name does not count as a holder.
    """
    roots = replace(roots, removed_by_lines=RemovedByLines())  # of this report only
    with undisturbed():
        region = Region(namespaces=roots.namespaces, keeps_folded=True)
        size = Sizes(region=region).measure(holding[0])
        every = region.reach([id(holding[0])])
        owned = _Owned(name, is_name, holding, region)
        groups, held_outside = _other_holders(owned, references, every, roots)
        parts, counted = _held_parts(region, groups, held_outside)
        freed = region.bytes_of(every - counted)
        size_bytes = freed.total() + sum(part.size_bytes for part in parts.values())
        held_parts, remark = _with_remarks(_in_order_of_lines(parts), size_bytes, roots, holding)
    device_bytes = Counter(freed)
    freed_by_name = dict(freed) if region.complete else {}
    for part in held_parts:
        device_bytes += Counter(part.device_bytes)
    largest_parts = [(part.name, part.size_bytes) for part in size.parts[:_PARTS_SHOWN]]
    return Ownership(
        name=name,
        is_name=is_name,
        type_name=type_name(holding[0]),
        device_bytes=dict(device_bytes),
        freed_bytes=freed_by_name,
        parts=tuple(largest_parts),
        held=tuple(held_parts),
        complete=region.complete,
        followed=not is_never_followed(holding[0]),
        notes=notes_on(holding[0], size),
        is_at_least=size.is_at_least,
        has_graph=region.graph.has_autograd,
        in_graphs_bytes=_bytes_in_graphs(region, holding, every - counted),
        remark=remark,
    )


def _bytes_in_graphs(region: Region, holding: Sequence[object], freed: Set[NodeKey]) -> int:
    """Return the bytes of the nodes freed with an object to which it leads through autograd graphs
    alone.
    """
    if not region.graph.has_autograd:
        return 0
    of_graphs = region.nodes_of_graphs()
    return region.bytes_of(freed - region.reach([id(holding[0])], of_graphs)).total()


@dataclass(frozen=True, slots=True)
class _Owned:
    """The object whose holders are searched, and what it leads to."""

    name: str
    is_name: bool
    holding: list[object]
    region: Region

    @property
    def own_name(self) -> str:
        """The name that does not count as a holder, or an empty string for an expression."""
        return self.name if self.is_name else ""


def _other_holders(
    owned: _Owned, references: int, every: Collection[NodeKey], roots: Roots
) -> tuple[Groups, set[NodeKey]]:
    """Return the other holders of an object with the nodes that each of them keeps alive, and all
    nodes that are held from outside. The holders of small objects and hidden cycles need no search.
    """
    groups = Groups()
    region, holding = owned.region, owned.holding
    held_outside = region.held_from_outside({id(holding[0]): references}).intersection(every)
    worth_naming = _worth_naming(region, held_outside, every)
    is_small = region.bytes_of(every).total() < _LEAST_BYTES
    if worth_naming and is_small and not region.may_share:
        groups[_SMALL] = set(worth_naming)
    elif worth_naming or region.may_share:
        # Our own containers refer to the object, too.
        ours = {id(region.objects), id(region.folded), id(holding)}
        without_ours = replace(roots, hidden=roots.hidden | ours)
        groups, held_outside = _searched_holders(owned, held_outside, without_ours)
    cycles = region.in_hidden_cycles()
    if cycles:
        groups[_hidden_cycle(owned, cycles)] = set(cycles)
    return groups, held_outside


def _hidden_cycle(owned: _Owned, cycles: set[int]) -> Holder:
    """Return the holder of arrays that lead to themselves, with the lines that end the cycles if
    the object has a name.
    """
    if not owned.is_name:
        return HIDDEN_CYCLE
    arrays = [owned.region.objects[key] for key in cycles]
    named = [(target_of(owned.name), owned.holding[0])]
    lines = lines_that_end(named, arrays, owned.region.reader.barriers)
    if not lines:
        return HIDDEN_CYCLE
    return replace(HIDDEN_CYCLE, remedy=Remedy("; ".join(lines)))


def _searched_holders(
    owned: _Owned, held_outside: set[NodeKey], roots: Roots
) -> tuple[Groups, set[NodeKey]]:
    """Search the heap for the holders of an object and return the same as ``_other_holders``, also
    for memory that autograd graphs or objects elsewhere share.
    """
    region, holding = owned.region, owned.holding
    heap = Heap(types=types_to_compare())  # after counting, because it refers to every object
    shared = partners(region, heap, held_outside)
    held_outside = held_outside | _saved_by_graphs(region, shared)
    every = region.reach([id(holding[0])])
    named = _worth_naming(region, held_outside, every)
    namespaces = {
        key: _roots_without_name(owned.own_name, root_of)
        for key, root_of in roots.namespaces.items()
    }
    members = region.all_ids()  # these refer to each other
    outside = replace(roots, namespaces=namespaces, hidden=roots.hidden | members)
    groups = _nodes_by_holder(region, named, shared, heap, outside, is_name=owned.is_name)
    if owned.is_name:
        groups = _ended_by_name(groups, target_of(owned.name), holding[0], roots)
    groups = {**_shared_segments(region, groups, heap, roots), **groups}
    heap.drop()
    return groups, held_outside


def _saved_by_graphs(region: Region, shared: Partners) -> set[int]:
    """Return the tensors that a graph from outside has saved: each is its own partner."""
    saved = set[int]()
    for key in region.objects.keys() & shared.keys():
        for _, same in shared[key]:
            if same[-1] is region.objects[key]:
                saved.add(key)
    return saved


def _ended_by_name(groups: Groups, target: str, item: object, roots: Roots) -> Groups:
    """Return the groups of a name's object, which is ended by its name if it has to be.

    The event loop keeps a pending task, and a registry a widget: a user writes ``w.close()``.
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


def _held_parts(
    region: Region, groups: Groups, held: set[NodeKey]
) -> tuple[dict[Holder, HeldPart], set[NodeKey]]:
    """Return the memory that each holder keeps alive, and all nodes of these parts."""
    parts = _Parts(region)
    named = set[NodeKey]()
    for holder, keys in groups.items():
        parts.add(holder, keys)
        named |= keys
    parts.add_without_holder(held - named)
    return parts.with_memory(), parts.counted


def _with_remarks(
    parts: Mapping[Holder, HeldPart], size_bytes: int, roots: Roots, holding: Sequence[object]
) -> tuple[list[HeldPart], str]:
    """Return the parts, with a remark on each line that drops other data, such as the rest of a
    tuple, and the remark on all lines together: several containers may share that data.

    The lines of small parts are not among these.

    Args:
        parts: the parts by their holders.
        size_bytes: bytes of the object.
        roots: ``roots.removed_by_lines`` has the objects that the lines remove.
        holding: a list of the object itself, of which a line may remove a name.
    """
    removed_objects = {
        key: item for key, item in roots.removed_by_lines.objects.items() if item is not holding[0]
    }
    roots.removed_by_lines.objects.clear()  # they would count as holders
    cuts = _cuts_by_line(parts, size_bytes)
    # What dies with the object is held by its name, so no line drops it as other data.
    other_data = OtherData(dict.fromkeys(cuts, 0), cuts, removed_objects, roots.namespaces)
    del removed_objects
    remarks = other_data.remarks(_LEAST_DROPPED_BYTES, {}, is_certain=True)
    remarked = list[HeldPart]()
    for holder, part in parts.items():
        remedy = holder.remedy.with_comment(remarks.get(holder.remedy.line, ""))
        record = replace(holder, remedy=remedy).record(roots.names)
        remarked.append(replace(part, holder=record))
    return remarked, remarks.get(_ALL_LINES, "")


def _cuts_by_line(parts: Mapping[Holder, HeldPart], size_bytes: int) -> dict[str, Sequence[Cut]]:
    """Return the references that each line removes, and by ``_ALL_LINES`` those of all lines that
    free much of an object.

    Args:
        parts: the parts by their holders.
        size_bytes: bytes of the object.
    """
    cuts = dict[str, Sequence[Cut]]()
    lines_of_large_parts = set[str]()
    for holder, part in parts.items():
        line = holder.remedy.line
        cuts[line] = holder.remedy.removed or cuts.get(line, ())
        if part.keeps_much_of(size_bytes):
            lines_of_large_parts.add(line)
    cuts_of_large_parts = [cuts[line] for line in cuts if line in lines_of_large_parts]
    cuts[_ALL_LINES] = list(chain.from_iterable(cuts_of_large_parts))
    return cuts


def _in_order_of_lines(parts: Mapping[Holder, HeldPart]) -> dict[Holder, HeldPart]:
    """Return the parts, the largest first, but of those whose lines delete items of one list the
    last item first: the line of an earlier item would move it.
    """
    holders = sorted(parts, key=lambda holder: parts[holder].size_bytes, reverse=True)
    places = dict[int, list[int]]()
    """The places of the holders whose lines delete items, by the list."""
    positions = dict[int, int]()
    """The position of the item that the line of the holder at a place deletes."""
    for place, holder in enumerate(holders):
        for cut in holder.remedy.removed:
            if cut.kind in WITH_POSITIONS and place not in positions:
                places.setdefault(cut.owner_id, []).append(place)
                positions[place] = cut.position
    ordered = list(holders)
    for of_list in places.values():
        last_first = sorted(of_list, key=positions.__getitem__, reverse=True)
        for place, earlier_place in zip(of_list, last_first, strict=True):
            ordered[place] = holders[earlier_place]
    return {holder: parts[holder] for holder in ordered}


class _Parts:
    """The memory that each holder keeps alive.

    Memory that several holders keep alive counts for the first of them.

    Attributes:
        counted: the nodes of all parts so far.
    """

    def __init__(self, region: Region) -> None:
        self.counted = set[NodeKey]()
        self._region = region
        self._by_holder: dict[Holder, HeldPart] = {}

    def add(self, holder: Holder, keys: Collection[NodeKey]) -> None:
        """Add the memory behind some nodes that a holder refers to."""
        added, shared_bytes = self._count(keys)
        is_shared = shared_bytes >= _LEAST_BYTES
        if added.total() >= _LEAST_BYTES or is_shared:
            part = HeldPart(holder.record(), len(keys), dict(added), is_shared, shared_bytes)
            self._join(holder, part)
        else:  # a number that the whole process shares is no reason to delete its holder
            self._join_small(keys, added)

    def add_without_holder(self, keys: Collection[NodeKey]) -> None:
        """Add the memory behind some nodes whose holders were not searched."""
        added, _ = self._count(keys)
        if added.total() < _LEAST_BYTES:
            added.clear()  # constants, such as names of attributes
        self._join_small(keys, added)

    def with_memory(self) -> dict[Holder, HeldPart]:
        """Return the parts that have memory, or share that of earlier parts, by their holders."""
        parts = dict[Holder, HeldPart]()
        for holder, part in self._by_holder.items():
            if part.size_bytes or part.is_shared:
                parts[holder] = part
        return parts

    def _count(self, keys: Collection[NodeKey]) -> tuple[Counter[str], int]:
        """Return the bytes behind some nodes that no earlier part has, by device, and the number of
        those that one has.
        """
        reached = self._region.reach(keys)
        shared_bytes = self._region.bytes_of(reached & self.counted).total()
        added = self._region.bytes_of(reached - self.counted)
        self.counted |= reached
        return added, shared_bytes

    def _join_small(self, keys: Collection[NodeKey], added: Counter[str]) -> None:
        """Add memory to that of small objects."""
        self._join(_SMALL, HeldPart(_SMALL.record(), len(keys), dict(added)))

    def _join(self, holder: Holder, part: HeldPart) -> None:
        """Add a part to that of the same holder, if there is one."""
        earlier = self._by_holder.get(holder)
        if earlier is not None:
            total = Counter(earlier.device_bytes)
            total.update(part.device_bytes)
            objects = earlier.objects + part.objects
            part = replace(part, objects=objects, device_bytes=dict(total))
        self._by_holder[holder] = part


def _worth_naming(
    region: Region, held_outside: set[NodeKey], every: Collection[NodeKey]
) -> set[int]:
    """Return the objects held from outside, without small parts of ``every`` node, such as a
    dtype. Storages are named by the objects that show them.
    """
    held = {key for key in held_outside if isinstance(key, int)}
    if len(held) > _MOST_SEARCHED:
        return held
    atoms = {key for key in held if is_atom(region.objects[key])}
    if region.bytes_of(atoms).total() < _LEAST_BYTES:
        held -= atoms  # constants, such as names of attributes
    least = _LEAST_SHARE * region.bytes_of(every).total()
    large = set[int]()
    for key in held:
        size = region.bytes_of(region.reach([key])).total()
        if size * len(held) >= least:
            large.add(key)
    return large


def _roots_without_name(name: str, root_of: RootOf) -> RootOf:
    """Return a function that names the roots of a namespace, except a name itself."""
    text = f"{NOTEBOOK}{name}"  # a module of %run may have a global of the same name

    def root_of_another(key: object) -> Root | None:
        root = root_of(key)
        if root is None or root.text == text:
            return None
        return root

    return root_of_another


# -- the search for holders -----------------------------------------------------------------------


def _nodes_by_holder(
    region: Region, held: set[int], shared: Partners, heap: Heap, roots: Roots, *, is_name: bool
) -> Groups:
    """Return the held nodes, and the memory that partners share, by holder; variables first."""
    nearest = [key for key in region.objects if key in held]
    too_many = nearest[_MOST_SEARCHED:]
    objects_by_node = _objects_to_search(region, nearest[:_MOST_SEARCHED], shared)
    targets = list(chain.from_iterable(objects_by_node.values()))
    search = BackwardSearch(targets, heap, roots, for_all=True)
    rows = HolderRows(search, roots, too_many, is_name=is_name)
    for key, items in objects_by_node.items():
        rows.add(key, items)
    groups = rows.groups()
    missing = rows.without_holder
    sharers = _tensors_of_partners(region, shared)
    in_graphs = region.held_in_torch(sharers) | _saved_by_graphs(region, shared)
    in_graphs = in_graphs.intersection(held) - missing
    missing -= _add_tensors_of_graphs(groups, region, missing, heap, roots)
    _add_graphs_of_held_tensors(
        groups, _tensor_nodes_by_storage(region, in_graphs), sharers, heap, roots
    )
    not_reached = missing if search.is_limited else missing.intersection(too_many)
    if not_reached:
        groups[_NOT_REACHED] = set(not_reached)
    if missing - not_reached:
        groups[_OUT_OF_SIGHT] = missing - not_reached
    return groups


def _objects_to_search(
    region: Region, held: Sequence[int], shared: Partners
) -> dict[NodeKey, Sequence[object]]:
    """Return the objects whose holders keep each node of a region alive.

    Args:
        region: the objects that a name leads to.
        held: the objects to which other objects refer, too: each is a node.
        shared: objects elsewhere on the same memory, whose holders also keep it.
    """
    objects_by_node = dict[NodeKey, Sequence[object]]()
    for key in held:
        items = [region.objects[key]]
        for _, same in shared.get(key, ()):
            items += same
        objects_by_node[key] = items
    for owner, pieces in shared.items():
        if owner in objects_by_node or len(objects_by_node) >= 2 * _MOST_SEARCHED:
            continue
        if type(owner) is int and is_atom(region.objects[owner]):
            continue
        for piece, same in pieces:
            objects_by_node[region.node_of(piece, owner)] = same
    return objects_by_node


def _add_tensors_of_graphs(
    groups: Groups, region: Region, missing: set[NodeKey], heap: Heap, roots: Roots
) -> set[NodeKey]:
    """Add the holders of tensors that only autograd keeps to the groups; return these tensors.

    A tensor counts as one of these if only its storage is held from outside. Such a storage may be
    in the groups with another tensor: ``rows[:10]`` with ``rows``.
    """
    by_storage = _tensor_nodes_by_storage(region, missing)
    grouped = _tensor_nodes_by_storage(region, set(chain.from_iterable(groups.values())))
    tensors = {storage: nodes for storage, nodes in by_storage.items() if storage not in grouped}
    if tensors:
        for storage, holder in explain(tensors, heap, roots).items():
            groups.setdefault(holder, set()).update(tensors[storage])
    return set(chain.from_iterable(by_storage.values()))


_GRAPH = Holder("the graph of another tensor", NO_REMEDY)


def _tensors_of_partners(region: Region, shared: Partners) -> list[Any]:
    """Return the tensors from outside that show memory of the region."""
    tensor_type = loaded_object("torch", "Tensor")
    if tensor_type is None:
        return []
    tensors = dict[int, Any]()
    for _, sharers in chain.from_iterable(shared.values()):
        for sharer in sharers:
            if id(sharer) not in region.objects and is_instance(sharer, tensor_type):
                tensors[id(sharer)] = sharer
    return list(tensors.values())


def _add_graphs_of_held_tensors(
    groups: Groups,
    nodes_by_storage: Mapping[StorageKey, set[NodeKey]],
    sharers: Sequence[Any],
    heap: Heap,
    roots: Roots,
) -> None:
    """Add the tensors whose graphs keep tensors that have Python holders, too.

    Args:
        groups: the groups of nodes so far.
        nodes_by_storage: the tensors that are kept.
        sharers: the tensors outside that show the same memory; their holders are in the groups.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
    """
    if not nodes_by_storage:
        return
    holders = graph_holders(set(nodes_by_storage), heap, roots)
    with_own_graphs = set(map(storage_key, with_graphs(sharers)))
    for storage, nodes in nodes_by_storage.items():
        holder = holders.get(storage)
        if holder is not None:
            groups.setdefault(holder, set()).update(nodes)
        elif storage not in with_own_graphs:  # the graph of a view keeps the view's base
            groups.setdefault(_GRAPH, set()).update(nodes)


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
    """Return the shared memory, which stays until it is unlinked, and the line that frees it after
    all views of it.
    """
    of_segments = Groups()
    shared = segments(list(region.objects.values()))
    if not shared:
        return of_segments
    holders = explain((), heap, roots, more=shared)
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
