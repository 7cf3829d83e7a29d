"""One experiment: its options, its scope, its log, and its end.

The manager of experiments (``experiments.py``) opens and ends it. The object that a user holds
(``experiment_handle.py``) is one of these with methods for the user.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.failures import failures_told
from ipygpumem.fitting.budgets import Budget
from ipygpumem.records import CellRecord, ExperimentRecord, Usage
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.code_observer import OpenExperiments, client_of
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.experiments.ended_memory import EndingExperiment
from ipygpumem.shell.experiments.ending import ExperimentEnd, Surroundings
from ipygpumem.shell.experiments.experiment_log import ExperimentLog
from ipygpumem.shell.experiments.experiment_options import ExperimentOptions, checked_patterns
from ipygpumem.shell.experiments.measured_scope import MeasuredScope
from ipygpumem.shell.recovery import Recovery

if TYPE_CHECKING:
    from ipygpumem.shell.searches.survivors import Survivors


class ManagedExperiment:
    """An experiment as its manager sees it.

    Args:
        context: the shell's services.
        options: the user's options.
        report: the style of its report; None means as configured.
    """

    def __init__(
        self, context: ShellContext, options: ExperimentOptions, report: str | None
    ) -> None:
        self._context = context
        self.options = options
        self.report = report
        """Style of its report; None means as configured."""
        self.record: ExperimentRecord | None = None
        """The record, once it is finished."""
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
        """Level of detail of its report, ``full``, ``compact`` or ``none``: the one that its user
        has asked for, else the configured one.
        """
        return self.report or self._context.config.experiment_report

    @property
    def is_silent(self) -> bool:
        """True if the user wants no report about it."""
        return self.report_style == "none"

    @property
    def budget(self) -> Budget | None:
        """The limits of torch's memory while it is open."""
        return self.options.budget

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return tuple(self.log.cells)

    @property
    def measured_scope(self) -> MeasuredScope:
        """Its scope with the measurements since its start; only once it is started."""
        assert self._measured_scope is not None
        return self._measured_scope

    @property
    def scope(self) -> Scope:
        """Its scope over the notebook's names."""
        return self.measured_scope.names

    def keep(self, *patterns: str) -> None:
        """Keep further names, or names that match a glob, at the end."""
        for pattern in checked_patterns(patterns):
            if pattern not in self.options.keep:
                self.options.keep.append(pattern)

    def ends_with(self, cell: Cell) -> None:
        """Let the end of a cell end it."""
        self.cell = cell
        self.ends_by_itself = True

    def enter(
        self, open_experiments: OpenExperiments[Any], clock: Iterator[int], survivors: Survivors
    ) -> None:
        """Open the scope and start measuring; if this fails, ``abandon`` undoes it.

        Args:
            open_experiments: the open ones: scopes of other threads may restore the same names.
            clock: orders the objects that scopes save.
            survivors: objects that outlived earlier experiments, and so are older than this one.
        """
        self.thread, self.client = get_ident(), client_of(self._context.shell)
        self.log.begin()
        self._measured_scope = MeasuredScope(
            self._context,
            self.options,
            clock,
            functools.partial(open_experiments.saved_elsewhere, self.thread, self.client),
        )
        self._measured_scope.start(survivors, self.log.remarks)

    def seconds_in_running_cell(self) -> float:
        """Return the seconds spent in the running cell since its start; 0 between cells."""
        running = self._context.cells.running(self.thread)
        if not running:
            return 0.0
        outermost = running[0]
        return perf_counter() - max(outermost.measurement.started, self.log.started)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until its end."""
        if self._measured_scope is None:
            raise ExperimentError(f"experiment {quoted(self.name)} has not been started")
        if self.record is not None:
            return self.record.usages
        with failures_told("the measurement of an experiment", "its usage is unknown"):
            return self._measured_scope.usages()
        return ()

    def add_cell(self, cell: CellRecord) -> None:
        """Add a finished cell to its log, and to its record if it has ended already."""
        self.log.cells.append(cell)
        if self.record is not None:
            self.record = self.log.completed(self.record)

    def clean_up(
        self, surroundings: Surroundings, survivors: Survivors, recovery: Recovery
    ) -> None:
        """Do the steps of its end (``ending.py``), and set the record; call it again after an
        interrupt.

        Args:
            surroundings: the scopes around it.
            survivors: finds the objects that outlive it.
            recovery: releases tracebacks.
        """
        seconds_in_cell = 0.0
        if self.cell is None:
            seconds_in_cell = self.seconds_in_running_cell()
        self.log.end_requested(seconds_in_cell)
        if self._ending is None:
            experiment = EndingExperiment(
                self._context, self.options, self.measured_scope, self.log, survivors
            )
            self._ending = ExperimentEnd(experiment, recovery, handle=self)
        try:
            self._ending.run(surroundings)
        finally:
            self.record = self._ending.record
        self.ensure_record()
        self._ending = None  # it refers to this object

    def ensure_record(self) -> ExperimentRecord:
        """Return its record. If its end could make none, make one without measurements."""
        if self.record is None:
            self.record = self._bare_record()
        return self.record

    def _bare_record(self) -> ExperimentRecord:
        """Return a record without measurements."""
        started_at = self.log.started_at
        seconds = self.log.elapsed_seconds
        return ExperimentRecord(self.name, started_at, seconds, (), (), {}, {}, (), (), (), ())

    def abandon(self) -> None:
        """Stop measuring and keep the names, because the extension is unloaded, or the start or end
        failed.
        """
        if self._measured_scope is not None:
            self._measured_scope.abandon()
