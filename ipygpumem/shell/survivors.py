"""Records the objects that outlive experiments, to ask for their holders again later."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import object_key
from ipygpumem.heap.bulk import Progress, by_identity
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.paths.ages import Ages, LearnedAges
from ipygpumem.heap.paths.remedies import Holder
from ipygpumem.heap.paths.roots import RemovedByLines, Roots
from ipygpumem.heap.remembered import Remembered
from ipygpumem.heap.sizes import Size, Sizes, row_of
from ipygpumem.inventory.array_holders import (
    Explained,
    Questions,
    explained,
    storages_with_holder_of,
)
from ipygpumem.inventory.array_parts import with_arrays
from ipygpumem.inventory.dropped_data import OlderData, OtherData, with_remarks
from ipygpumem.inventory.ended_cycles import EndedCycles, with_ended_cycles
from ipygpumem.inventory.grown_rows import GrownRow
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.inventory.merging import merged
from ipygpumem.inventory.watched_names import (
    WatchedName,
    places_of_numpy,
    storages_of,
    update_numpy,
)
from ipygpumem.records import RetainedArray
from ipygpumem.shell.baselines import Baseline
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.deleted_names import DeletedNames
from ipygpumem.shell.grown_containers import GrownContainers
from ipygpumem.shell.notebook_roots import roots_of_notebook
from ipygpumem.shell.older_objects import OlderObjects
from ipygpumem.shell.survivor_search import EndedExperiment, SurvivorSearch


class ReportedObjects(NamedTuple):
    """Objects without arrays that an experiment has left, and that its report has in one row."""

    items: list[object]
    """The objects that are still alive."""
    reported: HeldRow
    """The row in the report."""

    def size_now(self, sizes: Sizes) -> Size:
        """Measure them."""
        return sizes.measure(self.items if len(self.items) > 1 else self.items[0])

    def row(self, size: Size, holder: Holder, arrays: Iterable[Explained]) -> HeldRow:
        """Return their row now, given their holder and the rows of arrays, which may be inside
        them.
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
        known: the names with arrays that outlived an experiment.
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
        self.known: list[WatchedName] = []
        self._known_objects: list[tuple[Remembered, HeldRow]] = []
        """The objects without arrays, and their rows in reports."""
        self._removed_as_whole: list[weakref.ref[Any]] = []
        """Modules of torch and figures that lines of earlier reports remove."""
        self._removed_records: list[Remembered] = []
        """Records that these lines remove."""
        self._learned_ages = LearnedAges()
        self._kept_ids: dict[str, int] = {}
        """The names that experiments have kept on purpose, and the identities of their objects."""
        self.deleted = DeletedNames(context)
        self.older = OlderObjects(context)
        self.grown = GrownContainers()

    def baseline(self, remarks: list[str], names: tuple[str, ...]) -> Baseline:
        """Return a baseline of the current state, with these names; a failure is added to
        ``remarks``.
        """
        return Baseline(self._context, remarks, places_of_numpy(self.known), names)

    def roots(self, keepers: Container[str] = ()) -> Roots:
        """Return the namespaces and objects from which the user can reach objects, the names
        ``keepers`` last.
        """
        roots = roots_of_notebook(self._context, self._saved(), self._ours, keepers)
        return replace(
            roots,
            ages=Ages(new=self._identities_of_removed, learned=self._learned_ages),
            received=functools.cache(self._identities_of_records),
        )

    def _roots_at_end(
        self,
        keepers: Container[str],
        made: Callable[[], set[int]],
        received: set[int],
        baseline: Baseline,
        removed: RemovedByLines,
    ) -> Roots:
        """Return the namespaces and objects from which the user can reach what an experiment has
        left, with the knowledge of its end: which objects are older, and what these have received.

        Args:
            keepers: the names that stay on purpose, which come last.
            made: returns the identities of the objects made since its start.
            received: the identities of the made objects that older ones have received.
            baseline: the objects at its start.
            removed: receives the objects that lines remove.
        """
        ages = Ages(
            are_known=True,
            new=made,
            may_be_older_array=baseline.was_there,
            length_before=baseline.contents.length_of,
            columns_before=baseline.contents.columns_of,
            learned=self._learned_ages,
        )
        return replace(
            self.roots(keepers),
            ages=ages,
            received=lambda: received,
            removed_by_lines=removed,
        )

    def keepers(self) -> set[str]:
        """Return the names that still have the objects that experiments kept on purpose."""
        namespace = self._context.namespace
        names = set[str]()
        for name, kept_id in self._kept_ids.items():
            if id(namespace.get(name)) == kept_id:
                names.add(name)
        return names

    def _identities_of_removed(self) -> set[int]:
        """Return the identities of modules and figures that lines of earlier reports remove."""
        removed = [reference() for reference in self._removed_as_whole]
        return {id(item) for item in removed if item is not None}

    def _identities_of_records(self) -> set[int]:
        """Return the identities of records that lines of earlier reports remove."""
        return set(chain.from_iterable(item.identities for item in self._removed_records))

    def explained(
        self,
        watched: Sequence[WatchedName],
        heap: Heap,
        roots: Roots,
        questions: Questions | None = None,
    ) -> list[Explained]:
        """Return the live arrays of each name, largest first, with the object that holds all of
        them.
        """
        smallest = self._context.config.min_held_bytes
        return explained(watched, heap, roots, smallest=smallest, questions=questions)

    # -- at the end of an experiment --------------------------------------------------------------

    def of_experiment(self, ended: EndedExperiment) -> tuple[RetainedArray, ...]:
        """Return the objects that outlive an experiment, largest first, with holders; keep them for
        %gpumem leaks.
        """
        for name in ended.keepers:
            self._kept_ids[name] = id(self._context.namespace.get(name))
        search = SurvivorSearch(self._context, ended)
        search.find_named_arrays_and_tensors()
        if search.finds_nothing():
            return ()
        try:
            return self._rows_of(search, ended)
        finally:  # also after a Ctrl-C
            self._add(search.alive)

    def _rows_of(self, search: SurvivorSearch, ended: EndedExperiment) -> tuple[RetainedArray, ...]:
        """Return the objects that a search finds, largest first, with holders."""
        if search.guesses_arrays():
            self._context.garbage.collect()  # else it would list arrays in older garbage
        working = self._context.display.working("holders of memory that was not freed")
        with working as progress, undisturbed():
            # Before the heap, which lists no dict that this gives an object for its attributes.
            received = search.received()
            heap = Heap(smallest=None if ended.baseline.is_complete else search.smallest)
            progress(0.5)
            self.update(heap)  # a new array may have the identity of one that has died
            cycles, older = self._rows_at_end(search, heap, ended, received, progress)
            self.older.add(older.objects())
            heap.drop()
            rows = with_remarks(cycles.rows, older.remarks(cycles.arrays))
            del older
        return tuple(row.record(self._context.namespace) for row in rows)

    def _add(self, alive: Iterable[WatchedName]) -> None:
        """Keep arrays that are still alive for %gpumem leaks, but for those of earlier ends."""
        reported = storages_of(self.known)  # by an inner experiment
        for item in alive:
            if not reported.issuperset(item.live_storages()):
                self.known.append(item)

    def _rows_at_end(
        self,
        search: SurvivorSearch,
        heap: Heap,
        ended: EndedExperiment,
        received: set[int],
        progress: Progress,
    ) -> tuple[EndedCycles, OlderData]:
        """Return the rows of all objects that outlive an experiment, and the older data that their
        lines drop.

        Args:
            search: the search for the objects.
            heap: the live objects.
            ended: the experiment.
            received: the identities of the new objects that older ones have received.
            progress: shows how far it is.
        """
        baseline = ended.baseline
        made = functools.cache(baseline.objects_since)
        removed = RemovedByLines(modules_and_figures=self._removed_as_whole)
        roots = self._roots_at_end(self.keepers(), made, received, baseline, removed)
        rows = search.rows_of_arrays(heap, roots)
        without_arrays = list[object]()
        if search.unnamed_bytes >= search.smallest:
            progress(0.6)
            roots = self._roots_at_end((), made, received, baseline, removed)
            further_rows, without_arrays = self._rows_without_arrays(search, heap, roots)
            rows += further_rows
        self._removed_records.append(Remembered(list(removed.records.values())))
        cycles = with_ended_cycles(merged(rows), removed.objects, roots, heap.ndarrays)
        older = OlderData(
            baseline.objects_since,
            baseline.was_there,
            baseline.contents.earlier,
            roots.namespaces,
            without_arrays,
        )
        for row in cycles.rows:
            older.look_behind(row.line, row.cuts, removed.objects)
        return cycles, older

    def _rows_without_arrays(
        self, search: SurvivorSearch, heap: Heap, roots: Roots
    ) -> tuple[list[HeldRow], list[object]]:
        """Return the rows of objects without arrays, and these objects; keep both for %gpumem
        leaks.

        The rows of arrays that may be older come last.
        """
        rows = list[HeldRow]()
        objects = list[object]()
        size_bytes = 0
        for remaining, row in search.rows_without_arrays(heap, roots):
            size_bytes += row.row.size_bytes
            self._known_objects.append((Remembered(remaining.items), row.without_cuts()))
            objects += remaining.items
            rows.append(row)
        rows += search.rows_of_possibly_older(heap, roots, size_bytes)
        return rows, objects

    # -- later ------------------------------------------------------------------------------------

    def update(self, heap: Heap) -> None:
        """Drop records of arrays that are no longer on the ``heap``."""
        update_numpy(self.known, heap)
        self.known = [item for item in self.known if item.live_arrays()]
        self._removed_as_whole = [item for item in self._removed_as_whole if item() is not None]
        self._learned_ages.forget_dead()

    def objects_alive(self, heap: Heap) -> list[ReportedObjects]:
        """Return the reported objects without arrays that are still alive, and forget the rest."""
        recorded = self._known_objects
        wanted = self.older.tracked_identities()
        for remembered, _ in recorded:
            wanted.update(remembered.identities)
        alive = heap.with_identities(wanted | self._identities_of_records())
        self.older.update(alive, heap)
        records = filter(None, [item.alive(alive) for item in self._removed_records])
        self._removed_records = list(map(Remembered, records))
        self._known_objects = []
        still_alive = list[ReportedObjects]()
        for remembered, reported in recorded:
            items = remembered.alive(alive)
            if items:
                self._known_objects.append((Remembered(items), reported))
                still_alive.append(ReportedObjects(items, reported))
        return still_alive

    def objects_left(self, heap: Heap) -> list[object]:
        """Return the objects that experiments have left and that are still alive, with their
        arrays, each once.
        """
        objects = by_identity(heap.on_storages(storages_of(self.known)))
        wanted = set(chain.from_iterable(item.identities for item, _ in self._known_objects))
        return list((objects | heap.with_identities(wanted)).values())

    def rows_of_grown(self, heap: Heap, smallest: int) -> list[GrownRow]:
        """Return the rows of older containers that are still longer than before an experiment."""
        live = heap.with_identities(self.grown.identities())
        return self.grown.rows(live, heap, self.roots(), smallest)

    def left_by(self, name: str, cell: int | None) -> tuple[RetainedArray, ...]:
        """Return the live object of a name that is not defined, or the live arrays that it held.

        Args:
            name: the name.
            cell: the last cell that bound it; any object from before is another one.
        """
        self._context.garbage.collect()
        with undisturbed():
            heap = Heap()
            self.update(heap)
            of_deleted, value = self.deleted.of(name, cell)
            watched = [] if of_deleted is None else [of_deleted]
            update_numpy(watched, heap)
            if not any(item.live_arrays() for item in watched):
                watched = []
            if value is None and not watched:  # an earlier experiment may have left another object
                watched = [item for item in self.known if item.record.name == name]
                update_numpy(watched, heap)
            roots = self.roots()
            rows = [row for _, row in self.explained(watched, heap, roots)]
            if value is not None and not rows:
                holder = explain((), heap, roots, more=[value])[object_key(value)]
                row = row_of([value], Sizes().measure(value))
                rows.append(HeldRow(replace(row, name=name), holder))
            heap.drop()
            del value
            other_data = OtherData.of_rows(rows, roots.removed_by_lines.objects, roots.namespaces)
            del roots
            remarks = other_data.remarks(self._context.config.min_held_bytes, {})
        namespace = self._context.namespace
        return tuple(row.record(namespace) for row in with_remarks(rows, remarks))
