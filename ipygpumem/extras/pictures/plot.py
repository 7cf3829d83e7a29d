"""Matplotlib figures: ``ipygpumem.plot.session()``, ``experiments()`` and ``devices()``.

They draw the running session, or given records: the result of ``ipygpumem.load``, an experiment's
record, or any records, such as ``ipygpumem.history()[-20:]``. With records they work in scripts,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import PlotError
from ipygpumem.inventory.devices import findings
from ipygpumem.inventory.devices.breakdown import Reconciliation
from ipygpumem.records import CellRecord, ExperimentRecord, SessionRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["devices", "experiments", "session"]

T = TypeVar("T")
Records = SessionRecord | ExperimentRecord | Iterable[CellRecord | ExperimentRecord] | None


def session(
    records: Records = None, *, device: str | None = None, last: int | None = None
) -> Figure:
    """Return a figure of memory over computing time, of the last cells: a panel per device, or for
    ``device`` only.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
        NotLoadedError: ``records`` are not given, and the extension is not loaded.

    >>> ipygpumem.plot.session(last=50).savefig("session.png")
    """
    from ipygpumem.extras.pictures import figures  # imports matplotlib

    return figures.session(_given(records, CellRecord), device=device, last=last)


def experiments(
    records: Records = None, *, device: str | None = None, last: int | None = None
) -> Figure:
    """Return a figure of the last experiments in rows; raises the errors of ``session``.

    >>> ipygpumem.plot.experiments(device="RAM").savefig("experiments.svg")
    """
    from ipygpumem.extras.pictures import figures  # imports matplotlib

    return figures.experiments(_given(records, ExperimentRecord), device=device, last=last)


def devices(
    reconciliations: Sequence[Reconciliation] | None = None, *, device: str | None = None
) -> Figure:
    """Return a figure of each device's memory as stacked bars; by default now, like ``%gpumem
    status``.

    >>> ipygpumem.plot.devices(device="RAM").savefig("devices.png")
    """
    if reconciliations is None:
        reconciliations = findings.now(current_traces().meter).reconciliations
    from ipygpumem.extras.pictures import figures  # imports matplotlib

    return figures.devices(reconciliations, device=device)


def _given(records: Records, kind: type[T]) -> list[T]:
    """Return the records of one kind, the oldest first.

    Args:
        records: as the user gave them; None for the session's records.
        kind: ``CellRecord`` or ``ExperimentRecord``.

    Raises:
        PlotError: ``records`` has other items, or an experiment without cells of its own.
    """
    if records is None:
        from ipygpumem.shell import python  # a script with records needs no IPython

        records = [*python.history(), *python.experiments()]
    elif isinstance(records, ExperimentRecord):
        records = [*records.cells, records]
    elif isinstance(records, SessionRecord):
        records = [*records.cells, *records.experiments]
    items: list[Any] = list(records) if isinstance(records, Iterable) else [records]
    if not all(isinstance(item, (CellRecord, ExperimentRecord)) for item in items):
        raise PlotError(
            "pass records of cells and experiments: ipygpumem.history(), or the result of "
            "ipygpumem.load"
        )
    of_this_kind: list[T] = [item for item in items if isinstance(item, kind)]
    if kind is CellRecord and items and not of_this_kind:
        raise PlotError(
            "there is nothing to draw: an experiment inside one cell has no cells of its own"
        )
    return of_this_kind
