"""Computes the memory that deleting a name would free, and finds the holders of the rest."""

from __future__ import annotations

import functools
import gc
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from ipygpumem.heap.arrays import StorageKey, is_of_library, storage_key
from ipygpumem.heap.graph import NodeKey
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.backward import BackwardSearch, WayTo
from ipygpumem.heap.holders.cuts import Cut, Kind, statement_of
from ipygpumem.heap.holders.hidden_cycles import lines_that_end
from ipygpumem.heap.holders.path import Way
from ipygpumem.heap.holders.paths import PathWriter
from ipygpumem.heap.holders.roots import EVENT_LOOP, NOTEBOOK, REMOVE_THEM, Rank, Root, Roots
from ipygpumem.heap.holders.search import HIDDEN_CYCLE, explain, kept_by_graphs
from ipygpumem.heap.holders.tasks import ending_of
from ipygpumem.heap.knowledge.barriers import Barriers, is_left_out
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.libraries import OUTLIVES, is_segment, segments
from ipygpumem.heap.region import Region
from ipygpumem.heap.sharing import Partners, partners, types_to_compare
from ipygpumem.heap.sizes import Sizes
from ipygpumem.introspect import (
    is_atom,
    is_exactly,
    is_instance,
    is_users_class,
    module_of,
    target_of,
    type_name,
)
from ipygpumem.inventory.dropped_data import OtherData, with_remark
from ipygpumem.inventory.top import notes_on
from ipygpumem.records import Record, ReferencePath, line_of

