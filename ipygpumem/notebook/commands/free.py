"""``%gpumem free``: memory is given back now."""

from __future__ import annotations

from ipygpumem.freeing import reclaim
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.model import ReclaimStep
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.outputs import Outputs
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.content import freed_report
from ipygpumem.reports.layout import Report


def free(notebook: Notebook, options: Options) -> list[Report]:
    """Give memory back now: the frames of stored tracebacks, garbage, caches."""
    before = notebook.tools.meter.now()
    steps: list[ReclaimStep] = []
    notes: list[str] = []
    Outputs(notebook.tools.shell).forget_hidden()
    tracebacks_step = ("tracebacks", lambda: notes.extend(notebook.recovery.release_stored_tracebacks()))
    reclaim.run_steps(notebook.tools.meter, [tracebacks_step, *steps_that_free(notebook.tools.garbage)], steps)
    reclaimed = reclaim.fallen(reclaim.current(before), reclaim.current(notebook.tools.meter.now()))
    return [freed_report("came back", steps, reclaimed, notes)]
