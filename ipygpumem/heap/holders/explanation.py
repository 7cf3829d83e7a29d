"""Explains which holders keep some objects, and by which lines these are removed from all of
them.

First each object gets its nearest holder. A row of many arrays then gets the holder of all of them
(``row_removal``), and, if asked for, all other places that hold the same objects (``all_places``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from ipygpumem.heap.arrays import StorageKey
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.all_places import AllPlaces, Places
from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.gradients import ClearableGradients
from ipygpumem.heap.holders.open_figures import OpenFigures
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.referrer_graph import Chain, NextUp
from ipygpumem.heap.holders.removal import Removal
from ipygpumem.heap.holders.row_removal import RowRemovals
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.paths.items_and_attributes import first_in
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way, joined

_FEW_ITEMS = 20
"""Maximum number of items of one holder to each of which a path is written; of more, only to the
first.
"""
_MOST_NAMED = 5000
"""Maximum number of objects to each of which a way is written: a few seconds of work."""
_MOST_DIVIDED = 10
"""Maximum number of rows that are divided by their holders: each of these is examined."""
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


class Explanation:
    """The holders of some storages, each of which belongs to some objects.

    Attributes:
        named: the holders to which a root leads.
        unnamed: the other holders, to which nothing visible refers.
        is_limited: True if some holders may not have been reached.
    """

    def __init__(
        self,
        objects: Mapping[StorageKey, list[object]],
        heap: Heap,
        roots: Roots,
        max_visits: int,
        *,
        of_graphs: bool = False,
    ) -> None:
        self.named: dict[StorageKey, Holder] = {}
        self.unnamed: dict[StorageKey, Holder] = {}
        self.is_limited = False
        self._objects = objects
        self._roots = roots
        self._max_visits = max_visits
        self._of_graphs = of_graphs
        """True if the objects are tensors whose graphs are unwanted, not the tensors."""
        targets = [item for items in objects.values() for item in items]
        self._search = BackwardSearch(targets, heap, roots, max_visits)
        self._writer = PathWriter(roots, of_leaks=True)
        self._records = ReceivedRecords(roots, self._writer)
        self._figures = OpenFigures(roots, self._writer)
        self._rows: RowHolders | None = None
        self._row_removals: RowRemovals | None = None
        self._removals: dict[StorageKey, Removal] = {}
        """How to remove the objects of each storage from the nearest place."""
        self._number_divided = 0
        """Number of times that a row's holder did not lead to all of it."""

    def explain(self, *, rows: RowHolders | None = None, all_places: bool = False) -> None:
        """Find the holders.

        Args:
            rows: rows of storages, each of which gets one holder if possible.
            all_places: True to name all places that hold an object.
        """
        if rows is not None:
            self._rows = rows
            self._row_removals = RowRemovals(
                rows, self._roots, self._writer, self._records, self._figures
            )
        freed_with_row, are_some_left_out = self._name_nearest()
        for key, items in self._objects.items():
            if key not in self.named and key not in freed_with_row:
                self._name_unheld(key, items)
        number_named = len(self.named) + len(freed_with_row)
        self.is_limited = (self._search.is_limited or are_some_left_out) and number_named < len(
            self._objects
        )
        if all_places:
            self.add_other_holders(self._removals.keys())
        for key, row_key in freed_with_row.items():
            self.named[key] = self.named[row_key]

    def add_other_holders(self, keys: Container[StorageKey]) -> None:
        """Name all places that hold some objects: each dies only if all of its places are
        emptied.
        """
        removals = {key: removal for key, removal in self._removals.items() if key in keys}
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
        for key, places in all_places.of_removals(removals, self._max_visits).items():
            self._name_all(key, removals[key].way, places)

    def path_of_trained(self, tensors: Sequence[object], gradients: ClearableGradients) -> str:
        """Return the path to the outermost module or optimizer that may clear the gradients of some
        tensors; empty if there is none.

        Args:
            tensors: the tensors.
            gradients: tells what may be cleared.
        """
        for tensor in tensors:
            chain = self._search.graph.chain(tensor, self._search.up_to_roots)
            if chain is None:
                continue
            root, steps = chain
            for position, item in enumerate(steps[:-1]):
                if gradients.are_cleared_by(item, tensors):
                    return self._writer.holder(root, steps[: position + 1]).path
        return ""

    # -- nearest holders --------------------------------------------------------------------------

    def _name_nearest(self) -> tuple[dict[StorageKey, StorageKey], bool]:
        """Name the holders of all storages to which a root leads, but not of too many.

        Returns:
            The storages that the line of another one's row frees, with the key of that row; and
            True if some storages were left out.
        """
        freed_with_row = dict[StorageKey, StorageKey]()
        are_some_left_out = False
        for key, items in self._objects.items():
            if key in freed_with_row:
                continue
            is_row = self._rows is not None and self._rows.row(key) is not None
            if len(self.named) >= _MOST_NAMED and not is_row:
                are_some_left_out = True
                continue
            nearest = self._nearest(self._search.up_to_roots, items, object_id=self._object_id(key))
            if nearest is None:
                continue
            removal = self._removal(key, items, *nearest)
            self._removals[key] = removal
            self.named[key] = removal.way.holder
            for freed in self._freed_with_row(key, removal.way):
                freed_with_row[freed] = key
        return freed_with_row, are_some_left_out

    def _name_unheld(self, key: StorageKey, items: Sequence[object]) -> None:
        """Name the holder of a storage to which no root leads, if there is one."""
        if any(map(self._search.is_in_hidden_cycle, items)):
            self.unnamed[key] = HIDDEN_CYCLE
            return
        nearest = self._nearest(self._search.up_to_unheld, items)
        if nearest is not None:
            _, way = nearest
            self.unnamed[key] = way.holder

    def _nearest(
        self, next_up: NextUp, items: Sequence[object], *, object_id: int = 0
    ) -> tuple[Chain, Way] | None:
        """Return the shortest chain from a root to one of some objects, and its text.

        Args:
            next_up: the ways from roots.
            items: the objects.
            object_id: identity of an object through which a chain leads, if any chain does: a row
                that stands for a model is held where the model is, not its parameters.
        """
        chains = list[Chain]()
        for item in items:
            chain = self._search.graph.chain(item, next_up)
            if chain is not None:
                root, steps, _ = self._figures.inside_older(*chain, object_id)
                chains.append((root, steps))
        if not chains:
            return None
        chains_through = [chain for chain in chains if object_id in map(id, chain[1])]
        candidates = list[tuple[Chain, Way]]()
        for root, steps in _some_of_each_holder(_shortest(chains_through or chains)):
            way = self._writer.way(root, steps, of_graph=self._of_graphs)
            record = self._records.removal(root, steps, steps[-1:]) if self._of_graphs else None
            if record is not None:
                remedy = record.way.holder.remedy
                way = replace(way, holder=replace(way.holder, remedy=remedy))
            candidates.append(((root, steps), way))
        return min(candidates, key=lambda candidate: order_of_holder(candidate[1].holder))

    # -- rows -------------------------------------------------------------------------------------

    def _removal(self, key: StorageKey, items: Sequence[object], chain: Chain, way: Way) -> Removal:
        """Return how to remove the row of a storage, or the objects of the storage if it has none.

        Args:
            key: the storage.
            items: its objects.
            chain: the nearest chain to one of these.
            way: the way along this chain.
        """
        if self._row_removals is None:
            _, steps = chain
            return Removal.of(steps[-1], items, way)
        return self._row_removals.removal(key, items, chain, way)

    def _object_id(self, key: StorageKey) -> int:
        """Return the identity of the object of a storage's row; 0 if there is none."""
        if self._rows is None:
            return 0
        return self._rows.object_id(key)

    def _freed_with_row(self, key: StorageKey, way: Way) -> set[StorageKey]:
        """Return the storages of the row of ``key`` that the line of its holder frees: writing the
        way to each of thousands takes seconds.

        If the holder does not lead to the whole row, the rest is made a row of its own, if it can
        be; else no storage is freed with this one.
        """
        row = None if self._rows is None else self._rows.row(key)
        if self._rows is None or row is None or not way.cuts:
            return set()
        if not row.is_whole:
            if not self._is_divisible(key, row, way):
                return set()
            left = row.storages - row.held_storages
            keys_left = [other for other in self._objects if other in left]
            self._rows.add(keys_left[0], row.part(keys_left))
            self._number_divided += 1
        without_row = {other for other in row.held_storages if self._rows.row(other) is None}
        return without_row & self._objects.keys()

    def _is_divisible(self, key: StorageKey, row: Row, way: Way) -> bool:
        """Return True if a row of many objects that are no arrays may be divided, because one line
        frees all objects to which its holder leads.
        """
        is_line_of_held = len(way.cuts) > 1 or len(row.held_storages) == 1
        is_long_row = key[0] == "object" and len(row.storages) > _FEW_ITEMS
        return is_line_of_held and is_long_row and self._number_divided < _MOST_DIVIDED

    # -- all places -------------------------------------------------------------------------------

    def _name_all(self, key: StorageKey, nearest: Way, places: Places) -> None:
        """Name all places that hold the objects of a storage.

        Args:
            key: the storage.
            nearest: the way to the holder that is named already, and stays if its line removes the
                object from all places.
            places: the places.
        """
        ways, unwritten = places
        first = ways[0]
        are_several = len(ways) > 1 or unwritten > 0
        if are_several:
            ways.sort(key=lambda way: order_of_holder(way.holder))
            self.named[key] = joined(ways, unwritten).holder
            return
        if len(first.cuts) > 1 or first.holder.remedy == REMOVE_THEM:
            self.named[key] = first.holder
            return
        if nearest.holder.remedy.text:
            return
        line = first.words
        if nearest.cut is not None:
            line = statement_of([nearest.cut])
        self.named[key] = replace(nearest.holder, remedy=Remedy(line))


