"""Opens and ends nested experiments, tracks the names that running code binds in their scopes, and
frees their memory.

A scope owns the names that its own cells bind. Its cells run in the thread that opened it, because
each subshell runs its cells in its own thread, over the same names. On an engine of a cluster its
cells come from one client.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import get_ident, main_thread
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from ipygpumem import interrupts
from ipygpumem.errors import ExperimentError, describe_error, quoted
from ipygpumem.failures import Block, is_own_failure, say, tell
from ipygpumem.fitting import budgets
from ipygpumem.heap.garbage import GcMark
from ipygpumem.heap.walk import ArraySearch
from ipygpumem.introspect import is_atom, is_instance, named_objects, text_of, type_name
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.probes import outside
from ipygpumem.probes.host import RamFigures, allocated_bytes
from ipygpumem.reclaim import reclaim
from ipygpumem.reclaim.reclaim import steps_that_free
from ipygpumem.records import CellRecord, ExperimentRecord, FreeingStep, RetainedArray, Usage
from ipygpumem.report import content
from ipygpumem.report.layout import Report, clean_name, note
from ipygpumem.scope.bindings import Bindings, bindings_of
from ipygpumem.scope.instrumenting import (
    BINDING_WORDS,
    HAS_ENDED,
    MAY_BIND,
    BindingRecorder,
    instrument,
    split_event,
)
from ipygpumem.scope.scope import Scope, is_ownable, note_event, settle
from ipygpumem.scope.seeding import Seeder, is_seed
from ipygpumem.shell.cell import HISTORY_LENGTH, Cell, SeenCode
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import Part
from ipygpumem.shell.ipython.caches import Outputs, last_error
from ipygpumem.shell.ipython.rewriting import our_magic
from ipygpumem.shell.ipython.sources import has_subshells, is_in_cell
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.subscribers import Subscribers
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.shell.survivors import Survivors, WatchedName

Parameters = dict[str, int | float | str]

PARAMETER = re.compile(r"[^\W\d][\w.-]{0,79}")
_CLOCK_SECONDS = 0.02
"""Error of the times at which processes start."""
_MOST_GROWN = 5
"""Maximum number of grown containers to name."""
_ATTEMPTS = 5
"""Maximum number of attempts to end an experiment: finalisers may raise, or a Ctrl-C may interrupt,
each of them.
"""
_NOT_BOUND = object()
"""Stands for the object of a name that does not exist."""
_MEASURES_LINES = re.compile(r"^%%memlines", re.MULTILINE)
"""Matches cells that are not instrumented: it would skew line costs."""


class ExperimentManager:
    """Manages the experiments of one shell, and observes the code that runs in their scopes."""

    observed_for = "the open experiments"

    def __init__(self, context: ShellContext, recovery: Recovery, subscribers: Subscribers) -> None:
        self.context = context
        self.recovery = recovery
        self._cells = context.cells
        self._subscribers = subscribers
        self.open: list[Experiment] = []
        self.finished: deque[ExperimentRecord] = deque(maxlen=HISTORY_LENGTH)
        self.binding_recorder = BindingRecorder(self._record_binding)
        self.clock = itertools.count()
        """Orders the objects that scopes save, because scopes of several threads may shadow the
        same names.
        """
        self._missed: list[Cell] = []
        """Stand-ins for the running cells whose start no hook has seen, while experiments are open.
        """
        self._last_oom, self._counted = 0, list[Experiment]()
        """Identity of an out-of-memory error, and the experiments that have counted it."""
        recovery.on_oom = self._ran_out_of_memory

    @functools.cached_property
    def survivors(self) -> Survivors:
        """Objects that outlived their experiments."""
        from ipygpumem.shell.survivors import Survivors  # loading the extension must stay fast

        return Survivors(
            self.context, lambda: [(item.name, item.scope.waiting) for item in self.open], ours=self
        )

    def here(self, like: Experiment | None = None) -> list[Experiment]:
        """Return the open experiments around the calling code, or around ``like``,
        innermost last.
        """
        if not self.open:
            return []
        thread, client = (
            (like.thread, like.client) if like else (get_ident(), client_of(self.context.shell))
        )
        return [one for one in self.open if one.thread == thread and one.client == client]

    def saved_elsewhere(self, thread: int, client: str | None) -> list[dict[str, Any]]:
        """Return the objects that are saved by the open scopes of other threads, one mapping for
        each scope.
        """
        elsewhere = [one for one in self.open if one.thread != thread or one.client != client]
        return [experiment.scope.waiting for experiment in elsewhere]

    def _ran_out_of_memory(self, error: BaseException, leaving: object) -> None:
        """Count ``error`` once for each experiment around it; it is reported again as it leaves
        each of them.
        """
        counted = self._counted if id(error) == self._last_oom else []
        if counted and (leaving is None or leaving in counted):
            return
        self._last_oom, self._counted = id(error), self.here()
        for experiment in self._counted:
            experiment.ooms += 1

    def ran_out_in_try(self, error: BaseException) -> None:
        """Count an out-of-memory error of an autofit try for the open experiments, unless it was
        counted before.
        """
        self.recovery.saw(error)
        self._counted = []  # the next try's error may reuse this one's identity

    # -- code ------------------------------------------------------------------------------------

    def _record_binding(self, event: str) -> bool:
        """Record an event of instrumented code; return True if it need not be reported again."""
        scopes = [experiment.scope for experiment in self.here()]
        if not self.open:
            return True  # until one opens
        if not scopes:
            self._record_outside(event)
            return False
        needs_no_repetition = note_event(scopes, event)
        # Another thread's code looks up the same events, and its bindings must be seen.
        return needs_no_repetition and not self._cells.of_others(get_ident())

    def _record_outside(self, event: str) -> None:
        """Leave a name to a cell that binds it outside all scopes, while scopes of other threads
        are open.
        """
        word, name = split_event(event)
        running = self._cells.running()
        before = running[-1].maybe_bound if running else {}
        now = self.context.namespace.get(name, _NOT_BOUND)
        if word == MAY_BIND:
            before[name] = now
            return
        is_bound = word in BINDING_WORDS
        if word == HAS_ENDED and name in before:
            is_bound = now is not before[name]
        before.pop(name, None)
        if is_bound:
            for experiment in self.open:
                experiment.scope.leave(name)
            # the scopes' code may bind the name again, and must report that
            self.binding_recorder.forget()

    def event_missed(self, event: str) -> bool:
        """Keep all names that the running code may bind, because one of its events could not be
        recorded.
        """
        for experiment in self.here()[-1:]:
            experiment.scope.missed(event)
        return False

    def code_missed(self, *_: object, **__: object) -> None:
        """Prepare the scopes for code that could not be analysed and may bind any name."""
        running = self._cells.running()
        if running:
            running[-1].has_unseen_code = True
        elif self.open:
            self._missed_cell()
        for experiment in self.here()[-1:]:
            experiment.scope.save_all()

    def _missed_cell(self) -> Cell:
        """Return a stand-in for this thread's cell, whose start no hook has seen."""
        thread = get_ident()
        for earlier in self._missed:
            if earlier.thread == thread:
                return earlier
        cell = Cell(None, nested=False, thread=thread)
        self._note_names(cell)
        self._missed.append(cell)
        return cell

    def missed_cells_end(self, thread: int) -> None:
        """Leave to the notebook the names that missed cells of ``thread`` have added: their code is
        in no scope.
        """
        ended = [cell for cell in self._missed if cell.thread == thread]
        self._missed = [cell for cell in self._missed if cell.thread != thread]
        for cell in ended:
            for experiment in self.open:
                if experiment.thread == thread:
                    experiment.scope.leave_to_others(self._appeared(cell), ())
                else:
                    self._leave_to(cell, experiment)
            settle([experiment.scope for experiment in self.open if experiment.thread == thread])

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Prepare the scopes for code that runs next in the innermost running cell.

        Args:
            tree: its syntax tree.
            may_change: no other transformer changes the tree after us.
            is_timed: run by %timeit: its names never reach the notebook, and it must not be slowed
                down.
        """
        running, here = self._cells.running(), self.here()
        if not running:
            self._code_without_cell(tree, here)
            return
        cell = running[-1]
        if is_timed:
            for experiment in here:
                experiment.scope.share(bindings_of(tree).shared)
            return
        opens = our_magic(tree.body[0]) == "experiment" if getattr(tree, "body", None) else False
        reported = frozenset[str]()
        if may_change:
            reported = self._instrument(
                tree, here, text_of(getattr(cell.info, "raw_cell", None)), opens=opens
            )
        code = SeenCode(tree, reported)
        cell.code.append(code)
        if here:
            bindings = code.bindings()
            for experiment in here:
                experiment.scope.share(bindings.shared)
            if may_change:
                here[-1].scope.unsave(cell.saved_early)
            # With %%experiment as the first line, the rest of the cell runs in a new scope.
            saved = [] if opens else self._expect(here[-1].scope, bindings, reported)
            cell.saved_early = [] if may_change else saved

    def _code_without_cell(self, tree: Any, here: list[Experiment]) -> None:
        """Prepare the scopes for a front-end's silent request, or for a cell whose start was
        missed.
        """
        if not is_in_cell():
            for experiment in self.open:
                if experiment not in here:
                    experiment.scope.share(bindings_of(tree).bound)
            return
        self.code_missed()
        if self.open and not here:  # another thread's scopes leave these names to this code
            self._missed_cell().code.append(SeenCode(tree, frozenset()))

    def _instrument(
        self, tree: Any, here: list[Experiment], source: str, *, opens: bool
    ) -> frozenset[str]:
        """Instrument a cell's code to report bindings that a scope may need, and return their
        names.
        """
        may_open_later = "experiment" in (source.lstrip().partition("\n")[2] if opens else source)
        # A scope may open in another thread while this cell runs: then the scope leaves it the
        # names that it binds.
        may_matter = opens or self.open or may_open_later or self._cells.in_several_threads
        if not may_matter or _MEASURES_LINES.search(source):
            return frozenset()
        found = bindings_of(tree)
        names = (found.bound | found.deleted) - found.shared
        # Another thread's cell may bind a name that is new here before this code binds it.
        in_one_thread = not (self._cells.in_several_threads or has_subshells())
        only_here = in_one_thread and len(here) == len(self.open)
        if opens and not may_open_later and only_here:
            names &= self.context.namespace.keys()  # names not bound yet will belong to the scope
        elif here and not may_open_later and only_here:
            names = here[-1].scope.to_report(names)
        names |= found.imported - found.shared
        if names:
            instrument(tree, frozenset(names))
        return frozenset(names)

    def _expect(self, scope: Scope, bindings: Bindings, reported: frozenset[str]) -> list[str]:
        """Prepare ``scope`` for code; return the names saved because the code does
        not report them.
        """
        self.binding_recorder.forget()
        scope.note(bindings, reported)
        return scope.save(bindings.bound.difference(reported))

    def _expect_running_code(self, experiment: Experiment) -> None:
        """Prepare the scope that becomes the innermost for names that the running code may bind."""
        self.binding_recorder.forget()
        for code in [code for cell in self._cells.running(experiment.thread) for code in cell.code]:
            bindings = code.bindings()
            experiment.scope.share(bindings.shared)
            self._expect(experiment.scope, bindings, code.reported)

    def _note_names(self, cell: Cell) -> None:
        if cell.names_before is None:
            cell.names_before = set(self.context.namespace)

    def _appeared(self, cell: Cell) -> set[str]:
        """Return the names that have appeared since the cell, or a scope of another
        thread, began.
        """
        if cell.names_before is None:
            return set()
        return self.context.namespace.keys() - cell.names_before

    def _leave_to(self, cell: Cell, experiment: Experiment) -> None:
        """Exclude the cell's names from another thread's scope."""
        bound = set[str]()
        for code in cell.code:
            bound |= code.bindings().bound - code.reported
        experiment.scope.leave_to_others(bound, self._appeared(cell))

    # -- cells -----------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Start tracking names, and seed the generators of experiments with a seed."""
        for experiment in self.overdue():
            self.give_up(experiment)  # nothing requests its end again: no name is deleted
        if not cell.nested:
            self.missed_cells_end(cell.thread)
        if self.open:
            # this cell's events are not those of the cells that run already
            self.binding_recorder.forget()
        here = self.here()
        if len(here) < len(self.open):  # names that appear may be the cell's
            self._note_names(cell)
        for experiment in self.open:  # a user's callback may have failed between two cells
            experiment.saw_error(cell.last_error)
        if not cell.nested:
            self._counted = []
            for experiment in here:
                cell.experiment = experiment.name
                experiment.reseed()

    def code_ended(self, cell: Cell) -> None:
        """Update the scopes' names and outputs after the cell's code."""
        cell.in_scope = bool(self.open)
        if not self.open:
            return
        here = self.here()
        for experiment in here:
            experiment.failed |= cell.failed
            experiment.span_seconds = experiment.elapsed_seconds
        if here:
            cell.experiment = here[-1].name
        self.binding_recorder.forget()
        for experiment in self.open:
            if experiment not in here:
                self._leave_to(cell, experiment)
                if cell.number is not None:
                    experiment.outputs.leave_to_others(experiment.outputs_at_start, cell.number)
        if here and not self._cells.running():
            settle([experiment.scope for experiment in here])
        for experiment in self.open:
            experiment.outputs.settle(experiment.outputs_at_start)

    def free_memory(self, cell: Cell) -> None:
        """End the experiments that end with the cell."""
        parts: list[Part] = []
        for experiment in reversed(cell.ending):
            end = functools.partial(self._end_of_cell, experiment, cell.ended)
            parts.append((end, f"experiment {quoted(experiment.name)} ends later"))
        self.context.guard.each("the end of an experiment", *parts)

    def overdue(self) -> list[Experiment]:
        """Return open experiments whose cells have ended, except those ending now in a finaliser or
        another thread.
        """
        return [
            one for one in self.open if one.cell is not None and one.cell.over and not one.is_ending
        ]

    def shown(self) -> None:
        """End experiments whose cells ended without ending them."""
        for experiment in self.overdue():
            ended: list[Experiment] = []
            self._end_of_cell(experiment, ended)
            self.context.display.show(self._publish(ended))

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Add the cell to its experiments, and publish those that ended with it."""
        around = [] if cell.nested else self.here()  # a nested cell is part of one of their cells
        if cell.record is not None and cell.in_scope:
            for experiment in (*around, *cell.ended):
                experiment.add_cell(cell.record)
        return self._publish(cell.ended) if cell.ended else ()

    # -- begin and end ---------------------------------------------------------------------------

    def begin(self, experiment: Experiment) -> None:
        """Open ``experiment`` inside the open experiments."""
        for other in self.here():
            if other.name == experiment.name and not other.ends_by_itself:
                self.finish(other)
                break
        try:
            with interrupts.reraise_swallowed():
                experiment.enter()
                self.open.append(experiment)
                self._expect_running_code(experiment)
                running = self._cells.running()
                # in other threads, functions run
                is_silent = not running and experiment.thread == main_thread().ident
                if is_silent or any(cell.has_unseen_code or not cell.code for cell in running):
                    experiment.scope.save_all()
                for cell in self._cells.of_others(experiment.thread):
                    self._note_names(cell)
                experiment.reseed()
        except BaseException:  # an interrupt, too: a half-open experiment would never end
            if experiment in self.open:
                self.open.remove(experiment)
            experiment.abandon()
            raise

    def end_with_cell(self, experiment: Experiment) -> None:
        """End ``experiment`` when the running cell ends."""
        running, missed = self._cells.running(), self._cells.missed
        is_missed = missed is not None and not (running and running[-1].info is missed)
        if is_missed or (not running and is_in_cell()):
            raise RuntimeError("the start of this cell was missed, so its end would be missed too")
        if not running:
            raise ExperimentError(
                "%%experiment must be the first line of a cell that you run yourself; here use "
                "%experiment start"
            )
        experiment.cell, experiment.ends_by_itself = running[-1], True
        running[-1].ending.append(experiment)

    def finish(self, experiment: Experiment) -> ExperimentRecord:
        """End ``experiment`` and all inside it, show the reports, and return the record."""
        if experiment.record is None or experiment in self.open:
            self.context.display.show(self.close_experiment(experiment))
            self._subscribers.shown()
        assert experiment.record is not None
        return experiment.record

    def close_experiment(self, experiment: Experiment) -> list[Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[Experiment] = []
        try:
            self._end(experiment, ended)
        finally:  # inner ones have ended, even if an interrupt keeps this one open
            reports = self._publish(ended)
        return reports

    def _end_of_cell(self, experiment: Experiment, ended: list[Experiment]) -> None:
        if experiment in self.open and not experiment.is_ending:
            self._end(experiment, ended)

    def _end(self, experiment: Experiment, ended: list[Experiment]) -> None:
        """End ``experiment`` and all inside it, and append each to ``ended``.

        Only a signal's exception leaves it open, such as a Ctrl-C, and only if the user can end it
        again.
        """
        self._check_can_end(experiment)
        struck: list[BaseException] = []
        for _ in range(_ATTEMPTS):  # each continues where the previous one stopped
            if experiment not in self.open:
                break
            try:
                self._try_to_end(experiment, ended)
            except BaseException as error:
                if interrupts.is_from_signal(error):
                    experiment.is_ending = False
                    if not experiment.ends_by_itself:
                        raise self._still_open(experiment, error) from None
                    struck.append(error)
                elif isinstance(error, Exception):
                    lost = f"the end of experiment {quoted(experiment.name)} is not complete"
                    self.context.guard.failed("the end of an experiment", error, lost)
                    self.context.guard.each("names", (self.code_missed, "its names may stay"))
                else:
                    raise
        self.give_up(experiment)
        if struck:
            raise struck.pop()

    def _check_can_end(self, experiment: Experiment) -> None:
        """Raise an error if ``experiment`` is not open, or if it or one inside it is
        being ended.
        """
        if experiment not in self.open:
            raise ExperimentError(
                f"experiment {quoted(experiment.name)} is not open: it was never started, or "
                f"ipygpumem was unloaded"
            )
        nested = self.here(experiment)
        if any(one.is_ending for one in nested[nested.index(experiment) :]):
            raise ExperimentError(f"experiment {quoted(experiment.name)} is already ending")

    def _still_open(self, experiment: Experiment, error: BaseException) -> BaseException:
        """Return the signal's exception that stopped an end, and tell the user how to end the
        experiment.
        """
        text = (
            f"the experiment {clean_name(experiment.name)} is still open: run %experiment end again"
        )
        if type(error) is KeyboardInterrupt:
            return KeyboardInterrupt(text)
        say(text)
        return error

    def _try_to_end(self, experiment: Experiment, ended: list[Experiment]) -> None:
        """End ``experiment`` and all inside it; call it again after an interrupt."""
        around = self.here(experiment)
        other_scopes = [other.scope for other in self.open if other not in around]
        while around[-1] is not experiment:
            self._end(around.pop(), ended)
        enclosing = around[-2] if len(around) > 1 else None
        self.binding_recorder.forget()
        self.missed_cells_end(experiment.thread)
        for cell in (*self._cells.of_others(experiment.thread), *self._missed):
            self._leave_to(cell, experiment)
        experiment.saw_error(last_error())
        if experiment.record is None:
            try:
                experiment.is_ending = True
                with interrupts.reraise_swallowed():
                    experiment.leave(enclosing.scope if enclosing else None, other_scopes)
            finally:
                experiment.is_ending = False
        ended.append(experiment)
        # It need not be the last one: finalisers and threads run during an end, and may unload the
        # extension.
        self.open[:] = [one for one in self.open if one is not experiment]
        if enclosing is not None:
            self._expect_running_code(enclosing)

    def give_up(self, experiment: Experiment) -> None:
        """Close an experiment that cannot be ended: restore overwritten names, delete none."""
        if experiment not in self.open:
            return
        self.open[:] = [one for one in self.open if one is not experiment]
        experiment.record = experiment.record or experiment.bare_record()
        name = f"experiment {quoted(experiment.name)}"
        self.context.guard.each(
            "the end of an experiment",
            (lambda: say(f"{name} could not be ended; its names are kept."), "its names are kept"),
            (
                lambda: experiment.scope.restore_all(),
                f"names that {name} has overwritten keep their new values",
            ),
            (lambda: experiment.abandon(), f"the measurement of {name} was not ended"),
        )

    def _publish(self, ended: list[Experiment]) -> list[Report]:
        """Store the records of finished experiments, and return their reports."""
        reports: list[Report] = []
        for experiment in ended:
            if (record := experiment.record) is not None:
                self.finished.append(record)
                self._subscribers.add(record)
                style = experiment.report or self.context.config.experiment_report
                reports += content.experiment_reports(record, style, self.context.display.scales)
                if style == "none":
                    lines = [
                        f"experiment {record.name}: {line}"
                        for line in record.notes
                        if line.startswith("keep: ")
                    ]
                    reports += map(note, lines)
        return reports

    def close(self) -> None:
        """Stop measuring the open experiments; their names are kept."""
        for experiment in self.open:
            if not experiment.is_ending:
                experiment.abandon()
        self.open.clear()


class Experiment(Block):
    """A scope over the notebook's names, opened by ``start`` (or ``with``) and closed by
    ``finish``.

    Created by the magics and by ``ipygpumem.experiment``, which documents the arguments. ``record``
    is set once it is finished.
    """

    _block_name = "an experiment"
    _lost_at_start = "it runs without this scope"
    _lost_at_end = "the experiment's report may be missing"
    _is_told_again = True

    def __init__(
        self,
        experiments: ExperimentManager,
        name: str,
        keep: str | Iterable[str] = (),
        drop_imports: bool = False,
        seed: int | None = None,
        report: str | None = None,
        note: Mapping[str, int | float | str] | None = None,
        budget: Mapping[str, int | str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name.strip() or len(name.splitlines()) > 1:
            raise ExperimentError("an experiment needs a name: one line of text")
        self._experiments, self._context = experiments, experiments.context
        self.name = name
        self._keep: list[str] = []
        self.keep(*(keep if isinstance(keep, Iterable) and not isinstance(keep, str) else [keep]))
        self._drop_imports = drop_imports
        if seed is not None and not is_seed(seed):
            raise ExperimentError("seed must be a whole number that fits into 64 bits")
        self._seeder = Seeder(seed) if seed is not None else None
        if report is not None and not (
            type(report) is str and report in ("full", "compact", "none")
        ):
            raise ExperimentError(f"report={quoted(report)}: write 'full', 'compact' or 'none'")
        self.report = report
        self._parameters = checked_parameters(note or {})
        self.budget = (
            budgets.Budget(budgets.checked(budget), f"experiment {name}") if budget else None
        )
        self.outputs = Outputs(self._context.shell)
        self.record: ExperimentRecord | None = None
        self.was_started = self.failed = False
        self._is_unscoped = False
        """True if it could not be started: its code runs without a scope."""
        self._started, self._started_at = perf_counter(), time()
        self.is_ending = False
        """True while it is being ended: no other caller may end it then."""
        self.error_at_start = self.seen_error = self.ooms = 0
        self.thread = get_ident()
        """The thread that started it, whose cells belong to it."""
        self.cell: Cell | None = None
        """The cell whose end ends it, if any."""
        self.ends_by_itself = False
        """True if a cell or ``with`` block ends it: its end is requested only once, so it must not
        stay open.
        """
        self.client: str | None = None
        """On an engine of a cluster, the only client whose cells belong to it."""
        self.remarks: list[str] = []
        self._cells: list[CellRecord] = []
        self._seconds_here = 0.0
        """Seconds in the cell that ends it, which is not among its cells until it ends."""
        self.span_seconds = 0.0
        """Seconds from its start to the end of the last cell so far."""
        self._limits = contextlib.ExitStack()
        """Ends the seeding and the budget."""
        self._steps: list[FreeingStep] = []
        self._at_end: tuple[Usage, ...] | None = None
        """Usage when its end was requested."""
        self._waiting: list[RetainedArray] = []
        self.slip = ""
        """Report line about a misspelt name in ``keep``."""
        self._own: list[str] | None = None
        """Its names when its end began."""
        self._survivors: tuple[RetainedArray, ...] = ()
        self._is_closed = self._is_freed = False
        """True once its names are deleted, restored or kept; and once their memory is freed."""
        self._names_by_object = dict[int, str]()
        """Its names by the identities of their objects."""
        self._usages = tuple[Usage, ...]()
        """Usage once its memory is freed, before our search for the rest takes memory of its own.
        """
        self._watched: list[WatchedName] | None = None
        """The arrays of its names; None if memory was too short to list them."""

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return tuple(self._cells)

    @property
    def is_open(self) -> bool:
        """True if it was started, and neither finished nor abandoned when the extension was
        unloaded.
        """
        return self in self._experiments.open

    def start(self) -> Experiment:
        """Open the scope here, and return the experiment.

        Raises:
            ExperimentError: it was started before.
        """
        try:
            self._open()
        except BaseException as error:
            if interrupts.is_from_signal(error):
                interrupts.stop_listening()
            if not is_own_failure(error):
                raise
            self._is_unscoped = True
            tell(f"the start of {self._block_name}", error, self._lost_at_start, asked=True)
        return self

    def _open(self) -> None:
        if self.was_started:
            raise ExperimentError(
                f"experiment {quoted(self.name)} was already started: create a new one"
            )
        self._experiments.begin(self)

    def keep(self, *patterns: str) -> None:
        """Keep these names or globs at the end too."""
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ExperimentError(
                "keep must be a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']"
            )
        self._keep += patterns

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if
        it is finished.
        """
        if self._is_unscoped:
            return ()
        if not self.was_started:
            raise ExperimentError(f"experiment {quoted(self.name)} has not been started")
        if self.record is not None:
            return self.record.usages
        try:
            return self._context.meter.read(self._measurement)
        except Exception as error:
            if not is_own_failure(error):
                raise
            tell("the measurement of an experiment", error, "its usage is unknown")
            return ()

    def finish(self) -> ExperimentRecord:
        """End the experiment (and the ones inside it), show its report and return its record.

        A finished experiment returns its record again. If an interrupt stops the end half-way, the
        experiment stays open and ``finish`` can be called again.

        Raises:
            ExperimentError: it was never started, or the extension was unloaded before.
        """
        if self._is_unscoped:
            return self._unscoped_record()
        try:
            return self._experiments.finish(self)
        except BaseException as error:
            if interrupts.is_from_signal(error):
                interrupts.stop_listening()
            if not is_own_failure(error):
                raise
            tell(f"the end of {self._block_name}", error, self._lost_at_end)
            self._end_again()
            return self.record or self.bare_record()

    def _open_block(self) -> Experiment:
        """Open the scope at the start of a ``with`` block."""
        self.ends_by_itself = True
        self._open()
        return self

    def _after_failed_start(self) -> Experiment:
        """Return the experiment whose start has failed: its block runs without a scope."""
        self._is_unscoped = True
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """End the experiment at the end of its ``with`` block."""
        if self._is_unscoped:
            self._unscoped_record()
            return
        parts: list[Part] = [
            (self._saw_failure, "memory that its error holds is freed at the cell's end"),
            (lambda _: self._end_once(), self._lost_at_end),
            (
                lambda _: self._end_again(),
                "the experiment is still open",
            ),  # an interrupt may have come before it ended
        ]
        with interrupts.reraise_swallowed():
            self._context.guard.each_with((error,), f"the end of {self._block_name}", parts)

    def _after_failed_end(self) -> None:
        """End the experiment after a failure at the end of its ``with`` block."""
        self._end_again()

    def _saw_failure(self, error: BaseException | None) -> None:
        """Free the memory held by an error that leaves the block."""
        if error is None or isinstance(error, GeneratorExit):  # closing a generator is no failure
            return
        if self.is_open:
            self.failed = True
            if remark := self._experiments.recovery.failed_inside(error, self):
                self.remarks.append(remark)

    def _end_once(self) -> None:
        """End the experiment, unless the extension was unloaded inside its block, which has been
        said.
        """
        if self.record is None and self.is_open:
            self._experiments.finish(self)

    def _end_again(self) -> None:
        """End the experiment if it is still open; if that fails, keep its names."""
        if self not in self._experiments.open or self.is_ending:
            return
        parts: list[Part] = [
            (self._end_once, self._lost_at_end),
            (lambda: self._experiments.give_up(self), "the experiment is still open"),
        ]
        self._context.guard.each(f"the end of {self._block_name}", *parts)

    # -- open ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Open the scope and start measuring; if this fails, ``abandon`` undoes it."""
        context = self._context
        self.thread, self.client = get_ident(), client_of(context.shell)
        self.error_at_start = self.seen_error = last_error()
        if self._seeder is not None:
            self._limits.callback(self._seeder.remove)
        self._started, self._started_at = perf_counter(), time()
        self.scope = Scope(
            context.namespace,
            keep=self._keep,
            drop_imports=self._drop_imports,
            clock=self._experiments.clock,
            saved_by_others=functools.partial(
                self._experiments.saved_elsewhere, self.thread, self.client
            ),
        )
        self.was_started = True
        self.outputs_at_start = self.outputs.mark()
        with growth_for("the list of what is there before an experiment"):
            self._baseline = self._experiments.survivors.baseline(self.remarks, self.scope.first)
        if self.budget is not None:
            self._limits.callback(self.budget.stop)  # before an interrupt can come between
            self.budget.start()
        self._allocated_at_start = allocated_bytes()
        self._ram_at_start = self._ram_at_end = RamFigures.now()
        self._measurement = context.meter.start()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._started

    def seconds_here(self) -> float:
        """Return the seconds spent in the running cell; 0 between cells."""
        running = self._context.cells.running(self.thread)[:1]
        return sum(perf_counter() - max(cell.started, self._started) for cell in running)

    def seconds(self, here: float) -> float:
        """Return the sum of its cells' durations, plus ``here`` of a cell not among them yet."""
        return sum(cell.duration_seconds for cell in self._cells) + here

    def reseed(self) -> None:
        """Seed the random generators if the experiment has a seed; libraries imported later are
        seeded on import.
        """
        if self._seeder is not None:
            self._seeder.seed_all()

    def add_cell(self, cell: CellRecord) -> None:
        """Add a finished cell, including the one that ends the experiment."""
        self._cells.append(cell)
        if self.record is not None:
            seconds = self.seconds(self._seconds_here)
            span = max(seconds, self.span_seconds)  # its first cell may have begun before it
            self.record = replace(
                self.record, cells=self.cells, duration_seconds=seconds, span_seconds=span
            )

    def waiting(self) -> list[RetainedArray]:
        """Return the arrays held by the objects to be restored."""
        search = ArraySearch()
        entries = [search.held(name, value) for name, value in list(self.scope.waiting.items())]
        return [entry[0] for entry in entries if entry is not None]

    def saw_error(self, identity: int) -> None:
        """Record the identity of the last error shown; a new one marks the experiment as failed.

        Call it often enough that at most one error is shown between two calls: an error is created
        while the previous one is alive, but a later one may reuse that identity.
        """
        self.failed |= identity != self.seen_error
        self.seen_error = identity

    def abandon(self) -> None:
        """Stop measuring and keep the names, because the extension is unloaded or the start or end
        failed.
        """
        parts: list[Part] = [(self._limits.close, "its budget may still limit torch")]
        if hasattr(self, "_measurement"):
            drop = functools.partial(self._context.meter.drop, self._measurement)
            parts.append((drop, "its measurement was not ended"))
        if self.was_started:
            parts.append((self.scope.waiting.clear, "objects that it has overwritten stay alive"))
        if hasattr(self, "_baseline"):
            parts.append((self._baseline.forget, "its list of older objects stays in memory"))
        self._context.guard.each("the end of an experiment", *parts)

    # -- its end ---------------------------------------------------------------------------------

    def leave(self, enclosing: Scope | None, other_scopes: Sequence[Scope]) -> None:
        """Free everything and create the record; call it again after an interrupt.

        Args:
            enclosing: the scope around this one.
            other_scopes: the open scopes of other threads.
        """
        self._seconds_here = 0.0 if self.cell is not None else self.seconds_here()
        if self._seconds_here or not self.span_seconds:
            self.span_seconds = self.elapsed_seconds
        self._own = None  # stale after an interrupt
        parts: list[Part] = []
        if self._at_end is None:
            parts.append((self._find_slip, "misspelt names to keep were not found"))
            parts.append((self._look, "the memory before the end was not measured"))
        parts += [
            (self._limits.close, "its budget may still limit torch"),
            (lambda: self._free(enclosing, other_scopes), "its memory was not freed"),
            (self._measure, "its memory was not measured"),
            (self._find_survivors, "objects still alive were not looked for"),
            (self._make_record, "its record has no measurements"),
        ]
        self._context.guard.each("the end of an experiment", *parts)
        if not self._is_closed:
            raise RuntimeError("its names could not be deleted")
        if self.record is None:
            self.record = self.bare_record()
            self._context.meter.drop(self._measurement)
        self._baseline.forget()
        self._watched = None  # drop its weak references to arrays

    def _find_slip(self) -> None:
        """Keep all names if a name in ``keep`` is misspelt: it may mean the trained model."""
        slips = self.scope.misspelt_keep()
        if slips:
            import difflib  # takes long

            (*close,) = difflib.get_close_matches(slips[0], self.scope.own_names(), 1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self.slip = (
                f"keep: no name matches {quoted(slips[0])}{meant}: nothing was deleted, all names "
                f"are kept"
            )
            self._keep[:] = [*(pattern for pattern in self._keep if pattern != slips[0]), "*"]

    def _look(self) -> None:
        """Record usage, names and arrays before anything is freed."""
        self._at_end = ()
        try:
            self._at_end = self._context.meter.settle(self._measurement)
            self._waiting = self.waiting()
            self._own = self.scope.own_names()
            self._watched = self._watch(self._own)
        except MemoryError:  # the names must be deleted all the more
            self.remarks.append("not enough memory to list everything that the experiment held")

    def _watch(self, own: list[str]) -> list[WatchedName]:
        """Watch the arrays held by the scope's names and outputs."""
        scope, search = self.scope, ArraySearch(self._baseline.was_there)
        namespace, outputs = self._context.namespace, self.outputs.since(self.outputs_at_start)
        values = ((name, namespace.get(name)) for name in scope.names_to_delete(own))
        named = [(name, value) for name, value in values if not is_atom(value)]
        named += [(f"Out[{key}]", value) for key, value in outputs.items()]
        self._names_by_object = {id(value): name for name, value in named}
        ours = set(own)
        for name, value in named_objects(namespace) if named else ():
            if is_ownable(name) and name not in ours:
                search.ignore(value)  # names bound in the notebook by ``global`` are no leak
        return self._experiments.survivors.watch(named, search)

    def _free(self, enclosing: Scope | None, other_scopes: Sequence[Scope]) -> None:
        """Delete names, outputs and tracebacks, then free their memory."""
        meter, context = self._context.meter, self._context

        def close() -> int:
            own, self._own = self._own, None  # stale after the first attempt
            if not self._is_closed:
                self.scope.close(
                    enclosing, own, is_handle=lambda value: value is self, other_scopes=other_scopes
                )
                self._is_closed = True
            outcome = self.scope.outcome
            return len(outcome.deleted) + len(outcome.restored) + len(outcome.kept)

        def run(*steps: reclaim.Step) -> None:
            reclaim.run_steps(meter, list(steps), self._steps)

        def close_again() -> None:
            if not self._is_closed:  # memory was too short; by now the tracebacks' memory is freed
                run(("names again", close))

        outputs = (
            "outputs",
            lambda: 0 if self.slip else self.outputs.forget_since(self.outputs_at_start),
        )
        is_measured = "the memory freed by deleting its names was not measured"
        context.guard.each(
            "the end of an experiment",
            (
                lambda: run(("names", close), outputs, ("tracebacks", self._release_tracebacks)),
                is_measured,
            ),
            (close_again, is_measured),
            (close, "its names are kept"),
            (
                lambda: run(*steps_that_free(context.garbage, self._since)),
                "garbage was not collected",
            ),
        )
        self._is_freed = True

    def _release_tracebacks(self) -> int:
        releases = self.failed and self._context.config.release_frames != "never"
        if releases:
            self._experiments.recovery.release_stored_tracebacks()
        return int(releases)

    def _since(self) -> GcMark | None:
        """Return the start mark if all garbage at the end must be newer, else None."""
        releases_older_error = self.failed and self.error_at_start != 0
        return None if releases_older_error else self._baseline.mark_if_nothing_lingers()

    def _measure(self) -> None:
        with contextlib.suppress(MemoryError):  # the record has the figures after the search, then
            self._ram_at_end = RamFigures.now()
            self._usages = self._context.meter.read(self._measurement)

    def _find_survivors(self) -> None:
        if self._watched is None:
            return
        from ipygpumem.shell.survivors import HostGrowth  # loading the extension must stay fast

        try:
            search = ArraySearch()
            namespace = self._context.namespace
            values = functools.partial(self._baseline.contents.unknown, namespace)
            keepers = (*self.scope.outcome.kept, *self.scope.shared())
            arrays = [array for name in keepers for _, array in search.find(namespace.get(name))]
            kept = {array.storage for array in arrays}
            grown = _growth(self._at_end or ())
            if grown >= self._context.config.min_held_bytes:  # before anything was freed
                grown = _growth(self._usages)
            if (
                "polars" in sys.modules
            ):  # its own allocator does not tell; pages that malloc returns may be older
                grown += sum(
                    step.freed.get("cpu", 0)
                    for step in self._steps
                    if step.name not in ("names", "garbage")
                )
            grown = max(grown, allocated_bytes() - self._allocated_at_start)
            grown -= sum(array.size_bytes for array in arrays if array.device == "cpu")
            self._survivors = self._experiments.survivors.of_experiment(
                self._watched,
                known=lambda item, array: (
                    array.storage in kept or self._baseline.was_there(item, array)
                ),
                kept=kept,
                keepers=keepers,
                baseline=self._baseline,
                growth=HostGrowth(grown, values, self._names_by_object, self.remarks),
                first_cell=min((cell.execution_count or 0 for cell in self._cells), default=None),
            )
        except Exception as error:  # everything has been freed: this only lists the rest
            if interrupts.is_from_signal(error):
                raise
            self.remarks.append(f"objects still alive could not be listed: {describe_error(error)}")

    def bare_record(self) -> ExperimentRecord:
        """Return a record without measurements."""
        seconds = perf_counter() - self._started
        return ExperimentRecord(
            self.name, self._started_at, seconds, (), (), {}, {}, (), (), (), ()
        )

    def _unscoped_record(self) -> ExperimentRecord:
        """Return its record without measurements, which the user's code may read after its end."""
        if self.record is None:
            self.record = self.bare_record()
        return self.record

    def _make_record(self) -> None:
        if not (self._is_freed and self._is_closed):
            return  # another attempt follows
        outcome, at_end, usages = (
            self.scope.outcome,
            self._at_end or (),
            self._context.meter.stop(self._measurement),
        )
        seconds, measured = (
            self.seconds(self._seconds_here) or self.span_seconds,
            self._usages or usages,
        )
        consumed = {usage.device: usage.delta_bytes for usage in at_end}
        self.record = ExperimentRecord(
            name=self.name,
            started_at=self._started_at,
            duration_seconds=seconds,
            cells=self.cells,
            usages=usages,
            consumed=consumed,
            # Unknown if memory was too short to measure its end.
            freed={
                item.device: consumed.get(item.device, 0) - item.delta_bytes
                for item in measured
                if at_end
            },
            deleted=tuple(outcome.deleted),
            restored=tuple(outcome.restored),
            kept=(*outcome.kept, *self.scope.shared()),
            survivors=self._survivors,
            steps=tuple(self._steps),
            notes=tuple(self._notes(measured)),
            parameters=dict(self._parameters),
            ooms=self.ooms,
            budget=dict(self.budget.limits) if self.budget is not None else {},
            span_seconds=max(seconds, self.span_seconds),
        )

    def _notes(self, usages: tuple[Usage, ...]) -> list[str]:
        notes = [self.slip] if self.slip else []
        notes += [
            f"keep: no name matches {quoted(name)}"
            for name in self.scope.unmatched_keep()
            if name != "*"
        ]
        size = sum(held.size_bytes for held in self._waiting)
        if size >= self._context.config.min_held_bytes:
            names = ", ".join(held.name for held in self._waiting)
            notes.append(
                f"the restored objects ({names}) took {format_bytes(size)} while the experiment ran"
            )
        kept = {usage.device: usage.delta_bytes for usage in usages}
        least = self._context.config.min_held_bytes
        if "polars" in sys.modules and kept.get("cpu", 0) >= least:
            notes.append("polars' allocator returns the pages of deleted frames within seconds")
        if kept.get("shm", 0) >= least and (left := self._context.meter.now()["shm"].note):
            notes.append(f"shared memory: {left}")
        if max(kept.get("cpu", 0), kept.get("children", 0)) >= least:
            notes += self._of_host(kept, least)
        if self.budget is not None:
            notes += [*self.budget.notes, *self.budget.refusals]
        notes += self.remarks
        return notes + [f"{step.name}: {step.error}" for step in self._steps if step.error]

    def _of_host(self, kept: Mapping[str, int], least: int) -> list[str]:
        """Return notes on RAM without a name, and on child processes, if at least so
        much was left.
        """
        from ipygpumem.inventory import children, leftover, remaining  # most experiments leave less

        notes, namespace = list[str](), self._context.namespace
        if kept.get("cpu", 0) >= least:
            grown = remaining.grown(
                namespace, self._baseline.contents, least, self._experiments.survivors.roots()
            )
            notes += [f"{path} grew by {format_bytes(size)}" for path, size in grown[:_MOST_GROWN]]
            values = self._baseline.contents.unknown(namespace)
            alive = sum(item.size_bytes for item in self._survivors if item.device == "cpu")
            of_grown = sum(size for _, size in grown)
            named = {
                "still alive": alive,
                "kept": leftover.ram_of(values),
                "in what grew": of_grown,
            }
            notes += leftover.unnamed(self._ram_at_start, self._ram_at_end, kept["cpu"], named)
        if kept.get("children", 0) >= least:
            new = [
                child
                for child in outside.children()
                if child.started_at >= self._started_at - _CLOCK_SECONDS
            ]
            lines = children.endings(children.with_endings(new, namespace))
            text = (
                f"child processes have {format_bytes(kept['children'])} more than at its start; to "
                f"end them: "
            )
            notes.append(text + ("; ".join(lines) or "%gpumem status lists them"))
        return notes


class UnscopedExperiment(Experiment):
    """Stands for an experiment that could not be created: its code runs without a scope."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.record = None
        self._cells = []
        self._started, self._started_at = perf_counter(), time()
        self._is_unscoped = True

    is_open = False

    def start(self) -> Experiment:
        """Return this object."""
        return self

    def keep(self, *patterns: str) -> None:
        """Do nothing: all names are kept."""

    def _open_block(self) -> Experiment:
        """Return this object."""
        return self


def _growth(usages: Iterable[Usage]) -> int:
    return sum(usage.delta_bytes for usage in usages if usage.device == "cpu")


def client_of(shell: Any) -> str | None:
    """Return the client whose code runs on this engine of a cluster; None in a kernel, which all
    front-ends share.
    """
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(kernel, "engine_id"):
        return None
    found: str | None = kernel.get_parent("shell").get("header", {}).get("session")
    return found


def checked_parameters(given: object) -> Parameters:
    """Return the parameters of ``note=`` as plain values that any file format can store."""
    if not is_instance(given, Mapping) and not is_instance(given, dict):
        raise ExperimentError(
            "note must be a dictionary of parameters: note={'lr': 1e-3, 'bs': 64}"
        )
    found: Parameters = {}
    for name, value in given.items():  # type: ignore[attr-defined]  # is_instance says so
        if not PARAMETER.fullmatch(text_of(name)):
            raise ExperimentError(
                f"note: a parameter's name must be one word of text, not a {type_name(name)}"
            )
        found[name] = _plain(name, value)
    return found


def _plain(name: str, value: object) -> int | float | str:
    if type(value) is bool:
        return str(value)
    if is_instance(value, int):
        number = int.__int__(value)  # type: ignore[arg-type]  # converts NumPy integers and enums
        if number.bit_length() > 63:
            raise ExperimentError(f"note: {name} is {quoted(number)}; write it as text")
        return number
    if is_instance(value, float):
        return plain_number(float.__float__(value))  # type: ignore[arg-type]
    if is_instance(value, str):
        return str.__str__(value)
    raise ExperimentError(
        f"note: {name} is a {type_name(value)}; a parameter is a number or text, so write str(...)"
    )


def plain_number(value: float) -> float | str:
    """Return a value that JSON can store: infinity and NaN become text."""
    return value if math.isfinite(value) else str(value)
