"""Explains which holders keep some objects, and by which lines these are removed from all of
them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import replace

from ipygpumem.heap.arrays import StorageKey, flat_elements, is_of_library
from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.heap import Heap
from ipygpumem.heap.holders.backward import BackwardSearch, NextUp, Steps
from ipygpumem.heap.holders.chains import FoundChain, HolderChains
from ipygpumem.heap.holders.gradients import ClearableGradients
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.registries import figure_of, roots_of_figures
from ipygpumem.heap.holders.removal import HolderWays, Removal, nearest_first
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.paths.cuts import Kind
from ipygpumem.heap.paths.items_and_attributes import first_in, is_opaque, is_private, items_of
from ipygpumem.heap.paths.path_writer import PathWriter, without_own_dicts
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE, REMOVE_THEM, Holder, Remedy
from ipygpumem.heap.paths.roots import Rank, Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way, joined
from ipygpumem.introspect import instance_dict, is_instance

_MOST_CHAINS = 20
"""Maximum number of items of one holder for each of which a path is written."""
_MOST_NAMED = 5000
"""Maximum number of objects to each of which a way is written: a few seconds of work."""
_MOST_HOLDERS = 1000
"""Maximum number of holders of one row for each of which a line is written: a second of work."""
_MOST_DIVIDED = 10
"""Maximum number of rows that are divided by their holders: each of these is examined."""
_REGISTRATIONS = {Kind.CALL, Kind.CLOSED}
"""References that are removed by a call, with all that is registered there."""
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
        named: the best-named holders.
        unnamed: the holders to which nothing visible refers.
        is_cut: True if some holders may not have been reached.
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
        self._objects = objects
        self._of_graphs = of_graphs
        """True if the objects are tensors whose graphs are unwanted, not the tensors."""
        targets = [item for items in objects.values() for item in items]
        self._search = BackwardSearch(targets, heap, roots, max_visits)
        self._chains = HolderChains(self._search)
        self._writer = PathWriter(roots, of_leaks=True)
        self._registered = roots.registered
        self._new = roots.new
        self._removed_as_whole = roots.removed_as_whole
        self._is_older = roots.is_older
        self._records = ReceivedRecords(roots, self._writer)
        self._rows: RowHolders | None = None
        self._names = roots.names
        self._figures = roots_of_figures(roots.names)
        self._max_visits = max_visits
        self._number_divided = 0
        """Number of times that a row's holder did not lead to all of it."""
        self._removals: dict[StorageKey, Removal] = {}
        self.named: dict[StorageKey, Holder] = {}
        self.unnamed: dict[StorageKey, Holder] = {}
        self.is_cut = False

    def explain(
        self,
        *,
        rows: RowHolders | None = None,
        all_places: bool = False,
    ) -> None:
        """Find the holders, of whole rows if there are any."""
        self._rows = rows
        of_row = dict[StorageKey, StorageKey]()
        """The row of each storage that a line for the whole row frees."""
        is_limited = False
        for key, items in self._objects.items():
            if key in of_row:
                continue
            is_row = rows is not None and rows.row(key) is not None
            if len(self.named) >= _MOST_NAMED and not is_row:
                is_limited = True
                continue
            nearest = self._nearest(self._search.named, items, object_id=self._object_id(key))
            if nearest is not None:
                way = self._of_row(key, *nearest, rows)
                self.named[key] = way.holder
                of_row.update(self._with_line_of(key, way))
        for key, items in self._objects.items():
            if key in self.named or key in of_row:
                continue
            if any(map(self._search.is_in_hidden_cycle, items)):
                self.unnamed[key] = HIDDEN_CYCLE
                continue
            nearest = self._nearest(self._search.unnamed, items)
            if nearest is not None:
                self.unnamed[key] = nearest[1].holder
        number_named = len(self.named) + len(of_row)
        self.is_cut = (self._search.is_cut or is_limited) and number_named < len(self._objects)
        if all_places:
            self.add_other_holders(self._removals.keys())
        self.named.update((key, self.named[row_key]) for key, row_key in of_row.items())

    def _with_line_of(self, key: StorageKey, way: Way) -> dict[StorageKey, StorageKey]:
        """Return the storages of the row of ``key`` that the line of its holder frees: writing the
        way to each of thousands takes seconds.

        What is left of a row of objects becomes a row with a holder of its own.
        """
        row = None if self._rows is None else self._rows.row(key)
        if self._rows is None or row is None or not way.cuts:
            return {}
        if not row.is_whole:
            is_line_of_held = len(way.cuts) > 1 or len(row.held) == 1
            is_divisible = key[0] == "object" and len(row.storages) > _MOST_CHAINS
            if not (is_line_of_held and is_divisible) or self._number_divided >= _MOST_DIVIDED:
                return {}
            left = row.storages - row.held
            keys_left = [other for other in self._objects if other in left]
            self._rows.add(keys_left[0], row.part(keys_left))
            self._number_divided += 1
        keys = {other for other in row.held if self._rows.row(other) is None}
        return dict.fromkeys(keys & self._objects.keys(), key)

    def path_of_trained(self, tensors: Sequence[object], gradients: ClearableGradients) -> str:
        """Return the path to the outermost module or optimizer that may clear the gradients of some
        tensors; empty if there is none.

        Args:
            tensors: the tensors.
            gradients: tells what may be cleared.
        """
        for tensor in tensors:
            chain = self._search.chain(tensor, self._search.named)
            root, steps = chain or (None, ())
            for position, item in enumerate(steps[:-1]):
                if root is not None and gradients.are_cleared_by(item, tensors):
                    return self._writer.holder(root, steps[: position + 1]).path
        return ""

    def _nearest(
        self, next_up: NextUp, items: Sequence[object], *, object_id: int = 0
    ) -> tuple[tuple[Root, Steps], Way] | None:
        """Return the shortest chain from a root to one of some objects, and its text.

        Args:
            next_up: the next object up from each object.
            items: the objects.
            object_id: identity of an object through which a chain leads, if any chain does: a row
                that stands for a model is held where the model is, not its parameters.
        """
        chains = list[tuple[Root, Steps]]()
        for item in items:
            chain = self._search.chain(item, next_up)
            if chain is not None:
                root, steps, _ = self._inside_older_figure(*chain, object_id)
                chains.append((root, steps))
        if not chains:
            return None
        through = [chain for chain in chains if object_id in map(id, chain[1])]
        chains = through or chains
        distance = min((root.rank, len(steps)) for root, steps in chains)
        at_distance = [
            (root, steps) for root, steps in chains if (root.rank, len(steps)) == distance
        ]
        nearest = list[tuple[tuple[Root, Steps], Way]]()
        for root, steps in _some_of_each_holder(at_distance):
            way = self._writer.way(root, steps, of_graph=self._of_graphs)
            record = self._records.removal(root, steps, steps[-1:]) if self._of_graphs else None
            if record is not None:
                remedy = record.way.holder.remedy
                way = replace(way, holder=replace(way.holder, remedy=remedy))
            nearest.append(((root, steps), way))
        return min(nearest, key=lambda pair: order_of_holder(pair[1].holder))

    def _inside_older_figure(
        self, root: Root, steps: Steps, object_id: int
    ) -> tuple[Root, Steps, int]:
        """Return a chain from pyplot, but from the figure if that stays open. Also return the
        number of steps that are left out.

        Args:
            root: the root of the chain.
            steps: its objects.
            object_id: identity of the object of the row; 0 if there is none.
        """
        for position, item in enumerate(steps[:-1]):
            roots = self._figures.get(id(item))
            if roots is None or roots.closing != root:
                continue
            if self._stays_open(item, object_id):
                return roots.inside, steps[position:], position
        return root, steps, 0

    def _stays_open(self, figure: object, object_id: int) -> bool:
        """Return True if an open figure is older than what a row has; note it for later looks,
        which do not know its age.
        """
        if self._is_new_figure(figure, object_id):
            self._removed_as_whole.append(weakref.ref(figure))
            return False
        return self._is_older(figure)

    def _of_row(
        self, key: StorageKey, chain: tuple[Root, Steps], way: Way, rows: RowHolders | None
    ) -> Way:
        """Return the way to the holder of a whole row, given the way to one of its arrays."""
        row = None if rows is None else rows.row(key)
        if rows is None or row is None:
            removal = Removal.of(chain[1][-1], self._objects[key], way)
        else:
            chain_to_holder = chain[0], tuple(rows.shortened(key, chain[1]))
            by_copy = _removal_by_copy(chain_to_holder[1], row, way)
            removal = by_copy or self._removal_of_row(row, rows, chain, chain_to_holder, way)
        module = self._new_module(*chain, removal.way)
        if module is not None:
            removal = Removal.of(module[0], removal.arrays, module[1])
        self._removals[key] = removal
        return removal.way

    def _removal_of_row(
        self,
        row: Row,
        rows: RowHolders,
        chain: tuple[Root, Steps],
        chain_to_holder: tuple[Root, Steps],
        way: Way,
    ) -> Removal:
        """Return how to remove a whole row.

        Args:
            row: the row.
            rows: all rows.
            chain: the root and the steps to one of the row's arrays.
            chain_to_holder: the root and the steps to the nearest object that has all of them.
            way: the way to the array.
        """
        root, steps = chain_to_holder
        holder = steps[-1]
        arrays = row.held_arrays()
        record = self._records.removal(root, steps, arrays)
        if record is not None:
            return record
        if id(holder) == row.object_id:
            return Removal.of(holder, arrays, self._writer.way(root, steps))
        library_object = self._library_object(root, steps, row, rows)
        if library_object is not None:
            item, way_to_item = library_object
            return Removal.of(item, arrays, way_to_item)
        steps_to_array = chain[1]
        if len(steps) == len(steps_to_array):
            return Removal.of(holder, arrays, way)
        if row.is_inside_item and is_instance(holder, dict):
            # Such as a pandas object in a dict: it is removed as a whole.
            item = steps_to_array[len(steps)]
            return Removal.of(item, arrays, self._writer.way(root, (*steps, item)))
        removal = self._removal_with_holder(row, rows, chain_to_holder)
        if removal is not None:
            return removal
        if len(arrays) > _MOST_HOLDERS and rows.has_little_else(holder):
            whole = self._writer.way(root, steps)
            if whole.cut is not None and whole.holder.remedy.is_simple:
                return Removal.of(holder, arrays, whole)
        # Each array is removed from all places by itself.
        return Removal(None, arrays, way)

    def _removal_with_holder(
        self, row: Row, rows: RowHolders, chain: tuple[Root, Steps]
    ) -> Removal | None:
        """Return how to remove the arrays of a row together with the object that has all of them,
        or from it; None if one line cannot do so.
        """
        root, steps = chain
        arrays = row.held_arrays()
        whole = self._writer.way(root, steps)
        if root.is_removed_as_whole and whole.cut is not None:
            return Removal.of(steps[-1], arrays, whole)  # such as ``plt.close(1)``
        is_column = whole.cut is not None and whole.cut.kind is Kind.COLUMN
        is_in_cells = is_column and _are_in_older_cells(row, steps[-1], whole)
        is_removed_as_whole = whole.cut is None or (whole.is_advised and not is_in_cells)
        if is_removed_as_whole and whole.holder.remedy not in (NO_REMEDY, REMOVE):
            return Removal(None, arrays, whole)  # such as ``load.cache_clear()``
        inner = _NO_WAY
        if is_in_cells or not is_column:
            inner = self._way_inside(root, steps, row, rows)
        if self._records.are_behind(steps[-1], row, rows):
            inner = self._records.way_to_all(root, steps, row, rows)
            if not inner.cuts:
                return None
        if inner.cuts:
            holder = replace(whole.holder, remedy=inner.holder.remedy)
            return Removal(None, arrays, replace(inner, holder=holder))
        if whole.cut is not None and whole.cut.kind in _REGISTRATIONS:
            # Such as a matplotlib figure: users close it and type nothing that is inside.
            return Removal.of(steps[-1], arrays, whole)
        return None

    def _library_object(
        self, root: Root, steps: Steps, row: Row, rows: RowHolders
    ) -> tuple[object, Way] | None:
        """Return the outermost object of a library on a chain that has nothing but rows' arrays.

        Users remove it as a whole: they write no names of what is inside. An example is a group of
        zarr in a dict. IPython's own objects stay: it needs them.
        """
        if root.rank is Rank.IPYTHON:
            return None
        for position in range(1, len(steps) - 1):
            item = steps[position]
            if is_of_library(item, "unittest.mock", "NonCallableMock"):
                return None  # it stays, and forgets its calls
            if not is_opaque(item) or not is_private(item, steps[position + 1]):
                continue
            if _are_axes(item):
                return self._figure_around(root, steps[: position + 1], row, rows)
            if self._is_older(item):
                continue
            elements = by_identity(flat_elements(steps[position - 1]) or ())
            elements.pop(id(None), None)
            leading = rows.leading_items(row, list(elements.values()))
            if 1 < len(leading) == len(elements):  # the array has nothing else
                array = steps[position - 1]
                return array, self._writer.way(root, steps[:position])
            way = self._writer.way(root, steps[: position + 1])
            is_removable = way.cut is not None and way.is_direct and way.cut.kind is not Kind.NAME
            if is_removable and rows.has_little_else(item):
                return item, way
        return None

    def _figure_around(
        self, root: Root, steps: Steps, row: Row, rows: RowHolders
    ) -> tuple[object, Way] | None:
        """Note that the figure of the axes at which a chain ends is removed as a whole, and return
        it with the way to these.

        Returns None if it is older than the row or has much else: then the artists in it are
        removed.
        Each of its axes leads to all of it, so it dies only without all of them.
        """
        axes = steps[-1]
        figure = figure_of(axes)
        if not self._is_new_figure(figure, row.object_id) or not rows.has_little_else(figure):
            return None
        is_in_their_array = _has_only_axes_of(figure, steps[-2])
        way = self._writer.way(root, steps[:-1] if is_in_their_array else steps)
        if way.cut is None or not way.is_direct:
            return None
        self._removed_as_whole.append(weakref.ref(figure))
        return figure, way

    def _is_new_figure(self, figure: object, object_id: int) -> bool:
        """Return True if a figure is no older than a row, whose object has an identity."""
        return id(figure) == object_id or id(figure) in self._new()

    def _way_inside(self, root: Root, steps: Steps, row: Row, rows: RowHolders) -> Way:
        """Return the line that takes the arrays of a row out of the last object of a chain."""
        inside = self._writer.cuts_inside(root, steps, row.storage_by_array_id)
        cuts, removed_references = inside.cuts, inside.removed_references
        reached = set(map(row.storage_by_array_id.__getitem__, inside.reached))
        if not row.held <= reached:
            leading = rows.removable_items(row, items_of(steps[-1]))
            if any(is_of_library(item, "matplotlib.artist", "Artist") for item in leading):
                leading = []  # axes stay without the artists in them
            cuts = self._writer.cuts_of_items(root, steps, leading)
            removed_references = {(id(steps[-1]), id(item)) for item in leading}
        statement = statement_of(cuts)
        if not statement:
            return _NO_WAY
        remedy = Remedy(statement, cuts=tuple(cuts))
        return Way(Holder("", remedy), removed_references=frozenset(removed_references))

    def add_other_holders(self, keys: Container[StorageKey]) -> None:
        """Name the other places that hold some objects: each dies only if all of its places are
        emptied.
        """
        removals = {key: removal for key, removal in self._removals.items() if key in keys}
        searched = list[object]()
        for removal in removals.values():
            searched += removal.targets
        self._search.search_for_all(searched, self._max_visits)
        parts_of = {
            key: self._parts(removal, self._object_id(key)) for key, removal in removals.items()
        }
        parts = list(itertools.chain.from_iterable(parts_of.values()))
        if parts:
            self._search.search_for_all(parts, self._max_visits)
        for key, removal in removals.items():
            targets = [*removal.targets, *parts_of[key]]
            ways, unwritten = self._all_ways(targets, removal.way, self._object_id(key))
            self._name_all(key, removal.way, ways, unwritten)

    def _name_all(self, key: StorageKey, nearest: Way, ways: list[Way], unwritten: int) -> None:
        """Name the holders of a storage.

        Args:
            key: the storage.
            nearest: the way to the holder that is named already, and stays if its line removes the
                object from all places.
            ways: the ways from its holders.
            unwritten: the number of further holders.
        """
        first = ways[0]
        are_several = len(ways) > 1 or unwritten > 0
        if are_several or len(first.cuts) > 1 or first.holder.remedy == REMOVE_THEM:
            ways.sort(key=lambda way: order_of_holder(way.holder))
            way = joined(ways, unwritten) if are_several else first
            self.named[key] = way.holder
            return
        if nearest.holder.remedy.text:
            return
        line = ways[0].words
        if nearest.cut is not None:
            line = statement_of([nearest.cut])
        self.named[key] = replace(nearest.holder, remedy=Remedy(line))

    def _object_id(self, key: StorageKey) -> int:
        """Return the identity of the object for whose row a storage stands; 0 if there is none."""
        row = None if self._rows is None else self._rows.row(key)
        if row is None:
            return 0
        return row.object_id

    def _parts(self, removal: Removal, object_id: int) -> list[object]:
        """Return further objects that must die, because they lead to the arrays: those that the
        line removes, and parts of these.

        Args:
            removal: what the line removes.
            object_id: identity of the object of the row; 0 if there is none.
        """
        above = removal.way.ids_above()

        def stays(item: object) -> bool:
            figure = figure_of(item)
            if figure is not None and not self._is_new_figure(figure, object_id):
                return True
            return id(item) in above  # an older object around it, such as its parent

        parts = list[object]()
        array_ids = set(map(id, removal.arrays))
        if removal.item is not None:
            parts += self._search.between(removal.item, array_ids, stays)
        for owner_id, item_id in removal.way.removed_references:
            parts += self._search.below(owner_id, item_id, array_ids, stays)
        return list(by_identity(parts).values())

    def _all_ways(
        self, targets: Sequence[object], nearest: Way, object_id: int = 0
    ) -> tuple[list[Way], int]:
        """Return the ways to some objects from all places that hold them, one for each line, and
        the number of places that are too many to write.

        Args:
            targets: the objects.
            nearest: the nearest way to one of them.
            object_id: identity of the object of their row; 0 if there is none.
        """
        root = self._registered.get(id(targets[0]))
        if root is not None and root.is_only_place:
            return [nearest], 0
        chains = self._chains_left_by(nearest, targets)
        holders = [self._holder(chain, object_id) for chain in chains[:_MOST_HOLDERS]]
        closing = self._closing_figures(targets, nearest, object_id)
        holders += [HolderWays(None, [way], []) for way in closing]
        holders = nearest_first(holders, nearest)
        removed_references = set[tuple[int, int]]()
        by_advice = dict[Remedy | str, Way]()
        for holder in holders:
            remaining = holder.without(removed_references)
            for way in remaining.ways:
                removed_references.update(way.removed_references)
            for way in remaining.together():
                key: Remedy | str = way.holder.remedy
                if key == REMOVE_THEM:
                    key = way.holder.path  # the same words for each place
                first = by_advice.setdefault(key, way)
                if first.words and not way.words:  # a model has the parameter of an optimizer, too
                    by_advice[key] = replace(first, words="")
        return list(by_advice.values()), max(0, len(chains) - _MOST_HOLDERS)

    def _chains_left_by(self, nearest: Way, targets: Sequence[object]) -> list[FoundChain]:
        """Return the chains to some objects from their holders; of many only those that the line of
        ``nearest`` leaves: it takes long to write each.
        """
        target_ids = set(map(id, targets))
        chains = list[FoundChain]()
        for found_chain in self._chains.chains_to(targets):
            if not target_ids.isdisjoint(map(id, found_chain.steps[:-1])):
                continue  # their own part
            if found_chain.roots[0].is_of_library and found_chain.steps[-1] is not targets[0]:
                continue  # a constant of a library that a part refers to
            chains.append(found_chain)
        if len(chains) <= _MOST_CHAINS:
            return chains
        return [chain for chain in chains if not _is_removed(chain, nearest.removed_references)]

    def _closing_figures(
        self, targets: Sequence[object], nearest: Way, object_id: int
    ) -> list[Way]:
        """Return the ways to open figures around some axes, such as those in a user's list.

        Pyplot keeps these figures, with the axes in them. A figure stays if it is older, if it has
        much else or a name, and if ``nearest`` leads through it: then an artist is taken out of it.
        A line alone may have been drawn in an older figure, so it closes only the figure
        ``object_id``.
        """
        if not self._figures:
            return []
        on_the_way = {*nearest.step_ids, *(owner_id for owner_id, _ in nearest.removed_references)}
        on_the_way.difference_update(map(id, targets))
        figures = dict[int, object]()
        for target in targets:
            figure = figure_of(target)
            may_close = _are_axes(target) or id(figure) == object_id
            if id(figure) not in self._figures or not (may_close or target is figure):
                continue
            if target is not figure and self._stays_open(figure, object_id):
                continue
            if on_the_way.isdisjoint(_around(target, figure)):
                figures[id(figure)] = figure
        if figures:
            for value in list(self._names.values()):
                figures.pop(id(figure_of(value)), None)
        ways = list[Way]()
        for key, figure in figures.items():
            if self._rows is not None and self._rows.has_little_else(figure):
                ways.append(self._writer.way(self._figures[key].closing, (figure,)))
        return ways

    def _with_line(self, root: Root, steps: Steps, way: Way) -> Way:
        """Return a way, or if no line removes its object, that to the new module around it.

        A parameter stays in its module, which leaves as a whole if all of it is unwanted.
        """
        module = self._new_module(root, steps, way)
        return way if module is None else module[1]

    def _new_module(self, root: Root, steps: Steps, way: Way) -> tuple[object, Way] | None:
        """Find the outermost module of torch that is new and has nothing but rows' arrays: note
        that it is removed as a whole, and return it with its way.

        Returns None if there is none, or if a line removes the last object itself.
        """
        if self._rows is None or way.holder.remedy.is_simple:
            return None
        for position, item in enumerate(steps[:-1]):
            if not is_of_library(item, "torch.nn", "Module") or id(item) not in self._new():
                continue
            way_to_module = self._writer.way(root, steps[: position + 1])
            has_line = way_to_module.holder.remedy.is_simple
            if has_line and self._rows.has_little_else(item):
                self._removed_as_whole.append(weakref.ref(item))
                return item, way_to_module
        return None

    def _holder(self, found_chain: FoundChain, object_id: int) -> HolderWays:
        """Return a holder of an object, with the ways through its items.

        Args:
            found_chain: the chain through the holder.
            object_id: identity of the object of the row; 0 if there is none.
        """
        root, steps, left_out = self._inside_older_figure(
            found_chain.roots[0], found_chain.steps, object_id
        )
        end = found_chain.holder_at + 1 - left_out
        record = self._records.removal(root, steps, steps[-1:])
        if record is not None and record.way.step_ids[-1] in map(id, steps[:end]):
            return HolderWays(None, [record.way], [])  # the holder is inside it
        ways = [self._way_through_item(root, steps, record)]
        if end <= 0 or found_chain.references == 1:
            return HolderWays(None, ways, [])
        to_holder = steps[:end]
        if found_chain.items:
            return HolderWays(None, [self._way_to_many(root, to_holder, found_chain.items)], [])
        items = [steps[end]]
        for below in found_chain.more:
            chain = (*to_holder, *below)
            record = self._records.removal(root, chain, chain[-1:])
            ways.append(self._way_through_item(root, chain, record))
            items.append(below[0])
        return HolderWays(to_holder[-1], ways, items)

    def _way_through_item(self, root: Root, steps: Steps, record: Removal | None) -> Way:
        """Return the way to the last object of a chain, or to the record around it."""
        if record is not None:
            return record.way
        way = self._writer.way(root, steps, of_graph=self._of_graphs)
        return self._with_line(root, steps, way)

    def _way_to_many(self, root: Root, steps: Steps, items: Sequence[object]) -> Way:
        """Return the way to many items of the last object of a chain."""
        holder = steps[-1]
        cuts = self._writer.cuts_of_items(root, steps, items)
        if any(cut.owner_id != id(holder) for cut in cuts):
            cuts = []
        line = statement_of(cuts)
        if not line:
            cuts = []
        first = first_in(holder, items)
        of_first = self._writer.way(root, (*steps, first)).holder
        remedy = Remedy(line, cuts=tuple(cuts)) if line else REMOVE_THEM
        return Way(
            replace(of_first.with_more(str(len(items) - 1)), remedy=remedy),
            removed_references=frozenset((id(holder), id(item)) for item in items),
        )


