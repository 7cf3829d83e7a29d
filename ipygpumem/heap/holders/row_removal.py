"""Finds the object to remove so that all arrays of a row are freed: their holder, a new object of a
library around them, or each array by itself.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

from ipygpumem.heap.arrays import flat_elements, is_of_library
from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.holders.open_figures import OpenFigures, are_axes, has_only_axes_of
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.referrer_graph import Chain, Steps
from ipygpumem.heap.holders.registries import figure_of
from ipygpumem.heap.holders.removal import Removal
from ipygpumem.heap.holders.rows import HolderOfRow, Row, RowHolders
from ipygpumem.heap.paths.cuts import Kind
from ipygpumem.heap.paths.items_and_attributes import is_opaque, is_private, items_of
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import NO_REMEDY, REMOVE, Holder, Remedy
from ipygpumem.heap.paths.roots import Rank, Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way
from ipygpumem.introspect import is_instance

_MOST_LINES = 1000
"""Maximum number of arrays of a row for each of which a line is written: a second of work. The
holder of more is removed as a whole if it has little else.
"""
_REGISTRATIONS = {Kind.CALL, Kind.CLOSED}
"""References that are removed by a call, with all that is registered there."""
_NO_WAY = Way(Holder("", NO_REMEDY))
"""Stands for a way without a line."""


class RowRemovals:
    """Decides what to remove for each row.

    Args:
        rows: the rows.
        roots: the names and objects from which the user can reach objects.
        writer: writes the ways to what is removed.
        records: the records that older objects have received.
        figures: the open figures.
    """

    def __init__(
        self,
        rows: RowHolders,
        roots: Roots,
        writer: PathWriter,
        records: ReceivedRecords,
        figures: OpenFigures,
    ) -> None:
        self._rows = rows
        self._writer = writer
        self._records = records
        self._figures = figures
        self._ages = roots.ages
        self._removed_as_whole = roots.removed_by_lines.modules_and_figures

    def removal(self, row: Row, holder: HolderOfRow, chain: Chain, way: Way) -> Removal:
        """Return how to remove a row.

        Args:
            row: the row.
            holder: its holder, which is on the chain.
            chain: the nearest chain to one of the row's arrays.
            way: the way along this chain.
        """
        by_copy = _removal_by_copy(holder.to_holder, row, way)
        return by_copy or self._removal_of_row(row, holder, chain, way)

    def with_new_module(self, removal: Removal, root: Root, steps: Steps) -> Removal:
        """Return a removal, or that of the new module around its objects (``new_module``).

        Args:
            removal: the removal.
            root: the root of the chain to one of its objects.
            steps: the steps of the chain.
        """
        module_and_way = self.new_module(root, steps, removal.way)
        if module_and_way is None:
            return removal
        module, way = module_and_way
        return Removal.of(module, removal.objects, way)

    def new_module(self, root: Root, steps: Steps, way: Way) -> tuple[object, Way] | None:
        """Find the outermost module of torch that is new and has nothing but rows' arrays: note
        that it is removed as a whole, and return it with its way.

        An example is ``layers.append(nn.Linear(9, 9))``: no line removes the weight from its layer.
        Returns None if there is no such module, or if a line removes the last object itself.

        Args:
            root: the root of a chain.
            steps: the objects of the chain, such as list, layer, dict of parameters, weight.
            way: the way along this chain.
        """
        if way.holder.remedy.is_simple:
            return None
        for position, item in enumerate(steps[:-1]):
            if not is_of_library(item, "torch.nn", "Module") or id(item) not in self._ages.new():
                continue
            way_to_module = self._writer.way(root, steps[: position + 1])
            has_line = way_to_module.holder.remedy.is_simple
            if has_line and self._rows.has_little_else(item):
                self._removed_as_whole.append(weakref.ref(item))
                return item, way_to_module
        return None

    def _removal_of_row(
        self, row: Row, holder_of_row: HolderOfRow, chain: Chain, way: Way
    ) -> Removal:
        """Return how to remove a whole row.

        An example of the two chains::

            steps:      root --> list --> library's object --> holder --> item --> array
            to_holder:  root --> list --> library's object --> holder

        Args:
            row: the row.
            holder_of_row: the nearest object that has all of its arrays.
            chain: the root of both chains, and the steps to one of the arrays.
            way: the way to the array.
        """
        root, steps = chain
        to_holder = holder_of_row.to_holder
        holder = to_holder[-1]
        held_objects = row.held_objects()
        record = self._records.removal(root, to_holder, held_objects)
        if record is not None:  # checkpoints["epoch 1"] = model.state_dict()
            return record
        if id(holder) == row.object_id:  # history.append(model)
            return Removal.of(holder, held_objects, self._writer.way(root, to_holder))
        library_object = self._library_object(root, to_holder, row)
        if library_object is not None:  # results["group"] = zarr.group()
            item, way_to_item = library_object
            return Removal.of(item, held_objects, way_to_item)
        if len(to_holder) == len(steps):  # results["x"] = array
            return Removal.of(holder, held_objects, way)
        if holder_of_row.is_inside_item and is_instance(holder, dict):  # results["df"] = df
            item = steps[len(to_holder)]
            return Removal.of(item, held_objects, self._writer.way(root, (*to_holder, item)))
        removal = self._removal_with_holder(row, root, to_holder)
        if removal is not None:
            return removal
        if len(held_objects) > _MOST_LINES and self._rows.has_little_else(holder):
            way_to_holder = self._writer.way(root, to_holder)
            if way_to_holder.cut is not None and way_to_holder.holder.remedy.is_simple:
                return Removal.of(holder, held_objects, way_to_holder)
        # Each array is removed from all places by itself.
        return Removal(None, held_objects, way)

    def _removal_with_holder(self, row: Row, root: Root, to_holder: Steps) -> Removal | None:
        """Return how to remove the arrays of a row together with the object that has all of them,
        or from it; None if one line cannot do so.

        Args:
            row: the row.
            root: the root of the chain to the object that has all of its arrays.
            to_holder: the objects of that chain.
        """
        holder = to_holder[-1]
        held_objects = row.held_objects()
        way_to_holder = self._writer.way(root, to_holder)
        cut = way_to_holder.cut
        if root.is_removed_as_whole and cut is not None:
            return Removal.of(holder, held_objects, way_to_holder)  # such as ``plt.close(1)``
        is_column = cut is not None and cut.kind is Kind.COLUMN
        is_in_older_cells = is_column and _are_in_older_cells(row, holder, way_to_holder)
        has_advice_for_all = cut is None or (way_to_holder.is_advised and not is_in_older_cells)
        if has_advice_for_all and way_to_holder.holder.remedy not in (NO_REMEDY, REMOVE):
            return Removal(None, held_objects, way_to_holder)  # such as ``load.cache_clear()``
        way_inside = _NO_WAY
        if is_in_older_cells or not is_column:
            way_inside = self._way_inside(root, to_holder, row)
        if self._records.are_behind(holder, row, self._rows):
            way_inside = self._records.way_to_all(root, to_holder, row, self._rows)
            if not way_inside.cuts:
                return None
        if way_inside.cuts:  # such as ``runs[2:] = []``
            shown_holder = replace(way_to_holder.holder, remedy=way_inside.holder.remedy)
            return Removal(None, held_objects, replace(way_inside, holder=shown_holder))
        if cut is not None and cut.kind in _REGISTRATIONS:
            # Such as a matplotlib figure: users close it and type nothing that is inside.
            return Removal.of(holder, held_objects, way_to_holder)
        return None

    def _way_inside(self, root: Root, to_holder: Steps, row: Row) -> Way:
        """Return the line that takes the arrays of a row out of their holder, without a path to
        them; ``_NO_WAY`` if there is none.

        Args:
            root: the root of the chain to the holder.
            to_holder: the objects of that chain.
            row: the row.
        """
        inside = self._writer.cuts_inside(root, to_holder, row.storage_by_object_id)
        cuts, removed_references = inside.cuts, inside.removed_references
        reached_storages = set(map(row.storage_by_object_id.__getitem__, inside.object_ids))
        if not row.held_storages <= reached_storages:
            holder = to_holder[-1]
            leading = self._rows.removable_items(row, items_of(holder))
            if any(is_of_library(item, "matplotlib.artist", "Artist") for item in leading):
                leading = []  # axes stay without the artists in them
            cuts = self._writer.cuts_of_items(root, to_holder, leading)
            removed_references = {(id(holder), id(item)) for item in leading}
        statement = statement_of(cuts)
        if not statement:
            return _NO_WAY
        remedy = Remedy(statement, cuts=tuple(cuts))
        return Way(Holder("", remedy), removed_references=frozenset(removed_references))

    # -- objects of libraries ---------------------------------------------------------------------

    def _library_object(self, root: Root, steps: Steps, row: Row) -> tuple[object, Way] | None:
        """Return the outermost object of a library on a chain that has nothing but rows' arrays,
        or an array of such objects, and the way to it; None without one.

        Users remove it as a whole: they write no names of what is inside. An example is a group of
        zarr in a dict. IPython's own objects stay: it needs them.

        Args:
            root: the root of the chain.
            steps: the objects of the chain.
            row: the row.
        """
        if root.rank is Rank.IPYTHON:
            return None
        for position in range(1, len(steps) - 1):
            item = steps[position]
            if is_of_library(item, "unittest.mock", "NonCallableMock"):
                return None  # it stays, and forgets its calls
            if not is_opaque(item) or not is_private(item, steps[position + 1]):
                continue
            to_item = steps[: position + 1]
            if are_axes(item):
                return self._figure_around(root, to_item, row)
            if self._ages.is_older(item):
                continue
            to_owner = steps[:position]
            if self._is_array_of_row(to_owner[-1], row):
                return to_owner[-1], self._writer.way(root, to_owner)
            way = self._writer.way(root, to_item)
            is_removable = way.cut is not None and way.is_direct and way.cut.kind is not Kind.NAME
            if is_removable and self._rows.has_little_else(item):
                return item, way
        return None

    def _is_array_of_row(self, item: object, row: Row) -> bool:
        """Return True for an array of several objects, such as that of ``plt.subplots(2, 2)``, all
        of which lead to arrays of a row.
        """
        elements = by_identity(flat_elements(item) or ())
        elements.pop(id(None), None)
        leading = self._rows.leading_items(row, list(elements.values()))
        return len(elements) > 1 and len(leading) == len(elements)

    def _figure_around(self, root: Root, steps: Steps, row: Row) -> tuple[object, Way] | None:
        """Note that the figure around some axes is removed as a whole, and return it with the way
        to the axes. An example is ``figures["loss"] = ax``.

        Returns None if the figure is older than the row or has much else: then artists are taken
        out of it. All axes of a figure lead to the whole figure, so it dies only without all of
        them.

        Args:
            root: the root of the chain to the axes.
            steps: the objects of that chain, the axes last.
            row: the row of the arrays in the figure.
        """
        axes = steps[-1]
        figure = figure_of(axes)
        if not self._figures.is_new(figure, row.object_id):
            return None
        if not self._rows.has_little_else(figure):
            return None
        is_in_their_array = has_only_axes_of(figure, steps[-2])
        way = self._writer.way(root, steps[:-1] if is_in_their_array else steps)
        if way.cut is None or not way.is_direct:
            return None
        self._figures.note_removed(figure)
        return figure, way


def _are_in_older_cells(row: Row, array: object, column: Way) -> bool:
    """Return True if a row's objects are in some cells of older columns.

    Args:
        row: the row.
        array: the array of the columns.
        column: the way to the columns, with advice if they were there before.
    """
    elements = flat_elements(array) or ()
    return column.is_advised and not set(map(id, elements)) <= row.storage_by_object_id.keys()


def _removal_by_copy(steps: Steps, row: Row, way: Way) -> Removal | None:
    """Return how to remove a whole row together with an object whose place a copy takes, such as an
    estimator (``clf = sklearn.base.clone(clf)``); None if no such object has the whole row.

    Args:
        steps: the steps to the nearest object that has all of the row's arrays.
        row: the row.
        way: the way to one of these.
    """
    if way.cut is None or not way.cut.copied_by:
        return None
    for item in steps:
        if id(item) == way.cut.removed_id:
            return Removal.of(item, row.held_objects(), way)
    return None
