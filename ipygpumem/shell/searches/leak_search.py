"""Searches for leaks: memory that survived experiments, or that no name of the notebook reaches.

``%gpumem leaks`` shows the result. The objects without arrays among the leaks are found by the
classes of ``leaked_objects.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Progress
from ipygpumem.heap.holders.explanation import NOT_REACHED
from ipygpumem.heap.kinds.arrays import StorageKey, library_type, storage_key
from ipygpumem.heap.kinds.libraries import loaded_classes
from ipygpumem.heap.live.heap import Heap, undisturbed
from ipygpumem.heap.live.live_tensors import create_hidden_tensors
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.introspect import is_atom, is_instance
from ipygpumem.inventory.arrays.roles import added_to_optimizers, optimizer_states
from ipygpumem.inventory.leaks import unreached
from ipygpumem.inventory.leaks.retained import Finding, Retained, allocator_caches, paths_of
from ipygpumem.inventory.remaining.watched_names import (
    WatchedName,
    record_without_name,
    storages_of,
)
from ipygpumem.inventory.rows.array_holders import MOST_EXPLAINED, Questions
from ipygpumem.inventory.rows.dropped_objects import with_remarks
from ipygpumem.inventory.rows.ended_cycles import with_ended_cycles
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import merged, remarks_on_possibly_older
from ipygpumem.inventory.rows.other_data import KnownObjects, OtherData
from ipygpumem.inventory.rows.shared_memory import rows_of, tensors_on_arrays
from ipygpumem.notebook import code_of_output
from ipygpumem.records import RetainedArray
from ipygpumem.report.leaks import ReclaimableItem
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.caches import in_run_modules, kept_outputs
from ipygpumem.shell.ipython.printed import Printed
from ipygpumem.shell.searches.grown_containers import notes_on_growth
from ipygpumem.shell.searches.leaked_objects import (
    Holders,
    LeakCandidates,
    NotebookOnHeap,
    SurvivingObjects,
    Unlisted,
    UnreachedObjects,
    rows_of_outputs,
    rows_of_registries,
)
from ipygpumem.shell.searches.survivors import Survivors


class Leaks(NamedTuple):
    """The memory that a search has found."""

    rows: list[HeldRow]
    """The leaks, the largest first."""
    in_ended_cycles: Mapping[str, Set[int]]
    """For each line of a row, the identities of the arrays in the cycles that the line ends."""
    not_examined: list[RetainedArray]
    """The smallest arrays, if there were too many to search for their holders."""
    not_reached: list[RetainedArray]
    """Arrays and objects for which the search ended at its limits: a name may lead to them."""
    kept: list[ReclaimableItem]
    """Memory that outputs, autograd graphs, caches and printed text keep: no leaks."""
    growth: list[str]
    """Notes on older containers that have grown in experiments."""
    has_all_graphs: bool
    """False if there were too many autograd graphs to examine."""


class LeakSearch:
    """Searches for leaks and for other memory that is kept by mistake.

    Args:
        context: the shell's.
        survivors: the objects that outlived experiments; those that were freed are forgotten.
        smallest: minimum bytes of each row.
    """

    def __init__(self, context: ShellContext, survivors: Survivors, smallest: int) -> None:
        self._context = context
        self._survivors = survivors
        self._smallest = smallest
        self._printed = Printed(context.shell)
        self._printed_texts: set[int] = set()
        """Identities of the texts that only IPython's record of the output keeps."""

    def find(self, progress: Progress) -> Leaks:
        """Return the leaks. Collect garbage before, because it is no leak."""
        create_hidden_tensors(self._context.garbage)
        with undisturbed():
            # Before the heap refers to them, too.
            self._printed_texts = set(map(id, self._printed.own_texts()))
            outputs = _NotebookOutputs(self._context, ownable_objects(self._context.namespace))
            heap = Heap(
                smallest=self._smallest,
                of_libraries=loaded_classes(),
                instances_of=unreached.KEEPER_TYPES,
            )
            progress(0.3)
            retained = outputs.retained(heap)
            progress(0.5)
            roots = self._survivors.roots(self._survivors.keepers())
            leaks = self._leaks_on(heap, retained, outputs, roots, progress)
            other_data = OtherData.of_rows(
                leaks.rows, roots.lines.removed.objects, roots.namespaces
            )
            objects_of_known_age = KnownObjects(
                self._survivors.older.objects(heap, other_data.objects),
                self._survivors.objects_left(heap),
            )
            heap.drop()
            del roots, retained, outputs
            remarks = other_data.remarks(
                self._smallest, leaks.in_ended_cycles, objects_of_known_age
            )
            del other_data, objects_of_known_age
        kept = [*leaks.kept, *_rows_of_findings(allocator_caches(), self._smallest)]
        printed = self._printed.reclaimable(self._smallest)
        if printed is not None:
            kept.append(printed)
        return leaks._replace(rows=with_remarks(leaks.rows, remarks), kept=kept)

    def _leaks_on(
        self,
        heap: Heap,
        retained: Retained,
        outputs: _NotebookOutputs,
        roots: Roots,
        progress: Progress,
    ) -> Leaks:
        """Return the leaks on a heap, and the memory that is kept without being a leak.

        Each byte is in one row. So the order of these steps counts: each leaves out the memory of
        the rows that the steps before have made.
        """
        # After ``x = np.ones(10**7); runs.append(x)`` in an experiment, its end deletes ``x``, and
        # ``runs`` keeps the array.
        survivors = self._leaked_names(heap)
        survivors += tensors_on_arrays(survivors, heap)
        storages_of_survivors = storages_of(survivors)
        # "losses: 100 tensors keep their autograd graphs": no leak, so ``kept`` has the row. Graphs
        # of names have none, because ``loss.backward()`` may follow.
        graphs = [graph for graph in retained.graphs if graph.size_bytes >= self._smallest]
        storages_of_graphs = retained.in_graphs_of_names.union(*(graph.shares for graph in graphs))
        # Large arrays and objects to which no name leads, such as a local of a running thread.
        unnamed = self._unnamed_memory(
            heap, storages_of_survivors, storages_of_graphs, outputs.identities_of_notes()
        )
        progress(0.7)
        leaked = self._rows_of_leaks(survivors, unnamed, heap, roots)
        # "Out[5]: Tensor that only IPython holds": its arrays here, its other memory below. The
        # storages of survivors are in the rows of leaks, too, so they don't count as new.
        findings = [*graphs, *retained.outputs(heap.large(self._smallest))]
        kept = _rows_of_findings(findings, self._smallest, storages_of_survivors)
        kept += rows_of_outputs(unnamed.unlisted, outputs.values)
        # One row for all that one line frees; the line also ends cycles that would keep the memory.
        rows = leaked.merged()
        cycles = with_ended_cycles(rows, roots.lines.removed.objects, roots, heap.ndarrays)
        return Leaks(
            rows=cycles.rows,
            in_ended_cycles=cycles.arrays,
            not_examined=unnamed.arrays.not_examined,
            not_reached=leaked.not_reached,
            kept=_one_row_for_equal_words(kept),
            growth=notes_on_growth(self._survivors.rows_of_grown_containers(heap, self._smallest)),
            has_all_graphs=retained.complete,
        )

    def _leaked_names(self, heap: Heap) -> list[WatchedName]:
        """Return the names of experiments whose large arrays are still alive, and large tensors
        that experiments have left without a name.

        Those of which the state of the user's live optimizer consists are left out: they are no
        leak. The survivors forget the arrays that have died.
        """
        self._survivors.update(heap)
        large = [
            item for item in self._survivors.names_with_arrays if item.size_bytes >= self._smallest
        ]
        of_optimizers = _storages_of_optimizers(heap, storages_of(large))
        leaked = list[WatchedName]()
        for item in large:
            if item.record.name or not of_optimizers.issuperset(item.live_storages()):
                leaked.append(item)
        return leaked

    def _unnamed_memory(
        self,
        heap: Heap,
        storages_of_survivors: Set[StorageKey],
        storages_of_graphs: Set[StorageKey],
        notes: Set[int],
    ) -> _UnnamedMemory:
        """Return the memory that may have leaked without a name of an experiment.

        Args:
            heap: the live objects.
            storages_of_survivors: the storages of the arrays with names of experiments.
            storages_of_graphs: the storages of autograd graphs that have rows of their own, or that
                named results need.
            notes: identities of objects of this search that are older than the heap.
        """
        namespace = self._context.namespace
        large = LeakCandidates(heap, list(in_run_modules(self._context.shell)))
        notebook = NotebookOnHeap(heap, namespace, self._smallest)
        surviving = SurvivingObjects(
            self._survivors, notebook, large.keepers, storages_of_survivors
        )
        in_rows = storages_of_survivors | surviving.storages | storages_of_graphs
        unlisted = Unlisted(notebook, large.keepers, surviving.sizes, storages_of_survivors)
        candidates = large.largest(unlisted)
        ids_behind_names = _ids_behind_names(candidates, notebook)
        arrays = _UnnamedArrays(notebook, in_rows, ids_behind_names)
        # From 30,000 names on, the namespace is a large dict itself.
        ours = self._printed_texts | {id(self._printed_texts), id(namespace)} | notes
        objects = UnreachedObjects(candidates, unlisted, ours | ids_behind_names)
        return _UnnamedMemory(surviving, arrays, objects, unlisted)

    def _rows_of_leaks(
        self,
        survivors: Sequence[WatchedName],
        unnamed: _UnnamedMemory,
        heap: Heap,
        roots: Roots,
    ) -> _RowsOfLeaks:
        """Return the rows of all leaks. One search finds their holders; of registries, the holder
        is known.
        """
        questions = unnamed.questions()
        found = self._survivors.array_holders(survivors, heap, roots, questions)
        holders = found.of_questions
        of_experiments = rows_of(found.arrays, heap)
        of_experiments += unnamed.surviving.rows(holders, found.arrays)
        of_any_age, not_reached = _by_reach(unnamed.rows_of_any_age(holders))
        of_any_age += rows_of_registries(unnamed.unlisted)
        return _RowsOfLeaks(of_experiments, of_any_age, not_reached)


