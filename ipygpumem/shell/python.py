"""Functions of ``ipygpumem`` that need a notebook or IPython."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ipygpumem.errors import GpuMemError
from ipygpumem.failures import failures_told
from ipygpumem.records import CellRecord, ExperimentRecord, History
from ipygpumem.report import printed_records as _printed  # noqa: F401  # registers them
from ipygpumem.shell.app import current_app
from ipygpumem.shell.experiments.experiment_handle import Experiment, UnscopedExperiment


def experiment(
    name: str,
    *,
    keep: str | Iterable[str] = (),
    drop_imports: bool = False,
    seed: int | None = None,
    report: str | None = None,
    note: Mapping[str, int | float | str] | None = None,
    budget: Mapping[str, int | str] | None = None,
) -> Experiment:
    """Return an experiment, opened by ``with`` or ``start()`` and closed by ``finish()``.

    Use it where ``%%experiment`` does not fit, such as in a loop over settings. At its end, names
    that it has bound are deleted, overwritten ones get their old values back, and their memory is
    freed. Inside a function, Python itself deletes the local names.

    Args:
        name: any one-line text; an experiment started under the same name by ``%experiment start``
            is finished first.
        keep: names or globs to keep at the end.
        drop_imports: delete the names of modules that the experiment imported.
        seed: reset Python's, NumPy's and torch's generators to this before every cell.
        report: ``full``, ``compact`` or ``none``; None means as configured.
        note: parameters to store in its record: numbers or text by name.
        budget: limit torch's memory on GPUs: ``{"gpu": "8GiB"}``; see ``budget``.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython, or there is no IPython.
        ExperimentError: ``report`` is none of the three, or ``note`` holds more than numbers and
            text.
        BudgetError: ``budget`` names no device or no size.

    >>> with ipygpumem.experiment("baseline", report="none", note={"lr": 0.1}):
    ...     loss = 0.5
    >>> ipygpumem.experiments()[-1].parameters
    {'lr': 0.1}
    """
    function = ", or put the code into a function, whose local names are deleted when it returns"
    with failures_told("an experiment", "it runs without this scope", asked=True):
        experiments = current_app(otherwise=function).experiments
        return Experiment(experiments, name, keep, drop_imports, seed, report, note, budget)
    return UnscopedExperiment(name)


def last() -> CellRecord | None:
    """Return the record of the last finished cell, or None before there is one.

    >>> ipygpumem.last().success
    True
    """
    cells = history()
    return cells[-1] if cells else None


def history() -> History:
    """Return the records of the finished cells, oldest first, up to a limit: a list with
    ``to_pandas()``.

    >>> [cell.experiment for cell in ipygpumem.history()]
    ['demo']
    """
    return History(current_app().session.history)


def experiments() -> list[ExperimentRecord]:
    """Return the records of the finished experiments, oldest first.

    >>> ipygpumem.experiments()[0].name
    'demo'
    """
    return list(current_app().experiments.finished)


def subscribe(subscriber: Callable[[CellRecord | ExperimentRecord], object]) -> Callable[[], None]:
    """Call ``subscriber`` with the record of every cell and experiment that finishes, until the
    undo is called.

    Use it to send records elsewhere. It is called after the report is shown. If it raises, one line
    says so, and it is not called again.

    Returns:
        The undo, which may be called more than once.

    Raises:
        NotLoadedError: the extension is not loaded in this IPython, or there is no IPython.
        GpuMemError: ``subscriber`` cannot be called.

    >>> seen = []
    >>> undo = ipygpumem.subscribe(seen.append)
    >>> undo()
    """
    if not callable(subscriber):
        raise GpuMemError("subscribe takes a function of a record: subscribe(print)")
    return current_app().subscribers.subscribe(subscriber)
