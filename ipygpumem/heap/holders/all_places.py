"""Finds all places that hold an object, with the line for each: the object dies only if it is
removed from all of them.

After ``runs.append(x); cache["x"] = x``, the lines are ``del runs[0]`` and ``del cache["x"]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.heap.holders.chains import FoundChain, HolderChains
from ipygpumem.heap.holders.open_figures import OpenFigures
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.referrer_graph import Steps
from ipygpumem.heap.holders.registries import figure_of
from ipygpumem.heap.holders.removal import HolderWays, Removal, nearest_first
from ipygpumem.heap.holders.row_removal import RowRemovals
from ipygpumem.heap.holders.rows import RowHolders
from ipygpumem.heap.kinds.arrays import StorageKey
from ipygpumem.heap.paths.items_and_attributes import first_in
from ipygpumem.heap.paths.path_writer import PathWriter, without_own_dicts
from ipygpumem.heap.paths.remedies import REMOVE_THEM, Remedy
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way

_FEW_CHAINS = 20
"""Maximum number of chains of one row that are all written. If there are more, the chains that the
line of the nearest place ends are left out.
"""
_MOST_HOLDERS = 1000
"""Maximum number of holders of one row for each of which a line is written: a second of work."""


class WrittenPlaces(NamedTuple):
    """All places that hold the objects of a storage or a row."""

    ways: list[Way]
    """The ways to these places, one for each line."""
    number_unwritten: int
    """The number of further places, which are too many to write."""


class AllPlaces:
    """Finds all places that hold the objects of rows.

    Args:
        search: has searched for the holders of these objects; here it searches for the holders of
            their parts, too.
        roots: the names and objects from which the user can reach objects.
        writer: writes the ways through the places.
        records: the records that older objects have received.
        figures: the open figures.
        rows: the rows; None if each object is freed by itself.
        row_removals: decides what to remove for a row; None without rows.
        of_graphs: True if the objects are tensors whose graphs are to be freed, not the tensors.
    """

    def __init__(
        self,
        search: BackwardSearch,
        roots: Roots,
        writer: PathWriter,
        records: ReceivedRecords,
        figures: OpenFigures,
        rows: RowHolders | None,
        row_removals: RowRemovals | None,
        *,
        of_graphs: bool,
    ) -> None:
        self._search = search
        self._chains = HolderChains(search)
        self._registered = roots.registered
        self._writer = writer
        self._records = records
        self._figures = figures
        self._rows = rows
        self._row_removals = row_removals
        self._of_graphs = of_graphs

    def places_of(
        self, removals: Mapping[StorageKey, Removal], max_visits: int
    ) -> dict[StorageKey, WrittenPlaces]:
        """Return all places that hold the objects of each storage.

        Args:
            removals: how to remove the objects of each storage from the nearest place.
            max_visits: maximum number of objects to examine.
        """
        # First the holders of the objects to remove, then those of their parts.
        all_targets = list[object]()
        for removal in removals.values():
            all_targets += removal.targets
        self._search.search_for_all(all_targets, max_visits)
        parts_of = dict[StorageKey, list[object]]()
        for key, removal in removals.items():
            parts_of[key] = self._parts(removal, self._object_id(key))
        all_parts = list(itertools.chain.from_iterable(parts_of.values()))
        if all_parts:
            self._search.search_for_all(all_parts, max_visits)
        places = dict[StorageKey, WrittenPlaces]()
        for key, removal in removals.items():
            targets = [*removal.targets, *parts_of[key]]
            places[key] = self._places_of(targets, removal.way, self._object_id(key))
        return places

    def _object_id(self, key: StorageKey) -> int:
        """Return the identity of the object of a storage's row; 0 if there is none."""
        if self._rows is None:
            return 0
        return self._rows.object_id(key)

    def _parts(self, removal: Removal, object_id: int) -> list[object]:
        """Return further objects that must die, because they lead to the arrays: the objects that
        the line removes, and parts of these.

        If the line is ``del runs[0]`` for the array ``runs[0]["x"]``, the dict is such an object.
        After ``best = runs[0]``, the variable ``best`` still holds it, and so the array.

        Args:
            removal: the objects that the line removes.
            object_id: identity of the object of the row; 0 if there is none.
        """
        ids_above = removal.way.ids_above()

        def stays(item: object) -> bool:
            """Return True for an object that the line keeps, so that it is no part."""
            figure = figure_of(item)
            if figure is not None and not self._figures.is_new(figure, object_id):
                return True  # an older figure loses an artist only
            return id(item) in ids_above  # an object around it, such as its parent

        graph = self._search.graph
        parts = list[object]()
        ids_of_row = set(map(id, removal.objects))
        if removal.item is not None:
            parts += graph.parts_of(removal.item, ids_of_row, stays)
        for owner_id, item_id in removal.way.removed_references:
            parts += graph.parts_removed(owner_id, item_id, ids_of_row, stays)
        return list(by_identity(parts).values())

    def _places_of(self, targets: Sequence[object], nearest: Way, object_id: int) -> WrittenPlaces:
        """Return all places that hold the objects that must die.

        Args:
            targets: these objects, the one that is removed as a whole first.
            nearest: the nearest way to one of them.
            object_id: identity of the object of their row; 0 if there is none.
        """
        root = self._registered.get(id(targets[0]))
        if root is not None and root.is_only_place:
            return WrittenPlaces([nearest], number_unwritten=0)
        chains = self._chains_left_by(nearest, targets)
        holders = [self._holder_with_ways(chain, object_id) for chain in chains[:_MOST_HOLDERS]]
        ways_to_close = self._figures.ways_to_close(targets, nearest, object_id, self._rows)
        holders += [HolderWays.of_one(way) for way in ways_to_close]  # plt.close(1)
        ways = _one_way_for_each_line(nearest_first(holders, nearest))
        return WrittenPlaces(ways, max(0, len(chains) - _MOST_HOLDERS))

    def _chains_left_by(self, nearest: Way, targets: Sequence[object]) -> list[FoundChain]:
        """Return the chains through the holders of the targets, without holders inside a target,
        which die with it.

        If there are many, the chains that the line of ``nearest`` ends are left out, too: it takes
        long to write each.
        """
        target_ids = set(map(id, targets))
        chains = list[FoundChain]()
        for found_chain in self._chains.chains_to(targets):
            if not target_ids.isdisjoint(map(id, found_chain.steps[:-1])):
                continue  # the holder is itself a part of a target
            if found_chain.roots[0].is_of_library and found_chain.steps[-1] is not targets[0]:
                continue  # a constant of a library that a part refers to
            chains.append(found_chain)
        if len(chains) <= _FEW_CHAINS:
            return chains
        return [chain for chain in chains if not _is_removed(chain, nearest.removed_references)]

    # -- ways through one holder ------------------------------------------------------------------

    def _holder_with_ways(self, found_chain: FoundChain, object_id: int) -> HolderWays:
        """Return a holder of an object, with the ways through its items that lead to the object.

        Args:
            found_chain: the chain through the holder.
            object_id: identity of the object of the row; 0 if there is none.
        """
        in_figure = self._figures.inside_older(found_chain.roots[0], found_chain.steps, object_id)
        root, steps = in_figure.root, in_figure.steps
        # The holder may be before the figure, as pyplot's dict of figures is: then the root holds.
        number_to_holder = found_chain.holder_at + 1 - in_figure.number_left_out
        to_holder = steps[: max(0, number_to_holder)]
        record = self._records.removal(root, steps, steps[-1:])
        if record is not None and record.way.step_ids[-1] in map(id, to_holder):
            # The holder is the list in ``history["epoch 1"]["losses"]``: it is a part of the record
            # ``history["epoch 1"]``, which is removed as a whole.
            return HolderWays.of_one(record.way)
        first_way = self._way_to_item(root, steps, record)
        if not to_holder or found_chain.number_of_references == 1:  # runs[3]
            return HolderWays.of_one(first_way)
        if found_chain.many_items:  # 1,000 views of one array: runs[0] to runs[999]
            way = self._way_to_many(root, to_holder, found_chain.many_items)
            return HolderWays.of_one(way)
        # runs[3], and runs[7] as a further one
        ways = [first_way]
        items = [steps[len(to_holder)]]
        for chain_down in found_chain.further_down:
            ways.append(self._way_to_further_item(root, (*to_holder, *chain_down)))
            items.append(chain_down[0])
        return HolderWays(to_holder[-1], ways, items)

    def _way_to_further_item(self, root: Root, steps: Steps) -> Way:
        """Return the way along a chain, as ``_way_to_item`` does, to the record around its last
        object if there is one.
        """
        return self._way_to_item(root, steps, self._records.removal(root, steps, steps[-1:]))

    def _way_to_item(self, root: Root, steps: Steps, record: Removal | None) -> Way:
        """Return the way to the record around the last object of a chain; without a record, the way
        to the object itself.

        If no line removes the object, it is the way to the new module around it: a weight stays in
        its layer, which is removed as a whole if all of it is to be freed.
        """
        if record is not None:
            return record.way
        way = self._writer.way(root, steps, of_graph=self._of_graphs)
        if self._row_removals is None:
            return way
        module = self._row_removals.new_module(root, steps, way)
        return way if module is None else module.way

    def _way_to_many(self, root: Root, steps: Steps, items: Sequence[object]) -> Way:
        """Return one way to many items of the last object of a chain: the path of the first item,
        and the line that removes all of them, or words.
        """
        holder = steps[-1]
        remedy = REMOVE_THEM
        cuts = self._writer.cuts_of_items(root, steps, items)
        # The owner may be another object, such as the dict that a module has for its parameters.
        if all(cut.owner_id == id(holder) for cut in cuts):
            line = statement_of(cuts)
            if line:
                remedy = Remedy(line, cuts=tuple(cuts))
        first_item = first_in(holder, items)
        holder_of_first = self._writer.way(root, (*steps, first_item)).holder
        return Way(
            replace(holder_of_first.with_more(str(len(items) - 1)), remedy=remedy),
            removed_references=frozenset((id(holder), id(item)) for item in items),
        )


