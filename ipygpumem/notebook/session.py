"""The state of one shell: what runs, what is open, what has finished. Everything that changes lives here."""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import ExperimentError, NotLoadedError
from ipygpumem.freeing.reclaim import fallen
from ipygpumem.introspect import text_of, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.cell import Cell, CellStack
from ipygpumem.notebook.config import IPyGpuMem
from ipygpumem.notebook.experiments.names import Names
from ipygpumem.notebook.experiments.recovery import Recoveries
from ipygpumem.notebook.ipython.outputs import Outputs
from ipygpumem.notebook.ipython.sources import digest_of, telling_line
from ipygpumem.notebook.ipython.stored_errors import error_of, last_error, shown_since
from ipygpumem.notebook.ipython.wire import Wire
from ipygpumem.notebook.parts.live import Live
from ipygpumem.notebook.parts.subscribers import Subscribers
from ipygpumem.notebook.parts.trends import Trends
from ipygpumem.notebook.screen import Screen
from ipygpumem.notebook.ticker import Ticker
from ipygpumem.objects import interrupts
from ipygpumem.objects.garbage import Garbage
from ipygpumem.probes import Probe
from ipygpumem.probes.host import HostProbe
from ipygpumem.reports import content
from ipygpumem.reports.bars import Scales

if TYPE_CHECKING:
    from ipygpumem.model import SessionRecord
    from ipygpumem.notebook.experiments.budget import NotebookBudget
    from ipygpumem.notebook.experiments.experiment import Experiment
    from ipygpumem.notebook.experiments.watching import Watched
    from ipygpumem.notebook.parts.recorder import Recorder


