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

The steps of an end are in ``ending.py``. An ``Experiment`` that a user holds isolates our failures:
its ``finish`` and its ``with`` block fall back to ``give_up``.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING

from ipygpumem import interrupts
from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.failures import GuardedBlock, failures_told, is_own_failure, tell_failure, write_line
from ipygpumem.fitting.budgets import Budget
from ipygpumem.records import CellRecord, ExperimentRecord, Usage
from ipygpumem.report.experiments import experiment_reports
from ipygpumem.report.layout import Report, clean_name, note
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.cell import HISTORY_LENGTH, Cell
from ipygpumem.shell.code_observer import CodeObserver, OpenExperiments, client_of
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ending import ExperimentEnd, Surroundings
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiment_log import ExperimentLog
from ipygpumem.shell.experiment_options import ExperimentOptions, checked_patterns
from ipygpumem.shell.ipython.last_errors import last_error_id
from ipygpumem.shell.ipython.sources import is_in_cell
from ipygpumem.shell.measured_scope import MeasuredScope
from ipygpumem.shell.recovery import Recovery
from ipygpumem.shell.subscribers import Subscribers

if TYPE_CHECKING:
    from ipygpumem.shell.survivors import Survivors

_ATTEMPTS = 5
"""Maximum number of attempts to end an experiment.

Finalisers may raise in each of them, or a Ctrl-C may interrupt it.
"""