class _RowsOfLeaks(NamedTuple):
    """The rows of leaks, several of which one line may free."""

    of_experiments: list[HeldRow]
    """The rows of memory that experiments have left."""
    of_any_age: list[HeldRow]
    """The rows of other memory, which may be older than the experiments."""
    not_reached: list[RetainedArray]
    """The rows for which the search for a holder ended at its limits."""

    def merged(self) -> list[HeldRow]:
        """Return the rows of leaks, the largest first: one row for those that one line frees, with
        a remark if a part of its memory may be older.
        """
        rows = merged([*self.of_experiments, *self.of_any_age])
        remarks = remarks_on_possibly_older(rows, self.of_experiments, self.of_any_age)
        return with_remarks(rows, remarks)


class _NotebookOutputs:
    """The outputs that IPython keeps.

    Make it before the heap is listed (see ``paths_of``), and keep no other references to the names'
    objects.

    Args:
        context: the shell's.
        names: the user's names and their objects.

    Attributes:
        values: the outputs with memory, by the code of each.
    """

    def __init__(self, context: ShellContext, names: Mapping[str, object]) -> None:
        outputs = kept_outputs(context.shell)
        self.values: dict[str, object] = {}
        for number, value in outputs.by_cell.items():
            if not is_atom(value):
                self.values[code_of_output(number)] = value
        self._paths, self._only_in_outputs = paths_of(names, self.values)
        """The paths of arrays, and the identities of the objects that only outputs lead to, also of
        the containers that refer to outputs.
        """
        self._only_in_outputs |= outputs.holder_ids | {id(outputs.by_cell), id(self.values)}

    def identities_of_notes(self) -> set[int]:
        """Return the identities of its own containers, which are large if there are many arrays."""
        return {id(self.values), id(self._paths), id(self._only_in_outputs)}

    def retained(self, heap: Heap) -> Retained:
        """Return the search for memory that names and outputs keep by mistake, among the live
        objects.
        """
        return Retained(heap, self._paths, self.values, self._only_in_outputs)


