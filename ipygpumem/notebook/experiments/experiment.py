"""The experiment that users have in their hands."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType

from ipygpumem.errors import ExperimentError
from ipygpumem.fitting import budgets
from ipygpumem.model import CellRecord, ExperimentRecord, Usage
from ipygpumem.notebook.experiments.open_experiment import OpenExperiment, Options
from ipygpumem.notebook.experiments.parameters import checked_parameters
from ipygpumem.notebook.experiments.stack import Experiments


def _check(name: object, keep: list[str], seed: object, report: object) -> None:
    """Raise ``ExperimentError`` for an argument that would only fail when it is too late."""
    if not isinstance(name, str) or not name.strip() or len(name.splitlines()) > 1:
        raise ExperimentError("an experiment needs a name: one line of text")
    if not all(isinstance(pattern, str) for pattern in keep):
        raise ExperimentError("keep must be a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
        raise ExperimentError("seed must be a whole number that fits into 64 bits")
    if report not in (None, "full", "compact", "none"):
        raise ExperimentError(f"report={report!r}: write 'full', 'compact' or 'none'")


class Experiment:
    """A scope over the notebook's names, opened by ``start`` (or ``with``) and closed by ``finish``.

    Made by ``ipygpumem.experiment`` and by the magics. The record is in ``record`` once it is finished.

    Args:
        experiments: the shell's.
        name: any one-line text; an open experiment of the same name is finished first.
        keep: names or globs whose values stay at the end.
        drop_imports: delete the names of modules that the experiment imported.
        seed: reset Python's, NumPy's and torch's generators to this before every cell.
        report: ``full``, ``compact`` or ``none``; None means as configured.
        note: parameters to remember with it: numbers or text by name.
        budget: bytes that it may use of ``gpu``, ``ram`` or ``cuda:N``.
        record: a file for torch's history of allocations on CUDA devices, ``.pickle``.
    """

    def __init__(
        self,
        experiments: Experiments,
        name: str,
        *,
        keep: str | Iterable[str] = (),
        drop_imports: bool = False,
        seed: int | None = None,
        report: str | None = None,
        note: Mapping[str, int | float | str] | None = None,
        budget: Mapping[str, object] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        keep = [keep] if isinstance(keep, str) else list(keep)
        _check(name, keep, seed, report)
        sizes = budgets.checked(budget) if budget else None
        options = Options(name, keep, drop_imports, seed, report, checked_parameters(note or {}), sizes, record)
        this = weakref.ref(self)  # or the two would be a cycle
        self._experiments = experiments
        self.opened = OpenExperiment(experiments.services, options, lambda value: value is not None and value is this())

    @property
    def name(self) -> str:
        """Its name."""
        return self.opened.name

    @property
    def record(self) -> ExperimentRecord | None:
        """What it cost, once it is finished."""
        return self.opened.record

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return self.opened.cells

    @property
    def limit_notes(self) -> tuple[str, ...]:
        """What its budget cannot limit, in words."""
        return self.opened.limit_notes

    def start(self) -> Experiment:
        """Open the scope here, and return the experiment.

        Raises:
            ExperimentError: it was started before.
        """
        if self.opened.was_started:
            raise ExperimentError(f"experiment {self.name!r} was started already: make a new one")
        self.opened.thread = threading.get_ident()
        self._experiments.begin(self.opened)
        return self

    def keep(self, *patterns: str) -> None:
        """Keep these names or globs at the end."""
        options = self.opened.options
        _check(self.name, list(patterns), options.seed, options.report)
        options.keep.extend(patterns)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if it is finished."""
        if not self.opened.was_started:
            raise ExperimentError(f"experiment {self.name!r} has not been started")
        return self.opened.usage()

    def finish(self) -> ExperimentRecord:
        """End the experiment (and those inside it), show its report and return its record.

        A finished experiment returns its record again. If an interrupt stops the end half-way, the experiment
        stays open and ``finish`` can be called again.

        Raises:
            ExperimentError: it was never started, or the extension was unloaded meanwhile.
        """
        return self._experiments.finish(self.opened)

    def __enter__(self) -> Experiment:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = self.opened
        try:
            if error is not None:
                opened.failed = True
                if remark := self._experiments.recovery.failed_inside(error, opened):
                    opened.note(remark)
        finally:
            if opened.record is None:
                self.finish()