class _OomCount:
    """Counts each out-of-memory error once for every experiment around it."""

    def __init__(self, open_experiments: OpenExperiments[Experiment]) -> None:
        self._open = open_experiments
        self._error_id = 0
        """Identity of the last error."""
        self._counted: list[Experiment] = []
        """The experiments that have counted it."""

    def saw(self, error: BaseException, leaving: object) -> None:
        """Count an error, which is seen again as it leaves each experiment."""
        counted = self._counted if id(error) == self._error_id else []
        if counted and (leaving is None or leaving in counted):
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
        self.open: OpenExperiments[Experiment] = OpenExperiments(context.shell)
        self.finished: deque[ExperimentRecord] = deque(maxlen=HISTORY_LENGTH)
        self.code = CodeObserver(context, self.open)
        self.clock = itertools.count()
        self.ended_elsewhere: dict[str, tuple[int, str]] = {}
        """Names that ended without an experiment → their cell's number, and the remark if one is
        missed.
        """
        self._oom_count = _OomCount(self.open)
        recovery.on_oom = self._oom_count.saw

    @functools.cached_property
    def survivors(self) -> Survivors:
        """Objects that outlived their experiments."""
        from ipygpumem.shell.survivors import Survivors  # loading the extension must stay fast

        return Survivors(self.context, self._saved, ours=self)

    def _saved(self) -> list[tuple[str, object]]:
        """Return the name of each open experiment, with the objects that it restores."""
        return [(experiment.name, experiment.scope.saved) for experiment in self.open]

    def here(self, like: Experiment | None = None) -> list[Experiment]:
        """Return the open experiments around the calling code or ``like``, innermost last."""
        return self.open.here(like)

    def ran_out_in_try(self, error: BaseException) -> None:
        """Count an out-of-memory error of an autofit try, unless it was counted before."""
        self.recovery.saw(error)
        self._oom_count.forget_error()

    # -- cells -------------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Start tracking names, and seed the generators of experiments with a seed."""
        for experiment in self.overdue():
            self.give_up(experiment)  # nothing requests its end again: no name is deleted
        self.code.cell_begins(cell)
        if not cell.is_nested:
            self._oom_count.forget_error()
        if not self.open:
            return
        for experiment in self.open:  # a user's callback may have failed between two cells
            experiment.log.saw_error(cell.last_error_id)
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
            experiment.log.code_ended(failed=cell.failed)
        if here:
            cell.scopes.innermost = here[-1].name
        self.code.code_ended(cell)
        for experiment in self.open:
            if experiment not in here and cell.measured.number is not None:
                experiment.measured_scope.leave_output(cell.measured.number)
            experiment.measured_scope.settle_outputs()

    def end_experiments_of(self, cell: Cell) -> None:
        """End the experiments that end with the cell."""
        steps: list[HookStep] = []
        for experiment in reversed(cell.scopes.ending):
            end = functools.partial(self._end_unless_ending, experiment, cell.scopes.ended)
            steps.append((end, f"experiment {quoted(experiment.name)} ends later"))
        self.context.isolation.each("the end of an experiment", *steps)

    def overdue(self) -> list[Experiment]:
        """Return open experiments whose cells have ended.

        Those that a finaliser or another thread is ending are not among them.
        """
        waiting = list[Experiment]()
        for item in self.open:
            is_over = item.cell is not None and item.cell.is_over
            if is_over and not item.is_ending:
                waiting.append(item)
        return waiting

    def cell_shown(self) -> None:
        """End experiments whose cells ended without ending them."""
        for experiment in self.overdue():
            ended: list[Experiment] = []
            self._end_unless_ending(experiment, ended)
            self.context.display.show(self._publish(ended))

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Add the cell to its experiments, and publish those that ended with it."""
        ended = cell.scopes.ended
        record = cell.measured.record
        if record is not None and cell.scopes.any_open:
            # A nested cell is part of one of the cells of the experiments around it.
            around = [] if cell.is_nested else self.here()
            for experiment in (*around, *ended):
                experiment.add_cell(record)
        return self._publish(ended) if ended else ()

    # -- begin and end -----------------------------------------------------------------------------

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
                self.code.scope_opened(experiment)
                experiment.measured_scope.reseed()
        except BaseException:  # an interrupt, too: a half-open experiment would never end
            if experiment in self.open:
                self.open.remove(experiment)
            experiment.abandon()
            raise

    def end_with_cell(self, experiment: Experiment) -> None:
        """End ``experiment`` when the running cell ends."""
        running = self._cells.running()
        missed = self._cells.missed
        is_missed = missed is not None and not (running and running[-1].info is missed)
        if is_missed or (not running and is_in_cell()):
            raise RuntimeError("the start of this cell was missed, so its end would be missed too")
        if not running:
            raise ExperimentError(
                "%%experiment must be the first line of a cell that you run yourself; "
                "here use %experiment start"
            )
        experiment.ends_with(running[-1])
        running[-1].scopes.ending.append(experiment)

    def finish(self, experiment: Experiment) -> ExperimentRecord:
        """End ``experiment`` and all inside it, unless that was done, show the reports, and return
        the record.
        """
        if experiment.record is None or experiment in self.open:
            self.context.display.show(self.end_experiment(experiment))
            self._subscribers.deliver()
        assert experiment.record is not None
        return experiment.record

    def end_experiment(self, experiment: Experiment) -> list[Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[Experiment] = []
        try:
            self._end(experiment, ended)
        finally:  # inner ones have ended, even if an interrupt keeps this one open
            reports = self._publish(ended)
        return reports

    def _end_unless_ending(self, experiment: Experiment, ended: list[Experiment]) -> None:
        """End an open ``experiment``, unless a finaliser or another thread is ending it."""
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
                    interrupts.forget_our_frames(error)
                    experiment.is_ending = False
                    if not experiment.ends_by_itself:
                        raise self._still_open(experiment, error) from None
                    struck.append(error)
                elif isinstance(error, Exception):
                    lost = f"the end of experiment {quoted(experiment.name)} is not complete"
                    self.context.isolation.failed("the end of an experiment", error, lost)
                    self.context.isolation.each(
                        "names", (self.code.code_missed, "its names may stay")
                    )
                else:
                    raise
        self.give_up(experiment)
        if struck:
            raise struck.pop()

    def _check_can_end(self, experiment: Experiment) -> None:
        """Raise an error if ``experiment`` is not open, or is ending, or one inside it is."""
        name = quoted(experiment.name)
        if experiment not in self.open:
            raise ExperimentError(
                f"experiment {name} is not open: it was never started, or ipygpumem was unloaded"
            )
        nested = self.here(experiment)
        if any(inner.is_ending for inner in nested[nested.index(experiment) :]):
            raise ExperimentError(f"experiment {name} is already ending")

    def _still_open(self, experiment: Experiment, error: BaseException) -> BaseException:
        """Return the signal's exception that stopped an end, and say how to end the experiment."""
        name = clean_name(experiment.name)
        text = f"the experiment {name} is still open: run %experiment end again"
        if type(error) is KeyboardInterrupt:
            return KeyboardInterrupt(text)
        write_line(text)
        return error

    def _try_to_end(self, experiment: Experiment, ended: list[Experiment]) -> None:
        """End ``experiment`` and all inside it; call it again after an interrupt."""
        around = self.here(experiment)
        elsewhere = [other.scope for other in self.open if other not in around]
        while around[-1] is not experiment:
            self._end(around.pop(), ended)
        enclosing = around[-2] if len(around) > 1 else None
        self.code.scope_ends(experiment)
        experiment.log.saw_error(last_error_id())
        if experiment.record is None:
            try:
                experiment.is_ending = True
                with interrupts.reraise_swallowed():
                    scope = None if enclosing is None else enclosing.scope
                    experiment.clean_up(Surroundings(scope, elsewhere))
            finally:
                experiment.is_ending = False
        ended.append(experiment)
        # It need not be the last one: finalisers and threads run during an end.
        self.open[:] = [other for other in self.open if other is not experiment]
        if enclosing is not None:
            self.code.becomes_innermost(enclosing)

    def give_up(self, experiment: Experiment) -> None:
        """Close an experiment that cannot be ended: restore overwritten names, delete none."""
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
        self.context.isolation.each("the end of an experiment", *steps)

    def _publish(self, ended: list[Experiment]) -> list[Report]:
        """Store the records of finished experiments, and return their reports."""
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