def _one_way_for_each_line(holders: Sequence[HolderWays]) -> list[Way]:
    """Return the ways through holders, one for each line that is needed.

    A way is left out if the line of an earlier holder ends it, or if an earlier way has the same
    line: ``plt.close("all")`` closes two figures.
    """
    removed_references = set[tuple[int, int]]()
    way_by_advice = dict[Remedy | str, Way]()
    for holder in holders:
        remaining = holder.without_ended_ways(removed_references)
        for way in remaining.ways:
            removed_references.update(way.removed_references)
        for way in remaining.one_way_if_possible():
            advice: Remedy | str = way.holder.remedy
            if advice == REMOVE_THEM:  # these words are the same for each place
                advice = way.holder.path
            first_way = way_by_advice.setdefault(advice, way)
            # The optimizer's way to a parameter has words, but a model may have it, too: then the
            # words would not free it.
            if first_way.words and not way.words:
                way_by_advice[advice] = replace(first_way, words="")
    return list(way_by_advice.values())


def _is_removed(found_chain: FoundChain, removed: Set[tuple[int, int]]) -> bool:
    """Return True if a line ends a chain: it removes a reference on the way through each item of
    its holder that leads to the object.

    Args:
        found_chain: the chain.
        removed: the references that the line removes, as the identities of both objects.
    """
    if not found_chain.has_all_steps():
        return False
    for steps in found_chain.steps_through_items():
        if removed.isdisjoint(itertools.pairwise(map(id, without_own_dicts(steps)))):
            return False
    return True