_NO_WAY = Way(Holder("", NO_REMEDY))


def _are_in_older_cells(row: Row, array: object, column: Way) -> bool:
    """Return True if a row's objects are in some cells of older columns.

    Args:
        row: the row.
        array: the array of the columns.
        column: the way to the columns, with advice if they were there before.
    """
    elements = flat_elements(array) or ()
    return column.is_advised and not set(map(id, elements)) <= row.storage_by_array_id.keys()


def _removal_by_copy(steps: Steps, row: Row, way: Way) -> Removal | None:
    """Return how to remove a whole row together with an object whose place a copy takes, such as an
    estimator; None if no such object has all of it.

    Args:
        steps: the steps to the nearest object that has all of the row's arrays.
        row: the row.
        way: the way to one of these.
    """
    if way.cut is None or not way.cut.copied_by:
        return None
    for item in steps:
        if id(item) == way.cut.removed_id:
            return Removal.of(item, row.held_arrays(), way)
    return None


def _is_removed(found_chain: FoundChain, removed: Set[tuple[int, int]]) -> bool:
    """Return True if a line removes a reference on the chain through each item of its holder.

    Args:
        found_chain: the chain.
        removed: the references that the line removes, as the identities of both objects.
    """
    if found_chain.references != 1 + len(found_chain.more):
        return False
    to_holder = found_chain.steps[: found_chain.holder_at + 1]
    for steps in (found_chain.steps, *((*to_holder, *below) for below in found_chain.more)):
        if removed.isdisjoint(itertools.pairwise(map(id, without_own_dicts(steps)))):
            return False
    return True


