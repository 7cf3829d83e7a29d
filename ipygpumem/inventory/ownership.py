"""Computes the memory that deleting a name would free, and finds the holders of the rest."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ipygpumem.heap.arrays import storage_key
from ipygpumem.heap.graph import NodeKey
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.backward import BackwardSearch, WayTo
from ipygpumem.heap.holders.cuts import Kind
from ipygpumem.heap.holders.paths import PathWriter
from ipygpumem.heap.holders.roots import EVENT_LOOP, NOTEBOOK, Root, Roots
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.holders.tasks import is_pending
from ipygpumem.heap.knowledge.barriers import Barriers, is_left_out
from ipygpumem.heap.knowledge.references import ReferenceReader
from ipygpumem.heap.libraries import OUTLIVES, is_segment, segments
from ipygpumem.heap.region import Region
from ipygpumem.heap.sharing import Partners, partners, types_to_compare
from ipygpumem.heap.sizes import Sizes
from ipygpumem.introspect import (
    is_atom,
    is_instance,
    is_users_class,
    module_of,
    target_of,
    type_name,
)
from ipygpumem.inventory.top import notes_on
from ipygpumem.records import Record, ReferencePath

_MOST_SEARCHED = 2000
"""Maximum number of objects whose holders are searched, the nearest first."""
_OF_IPYTHON, _MOST_ALIASES = 3, 4
"""The rank of IPython's own copies, whose variables users should keep; maximum number of names in a
row.
"""
_LEAST_BYTES = 1 << 12
"""Minimum bytes of a holder's part for advice."""
_MOST_PLACES = 4
"""Maximum number of places in one variable to name."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PARTS_SHOWN, _LEAST_SHARE = 5, 0.01
_SMALL = ReferencePath("smaller objects, which something else uses too", "")
_HIDDEN_CYCLE = ReferencePath(
    "a cycle through an array of objects, which Python never frees",
    "set the array's elements to None before",
)
_NOT_REACHED = ReferencePath("something that the search did not reach within its limits", "")
_UNSEEN = ReferencePath(
    "something that cannot be seen from Python: a running function or compiled code", ""
)


@dataclass
class _Row:
    """One holder, with the advice for one object and for several, and the objects that it holds."""

    one: ReferencePath
    several: ReferencePath
    more: int
    """Number of further references of the same root to one object."""
    keys: set[NodeKey] = field(default_factory=set)

    @property
    def holder(self) -> ReferencePath:
        """The holder with the number of its references."""
        found = self.one if len(self.keys) == 1 else self.several
        return (
            replace(found, path=f"{found.path}, and {self.more:,} more there")
            if self.more
            else found
        )


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

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


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

    @property
    def size_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


def take(
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
    with undisturbed():
        region = Region(namespaces=roots.namespaces, keeps_folded=True)
        size = Sizes(region=region).measure(holding[0])
        root = id(holding[0])
        every = region.reach([root])
        held = region.held_from_outside({root: references}) & every
        named = _worth_naming(region, held, region.bytes_of(every).total())
        groups = dict[ReferencePath, set[NodeKey]]()
        if named or region.may_share:
            hidden = roots.hidden | {id(region.objects), id(region.folded), id(holding)}
            groups, held = _holders(
                name, holding, region, held, replace(roots, hidden=hidden), is_name=is_name
            )
        cycles = region.in_hidden_cycles()
        if cycles:
            groups[_HIDDEN_CYCLE] = set(cycles)
        held_parts, counted = _parts(region, groups, held)
        freed = region.bytes_of(every - counted)
    device_bytes = sum((Counter(part.device_bytes) for part in held_parts), freed)
    return Ownership(
        name,
        is_name,
        type_name(holding[0]),
        dict(device_bytes),
        dict(freed) if region.complete else {},
        tuple((part.name, part.size_bytes) for part in size.parts[:_PARTS_SHOWN]),
        tuple(sorted(held_parts, key=lambda part: -part.size_bytes)),
        region.complete,
        not is_left_out(holding[0]),
        notes_on(holding[0], size),
        size.is_at_least,
    )


def _holders(
    name: str, holding: list[object], region: Region, held: set[int], roots: Roots, *, is_name: bool
) -> tuple[dict[ReferencePath, set[NodeKey]], set[int]]:
    """Return the nodes that something else keeps alive by their holders, and all nodes that are
    held from outside.
    """
    own_name = name if is_name else ""
    namespaces = {key: _without(own_name, root) for key, root in roots.namespaces.items()}
    heap = Heap(types=types_to_compare())  # after counting, because it refers to every object
    shared = partners(region, heap, held)
    # Of a tensor that a graph has saved, the object itself is held.
    held = held | {
        key
        for key, found in shared.items()
        if any(same[-1] is region.objects[key] for _, same in found)
    }
    named = _worth_naming(region, held, region.bytes_of(region.reach([id(holding[0])])).total())
    # these objects refer to each other
    inside = region.objects.keys() | set(map(id, region.folded))
    outside = replace(roots, namespaces=namespaces, hidden=roots.hidden | inside)
    groups = _by_holder(region, named, shared, heap, outside, is_name=is_name)
    if is_name and is_pending(holding[0]):  # the loop keeps it, and a done task keeps its error
        advice = f"{target_of(name)}.cancel(); del {target_of(name)}"
        by_loop = {
            one: replace(one, advice=advice) for one in groups if one.path.startswith(EVENT_LOOP)
        }
        groups = {by_loop.get(one, one): keys for one, keys in groups.items()}
    registered = roots.kept.get(id(holding[0]))
    if is_name and registered is not None and registered.cut is not None:
        closing = registered.cut
        if closing.kind is Kind.CLOSED:  # such as a widget: its name is simpler than the registry's
            target = target_of(name)
            by_name = f"{target}.{closing.ending}; del {target}"
            groups = {
                replace(one, advice=by_name) if one.path == registered.text else one: keys
                for one, keys in groups.items()
            }
    groups = {**_of_segments(region, groups, heap, roots), **groups}
    heap.drop()
    return groups, held


def _parts(
    region: Region, groups: Mapping[ReferencePath, set[NodeKey]], held: set[int]
) -> tuple[list[HeldPart], set[NodeKey]]:
    """Return the memory that each holder keeps alive, and all nodes of these parts."""
    counted, parts = set[NodeKey](), dict[ReferencePath, HeldPart]()
    named = set[NodeKey]().union(*groups.values())
    for holder, keys in [*groups.items(), (_SMALL, set[NodeKey](held - named))]:
        reached = region.reach(keys)
        is_shared = region.bytes_of(counted & reached).total() >= _LEAST_BYTES
        more = region.bytes_of(reached - counted)
        # A number that the whole process shares is no reason to delete what has it.
        is_large = more.total() >= _LEAST_BYTES
        if holder is _SMALL and not is_large:
            more.clear()  # constants, such as names of attributes
        counted |= reached
        shown = holder if is_large or is_shared else _SMALL
        earlier = parts.get(shown, HeldPart(shown, 0, {}))
        more.update(earlier.device_bytes)
        parts[shown] = HeldPart(
            shown, earlier.objects + len(keys), dict(more), is_shared and shown is not _SMALL
        )
    return [part for part in parts.values() if part.size_bytes or part.is_shared], counted


def _worth_naming(region: Region, held: set[int], total: int) -> set[int]:
    """Return the objects held from outside, without those that are a small part of ``total``, such
    as a dtype.
    """
    if len(held) > _MOST_SEARCHED:
        return held
    plain = {key for key in held if is_atom(region.objects[key])}
    if region.bytes_of(plain).total() < _LEAST_BYTES:
        held = held - plain  # constants, such as names of attributes
    sizes = {key: region.bytes_of(region.reach([key])).total() for key in held}
    return {key for key, size in sizes.items() if size * len(held) >= _LEAST_SHARE * total}


def _without(name: str, root: Callable[[object], Root | None]) -> Callable[[object], Root | None]:
    own = f"{NOTEBOOK}{name}"  # a module of %run may have a global of the same name
    return lambda key: None if (found := root(key)) is None or found.text == own else found


def _by_holder(
    region: Region, held: set[int], shared: Partners, heap: Heap, roots: Roots, *, is_name: bool
) -> dict[ReferencePath, set[NodeKey]]:
    """Return the held nodes, and the memory that partners share, by holder; variables first."""
    nearest = [key for key in region.objects if key in held]
    searched: dict[NodeKey, Sequence[object]] = {
        key: [
            region.objects[key],
            *(partner for _, same in shared.get(key, ()) for partner in same),
        ]
        for key in nearest[:_MOST_SEARCHED]
    }
    reached = region.reach(held)
    for own, found in shared.items():
        if (
            own not in reached
            and not is_atom(region.objects[own])
            and len(searched) < 2 * _MOST_SEARCHED
        ):
            searched.update((region.node_of(piece, own), same) for piece, same in found)
    search = BackwardSearch(
        [item for items in searched.values() for item in items], heap, roots, for_all=True
    )
    rows = _HolderRows(search, PathWriter(roots), nearest[_MOST_SEARCHED:], is_name=is_name)
    for key, items in searched.items():
        rows.add(key, items)
    groups = rows.groups()
    without_holder = rows.without_holder
    tensors = region.tensors(without_holder)
    of_graphs = {
        storage: id(tensor) for tensor in tensors if (storage := storage_key(tensor)) is not None
    }
    for storage, holder in explain(of_graphs, heap, roots).items() if of_graphs else ():
        groups.setdefault(holder, set()).add(of_graphs[storage])
    without_holder -= set(of_graphs.values())
    not_reached = (
        without_holder if search.is_cut else without_holder.intersection(nearest[_MOST_SEARCHED:])
    )
    if not_reached:
        groups[_NOT_REACHED] = set(not_reached)
    if without_holder - not_reached:
        groups[_UNSEEN] = without_holder - not_reached
    return groups


class _HolderRows:
    """The rows of holders, by their roots: one for each place in which a root holds an object.

    Attributes:
        without_holder: nodes of which no holder is known.
    """

    def __init__(
        self,
        search: BackwardSearch,
        writer: PathWriter,
        not_searched: Sequence[int],
        *,
        is_name: bool,
    ) -> None:
        self.without_holder = set[NodeKey](not_searched)
        self._search = search
        self._writer = writer
        self._is_name = is_name
        self._by_root: dict[str, list[_Row]] = {}
        self._references = ReferenceReader(Barriers())
        self._with_neighbours: set[int] = set()
        """Containers whose items have been added, by identity."""

    def add(self, key: NodeKey, items: Sequence[object]) -> None:
        """Add the holders of a node; ``items`` are its object, and objects that show its memory,
        too.
        """
        ways = self._search.ways_to(items)
        if not ways:
            for chain_down in [self._search.chain(item, self._search.unnamed) for item in items]:
                if chain_down is not None:
                    ways = [WayTo([chain_down[0]], chain_down[1], 1)]
                    break
        if not ways and (type(key) is int or self._search.is_cut):
            # An object to which nothing visible refers, such as an array in a tensor, belongs to
            # its partner here.
            self.without_holder.add(key)
        for names, steps, number in ways:
            row = self._row(key, names, steps, number)
            if row is not None:
                row.keys.add(key)
                self._add_neighbours(row, steps)

    def groups(self) -> dict[ReferencePath, set[NodeKey]]:
        """Return the nodes by holder; variables first."""
        found = dict[ReferencePath, set[NodeKey]]()
        rows = chain.from_iterable(self._by_root.values())
        for row in sorted(rows, key=lambda row: not row.one.path.startswith(NOTEBOOK)):
            found.setdefault(row.holder, set()).update(row.keys)
        return found

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
        one, several = self._texts(names, steps, number)
        for row in rows:
            # Another way through an object that is deleted as a whole.
            if one.advice.startswith("del ") and row.one.advice == one.advice:
                return row
        rows.append(_Row(one, several, number - 1))
        return rows[-1]

    def _texts(
        self, names: Sequence[Root], steps: Sequence[object], number: int
    ) -> tuple[ReferencePath, ReferencePath]:
        """Return the holder with the line that frees one object, and with the line for several."""
        root, first = names[0], steps[0]
        holder = self._writer.holder(root, steps)
        every = self._search.roots_of(first)
        is_copied = any(other.rank == _OF_IPYTHON for other in every)
        is_output = any(other.advice.startswith("%xdel") for other in every)
        may_delete = not is_segment(first) and (is_output or not is_copied)
        is_whole = len(steps) == 1 or (self._is_name and not _is_users(first))
        is_whole |= number > 1 and _is_container(first) and number == len(gc.get_referents(first))
        one = _named(
            holder, root, names, may_delete=may_delete and is_whole, is_pending=is_pending(first)
        )
        if is_whole or not _is_container(first):
            return one, one
        return one, _named(holder, root, names, may_delete=may_delete, is_pending=is_pending(first))

    def _add_neighbours(self, row: _Row, steps: Sequence[object]) -> None:
        """Add the objects of a container that were not searched: it may hold many more than the one
        that was.
        """
        if self.without_holder and len(steps) > 1 and id(steps[-2]) not in self._with_neighbours:
            self._with_neighbours.add(id(steps[-2]))
            references = self._references.of([steps[-2]]).of_python
            neighbours = self.without_holder.intersection(map(id, references))
            row.keys.update(neighbours)
            self.without_holder -= neighbours


def _of_segments(
    region: Region, groups: Mapping[ReferencePath, set[NodeKey]], heap: Heap, roots: Roots
) -> dict[ReferencePath, set[NodeKey]]:
    """Return the shared memory, which stays until it is unlinked, and the line that frees it after
    all views of it.
    """
    found = dict[ReferencePath, set[NodeKey]]()
    inside = segments(list(region.objects.values()))
    holders = explain((), heap, roots, more=inside) if inside else {}
    for segment in inside:
        holder, reached = holders["object", id(segment)], region.reach([id(segment)])
        views = [
            other.advice
            for other, keys in groups.items()
            if keys & reached and other.advice.startswith("del ")
        ]
        path = f"{OUTLIVES}: {holder.path}"
        found[ReferencePath(path, "; ".join([*views, holder.advice]))] = {id(segment)}
    return found


def _is_users(item: object) -> bool:
    """Return True for a container or a user's object: it may hold more, so that no advice deletes
    all of it.
    """
    return _is_container(item) or is_users_class(type(item))


def _is_container(item: object) -> bool:
    return module_of(item) == "collections" or any(is_instance(item, kind) for kind in _CONTAINERS)


def _named(
    holder: ReferencePath, root: Root, roots: Sequence[Root], *, may_delete: bool, is_pending: bool
) -> ReferencePath:
    """Return a holder with all names that refer to its object directly, and the line that deletes
    these variables.
    """
    variables = [other.code for other in (root, *roots) if other.rank == 0 and other.code]
    if may_delete and root.rank == 0 and variables:
        cancel = f"{variables[0]}.cancel(); " * is_pending
        holder = replace(holder, advice=f"{cancel}del {', '.join(dict.fromkeys(variables))}")
    aliases = list(dict.fromkeys(other.text for other in roots if other.text != root.text))
    more = [f"{len(aliases) - _MOST_ALIASES} more names"] if len(aliases) > _MOST_ALIASES else []
    return replace(holder, path=", ".join([holder.path, *aliases[:_MOST_ALIASES], *more]))
