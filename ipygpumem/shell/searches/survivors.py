"""Records the objects that outlive experiments, to search for their holders again later.

The report of an experiment lists them when it ends (``rows_of_experiment``), ``%gpumem leaks``
lists those that are still alive, and ``%gpumem why NAME`` those of a deleted name
(``rows_of_deleted_name``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Progress, by_identity
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import object_key
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.heap.live.remembered import Remembered
from ipygpumem.heap.paths.ages import Ages, LearnedAges
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import LinesOfReport, RemovedByLines, Roots
from ipygpumem.heap.sizes.sizes import MeasuredSize, Sizes, row_of
from ipygpumem.inventory.remaining.grown_rows import GrownRow
from ipygpumem.inventory.remaining.watched_names import (
    WatchedName,
    spans_of_numpy,
    storages_of,
    update_numpy,
)
from ipygpumem.inventory.rows.array_holders import (
    ArrayHolders,
    HeldArrays,
    Questions,
    find_array_holders,
    storages_with_holder_of,
)
from ipygpumem.inventory.rows.array_parts import with_arrays
from ipygpumem.inventory.rows.dropped_objects import with_remarks
from ipygpumem.inventory.rows.ended_cycles import EndedCycles, with_ended_cycles
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import merged
from ipygpumem.inventory.rows.older_data import OlderData
from ipygpumem.inventory.rows.other_data import OtherData
from ipygpumem.records import RetainedArray
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.searches.baselines import Baseline
from ipygpumem.shell.searches.deleted_names import DeletedNames
from ipygpumem.shell.searches.grown_containers import GrownContainers
from ipygpumem.shell.searches.notebook_roots import roots_of_notebook
from ipygpumem.shell.searches.older_objects import OlderObjects
from ipygpumem.shell.searches.survivor_search import EndedExperiment, Extent, SurvivorSearch


class ReportedObjects(NamedTuple):
    """Objects without arrays that an experiment has left, and that its report has in one row."""

    items: list[object]
    """The objects that are still alive."""
    reported: HeldRow
    """The row in the report."""

    def size_now(self, sizes: Sizes) -> MeasuredSize:
        """Return the present size of the objects together."""
        return sizes.measure(self.items if len(self.items) > 1 else self.items[0])

    def row(self, size: MeasuredSize, holder: Holder, arrays: Iterable[HeldArrays]) -> HeldRow:
        """Return the row of the objects now.

        Args:
            size: their present size.
            holder: their present holder.
            arrays: the rows of arrays, some of which may be in a single object.
        """
        reported = self.reported.row
        row = replace(row_of(self.items, size), name=reported.name, cell=reported.cell)
        held = HeldRow(row, holder)
        if reported.objects != 1:
            return held
        storages = storages_with_holder_of(held, arrays)
        return HeldRow(with_arrays(row, self.items[0], storages), holder)


class Survivors:
    """Weak records of the objects that outlived the experiments of one shell.

    Args:
        context: the shell's.
        saved: returns the names of open experiments, and the values that they restore.
        ours: the object that holds all that the extension keeps.

    Attributes:
        names_with_arrays: the names whose arrays outlived an experiment, and arrays without a name
            that did.
        deleted: the names that cells may have deleted.
        older: the nearest older objects behind survivors.
        grown: the older containers that have grown.
    """

    def __init__(
        self,
        context: ShellContext,
        saved: Callable[[], Iterable[tuple[str, object]]],
        ours: object,
    ) -> None:
        self._context = context
        self._saved = saved
        self._ours = ours
        self.names_with_arrays: list[WatchedName] = []
        self._objects_without_arrays: list[tuple[Remembered, HeldRow]] = []
        """The objects without arrays, and their rows in reports."""
        self._removed_as_whole: list[weakref.ref[Any]] = []
        """Modules of torch and figures that lines of earlier reports remove."""
        self._removed_records: list[Remembered] = []
        """Records, such as the dicts of a list, that lines of earlier reports remove."""
        self._learned_ages = LearnedAges()
        self._kept_ids: dict[str, int] = {}
        """The names that experiments have kept on purpose, and the identities of their objects."""
        self.deleted = DeletedNames(context)
        self.older = OlderObjects(context)
        self.grown = GrownContainers()

    def baseline(self, remarks: list[str], names: tuple[str, ...]) -> Baseline:
        """Return a baseline of the current state.

        Args:
            remarks: receives a sentence for the report if something could not be recorded.
            names: the notebook's names.
        """
        arrays = spans_of_numpy(self.names_with_arrays)
        return Baseline(self._context, remarks, arrays, names)

    def roots(self, keepers: Container[str] = ()) -> Roots:
        """Return the namespaces and objects from which the user can reach objects.

        Args:
            keepers: names that keep objects on purpose. They come last: a path from any other root
                is preferred.
        """
        roots = roots_of_notebook(self._context, self._saved(), self._ours, keepers)
        lines = LinesOfReport(
            ages=Ages(new=self._identities_of_removed, learned=self._learned_ages),
            received=functools.cache(self._identities_of_records),
        )
        return replace(roots, lines=lines)

    def _roots_at_end(
        self,
        keepers: Container[str],
        find_new_ids: Callable[[], set[int]],
        received: set[int],
        baseline: Baseline,
        removed: RemovedByLines,
    ) -> Roots:
        """Return the namespaces and objects from which the user can reach the objects that an
        experiment has left. At its end, it is known of each object if it is older, and of older
        ones the objects that they have received.

        Args:
            keepers: the names that stay on purpose, which come last.
            find_new_ids: returns the identities of the objects made since its start.
            received: the identities of the made objects that older ones have received.
            baseline: the objects at its start.
            removed: receives the objects that lines remove.
        """
        ages = Ages(
            are_known=True,
            new=find_new_ids,
            may_be_older_array=baseline.was_there,
            length_before=baseline.contents.length_of,
            columns_before=baseline.contents.columns_of,
            learned=self._learned_ages,
        )
        lines = LinesOfReport(ages=ages, received=lambda: received, removed=removed)
        return replace(self.roots(keepers), lines=lines)

    def keepers(self) -> set[str]:
        """Return the names that still refer to the objects for which ``--keep`` kept them."""
        namespace = self._context.namespace
        names = set[str]()
        for name, kept_id in self._kept_ids.items():
            if id(namespace.get(name)) == kept_id:
                names.add(name)
        return names

    def _identities_of_removed(self) -> set[int]:
        """Return the identities of the modules and figures that lines of earlier reports remove:
        these are new, although nothing else about their age is known now.
        """
        removed = [reference() for reference in self._removed_as_whole]
        return {id(item) for item in removed if item is not None}

    def _identities_of_records(self) -> set[int]:
        """Return the identities of records that lines of earlier reports remove."""
        return set(chain.from_iterable(item.identities for item in self._removed_records))

    def array_holders(
        self,
        watched: Sequence[WatchedName],
        heap: Heap,
        roots: Roots,
        questions: Questions | None = None,
    ) -> ArrayHolders:
        """Find the object that holds all live arrays of each name.

        Args:
            watched: the names.
            heap: the live objects.
            roots: where paths begin.
            questions: further objects whose holders the same search finds.
        """
        smallest = self._context.config.min_held_bytes
        return find_array_holders(
            watched, heap, roots, smallest=smallest, questions=questions or Questions()
        )

    # -- at the end of an experiment --------------------------------------------------------------

    def rows_of_experiment(self, ended: EndedExperiment) -> tuple[RetainedArray, ...]:
        """Return the rows of objects that outlive an experiment, largest first, with their holders;
        remember the objects for %gpumem leaks.
        """
        for name in ended.keepers:
            self._kept_ids[name] = id(self._context.namespace.get(name))
        search = SurvivorSearch(self._context, ended)
        search.find_named_arrays_and_tensors()
        if search.extent is Extent.NONE:
            return ()
        try:
            return self._search_heap(search, ended)
        finally:  # also after a Ctrl-C
            self._remember_arrays(search.alive)

    def _search_heap(
        self, search: SurvivorSearch, ended: EndedExperiment
    ) -> tuple[RetainedArray, ...]:
        """Return the rows of objects that a search of the heap finds, largest first, with their
        holders; remember the objects without arrays for %gpumem leaks.
        """
        if search.guesses_arrays():
            self._context.garbage.collect()  # else it would list arrays in older garbage
        working = self._context.display.working("holders of memory that was not freed")
        with working as progress, undisturbed():
            # Before the heap, which lists no dict that this gives an object for its attributes.
            received = search.received()
            heap = Heap(smallest=None if ended.baseline.is_complete else search.smallest)
            progress(0.5)
            self.update(heap)  # a new array may have the identity of one that has died
            cycles, older_data = self._rows_at_end(search, heap, ended, received, progress)
            self.older.add(older_data.objects())
            heap.drop()
            rows = with_remarks(cycles.rows, older_data.remarks(cycles.arrays))
            del older_data
        return tuple(row.record(self._context.namespace) for row in rows)

    def _remember_arrays(self, names: Iterable[WatchedName]) -> None:
        """Remember names with live arrays for %gpumem leaks, unless the end of an inner experiment
        has reported the arrays.
        """
        reported = storages_of(self.names_with_arrays)
        for name in names:
            if not reported.issuperset(name.live_storages()):
                self.names_with_arrays.append(name)

    def _rows_at_end(
        self,
        search: SurvivorSearch,
        heap: Heap,
        ended: EndedExperiment,
        received: set[int],
        progress: Progress,
    ) -> tuple[EndedCycles, OlderData]:
        """Return the rows of all objects that outlive an experiment, with the cycles that their
        lines end; and the older data that these lines drop. Remember the records that the lines
        remove, so that later reports recognise them.

        Args:
            search: the search for the objects.
            heap: the live objects.
            ended: the experiment.
            received: the identities of the new objects that older ones have received.
            progress: shows how far it is.
        """
        baseline = ended.baseline
        find_new_ids = functools.cache(baseline.objects_since)
        removed = RemovedByLines(modules_and_figures=self._removed_as_whole)
        roots = self._roots_at_end(self.keepers(), find_new_ids, received, baseline, removed)
        rows = search.rows_of_arrays(heap, roots)
        without_arrays = list[object]()
        if search.unnamed_bytes >= search.smallest:
            progress(0.6)
            roots = self._roots_at_end((), find_new_ids, received, baseline, removed)
            further_rows, without_arrays = self._rows_without_arrays(search, heap, roots)
            rows += further_rows
        self._removed_records.append(Remembered(list(removed.records.values())))
        cycles = with_ended_cycles(merged(rows), removed.objects, roots, heap.ndarrays)
        older_data = OlderData(
            baseline.objects_since,
            baseline.was_there,
            baseline.contents.earlier,
            roots.namespaces,
            without_arrays,
        )
        for row in cycles.rows:
            older_data.add_line(row.line, row.cuts, removed.objects)
        return cycles, older_data

    def _rows_without_arrays(
        self, search: SurvivorSearch, heap: Heap, roots: Roots
    ) -> tuple[list[HeldRow], list[object]]:
        """Return the rows of objects without arrays, then those of arrays that may be older; and
        the objects without arrays. Remember these for %gpumem leaks.
        """
        rows = list[HeldRow]()
        objects = list[object]()
        size_bytes = 0
        for remaining, row in search.rows_without_arrays(heap, roots):
            size_bytes += row.row.size_bytes
            self._objects_without_arrays.append((Remembered(remaining.items), row.without_cuts()))
            objects += remaining.items
            rows.append(row)
        rows += search.rows_of_possibly_older(heap, roots, size_bytes)
        return rows, objects

    # -- later ------------------------------------------------------------------------------------

    def update(self, heap: Heap) -> None:
        """Drop records of arrays that are no longer on the ``heap``."""
        update_numpy(self.names_with_arrays, heap)
        self.names_with_arrays = [name for name in self.names_with_arrays if name.live_arrays()]
        self._removed_as_whole = [item for item in self._removed_as_whole if item() is not None]
        self._learned_ages.forget_dead()

    def reported_objects_alive(self, heap: Heap) -> list[ReportedObjects]:
        """Return the reported objects without arrays that are still alive. Forget those that have
        died, and dead older objects and records, because one look at the heap tells of all.
        """
        recorded = self._objects_without_arrays
        identities = self.older.tracked_identities() | self._identities_of_records()
        for remembered, _ in recorded:
            identities.update(remembered.identities)
        live_objects = heap.with_identities(identities)
        self.older.update(live_objects, heap)
        records = filter(None, [item.alive(live_objects) for item in self._removed_records])
        self._removed_records = list(map(Remembered, records))
        self._objects_without_arrays = []
        still_alive = list[ReportedObjects]()
        for remembered, reported in recorded:
            items = remembered.alive(live_objects)
            if items:
                self._objects_without_arrays.append((Remembered(items), reported))
                still_alive.append(ReportedObjects(items, reported))
        return still_alive

    def objects_left(self, heap: Heap) -> list[object]:
        """Return the objects that experiments have left and that are still alive, with their
        arrays, each once.
        """
        arrays = by_identity(heap.on_storages(storages_of(self.names_with_arrays)))
        identities = set[int]()
        for remembered, _ in self._objects_without_arrays:
            identities.update(remembered.identities)
        return list((arrays | heap.with_identities(identities)).values())

    def rows_of_grown_containers(self, heap: Heap, smallest: int) -> list[GrownRow]:
        """Return the rows of older containers that are still longer than before an experiment."""
        live = heap.with_identities(self.grown.identities())
        return self.grown.rows(live, heap, self.roots(), smallest)

    def rows_of_deleted_name(self, name: str, cell: int | None) -> tuple[RetainedArray, ...]:
        """Return the rows of the live arrays that a deleted name held, or of its object if that is
        alive and has none. It collects garbage before, and forgets recorded arrays that have died.

        Args:
            name: a name that is not defined.
            cell: the last cell that bound it; any object from before is another one.
        """
        self._context.garbage.collect()
        with undisturbed():
            heap = Heap()
            self.update(heap)
            watched, value = self.deleted.of(name, cell)
            names = _with_live_arrays(watched, heap)
            if value is None and not names:
                # No cell has deleted the name, but an experiment has, and left its arrays.
                names = [item for item in self.names_with_arrays if item.record.name == name]
                update_numpy(names, heap)
            roots = self.roots()
            rows = [row for _, row in self.array_holders(names, heap, roots).arrays]
            if value is not None and not rows:
                rows.append(_row_without_arrays(value, name, heap, roots))
            heap.drop()
            del value
            other_data = OtherData.of_rows(rows, roots.lines.removed.objects, roots.namespaces)
            del roots
            remarks = other_data.remarks(self._context.config.min_held_bytes, {})
        namespace = self._context.namespace
        return tuple(row.record(namespace) for row in with_remarks(rows, remarks))


def _row_without_arrays(value: object, name: str, heap: Heap, roots: Roots) -> HeldRow:
    """Return the row of an object without arrays that is still alive, such as a long list, under
    the deleted name that it had.
    """
    holder = explain((), heap, roots, objects=[value])[object_key(value)]
    row = row_of([value], Sizes().measure(value))
    return HeldRow(replace(row, name=name), holder)


def _with_live_arrays(watched: WatchedName | None, heap: Heap) -> list[WatchedName]:
    """Return the watched name if arrays of it are on the ``heap``, else none."""
    if watched is None:
        return []
    update_numpy([watched], heap)
    return [watched] if watched.live_arrays() else []
