"""The short commands of ``%gpumem``: on, off, free, preload, history, export."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.freeing import reclaim
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.measuring.traces import preload as create
from ipygpumem.model import CellRecord, ReclaimStep, Usage
from ipygpumem.notebook.commands.experiment import there_are
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.outputs import Outputs
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.content import freed_report
from ipygpumem.reports.export import save
from ipygpumem.reports.history import history_report, traces_report
from ipygpumem.reports.layout import Report, count, note
from ipygpumem.units import format_bytes, format_change, format_seconds


def switch_on(notebook: Notebook, options: Options) -> list[Report]:
    """Show the line after each cell from now on."""
    notebook.context.config.report = True
    return [note("the report after each cell is on")]


def switch_off(notebook: Notebook, options: Options) -> list[Report]:
    """Show no line after cells any more; measuring goes on."""
    notebook.context.config.report = False
    return [note("the report after each cell is off")]


def free(notebook: Notebook, options: Options) -> list[Report]:
    """Give memory back now: the frames of stored tracebacks, garbage, caches."""
    before = notebook.context.meter.now()
    steps: list[ReclaimStep] = []
    notes: list[str] = []
    Outputs(notebook.context.shell).forget_hidden()
    tracebacks_step = ("tracebacks", lambda: notes.extend(notebook.recovery.release_stored_tracebacks()))
    reclaim.run_steps(notebook.context.meter, [tracebacks_step, *steps_that_free(notebook.context.garbage)], steps)
    reclaimed = reclaim.fallen(reclaim.current(before), reclaim.current(notebook.context.meter.now()))
    return [freed_report("came back", steps, reclaimed, notes)]


def preload(notebook: Notebook, options: Options) -> list[Report]:
    """Create the context of torch's accelerator now, so that no cell pays for it, and say what it costs."""
    record = create(notebook.context.meter)
    if record is None:
        return [note("torch sees no accelerator here: there is nothing to preload")]
    costs = map(_cost, record.usages)
    return [
        note(" · ".join([f"{record.label} is ready", format_seconds(record.duration_seconds), *filter(None, costs)]))
    ]


def _cost(usage: Usage) -> str:
    if usage.device == "cpu":
        return f"RAM {format_change(usage.delta_bytes)}"
    return "" if usage.used_bytes is None else f"{usage.device} {format_bytes(usage.used_bytes)} used by all"


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
    """Return the cells that ran in experiments whose name fits, or in an experiment inside them."""
    known = [(item.name, item.cells) for item in notebook.experiments.finished]
    known += [(item.name, item.cells) for item in notebook.experiments.open]
    inside = {id(cell) for name, own in known for cell in own if fnmatchcase(name, pattern)}
    if not any(fnmatchcase(name, pattern) for name, _ in known):
        raise ExperimentError(f"no experiment matches {quoted(pattern)}; {there_are([name for name, _ in known])}")
    return [cell for cell in cells if id(cell) in inside]


def export(notebook: Notebook, options: Options) -> list[Report]:
    """Write what has finished to a file."""
    record = notebook.records()
    place, size_bytes = save(options.file, record, force=options.force)
    cells, experiments = count(len(record.cells), "cell"), count(len(record.experiments), "experiment")
    return [note(f"{cells} and {experiments} are in {place} ({format_bytes(size_bytes)})")]
