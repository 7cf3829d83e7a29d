"""Ends an experiment: deletes its names, frees their memory, and creates its record.

An interrupt may stop it anywhere. So the end is a list of steps, each removed when it is done, and
another call goes on with those that are left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ipygpumem import interrupts
from ipygpumem.errors import describe_error, quoted
from ipygpumem.heap.array_search import ArraySearch
from ipygpumem.heap.arrays import StorageKey
from ipygpumem.heap.garbage import GcMark
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
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ended_memory import MemoryAfter, MemoryBefore, RamLeft, ram_growth
from ipygpumem.shell.experiment_log import ExperimentLog
from ipygpumem.shell.experiment_notes import ExperimentNotes
from ipygpumem.shell.experiment_options import ExperimentOptions
from ipygpumem.shell.measured_scope import MeasuredScope
from ipygpumem.shell.recovery import Recovery

if TYPE_CHECKING:
    from ipygpumem.inventory.watched_names import WatchedName
    from ipygpumem.shell.survivors import Survivors


class Again(Enum):
    """When another attempt to end an experiment does a step again."""

    NEVER = "never"
    """It is only for the report."""
    AT_ONCE = "at once, but never later"
    """It lists what the step after it deletes."""
    IF_INTERRUPTED = "if interrupted"
    UNTIL_DONE = "until done"


class EndStep(NamedTuple):
    """One step of an end."""

    work: Callable[[], object]
    lost: str
    """The work that is not done if the step fails."""
    again: Again = Again.IF_INTERRUPTED
    waits: bool = False
    """True if it waits until all steps before it are done."""

    def is_left(self, *, was_interrupted: bool) -> bool:
        """Return True if another attempt does it again after an interrupt or our own failure."""
        if self.again in (Again.NEVER, Again.AT_ONCE):
            return False
        return was_interrupted or self.again is Again.UNTIL_DONE


class Surroundings(NamedTuple):
    """The scopes around an experiment at the moment of its end."""

    enclosing: Scope | None
    """The scope around its own one."""
    elsewhere: Sequence[Scope]
    """The open scopes of other threads."""


class ExperimentEnd:
    """The end of one experiment.

    Args:
        context: the shell's services.
        options: the experiment's options.
        scope: its scope.
        log: its cells and errors.
        survivors: finds the objects that outlive it.
        recovery: releases tracebacks.
        handle: the object whose names stay: the user may need it after the end.

    Attributes:
        record: the record, once it is made.
    """

    def __init__(
        self,
        context: ShellContext,
        options: ExperimentOptions,
        scope: MeasuredScope,
        log: ExperimentLog,
        survivors: Survivors,
        recovery: Recovery,
        handle: object,
    ) -> None:
        self._context = context
        self._options = options
        self._scope = scope
        self._log = log
        self._survivors = survivors
        self._recovery = recovery
        self._handle = handle
        self._surroundings = Surroundings(None, ())
        self._steps = self._all_steps()
        self._own_names: list[str] | None = None
        """The names of its scope, from when they are listed until they are deleted.

        None in another attempt: code that ran in between may have bound other names.
        """
        self._misspelt = ""
        """Report line about a misspelt name in ``keep``."""
        self._before = MemoryBefore()
        self._after = MemoryAfter(ram=scope.ram_at_start)
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
            if self._attempt(step, signals):
                self._steps.remove(step)
        if signals:
            raise signals.pop()
        if not self._scope.names.is_closed:
            raise RuntimeError("its names could not be deleted")

    def _attempt(self, step: EndStep, signals: list[BaseException]) -> bool:
        """Do a step, and report what is lost if it fails; return False if another attempt has to do
        it again. A signal's exception is added to ``signals``.
        """
        try:
            self._do(step, signals)
        except BaseException as error:
            was_interrupted = interrupts.is_from_signal(error)
            is_left = step.is_left(was_interrupted=was_interrupted)
            if was_interrupted:
                interrupts.forget_our_frames(error)
                signals.append(error)
                if not is_left:
                    self._log.remarks.append(f"an interrupt came: {step.lost}")
            elif isinstance(error, Exception):
                self._context.isolation.failed("the end of an experiment", error, step.lost)
            else:
                raise
            return not is_left
        return True

    def _do(self, step: EndStep, signals: list[BaseException]) -> None:
        """Do a step, again at once after an interrupt if it cannot be done later; the interrupt is
        added to ``signals``.
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
        """Keep all names if a name in ``keep`` is misspelt: it may mean the trained model."""
        scope = self._scope.names
        keep = self._options.keep
        misspelt = scope.misspelt_keep()
        if not misspelt:
            return
        import difflib  # takes long

        wrong = misspelt[0]
        meant = ""
        for close in difflib.get_close_matches(wrong, scope.own_names(), 1):
            meant = f" (did you mean {close}?)"
        self._misspelt = (
            f"keep: no name matches {quoted(wrong)}{meant}: nothing was deleted, all names are kept"
        )
        keep[:] = [*(pattern for pattern in keep if pattern != wrong), "*"]

    def _measure_before(self) -> None:
        """Measure the usage, and list the names and arrays, before anything is freed."""
        before = self._before
        try:
            before.usages = self._scope.measurement.fix_peaks()
            before.malloc_bytes = malloc_bytes()
            without_lists, without_notes = rss_bytes(), allocated_bytes()
            before.saved = self._scope.saved_memory()
            self._scope.baseline.note_new_containers()
            self._own_names = self._scope.names.own_names()
            before.watched = self._watch(self._own_names)
            before.lists_bytes = max(0, rss_bytes() - without_lists)
            before.notes_bytes = max(0, allocated_bytes() - without_notes)
        except MemoryError:  # the names must be deleted all the more
            self._log.remarks.append(
                "not enough memory to list everything that the experiment held"
            )

    def _watch(self, own_names: list[str]) -> list[WatchedName]:
        """Watch the arrays held by the scope's names and outputs."""
        from ipygpumem.inventory.watched_names import watch_names  # loading must stay fast

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
        return watch_names(named, search)

    def _ignore_other_names(self, search: ArraySearch, own_names: Iterable[str]) -> None:
        """Ignore the objects of all names but the scope's own: an object that is also bound by
        ``global`` is no leak.
        """
        of_scope = set(own_names)
        for name, value in named_objects(self._context.namespace):
            if is_ownable(name) and name not in of_scope:
                search.ignore(value)

    # -- freeing -----------------------------------------------------------------------------------

    def _free_names_and_outputs(self) -> None:
        """Delete names, outputs and tracebacks, and measure what each of them frees."""
        self._run_measured(
            ("names", self._delete_names),
            ("outputs", self._forget_outputs),
            ("tracebacks", self._release_tracebacks),
        )

    def _run_measured(self, *steps: reclaim.Step) -> None:
        reclaim.run_steps(self._context.meter, list(steps), self._after.steps)

    def _delete_names(self) -> int:
        """Delete, restore or keep the names, unless that is done; return their number."""
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
        if self._misspelt:
            return 0
        self._scope.forget_outputs()
        return None

    def _release_tracebacks(self) -> int:
        """Release the last error, and return 1, if one was shown in the experiment."""
        if not self._log.failed or self._context.config.release_frames == "never":
            return 0
        self._recovery.release_stored_tracebacks()
        return 1

    def _collect(self) -> None:
        """Free garbage, pools and caches."""
        self._run_measured(*reclaim.steps_that_free(self._context.garbage, self._oldest_mark))

    def _oldest_mark(self) -> GcMark | None:
        """Return the start mark if all garbage at the end must be newer, else None."""
        if self._log.failed and self._scope.error_id_at_start != 0:
            return None  # an older error was released
        return self._scope.baseline.mark_if_nothing_lingers()

    # -- the memory that is left -------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure RAM and each device's usage after the end."""
        for item in self._before.watched or ():
            # Its key has died now, and before with the tensor the object that shows the storage.
            self._before.notes_bytes -= 2 * BLOCK_BYTES * item.storages.drop_dead()
        with contextlib.suppress(MemoryError):  # the record has the figures after the search, then
            self._after.ram = RamFigures.now()
            self._after.usages = self._scope.usages()

    def _find_survivors(self) -> None:
        """List the objects that are still alive; a failure becomes a remark."""
        if self._before.watched is None:
            return
        try:
            with growth_for("the search at its end"):
                self._after.alive = self._survivors_of(self._before.watched)
            self._after.lists_alive = True
        except Exception as error:  # everything has been freed: this only lists the rest
            if interrupts.is_from_signal(error):
                raise
            why = describe_error(error)
            self._log.remarks.append(f"objects still alive could not be listed: {why}")

    def _survivors_of(self, watched: list[WatchedName]) -> tuple[RetainedArray, ...]:
        """Return the rows of the objects that are still alive."""
        from ipygpumem.shell.survivor_search import (  # loading stays fast
            EndedExperiment,
            HostGrowth,
        )

        namespace = self._context.namespace
        baseline = self._scope.baseline
        keepers = self._keepers()
        least_bytes = self._context.config.min_held_bytes
        ram_left = RamLeft(self._scope, self._before, self._after, least_bytes).size_bytes()
        kept_storages, kept_bytes = self._kept_arrays(keepers)
        numbers = [cell.execution_count or 0 for cell in self._log.cells]
        ended = EndedExperiment(
            watched,
            is_known=lambda item, array: (
                array.storage in kept_storages or baseline.was_there(item, array)
            ),
            kept=kept_storages,
            keepers=keepers,
            baseline=baseline,
            growth=HostGrowth(
                ram_left - kept_bytes,
                ram_growth(self._after.usages) - kept_bytes,
                functools.partial(baseline.contents.unknown, namespace),
                self._before.names_by_object,
            ),
            first_cell=min(numbers, default=None),
        )
        return self._survivors.of_experiment(ended)

    def _kept_arrays(self, keepers: Iterable[str]) -> tuple[set[StorageKey], int]:
        """Return the storages of the arrays that names keep on purpose, and the RAM of the new ones
        among these.
        """
        baseline = self._scope.baseline
        storages = set[StorageKey]()
        new_bytes = 0
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
            if baseline.contents.knows(value):
                self._after.kept_in_older_bytes += new_bytes_of_name
        return storages, new_bytes

    def _keepers(self) -> tuple[str, ...]:
        """Return the names that stay on purpose, and the older ones among those to keep: a function
        may have rebound one.
        """
        to_keep = filter(self._context.namespace.__contains__, self._options.keep)
        return tuple(dict.fromkeys((*self._kept_names(), *to_keep)))

    def _kept_names(self) -> tuple[str, ...]:
        """Return the names that stay on purpose."""
        scope = self._scope.names
        return (*scope.outcome.kept, *scope.shared())

    def _measure_kept(self) -> None:
        """Measure the objects of the kept names, without older arrays."""
        namespace = self._context.namespace
        objects = dict[str, object]()
        for name in self._scope.names.outcome.kept:
            value = namespace.get(name)
            if not is_atom(value):
                objects[name] = value
        if not objects:
            return
        from ipygpumem.inventory.top import measure_names  # loading must stay fast

        with growth_for("the search at its end"):
            older = self._older_arrays_of(objects.values())
            are_older = set(map(id, older))
            objects = {name: value for name, value in objects.items() if id(value) not in are_older}
            measured = measure_names(objects, {}, namespaces=[id(namespace)], elsewhere=older)
        kept_objects = list[KeptObject]()
        for row in measured.names:
            if row.size_bytes >= self._context.config.min_held_bytes:
                is_at_least = row.is_at_least or bool(measured.notes)
                kept_objects.append(KeptObject(row.name, row.device_bytes, is_at_least))
        self._after.kept = tuple(kept_objects)

    def _older_arrays_of(self, values: Iterable[object]) -> list[object]:
        """Return the arrays behind some objects that the experiment has not made."""
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
        self._scope.baseline.forget()
        self._before.watched = None  # drop its weak references to arrays
        if self.record is None:
            self._scope.drop_measurement()

    def _make_record(self) -> None:
        """Stop measuring, and make the record from all that the steps before have found."""
        scope = self._scope.names
        log = self._log
        at_end = self._before.usages
        notes = ExperimentNotes(
            self._context,
            self._options,
            self._scope,
            log,
            self._survivors,
            self._before,
            self._after,
        ).all(misspelt=self._misspelt)
        self._scope.baseline.drop_lists()
        usages = _with_peaks_of(at_end, self._scope.measurement.stop())
        after_freeing = self._after.usages or usages
        consumed = {usage.device: usage.delta_bytes for usage in at_end}
        freed = dict[str, int]()  # empty if memory was too short to measure its end
        if at_end:
            for usage in after_freeing:
                freed[usage.device] = consumed.get(usage.device, 0) - usage.delta_bytes
        limits = {}
        if self._options.budget is not None:
            limits = dict(self._options.budget.limits)
        seconds = log.seconds() or log.span_seconds
        self.record = ExperimentRecord(
            name=self._options.name,
            started_at=log.started_at,
            duration_seconds=seconds,
            cells=tuple(log.cells),
            usages=usages,
            consumed=consumed,
            freed=freed,
            deleted=tuple(scope.outcome.deleted),
            restored=tuple(scope.outcome.restored),
            kept=self._kept_names(),
            survivors=self._after.alive,
            steps=tuple(self._after.steps),
            notes=tuple(notes),
            parameters=dict(self._options.parameters),
            ooms=log.ooms,
            budget=limits,
            span_seconds=max(seconds, log.span_seconds),
            kept_objects=self._after.kept,
        )


def _with_peaks_of(at_end: Iterable[Usage], usages: Iterable[Usage]) -> tuple[Usage, ...]:
    """Return usages with the peaks at the end of the code: our search for survivors takes memory,
    too.
    """
    peaks = {usage.device: usage.peak_bytes for usage in at_end}
    with_peaks = list[Usage]()
    for usage in usages:
        peak_bytes = peaks.get(usage.device, usage.peak_bytes)
        if usage.peak_bytes > peak_bytes:
            usage = replace(usage, peak_bytes=peak_bytes)
        with_peaks.append(usage)
    return tuple(with_peaks)
