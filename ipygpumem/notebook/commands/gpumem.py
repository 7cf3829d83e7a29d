"""The commands of ``%gpumem`` but ``leaks`` and ``tensors``."""

from __future__ import annotations

import functools
import os
import threading
import time
from fnmatch import fnmatchcase
from pathlib import Path

from IPython.core.error import UsageError

from ipygpumem import flight_recorder
from ipygpumem.errors import ExperimentError, PlotError, RecordingError, quoted, short
from ipygpumem.freeing import moving, reclaim
from ipygpumem.freeing import release as releasing
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.introspect import text_of
from ipygpumem.measuring.traces import preload as create
from ipygpumem.model import CellRecord, ReclaimStep
from ipygpumem.notebook.commands import tensors
from ipygpumem.notebook.commands.experiment import described, there_are
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.outputs import Outputs
from ipygpumem.notebook.ipython.sources import number_of_input, running_cell
from ipygpumem.notebook.ipython.stored_errors import stored_errors
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.objects.inventory.records import UNNAMED, group
from ipygpumem.objects.inventory.survey import roles_of_objects
from ipygpumem.reconcile import findings
from ipygpumem.reports.content import freed_report, purge_report, release_report
from ipygpumem.reports.export import place_of, save, write
from ipygpumem.reports.history import history_report, traces_report
from ipygpumem.reports.layout import Report, clean, clean_name, count, note, sizes
from ipygpumem.reports.postmortem import postmortem_report
from ipygpumem.reports.status import status_report
from ipygpumem.units import format_bytes, format_change, format_seconds


def on(notebook: Notebook, options: Options) -> list[Report]:
    """Show the line after each cell from now on."""
    notebook.context.config.report = True
    return [note("the report after each cell is on")]


def off(notebook: Notebook, options: Options) -> list[Report]:
    """Show no line after cells any more; measuring goes on."""
    notebook.context.config.report = False
    return [note("the report after each cell is off")]


def free(notebook: Notebook, options: Options) -> list[Report]:
    """Give memory back now: the frames of stored tracebacks, garbage, caches."""
    before = notebook.context.meter.now()
    steps: list[ReclaimStep] = []
    notes: list[str] = []
    shell = notebook.context.shell

    def release() -> int:
        errors = len(stored_errors(shell))
        notes.extend(notebook.recovery.release_stored_tracebacks())
        return errors

    first = [("outputs", Outputs(shell).forget_hidden), ("tracebacks", release)]
    reclaim.run_steps(notebook.context.meter, [*first, *steps_that_free(notebook.context.garbage)], steps)
    reclaimed = reclaim.fallen(reclaim.current(before), reclaim.current(notebook.context.meter.now()))
    return [freed_report("came back", steps, reclaimed, notes)]


def preload(notebook: Notebook, options: Options) -> list[Report]:
    """Create the context of torch's accelerator now, so that no cell pays for it, and say what it costs."""
    record = create(notebook.context.meter)
    if record is None:
        return [note("torch sees no accelerator here: there is nothing to preload")]
    parts = [f"{record.label} is ready", format_seconds(record.duration_seconds)]
    for usage in record.usages:
        if usage.device == "cpu":
            parts.append(f"RAM {format_change(usage.delta_bytes)}")
        elif usage.used_bytes is not None:
            parts.append(f"{usage.device} {format_bytes(usage.used_bytes)} used by all")
    return [note(" · ".join(parts))]


def history(notebook: Notebook, options: Options) -> list[Report]:
    """Return one row per finished cell, the last ones, and one per trace."""
    cells = list(notebook.session.history)
    if options.experiment is not None:
        known = [(item.name, item.cells) for item in notebook.experiments.finished]
        known += [(item.name, item.cells) for item in notebook.experiments.open]
        fitting = [own for name, own in known if fnmatchcase(name, options.experiment)]
        if not fitting:
            names = there_are([name for name, _ in known])
            raise ExperimentError(f"no experiment matches {quoted(options.experiment)}; {names}")
        inside = {id(cell) for own in fitting for cell in own}  # those of an experiment inside it, too
        cells = [cell for cell in cells if id(cell) in inside]
    reports = [history_report(cells[-options.n :], total=len(cells), experiment=options.experiment)]
    traces = list(notebook.traces.finished)
    if traces and options.experiment is None:
        reports.append(traces_report(traces[-options.n :], total=len(traces)))
    return reports