def _shortest(chains: Sequence[Chain]) -> list[Chain]:
    """Return the shortest chains of those from the best roots."""
    distance = min((root.rank, len(steps)) for root, steps in chains)
    return [(root, steps) for root, steps in chains if (root.rank, len(steps)) == distance]


def _some_of_each_holder(chains: Sequence[Chain]) -> list[Chain]:
    """Return the chains; of those to many items of one holder only that to its first item.

    Writing one for each of 20,000 views of an array in a list takes 25 s.
    """
    by_holder = dict[tuple[int, ...], list[Chain]]()
    for root, steps in chains:
        by_holder.setdefault(tuple(map(id, (root, *steps[:-1]))), []).append((root, steps))
    some = list[Chain]()
    for of_holder in by_holder.values():
        root, steps = of_holder[0]
        if len(of_holder) > _FEW_ITEMS and len(steps) > 1:
            first = first_in(steps[-2], [chain[1][-1] for chain in of_holder])
            some.append((root, (*steps[:-1], first)))
        else:
            some += of_holder
    return some


def order_of_holder(holder: Holder) -> tuple[bool, bool, int, str]:
    """Return the sort key that picks the holder to show.

    It does not depend on the order in which the collector lists holders.
    """
    return (holder.is_kept, not holder.is_variable, len(holder.path), holder.path)
