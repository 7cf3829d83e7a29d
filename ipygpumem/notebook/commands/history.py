"""``%gpumem history``: the cells and the traces that have finished."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.model import CellRecord
from ipygpumem.notebook.commands.compare import there_are
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.history import history_report, traces_report
from ipygpumem.reports.layout import Report


def history(notebook: Notebook, options: Options) -> list[Report]:
    """Return one row per finished cell, the last ones, and one per trace."""
    cells = list(notebook.session.history)
    if options.experiment is not None:
        cells = _cells_of(notebook, options.experiment, cells)
    reports = [history_report(cells[-options.n :], total=len(cells), experiment=options.experiment)]
    traces = list(notebook.traces.finished)
    if traces and options.experiment is None:
        reports.append(traces_report(traces[-options.n :], total=len(traces)))
    return reports


def _cells_of(notebook: Notebook, pattern: str, cells: list[CellRecord]) -> list[CellRecord]:
    """Return the cells that ran in experiments whose name fits, or in an experiment inside them.

    Raises:
        ExperimentError: no experiment has that name.
    """
    known = [(item.name, item.cells) for item in notebook.experiments.finished]
    known += [(item.name, item.cells) for item in notebook.experiments.open]
    inside = {id(cell) for name, own in known for cell in own if fnmatchcase(name, pattern)}
    if not any(fnmatchcase(name, pattern) for name, _ in known):
        raise ExperimentError(f"no experiment matches {quoted(pattern)}; {there_are([name for name, _ in known])}")
    return [cell for cell in cells if id(cell) in inside]