def export(notebook: Notebook, options: Options) -> list[Report]:
    """Write what has finished to a file."""
    record = notebook.records()
    place, size_bytes = save(options.file, record, force=options.force)
    cells, experiments = count(len(record.cells), "cell"), count(len(record.experiments), "experiment")
    return [note(f"{cells} and {experiments} are in {place} ({format_bytes(size_bytes)})")]


RELEASED = {
    "never": "what errors hold stays after the cell",
    "oom": "what out-of-memory errors hold comes back after the cell",
    "oom+interrupt": "what out-of-memory errors and interrupts hold comes back after the cell",
    "always": "what errors hold comes back after the cell",
}
"""What the values of ``release_frames`` mean."""


_LARGEST_SHOWN = 3


def of_line(notebook: Notebook, options: Options) -> list[Report]:
    """Return a short status, the largest names, and what to type next."""
    on_or_off, _, measured = _headline(notebook)
    lines = [described(experiment) for experiment in notebook.experiments.open]
    used = {device: reading.current_bytes for device, reading in notebook.context.meter.now().items()}
    named = [item for item in group(tensors.inventory(notebook).tensors, "name") if item.label != UNNAMED]
    largest = [f"{clean(item.label)} {format_bytes(item.size_bytes)}" for item in named[:_LARGEST_SHOWN]]
    lines.append(f"largest tensors and arrays: {', '.join(largest) or 'there are none with a name'}")
    lines.append("next: %gpumem status, tensors, leaks, history or free; %gpumem? says what each does")
    return [Report("note", (on_or_off, measured, *sizes(used)), lines)]


def _headline(notebook: Notebook) -> tuple[str, str, str]:
    """Return the settings of lines and errors, and how much was measured."""
    config = notebook.context.config
    lines_shown = "off" if not config.report else "on, quiet" if config.quiet else "on"
    cells, experiments = len(notebook.session.history), len(notebook.experiments.finished)
    measured = f"{count(cells, 'cell')} and {count(experiments, 'experiment')} measured"
    return f"ipygpumem · reports {lines_shown}", RELEASED[config.release_frames], measured


def status(notebook: Notebook, options: Options) -> list[Report]:
    """Return the settings, the open experiments, and each device's memory now."""
    headline = " · ".join(_headline(notebook))
    lines = [described(experiment) for experiment in notebook.experiments.open] or ["no experiment is open"]
    found = reconcile(notebook)
    lines += [f"{probe} cannot be read: {error}" for probe, error in notebook.context.meter.failures.items()]
    lines += [f"{source} cannot be read: {error}" for source, error in found.failures.items()]
    cells, running = list(notebook.session.history), notebook.context.cells
    for cell in [*running.running(), *running.of_others(threading.get_ident())]:  # they may have started processes, too
        number = number_of_input(notebook.context.shell, text_of(getattr(cell.info, "raw_cell", None)))
        seconds = time.time() - cell.started_at
        cells.append(CellRecord(number, None, None, cell.started_at, seconds, True, None, ()))
    readings = found.readings.values()
    return [status_report(headline, lines, readings, found.reconciliations, found.children, cells)]


def reconcile(notebook: Notebook) -> findings.Findings:
    """Return each device's memory now, and the parts that it consists of."""
    read = functools.partial(notebook.context.meter.now, detail=True)
    return findings.reconcile(read, lambda: findings.storages_of(roles_of_objects()))


SUFFIXES = (".png", ".svg")


