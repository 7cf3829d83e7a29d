"""``--on``: experiments and commands on the engines of an ipyparallel cluster."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict

from ipygpumem.errors import ClusterError, quoted
from ipygpumem.model import ExperimentRecord
from ipygpumem.notebook.cluster import Asked, ClusterExperiment, engines_of, error_of, is_closed
from ipygpumem.notebook.commands.parsing import Command, Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.objects import interrupts
from ipygpumem.objects.bulk import unseen
from ipygpumem.reports.engines import Value, Values, engine_numbers, engines_report, kind_of, looks_report
from ipygpumem.reports.layout import Report, count
from ipygpumem.units import format_seconds


def on_engines(
    notebook: Notebook, magic: str, command: Command, options: Options, line: str, cell: str = ""
) -> list[Report]:
    """Do on engines what ``command`` does here; a Ctrl-C breaks off its waiting alone, so that nothing stays open."""
    __tracebackhide__ = True
    if getattr(options, "record", None) is not None:
        raise ClusterError("--record and --on: the engines would write one file; run it on one engine with %%px")
    words = _without_on(line)
    with interrupts.noted() as struck:
        if command.run == "experiment.of_cell":
            reports = _run_cell(notebook, options, words, cell, struck)
        elif command.run == "experiment.start":
            reports = _start(notebook, options, words.removeprefix("start").lstrip(), struck)
        elif command.run == "experiment.end":
            reports = _end_by_name(notebook, options)
        else:
            reports = _look(notebook, magic, words, options)
    return _unless(struck, notebook, reports)


def _unless(struck: list[int], notebook: Notebook, reports: list[Report]) -> list[Report]:
    """Return the reports; if there was a Ctrl-C, show them and raise it."""
    if struck:
        notebook.context.screen.show(reports)
        raise KeyboardInterrupt
    return reports


def _without_on(line: str) -> str:
    words, kept = shlex.split(line), list[str]()
    while words:
        word = words.pop(0)
        if word == "--on":
            del words[:1]
        elif not word.startswith("--on="):
            kept.append(word)
    return shlex.join(kept)


def _run_cell(notebook: Notebook, options: Options, line: str, cell: str, struck: list[int]) -> list[Report]:
    """Run a cell as an experiment on all engines at once, and raise what it raised there once all is shown."""
    __tracebackhide__ = True
    engines = engines_of(notebook.context.shell, options.on)
    experiment = ClusterExperiment(options.name, engines, options.report)
    with notebook.context.screen.working(f"experiment on {count(len(engines.numbers), 'engine')}") as progress:
        record, results = experiment.run(line, cell, progress)
    try:
        _show_outputs(results)
        notebook.context.screen.show(_ended(notebook, experiment, record))
        errors = [error for result in results.values() if result.ready() and (error := error_of(result)) is not None]
        if errors and not struck:
            sys.modules["ipyparallel.error"].collect_exceptions(errors, "execute")
    finally:
        engines.forget(results)
    return []


def _show_outputs(results: Asked) -> None:
    """Print and display what the cells did, one engine after the other."""
    for number, result in results.items():
        if result.ready() and result.wait_for_output(1):
            if len(results) > 1 and (result.stdout or result.stderr or result.outputs or result.execute_result):
                sys.stdout.write(f"[engine {number}]\n")
            result.display_outputs()


def _start(notebook: Notebook, options: Options, line: str, struck: list[int]) -> list[Report]:
    experiment = ClusterExperiment(options.name, engines_of(notebook.context.shell, options.on), options.report)
    for other in [item for item in notebook.on_cluster if item.name == options.name]:
        notebook.on_cluster.remove(other)
        if not is_closed(other.all.client):
            notebook.context.screen.show(_end(notebook, other))
    experiment.start(line)
    if struck:
        experiment.end(unseen)
    else:
        notebook.on_cluster.append(experiment)
    return []


def end(notebook: Notebook, experiment: ClusterExperiment) -> list[Report]:
    """End an experiment that engines have open, and return its report."""
    notebook.on_cluster.remove(experiment)
    if is_closed(experiment.all.client):
        raise ClusterError(
            f"the client that began {quoted(experiment.name)} is closed: connect again, and end it with "
            "%experiment end NAME --on all"
        )
    with interrupts.noted() as struck:
        reports = _end(notebook, experiment)
    return _unless(struck, notebook, reports)


def _end(notebook: Notebook, experiment: ClusterExperiment) -> list[Report]:
    with notebook.context.screen.working(f"experiment {experiment.name}") as progress:
        return _ended(notebook, experiment, experiment.end(progress))


def _ended(notebook: Notebook, experiment: ClusterExperiment, record: ExperimentRecord) -> list[Report]:
    """Remember the record of an experiment that has ended, and return its report."""
    notebook.experiments.finished.append(record)
    notebook.subscribers.add(record)
    is_shown = (experiment.report or notebook.context.config.experiment_report) != "none"
    return [engines_report(record)] if is_shown else []


def described(experiment: ClusterExperiment) -> str:
    """Return one line on an open experiment."""
    where = engine_numbers(experiment.engines.numbers)
    return f"experiment {experiment.name} · on {where} · {format_seconds(experiment.elapsed_seconds)}"


def _end_by_name(notebook: Notebook, options: Options) -> list[Report]:
    """End an experiment by name, even one that another client has started."""
    if not options.name:
        raise ClusterError("%experiment end --on: which experiment? Write its name")
    named = [item for item in notebook.on_cluster if item.name == options.name and not is_closed(item.all.client)]
    if named:
        return end(notebook, named[-1])
    experiment = ClusterExperiment(options.name, engines_of(notebook.context.shell, options.on))
    with notebook.context.screen.working(f"experiment {experiment.name}") as progress:
        record = experiment.end(progress)
    if not any(engine.record for engine in record.engines):
        raise ClusterError(record.notes[0])
    return _ended(notebook, experiment, record)


def _look(notebook: Notebook, magic: str, line: str, options: Options) -> list[Report]:
    """Let each engine run a command, and return its reports below one table of figures."""
    engines = engines_of(notebook.context.shell, options.on)
    asked = engines.ask("look", magic, line)
    with notebook.context.screen.working(f"%{magic} {line}") as progress:
        engines.wait(asked, progress=progress)
    found, failed = engines.answers(asked)
    looks = {at: (one["host"], one["text"], _values(one, is_freeing=line == "free")) for at, one in found.items()}
    by_error: dict[str, list[int]] = defaultdict(list)
    for number, why in failed.items():
        by_error[why].append(number)
    return [looks_report(f"%{magic} {line}", looks, by_error)]


def _values(answer: dict[str, dict[str, int]], *, is_freeing: bool) -> Values:
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for device, size in answer["after"].items():
        sizes["in use", kind_of(device)] += size
        if is_freeing:
            sizes["came back", kind_of(device)] += max(0, answer["before"].get(device, 0) - size)
        if device in answer["free"]:
            sizes["free", kind_of(device)] += answer["free"][device]
    return {key: Value(size) for key, size in sizes.items()}
