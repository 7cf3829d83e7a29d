"""Ends an experiment: deletes its names, frees their memory, and creates its record.

``ExperimentEnd._all_steps`` lists the steps. An interrupt may stop them anywhere. So each step is
removed from the list when it is done, and another attempt goes on with those that are left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ipygpumem import interrupts
from ipygpumem.errors import describe_error, quoted
from ipygpumem.heap.kinds.arrays import StorageKey
from ipygpumem.heap.live.garbage import GcMark
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.introspect import is_atom, named_objects
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.notebook import code_of_output
from ipygpumem.probes.host import RamFigures, rss_bytes
from ipygpumem.probes.malloc import BLOCK_BYTES, allocated_bytes, malloc_bytes
from ipygpumem.reclaim import reclaim
from ipygpumem.records import (
    ExperimentRecord,
    KeptObject,
    RetainedArray,
    Usage,
)
from ipygpumem.scope.ownable import is_ownable
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.experiments.ended_memory import (
    EndingExperiment,
    MemoryAfter,
    MemoryBefore,
    RamLeft,
    ram_growth,
)
from ipygpumem.shell.experiments.experiment_notes import ExperimentNotes
from ipygpumem.shell.recovery import Recovery

if TYPE_CHECKING:
    from ipygpumem.inventory.remaining.watched_names import WatchedName


class Again(Enum):
    """When a step of an end that has failed is done again."""

    NEVER = "never"
    """It is only for the report."""
    AT_ONCE = "at once, but never later"
    """Once more in the same attempt: it lists the names that the step after it deletes."""
    IF_INTERRUPTED = "if interrupted"
    """In another attempt, if an interrupt stopped it."""
    UNTIL_DONE = "until done"
    """In each further attempt, also after our own failure."""


class EndStep(NamedTuple):
    """One step of an end."""

    work: Callable[[], object]
    lost: str
    """The work that is not done if the step fails, in words for the user."""
    again: Again = Again.IF_INTERRUPTED
    waits: bool = False
    """True if it waits until all steps before it are done."""

    def is_repeated(self, *, was_interrupted: bool) -> bool:
        """Return True if another attempt does the step again, because an interrupt or our own
        failure has stopped it.
        """
        if self.again in (Again.NEVER, Again.AT_ONCE):
            return False
        return was_interrupted or self.again is Again.UNTIL_DONE


class Surroundings(NamedTuple):
    """The scopes around an experiment at the moment of its end."""

    enclosing: Scope | None
    """The scope around the experiment's own one, which gets the names that it keeps."""
    elsewhere: Sequence[Scope]
    """The open scopes of other threads."""