class _UnnamedMemory(NamedTuple):
    """The memory that may have leaked without a name of an experiment."""

    surviving: SurvivingObjects
    """Objects of experiments to which no name referred."""
    arrays: _UnnamedArrays
    objects: UnreachedObjects
    """Large objects to which no name leads."""
    unlisted: Unlisted
    """Measures objects without the memory of other rows."""

    def questions(self) -> Questions:
        """Return the storages and objects whose holders must be searched."""
        return Questions(
            self.arrays.to_explain,
            [*self.surviving.to_explain, *self.objects.to_explain],
            self.surviving.rows_to_explain,
        )

    def rows_of_any_age(self, holders: Holders) -> Iterator[HeldRow]:
        """Yield the rows of leaks of any age: no experiment has recorded them as left."""
        yield from self.arrays.rows(holders)
        yield from self.objects.rows(holders)


class _UnnamedArrays:
    """Large tensors and arrays without a row yet. Those that a variable leads to are no leaks.

    Args:
        notebook: the live objects and the user's names.
        in_rows: storages that have rows of their own.
        ids_behind_names: identities of the arrays that names lead to.

    Attributes:
        to_explain: the storages whose holders are searched, the largest first.
        not_examined: the rows of the smaller ones, if there are too many for the search.
    """

    def __init__(
        self, notebook: NotebookOnHeap, in_rows: Set[StorageKey], ids_behind_names: Set[int]
    ) -> None:
        self._notebook = notebook
        self._rows: dict[StorageKey, RetainedArray] = {}
        for key, arrays in notebook.heap.large(notebook.smallest).items():
            if key not in in_rows and ids_behind_names.isdisjoint(map(id, arrays)):
                self._rows[key] = record_without_name(arrays[0])
        largest_first = sorted(self._rows, key=lambda key: -self._rows[key].size_bytes)
        self.to_explain = largest_first[:MOST_EXPLAINED]
        self.not_examined = [self._rows[key] for key in largest_first[MOST_EXPLAINED:]]

    def rows(self, holders: Holders) -> Iterator[HeldRow]:
        """Yield the rows of leaks, given the holders of the storages ``to_explain``."""
        for key in self.to_explain:
            if not self._notebook.keeps_on_purpose(holders[key]):
                yield HeldRow(self._rows[key], holders[key])


