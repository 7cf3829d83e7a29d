"""Explains which holders keep objects alive, and which lines remove the objects from all of them.

Each object gets its nearest holder first. For a row of many arrays, ``row_removal.py`` decides
what to remove: the arrays, or an object around them. If the caller wants them, ``all_places.py``
adds all other places that hold the same objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ipygpumem.heap.holders.all_places import AllPlaces, WrittenPlaces
from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.gradients import ClearableGradients
from ipygpumem.heap.holders.open_figures import OpenFigures
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.referrer_graph import Chain, NextUp, Steps
from ipygpumem.heap.holders.removal import Removal
from ipygpumem.heap.holders.row_removal import RowRemovals
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.kinds.arrays import StorageKey
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths.items_and_attributes import first_in
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way, joined

_FEW_ITEMS = 20
"""Maximum number of items of one holder for each of which a path is written. If a storage has more,
such as 1,000 views of one array in a list, only the path to the first item is written.
"""
_MOST_NAMED_OBJECTS = 5000
"""Maximum number of objects without a row for each of which a way is written: seconds of work."""
_MOST_DIVIDED_ROWS = 10
"""Maximum number of rows that are divided, because their objects have several holders: each part is
searched like a row.
"""
NO_OBJECT = Holder(
    "no Python object: C++ code keeps it", Remedy("let the library that made it free it")
)
OUT_OF_SIGHT = Holder(
    "something that cannot be seen from Python: a running function or compiled code",
    Remedy(
        "end the function, or take the object out of the library that has it, "
        "as by atexit.unregister(function)"
    ),
)
NOT_REACHED = Holder(
    "something that the search did not reach within its limits",
    Remedy("free something, then ask %gpumem leaks again"),
)
HIDDEN_CYCLE = Holder(
    "a cycle through an array of objects, which Python never frees",
    Remedy("set the array's elements to None before you delete it"),
)


@dataclass(frozen=True)
class Explanation:
    """The result of a ``HolderSearch``: the holders of some storages.

    Attributes:
        from_roots: the holders to which a root leads, by storage.
        without_root: the holders of further storages, to which no root leads: ``a list that nothing
            visible from Python refers to``.
        removals: how to remove the objects of each storage from the nearest place. A storage that
            the line of a row frees, too, has none of its own.
        is_limited: True if some holders may not have been reached.
    """

    from_roots: dict[StorageKey, Holder]
    without_root: dict[StorageKey, Holder]
    removals: dict[StorageKey, Removal]
    is_limited: bool


class _NearestPlaces(NamedTuple):
    """The nearest places of storages to which a root leads."""

    removals: dict[StorageKey, Removal]
    """How to remove the objects of each storage from its nearest place."""
    freed_with_row: dict[StorageKey, StorageKey]
    """Further storages, which the line of a row frees, with the storage that stands for the row."""
    are_some_left_out: bool
    """True if storages were left out, because there are more than ``_MOST_NAMED_OBJECTS``."""


class _ChainWithWay(NamedTuple):
    """A chain from a root to an object, and the way along it."""

    chain: Chain
    way: Way


class HolderSearch:
    """Searches for the holders of objects, and explains how each is removed from its holders.

    Args:
        objects: the objects that belong to each storage; a storage is freed if they die.
        heap: the live objects.
        roots: the names and objects from which the user can reach objects.
        max_visits: maximum number of objects to examine.
        rows: rows of storages, each of which gets one holder if possible; None for no rows.
        of_graphs: True if the objects are tensors whose graphs are to be freed, such as the losses
            in ``history["epoch 1"]``; the tensors themselves may stay.
    """

    def __init__(
        self,
        objects: Mapping[StorageKey, list[object]],
        heap: Heap,
        roots: Roots,
        max_visits: int,
        *,
        rows: RowHolders | None = None,
        of_graphs: bool = False,
    ) -> None:
        self._objects = objects
        self._roots = roots
        self._max_visits = max_visits
        self._of_graphs = of_graphs
        targets = [item for items in objects.values() for item in items]
        self._search = BackwardSearch(targets, heap, roots, max_visits)
        self._writer = PathWriter(roots, of_leaks=True)
        self._records = ReceivedRecords(roots, self._writer)
        self._figures = OpenFigures(roots, self._writer)
        self._rows = rows
        self._row_removals: RowRemovals | None = None
        if rows is not None:
            self._row_removals = RowRemovals(
                rows, roots, self._writer, self._records, self._figures
            )

    def explain(self, *, all_places: bool = False) -> Explanation:
        """Return the holders of all storages.

        Args:
            all_places: True to name all places that hold an object, not only the nearest one.
        """
        nearest = self._nearest_places()
        removals, freed_with_row = nearest.removals, nearest.freed_with_row
        from_roots = {key: removal.way.holder for key, removal in removals.items()}
        without_root = dict[StorageKey, Holder]()
        for key, items in self._objects.items():
            if key in removals or key in freed_with_row:
                continue
            holder = self._holder_without_root(items)
            if holder is not None:
                without_root[key] = holder
        # A limit of the search matters only if some storage has got no holder.
        are_some_not_named = len(removals) + len(freed_with_row) < len(self._objects)
        is_limited = are_some_not_named and (self._search.is_limited or nearest.are_some_left_out)
        if all_places:
            from_roots.update(self.holders_in_all_places(removals))
        for key, row_key in freed_with_row.items():
            from_roots[key] = from_roots[row_key]
        return Explanation(from_roots, without_root, removals, is_limited)

    def holders_in_all_places(
        self, removals: Mapping[StorageKey, Removal]
    ) -> dict[StorageKey, Holder]:
        """Return, for each storage, one holder that names all places of its objects: an object dies
        only if a line removes it from each of them.

        Args:
            removals: how to remove the objects of each storage from the nearest place.
        """
        all_places = AllPlaces(
            self._search,
            self._roots,
            self._writer,
            self._records,
            self._figures,
            self._rows,
            self._row_removals,
            of_graphs=self._of_graphs,
        )
        holders = dict[StorageKey, Holder]()
        for key, places in all_places.places_of(removals, self._max_visits).items():
            holders[key] = _holder_of_places(places, removals[key].way)
        return holders

    def path_of_trained(self, tensors: Sequence[object], gradients: ClearableGradients) -> str:
        """Return the path to the outermost module or optimizer whose ``zero_grad()`` may clear the
        gradients of tensors, ``notebook variable model``; empty if there is none.

        Args:
            tensors: the tensors.
            gradients: decides which modules and optimizers may clear their gradients.
        """
        for tensor in tensors:
            chain = self._search.graph.chain(tensor, self._search.ways_from_roots)
            if chain is None:
                continue
            root, steps = chain
            for position, item in enumerate(steps[:-1]):  # the outermost one first
                if gradients.are_cleared_by(item, tensors):
                    return self._writer.holder(root, steps[: position + 1]).path
        return ""

    # -- nearest holders --------------------------------------------------------------------------

    def _nearest_places(self) -> _NearestPlaces:
        """Return how to remove the objects of each storage from their nearest place.

        Storages to which no root leads are left out. If there are more than ``_MOST_NAMED_OBJECTS``
        storages, so are those without a row after that number.
        """
        removals = dict[StorageKey, Removal]()
        freed_with_row = dict[StorageKey, StorageKey]()
        are_some_left_out = False
        number_divided = 0
        for key, items in self._objects.items():
            if key in freed_with_row:
                continue
            row = self._row(key)
            if len(removals) >= _MOST_NAMED_OBJECTS and row is None:
                are_some_left_out = True
                continue
            object_id = 0 if row is None else row.object_id
            nearest = self._nearest_way(self._search.ways_from_roots, items, object_id=object_id)
            if nearest is None:
                continue
            removals[key] = removal = self._removal(row, items, nearest)
            if row is None or not removal.way.cuts:
                continue  # no line frees further storages
            if not row.is_whole:
                # The list ``runs`` has most objects of the row. The remaining ones are in other
                # places: they become a row of their own, which a later turn of this loop explains.
                if number_divided == _MOST_DIVIDED_ROWS or not _is_divisible(key, row, removal.way):
                    continue
                self._add_row_of_remaining(row)
                number_divided += 1
            for freed_key in self._storages_freed_with(row):
                freed_with_row[freed_key] = key
        return _NearestPlaces(removals, freed_with_row, are_some_left_out)

    def _holder_without_root(self, items: Sequence[object]) -> Holder | None:
        """Return the holder of objects to which no root leads; None if nothing refers to them."""
        if any(map(self._search.is_in_hidden_cycle, items)):
            return HIDDEN_CYCLE
        nearest = self._nearest_way(self._search.ways_from_unheld, items)
        if nearest is None:
            return None
        return nearest.way.holder

    def _nearest_way(
        self, next_up: NextUp, items: Sequence[object], *, object_id: int = 0
    ) -> _ChainWithWay | None:
        """Return the shortest chain from a root to one of the objects, and the way along it; None
        if no root leads to any of them.

        Args:
            next_up: the ways from roots.
            items: the objects.
            object_id: identity of the object for which their row stands, such as a model; 0 if
                there is none. Chains through it are preferred: an optimizer may lead to its
                parameters by a shorter chain, but the model is to be removed.
        """
        chains = list[Chain]()
        for item in items:
            chain = self._search.graph.chain(item, next_up)
            if chain is not None:
                in_figure = self._figures.inside_older(*chain, object_id)
                chains.append((in_figure.root, in_figure.steps))
        if not chains:
            return None
        chains_through = [chain for chain in chains if object_id in map(id, chain[1])]
        candidates = list[_ChainWithWay]()
        for root, steps in _some_of_each_holder(_shortest(chains_through or chains)):
            candidates.append(_ChainWithWay((root, steps), self._way(root, steps)))
        return min(candidates, key=lambda candidate: sort_key_of_holder(candidate.way.holder))

    def _way(self, root: Root, steps: Steps) -> Way:
        """Return the way along a chain.

        If the graph of its tensor is to be freed, the line removes the record around the tensor, as
        everywhere: ``del history["epoch 1"]``, not the loss in it.
        """
        way = self._writer.way(root, steps, of_graph=self._of_graphs)
        if not self._of_graphs:
            return way
        record = self._records.removal(root, steps, steps[-1:])
        if record is None:
            return way
        return replace(way, holder=replace(way.holder, remedy=record.way.holder.remedy))

    # -- rows -------------------------------------------------------------------------------------

    def _row(self, key: StorageKey) -> Row | None:
        """Return the row for which a storage stands; None if it stands for none."""
        return None if self._rows is None else self._rows.row(key)

    def _removal(self, row: Row | None, items: Sequence[object], nearest: _ChainWithWay) -> Removal:
        """Return how to remove a row, or the objects of a storage without one.

        It also sets ``held_storages`` of the row: the storages to which its holder leads.

        Args:
            row: the row, if there is one.
            items: the objects of the storage.
            nearest: the nearest chain to one of these, and the way along it.
        """
        chain, way = nearest
        root, steps = chain
        if self._rows is None or self._row_removals is None:
            return Removal.of(steps[-1], items, way)
        if row is None:
            removal = Removal.of(steps[-1], items, way)
        else:
            holder = self._rows.nearest_holder(row, steps)
            row.held_storages = holder.held_storages
            removal = self._row_removals.removal(row, holder, chain, way)
        return self._row_removals.with_new_module(removal, root, steps)

    def _add_row_of_remaining(self, row: Row) -> None:
        """Divide a row: the storages to which its holder does not lead become a row of their own,
        for which the first of them stands.
        """
        remaining = row.storages - row.held_storages
        keys = [key for key in self._objects if key in remaining]
        if self._rows is not None:
            self._rows.add(keys[0], row.part(keys))

    def _storages_freed_with(self, row: Row) -> list[StorageKey]:
        """Return the storages of a row that its line frees, except those that stand for a row
        themselves.

        They need no ways of their own: writing one for each of thousands takes seconds.
        """
        storages = row.held_storages & self._objects.keys()
        return [key for key in storages if self._row(key) is None]


def _is_divisible(key: StorageKey, row: Row, way: Way) -> bool:
    """Return True if a row may be divided into the objects to which its holder leads, and the
    remaining ones.

    That is so for many objects that are no arrays, if one line frees all to which the holder leads,
    such as ``docs.clear()`` for 900 of 1,000 lists. Arrays are divided by the caller, which knows
    their names (``inventory/rows/array_holders.py``).

    Args:
        key: the storage that stands for the row.
        row: the row.
        way: the way to the objects to which the holder leads, with the line.
    """
    is_of_arrays = key[0] != "object"
    if is_of_arrays or len(row.storages) <= _FEW_ITEMS:
        return False
    return len(way.cuts) > 1 or len(row.held_storages) == 1


def _holder_of_places(places: WrittenPlaces, nearest: Way) -> Holder:
    """Return one holder that names all places of some objects.

    Args:
        places: the places.
        nearest: the way from the nearest of them, whose holder is returned if its line removes the
            objects from all places.
    """
    if len(places.ways) > 1 or places.number_unwritten:
        ordered = sorted(places.ways, key=lambda way: sort_key_of_holder(way.holder))
        return joined(ordered, places.number_unwritten).holder
    only = places.ways[0]
    removes_many = len(only.cuts) > 1 or only.holder.remedy == REMOVE_THEM
    if removes_many:  # ``runs[0]`` and ``runs[7]``: the nearest way has only the first of them
        return only.holder
    if nearest.holder.remedy.text:
        return nearest.holder
    # A variable has no line until it is known that it is the only place: then it is ``del x``.
    line = only.words
    if nearest.cut is not None:
        line = statement_of([nearest.cut])
    return replace(nearest.holder, remedy=Remedy(line))


def _shortest(chains: Sequence[Chain]) -> list[Chain]:
    """Return the shortest of the chains whose roots have the lowest rank: a variable comes before
    ``Out[5]``, also if its chain is longer.
    """
    rank_and_length = min((root.rank, len(steps)) for root, steps in chains)
    return [(root, steps) for root, steps in chains if (root.rank, len(steps)) == rank_and_length]


def _some_of_each_holder(chains: Sequence[Chain]) -> list[Chain]:
    """Return the chains; but if many of them lead to items of one holder, of these only the chain
    to the holder's first item.

    The ways along all of these chains are written, to compare them: for 20,000 views of one array
    in a list, that takes 25 s.
    """
    chains_by_holder = dict[tuple[int, ...], list[Chain]]()
    for root, steps in chains:
        ids_to_holder = tuple(map(id, (root, *steps[:-1])))
        chains_by_holder.setdefault(ids_to_holder, []).append((root, steps))
    chosen = list[Chain]()
    for chains_of_holder in chains_by_holder.values():
        root, steps = chains_of_holder[0]
        if len(chains_of_holder) > _FEW_ITEMS and len(steps) > 1:
            items = [steps_to_item[-1] for _, steps_to_item in chains_of_holder]
            first_item = first_in(steps[-2], items)
            chosen.append((root, (*steps[:-1], first_item)))
        else:
            chosen += chains_of_holder
    return chosen


def sort_key_of_holder(holder: Holder) -> tuple[bool, bool, int, str]:
    """Return the sort key that picks the holder to show.

    It does not depend on the order in which the collector lists holders.
    """
    return (holder.is_kept, not holder.is_variable, len(holder.path), holder.path)