class ExperimentEnd:
    """The end of one experiment. ``run`` does its steps; called again after an interrupt, it does
    the steps that are left.

    Args:
        experiment: the experiment.
        recovery: releases tracebacks.
        handle: the object that the user holds of the experiment. Names of it stay, because the
            user may need it after the end: ``demo`` in ``demo = ipygpumem.experiment("demo")``.

    Attributes:
        record: the record, once it is made.
    """

    def __init__(self, experiment: EndingExperiment, recovery: Recovery, handle: object) -> None:
        self._experiment = experiment
        self._context = experiment.context
        self._scope = experiment.scope
        self._log = experiment.log
        self._recovery = recovery
        self._handle = handle
        self._surroundings = Surroundings(enclosing=None, elsewhere=())
        self._steps = self._all_steps()
        self._own_names: list[str] | None = None
        """The names of its scope, from when they are listed until they are deleted.

        None in another attempt: code that ran in between may have bound other names.
        """
        self._misspelt = ""
        """Report line about a misspelt name in ``keep``."""
        self._before = MemoryBefore()
        """Set by ``_measure_before``."""
        self._after = MemoryAfter(ram=experiment.scope.ram_at_start)
        """Set by the steps that free memory, measure it and search for survivors."""
        self.record: ExperimentRecord | None = None

    def _all_steps(self) -> list[EndStep]:
        """Return the steps of an end, in order."""
        never = Again.NEVER
        until_done = Again.UNTIL_DONE
        not_measured = "the memory freed by deleting its names was not measured"
        return [
            EndStep(self._keep_all_if_misspelt, "misspelt names to keep were not found", never),
            EndStep(
                self._measure_before,
                "not everything that the experiment held was measured and listed",
                Again.AT_ONCE,
            ),
            EndStep(self._scope.undo.close, "its budget may still limit torch"),
            EndStep(self._free_names_and_outputs, not_measured),
            EndStep(self._delete_names_again, not_measured),
            EndStep(self._delete_names, "its names are kept", until_done),
            EndStep(self._collect, "garbage was not collected", waits=True),
            EndStep(self._measure, "its memory was not measured", waits=True),
            EndStep(self._find_survivors, "objects still alive were not listed", never, waits=True),
            EndStep(self._measure_kept, "kept objects were not measured", never, waits=True),
            EndStep(self._make_record, "its record has no measurements", waits=True),
            EndStep(self._forget_start, "its list of older objects stays in memory", waits=True),
        ]

    def run(self, surroundings: Surroundings) -> None:
        """Do the steps that are left, then raise a signal's exception if one came.

        Raises:
            RuntimeError: the names could not be deleted.
        """
        self._surroundings = surroundings
        self._own_names = None
        signals = list[BaseException]()
        for step in tuple(self._steps):
            if step.waits and self._steps[0] is not step:
                break  # another attempt goes on with the first step that is left
            is_over = self._attempt(step, signals)
            if is_over:
                self._steps.remove(step)
        if signals:
            raise signals.pop()
        if not self._scope.names.is_closed:
            raise RuntimeError("its names could not be deleted")

    def _attempt(self, step: EndStep, signals: list[BaseException]) -> bool:
        """Do a step, and report the work that is not done if it fails.

        Args:
            step: the step.
            signals: receives the exception of a signal that stops the step.

        Returns:
            True if the step is over: it is done, or no other attempt does it again.
        """
        try:
            self._do(step, signals)
        except BaseException as error:
            was_interrupted = interrupts.is_from_signal(error)
            is_over = not step.is_repeated(was_interrupted=was_interrupted)
            if was_interrupted:
                interrupts.forget_our_frames(error)
                signals.append(error)
                if is_over:
                    self._log.remarks.append(f"an interrupt came: {step.lost}")
            elif isinstance(error, Exception):
                self._context.isolation.failed("the end of an experiment", error, step.lost)
            else:
                raise
            return is_over
        return True

    def _do(self, step: EndStep, signals: list[BaseException]) -> None:
        """Do a step. If a signal's exception stops an ``AT_ONCE`` step, append the exception to
        ``signals`` and do the step once more.
        """
        try:
            step.work()
        except BaseException as error:
            if step.again is not Again.AT_ONCE or not interrupts.is_from_signal(error):
                raise
            interrupts.forget_our_frames(error)
            signals.append(error)
            step.work()

    # -- before anything is freed ------------------------------------------------------------------

    def _keep_all_if_misspelt(self) -> None:
        """Keep all names if a name in ``keep`` is misspelt: it may mean the trained model.

        Example: ``--keep modle``, and the experiment has bound ``model``.
        """
        scope = self._scope.names
        keep = self._experiment.options.keep
        misspelt_names = scope.misspelt_keep()
        if not misspelt_names:
            return
        import difflib  # takes long

        misspelt = misspelt_names[0]
        question = ""
        for similar_name in difflib.get_close_matches(misspelt, scope.own_names(), 1):
            question = f" (did you mean {similar_name}?)"
        self._misspelt = (
            f"keep: no name matches {quoted(misspelt)}{question}: nothing was deleted, all names "
            f"are kept"
        )
        keep[:] = [*(pattern for pattern in keep if pattern != misspelt), "*"]

    def _measure_before(self) -> None:
        """Measure the usage, and list the names and arrays, before anything is freed."""
        before = self._before
        try:
            before.usages = self._scope.measurement.fix_peaks()
            before.malloc_bytes = malloc_bytes()
            rss_before_lists = rss_bytes()
            allocated_before_lists = allocated_bytes()
            before.saved = self._scope.saved_memory()
            self._scope.baseline.note_new_containers()
            self._own_names = self._scope.names.own_names()
            before.watched = self._watch_arrays(self._own_names)
            before.lists_bytes = max(0, rss_bytes() - rss_before_lists)
            before.notes_bytes = max(0, allocated_bytes() - allocated_before_lists)
        except MemoryError:  # the names must be deleted all the more
            self._log.remarks.append(
                "not enough memory to list everything that the experiment held"
            )

    def _watch_arrays(self, own_names: list[str]) -> list[WatchedName]:
        """Return the arrays held by the names and outputs that the end drops, in a form that does
        not keep them alive; note in ``_before`` which name has each object.
        """
        from ipygpumem.inventory.remaining import watched_names  # loading must stay fast

        namespace = self._context.namespace
        search = ArraySearch(self._scope.baseline.was_there)
        named = list[tuple[str, object]]()
        for name in self._scope.names.names_to_delete(own_names):
            value = namespace.get(name)
            if not is_atom(value):
                named.append((name, value))
        for number, value in self._scope.outputs().items():
            named.append((code_of_output(number), value))
        self._before.names_by_object = {id(value): name for name, value in named}
        if named:
            self._ignore_other_names(search, own_names)
        return watched_names.watch_names(named, search)

    def _ignore_other_names(self, search: ArraySearch, own_names: Iterable[str]) -> None:
        """Let ``search`` ignore the objects of all names but the scope's own.

        Such an object stays, and is no leak: ``global model; model = local = Model()``.
        """
        of_scope = set(own_names)
        for name, value in named_objects(self._context.namespace):
            if is_ownable(name) and name not in of_scope:
                search.ignore(value)

    # -- freeing -----------------------------------------------------------------------------------

    def _free_names_and_outputs(self) -> None:
        """Delete names, outputs and tracebacks, and measure the memory that each of them frees."""
        self._run_measured(
            ("names", self._delete_names),
            ("outputs", self._forget_outputs),
            ("tracebacks", self._release_tracebacks),
        )

    def _run_measured(self, *steps: reclaim.Step) -> None:
        """Run steps that free memory; each is added to ``_after.steps`` with the freed bytes."""
        reclaim.run_steps(self._context.meter, list(steps), self._after.steps)

    def _delete_names(self) -> int:
        """Close the scope, which deletes, restores or keeps each name, unless it is closed; return
        the number of its names.
        """
        scope = self._scope.names
        own_names = self._own_names
        self._own_names = None
        if not scope.is_closed:
            scope.close(
                self._surroundings.enclosing,
                own_names,
                is_handle=lambda value: value is self._handle,
                other_scopes=self._surroundings.elsewhere,
            )
        outcome = scope.outcome
        return len(outcome.deleted) + len(outcome.restored) + len(outcome.kept)

    def _delete_names_again(self) -> None:
        """Delete the names if memory was too short before the tracebacks' memory was freed."""
        if not self._scope.names.is_closed:
            self._run_measured(("names again", self._delete_names))

    def _forget_outputs(self) -> int | None:
        """Remove the outputs since the start, unless all names are kept because one in ``keep`` is
        misspelt. Return 0 if nothing was done, else None, because the number is not known.
        """
        if self._misspelt:
            return 0
        self._scope.forget_outputs()
        return None

    def _release_tracebacks(self) -> int:
        """Release the frames of the last error if it was shown in the experiment, unless the option
        ``release_frames`` is ``never``; return the number of errors, 0 or 1.
        """
        if not self._log.failed:
            return 0
        if self._context.config.release_frames == "never":
            return 0
        self._recovery.release_stored_tracebacks()
        return 1

    def _collect(self) -> None:
        """Free garbage, pools and caches."""
        steps = reclaim.steps_that_free(self._context.garbage, self._mark_before_garbage)
        self._run_measured(*steps)

    def _mark_before_garbage(self) -> GcMark | None:
        """Return the collector's mark of the start, if all garbage at the end must be newer than
        the start; else None.
        """
        if self._log.failed and self._scope.error_id_at_start != 0:
            return None  # an older error was released
        return self._scope.baseline.mark_if_nothing_lingers()

    # -- the memory that is left -------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure RAM and each device's usage, now that memory is freed."""
        for watched in self._before.watched or ():
            # For each dead storage, two of our own blocks are freed: its key dies here, and the
            # object that shows the storage has died with the tensor.
            self._before.notes_bytes -= 2 * BLOCK_BYTES * watched.storages.drop_dead()
        with contextlib.suppress(MemoryError):  # the record has the figures after the search, then
            self._after.ram = RamFigures.now()
            self._after.usages = self._scope.usages()

    def _find_survivors(self) -> None:
        """List the objects that are still alive; a failure becomes a remark."""
        if self._before.watched is None:
            return
        try:
            with growth_for("the search at its end"):
                self._after.alive = self._rows_of_survivors(self._before.watched)
            self._after.lists_alive = True
        except Exception as error:  # everything has been freed: this only lists the rest
            if interrupts.is_from_signal(error):
                raise
            why = describe_error(error)
            self._log.remarks.append(f"objects still alive could not be listed: {why}")

    def _rows_of_survivors(self, watched: list[WatchedName]) -> tuple[RetainedArray, ...]:
        """Return the rows of the objects that are still alive. Add the RAM of new arrays in
        older objects that stay on purpose to ``_after``, for the note on RAM without a name.

        Args:
            watched: the arrays of the deleted names.
        """
        from ipygpumem.shell.searches.survivor_search import (  # loading stays fast
            EndedExperiment,
            HostGrowth,
        )

        namespace = self._context.namespace
        baseline = self._scope.baseline
        keepers = self._keepers()
        smallest_bytes = self._context.config.min_held_bytes
        ram_left = RamLeft(self._scope, self._before, self._after, smallest_bytes)
        bytes_left = ram_left.size_bytes()
        kept = self._kept_arrays(keepers)
        self._after.kept_in_older_bytes += kept.new_bytes_in_older
        numbers = [cell.execution_count or 0 for cell in self._log.cells]
        ended = EndedExperiment(
            watched,
            is_known=lambda item, array: (
                array.storage in kept.storages or baseline.was_there(item, array)
            ),
            kept_storages=kept.storages,
            keepers=keepers,
            baseline=baseline,
            growth=HostGrowth(
                size_bytes=bytes_left - kept.new_bytes,
                measured_bytes=ram_growth(self._after.usages) - kept.new_bytes,
                kept_objects=functools.partial(baseline.contents.unrecorded_objects, namespace),
                names=self._before.names_by_object,
            ),
            first_cell=min(numbers, default=None),
        )
        return self._experiment.survivors.rows_of_experiment(ended)

    def _kept_arrays(self, keepers: Iterable[str]) -> _KeptArrays:
        """Return the arrays that the names ``keepers`` keep on purpose."""
        baseline = self._scope.baseline
        storages = set[StorageKey]()
        new_bytes = 0
        new_bytes_in_older = 0
        # It ends with this function: its notes on a million kept objects would be new objects, too.
        search = ArraySearch()
        for name in keepers:
            value = self._context.namespace.get(name)
            new_bytes_of_name = 0
            for item, array in search.find(value):
                storages.add(array.storage)
                if array.device == "cpu" and not baseline.was_there(item, array):
                    new_bytes_of_name += array.size_bytes
            new_bytes += new_bytes_of_name
            if baseline.contents.has_recorded(value):
                new_bytes_in_older += new_bytes_of_name
        return _KeptArrays(storages, new_bytes, new_bytes_in_older)

    def _keepers(self) -> tuple[str, ...]:
        """Return the names that stay on purpose, and the existing names in ``keep``.

        One of the latter may be older than the experiment, and a function of a module may have
        given it a new object, which the scope doesn't see.
        """
        to_keep = filter(self._context.namespace.__contains__, self._experiment.options.keep)
        return tuple(dict.fromkeys((*self._kept_names(), *to_keep)))

    def _kept_names(self) -> tuple[str, ...]:
        """Return the names that stay on purpose."""
        scope = self._scope.names
        return (*scope.outcome.kept, *scope.shared())

    def _measure_kept(self) -> None:
        """Measure the objects of the kept names for the report, without the arrays that are older
        than the experiment.
        """
        namespace = self._context.namespace
        objects = dict[str, object]()
        for name in self._scope.names.outcome.kept:
            value = namespace.get(name)
            if not is_atom(value):
                objects[name] = value
        if not objects:
            return
        from ipygpumem.inventory.names.top import measure_names  # loading must stay fast

        with growth_for("the search at its end"):
            older_arrays = self._older_arrays_of(objects.values())
            older_ids = set(map(id, older_arrays))
            objects = {name: value for name, value in objects.items() if id(value) not in older_ids}
            measured = measure_names(
                objects, {}, namespaces=[id(namespace)], elsewhere=older_arrays
            )
        kept_objects = list[KeptObject]()
        for row in measured.names:
            if row.size_bytes >= self._context.config.min_held_bytes:
                is_at_least = row.is_at_least or bool(measured.notes)
                kept_objects.append(KeptObject(row.name, row.device_bytes, is_at_least))
        self._after.kept = tuple(kept_objects)

    def _older_arrays_of(self, values: Iterable[object]) -> list[object]:
        """Return the arrays inside of ``values`` that are older than the experiment."""
        was_there = self._scope.baseline.was_there
        search = ArraySearch()
        older = list[object]()
        for value in values:
            for item, array in search.find(value):
                if was_there(item, array):
                    older.append(item)
        return older

    # -- the record --------------------------------------------------------------------------------

    def _forget_start(self) -> None:
        """Drop the lists of the objects at the start, the last step of an end."""
        self._scope.baseline.forget()
        self._before.watched = None  # drop its weak references to arrays
        if self.record is None:
            self._scope.drop_measurement()

    def _make_record(self) -> None:
        """Stop measuring, and make the record from the results of the earlier steps."""
        outcome = self._scope.names.outcome
        log = self._log
        usages_before_freeing = self._before.usages
        notes = ExperimentNotes(self._experiment, self._before, self._after)
        lines = notes.all(misspelt=self._misspelt)
        self._scope.baseline.drop_lists()
        usages = _with_peaks_of(usages_before_freeing, self._scope.measurement.stop())
        consumed = {usage.device: usage.delta_bytes for usage in usages_before_freeing}
        freed = dict[str, int]()  # empty if memory was too short to measure its end
        if usages_before_freeing:
            freed = _freed_bytes(consumed, self._after.usages or usages)
        limits = {}
        if self._experiment.options.budget is not None:
            limits = dict(self._experiment.options.budget.limits)
        seconds = log.seconds() or log.span_seconds
        self.record = ExperimentRecord(
            name=self._experiment.options.name,
            started_at=log.started_at,
            duration_seconds=seconds,
            cells=tuple(log.cells),
            usages=usages,
            consumed=consumed,
            freed=freed,
            deleted=tuple(outcome.deleted),
            restored=tuple(outcome.restored),
            kept=self._kept_names(),
            survivors=self._after.alive,
            steps=tuple(self._after.steps),
            notes=tuple(lines),
            parameters=dict(self._experiment.options.parameters),
            ooms=log.ooms,
            budget=limits,
            span_seconds=max(seconds, log.span_seconds),
            kept_objects=self._after.kept,
        )


