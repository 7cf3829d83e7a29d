"""Pictures as matplotlib figures: ``ipygpumem.plot.session()`` and its like.

By default they show the running session. Each takes records instead: what ``ipygpumem.load`` has read, an experiment's
record, or any records, such as ``ipygpumem.history()[-20:]``; then they work in a script, too. The figures are shown
by notebooks where they are a cell's value, ``savefig`` writes them, and pyplot does not know of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from ipygpumem.errors import PlotError
from ipygpumem.model import CellRecord, ExperimentRecord
from ipygpumem.notebook.commands import plot as plots
from ipygpumem.notebook.notebook import Notebook, current_notebook
from ipygpumem.reconcile.records import Reconciliation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["cells", "devices", "experiments", "session"]


class Recorded(Protocol):
    """What has cells and experiments: a session that was read from a file."""

    @property
    def cells(self) -> Sequence[CellRecord]:
        """The cells, oldest first."""

    @property
    def experiments(self) -> Sequence[ExperimentRecord]:
        """The experiments, oldest first."""


Records = Recorded | ExperimentRecord | Iterable[CellRecord | ExperimentRecord] | None


def session(records: Records = None, *, device: str | None = None, last: int = plots.SHOWN["session"]) -> Figure:
    """Return memory over time: a panel for each device, with cells and experiments above.

    Args:
        records: what to draw; the running session by default.
        device: only this one: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        last: draw at most so many of the last cells.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
        NotLoadedError: ``records`` are not given, and the extension is not loaded.
    """
    return plots.of_session(*_parts(records), device, last)


def cells(records: Records = None, *, device: str | None = None, last: int = plots.SHOWN["cells"]) -> Figure:
    """Return peak and kept memory of each cell as bars; arguments and errors as those of ``session``."""
    return plots.of_cells(_parts(records)[0], device, last)


def experiments(
    records: Records = None, *, device: str | None = None, last: int = plots.SHOWN["experiments"]
) -> Figure:
    """Return experiments side by side; arguments and errors as those of ``session``, ``last`` counts experiments."""
    return plots.of_experiments(_parts(records)[1], device, last)


def devices(reconciliations: Sequence[Reconciliation] | None = None, *, device: str | None = None) -> Figure:
    """Return what each device's memory consists of as stacked bars: by default now, as ``%gpumem status`` tells it."""
    if reconciliations is None:
        reconciliations = plots.reconciliations(_current())
    return plots.of_devices(reconciliations, device)


def _current() -> Notebook:
    return current_notebook()


def _parts(records: Records) -> tuple[list[CellRecord], list[ExperimentRecord]]:
    if records is None:
        current = _current()
        return list(current.session.history), list(current.experiments.finished)
    if isinstance(records, ExperimentRecord):
        return list(records.cells), [records]
    if isinstance(records, Iterable):
        items = list(records)
        found = [item for item in items if isinstance(item, CellRecord)]
        experiments = [item for item in items if isinstance(item, ExperimentRecord)]
        if len(found) + len(experiments) == len(items):
            return found, experiments
    elif hasattr(records, "cells") and hasattr(records, "experiments"):
        return list(records.cells), list(records.experiments)
    raise PlotError("records are those of cells and experiments: ipygpumem.history(), or what ipygpumem.load gave")
