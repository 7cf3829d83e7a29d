"""Keeps the open experiments of one shell, inside one another, and the records of the finished ones."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.experiments.budgets import Budgets
from ipygpumem.notebook.experiments.names import Names
from ipygpumem.notebook.ipython.stored_errors import last_error
from ipygpumem.notebook.part import Part
from ipygpumem.notebook.parts.subscribers import Subscribers
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.notebook.tools import Tools
from ipygpumem.objects import interrupts
from ipygpumem.reports import content
from ipygpumem.reports.layout import Report

if TYPE_CHECKING:
    from ipygpumem.notebook.experiments.open_experiment import OpenExperiment, Services
    from ipygpumem.notebook.experiments.survivors import Survivors


class _OfCell:
    """The experiments of one cell."""

    def __init__(self) -> None:
        self.ending: list[OpenExperiment] = []
        """Those that end with it."""
        self.around: list[OpenExperiment] = []
        """Those that were open when its code ended, innermost last."""
        self.ended: list[OpenExperiment] = []


class Experiments(Part):
    """Opens and ends the experiments of one shell.

    Args:
        tools: the shell's.
        recovery: reports errors that run out of memory.
        budgets: those in force.
        subscribers: get the records.
    """

    def __init__(self, tools: Tools, recovery: Recovery, budgets: Budgets, subscribers: Subscribers) -> None:
        self._tools = tools
        self.recovery = recovery
        self._budgets = budgets
        self._subscribers = subscribers
        self.open: list[OpenExperiment] = []
        self.finished: deque[ExperimentRecord] = deque(maxlen=self._tools.config.history_length)
        self.names = Names(self._tools, self.open)
        self._oom_count = _OomCount()
        recovery.on_oom.append(self._ran_out_of_memory)

    @functools.cached_property
    def survivors(self) -> Survivors:
        """What outlived the experiments."""
        from ipygpumem.notebook.experiments.survivors import Survivors  # loading the extension must stay fast

        return Survivors(self._tools, lambda: [(item.name, item.scope.waiting) for item in self.open], ours=self)

    @functools.cached_property
    def services(self) -> Services:
        """What experiments work with."""
        from ipygpumem.notebook.experiments.open_experiment import Services  # as above

        return Services(self._tools, self.recovery, self._budgets, self.survivors)

    def here(self) -> list[OpenExperiment]:
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
            self._tools.outputs.settle(experiment.outputs_at_start)

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

    def begin(self, experiment: OpenExperiment) -> None:
        """Open ``experiment`` inside those that are open."""
        for other in self.here():
            if other.name == experiment.name:
                self.finish(other)
                break
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

    def end_with_cell(self, experiment: OpenExperiment) -> None:
        """Let ``experiment`` end when the running cell does.

        Raises:
            ExperimentError: no cell is running whose end would be seen.
        """
        running = self._tools.cells.running()
        if not running:
            raise ExperimentError(
                "%%experiment must be the first line of a cell that you run yourself; here use %experiment start"
            )
        running[-1].gives_back = True
        running[-1].of(_OfCell).ending.append(experiment)

    def finish(self, experiment: OpenExperiment) -> ExperimentRecord:
        """End ``experiment`` and all inside it, show the reports, and return the record."""
        if experiment.record is None or experiment in self.open:
            self._tools.screen.show(self.close_experiment(experiment))
            self._subscribers.shown()
        assert experiment.record is not None
        return experiment.record

    def put_inside(self, experiment: OpenExperiment) -> None:
        """Make an open experiment the innermost one, so that it ends alone."""
        self.open.remove(experiment)
        self.open.append(experiment)

    def close_experiment(self, experiment: OpenExperiment) -> list[Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[OpenExperiment] = []
        try:
            self._end(experiment, ended)
        finally:  # those inside it have ended, even if an interrupt keeps it open
            reports = self._publish(ended)
        return reports

    def _end(self, experiment: OpenExperiment, ended: list[OpenExperiment]) -> None:
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

    def _publish(self, ended: list[OpenExperiment]) -> list[Report]:
        """Remember the records of finished experiments, and return their reports."""
        reports: list[Report] = []
        for experiment in ended:
            if (record := experiment.record) is not None:
                self.finished.append(record)
                self._subscribers.add(record)
                style = experiment.options.report or self._tools.config.experiment_report
                reports += content.experiment_reports(record, style, self._tools.scales)
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
        self._counted: list[OpenExperiment] = []

    def add(self, error: BaseException, experiments: list[OpenExperiment], leaving: object) -> None:
        """Count ``error`` for all open experiments, unless it did so when it left one of them."""
        if id(error) == self._last and (leaving is None or any(leaving is counted for counted in self._counted)):
            return
        self._last, self._counted = id(error), list(experiments)
        for experiment in experiments:
            experiment.ran_out_of_memory()
