"""What users call from Python about a notebook: each function is ``ipygpumem.NAME``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from ipygpumem.errors import GpuMemError
from ipygpumem.model import CellRecord, ExperimentRecord, History
from ipygpumem.notebook.commands.gpumem import reconcile
from ipygpumem.notebook.experiments import Experiment
from ipygpumem.notebook.notebook import current_notebook
from ipygpumem.reconcile.device import Reconciliation


def experiment(
    name: str,
    *,
    keep: str | Iterable[str] = (),
    drop_imports: bool = False,
    seed: int | None = None,
    report: str | None = None,
    note: Mapping[str, int | float | str] | None = None,
    budget: Mapping[str, int | str] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Experiment:
    """Return an experiment, to be opened by ``with`` or by ``start()`` and closed by ``finish()``.

    Args:
        name: any one-line text; one that ``%experiment start`` opened under the same name is finished first.
        keep: names or globs whose values stay at the end.
        drop_imports: delete the names of modules that the experiment imported.
        seed: reset Python's, NumPy's and torch's generators to this before every cell.
        report: ``full``, ``compact`` or ``none``; None means as configured.
        note: parameters to remember with it: numbers or text by name.
        budget: let torch have less of GPUs: ``{"gpu": "8GiB"}``; see ``budget``.
        record: a file, ``.pickle``, for where CUDA memory was allocated, as torch's memory viewer reads it.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython, or there is no IPython.
        ExperimentError: ``report`` is none of the three, or ``note`` holds more than numbers and text.
        BudgetError: ``budget`` names no device or no size.
        FileError: ``record`` cannot be written to; ``start`` raises it where there is no CUDA device.
    """
    experiments = current_notebook().experiments
    return Experiment(experiments, name, keep, drop_imports, seed, report, note, budget, record)


def last() -> CellRecord | None:
    """Return the record of the last finished cell, or None before there is one."""
    cells = history()
    return cells[-1] if cells else None


def history() -> History:
    """Return the records of the finished cells, oldest first; the number kept is bounded.

    It is a list that has ``to_pandas()``, too.
    """
    return History(current_notebook().session.history)


def experiments() -> list[ExperimentRecord]:
    """Return the records of the finished experiments, oldest first."""
    return list(current_notebook().experiments.finished)


def subscribe(subscriber: Callable[[CellRecord | ExperimentRecord], object]) -> Callable[[], None]:
    """Call ``subscriber`` with the record of every cell and experiment that finishes, until the undo is called.

    It is called after the report is shown. If it raises, that is said once and it gets no more records.

    Returns:
        The undo, which may be called more than once.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython, or there is no IPython.
        GpuMemError: ``subscriber`` cannot be called.
    """
    if not callable(subscriber):
        raise GpuMemError("subscribe takes something that can be called with a record: subscribe(print)")
    return current_notebook().subscribers.subscribe(subscriber)


def reconciliations_now() -> Sequence[Reconciliation]:
    """Return what each device's memory consists of, as ``%gpumem status`` lists it."""
    return reconcile(current_notebook()).reconciliations
