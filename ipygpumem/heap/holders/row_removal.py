"""Finds the object to remove so that all arrays of a row are freed: their holder, a new object of a
library around them, or each array by itself.

After ``results["group"] = zarr.group()``, the arrays of the group are a row. No line is about these
arrays, because users write no names for the parts of a group: the line is ``del results["group"]``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ipygpumem.heap.bulk import by_identity
from ipygpumem.heap.holders.open_figures import OpenFigures, are_axes, has_only_axes_of
from ipygpumem.heap.holders.received_records import ReceivedRecords
from ipygpumem.heap.holders.referrer_graph import Chain, Steps
from ipygpumem.heap.holders.registries import figure_of
from ipygpumem.heap.holders.removal import Removal
from ipygpumem.heap.holders.rows import HolderOfRow, Row, RowHolders
from ipygpumem.heap.kinds.arrays import flat_elements, is_of_library
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
_NO_WAY = Way(Holder(path="", remedy=NO_REMEDY))
"""Stands for a way without a line."""


class ObjectWithWay(NamedTuple):
    """An object that a line removes as a whole, such as a new model."""

    item: object
    way: Way
    """The way to it, with the line."""


class _RowWithHolder(NamedTuple):
    r"""A row with its holder, the nearest object that has all of its arrays.

    An example of the chain from the root to an array::

        root --> list --> library's object --> holder --> item --> array
                \_____________________________________/
                              to_holder
    """

    row: Row
    objects: list[object]
    """The row's objects that must die."""
    root: Root
    steps: Steps
    """The objects of the whole chain, to the array."""
    to_holder: Steps
    """The first of them, up to the holder; all of them if the holder is the array itself."""
    is_inside_item: bool
    """True if users write no name for the array inside the item, as for that of a data frame."""
    way: Way
    """The way along the whole chain, to the array."""

    @property
    def holder(self) -> object:
        """The holder itself."""
        return self.to_holder[-1]


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
        self._ages = roots.lines.ages
        self._removed = roots.lines.removed

    def removal(self, row: Row, holder: HolderOfRow, chain: Chain, way: Way) -> Removal:
        """Return how to remove a row.

        Args:
            row: the row.
            holder: its holder, which is on the chain.
            chain: the nearest chain to one of the row's arrays.
            way: the way along this chain.
        """
        root, steps = chain
        held_row = _RowWithHolder(
            row=row,
            objects=row.held_objects(),
            root=root,
            steps=steps,
            to_holder=holder.to_holder,
            is_inside_item=holder.is_inside_item,
            way=way,
        )
        return self._first_removal(held_row)

    def with_new_module(self, removal: Removal, root: Root, steps: Steps) -> Removal:
        """Return a removal; if there is a new module around its objects that is to be removed as a
        whole (``new_module``), return the removal of this module instead.

        Args:
            removal: the removal.
            root: the root of the chain to one of its objects.
            steps: the steps of the chain.
        """
        module = self.new_module(root, steps, removal.way)
        if module is None:
            return removal
        return Removal.of(module.item, removal.objects, module.way)

    def new_module(self, root: Root, steps: Steps, way: Way) -> ObjectWithWay | None:
        """Return the outermost module of torch on a chain that is new and has nothing but rows'
        arrays, with the way to it; note that it is removed as a whole.

        After ``layers.append(nn.Linear(9, 9))`` it is the layer, because no line may remove the
        weight from it. None if there is no such module, or if a line removes the weight itself.

        Args:
            root: the root of a chain.
            steps: the objects of the chain, such as list, layer, dict of parameters, weight.
            way: the way along this chain.
        """
        if way.holder.remedy.is_simple:
            return None
        for position, item in enumerate(steps[:-1]):
            is_module = is_of_library(item, "torch.nn", "Module")
            if not is_module or id(item) not in self._ages.new():
                continue
            way_to_module = self._writer.way(root, steps[: position + 1])
            has_line = way_to_module.holder.remedy.is_simple
            if has_line and self._rows.has_little_else(item):
                self._removed.add_module_or_figure(item)
                return ObjectWithWay(item, way_to_module)
        return None

    # -- the cases, the first of which counts ------------------------------------------------------

    def _first_removal(self, held_row: _RowWithHolder) -> Removal:
        """Return how to remove a whole row: that of the first case in this list which applies.

        The order is the rule. An object that users handle as a whole, such as a record or a group
        of zarr, is removed with the arrays in it; only without such an object, a line is about the
        arrays. Each comment has the line of the user for which the case is.
        """
        return (
            _removal_by_copy(held_row)  # clf.fit(x, y)
            or self._removal_of_record(held_row)  # checkpoints["epoch 1"] = model.state_dict()
            or self._removal_of_named_object(held_row)  # history.append(model)
            or self._removal_of_library_object(held_row)  # results["group"] = zarr.group()
            or _removal_of_array(held_row)  # results["x"] = array
            or self._removal_of_data_frame(held_row)  # results["df"] = df
            or self._removal_with_holder(held_row)
            # each array, from each of its places
            or Removal.of_objects(held_row.objects, held_row.way)
        )

    def _removal_with_holder(self, held_row: _RowWithHolder) -> Removal | None:
        """Return how to remove the arrays of a row by one line about their holder: the first case
        in this list which applies, or None.

        Each comment has the line of the user, and then the line that frees the arrays.
        """
        way_to_holder = self._writer.way(held_row.root, held_row.to_holder)
        # Such as ``df.at[3, "image"] = image``: the older images in the column stay.
        is_in_older_cells = _are_in_older_cells(held_row, way_to_holder)
        return (
            _removal_of_closed_root(held_row, way_to_holder)  # plt.plot(x): plt.close(1)
            or _removal_by_advice(  # load(path): load.cache_clear()
                held_row, way_to_holder, is_in_older_cells=is_in_older_cells
            )
            or self._removal_from_holder(  # runs.extend(arrays): runs[2:] = []
                held_row, way_to_holder, is_in_older_cells=is_in_older_cells
            )
            or self._removal_of_holder(held_row, way_to_holder)  # too many arrays: del runs["x"]
        )

    def _removal_of_record(self, held_row: _RowWithHolder) -> Removal | None:
        """Return how to remove the record that an older object has received, with the row in it."""
        return self._records.removal(held_row.root, held_row.to_holder, held_row.objects)

    def _removal_of_named_object(self, held_row: _RowWithHolder) -> Removal | None:
        """Return how to remove the object to which a name of the experiment referred, if it is the
        holder: after ``model = Net(); history.append(model)``, the line is ``del history[3]``.
        """
        if id(held_row.holder) != held_row.row.object_id:
            return None
        way_to_holder = self._writer.way(held_row.root, held_row.to_holder)
        return Removal.of(held_row.holder, held_row.objects, way_to_holder)

    def _removal_of_library_object(self, held_row: _RowWithHolder) -> Removal | None:
        """Return how to remove the object of a library that has nothing but rows' arrays."""
        found = self._library_object(held_row.root, held_row.to_holder, held_row.row)
        if found is None:
            return None
        return Removal.of(found.item, held_row.objects, found.way)

    def _removal_of_data_frame(self, held_row: _RowWithHolder) -> Removal | None:
        """Return how to remove a value of a dict as a whole, if users write no names for the arrays
        inside: after ``results["df"] = df``, the data frame, not its blocks.
        """
        if not held_row.is_inside_item or not is_instance(held_row.holder, dict):
            return None
        item = held_row.steps[len(held_row.to_holder)]
        way_to_item = self._writer.way(held_row.root, (*held_row.to_holder, item))
        return Removal.of(item, held_row.objects, way_to_item)

    def _removal_from_holder(
        self, held_row: _RowWithHolder, way_to_holder: Way, *, is_in_older_cells: bool
    ) -> Removal | None:
        """Return how to take the arrays of a row out of their holder by one line, ``del runs[2:]``.

        Without such a line, return how to remove the whole holder if a call does that, such as
        ``plt.close(fig)``: users type no names of what is inside a figure. None otherwise.
        """
        cut = way_to_holder.cut
        way_inside = _NO_WAY
        # Columns of a data frame are removed as a whole, unless older cells in them must stay.
        if is_in_older_cells or not _is_of_columns(way_to_holder):
            way_inside = self._way_inside(held_row.root, held_row.to_holder, held_row.row)
        # An older container has got records with the arrays: these are removed as a whole instead.
        has_records = self._records.are_behind(held_row.holder, held_row.row, self._rows)
        if has_records:
            way_inside = self._records.way_to_all(
                held_row.root, held_row.to_holder, held_row.row, self._rows
            )
        if way_inside.cuts:
            # The report shows the path to the holder, with the line for what is inside.
            shown_holder = replace(way_to_holder.holder, remedy=way_inside.holder.remedy)
            return Removal.of_objects(held_row.objects, replace(way_inside, holder=shown_holder))
        is_removed_by_call = cut is not None and cut.kind in _REGISTRATIONS
        if is_removed_by_call and not has_records:  # plt.close(fig)
            return Removal.of(held_row.holder, held_row.objects, way_to_holder)
        return None

    def _removal_of_holder(self, held_row: _RowWithHolder, way_to_holder: Way) -> Removal | None:
        """Return how to remove the whole holder, if it has little else and too many arrays to
        write a line for each.
        """
        if len(held_row.objects) <= _MOST_LINES or not self._rows.has_little_else(held_row.holder):
            return None
        if way_to_holder.cut is None or not way_to_holder.holder.remedy.is_simple:
            return None
        return Removal.of(held_row.holder, held_row.objects, way_to_holder)

    def _way_inside(self, root: Root, to_holder: Steps, row: Row) -> Way:
        """Return the line that takes the arrays of a row out of their holder, without a path to
        them; ``_NO_WAY`` if there is none.

        Args:
            root: the root of the chain to the holder.
            to_holder: the objects of that chain.
            row: the row.
        """
        # First try to remove the arrays alone, as items or parts of items: runs[3]["a"].
        inside = self._writer.cuts_inside(root, to_holder, row.storage_by_object_id)
        cuts, removed_references = inside.cuts, inside.removed_references
        reached_storages = set(map(row.storage_by_object_id.__getitem__, inside.object_ids))
        if not row.held_storages <= reached_storages:
            # Some are deeper in the items, as in ``runs[3]["a"]["b"]``: remove whole items instead.
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
        return Way(Holder(path="", remedy=remedy), removed_references=frozenset(removed_references))

    # -- objects of libraries ---------------------------------------------------------------------

    def _library_object(self, root: Root, steps: Steps, row: Row) -> ObjectWithWay | None:
        """Return the outermost object of a library on a chain that has nothing but rows' arrays,
        with the way to it; None if there is none.

        Users remove it as a whole, because they write no names of its parts. For axes it is their
        figure, or the array of all axes that ``plt.subplots(2, 2)`` returns. IPython's own objects
        stay, because it needs them.

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
            is_part_private = is_private(item, steps[position + 1])
            if not is_opaque(item) or not is_part_private:
                continue  # users can name the part that leads to the arrays
            to_item = steps[: position + 1]
            if are_axes(item):  # figures["loss"] = ax
                return self._figure_around(root, to_item, row)
            if self._ages.learn_if_older(item):
                continue
            to_owner = steps[:position]
            if self._is_array_of_row(to_owner[-1], row):  # results["axes"] = plt.subplots(2, 2)[1]
                return ObjectWithWay(to_owner[-1], self._writer.way(root, to_owner))
            way = self._writer.way(root, to_item)
            is_removable = way.cut is not None and way.is_direct and way.cut.kind is not Kind.NAME
            if is_removable and self._rows.has_little_else(item):  # results["group"] = zarr.group()
                return ObjectWithWay(item, way)
        return None

    def _is_array_of_row(self, item: object, row: Row) -> bool:
        """Return True for an array of several objects, such as that of ``plt.subplots(2, 2)``, all
        of which lead to arrays of a row.
        """
        elements = by_identity(flat_elements(item) or ())
        elements.pop(id(None), None)
        leading = self._rows.leading_items(row, list(elements.values()))
        return len(elements) > 1 and len(leading) == len(elements)

    def _figure_around(self, root: Root, steps: Steps, row: Row) -> ObjectWithWay | None:
        """Return the figure around some axes, with the way to the axes; note that it is removed as
        a whole.

        After ``figures["loss"] = ax``, the line is ``del figures["loss"]``, and the whole figure is
        to die, because axes lead to all of it. None if the figure is older than the row or has much
        else: then artists are taken out of it.

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
        return ObjectWithWay(figure, way)