class _KeptArrays(NamedTuple):
    """The arrays that names keep on purpose."""

    storages: set[StorageKey]
    new_bytes: int
    """RAM of the arrays that the experiment has made."""
    new_bytes_in_older: int
    """RAM of the arrays among these that are in objects which are older than the experiment."""


def _freed_bytes(
    consumed: Mapping[str, int], usages_after_freeing: Iterable[Usage]
) -> dict[str, int]:
    """Return the bytes that an end has freed on each device: those that the experiment had consumed
    before, less those that are still in use after it.
    """
    freed = dict[str, int]()
    for usage in usages_after_freeing:
        freed[usage.device] = consumed.get(usage.device, 0) - usage.delta_bytes
    return freed


def _with_peaks_of(
    usages_before_freeing: Iterable[Usage], usages: Iterable[Usage]
) -> tuple[Usage, ...]:
    """Return ``usages``, each with the peak at the end of the code if that is lower: our search for
    survivors takes memory, too.
    """
    peaks = {usage.device: usage.peak_bytes for usage in usages_before_freeing}
    with_peaks = list[Usage]()
    for usage in usages:
        peak_bytes = peaks.get(usage.device, usage.peak_bytes)
        if usage.peak_bytes > peak_bytes:
            usage = replace(usage, peak_bytes=peak_bytes)
        with_peaks.append(usage)
    return tuple(with_peaks)
