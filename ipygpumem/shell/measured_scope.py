"""Opens a scope over the notebook's names, and records the state with which its end is compared."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from ipygpumem.heap.array_search import arrays_by_name
from ipygpumem.meter.meter import Span
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.probes.host import RamFigures
from ipygpumem.probes.malloc import allocated_bytes, free_heap_bytes
from ipygpumem.records import CellRecord, ExperimentRecord, RetainedArray, Usage
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiment_options import ExperimentOptions
from ipygpumem.shell.ipython.caches import Outputs, last_error_id

if TYPE_CHECKING:
    from ipygpumem.shell.baselines import Baseline
    from ipygpumem.shell.survivors import Survivors


_FOR_TRACEBACKS = ("stack_data", "pygments.formatters.html", "pygments.formatters.terminal256")
"""Modules that IPython imports for its first traceback, and that import 31 more."""


class ExperimentLog:
    """The cells, times and errors of an experiment so far."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.started_at = time()
        self.cells: list[CellRecord] = []
        self.span_seconds = 0.0
        """Seconds from the start to the end of the last cell so far."""
        self._seconds_in_last_cell = 0.0
        """Seconds in the cell that ends it, which is not among the cells until it ends."""
        self.failed = False
        self._last_error_id = 0
        self.ooms = 0
        self.remarks: list[str] = []
        """Notes for its report."""

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self.started

    def begin(self) -> None:
        """Start the clock; errors that were shown before are not the experiment's."""
        self.started = perf_counter()
        self.started_at = time()
        self._last_error_id = last_error_id()

    def saw_error(self, identity: int) -> None:
        """Record the identity of the last error shown; a new one marks the experiment as failed.

        Call it often enough that at most one error is shown between two calls: an error is created
        while the previous one is alive, but a later one may reuse that identity.
        """
        if identity != self._last_error_id:
            self.failed = True
        self._last_error_id = identity

    def ran_out_of_memory(self) -> None:
        """Count an out-of-memory error."""
        self.ooms += 1

    def code_ended(self, *, failed: bool) -> None:
        """Record that the code of one of its cells has ended."""
        if failed:
            self.failed = True
        self.span_seconds = self.elapsed_seconds

    def end_requested(self, seconds_in_cell: float) -> None:
        """Record that its end was requested, so many seconds after it or its running cell began."""
        self._seconds_in_last_cell = seconds_in_cell
        if seconds_in_cell or not self.span_seconds:
            self.span_seconds = self.elapsed_seconds

    def seconds(self, in_last_cell: float | None = None) -> float:
        """Return the sum of its cells' durations, with that of a cell not among them yet."""
        if in_last_cell is None:
            in_last_cell = self._seconds_in_last_cell
        return sum(cell.duration_seconds for cell in self.cells) + in_last_cell

    def completed(self, record: ExperimentRecord) -> ExperimentRecord:
        """Return the record with the cells so far, one of which has ended after the experiment."""
        seconds = self.seconds()
        return replace(
            record,
            cells=tuple(self.cells),
            duration_seconds=seconds,
            # Its first cell may have begun before it.
            span_seconds=max(seconds, self.span_seconds),
        )


class MeasuredScope:
    """A scope over the notebook's names, with the memory, arrays and outputs at its start.

    Attributes:
        names: the scope.
        undo: ends the seeding and the budget.
        error_id_at_start: identity of the last error shown before it.
    """

    def __init__(
        self,
        context: ShellContext,
        options: ExperimentOptions,
        clock: Iterator[int],
        saved_elsewhere: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        self._context = context
        self._options = options
        self.error_id_at_start = last_error_id()
        self.undo = ExitStack()
        if options.seeder is not None:
            self.undo.callback(options.seeder.remove)
        self.names = Scope(
            context.namespace,
            keep=options.keep,
            drop_imports=options.drop_imports,
            clock=clock,
            saved_by_others=saved_elsewhere,
        )
        self._outputs = Outputs(context.shell)
        self._outputs_at_start = self._outputs.mark()
        self._baseline: Baseline | None = None
        self._measurement: Span | None = None
        self.allocated_at_start = 0
        self.free_heap_at_start = 0
        self.ram_at_start: RamFigures | None = None

    def start(self, survivors: Survivors, remarks: list[str]) -> None:
        """List the older objects, apply the budget, and start measuring; ``abandon`` undoes it."""
        with growth_for("the modules of IPython's tracebacks"):
            _import_for_tracebacks()
        with growth_for("the list of what is there before an experiment"):
            self._baseline = survivors.baseline(remarks, self.names.names_at_start)
        budget = self._options.budget
        if budget is not None:
            self.undo.callback(budget.stop)  # before an interrupt can come between
            budget.start()
        self.allocated_at_start = allocated_bytes()
        self.free_heap_at_start = free_heap_bytes() or 0
        self.ram_at_start = RamFigures.now()
        self._measurement = self._context.meter.span()

    @property
    def baseline(self) -> Baseline:
        """The names and arrays at its start."""
        assert self._baseline is not None
        return self._baseline

    @property
    def measurement(self) -> Span:
        """The span since its start."""
        assert self._measurement is not None
        return self._measurement

    def usages(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now."""
        return self.measurement.read()

    def reseed(self) -> None:
        """Seed the generators if there is a seed; libraries imported later are seeded on import."""
        if self._options.seeder is not None:
            self._options.seeder.seed_all()

    def saved_memory(self) -> list[RetainedArray]:
        """Return the arrays held by the objects that its code has replaced."""
        return arrays_by_name(self.names.overwritten())

    def outputs(self) -> dict[int, Any]:
        """Return the outputs since its start, by cell number."""
        return self._outputs.since(self._outputs_at_start)

    def forget_outputs(self) -> None:
        """Remove the outputs since its start everywhere in IPython."""
        self._outputs.forget_since(self._outputs_at_start)

    def leave_output(self, number: int) -> None:
        """Leave the output of another thread's cell alone."""
        self._outputs.leave_to_others(self._outputs_at_start, number)

    def settle_outputs(self) -> None:
        """Forget which outputs were deleted: ``%reset`` restarts the count and reuses numbers."""
        self._outputs.settle(self._outputs_at_start)

    def abandon(self) -> None:
        """Stop measuring, and keep the names."""
        steps: list[HookStep] = [(self.undo.close, "its budget may still limit torch")]
        if self._measurement is not None:
            steps.append((self.drop_measurement, "its measurement was not ended"))
        steps.append((self.names.saved.clear, "objects that it has overwritten stay alive"))
        if self._baseline is not None:
            steps.append((self._baseline.forget, "its list of older objects stays in memory"))
        self._context.isolation.each("the end of an experiment", *steps)

    def drop_measurement(self) -> None:
        """End the measurement without reading it."""
        self.measurement.close()


def _import_for_tracebacks() -> None:
    """Import the modules that IPython needs for tracebacks, before anything is measured.

    They take 2 MiB, which the experiment with the session's first error would have consumed.
    """
    for name in _FOR_TRACEBACKS:
        if name not in sys.modules:
            with suppress(Exception):  # IPython 7 needs other modules; a user's own one may fail
                importlib.import_module(name)
