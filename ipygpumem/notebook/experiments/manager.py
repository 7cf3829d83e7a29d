"""Opens and ends the experiments of one shell, nested, and keeps the records of the finished ones."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.model import CellRecord, ExperimentRecord, Usage
from ipygpumem.notebook.cell import Cell, Part
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.experiments.names import Names, client_of
from ipygpumem.notebook.ipython.stored_errors import last_error
from ipygpumem.notebook.parts.subscribers import Subscribers
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.objects import interrupts
from ipygpumem.reports import content
from ipygpumem.reports.layout import Report

if TYPE_CHECKING:
    from ipygpumem.notebook.experiments.run import ExperimentOptions, ExperimentRun
    from ipygpumem.notebook.experiments.survivors import Survivors


class _OfCell:
    """The experiments of one cell."""

    def __init__(self) -> None:
        self.ending: list[ExperimentRun] = []
        """Those that end with it."""
        self.around: list[ExperimentRun] = []
        """Those that were open when its code ended, innermost last."""
        self.ended: list[ExperimentRun] = []


class Experiments(Part):
    """Opens and ends the experiments of one shell."""

    def __init__(self, context: Context, recovery: Recovery, subscribers: Subscribers) -> None:
        self._context = context
        self.recovery = recovery
        self._subscribers = subscribers
        self.open: list[ExperimentRun] = []
        self.finished: deque[ExperimentRecord] = deque(maxlen=self._context.config.history_length)
        self.names = Names(self._context, self.open)
        self._oom_count = _OomCount()
        recovery.on_oom.append(self._ran_out_of_memory)

    @functools.cached_property
    def survivors(self) -> Survivors:
        """What outlived the experiments."""
        from ipygpumem.notebook.experiments.survivors import Survivors  # loading the extension must stay fast

        return Survivors(self._context, lambda: [(item.name, item.scope.waiting) for item in self.open], ours=self)

    def new(self, options: ExperimentOptions, handle: weakref.ref[Experiment]) -> ExperimentRun:
        """Return a run that was not started yet; ``handle`` leads to the user's object for it."""
        from ipygpumem.notebook.experiments.run import ExperimentRun  # as above

        is_handle = lambda value: value is not None and value is handle()  # noqa: E731
        return ExperimentRun(self._context, self.recovery, self.survivors, options, is_handle)

    def here(self) -> list[ExperimentRun]:
        """Return the open experiments around the code that asks, innermost last."""
        return self.names.here()

    def innermost(self) -> str | None:
        """Return the name of the innermost of them."""
        here = self.here()
        return here[-1].name if here else None

    def _ran_out_of_memory(self, error: BaseException, leaving: object) -> None:
        self._oom_count.add(error, self.here(), leaving)

    def ran_out_in_try(self, error: BaseException) -> None:
        """A try of an autofit ran out of memory: the open experiments count it, unless it left them already."""
        self.recovery.saw(error)
        self._oom_count = _OomCount()  # the error of the next try may come to have the identity of this one

    # -- with cells -------------------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Begin to watch names, and reset the generators of experiments with a seed."""
        self.names.cell_begins(cell)
        for experiment in self.open:  # a callback of the user's may have failed between two cells
            experiment.saw_error(cell.last_error)
        if not cell.nested and (here := self.here()):
            cell.experiment = here[-1].name
            self._oom_count = _OomCount()
            for experiment in here:
                experiment.reseed()

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Prepare the scopes for what the code will bind."""
        self.names.code_seen(tree, may_change=may_change, is_timed=is_timed)

    def code_ended(self, cell: Cell, *, failed: bool) -> None:
        """Settle what the cell's code has done to names and outputs."""
        cell.in_scope = bool(self.open)
        if not self.open:
            return
        here = cell.of(_OfCell).around = self.here()
        for experiment in here:
            experiment.failed |= failed
        if here:
            cell.experiment = here[-1].name
        self.names.cell_ends(cell)
        for experiment in self.open:
            experiment.outputs.settle(experiment.outputs_at_start)

    def give_back(self, cell: Cell) -> None:
        """End the experiments that end with the cell."""
        if not cell.gives_back:
            return
        of_cell = cell.of(_OfCell)
        try:
            for experiment in reversed(of_cell.ending):
                if experiment in self.open:
                    self._end(experiment, of_cell.ended)
        except KeyboardInterrupt:
            cell.below += [content.interrupted_exit(item.name) for item in of_cell.ending if item in self.open]
            raise

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Count the cell as its experiments', and publish those that have ended with it."""
        if not (cell.in_scope or cell.gives_back):
            return ()
        of_cell = cell.of(_OfCell)
        if record is not None:
            for experiment in of_cell.around:
                experiment.add_cell(record)
        return self._publish(of_cell.ended)

    # -- begin and end ----------------------------------------------------------------------------------------

    def begin(self, experiment: ExperimentRun) -> None:
        """Open ``experiment`` inside those that are open."""
        for other in self.here():
            if other.name == experiment.name:
                self.finish(other)
                break
        experiment.thread, experiment.client = threading.get_ident(), client_of(self._context.shell)
        experiment.error_at_start = experiment.seen_error = last_error()
        try:
            experiment.enter()
            self.open.append(experiment)
            self.names.scope_begins(experiment)
            experiment.reseed()
        except BaseException:  # an interrupt, too: what is half open would never end
            if experiment in self.open:
                self.open.remove(experiment)
            experiment.abandon()
            raise

    def end_with_cell(self, experiment: ExperimentRun) -> None:
        """Let ``experiment`` end when the running cell does."""
        running = self._context.cells.running()
        if not running:
            raise ExperimentError(
                "%%experiment must be the first line of a cell that you run yourself; here use %experiment start"
            )
        running[-1].gives_back = True
        running[-1].of(_OfCell).ending.append(experiment)

    def finish(self, experiment: ExperimentRun) -> ExperimentRecord:
        """End ``experiment`` and all inside it, show the reports, and return the record."""
        if experiment.record is None or experiment in self.open:
            self._context.screen.show(self.close_experiment(experiment))
            self._subscribers.shown()
        assert experiment.record is not None
        return experiment.record

    def close_experiment(self, experiment: ExperimentRun) -> list[Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[ExperimentRun] = []
        try:
            self._end(experiment, ended)
        finally:  # those inside it have ended, even if an interrupt keeps it open
            reports = self._publish(ended)
        return reports

    def _end(self, experiment: ExperimentRun, ended: list[ExperimentRun]) -> None:
        """End ``experiment`` and all inside it, and append each to ``ended``."""
        if experiment not in self.open:
            raise ExperimentError(
                f"experiment {quoted(experiment.name)} is not open: it was never started, or ipygpumem was unloaded"
            )
        around = self.names.here(experiment)
        while around[-1] is not experiment:
            self._end(around.pop(), ended)
        enclosing = around[-2] if len(around) > 1 else None
        self.names.scope_ends(experiment)
        experiment.saw_error(last_error())
        if experiment.record is None:
            with interrupts.kept():
                experiment.leave(enclosing.scope if enclosing else None)
        ended.append(experiment)
        self.open.remove(experiment)  # not the last one for sure: finalisers and threads run meanwhile
        if enclosing is not None:
            self.names.expect_running_code(enclosing)

    def _publish(self, ended: list[ExperimentRun]) -> list[Report]:
        """Remember the records of finished experiments, and return their reports."""
        reports: list[Report] = []
        for experiment in ended:
            if (record := experiment.record) is not None:
                self.finished.append(record)
                self._subscribers.add(record)
                style = experiment.options.report or self._context.config.experiment_report
                reports += content.experiment_reports(record, style, self._context.screen.scales)
        return reports

    def close(self) -> None:
        """Leave open experiments' names as they are, and measure them no more."""
        for experiment in self.open:
            experiment.abandon()
        self.open.clear()


class _OomCount:
    """Counts the out-of-memory errors of one cell for the experiments, each once on its way out through all of them."""

    def __init__(self) -> None:
        self._last = 0
        self._counted: list[ExperimentRun] = []

    def add(self, error: BaseException, experiments: list[ExperimentRun], leaving: object) -> None:
        """Count ``error`` for all open experiments, unless it did so when it left one of them."""
        if id(error) == self._last and (leaving is None or any(leaving is counted for counted in self._counted)):
            return
        self._last, self._counted = id(error), list(experiments)
        for experiment in experiments:
            experiment.ran_out_of_memory()


class Experiment:
    """A scope over the notebook's names, opened by ``start`` (or ``with``) and closed by ``finish``.

    Made by ``ipygpumem.experiment`` and by the magics. The record is in ``record`` once it is finished.
    """

    def __init__(self, experiments: Experiments, options: ExperimentOptions) -> None:
        self._experiments = experiments
        self.opened = experiments.new(options, weakref.ref(self))

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name

    @property
    def record(self) -> ExperimentRecord | None:
        """Its record, once it is finished."""
        return self.opened.record

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return self.opened.cells

    @property
    def is_open(self) -> bool:
        """True if it was started, and neither finished nor left open by an unloading."""
        return self.opened in self._experiments.open

    def start(self) -> Experiment:
        """Open the scope here, and return the experiment.

        Raises:
            ExperimentError: it was started before.
        """
        if self.opened.was_started:
            raise ExperimentError(f"experiment {quoted(self.name)} was started already: make a new one")
        self._experiments.begin(self.opened)
        return self

    def keep(self, *patterns: str) -> None:
        """Keep these names or globs at the end."""
        self.opened.options.keep_more(patterns)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if it is finished."""
        if not self.opened.was_started:
            raise ExperimentError(f"experiment {quoted(self.name)} has not been started")
        return self.opened.usage()

    def finish(self) -> ExperimentRecord:
        """End the experiment (and those inside it), show its report and return its record.

        A finished experiment returns its record again. If an interrupt stops the end half-way, the experiment
        stays open and ``finish`` can be called again.

        Raises:
            ExperimentError: it was never started, or the extension was unloaded before.
        """
        return self._experiments.finish(self.opened)

    def __enter__(self) -> Experiment:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.record is None and not self.is_open:
            return  # the extension was unloaded inside the block, and said so
        try:
            if error is not None:
                self.opened.failed = True
                if remark := self._experiments.recovery.failed_inside(error, self.opened):
                    self.opened.note(remark)
        finally:
            if self.record is None:
                self.finish()
