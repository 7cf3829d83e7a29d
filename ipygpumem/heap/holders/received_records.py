"""Writes the lines that remove the records which older objects have received, each as a whole.

A record is an object that an experiment has put into an older one: ``checkpoints["epoch 1"] =
model.state_dict()``, or ``app.trainer = Trainer()``. Users remove these, not the arrays inside.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType, ModuleType

from ipygpumem.heap.containers import CONTAINERS
from ipygpumem.heap.holders.referrer_graph import Steps
from ipygpumem.heap.holders.removal import Removal
from ipygpumem.heap.holders.rows import Row, RowHolders
from ipygpumem.heap.kinds.arrays import holding_objects, is_array, is_of_library
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.items_and_attributes import items_of
from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.remedies import NO_REMEDY, Holder, Remedy
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, is_users_class

_OF_CONTAINERS = {Kind.ITEM, Kind.KEY}
"""References to items of containers."""
_EMPTIED = (list, dict, set, deque, OrderedDict)
"""Types of containers that may be emptied."""
_NO_RECORDS = (
    ("torch.nn", "Module"),
    ("torch.optim", "Optimizer"),
    ("torch", "Tensor"),
    ("matplotlib.artist", "Artist"),
    ("unittest.mock", "NonCallableMock"),
)
"""Classes of libraries whose objects are no records: other parts of the search remove them."""
_OF_PYTHON = (BaseException, FunctionType, ModuleType)
"""Classes of Python whose objects are no records either."""


class ReceivedRecords:
    """The records that older objects have received since the start of an experiment.

    Args:
        roots: has the records, and receives those that lines remove.
        writer: writes the ways to them.
    """

    def __init__(self, roots: Roots, writer: PathWriter) -> None:
        self._received = roots.lines.received
        self._removed = roots.lines.removed
        self._writer = writer

    def removal(self, root: Root, steps: Steps, targets: Sequence[object]) -> Removal | None:
        """Return how to remove the first record on a chain as a whole, with all that is in it, also
        arrays that are too small for a row. Note that it is removed.

        None if there is no record on the chain, or no line for it.

        Args:
            root: the root of the chain.
            steps: the objects of the chain.
            targets: the objects to free in the record.
        """
        target_ids = set(map(id, targets))
        received_ids = self._received()
        for position, item in enumerate(steps):
            if position == 0 or id(item) not in received_ids:  # a root's own object is no record
                continue
            if id(item) in target_ids:  # the record is itself an object to free
                return None
            to_item = steps[: position + 1]
            way = self._writer.way(root, to_item)
            has_plain_line = way.cut is not None and way.is_direct and not way.cut.ending
            if not _may_be_record(item) or way.cut is None or not has_plain_line:
                return None
            if way.cut.kind in _OF_CONTAINERS or not is_exactly(item, *_EMPTIED):
                self._removed.add_record(item)
                return Removal.of(item, targets, way)
            # app.records: code may need the container, so it is emptied, not removed.
            emptied = self._way_that_empties(root, to_item, way)
            return None if emptied is None else Removal.of_objects(targets, emptied)
        return None

    def are_behind(self, holder: object, row: Row, rows: RowHolders) -> bool:
        """Return True if the holder of a row is older and leads to the row's arrays by records that
        it has received.

        Args:
            holder: the holder.
            row: the row.
            rows: tells which items of the holder lead to the row's arrays.
        """
        received_ids = self._received()
        if not received_ids or id(holder) in received_ids:
            return False
        return bool(self._records_of(row, rows.leading_items(row, items_of(holder))))

    def way_to_all(self, root: Root, steps: Steps, row: Row, rows: RowHolders) -> Way:
        """Return the line that removes all records with arrays of a row from a container, and also
        the arrays of the row that are its items. Note that these records are removed.

        The way has no line if the object is no container, or if it leads to arrays of the row by
        items that are neither.

        Args:
            root: the root of the chain to the container.
            steps: the objects of that chain, the container last.
            row: the row.
            rows: tells which items of the container lead to the row's arrays.
        """
        container = steps[-1]
        leading = rows.leading_items(row, items_of(container))
        records = self._records_of(row, leading)
        arrays_of_row = [item for item in leading if id(item) in row.objects]
        are_all_removable = len(records) + len(arrays_of_row) == len(leading)
        cuts = list[Cut]()
        if are_all_removable and is_exactly(container, *_EMPTIED):
            cuts = self._writer.cuts_of_items(root, steps, leading)
        statement = statement_of(cuts)
        if not statement:
            return Way(Holder(path="", remedy=NO_REMEDY))
        for record in records:
            self._removed.add_record(record)
        references = frozenset((id(container), id(item)) for item in leading)
        remedy = Remedy(statement, cuts=tuple(cuts))
        return Way(Holder(path="", remedy=remedy), removed_references=references)

    def _records_of(self, row: Row, items: Sequence[object]) -> list[object]:
        """Return the records among items, without objects of the row."""
        received_ids = self._received()  # a call for each item took seconds
        received = [item for item in items if id(item) in received_ids]
        return [item for item in received if id(item) not in row.objects and _may_be_record(item)]

    def _way_that_empties(self, root: Root, steps: Steps, way: Way) -> Way | None:
        """Return the way to the container at the end of a chain, with the line that removes all of
        its items, such as ``app.records.clear()``; None if there is no such line. Note that the
        container is removed as a record.

        Args:
            root: the root of the chain.
            steps: its objects.
            way: the way to the container.
        """
        container = steps[-1]
        items = items_of(container)
        cuts = self._writer.cuts_of_items(root, steps, items)
        statement = statement_of(cuts)
        if not statement:
            return None
        self._removed.add_record(container)
        remedy = Remedy(statement, cuts=tuple(cuts))
        references = frozenset((id(container), id(item)) for item in items)
        holder = replace(way.holder, remedy=remedy)
        return Way(holder, step_ids=way.step_ids, removed_references=references)


def _may_be_record(item: object) -> bool:
    """Return True for an object that users remove as a whole: a container, an array of objects, a
    class of the user, or an instance, except models, tensors, artists of a figure and mocks.
    """
    if is_exactly(item, *CONTAINERS, OrderedDict):
        return True
    if is_array(item) and holding_objects([item])[0]:
        return True
    if is_instance(item, type):
        return is_users_class(item)
    if any(is_of_library(item, *kind) for kind in _NO_RECORDS):
        return False
    if any(is_instance(item, kind) for kind in _OF_PYTHON):
        return False
    return instance_dict(item) is not None