def _removal_by_copy(held_row: _RowWithHolder) -> Removal | None:
    """Return how to remove a row with the fitted estimator that has it, if the line puts a copy in
    the place of the estimator: ``clf = sklearn.base.clone(clf)``. None otherwise.
    """
    cut = held_row.way.cut
    if cut is None or not cut.copied_by:
        return None
    for item in held_row.to_holder:
        if id(item) == cut.removed_id:
            return Removal.of(item, held_row.objects, held_row.way)
    return None


def _removal_of_array(held_row: _RowWithHolder) -> Removal | None:
    """Return how to remove the row's only array, which is its own holder; None otherwise."""
    if len(held_row.to_holder) < len(held_row.steps):
        return None
    return Removal.of(held_row.holder, held_row.objects, held_row.way)


def _removal_of_closed_root(held_row: _RowWithHolder, way_to_holder: Way) -> Removal | None:
    """Return how to remove the holder together with its root, such as a figure by
    ``plt.close(1)``; None if the root is not removed as a whole.
    """
    if not held_row.root.is_removed_as_whole or way_to_holder.cut is None:
        return None
    return Removal.of(held_row.holder, held_row.objects, way_to_holder)


def _removal_by_advice(
    held_row: _RowWithHolder, way_to_holder: Way, *, is_in_older_cells: bool
) -> Removal | None:
    """Return how to remove a row by the advice for its holder, such as ``load.cache_clear()``, if
    it frees all arrays in the holder; None otherwise.
    """
    # Without a reference that a line can remove, the advice ends the holder: a call, or words.
    ends_holder = way_to_holder.cut is None
    is_advised = way_to_holder.is_advised and not is_in_older_cells
    is_for_all = ends_holder or is_advised
    if not is_for_all or way_to_holder.holder.remedy in (NO_REMEDY, REMOVE):
        return None
    return Removal.of_objects(held_row.objects, way_to_holder)


def _is_of_columns(way: Way) -> bool:
    """Return True if the line of a way removes columns of a data frame: ``del df["image"]``."""
    return way.cut is not None and way.cut.kind is Kind.COLUMN


def _are_in_older_cells(held_row: _RowWithHolder, way_to_holder: Way) -> bool:
    """Return True if a row's objects are in some cells of older columns of a data frame, as after
    ``df.at[3, "image"] = image``. The other cells of the column must stay.
    """
    has_older_columns = _is_of_columns(way_to_holder) and way_to_holder.is_advised
    if not has_older_columns:
        return False
    elements = flat_elements(held_row.holder) or ()
    return not set(map(id, elements)) <= held_row.row.storage_by_object_id.keys()
