"""``%gpumem free``: memory is given back now."""

from __future__ import annotations

from ipygpumem.freeing import reclaim
from ipygpumem.freeing.steps import steps_that_free
from ipygpumem.model import ReclaimStep
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.session import Session
from ipygpumem.reports.content import Report, freed_report


def free(session: Session, options: Options) -> list[Report]:
    """Give memory back now: the frames of stored tracebacks, garbage, caches."""
    before = session.meter.now()
    steps: list[ReclaimStep] = []
    notes: list[str] = []
    session.outputs.forget_hidden()
    tracebacks_step = ("tracebacks", lambda: notes.extend(session.recoveries.release_stored_tracebacks()))
    reclaim.run_steps(session.meter, [tracebacks_step, *steps_that_free(session.garbage)], steps)
    reclaimed = reclaim.fallen(reclaim.current(before), reclaim.current(session.meter.now()))
    return [freed_report("came back", steps, reclaimed, notes)]
