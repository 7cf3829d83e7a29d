"""The short commands of ``%gpumem``: ``on``, ``free``, ``history``, ``export``, ``status``, ..."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.inventory.devices import findings
from ipygpumem.inventory.devices.host_parts import PRINTED
from ipygpumem.inventory.leaks.children import with_endings
from ipygpumem.magics import completions
from ipygpumem.magics.experiment import available_names, lines_on_open_experiments
from ipygpumem.meter.contexts import create_context, why_no_accelerator
from ipygpumem.probes.other_kernels import other_kernels
from ipygpumem.reclaim import reclaim
from ipygpumem.records import CellRecord
from ipygpumem.report.devices import device_label, sizes
from ipygpumem.report.export import save
from ipygpumem.report.freeing import freed_report
from ipygpumem.report.history import history_report, traces_report
from ipygpumem.report.layout import Report, note
from ipygpumem.report.status import status_report
from ipygpumem.report.words import clean, count, listed
from ipygpumem.shell.app import App, LastLook
from ipygpumem.shell.commands.declarations import (
    Options,
    argument,
    at_least_one,
    command,
    option,
    switch,
)
from ipygpumem.shell.ipython.caches import Outputs
from ipygpumem.shell.ipython.printed import Printed
from ipygpumem.shell.ipython.sources import number_of_input
from ipygpumem.shell.notebook_inventory import largest_names
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds


@command("%gpumem on", "show a line after each cell")
def on(app: App, options: Options) -> list[Report]:
    """Show a line after each cell."""
    app.context.config.report = True
    return [note("the report after each cell is on")]


@command("%gpumem off", "hide it; measuring continues")
def off(app: App, options: Options) -> list[Report]:
    """Hide the line after each cell; measuring continues."""
    app.context.config.report = False
    return [note("the report after each cell is off")]


@command(
    "%gpumem quiet",
    "hide the lines of cells that changed less than 1 MiB",
    argument("state", "", choices=("on", "off")),
)
def quiet(app: App, options: Options) -> list[Report]:
    """Hide or show the lines of cells that changed little memory, if the line says so; return a
    note on the setting.
    """
    config = app.context.config
    if options.state is not None:
        config.quiet = options.state == "on"
    state = "hidden" if config.quiet else "shown"
    return [note(f"lines of cells that changed less than 1 MiB are {state}")]


@command("%gpumem free", "free memory now: printed output, tracebacks, garbage, caches")
def free(app: App, options: Options) -> list[Report]:
    """Free memory now: printed output, frames of stored tracebacks, garbage, caches."""
    context = app.context
    outputs = Outputs(context.shell)
    first_steps: list[reclaim.Step] = [
        ("outputs", outputs.forget_hidden),
        ("printed output", outputs.printed.forget),
        ("tracebacks", app.recovery.release_stored_tracebacks),
    ]
    steps, freed = reclaim.free_now(context.meter, context.garbage, *first_steps)
    return [freed_report("freed", steps, freed)]


@command("%gpumem preload", "create the accelerator's context now, and show its cost")
def preload(app: App, options: Options) -> list[Report]:
    """Create the context of torch's accelerator, so that no cell pays for it, and
    report its cost.
    """
    record = create_context(app.context.meter)
    if record is None:
        reason = why_no_accelerator() or "torch sees no accelerator here"
        return [note(f"{reason}: there is nothing to preload")]
    parts = [f"{record.label} is ready", format_seconds(record.duration_seconds)]
    for usage in record.usages:
        if usage.device == "cpu":
            parts.append(f"RAM {format_change(usage.delta_bytes)}")
        elif usage.used_bytes is not None:
            parts.append(f"{usage.device} {format_bytes(usage.used_bytes)} used by all")
    return [note(" · ".join(parts))]


@command(
    "%gpumem history",
    "show one row per finished cell",
    option("-n", "N", "number of rows", to=at_least_one, default=20),
    option(
        "--experiment",
        "NAME",
        "only the cells of experiments with this name or glob",
        offers=completions.finished_experiments,
    ),
)
def history(app: App, options: Options) -> list[Report]:
    """Return one row for each of the last cells and traces."""
    cells = list(app.session.history)
    if options.experiment is not None:
        cells = _of_experiments(app, cells, options.experiment)
    reports = [history_report(cells[-options.n :], total=len(cells), experiment=options.experiment)]
    traces = list(app.traces.finished)
    if traces and options.experiment is None:
        reports.append(traces_report(traces[-options.n :], total=len(traces)))
    return reports


def _of_experiments(app: App, cells: Iterable[CellRecord], pattern: str) -> list[CellRecord]:
    """Return the cells of experiments whose names match ``pattern``, and the cells of experiments
    inside these.
    """
    experiments = [(item.name, item.cells) for item in app.experiments.finished]
    experiments += [(item.name, item.cells) for item in app.experiments.open]
    matching = [its_cells for name, its_cells in experiments if fnmatchcase(name, pattern)]
    if not matching:
        names = available_names([name for name, _ in experiments])
        raise ExperimentError(f"no experiment matches {quoted(pattern)}; {names}")
    # By identity: experiments have the records of the history itself, and no two cells are equal
    # only because they look alike.
    ids_of_matching = set[int]()
    for cells_of_experiment in matching:
        ids_of_matching.update(map(id, cells_of_experiment))
    return [cell for cell in cells if id(cell) in ids_of_matching]


@command(
    "%gpumem export",
    "write the session's records as .json or .csv",
    argument(
        "file",
        "FILE",
        offers=completions.files,
        missing="which file? For instance: %gpumem export session.json",
    ),
    switch("--force", "replace a file that ipygpumem did not write"),
)
def export(app: App, options: Options) -> list[Report]:
    """Write the finished cells and experiments to a file."""
    record = app.records()
    place, size_bytes = save(options.file, record, force=options.force)
    cells = count(len(record.cells), "cell")
    experiments = count(len(record.experiments), "experiment")
    size = format_bytes(size_bytes)
    return [note(f"wrote {cells} and {experiments} to {place} ({size})")]


WORDS_ON_RELEASING = {
    "never": "memory held by errors is kept after the cell",
    "oom": "memory held by out-of-memory errors is freed after the cell",
    "oom+interrupt": "memory held by out-of-memory errors and interrupts is freed after the cell",
    "always": "memory held by errors is freed after the cell",
}
"""Values of ``release_frames`` → their meaning in the status."""


_LARGEST_SHOWN = 3


@command("%gpumem", "show a short status and the largest names")
def short_status(app: App, options: Options) -> list[Report]:
    """Return a short status, the largest names, the changes since the last ``%gpumem``, and the
    next commands to try. What this one shows is stored for the next one.
    """
    on_or_off, measured = _settings_headline(app)
    device_bytes = reclaim.bytes_in_use(app.context.meter.now())
    rows = largest_names(app.context.shell).names
    lines = lines_on_open_experiments(app.experiments)
    shown = [f"{clean(row.name)} {format_bytes(row.size_bytes)}" for row in rows[:_LARGEST_SHOWN]]
    lines.append(f"largest names: {', '.join(shown) or 'none holds a KiB'}")
    before = app.last_look
    app.last_look = LastLook(dict(device_bytes), {row.name: row.size_bytes for row in rows})
    if before is not None:
        lines.append(f"since the last look: {_words_on_changes(before, app.last_look)}")
    lines.append("next: %gpumem top, status, leaks, history or free; %gpumem? describes them")
    return [Report("note", (on_or_off, measured, *sizes(device_bytes)), lines)]


def _words_on_changes(before: LastLook, now: LastLook) -> str:
    """Return the devices and names that changed by at least a MiB, the largest changes first:
    ``RAM +512 MiB, model -1.20 GiB``.
    """
    changes = list[tuple[str, int]]()
    for device, change in _large_changes(before.device_bytes, now.device_bytes):
        changes.append((device_label(device), change))
    for name, change in _large_changes(before.name_bytes, now.name_bytes):
        changes.append((clean(name), change))
    changes.sort(key=lambda item: abs(item[1]), reverse=True)
    texts = [f"{label} {format_change(change)}" for label, change in changes]
    return listed(texts) or "nothing changed by a MiB"


def _large_changes(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield each key whose bytes have changed by at least a MiB, and the change."""
    for key in {**before, **now}:
        change = now.get(key, 0) - before.get(key, 0)
        if abs(change) >= MIB:
            yield key, change


