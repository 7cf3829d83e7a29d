"""Ends an experiment: deletes its names, frees their memory, and creates its record.

An interrupt may stop it anywhere. So the end is a list of steps, each removed when it is done, and
another call goes on with those that are left.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from ipygpumem.probes.children import children as children_now
from ipygpumem.probes.host import RamFigures, rss_bytes
from ipygpumem.probes.malloc import BLOCK_BYTES, allocated_bytes, malloc_bytes
from ipygpumem.probes.mappings import own_pages
from ipygpumem.reclaim import reclaim
from ipygpumem.records import (
    COMMENT,
    FREE_HEAP_PAGES,
    ExperimentRecord,
    FreeingStep,
    RetainedArray,
    Usage,
)
from ipygpumem.scope.ownable import is_ownable
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.experiment_log import ExperimentLog
from ipygpumem.shell.experiment_options import ExperimentOptions
from ipygpumem.shell.measured_scope import MeasuredScope
from ipygpumem.shell.recovery import Recovery
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.inventory.watched_names import WatchedName
    from ipygpumem.shell.survivors import Survivors

_CLOCK_SECONDS = 0.02
"""Error of the times at which processes start."""
_LEAST_SHARE_WITHOUT_LINE = 0.3
"""Minimum share of the new processes' memory in those without a line to mention these: a helper
process of joblib is small.
"""


_GAPS = 4
"""Smallest ratio of the memory of many small objects to the gaps between them that was seen."""


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


@dataclass
class MemoryBefore:
    """The memory of an experiment before anything is freed."""

    usages: tuple[Usage, ...] = ()
    saved: list[RetainedArray] = field(default_factory=list)
    """The arrays held by the objects that its code has replaced."""
    watched: list[WatchedName] | None = None
    """The arrays of its names; None if memory was too short to list them."""
    names_by_object: dict[int, str] = field(default_factory=dict)
    """Its names by the identities of their objects."""
    malloc_bytes: int = 0
    """The bytes in use from malloc."""
    lists_bytes: int = 0
    """The pages of the lists that the end itself makes then; malloc keeps those that are free."""
    notes_bytes: int = 0
    """The bytes of its notes on arrays, which stay until the end is over."""


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
        """The names of its scope; only valid in the attempt that has listed them."""
        self._misspelt = ""
        """Report line about a misspelt name in ``keep``."""
        self._before = MemoryBefore()
        self._are_names_deleted = False
        self._freeing_steps: list[FreeingStep] = []
        self._usages_after: tuple[Usage, ...] = ()
        """Usage once its memory is freed, before our search for survivors takes memory."""
        self._ram_after = scope.ram_at_start
        self._alive: tuple[RetainedArray, ...] = ()
        self._lists_alive = False
        """True if these are all objects that are still alive, as far as our search finds them."""
        self._kept_in_older_bytes = 0
        """RAM of the new arrays in older objects of the names that stay on purpose."""
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
        struck = list[BaseException]()
        for step in tuple(self._steps):
            if step.waits and self._steps[0] is not step:
                break  # another attempt goes on with the first step that is left
            try:
                self._do(step, struck)
            except BaseException as error:
                was_interrupted = interrupts.is_from_signal(error)
                if was_interrupted:
                    interrupts.forget_our_frames(error)
                    struck.append(error)
                    if not step.is_left(was_interrupted=True):
                        self._log.remarks.append(f"an interrupt came: {step.lost}")
                elif isinstance(error, Exception):
                    self._context.isolation.failed("the end of an experiment", error, step.lost)
                else:
                    raise
                if step.is_left(was_interrupted=was_interrupted):
                    continue
            self._steps.remove(step)
        if struck:
            raise struck.pop()
        if not self._are_names_deleted:
            raise RuntimeError("its names could not be deleted")

    def _do(self, step: EndStep, struck: list[BaseException]) -> None:
        """Do a step, again at once after an interrupt if it cannot be done later; the interrupt is
        added to ``struck``.
        """
        try:
            step.work()
        except BaseException as error:
            if step.again is not Again.AT_ONCE or not interrupts.is_from_signal(error):
                raise
            interrupts.forget_our_frames(error)
            struck.append(error)
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
            self._scope.baseline.note_end()
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
        reclaim.run_steps(self._context.meter, list(steps), self._freeing_steps)

    def _delete_names(self) -> int:
        """Delete, restore or keep the names, unless that is done; return their number."""
        scope = self._scope.names
        own_names, self._own_names = self._own_names, None  # stale after the first attempt
        if not self._are_names_deleted:
            scope.close(
                self._surroundings.enclosing,
                own_names,
                is_handle=lambda value: value is self._handle,
                other_scopes=self._surroundings.elsewhere,
            )
            self._are_names_deleted = True
        outcome = scope.outcome
        return len(outcome.deleted) + len(outcome.restored) + len(outcome.kept)

    def _delete_names_again(self) -> None:
        """Delete the names if memory was too short before the tracebacks' memory was freed."""
        if not self._are_names_deleted:
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
            self._ram_after = RamFigures.now()
            self._usages_after = self._scope.usages()

    def _find_survivors(self) -> None:
        """List the objects that are still alive; a failure becomes a remark."""
        if self._before.watched is None:
            return
        try:
            with growth_for("the search at its end"):
                self._alive = self._survivors_of(self._before.watched)
            self._lists_alive = True
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
        kept_storages = set[StorageKey]()
        search = ArraySearch()
        growth = self._host_growth()
        measured_growth = _growth(self._usages_after)
        for name in keepers:
            value = namespace.get(name)
            new_bytes = 0
            for item, array in search.find(value):
                kept_storages.add(array.storage)
                if array.device == "cpu" and not baseline.was_there(item, array):
                    new_bytes += array.size_bytes
            growth -= new_bytes
            measured_growth -= new_bytes
            if baseline.contents.knows(value):
                self._kept_in_older_bytes += new_bytes
        del search  # its notes on a million kept objects would be new objects, too
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
                growth,
                measured_growth,
                functools.partial(baseline.contents.unknown, namespace),
                self._before.names_by_object,
            ),
            first_cell=min(numbers, default=None),
        )
        return self._survivors.of_experiment(ended)

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

    def _host_growth(self) -> int:
        """Return the RAM that the experiment leaves in use."""
        growth = _growth(self._before.usages)  # before anything was freed
        is_large = growth >= self._context.config.min_held_bytes
        if is_large:
            growth = _growth(self._usages_after)
        if "polars" in sys.modules:
            # Its allocator reports nothing, and pages that malloc returns may be older.
            for step in self._freeing_steps:
                if step.name not in ("names", "garbage"):
                    growth += step.freed.get("cpu", 0)
        elif is_large:
            growth += self._older_pages_bytes() - self._free_blocks_bytes()
        # The notes on 300,000 arrays take 150 MiB, with gaps that they leave in pages.
        notes_bytes = self._before.notes_bytes
        growth -= max(0, self._before.lists_bytes - self._freed_by(FREE_HEAP_PAGES))
        growth -= notes_bytes // _GAPS
        allocated = allocated_bytes() - self._scope.allocated_at_start - notes_bytes
        if growth >= allocated + self._context.config.min_held_bytes:
            # Notes between objects that have died keep malloc from returning the pages.
            free_bytes = own_pages().free_heap_bytes
            growth -= max(0, free_bytes - self._scope.free_heap_at_start)
        return max(growth, allocated)

    def _freed_by(self, name: str) -> int:
        """Return the RAM that a step of the end has freed."""
        return sum(step.freed.get("cpu", 0) for step in self._freeing_steps if step.name == name)

    def _older_pages_bytes(self) -> int:
        """Return the bytes of the pages that malloc has returned, as far as they were free at the
        start: they hide as much growth of memory that malloc does not know, such as shared memory.
        """
        returned = self._freed_by(FREE_HEAP_PAGES)
        freed_before = sum(step.freed.get("cpu", 0) for step in self._freeing_steps) - returned
        # Malloc keeps the pages of most blocks that the end itself frees until this step.
        of_the_end = self._before.malloc_bytes - malloc_bytes() - freed_before
        older = returned - max(0, of_the_end) - self._before.lists_bytes
        return max(0, min(older, self._scope.free_heap_at_start))

    def _free_blocks_bytes(self) -> int:
        """Return the bytes of the pages that Python keeps, in arenas that a few older or newer
        objects share with those that have died.
        """
        start, after = self._scope.ram_at_start, self._ram_after
        if start is None or after is None:
            return 0
        return max(0, after.free_blocks_bytes - start.free_blocks_bytes)

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
        notes = tuple(self._notes(self._usages_after))
        self._scope.baseline.drop_lists()
        usages = _with_peaks_of(at_end, self._scope.measurement.stop())
        after_freeing = self._usages_after or usages
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
            survivors=self._alive,
            steps=tuple(self._freeing_steps),
            notes=notes,
            parameters=dict(self._options.parameters),
            ooms=log.ooms,
            budget=limits,
            span_seconds=max(seconds, log.span_seconds),
        )

    def _notes(self, usages: tuple[Usage, ...]) -> list[str]:
        """Return the notes of the report: on names, memory, the budget, and steps that failed."""
        notes = list[str]()
        if self._misspelt:
            notes.append(self._misspelt)
        for pattern in self._scope.names.unmatched_keep():
            if pattern != "*":
                notes.append(f"keep: no name matches {quoted(pattern)}")
        notes += self._notes_on_memory(usages)
        budget = self._options.budget
        if budget is not None:
            notes += [*budget.notes, *budget.refusals]
        notes += self._log.remarks
        notes += [f"{step.name}: {step.error}" for step in self._freeing_steps if step.error]
        return notes

    def _notes_on_memory(self, usages: tuple[Usage, ...]) -> list[str]:
        """Return notes on memory that its rows do not show."""
        notes = list[str]()
        least = self._context.config.min_held_bytes
        stays = self._scope.names.stays
        saved = self._before.saved
        restored = [row for row in saved if not stays(row.name)]
        replaced = [row for row in saved if stays(row.name)]
        for rows, what, until in (
            (restored, "the restored objects", "while the experiment ran"),
            (replaced, "the earlier objects of kept names", "until the experiment's end"),
        ):
            saved_bytes = sum(row.size_bytes for row in rows)
            if saved_bytes >= least:
                names = ", ".join(row.name for row in rows)
                notes.append(f"{what} ({names}) took {format_bytes(saved_bytes)} {until}")
        consumed = {usage.device: usage.delta_bytes for usage in self._before.usages}
        left = dict[str, int]()
        for usage in usages:  # the notes that the end itself makes are not the experiment's
            left[usage.device] = min(usage.delta_bytes, consumed.get(usage.device, 0))
        if "polars" in sys.modules and left.get("cpu", 0) >= least:
            notes.append("polars' allocator returns the pages of deleted frames within seconds")
        if left.get("shm", 0) >= least:
            shared = self._context.meter.now()["shm"].note
            if shared:
                notes.append(f"shared memory: {shared}")
        if left.get("cpu", 0) >= least:
            notes += self._notes_on_host(left["cpu"])
        if left.get("children", 0) >= least:
            notes.append(self._note_on_children(left["children"]))
        return notes

    def _notes_on_host(self, left_bytes: int) -> list[str]:
        """Return notes on containers that grew, and on RAM without a name."""
        from ipygpumem.inventory import leftover, remaining  # most experiments leave less
        from ipygpumem.shell.grown_containers import notes_on_growth

        namespace = self._context.namespace
        baseline = self._scope.baseline
        contents = baseline.contents
        least = self._context.config.min_held_bytes
        roots = self._survivors.roots()
        grown = remaining.grown(namespace, contents, least, roots, baseline.objects_at_end)
        self._survivors.grown.add(row.grown for row in grown if row.grown is not None)
        notes = notes_on_growth(grown)
        if not self._lists_alive:
            return notes
        named = {
            "still alive": sum(row.size_bytes for row in self._alive if row.device == "cpu"),
            "kept": leftover.ram_of(contents.unknown(namespace)) + self._kept_in_older_bytes,
            "in what grew": sum(row.size_bytes for row in grown),
        }
        at_start = self._scope.ram_at_start
        after = self._ram_after
        assert at_start is not None
        assert after is not None
        knows_new = baseline.knows_new_objects
        return notes + leftover.notes_on_unnamed(at_start, after, left_bytes, named, knows_new)

    def _note_on_children(self, left_bytes: int) -> str:
        """Return the note on child processes that it leaves, with the lines that end them."""
        from ipygpumem.inventory import children  # most experiments leave none

        started = self._log.started_at - _CLOCK_SECONDS
        new = [child for child in children_now() if child.started_at >= started]
        ended = children.with_endings(new, self._context.namespace)
        lines = children.endings(ended)
        how = "; ".join(lines) or "%gpumem status lists them"
        without_line = sum(child.memory_bytes for child in ended if not child.ends_by)
        if lines and without_line >= _LEAST_SHARE_WITHOUT_LINE * left_bytes:
            how += f"{COMMENT}%gpumem status lists the rest"
        size = format_bytes(left_bytes)
        return f"child processes have {size} more than at its start; to end them: {how}"


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


def _growth(usages: Iterable[Usage]) -> int:
    return sum(usage.delta_bytes for usage in usages if usage.device == "cpu")