def plot(notebook: Notebook, options: Options) -> list[Report]:
    """Show or write the picture that the options ask for; return the reports."""
    target = None if options.save is None else place_of(options.save)
    if target is not None and target.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{clean(short(options.save))}: write a file name that ends in {' or '.join(SUFFIXES)}")
    from ipygpumem.reports import figures  # imports matplotlib

    if options.picture == "devices":
        picture = figures.devices(reconcile(notebook).reconciliations, device=options.device)
    elif options.picture == "experiments":
        picture = figures.experiments(notebook.experiments.finished, device=options.device, last=options.n)
    else:
        picture = figures.session(notebook.session.history, device=options.device, last=options.n)
    reports = []
    if notebook.context.screen.has_images:
        notebook.context.screen.show_image(picture)
    elif target is None:
        headline, *lines = picture.summary.splitlines()
        hint = "a terminal shows no pictures: --save FILE.png writes this one to a file"
        reports.append(Report("plot", headline, (*(line.strip() for line in lines), hint)))
    if target is not None:
        content = picture.render(target.suffix[1:].lower())
        size = write(target, content, is_ours=lambda head: "ipygpumem" in head, force=options.force)
        reports.append(Report("plot", f"saved: {clean(str(target))} ({format_bytes(size)})"))
    return reports


def release(notebook: Notebook, options: Options) -> list[Report]:
    """Empty the objects that are named, and free what only they hold."""
    named = list(zip(options.names, _objects(notebook, "release", options.names), strict=True))
    context = notebook.context
    where = f"cell {running_cell(context.shell)}"
    roots = notebook.experiments.survivors.roots
    record = releasing.release(named, where, context.meter, context.garbage, roots)
    return [release_report(record)]


def purge(notebook: Notebook, options: Options) -> list[Report]:
    """Move a model, and an optimizer's state, off the device and back."""
    if len(options.names) > 2:
        raise UsageError("%gpumem purge: it takes a model and its optimizer: %gpumem purge model optimizer")
    model, *others = _objects(notebook, "purge", options.names)
    record = moving.purge(model, others[0] if others else None, notebook.context.meter, notebook.context.garbage)
    return [purge_report(record)]


def _objects(notebook: Notebook, command: str, names: list[str]) -> list[object]:
    """Return what the notebook calls by ``names``."""
    for name in names:
        if name not in notebook.context.namespace:
            hint = f"; write ipygpumem.{command}({clean_name(name)})" if "." in name else ""
            raise UsageError(f"%gpumem {command}: there is no variable {clean_name(name)!r} here{hint}")
    return [notebook.context.namespace[name] for name in names]


def record_on(notebook: Notebook, options: Options) -> list[Report]:
    """Begin to record."""
    notebook.recorder.start()
    notebook.context.config.record = True
    return record_status(notebook, options)


def record_off(notebook: Notebook, options: Options) -> list[Report]:
    """End the recording."""
    notebook.context.config.record = False
    return record_status(notebook, options)


def record_status(notebook: Notebook, options: Options) -> list[Report]:
    """Return whether it records, and where recordings are."""
    path, folder = notebook.recorder.path, notebook.recorder.folder
    sizes = [found.stat().st_size for found in flight_recorder.listed(folder)]
    kept = f"{count(len(sizes), 'recording')}, {format_bytes(sum(sizes))}, in {folder}"
    return [note(f"recording is {'off' if path is None else f'on: {path.name}'} · {kept}")]


def postmortem(notebook: Notebook, options: Options) -> list[Report]:
    """Return the report on a recording, by default the last one whose kernel died."""
    folder = notebook.recorder.folder
    gone = [one for one in flight_recorder.ended(folder) if one.kernel and not one.end]
    gone.sort(key=lambda one: flight_recorder.state(one.kernel))  # "dead" before "unknown": that may run elsewhere
    if not (options.file or gone):
        recordings = count(len(flight_recorder.listed(folder)), "recording")
        text = f"no kernel is known to have died while it was recorded ({recordings} in {folder})"
        return [Report("postmortem", text if folder.exists() else "nothing was recorded: %gpumem record on starts it")]
    found = _named(folder, options.file) if options.file else flight_recorder.read(gone[0].path)
    return [postmortem_report(found, flight_recorder.judge(found))]


def _named(folder: Path, name: str) -> flight_recorder.Recording:
    """Return the recording that a user names: by its file's name in the folder, or by a path."""
    for path in (folder / name, Path(os.path.expanduser(name))):  # noqa: PTH111  # that of Path fails on some names
        found = flight_recorder.read(path)
        if found.kernel or found.cell:
            return found
    raise RecordingError(f"{clean(short(name))}: there is no such recording; %gpumem record status says where they are")
