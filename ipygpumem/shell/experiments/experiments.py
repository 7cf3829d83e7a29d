"""Opens and ends nested experiments, each a scope over the notebook's names.

All ends of experiments pass through ``ExperimentManager._end``, which repeats the attempts that an
interrupt or our own failure has stopped, or through ``give_up``, which needs no attempt:

=====================  ============================  ============================================
end                    called by                     differs
=====================  ============================  ============================================
``end_experiments_of`` the end of a cell             the cell's report shows theirs
``cell_shown``         the same, once it is shown    for those that the call above has missed
``end_experiment``     ``%%autofit``, ``finish``     returns the reports
``finish``             ``%experiment end``, Python,  shows the reports, and returns the record
                       the end of a ``with`` block,
                       another start with its name
``give_up``            ``_end`` after all attempts,  restores overwritten names, deletes none
                       the begin of a later cell
``close``              unloading the extension       keeps all names, makes no record
=====================  ============================  ============================================

The steps of an end are in ``ending.py``. The object that a user holds (``experiment_handle.py``)
isolates our failures: its ``finish`` and its ``with`` block fall back to ``give_up``.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ipygpumem import interrupts
from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.failures import write_line
from ipygpumem.records import ExperimentRecord
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.layout import Report, note
from ipygpumem.report.words import clean_name
from ipygpumem.shell.cell import HISTORY_LENGTH, Cell
from ipygpumem.shell.code_observer import CodeObserver, OpenExperiments
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiments.ending import Surroundings
from ipygpumem.shell.experiments.managed_experiment import ManagedExperiment
from ipygpumem.shell.ipython.last_errors import last_error_id
from ipygpumem.shell.ipython.sources import is_in_cell
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.subscribers import Subscribers

if TYPE_CHECKING:
    from ipygpumem.shell.searches.survivors import Survivors

_ATTEMPTS = 5
"""Maximum number of attempts to end an experiment.