_MOST_SEARCHED = 2000
"""Maximum number of objects whose holders are searched, the nearest first."""
_MOST_ALIASES = 4
"""Maximum number of names in a row."""
_LEAST_BYTES = 1 << 12
"""Minimum bytes of a holder's part for advice."""
_LEAST_DROPPED_BYTES = 1 << 16
"""Minimum bytes of other data that a line drops to mention."""
_MOST_PLACES = 4
"""Maximum number of places in one variable to name."""
_MOST_APART = 40
"""Maximum number of objects in one place whose lines are written one by one."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PARTS_SHOWN = 5
_LEAST_SHARE = 0.01
_MORE_THERE = " more there"
_ALL_LINES = "all lines"
_SMALL = ReferencePath("small objects that something else uses, too", "")
_NOT_REACHED = ReferencePath("something that the search did not reach within its limits", "")
_UNSEEN = ReferencePath(
    "something that cannot be seen from Python: a running function or compiled code", ""
)


@dataclass
class _Place:
    """A container or object that refers to some of a row's objects.

    Attributes:
        chain: the objects from the root to it.
        items: the objects by their nodes.
    """

    chain: Sequence[object]
    items: dict[NodeKey, object] = field(default_factory=dict)


@dataclass
class _Row:
    """One holder, with the advice for one object and for several, and the objects that it holds.

    Attributes:
        more: number of further references of the same root to one object.
        is_whole: True if the advice for several frees all to which the root leads.
        keys: the nodes of the objects.
        places: where the root holds the objects, by the identity of the object that refers to them.
    """

    root: Root
    of_single: ReferencePath
    of_many: ReferencePath
    more: int
    is_whole: bool
    keys: set[NodeKey] = field(default_factory=set)
    places: dict[int, _Place] = field(default_factory=dict)

    def add(self, key: NodeKey, steps: Sequence[object]) -> None:
        """Add an object, to which the root leads by these steps."""
        self.keys.add(key)
        if len(steps) > 1:
            place = self.places.setdefault(id(steps[-2]), _Place(steps[:-1]))
            place.items[key] = steps[-1]

    def holder(self, line_for_all: str) -> ReferencePath:
        """Return the holder with the number of its references.

        Args:
            line_for_all: the line that removes the references to all objects, of a row that is not
                whole.
        """
        holder = self.of_many
        if len(self.keys) == 1:
            holder = self.of_single
        elif not self.is_whole:
            holder = replace(holder, advice=line_for_all or REMOVE_THEM)
        if self.more == 0:
            return holder
        return replace(holder, path=f"{holder.path}, and {self.more:,}{_MORE_THERE}")


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

    @property
    def has_further_references(self) -> bool:
        """True if the holder has references that its line does not remove."""
        names = line_of(self.holder.advice).removeprefix("del ").split(", ")
        deletes_variables = all(name.isidentifier() for name in names)
        return self.holder.path.endswith(_MORE_THERE) and not deletes_variables


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
        return all(part.holder == _SMALL for part in self.held)


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
    roots = replace(roots, cuts={}, removed={})  # of this report only
    with undisturbed():
        region = Region(namespaces=roots.namespaces, keeps_folded=True)
        size = Sizes(region=region).measure(holding[0])
        every = region.reach([id(holding[0])])
        owned = _Owned(name, is_name, holding, region)
        groups, held_outside = _other_holders(owned, references, every, roots)
        held_parts, counted = _parts(region, groups, held_outside)
        freed = region.bytes_of(every - counted)
        held_parts, remark = _with_remarks(held_parts, roots, holding)
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
        held=tuple(sorted(held_parts, key=attrgetter("size_bytes"), reverse=True)),
        complete=region.complete,
        followed=not is_left_out(holding[0]),
        notes=notes_on(holding[0], size),
        is_at_least=size.is_at_least,
        has_graph=region.graph.has_autograd,
        remark=remark,
    )


_Groups = dict[ReferencePath, set[NodeKey]]
"""The nodes that each holder keeps alive."""


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
) -> tuple[_Groups, set[int]]:
    """Return the nodes that something other than the name keeps alive by their holders, and all
    nodes that are held from outside.
    """
    groups = _Groups()
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
        groups, held_outside = _holders(owned, held_outside, without_ours)
    cycles = region.in_hidden_cycles()
    if cycles:
        groups[_hidden_cycle(owned, cycles)] = set(cycles)
    return groups, held_outside


def _hidden_cycle(owned: _Owned, cycles: set[int]) -> ReferencePath:
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
    return ReferencePath(HIDDEN_CYCLE.path, "; ".join(lines))


def _holders(owned: _Owned, held_outside: set[int], roots: Roots) -> tuple[_Groups, set[int]]:
    """Return the nodes that something else keeps alive by their holders, and all nodes that are
    held from outside.
    """
    region, holding = owned.region, owned.holding
    heap = Heap(types=types_to_compare())  # after counting, because it refers to every object
    shared = partners(region, heap, held_outside)
    held_outside = held_outside | _saved_by_graphs(region, shared)
    every = region.reach([id(holding[0])])
    named = _worth_naming(region, held_outside, every)
    namespaces = {
        key: _without(owned.own_name, root_of) for key, root_of in roots.namespaces.items()
    }
    members = region.objects.keys() | set(map(id, region.folded))  # these refer to each other
    outside = replace(roots, namespaces=namespaces, hidden=roots.hidden | members)
    groups = _by_holder(region, named, shared, heap, outside, is_name=owned.is_name)
    if owned.is_name:
        groups = _ended_by_name(groups, target_of(owned.name), holding[0], roots)
    groups = {**_of_segments(region, groups, heap, roots), **groups}
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


def _ended_by_name(groups: _Groups, target: str, item: object, roots: Roots) -> _Groups:
    """Return the groups of a name's object, which is ended by its name if it has to be.

    The event loop keeps a pending task, and a registry a widget: a user writes ``w.close()``.
    """
    root = roots.kept.get(id(item))
    ending = ending_of(item)
    if ending:  # it is deleted, too, because a done task keeps its error
        start = EVENT_LOOP if root is None else root.text
    elif root is not None and root.cut is not None and root.cut.kind is Kind.CLOSED:
        start = root.text
        ending = root.cut.ending
    else:
        return groups
    ended = _Groups()
    for holder, keys in groups.items():
        if holder.path.startswith(start):
            holder = replace(holder, advice=f"{target}.{ending}; del {target}")
        ended[holder] = keys
    return ended


def _parts(region: Region, groups: _Groups, held: set[int]) -> tuple[list[HeldPart], set[NodeKey]]:
    """Return the memory that each holder keeps alive, and all nodes of these parts."""
    parts = _Parts(region)
    named = set[NodeKey]()
    for holder, keys in groups.items():
        parts.add(holder, keys)
        named |= keys
    parts.add_without_holder(held - named)
    return parts.with_memory(), parts.counted


def _with_remarks(
    parts: Sequence[HeldPart], roots: Roots, holding: Sequence[object]
) -> tuple[list[HeldPart], str]:
    """Return the parts, with a remark on each line that drops other data, such as the rest of a
    tuple, and the remark on all lines together: several containers may share that data.

    Args:
        parts: the parts.
        roots: have the references that the lines remove.
        holding: a list of the object itself, of which a line may remove a name.
    """
    removed = {key: item for key, item in roots.removed.items() if item is not holding[0]}
    roots.removed.clear()  # they would count as holders
    # What dies with the object is held by its name, so it is no other data.
    lines = [line_of(part.holder.advice) for part in parts]
    cuts = {line: roots.cuts.get(line, []) for line in lines}
    cuts[_ALL_LINES] = list(chain.from_iterable(cuts.values()))
    other_data = OtherData(dict.fromkeys(cuts, 0), cuts, removed, roots.namespaces)
    del removed
    remarks = other_data.remarks(_LEAST_DROPPED_BYTES, {}, is_certain=True)
    remarked = list[HeldPart]()
    for part in parts:
        advice = with_remark(part.holder.advice, remarks)
        remarked.append(replace(part, holder=replace(part.holder, advice=advice)))
    return remarked, remarks.get(_ALL_LINES, "")


class _Parts:
    """The memory that each holder keeps alive.

    Memory that several holders keep alive counts for the first of them.

    Attributes:
        counted: the nodes of all parts so far.
    """

    def __init__(self, region: Region) -> None:
        self.counted = set[NodeKey]()
        self._region = region
        self._by_holder: dict[ReferencePath, HeldPart] = {}

    def add(self, holder: ReferencePath, keys: Collection[NodeKey]) -> None:
        """Add the memory behind some nodes that a holder refers to."""
        added, shared_bytes = self._count(keys)
        is_shared = shared_bytes >= _LEAST_BYTES
        if added.total() >= _LEAST_BYTES or is_shared:
            part = HeldPart(holder, len(keys), dict(added), is_shared, shared_bytes)
        else:  # a number that the whole process shares is no reason to delete its holder
            part = HeldPart(_SMALL, len(keys), dict(added))
        self._join(part)

    def add_without_holder(self, keys: Collection[NodeKey]) -> None:
        """Add the memory behind some nodes whose holders were not searched."""
        added, _ = self._count(keys)
        if added.total() < _LEAST_BYTES:
            added.clear()  # constants, such as names of attributes
        self._join(HeldPart(_SMALL, len(keys), dict(added)))

    def with_memory(self) -> list[HeldPart]:
        """Return the parts that have memory, or share that of earlier parts."""
        return [part for part in self._by_holder.values() if part.size_bytes or part.is_shared]

    def _count(self, keys: Collection[NodeKey]) -> tuple[Counter[str], int]:
        """Return the bytes behind some nodes that no earlier part has, by device, and the number of
        those that one has.
        """
        reached = self._region.reach(keys)
        shared_bytes = self._region.bytes_of(reached & self.counted).total()
        added = self._region.bytes_of(reached - self.counted)
        self.counted |= reached
        return added, shared_bytes

    def _join(self, part: HeldPart) -> None:
        """Add a part to that of the same holder, if there is one."""
        earlier = self._by_holder.get(part.holder)
        if earlier is not None:
            total = Counter(earlier.device_bytes)
            total.update(part.device_bytes)
            objects = earlier.objects + part.objects
            part = replace(part, objects=objects, device_bytes=dict(total))
        self._by_holder[part.holder] = part


def _worth_naming(region: Region, held_outside: set[int], every: Collection[NodeKey]) -> set[int]:
    """Return the objects held from outside, without small parts of ``every`` node, such as a
    dtype.
    """
    if len(held_outside) > _MOST_SEARCHED:
        return held_outside
    atoms = {key for key in held_outside if is_atom(region.objects[key])}
    if region.bytes_of(atoms).total() < _LEAST_BYTES:
        held_outside = held_outside - atoms  # constants, such as names of attributes
    least = _LEAST_SHARE * region.bytes_of(every).total()
    large = set[int]()
    for key in held_outside:
        size = region.bytes_of(region.reach([key])).total()
        if size * len(held_outside) >= least:
            large.add(key)
    return large


_RootOf = Callable[[object], Root | None]


def _without(name: str, root_of: _RootOf) -> _RootOf:
    """Return a function that names the roots of a namespace, except a name itself."""
    text = f"{NOTEBOOK}{name}"  # a module of %run may have a global of the same name

    def root_of_another(key: object) -> Root | None:
        root = root_of(key)
        if root is None or root.text == text:
            return None
        return root

    return root_of_another


# -- the search for holders -----------------------------------------------------------------------


def _by_holder(
    region: Region, held: set[int], shared: Partners, heap: Heap, roots: Roots, *, is_name: bool
) -> _Groups:
    """Return the held nodes, and the memory that partners share, by holder; variables first."""
    nearest = [key for key in region.objects if key in held]
    too_many = nearest[_MOST_SEARCHED:]
    searched = _objects_to_search(region, nearest[:_MOST_SEARCHED], held, shared)
    targets = [item for items in searched.values() for item in items]
    search = BackwardSearch(targets, heap, roots, for_all=True)
    rows = _HolderRows(search, roots, too_many, is_name=is_name)
    for key, items in searched.items():
        rows.add(key, items)
    groups = rows.groups()
    missing = rows.without_holder
    in_graphs = region.held_in_torch().intersection(held) - missing
    missing -= _add_graphs(groups, region, missing, heap, roots)
    _add_more_graphs(groups, region, in_graphs, heap, roots)
    not_reached = missing if search.is_cut else missing.intersection(too_many)
    if not_reached:
        groups[_NOT_REACHED] = set(not_reached)
    if missing - not_reached:
        groups[_UNSEEN] = missing - not_reached
    return groups


def _objects_to_search(
    region: Region, nearest: Sequence[int], held: set[int], shared: Partners
) -> dict[NodeKey, Sequence[object]]:
    """Return the objects whose holders keep each node: its own, and those that show its memory."""
    searched = dict[NodeKey, Sequence[object]]()
    for key in nearest:
        items = [region.objects[key]]
        for _, same in shared.get(key, ()):
            items += same
        searched[key] = items
    for owner, pieces in shared.items():
        if owner in searched or len(searched) >= 2 * _MOST_SEARCHED:
            continue
        if type(owner) is int and is_atom(region.objects[owner]):
            continue
        for piece, same in pieces:
            searched[region.node_of(piece, owner)] = same
    return searched


def _add_graphs(
    groups: _Groups, region: Region, missing: set[NodeKey], heap: Heap, roots: Roots
) -> set[NodeKey]:
    """Add the holders of tensors that autograd keeps to the groups; return these tensors."""
    tensors = dict[StorageKey, NodeKey]()
    for tensor in region.tensors(missing):
        storage = storage_key(tensor)
        if storage is not None:
            tensors[storage] = id(tensor)
    if tensors:
        for storage, holder in explain(tensors, heap, roots).items():
            groups.setdefault(holder, set()).add(tensors[storage])
    return set(tensors.values())


_GRAPH = ReferencePath("the graph of another tensor", "")


def _add_more_graphs(
    groups: _Groups, region: Region, keys: set[int], heap: Heap, roots: Roots
) -> None:
    """Add the tensors whose graphs keep tensors that have Python holders, too."""
    tensors = dict[StorageKey, int]()
    for tensor in region.tensors(keys):
        storage = storage_key(tensor)
        if storage is not None:
            tensors[storage] = id(tensor)
    if not tensors:
        return
    holders = kept_by_graphs(set(tensors), heap, roots)
    for storage, key in tensors.items():
        groups.setdefault(holders.get(storage, _GRAPH), set()).add(key)


class _HolderRows:
    """The rows of holders, by their roots: one for each place in which a root holds an object.

    Attributes:
        without_holder: nodes of which no holder is known.
    """

    def __init__(
        self,
        search: BackwardSearch,
        roots: Roots,
        not_searched: Sequence[int],
        *,
        is_name: bool,
    ) -> None:
        self._cuts = roots.cuts
        self._removed = roots.removed
        self.without_holder = set[NodeKey](not_searched)
        self._search = search
        self._writer = PathWriter(roots)
        self._is_name = is_name
        self._by_root: dict[str, list[_Row]] = {}
        self._references = ReferenceReader(Barriers())
        self._with_neighbours: set[int] = set()
        """Containers whose items have been added, by identity."""

    def add(self, key: NodeKey, items: Sequence[object]) -> None:
        """Add the holders of a node; ``items`` are its object, and objects that show its memory,
        too.
        """
        ways = self._search.ways_to(items) or self._unnamed_way(items)
        if not ways and (type(key) is int or self._search.is_cut):
            # An object to which nothing visible refers, such as an array in a tensor, belongs to
            # its partner here.
            self.without_holder.add(key)
        for way in ways:
            row = self._row(key, way.roots, way.steps, way.references)
            if row is not None:
                row.add(key, way.steps)
                self._add_neighbours(row, way.steps)

    def _unnamed_way(self, items: Sequence[object]) -> list[WayTo]:
        """Return a way from an object to which nothing visible refers, if there is one."""
        for item in items:
            chain_down = self._search.chain(item, self._search.unnamed)
            if chain_down is not None:
                root, steps = chain_down
                return [WayTo([root], steps, 1)]
        return []

    def groups(self) -> dict[ReferencePath, set[NodeKey]]:
        """Return the nodes by holder; variables first."""
        rows = chain.from_iterable(self._by_root.values())
        groups = _Groups()
        for row in sorted(rows, key=_is_no_variable):
            cuts = list[Cut]()
            if len(row.keys) > 1 and not row.is_whole:
                cuts = self._cuts_of(row)
            holder = row.holder(statement_of(cuts))
            if cuts:
                self._cuts[line_of(holder.advice)] = cuts
            groups.setdefault(holder, set()).update(row.keys)
        return groups

    def _cuts_of(self, row: _Row) -> list[Cut]:
        """Return the references to all objects of a row; none if one of them has no line."""
        cuts = list[Cut]()
        for place in row.places.values():
            items = list(place.items.values())
            of_place = self._writer.cuts_of_items(row.root, place.chain, items)
            if not of_place and len(items) <= _MOST_APART:
                for item in items:
                    way = self._writer.way(row.root, (*place.chain, item))
                    if not way.cuts:
                        return []
                    of_place += way.cuts
            if not of_place:
                return []
            cuts += of_place
        return cuts

    def _row(
        self, key: NodeKey, names: Sequence[Root], steps: Sequence[object], number: int
    ) -> _Row | None:
        """Return the row for a way to a node; None if the root has too many places."""
        root = names[0]
        rows = self._by_root.setdefault(root.text or str(id(steps[0])), [])
        for row in rows:
            if key not in row.keys:
                return row
        if len(rows) == _MOST_PLACES:
            rows[-1].more += number
            return None
        way = self._way(root, steps)
        of_single, of_many = self._texts(way, names, steps, number)
        if of_single.advice.startswith("del "):
            for row in rows:
                # Another way through an object that is deleted as a whole.
                if row.of_single.advice == of_single.advice:
                    return row
        first_id = id(steps[0])
        frees_first = any(cut.removed_id == first_id for cut in way.cuts)
        deletes_name = of_many.advice != way.holder.advice
        is_whole = not way.cuts or frees_first or deletes_name
        rows.append(_Row(root, of_single, of_many, number - 1, is_whole))
        return rows[-1]

    def _way(self, root: Root, steps: Sequence[object]) -> Way:
        """Return the way to an object.

        The line for a part of a model or optimizer, such as ``jobs["opt"]``, removes all of it.
        """
        way = self._writer.way(root, steps)
        if way.holder.advice:
            return way
        for position, step in enumerate(steps):
            if position > 0 and _is_whole_of_torch(step):
                to_whole = self._writer.way(root, steps[: position + 1])
                advice = to_whole.holder.advice
                return replace(to_whole, holder=replace(way.holder, advice=advice))
        return way

    def _texts(
        self, way: Way, names: Sequence[Root], steps: Sequence[object], number: int
    ) -> tuple[ReferencePath, ReferencePath]:
        """Return the holder with the line that frees one object, and with the line for several."""
        first = steps[0]
        holder = way.holder
        if way.cuts and holder.advice:
            self._cuts[line_of(holder.advice)] = list(way.cuts)
        may_delete = self._may_delete(first)
        of_whole = _named(holder, names, first, may_delete=may_delete)
        has_other_data = _is_container(first) or is_of_library(first, "torch.nn", "Module")
        if of_whole.advice != holder.advice and has_other_data:
            self._note_deletion(of_whole.advice, names, first)
        if self._is_deleted_as_a_whole(steps, number):
            return of_whole, of_whole
        of_single = _named(holder, names[:1], first, may_delete=False)
        is_whole = _is_whole_of_torch(first) or is_instance(first, type)
        if not of_single.advice and is_whole:
            return of_whole, of_whole
        if not _is_container(first):
            return of_single, of_single
        return of_single, of_whole

    def _note_deletion(self, advice: str, names: Sequence[Root], item: object) -> None:
        """Record that a line deletes the variables of an object."""
        cuts = list[Cut]()
        for root in names:
            if root.cut is not None and root.rank is Rank.VARIABLE:
                cuts.append(replace(root.cut, removed_id=id(item)))
        self._cuts[line_of(advice)] = cuts
        self._removed[id(item)] = item

    def _may_delete(self, item: object) -> bool:
        """Return True if deleting the variables of an object may free it."""
        if is_segment(item):
            return False  # it stays until it is unlinked
        roots = self._search.roots_of(item)
        if any(map(_is_of_output, roots)):
            return True
        return all(root.rank is not Rank.IPYTHON for root in roots)

    def _is_deleted_as_a_whole(self, steps: Sequence[object], number: int) -> bool:
        """Return True if an object has nothing that its user may want to keep.

        Args:
            steps: the chain from it to an object that was asked about.
            number: number of its references to that object.
        """
        first = steps[0]
        if len(steps) == 1 or (self._is_name and not _is_users(first)):
            return True
        return number > 1 and _is_container(first) and number == _number_of_items(first)

    def _add_neighbours(self, row: _Row, steps: Sequence[object]) -> None:
        """Add the objects of a container that were not searched: it may hold many more than the one
        that was.
        """
        if not self.without_holder or len(steps) == 1:
            return
        container = steps[-2]
        if id(container) in self._with_neighbours:
            return
        self._with_neighbours.add(id(container))
        references = self._references.of([container]).of_python
        neighbours = {id(item): item for item in references if id(item) in self.without_holder}
        for key, item in neighbours.items():
            row.add(key, (*steps[:-1], item))
        self.without_holder -= neighbours.keys()


def _is_no_variable(row: _Row) -> bool:
    return not row.of_single.path.startswith(NOTEBOOK)


def _of_segments(region: Region, groups: _Groups, heap: Heap, roots: Roots) -> _Groups:
    """Return the shared memory, which stays until it is unlinked, and the line that frees it after
    all views of it.
    """
    of_segments = _Groups()
    shared = segments(list(region.objects.values()))
    if not shared:
        return of_segments
    holders = explain((), heap, roots, more=shared)
    for segment in shared:
        holder = holders["object", id(segment)]
        reached = region.reach([id(segment)])
        lines = list[str]()
        for view, keys in groups.items():
            if keys & reached and view.advice.startswith("del "):
                lines.append(view.advice)
        lines.append(holder.advice)
        path = ReferencePath(f"{OUTLIVES}: {holder.path}", "; ".join(lines))
        of_segments[path] = {id(segment)}
    return of_segments


def _is_users(item: object) -> bool:
    """Return True for a container, a user's object, a class or a cached function: it may hold more,
    so that no advice deletes all of it.
    """
    if is_instance(item, type) or is_exactly(item, functools._lru_cache_wrapper):
        return True
    return _is_container(item) or is_users_class(type(item))


def _is_whole_of_torch(item: object) -> bool:
    """Return True for a torch module or optimizer, whose parts have no line of their own: without
    one of them it would be broken.
    """
    return is_of_library(item, "torch.nn", "Module") or is_of_library(
        item, "torch.optim", "Optimizer"
    )


def _number_of_items(container: Any) -> int:
    """Return the number of objects in a container, without the keys of a dict."""
    if is_instance(container, dict):
        return dict.__len__(container)
    return len(gc.get_referents(container))


def _is_container(item: object) -> bool:
    if module_of(item) == "collections":
        return True
    return any(is_instance(item, kind) for kind in _CONTAINERS)


def _named(
    holder: ReferencePath, roots: Sequence[Root], item: object, *, may_delete: bool
) -> ReferencePath:
    """Return a holder with all names that refer to its object directly.

    Args:
        holder: the path from the first root.
        roots: the roots that refer to the object, of which one line frees it.
        item: the object.
        may_delete: True if the line deletes the variables among the roots.
    """
    first = roots[0]
    variables = dict[str, None]()
    aliases = dict[str, None]()
    has_output = any(root.rank is Rank.PLACE and _is_of_output(root) for root in roots)
    for root in roots:
        if root.rank is Rank.VARIABLE and root.code:
            variables[root.code] = None
        is_copy = has_output and root.rank > Rank.PLACE and _is_of_output(root)
        if root.text != first.text and not is_copy:
            aliases[root.text] = None
    if may_delete and first.rank is Rank.VARIABLE and variables:
        advice = f"del {', '.join(variables)}"
        ending = ending_of(item)
        if ending:
            advice = f"{next(iter(variables))}.{ending}; {advice}"
        holder = replace(holder, advice=advice)
    shown = [holder.path, *islice(aliases, _MOST_ALIASES)]
    if len(aliases) > _MOST_ALIASES:
        number = len(aliases) - _MOST_ALIASES
        noun = "name" if number == 1 else "names"
        shown.append(f"{number} more {noun}")
    return replace(holder, path=", ".join(shown))


def _is_of_output(root: Root) -> bool:
    """Return True for ``Out[5]``, and for IPython's names for it, such as ``_5`` and ``_``."""
    return root.advice.startswith("%xdel")
