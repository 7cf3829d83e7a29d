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
from ipygpumem.reconcile.records import Reconciliation
from ipygpumem.reports import figures

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


def session(records: Records = None, *, device: str | None = None, last: int = figures.SHOWN["session"]) -> Figure:
    """Return memory over time: a panel for each device, with cells and experiments above.

    Args:
        records: what to draw; the running session by default.
        device: only this one: ``RAM``, ``cuda:0``, or ``cuda`` for all of its kind.
        last: draw at most so many of the last cells.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
        NotLoadedError: ``records`` are not given, and the extension is not loaded.
    """
    own, runs = _parts(records)
    return figures.draw("session", cells=own, experiments=runs, device=device, last=last)


def cells(records: Records = None, *, device: str | None = None, last: int = figures.SHOWN["cells"]) -> Figure:
    """Return peak and kept memory of each cell as bars; arguments and errors as those of ``session``."""
    return figures.draw("cells", cells=_parts(records)[0], device=device, last=last)


def experiments(
    records: Records = None, *, device: str | None = None, last: int = figures.SHOWN["experiments"]
) -> Figure:
    """Return experiments side by side; arguments and errors as those of ``session``, ``last`` counts experiments."""
    return figures.draw("experiments", experiments=_parts(records)[1], device=device, last=last)


def devices(reconciliations: Sequence[Reconciliation] | None = None, *, device: str | None = None) -> Figure:
    """Return what each device's memory consists of as stacked bars: by default now, as ``%gpumem status`` lists it."""
    if reconciliations is None:
        from ipygpumem.notebook.python import reconciliations_now  # records in a script need no IPython

        reconciliations = reconciliations_now()
    return figures.draw("devices", reconciliations=reconciliations, device=device)


def _parts(records: Records) -> tuple[list[CellRecord], list[ExperimentRecord]]:
    if records is None:
        from ipygpumem.notebook.python import experiments, history  # as above

        return list(history()), experiments()
    if isinstance(records, ExperimentRecord):
        return list(records.cells), [records]
    if isinstance(records, Iterable):
        items = list(records)
        found = [item for item in items if isinstance(item, CellRecord)]
        runs = [item for item in items if isinstance(item, ExperimentRecord)]
        if len(found) + len(runs) == len(items):
            return found, runs
    elif hasattr(records, "cells") and hasattr(records, "experiments"):
        return list(records.cells), list(records.experiments)
    raise PlotError("pass records of cells and experiments: ipygpumem.history(), or what ipygpumem.load returned")