class Session:
    """All that ipygpumem knows about one shell.

    Args:
        shell: IPython's shell.
        config: the options.
        probes: what to measure; by default the host and every kind of accelerator.
    """

    def __init__(self, shell: Any, config: IPyGpuMem, probes: list[Probe] | None = None) -> None:
        self.shell = shell
        self.config = config
        self.host = HostProbe(exact=config.host_peak == "kernel")
        more = None if probes else _accelerators
        self.meter = Meter(probes or [self.host], find_more=more, sample_seconds=config.sample_seconds)
        self.outputs = Outputs(shell)
        self.wire = Wire(shell) if hasattr(shell, "kernel") else None
        self.screen = Screen(shell, config, self.wire)
        self.history: deque[CellRecord] = deque(maxlen=config.history_length)
        self.experiments: deque[ExperimentRecord] = deque(maxlen=config.history_length)
        self.open: list[Experiment] = []
        self.subscribers = Subscribers(shell)
        self.budgets: list[NotebookBudget] = []
        self.survivors: list[Watched] = []
        """What outlived the experiments that have finished; nothing is kept alive by it."""
        self._cells = CellStack()
        self.ticker = Ticker(self._cells, self.meter)
        self.live = Live(shell, config, self.ticker, self.wire)
        self.garbage = Garbage()
        self.names = Names(lambda: self.namespace, self._cells, self.open)
        here, budgets = self.names.here, self.budgets
        self.recoveries = Recoveries(shell, config, self.meter, self.garbage, self._cells, here, budgets)
        self._trends = Trends()
        self._scales = Scales()

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's names."""
        return self.shell.user_ns  # type: ignore[no-any-return]  # IPython is untyped

    def recorded(self) -> SessionRecord:
        """Return all that has finished, as one record."""
        from ipygpumem.model import SessionRecord  # loading the extension must stay fast

        return SessionRecord(time.time(), tuple(self.history), tuple(self.experiments))

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The flight recorder."""
        from ipygpumem.notebook.parts.recorder import Recorder  # as above

        return Recorder(self)

    def running(self) -> list[Cell]:
        """Return the cells that run in this thread, innermost last."""
        return self._cells.running()

    # -- cells ------------------------------------------------------------------------------------------------

    def cell_begins(self, info: Any) -> None:
        """Start measuring a cell."""
        cell = self._cells.push(info, self.meter.start())
        cell.last_error = last_error()
        if not cell.nested:
            self.live.begins()
            if self.wire is not None:
                self.wire.cell_begins()
        self.names.cell_begins(cell)
        if not cell.nested and (here := self.names.here()):
            cell.experiment = here[-1].name
            self.recoveries.count_anew()
            for experiment in here:
                experiment._reseed()
        cell.started = time.perf_counter()
        if self.ticker.rests:
            self.ticker.wake()

    def cell_ends(self, result: Any) -> None:
        """Measure, remember and report the cell that ``result`` ends, and end what ends with it."""
        ended_at = time.perf_counter()
        cell, lost = self._cells.pop(result)
        if cell is not None:
            self.live.ends(cell)
        for other in lost:  # as after an error
            self.meter.drop(other.measurement)
        if cell is not None:
            error = error_of(result)
            if self.open:
                self.names.cell_ends(cell, getattr(result, "execution_count", None))
                for experiment in self.open:
                    self.outputs.settle(experiment.outputs_at_start)
            try:
                self._finish_cell(cell, result, error, ended_at - cell.started)
            except BaseException:
                self.meter.drop(cell.measurement)  # an interrupt may come at any point
                raise

    def _finish_cell(self, cell: Cell, result: Any, error: BaseException | None, seconds: float) -> None:
        """Give back what ends with the cell; then make its record and those of its experiments, which so agree."""
        here, reports = self.names.here(), cell.reports
        number = getattr(result, "execution_count", None)
        try:
            try:
                self._give_back(cell, number, error, here)
            finally:
                try:
                    reports += self._remember(cell, self._measure(cell, number, error, seconds, here), here)
                finally:
                    reports += cell.after + self._publish(cell.ended)
        except KeyboardInterrupt:
            cell.interrupted = True
            self.meter.drop(cell.measurement)
            reports += [content.interrupted_exit(item.name) for item in cell.ending if item in self.open]
        finally:
            self._tell(cell, result, reports)
            if self.wire is not None and not cell.nested:
                self.wire.cell_ends()
            self.subscribers.deliver()

    def _tell(self, cell: Cell, result: Any, reports: list[content.Report]) -> None:
        """Show what there is to say of a cell, in spite of a Ctrl-C: it may wait long for much output of the cell's."""
        place = None
        for _ in range(2):
            if cell.interrupted:
                reports += self._interrupted(result)
            try:
                place = self.live.end(cell, replace=bool(reports)) or place
                self.screen.show(reports, place=place)
                break
            except KeyboardInterrupt:
                cell.interrupted = True

    def _give_back(self, cell: Cell, number: int | None, error: BaseException | None, here: list[Experiment]) -> None:
        """Release what the cell's error holds, and end the experiments that end with the cell."""
        shown = error or shown_since(cell.last_error)
        for experiment in here:
            experiment.failed |= error is not None or last_error() != cell.last_error
        try:
            if shown is not None or cell.ending:
                cell.at_end = self.meter.settle(cell.measurement)
            if self.budgets and not cell.nested:
                usages = cell.at_end or self.meter.read(cell.measurement)
                for budget in self.budgets:
                    cell.after += budget.cell_ended(number, usages)  # an experiment's record says it, too
            cell.after += self._recover(cell, shown)
            cell.after += cell.end_fit()
        finally:
            for experiment in reversed(cell.ending):
                if experiment in self.open:
                    self._end(experiment, cell.ended)

    def _interrupted(self, result: Any) -> list[content.Report]:
        """Let a Ctrl-C that came when a cell's code had ended stop what comes next; IPython would lose it."""
        for outer in self.running():
            if outer.fit is not None:
                outer.fit.interrupted = True
        if getattr(result, "error_in_exec", self) is not None:
            return []
        result.error_in_exec = KeyboardInterrupt("the cell's code had ended")
        return [content.note("Ctrl-C came when the cell's code had ended")]

    def _recover(self, cell: Cell, error: BaseException | None) -> list[content.Report]:
        """Release what the cell's error holds; most cells have none, and pay nothing."""
        if error is None and cell.recovery is None:
            self.recoveries.cell_was_fine()
            return []
        return self.recoveries.recover(cell, error)

    def _remember(self, cell: Cell, record: CellRecord, here: list[Experiment]) -> list[content.Report]:
        """Add a finished cell to the history and to its experiments, and return its line."""
        if cell.nested:
            return []
        self.history.append(record)
        self.subscribers.add(record)
        growths = self._trends.add(record)
        for experiment in here:
            experiment._add_cell(record)
        self._scales.note(record.usages)
        if not (self.config.report and (growths or self._is_told(record))):
            return []
        report = content.cell_report(record, self._scales)
        if growths:
            from ipygpumem.reports.history import growth_line  # as above

            report = replace(report, lines=(*report.lines, *map(growth_line, growths)))
        return [report]

    def _is_told(self, record: CellRecord) -> bool:
        """Whether a cell's line is shown, as far as the cell decides that."""
        long_enough = record.duration_seconds >= self.config.min_cell_seconds
        return long_enough and not (self.config.quiet and content.is_quiet(record))

    def _measure(
        self, cell: Cell, number: int | None, error: BaseException | None, seconds: float, here: list[Experiment]
    ) -> CellRecord:
        if not (cell.at_end or cell.nested) and self.config.collect_garbage:  # else it was done, or is done after it
            try:
                self.garbage.cell_ended(seconds, self.config.garbage_share, in_scope=bool(self.open))
            except KeyboardInterrupt:  # what the cell cost is known all the same
                cell.interrupted = True
        usages = self.meter.stop(cell.measurement)
        now = {usage.device: usage.after_bytes for usage in usages}
        source = text_of(getattr(cell.info, "raw_cell", None))
        return CellRecord(
            execution_count=number,
            cell_id=getattr(cell.info, "cell_id", None),
            experiment=here[-1].name if here else cell.experiment,
            started_at=cell.started_at,
            duration_seconds=seconds,
            success=error is None,
            error=None if error is None else type_name(error),
            usages=usages,
            source_digest=digest_of(source),
            source_line=telling_line(source),
            recovery=None if cell.recovery is None else replace(cell.recovery, now=now),
            reclaimed=fallen({usage.device: usage.after_bytes for usage in cell.at_end}, now),
        )

    # -- experiments ------------------------------------------------------------------------------------------

    def begin(self, experiment: Experiment) -> None:
        """Open ``experiment`` inside those that are open."""
        for other in self.names.here():
            if other.name == experiment.name:
                self.finish(other)
                break
        experiment.error_at_start = last_error()
        try:
            experiment._enter(self.namespace)
            self.open.append(experiment)
            self.names.scope_begins(experiment)
            experiment._reseed()
        except BaseException:  # an interrupt, too: what is half open would never end
            if experiment in self.open:
                self.open.remove(experiment)
            experiment._abandon()
            raise

    def end_with_cell(self, experiment: Experiment) -> None:
        """Let ``experiment`` end when the running cell does.

        Raises:
            ExperimentError: no cell is running whose end would be seen.
        """
        running = self._cells.running()
        if not running:
            raise ExperimentError("%%experiment needs a cell with events: use %experiment start and end here")
        running[-1].ending.append(experiment)

    def finish(self, experiment: Experiment) -> ExperimentRecord:
        """End ``experiment`` and all inside it, show the reports, and return the record."""
        if experiment.record is None or experiment in self.open:
            self.screen.show(self.close(experiment))
            self.subscribers.deliver()
        assert experiment.record is not None
        return experiment.record

    def close(self, experiment: Experiment) -> list[content.Report]:
        """End ``experiment`` and all inside it, and return the reports."""
        ended: list[Experiment] = []
        try:
            self._end(experiment, ended)
        finally:  # those inside it have ended, even if an interrupt keeps it open
            reports = self._publish(ended)
        return reports

    def _end(self, experiment: Experiment, ended: list[Experiment]) -> None:
        """End ``experiment`` and all inside it, and append each to ``ended``."""
        if experiment not in self.open:
            raise ExperimentError(
                f"experiment {experiment.name!r} is not open: it was never started, or ipygpumem was unloaded"
            )
        around = self.names.here(experiment.thread)
        while around[-1] is not experiment:
            self._end(around.pop(), ended)
        enclosing = around[-2] if len(around) > 1 else None
        self.names.scope_ends(experiment)
        # A callback of the user's may have failed between two cells.
        experiment.failed = experiment.failed or last_error() != experiment.error_at_start
        if experiment.record is None:
            with interrupts.kept():
                experiment._leave(enclosing.scope if enclosing else None)
        ended.append(experiment)
        self.open.remove(experiment)  # not the last one for sure: finalisers and threads run meanwhile
        if enclosing is not None:
            self.names.expect_running_code(enclosing)

    def _publish(self, ended: list[Experiment]) -> list[content.Report]:
        """Add the records of experiments that have ended to what is known, and return their reports."""
        reports: list[content.Report] = []
        for record, style in [(item.record, item.report) for item in ended if item.record is not None]:
            self.experiments.append(record)
            self.subscribers.add(record)
            reports += content.experiment_reports(record, style or self.config.experiment_report, self._scales)
        return reports

    def abandon(self) -> list[str]:
        """Leave open experiments' names as they are, close the meter, and return the experiments' names."""
        self._cells.close()
        names = [experiment.name for experiment in self.open]
        for experiment in self.open:
            experiment._abandon()
        self.open.clear()
        for budget in list(self.budgets):
            budget.abandon()
        self.live.close()
        if self.wire is not None:
            self.wire.close()
        self.meter.close()
        self.garbage.forget()
        if graphs := sys.modules.get("ipygpumem.objects.holders.graphs"):
            graphs.stop_letting_swap()
        return names


def _accelerators() -> Sequence[Probe]:
    """Return the probes of accelerators once torch is there; until then a cell pays for none."""
    if "torch" not in sys.modules:
        return ()
    from ipygpumem.probes.accelerators import accelerators  # as above

    return accelerators()


def session_of(shell: Any) -> Session:
    """Return the session of ``shell``.

    Raises:
        NotLoadedError: the extension is not loaded there, or ``shell`` is None.
    """
    for configurable in getattr(shell, "configurables", ()):
        if type(configurable) is IPyGpuMem:
            return configurable.session
    if shell is None:
        raise NotLoadedError(
            "this needs a notebook or IPython: run the script as ipython --ext ipygpumem SCRIPT.py, "
            "or put the code into a function, whose names go when it returns"
        )
    raise NotLoadedError("ipygpumem is not loaded here: run %load_ext ipygpumem first")


def current_session() -> Session:
    """Return the session of the shell that runs this code (``NotLoadedError`` if there is none)."""
    from IPython import get_ipython

    return session_of(get_ipython())
