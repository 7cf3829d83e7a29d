"""Searches for leaks: memory that survived experiments, or that no name of the notebook reaches."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import StorageKey, library_type, storage_key
from ipygpumem.heap.bulk import Progress
from ipygpumem.heap.heap import Heap, undisturbed
from ipygpumem.heap.holders.explanation import NOT_REACHED
from ipygpumem.heap.libraries import loaded_classes
from ipygpumem.heap.live_tensors import live_tensors
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.introspect import is_atom, is_instance
from ipygpumem.inventory import unreached
from ipygpumem.inventory.array_holders import MOST_EXPLAINED, Questions
from ipygpumem.inventory.dropped_data import KnownObjects, OtherData, with_remarks
from ipygpumem.inventory.ended_cycles import with_ended_cycles
from ipygpumem.inventory.held_rows import HeldRow
from ipygpumem.inventory.merging import merged, remarks_on_possibly_older
from ipygpumem.inventory.retained import Finding, Retained, allocator_caches, paths_of
from ipygpumem.inventory.roles import added_to_optimizers, optimizer_states
from ipygpumem.inventory.shared_memory import rows_of, tensors_on_arrays
from ipygpumem.inventory.watched_names import WatchedName, record_without_name, storages_of
from ipygpumem.notebook import code_of_output
from ipygpumem.records import RetainedArray
from ipygpumem.report.leaks import ReclaimableItem
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.grown_containers import notes_on_growth
from ipygpumem.shell.ipython.caches import in_run_modules, kept_outputs
from ipygpumem.shell.ipython.printed import Printed
from ipygpumem.shell.leaked_objects import (
    Holders,
    LeakCandidates,
    NotebookOnHeap,
    SurvivingObjects,
    Unlisted,
    UnreachedObjects,
    rows_of_outputs,
    rows_of_registries,
)
from ipygpumem.shell.survivors import Survivors


class Leaks(NamedTuple):
    """The memory that a search has found."""

    rows: list[HeldRow]
    """The leaks, the largest first."""
    in_ended_cycles: Mapping[str, Set[int]]
    """The arrays in the cycles that each line ends, by identity."""
    beyond: list[RetainedArray]
    """Arrays that were too many to examine."""
    not_reached: list[RetainedArray]
    """Arrays and objects for which the search ended at its limits: a name may lead to them."""
    kept: list[ReclaimableItem]
    """Memory that outputs, autograd graphs, caches and printed text keep."""
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
        """Return the leaks, after garbage was collected."""
        live_tensors(self._context.garbage)  # gives each a Python object
        with undisturbed():
            # Before the heap refers to them, too.
            self._printed_texts = set(map(id, self._printed.own_texts()))
            outputs = _Outputs(self._context, ownable_objects(self._context.namespace))
            heap = Heap(
                smallest=self._smallest,
                of_libraries=loaded_classes(),
                instances_of=unreached.OF_PLACES,
            )
            progress(0.3)
            retained = outputs.retained(heap)
            progress(0.5)
            roots = self._survivors.roots(self._survivors.keepers())
            leaks = self._leaks_on(heap, retained, outputs, roots, progress)
            other_data = OtherData.of_rows(
                leaks.rows, roots.removed_by_lines.objects, roots.namespaces
            )
            known = KnownObjects(
                self._survivors.older.objects(heap, other_data.objects),
                self._survivors.objects_left(heap),
            )
            heap.drop()
            del roots, retained, outputs
            remarks = other_data.remarks(self._smallest, leaks.in_ended_cycles, known)
            del other_data, known
        kept = [*leaks.kept, *_rows_of_findings(allocator_caches(), self._smallest)]
        printed = self._printed.reclaimable(self._smallest)
        if printed is not None:
            kept.append(printed)
        return leaks._replace(rows=with_remarks(leaks.rows, remarks), kept=kept)

    def _leaks_on(
        self,
        heap: Heap,
        retained: Retained,
        outputs: _Outputs,
        roots: Roots,
        progress: Progress,
    ) -> Leaks:
        """Return the leaks on a heap; one search finds the holders of all of them."""
        survivors = self._leaked_names(heap)
        survivors += tensors_on_arrays(survivors, heap)
        listed = storages_of(survivors)
        graphs = [graph for graph in retained.graphs if graph.size_bytes >= self._smallest]
        in_graphs = retained.in_graphs_of_names.union(*(graph.shares for graph in graphs))
        unnamed = self._unnamed_memory(heap, listed, in_graphs, outputs.identities_of_notes())
        progress(0.7)
        questions = unnamed.questions()
        of_survivors = self._survivors.explained(survivors, heap, roots, questions)
        of_experiments = rows_of(of_survivors, heap)
        of_experiments += unnamed.surviving.rows(questions.holders, of_survivors)
        of_any_age, not_reached = _by_reach(unnamed.rows_of_any_age(questions.holders))
        of_any_age += rows_of_registries(unnamed.unlisted)
        findings = [*graphs, *retained.outputs(heap.large(self._smallest))]
        kept = _rows_of_findings(findings, self._smallest, listed)
        kept += rows_of_outputs(unnamed.unlisted, outputs.values)
        rows = merged([*of_experiments, *of_any_age])
        remarks = remarks_on_possibly_older(rows, of_experiments, of_any_age)
        rows = with_remarks(rows, remarks)
        cycles = with_ended_cycles(rows, roots.removed_by_lines.objects, roots, heap.ndarrays)
        beyond = unnamed.arrays.beyond
        return Leaks(
            cycles.rows,
            cycles.arrays,
            beyond,
            not_reached,
            _one_row_for_each(kept),
            notes_on_growth(self._survivors.rows_of_grown(heap, self._smallest)),
            retained.complete,
        )

    def _unnamed_memory(
        self, heap: Heap, listed: Set[StorageKey], in_graphs: Set[StorageKey], notes: Set[int]
    ) -> _UnnamedMemory:
        """Return the memory that may have leaked without a name of an experiment.

        Args:
            heap: the live objects.
            listed: the storages of survivors, which have rows of their own.
            in_graphs: the storages of autograd graphs that have rows of their own, or that named
                results need.
            notes: identities of objects of this search that are older than the heap.
        """
        namespace = self._context.namespace
        large = LeakCandidates(heap, list(in_run_modules(self._context.shell)))
        notebook = NotebookOnHeap(heap, namespace, self._smallest)
        surviving = SurvivingObjects(self._survivors, notebook, large.places, listed)
        in_rows = listed | surviving.storages | in_graphs
        unlisted = Unlisted(notebook, large.places, surviving.sizes, listed)
        candidates = large.largest(unlisted)
        named = self._named_among(candidates, notebook)
        arrays = _UnnamedArrays(notebook, in_rows, named)
        # From 30,000 names on, the namespace is a large dict itself.
        not_listed = self._printed_texts | {id(self._printed_texts), id(namespace)} | notes
        objects = UnreachedObjects(candidates, unlisted, not_listed | named)
        return _UnnamedMemory(surviving, arrays, objects, unlisted)

    def _named_among(self, candidates: Sequence[object], notebook: NotebookOnHeap) -> set[int]:
        """Return the identities of the candidates, and of the large arrays, that a name leads
        to: one walk from the names for both.
        """
        wanted = set(map(id, candidates))
        for same in notebook.heap.large(notebook.smallest).values():
            wanted.update(map(id, same))
        values = list(notebook.names.values())
        return wanted.intersection(map(id, values)) | unreached.led_to_by_names(values, wanted)

    def _leaked_names(self, heap: Heap) -> list[WatchedName]:
        """Return the large survivors, without what the user's live optimizer needs: it is no
        leak.
        """
        self._survivors.update(heap)
        large = [item for item in self._survivors.known if item.size_bytes >= self._smallest]
        of_optimizers = _storages_of_optimizers(heap, storages_of(large))
        leaked = list[WatchedName]()
        for item in large:
            if item.record.name or not of_optimizers.issuperset(item.live_storages()):
                leaked.append(item)
        return leaked


class _Outputs:
    """The outputs that IPython keeps. Make it before the heap, and drop the names.

    Args:
        context: the shell's.
        names: the user's names and their objects.

    Attributes:
        values: the outputs with memory, by the code of each.
    """

    def __init__(self, context: ShellContext, names: Mapping[str, object]) -> None:
        kept, keepers = kept_outputs(context.shell)
        self.values: dict[str, object] = {}
        for number, value in kept.items():
            if not is_atom(value):
                self.values[code_of_output(number)] = value
        self._paths, self._inside = paths_of(names, self.values)
        self._inside |= keepers | {id(kept), id(self.values)}

    def identities_of_notes(self) -> set[int]:
        """Return the identities of its own containers, which are large if there are many arrays."""
        return {id(self.values), id(self._paths), id(self._inside)}

    def retained(self, heap: Heap) -> Retained:
        """Return the memory that names and outputs keep alive."""
        return Retained(heap, self._paths, self.values, self._inside)


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
        """Return the objects whose holders must be searched."""
        return Questions(
            self.arrays.to_explain,
            [*self.surviving.to_explain, *self.objects.to_explain],
            self.surviving.rows_to_explain,
        )

    def rows_of_any_age(self, holders: Holders) -> Iterator[HeldRow]:
        """Yield the rows of leaks that no experiment is known to have left."""
        yield from self.arrays.rows(holders)
        yield from self.objects.rows(holders)


class _UnnamedArrays:
    """Tensors and arrays without a row yet, of which those that a variable leads to are no leaks.

    Args:
        notebook: the live objects and the user's names.
        listed: storages that have rows of their own.
        named: identities of the arrays that names lead to.

    Attributes:
        to_explain: the storages whose holders are searched, the largest first.
        beyond: the rows of further ones.
    """

    def __init__(self, notebook: NotebookOnHeap, listed: Set[StorageKey], named: Set[int]) -> None:
        self._notebook = notebook
        self._rows: dict[StorageKey, RetainedArray] = {}
        for key, same in notebook.heap.large(notebook.smallest).items():
            if key not in listed and named.isdisjoint(map(id, same)):
                self._rows[key] = record_without_name(same[0])
        ordered = sorted(self._rows, key=lambda key: -self._rows[key].size_bytes)
        self.to_explain = ordered[:MOST_EXPLAINED]
        self.beyond = [self._rows[key] for key in ordered[MOST_EXPLAINED:]]

    def rows(self, holders: Holders) -> Iterator[HeldRow]:
        """Yield the rows of leaks, given the holders of the storages ``to_explain``."""
        for key in self.to_explain:
            if not self._notebook.keeps_on_purpose(holders[key]):
                yield HeldRow(self._rows[key], holders[key])


def _by_reach(rows: Iterable[HeldRow]) -> tuple[list[HeldRow], list[RetainedArray]]:
    """Return the rows with a holder, and the arrays whose holders the search did not reach."""
    with_holder = list[HeldRow]()
    not_reached = list[RetainedArray]()
    for row in rows:
        if row.holder is NOT_REACHED:
            not_reached.append(row.row)
        else:
            with_holder.append(row)
    return with_holder, not_reached


def _one_row_for_each(rows: Iterable[ReclaimableItem]) -> list[ReclaimableItem]:
    """Return one row for all rows with the same words: an output has one of its arrays, and one of
    its other memory.
    """
    by_words: dict[tuple[str, str, str], ReclaimableItem] = {}
    for row in rows:
        words = row.device, row.what, row.remedy
        before = by_words.get(words)
        if before is None:
            by_words[words] = row
        else:
            by_words[words] = row._replace(
                size_bytes=before.size_bytes + row.size_bytes,
                new_bytes=before.new_bytes + row.new_bytes,
                is_at_least=before.is_at_least or row.is_at_least,
            )
    return list(by_words.values())


def _rows_of_findings(
    findings: Iterable[Finding], smallest: int, leaked: Container[StorageKey] = ()
) -> list[ReclaimableItem]:
    """Return the rows of findings of at least ``smallest`` bytes; the bytes of ``leaked`` storages
    are in rows of leaks.
    """
    rows = []
    for finding in findings:
        size = finding.size_bytes
        if size >= smallest:
            new = sum(share for key, share in finding.shares.items() if key not in leaked)
            rows.append(ReclaimableItem(size, finding.device, finding.what, finding.remedy, new))
    return rows


def _storages_of_optimizers(heap: Heap, survivors: set[StorageKey]) -> set[StorageKey | None]:
    """Return the storages of optimizers' state for tensors that are not among the ``survivors``."""
    base: Any = library_type("torch", "Tensor")
    if base is None:
        return set()
    storages = set[StorageKey | None]()
    for owner, tensor in optimizer_states(heap, base):
        if is_instance(owner, base) and storage_key(owner) not in survivors:
            storages.add(storage_key(tensor))
    return storages - set(map(storage_key, added_to_optimizers(heap, base)))