def _ids_behind_names(candidates: Sequence[object], notebook: NotebookOnHeap) -> set[int]:
    """Return the identities of the ``candidates``, and of the large arrays, that a name leads to:
    one walk from the names for both.
    """
    wanted = set(map(id, candidates))
    for arrays in notebook.heap.large(notebook.smallest).values():
        wanted.update(map(id, arrays))
    values = list(notebook.names.values())
    return wanted.intersection(map(id, values)) | unreached.ids_behind_names(values, wanted)


def _by_reach(rows: Iterable[HeldRow]) -> tuple[list[HeldRow], list[RetainedArray]]:
    """Return the rows whose holder was found; and the rows without holder of the memory for which
    the search ended at its limits.
    """
    with_holder = list[HeldRow]()
    not_reached = list[RetainedArray]()
    for row in rows:
        if row.holder is NOT_REACHED:
            not_reached.append(row.row)
        else:
            with_holder.append(row)
    return with_holder, not_reached


def _one_row_for_equal_words(rows: Iterable[ReclaimableItem]) -> list[ReclaimableItem]:
    """Return one row for all rows with the same words: ``Out[5]`` has a row for its arrays and one
    for its other memory.
    """
    by_words: dict[tuple[str, str, str], ReclaimableItem] = {}
    for row in rows:
        words = row.device, row.what, row.remedy
        row_with_same_words = by_words.get(words)
        if row_with_same_words is None:
            by_words[words] = row
        else:
            by_words[words] = row._replace(
                size_bytes=row_with_same_words.size_bytes + row.size_bytes,
                new_bytes=row_with_same_words.new_bytes + row.new_bytes,
                is_at_least=row_with_same_words.is_at_least or row.is_at_least,
            )
    return list(by_words.values())


def _rows_of_findings(
    findings: Iterable[Finding], smallest: int, leaked: Container[StorageKey] = ()
) -> list[ReclaimableItem]:
    """Return the rows of findings of at least ``smallest`` bytes.

    The bytes of ``leaked`` storages are in the rows of leaks, too, so they don't count as new.
    """
    rows = []
    for finding in findings:
        size = finding.size_bytes
        if size >= smallest:
            new_bytes = sum(share for key, share in finding.shares.items() if key not in leaked)
            rows.append(
                ReclaimableItem(size, finding.device, finding.what, finding.remedy, new_bytes)
            )
    return rows


def _storages_of_optimizers(heap: Heap, survivors: set[StorageKey]) -> set[StorageKey | None]:
    """Return the storages of the state that optimizers keep for live parameters of the user, such
    as the moments of Adam for the parameters of a model. Left out is the state for parameters that
    are ``survivors`` themselves, and tensors that the user has added to the state.
    """
    tensor_type: Any = library_type("torch", "Tensor")
    if tensor_type is None:
        return set()
    storages = set[StorageKey | None]()
    for parameter, state in optimizer_states(heap, tensor_type):
        if is_instance(parameter, tensor_type) and storage_key(parameter) not in survivors:
            storages.add(storage_key(state))
    return storages - set(map(storage_key, added_to_optimizers(heap, tensor_type)))
