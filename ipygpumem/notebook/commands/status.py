"""``%gpumem status``: what is on, what is open, and each device's memory now."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator

from ipygpumem.introspect import text_of
from ipygpumem.model import CellRecord
from ipygpumem.notebook.commands.experiment import described
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.sources import number_of_input
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.objects.inventory.survey import roles_of_objects
from ipygpumem.reconcile import findings
from ipygpumem.reports.layout import Report, count
from ipygpumem.reports.status import status_report

RELEASED = {
    "never": "what errors hold stays after the cell",
    "oom": "what out-of-memory errors hold comes back after the cell",
    "oom+interrupt": "what out-of-memory errors and interrupts hold comes back after the cell",
    "always": "what errors hold comes back after the cell",
}
"""What the values of ``release_frames`` mean."""


def status(notebook: Notebook, options: Options) -> list[Report]:
    """Return what is on, what is open, and each device's memory now."""
    config = notebook.context.config
    lines_shown = "off" if not config.report else "on, quiet" if config.quiet else "on"
    experiments = notebook.experiments
    headline = (
        f"ipygpumem · reports {lines_shown} · {RELEASED[config.release_frames]} · "
        f"{count(len(notebook.session.history), 'cell')} and {count(len(experiments.finished), 'experiment')} measured"
    )
    lines = [described(experiment) for experiment in experiments.open] or ["no experiment is open"]
    found = reconcile(notebook)
    lines += [f"{probe} cannot be read: {error}" for probe, error in notebook.context.meter.failures.items()]
    lines += [f"{source} cannot be read: {error}" for source, error in found.failures.items()]
    cells = [*notebook.session.history, *_running(notebook)]
    readings = found.readings.values()
    return [status_report(headline, lines, readings, found.reconciliations, found.children, cells)]


def _running(notebook: Notebook) -> Iterator[CellRecord]:
    """Yield the cells that run, as far as they have come: they may have started processes, too."""
    cells = notebook.context.cells
    for cell in [*cells.running(), *cells.of_others(threading.get_ident())]:
        number = number_of_input(notebook.context.shell, text_of(getattr(cell.info, "raw_cell", None)))
        yield CellRecord(number, None, None, cell.started_at, time.time() - cell.started_at, True, None, ())


def reconcile(notebook: Notebook) -> findings.Findings:
    """Return each device's memory now, and the parts that it consists of."""
    read = functools.partial(notebook.context.meter.now, detail=True)
    return findings.reconcile(read, lambda: findings.storages_of(roles_of_objects()))
