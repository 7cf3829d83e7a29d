"""Opens a scope over the notebook's names, and records the state with which its end is compared.

``scope/scope.py`` handles the names; here are the memory, the arrays, the outputs and the seed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from ipygpumem.heap.walks.array_search import arrays_of_names
from ipygpumem.meter.meter import Span
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.probes.host import RamFigures
from ipygpumem.probes.malloc import allocated_bytes, free_heap_bytes
from ipygpumem.records import RetainedArray, Usage
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.error_isolation import HookStep
from ipygpumem.shell.experiments.experiment_options import ExperimentOptions
from ipygpumem.shell.ipython.caches import Outputs
from ipygpumem.shell.ipython.last_errors import last_error_id

if TYPE_CHECKING:
    from ipygpumem.shell.searches.baselines import Baseline
    from ipygpumem.shell.searches.survivors import Survivors


_FOR_TRACEBACKS = (
    "stack_data",
    "pygments.formatters.html",
    "pygments.formatters.terminal256",
    "pygments.styles.default",  # IPython 8
)
"""Modules that IPython imports for its first traceback, and that import 31 more."""


class MeasuredScope:
    """A scope over the notebook's names, with the memory, arrays and outputs at its start.

    Args:
        context: the shell's services.
        options: the experiment's options.
        clock: orders the objects that scopes save, one iterator for all scopes.
        saved_elsewhere: returns the objects saved by scopes of other threads, one mapping for each.

    Attributes:
        names: the scope.
        undo: ends the seeding and the budget.
        error_id_at_start: identity of the last error shown before it.
        allocated_at_start: bytes in malloc's blocks.
        free_heap_at_start: bytes of free pages in malloc's heap.
        ram_at_start: figures of RAM.
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
        """List the older objects, apply the budget, and start measuring; ``abandon`` undoes it.

        Args:
            survivors: the objects that outlived earlier experiments, and so are older.
            remarks: receives a sentence for the report if the older objects could not be listed.
        """
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
        """The objects, names and arrays at its start."""
        assert self._baseline is not None
        return self._baseline

    @property
    def measurement(self) -> Span:
        """The span since its start."""
        assert self._measurement is not None
        return self._measurement

    def usages(self) -> tuple[Usage, ...]:
        """Return each device's usage from its start until now."""
        return self.measurement.read()

    def reseed(self) -> None:
        """Seed the generators if there is a seed; libraries imported later are seeded on import."""
        if self._options.seeder is not None:
            self._options.seeder.seed_all()

    def saved_memory(self) -> list[RetainedArray]:
        """Return the arrays in the objects that its code has replaced, and that it keeps alive."""
        return arrays_of_names(self.names.overwritten_objects())

    def outputs(self) -> dict[int, Any]:
        """Return the outputs since its start, by cell number."""
        return self._outputs.since(self._outputs_at_start)

    def forget_outputs(self) -> None:
        """Remove the outputs since its start everywhere in IPython."""
        self._outputs.forget_since(self._outputs_at_start)

    def leave_output(self, number: int) -> None:
        """Let ``forget_outputs`` keep the output of a cell that ran in another thread, by the
        cell's number.
        """
        self._outputs.leave_output(self._outputs_at_start, number)

    def drop_deleted_outputs(self) -> None:
        """Drop deleted outputs from those at its start: ``%reset`` makes IPython reuse their
        numbers.
        """
        self._outputs.drop_deleted_from(self._outputs_at_start)

    def abandon(self) -> None:
        """Undo ``start``: stop measuring, and keep the names as they are now."""
        steps: list[HookStep] = [(self.undo.close, "its budget may still limit torch")]
        if self._measurement is not None:
            steps.append((self.drop_measurement, "its measurement was not ended"))
        steps.append((self.names.saved.clear, "objects that it has overwritten stay alive"))
        if self._baseline is not None:
            steps.append((self._baseline.forget, "its list of older objects stays in memory"))
        self._context.isolation.run_all("the end of an experiment", *steps)

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
