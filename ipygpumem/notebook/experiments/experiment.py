"""The experiment that users have in their hands."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.model import CellRecord, ExperimentRecord, Usage
from ipygpumem.notebook.experiments.names import client_of
from ipygpumem.notebook.experiments.open_experiment import OpenExperiment
from ipygpumem.notebook.experiments.options import ExperimentOptions
from ipygpumem.notebook.experiments.stack import Experiments


class Experiment:
    """A scope over the notebook's names, opened by ``start`` (or ``with``) and closed by ``finish``.

    Made by ``ipygpumem.experiment`` and by the magics. The record is in ``record`` once it is finished.

    Args:
        experiments: the shell's.
        options: what the user wants of it.
        spare: says which value of a name is a handle on it, which stays; by default this object.
    """

    def __init__(
        self, experiments: Experiments, options: ExperimentOptions, spare: Callable[[object], bool] | None = None
    ) -> None:
        this = weakref.ref(self)  # or the two would be a cycle
        self._experiments = experiments
        spare = spare or (lambda value: value is not None and value is this())
        self.opened = OpenExperiment(experiments.services, options, spare)

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
            raise ExperimentError(f"experiment {quoted(self.name)} was started already: make a new one")
        self.opened.thread = threading.get_ident()
        self.opened.client = client_of(self._experiments.services.tools.shell)
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
            ExperimentError: it was never started, or the extension was unloaded meanwhile.
        """
        return self._experiments.finish(self.opened)

    def __enter__(self) -> Experiment:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = self.opened
        if opened.record is None and not self.is_open:
            return  # the extension was unloaded meanwhile, and has said so
        try:
            if error is not None:
                self.failed_by(error)
        finally:
            if opened.record is None:
                self.finish()

    @property
    def is_open(self) -> bool:
        """Whether it was started, and neither finished nor left open by an unloading."""
        return self.opened in self._experiments.open

    def failed_by(self, error: BaseException) -> None:
        """Note an error that leaves the experiment, and release what it holds if it ran out of memory."""
        self.opened.failed = True
        if remark := self._experiments.recovery.failed_inside(error, self.opened):
            self.opened.note(remark)