def _some_of_each_holder(chains: Sequence[tuple[Root, Steps]]) -> list[tuple[Root, Steps]]:
    """Return the chains; of those to many items of one holder only that to its first item.

    Writing one for each of 20,000 views of an array in a list takes 25 s.
    """
    by_holder = dict[tuple[int, ...], list[tuple[Root, Steps]]]()
    for root, steps in chains:
        by_holder.setdefault(tuple(map(id, (root, *steps[:-1]))), []).append((root, steps))
    some = list[tuple[Root, Steps]]()
    for of_holder in by_holder.values():
        root, steps = of_holder[0]
        if len(of_holder) > _MOST_CHAINS and len(steps) > 1:
            first = first_in(steps[-2], [chain[1][-1] for chain in of_holder])
            some.append((root, (*steps[:-1], first)))
        else:
            some += of_holder
    return some


def _are_axes(item: object) -> bool:
    return is_of_library(item, "matplotlib.axes", "Axes")


def _has_only_axes_of(figure: object, array: object) -> bool:
    """Return True for an array of objects with nothing but axes of a figure."""
    elements = flat_elements(array)
    if elements is None:
        return False
    return all(element is None or figure_of(element) is figure for element in elements)


def _around(artist: object, figure: object) -> set[int]:
    """Return the identities of the axes and the figure around an artist, and of their lists."""
    ids = set[int]()
    for owner in ((instance_dict(artist) or {}).get("axes"), figure):
        if owner is not None and owner is not artist:
            ids.add(id(owner))
            ids.update(map(id, (instance_dict(owner) or {}).values()))
    return ids


def order_of_holder(holder: Holder) -> tuple[bool, bool, int, str]:
    """Return the sort key that picks the holder to show.

    It does not depend on the order in which the collector lists holders.
    """
    return (holder.is_kept, not holder.is_variable, len(holder.path), holder.path)