class Experiment(GuardedBlock):
    """A scope over the notebook's names.

    It is opened by ``start`` or ``with``, and closed by ``finish`` or the end of the block. Created
    by the magics and by ``ipygpumem.experiment``, which documents the arguments. ``record`` is set
    once it is finished.
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
        self.options = ExperimentOptions.checked(
            name, keep, drop_imports, seed, report, note, budget
        )
        self._experiments = experiments
        self._context = experiments.context
        self.report = report
        """Style of its report; None means as configured."""
        self.record: ExperimentRecord | None = None
        self._is_unscoped = False
        """True if it could not be started: its code runs without a scope."""
        self.is_ending = False
        """True while it is being ended: no other caller may end it then."""
        self.thread = get_ident()
        """The thread that started it, whose cells belong to it."""
        self.client: str | None = None
        """On an engine of a cluster, the only client whose cells belong to it."""
        self.cell: Cell | None = None
        """The cell whose end ends it, if any."""
        self.ends_by_itself = False
        """True if a cell or ``with`` block ends it.

        Its end is requested only once, so it must not stay open.
        """
        self.log = ExperimentLog()
        self._measured_scope: MeasuredScope | None = None
        """None until it is started."""
        self._ending: ExperimentEnd | None = None
        """None until its end is requested."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.options.name

    @property
    def report_style(self) -> str:
        """Level of detail of its report: its own, or the configured one."""
        return self.report or self._context.config.experiment_report

    @property
    def is_silent(self) -> bool:
        """True if the user wants no report about it."""
        return self.report_style == "none"

    @property
    def budget(self) -> Budget | None:
        """The limits of torch's memory while it is open."""
        return self.options.budget

    def _record_to_show(self) -> ExperimentRecord | None:
        """Return its record, once it is finished."""
        return self.record

    def __repr__(self) -> str:
        state = "not open"
        if self.record is not None:
            state = "finished"
        elif self.is_open:
            state = "open"
        return f"<experiment {clean_name(self.name)}: {state}>"

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return tuple(self.log.cells)

    @property
    def is_open(self) -> bool:
        """True if it was started and is not finished, and the extension was not unloaded."""
        return self in self._experiments.open

    @property
    def measured_scope(self) -> MeasuredScope:
        """Its scope with the measurements since its start."""
        assert self._measured_scope is not None
        return self._measured_scope

    @property
    def scope(self) -> Scope:
        """Its names."""
        return self.measured_scope.names

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
            tell_failure(f"the start of {self._block_name}", error, self._lost_at_start, asked=True)
        return self

    def _open(self) -> None:
        if self._measured_scope is not None:
            raise ExperimentError(
                f"experiment {quoted(self.name)} was already started: create a new one"
            )
        self._experiments.begin(self)

    def keep(self, *patterns: str) -> None:
        """Keep these names or globs at the end too."""
        for pattern in checked_patterns(patterns):
            if pattern not in self.options.keep:
                self.options.keep.append(pattern)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until its end."""
        if self._is_unscoped:
            return ()
        if self._measured_scope is None:
            raise ExperimentError(f"experiment {quoted(self.name)} has not been started")
        if self.record is not None:
            return self.record.usages
        with failures_told("the measurement of an experiment", "its usage is unknown"):
            return self._measured_scope.usages()
        return ()

    def finish(self) -> ExperimentRecord:
        """End the experiment (and the ones inside it), show its report and return its record.

        A finished experiment returns its record again. If an interrupt stops the end half-way, the
        experiment stays open and ``finish`` can be called again.

        Raises:
            ExperimentError: it was never started, or the extension was unloaded before.
        """
        if self._is_unscoped:
            return self.ensure_record()
        try:
            return self._experiments.finish(self)
        except BaseException as error:
            if interrupts.is_from_signal(error):
                interrupts.stop_listening()
            if not is_own_failure(error):
                raise
            tell_failure(f"the end of {self._block_name}", error, self._lost_at_end)
            self._end_or_give_up()
            return self.record or self._bare_record()

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
            self.ensure_record()
            return
        steps: list[HookStep] = [
            (self._saw_failure, "memory that its error holds is freed at the cell's end"),
            (lambda _: self._end_if_open(), self._lost_at_end),
            # An interrupt may have come before it ended.
            (lambda _: self._end_or_give_up(), "the experiment is still open"),
        ]
        with interrupts.reraise_swallowed():
            self._context.isolation.each_with((error,), f"the end of {self._block_name}", steps)

    def _after_failed_end(self) -> None:
        """End the experiment after a failure at the end of its ``with`` block."""
        self._end_or_give_up()

    def _saw_failure(self, error: BaseException | None) -> None:
        """Free the memory held by an error that leaves the block."""
        if error is None or isinstance(error, GeneratorExit):  # closing a generator is no failure
            return
        if self.is_open:
            self.log.failed = True
            remark = self._experiments.recovery.failed_inside(error, self)
            if remark:
                self.log.remarks.append(remark)

    def _end_if_open(self) -> None:
        """End the experiment, unless the extension was unloaded in its block."""
        if self.record is None and self.is_open:
            self._experiments.finish(self)

    def _end_or_give_up(self) -> None:
        """End the experiment if it is still open; if that fails, keep its names."""
        if self not in self._experiments.open or self.is_ending:
            return
        steps: list[HookStep] = [
            (self._end_if_open, self._lost_at_end),
            (lambda: self._experiments.give_up(self), "the experiment is still open"),
        ]
        self._context.isolation.each(f"the end of {self._block_name}", *steps)

    # -- for the manager ---------------------------------------------------------------------------

    def ends_with(self, cell: Cell) -> None:
        """Let the end of a cell end it."""
        self.cell = cell
        self.ends_by_itself = True

    def enter(self) -> None:
        """Open the scope and start measuring; if this fails, ``abandon`` undoes it."""
        experiments = self._experiments
        self.thread, self.client = get_ident(), client_of(self._context.shell)
        self.log.begin()
        self._measured_scope = MeasuredScope(
            self._context,
            self.options,
            experiments.clock,
            functools.partial(experiments.open.saved_elsewhere, self.thread, self.client),
        )
        self._measured_scope.start(experiments.survivors, self.log.remarks)

    def seconds_here(self) -> float:
        """Return the seconds spent in the running cell; 0 between cells."""
        for outermost in self._context.cells.running(self.thread)[:1]:
            return perf_counter() - max(outermost.measured.started, self.log.started)
        return 0.0

    def add_cell(self, cell: CellRecord) -> None:
        """Add a finished cell, including the one that ends the experiment."""
        self.log.cells.append(cell)
        if self.record is not None:
            self.record = self.log.completed(self.record)

    def clean_up(self, surroundings: Surroundings) -> None:
        """Free everything and create the record; call it again after an interrupt."""
        seconds_here = 0.0 if self.cell is not None else self.seconds_here()
        self.log.end_requested(seconds_here)
        if self._ending is None:
            experiments = self._experiments
            self._ending = ExperimentEnd(
                self._context,
                self.options,
                self.measured_scope,
                self.log,
                experiments.survivors,
                experiments.recovery,
                handle=self,
            )
        try:
            self._ending.run(surroundings)
        finally:
            self.record = self._ending.record
        self.ensure_record()
        self._ending = None  # it refers to this object

    def ensure_record(self) -> ExperimentRecord:
        """Return its record; without measurements if none could be made."""
        if self.record is None:
            self.record = self._bare_record()
        return self.record

    def _bare_record(self) -> ExperimentRecord:
        started_at = self.log.started_at
        seconds = self.log.elapsed_seconds
        return ExperimentRecord(self.name, started_at, seconds, (), (), {}, {}, (), (), (), ())

    def abandon(self) -> None:
        """Stop measuring and keep the names.

        The extension is unloaded, or the start or end failed.
        """
        if self._measured_scope is not None:
            self._measured_scope.abandon()


class UnscopedExperiment(Experiment):
    """Stands for an experiment that could not be created: its code runs without a scope."""

    def __init__(self, name: str) -> None:
        self.options = ExperimentOptions(name)
        self.record = None
        self.log = ExperimentLog()
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