def _settings_headline(app: App) -> tuple[str, str]:
    """Return the two parts of the headline: the setting of the cells' lines, and the number of
    measured cells and experiments.
    """
    config = app.context.config
    lines_shown = "off"
    if config.report:
        lines_shown = "on, quiet" if config.quiet else "on"
    cells = len(app.session.history)
    experiments = len(app.experiments.finished)
    measured = f"{count(cells, 'cell')} and {count(experiments, 'experiment')} measured"
    return f"ipygpumem · reports {lines_shown}", measured


@command("%gpumem status", "show settings, open experiments, and each device's memory")
def status(app: App, options: Options) -> list[Report]:
    """Return the settings, the open experiments, and the memory of each device."""
    headline = " · ".join(_settings_headline(app))
    lines = lines_on_open_experiments(app.experiments) or ["no experiment is open"]
    lines.append(WORDS_ON_RELEASING[app.context.config.release_frames])
    printed_bytes = Printed(app.context.shell).size_bytes()
    look = findings.now(app.context.meter, {PRINTED: printed_bytes})
    for name, error in [*app.context.meter.failures.items(), *look.failures.items()]:
        lines.append(f"{name} cannot be read: {error}")
    report = status_report(
        headline,
        lines,
        look.readings.values(),
        look.reconciliations,
        with_endings(look.children, app.context.namespace),
        [*app.session.history, *_running_cells(app)],
        other_kernels(),
    )
    return [report]


def _running_cells(app: App) -> list[CellRecord]:
    """Return records, without usage, of the cells that run now: they may have started processes."""
    cells = app.context.cells
    records = []
    for cell in [*cells.running(), *cells.outside(threading.get_ident())]:
        number = number_of_input(app.context.shell, cell.source)
        started_at = cell.measurement.started_at
        seconds = time.time() - started_at
        record = CellRecord(
            execution_count=number,
            cell_id=None,
            experiment=None,
            started_at=started_at,
            duration_seconds=seconds,
            success=True,
            error=None,
            usages=(),
        )
        records.append(record)
    return records