Finalisers may raise in each of them, or a Ctrl-C may interrupt it.
"""


class _OomCount:
    """Counts each out-of-memory error once for every experiment around it."""

    def __init__(self, open_experiments: OpenExperiments[ManagedExperiment]) -> None:
        self._open = open_experiments
        self._error_id = 0
        """Identity of the last error."""
        self._counted: list[ManagedExperiment] = []
        """The experiments that have counted it."""

    def count(self, error: BaseException, leaving: object) -> None:
        """Count an error in the open experiments, unless it is counted: it is seen again as it
        leaves each of them.

        Args:
            error: the out-of-memory error.
            leaving: the experiment whose ``with`` block it leaves; None at the end of a cell.
        """
        counted = self._counted if id(error) == self._error_id else []
        # If it leaves an experiment that has not counted it, it is another error with the identity
        # of the last one.
        is_same_error = leaving is None or leaving in counted
        if counted and is_same_error:
            return
        self._error_id = id(error)
        self._counted = self._open.here()
        for experiment in self._counted:
            experiment.log.ran_out_of_memory()

    def forget_error(self) -> None:
        """Count the next error in any case: it may reuse the identity of this one."""
        self._counted = []


class ExperimentManager:
    """Opens and ends the experiments of one shell.

    Attributes:
        open: the open experiments.
        finished: the records of the finished ones.
        code: observes the code that runs in their scopes.
        clock: orders the objects that scopes save, because scopes of several threads may shadow the
            same names.
    """

    observed_for = "the open experiments"

    def __init__(self, context: ShellContext, recovery: Recovery, subscribers: Subscribers) -> None:
        self.context = context
        self.recovery = recovery
        self._cells = context.cells
        self._subscribers = subscribers
        self.open: OpenExperiments[ManagedExperiment] = OpenExperiments(context.shell)
        self.finished: deque[ExperimentRecord] = deque(maxlen=HISTORY_LENGTH)
        self.code = CodeObserver(context, self.open)
        self.clock = itertools.count()
        self.ended_elsewhere: dict[str, tuple[int, str]] = {}
        """Names that ended without an experiment → their cell's number, and the remark if one is
        missed.
        """
        self._oom_count = _OomCount(self.open)
        recovery.on_oom = self._oom_count.count

    @functools.cached_property
    def survivors(self) -> Survivors:
        """Objects that outlived their experiments."""
        from ipygpumem.shell.searches.survivors import Survivors  # loading must stay fast

        return Survivors(self.context, self._saved_objects, ours=self)

    def _saved_objects(self) -> list[tuple[str, object]]:
        """Return the name of each open experiment, with the objects that it restores."""
        return [(experiment.name, experiment.scope.saved) for experiment in self.open]

    def here(self, like: ManagedExperiment | None = None) -> list[ManagedExperiment]:
        """Return the open experiments around the calling code, innermost last; with ``like``, those
        of the thread and client of that experiment.
        """
        return self.open.here(like)

    def ran_out_in_try(self, error: BaseException) -> None:
        """Count an out-of-memory error of an autofit try, unless it was counted in the try."""
        self.recovery.note_error(error)
        self._oom_count.forget_error()

    # -- cells -------------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Give up experiments that have missed their end, start tracking names, and seed the
        generators of experiments with a seed.
        """
        for experiment in self.overdue():
            self.give_up(experiment)  # nothing requests its end again: no name is deleted
        self.code.cell_begins(cell)
        if not cell.is_nested:
            self._oom_count.forget_error()
        if not self.open:
            return
        for experiment in self.open:  # a user's callback may have failed between two cells
            experiment.log.note_last_error(cell.errors.last_id_before)
        if cell.is_nested:
            return
        for experiment in self.here():
            cell.scopes.innermost = experiment.name
            experiment.measured_scope.reseed()

    def code_ended(self, cell: Cell) -> None:
        """Update the scopes' names and outputs after the cell's code."""
        cell.scopes.any_open = bool(self.open)
        if not self.open:
            return
        here = self.here()
        for experiment in here:
            experiment.log.code_ended(failed=cell.errors.failed)
        if here:
            cell.scopes.innermost = here[-1].name
        self.code.code_ended(cell)
        for experiment in self.open:
            if experiment not in here and cell.measurement.number is not None:
                experiment.measured_scope.leave_output(cell.measurement.number)
            experiment.measured_scope.drop_deleted_outputs()

    def end_experiments_of(self, cell: Cell) -> None:
        """End the experiments that end with the cell, innermost first."""
        steps: list[HookStep] = []
        for experiment in reversed(cell.scopes.ending):
            end = functools.partial(self._end_unless_ending, experiment, cell.scopes.ended)
            steps.append((end, f"experiment {quoted(experiment.name)} ends later"))
        self.context.isolation.run_all("the end of an experiment", *steps)

    def overdue(self) -> list[ManagedExperiment]:
        """Return the open experiments whose cells have ended without ending them; without those
        that a finaliser or another thread is ending now.
        """
        overdue = list[ManagedExperiment]()
        for experiment in self.open:
            is_cell_over = experiment.cell is not None and experiment.cell.is_over
            if is_cell_over and not experiment.is_ending:
                overdue.append(experiment)
        return overdue

    def cell_shown(self) -> None:
        """End experiments whose cells ended without ending them."""
        for experiment in self.overdue():
            ended: list[ManagedExperiment] = []
            self._end_unless_ending(experiment, ended)
            self.context.display.show(self._publish(ended))

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Add the cell to its experiments, and publish those that ended with it."""
        ended = cell.scopes.ended
        record = cell.measurement.record
        if record is not None and cell.scopes.any_open:
            # A nested cell is part of one of the cells of the experiments around it.
            around = [] if cell.is_nested else self.here()
            for experiment in (*around, *ended):
                experiment.add_cell(record)
        return self._publish(ended) if ended else ()

    # -- begin and end -----------------------------------------------------------------------------

    def begin(self, experiment: ManagedExperiment) -> None:
        """Open ``experiment`` inside the open experiments; first end an open one of its name."""
        for other in self.here():
            if other.name == experiment.name and not other.ends_by_itself:
                self.finish(other)
                break
        try:
            with interrupts.reraise_swallowed():
                experiment.enter(self.open, self.clock, self.survivors)
                self.open.append(experiment)
                self.code.scope_opened(experiment)
                experiment.measured_scope.reseed()
        except BaseException:  # an interrupt, too: a half-open experiment would never end
            if experiment in self.open:
                self.open.remove(experiment)
            experiment.abandon()
            raise

    def end_with_cell(self, experiment: ManagedExperiment) -> None:
        """Let the end of the running cell end ``experiment``.

        Raises:
            RuntimeError: our hook has missed the cell's start.
            ExperimentError: no cell is running.
        """
        running = self._cells.running()
        missed = self._cells.missed
        is_missed = missed is not None and not (running and running[-1].info is missed)
        is_unknown_cell = not running and is_in_cell()
        if is_missed or is_unknown_cell:
            raise RuntimeError("the start of this cell was missed, so its end would be missed too")
        if not running:
            raise ExperimentError(
                "%%experiment must be the first line of a cell that you run yourself; "
                "here use %experiment start"
            )
        experiment.ends_with(running[-1])
        running[-1].scopes.ending.append(experiment)

    def finish(self, experiment: ManagedExperiment) -> ExperimentRecord:
        """End ``experiment`` and all inside it, unless that was done, show the reports, and return
        the record.
        """
        if experiment.record is None or experiment in self.open:
            self.context.display.show(self.end_experiment(experiment))
            self._subscribers.deliver()
        assert experiment.record is not None
        return experiment.record

    def end_experiment(self, experiment: ManagedExperiment) -> list[Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[ManagedExperiment] = []
        try:
            self._end(experiment, ended)
        finally:  # inner ones have ended, even if an interrupt keeps this one open
            reports = self._publish(ended)
        return reports

    def _end_unless_ending(
        self, experiment: ManagedExperiment, ended: list[ManagedExperiment]
    ) -> None:
        """End an open ``experiment``, unless a finaliser or another thread is ending it."""
        if experiment in self.open and not experiment.is_ending:
            self._end(experiment, ended)

    def _end(self, experiment: ManagedExperiment, ended: list[ManagedExperiment]) -> None:
        """End ``experiment`` and all inside it, in several attempts if need be.

        Only a signal's exception leaves it open, such as a Ctrl-C, and only if the user can end it
        again.

        Args:
            experiment: the outermost one to end.
            ended: receives each experiment that has ended, innermost first.
        """
        self._check_can_end(experiment)
        signals: list[BaseException] = []
        for _ in range(_ATTEMPTS):  # each continues where the previous one stopped
            if experiment not in self.open:
                break
            try:
                self._try_to_end(experiment, ended)
            except BaseException as error:
                if interrupts.is_from_signal(error):
                    self._raise_if_user_can_end(experiment, error)
                    signals.append(error)
                elif isinstance(error, Exception):
                    self._report_incomplete(experiment, error)
                else:
                    raise
        self.give_up(experiment)
        if signals:
            raise signals.pop()

    def _raise_if_user_can_end(self, experiment: ManagedExperiment, error: BaseException) -> None:
        """Raise the signal's exception that stopped an end, if the user can end the experiment
        again. Else only note that it is not ending now: the caller attempts it again.
        """
        interrupts.forget_our_frames(error)
        experiment.is_ending = False
        if not experiment.ends_by_itself:
            raise self._tell_still_open(experiment, error) from None

    def _report_incomplete(self, experiment: ManagedExperiment, error: Exception) -> None:
        """Report that our own failure stopped an end. From now on, the running code may have bound
        any name.
        """
        lost = f"the end of experiment {quoted(experiment.name)} is not complete"
        self.context.isolation.failed("the end of an experiment", error, lost)
        self.context.isolation.run_all("names", (self.code.code_missed, "its names may stay"))

    def _check_can_end(self, experiment: ManagedExperiment) -> None:
        """Raise an error if ``experiment`` is not open, or is ending, or one inside it is."""
        name = quoted(experiment.name)
        if experiment not in self.open:
            raise ExperimentError(
                f"experiment {name} is not open: it was never started, or ipygpumem was unloaded"
            )
        open_here = self.here(experiment)
        to_end = open_here[open_here.index(experiment) :]
        if any(inner.is_ending for inner in to_end):
            raise ExperimentError(f"experiment {name} is already ending")

    def _tell_still_open(
        self, experiment: ManagedExperiment, error: BaseException
    ) -> BaseException:
        """Tell that a signal has stopped the end of an experiment, and how to end it; return the
        exception to raise.

        For a Ctrl-C, the exception's message says so. An exception of the user's own handler stays
        as it is, and a line is printed.
        """
        name = clean_name(experiment.name)
        text = f"the experiment {name} is still open: run %experiment end again"
        if type(error) is KeyboardInterrupt:
            return KeyboardInterrupt(text)
        write_line(text)
        return error

    def _try_to_end(self, experiment: ManagedExperiment, ended: list[ManagedExperiment]) -> None:
        """Make one attempt to end ``experiment`` and all inside it; another one continues where an
        interrupt has stopped it.
        """
        open_here = self.here(experiment)
        scopes_elsewhere = [other.scope for other in self.open if other not in open_here]
        while open_here[-1] is not experiment:
            self._end(open_here.pop(), ended)
        enclosing = open_here[-2] if len(open_here) > 1 else None
        self.code.scope_ends(experiment)
        experiment.log.note_last_error(last_error_id())
        if experiment.record is None:
            try:
                experiment.is_ending = True
                with interrupts.reraise_swallowed():
                    enclosing_scope = None if enclosing is None else enclosing.scope
                    surroundings = Surroundings(enclosing_scope, scopes_elsewhere)
                    experiment.clean_up(surroundings, self.survivors, self.recovery)
            finally:
                experiment.is_ending = False
        ended.append(experiment)
        # It need not be the last one: finalisers and threads run during an end.
        self.open[:] = [other for other in self.open if other is not experiment]
        if enclosing is not None:
            self.code.becomes_innermost(enclosing)

    def give_up(self, experiment: ManagedExperiment) -> None:
        """Close an experiment that cannot be ended, unless it is closed: restore overwritten names,
        delete none.
        """
        if experiment not in self.open:
            return
        self.open[:] = [other for other in self.open if other is not experiment]
        experiment.ensure_record()
        name = f"experiment {quoted(experiment.name)}"
        steps: list[HookStep] = [
            (
                lambda: write_line(f"{name} could not be ended; its names are kept."),
                "its names are kept",
            ),
            (
                lambda: experiment.scope.restore_all(),
                f"names that {name} has overwritten keep their new values",
            ),
            (lambda: experiment.abandon(), f"the measurement of {name} was not ended"),
        ]
        self.context.isolation.run_all("the end of an experiment", *steps)

    def _publish(self, ended: list[ManagedExperiment]) -> list[Report]:
        """Store the records of finished experiments, pass them to the subscribers, and return their
        reports; of silent ones only the notes about names in ``keep`` that match nothing.
        """
        reports: list[Report] = []
        for experiment in ended:
            record = experiment.record
            if record is None:
                continue
            self.finished.append(record)
            self._subscribers.add(record)
            style = experiment.report_style
            reports += experiment_reports(record, style, self.context.display.scales)
            if style == "none":
                for line in record.notes:
                    if line.startswith("keep: "):
                        reports.append(note(f"experiment {record.name}: {line}"))
        return reports

    def close(self) -> None:
        """Stop measuring the open experiments; their names are kept."""
        for experiment in self.open:
            if not experiment.is_ending:
                experiment.abandon()
        self.open.clear()
