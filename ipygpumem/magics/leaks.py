"""``%gpumem leaks``: lists memory that was not freed, and its holders."""

from __future__ import annotations

from ipygpumem.report.layout import Report
from ipygpumem.report.leaks import leaks_report, note_on_unreached
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, byte_size, command, option
from ipygpumem.shell.searches.leak_search import LeakSearch


@command(
    "%gpumem leaks",
    "list memory that was not freed, and what holds it",
    option("--min", "SIZE", "only memory of at least this size", to=byte_size()),
)
def leaks(app: App, options: Options) -> list[Report]:
    """Return the report on memory that survived experiments or that no notebook name reaches, with
    its holders.
    """
    context = app.context
    smallest = context.config.min_held_bytes if options.min is None else options.min
    context.garbage.collect()  # garbage is no leak
    search = LeakSearch(context, app.experiments.survivors, smallest)
    with context.display.working("leaks") as progress:
        leaks_now = search.find(progress)
    notes = list(leaks_now.growth)
    if not leaks_now.has_all_graphs:
        notes.append("too many autograd graphs to examine: they are not listed")
    if leaks_now.not_reached:
        notes.append(note_on_unreached(leaks_now.not_reached))
    segments = context.meter.now().get("shm")
    if segments is not None and segments.note:
        notes.append(f"shared memory: {segments.note}")
    records = [row.record(context.namespace) for row in leaks_now.rows]
    return [leaks_report(records, smallest, leaks_now.not_examined, leaks_now.kept, notes)]
