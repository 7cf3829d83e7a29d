"""The object that a user holds of an experiment: starts, ends and measures it.

``with ipygpumem.experiment("demo") as demo: ...``, and then ``demo.record``.

Our own failures are isolated from the user's code: if a start fails, the code runs without a scope;
if an end fails, the experiment's names are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ipygpumem import interrupts
from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.failures import GuardedBlock, is_own_failure, tell_failure
from ipygpumem.records import ExperimentRecord, Usage
from ipygpumem.report.words import clean_name
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiments.experiment_log import ExperimentLog
from ipygpumem.shell.experiments.experiment_options import ExperimentOptions
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.experiments.managed_experiment import ManagedExperiment


class Experiment(ManagedExperiment, GuardedBlock):
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
        options = ExperimentOptions.checked(name, keep, drop_imports, seed, report, note, budget)
        super().__init__(experiments.context, options, report)
        self._experiments = experiments
        self._is_unscoped = False
        """True if it could not be started: its code runs without a scope."""

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
    def is_open(self) -> bool:
        """True if it was started and is not finished, and the extension was not unloaded."""
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
            tell_failure(f"the start of {self._block_name}", error, self._lost_at_start, asked=True)
        return self

    def _open(self) -> None:
        """Open the scope, or raise an ExperimentError if it was opened before."""
        if self._measured_scope is not None:
            raise ExperimentError(
                f"experiment {quoted(self.name)} was already started: create a new one"
            )
        self._experiments.begin(self)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until its end."""
        if self._is_unscoped:
            return ()
        return super().usage()

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
        """Note that the start has failed, so that the end of the block ends no scope; return the
        experiment.
        """
        self._is_unscoped = True
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """End the experiment at the end of its ``with`` block."""
        if self._is_unscoped:
            self.ensure_record()
            return
        steps: list[HookStep] = [
            (self._free_memory_of, "memory that its error holds is freed at the cell's end"),
            (lambda _: self._end_if_open(), self._lost_at_end),
            # An interrupt may have come before it ended.
            (lambda _: self._end_or_give_up(), "the experiment is still open"),
        ]
        with interrupts.reraise_swallowed():
            self._context.isolation.run_all_with((error,), f"the end of {self._block_name}", steps)

    def _after_failed_end(self) -> None:
        """End the experiment after a failure at the end of its ``with`` block."""
        self._end_or_give_up()

    def _free_memory_of(self, error: BaseException | None) -> None:
        """Free the memory held by an error that leaves the block, if there is one."""
        if error is None or isinstance(error, GeneratorExit):  # closing a generator is no failure
            return
        if self.is_open:
            self.log.failed = True
            remark = self._experiments.recovery.recover_in_block(error, self)
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
        self._context.isolation.run_all(f"the end of {self._block_name}", *steps)


class UnscopedExperiment(Experiment):
    """Has the methods of an experiment that could not be created: its code runs without a scope."""

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
