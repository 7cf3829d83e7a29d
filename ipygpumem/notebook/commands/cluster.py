"""``--on``: experiments, autofits and commands on the engines of an ipyparallel cluster."""

from __future__ import annotations

import shlex
from collections import defaultdict

from ipygpumem.errors import ClusterError, quoted
from ipygpumem.merging import Value, Values, engine_numbers, kind_of
from ipygpumem.notebook.cluster.controller import is_closed
from ipygpumem.notebook.cluster.engines import Asked, raise_errors, show_outputs
from ipygpumem.notebook.cluster.experiment import ClusterExperiment
from ipygpumem.notebook.cluster.part import Cluster
from ipygpumem.notebook.cluster.targets import engines_of
from ipygpumem.notebook.commands.magics import loaded
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.notebook.registry import Command
from ipygpumem.objects import interrupts
from ipygpumem.reports.engines import looks_report
from ipygpumem.reports.layout import Report, count
from ipygpumem.units import format_seconds


def on_engines(
    notebook: Notebook, magic: Command, command: Command, options: Options, line: str, cell: str = ""
) -> list[Report]:
    """Do on engines what ``command`` does here; a Ctrl-C breaks off its waiting alone, so that nothing stays open."""
    __tracebackhide__ = True
    with interrupts.noted() as struck:
        reports = _done(notebook, magic, command, options, line, cell)
    return _unless(struck, notebook, reports)


def _done(notebook: Notebook, magic: Command, command: Command, options: Options, line: str, cell: str) -> list[Report]:
    __tracebackhide__ = True
    words = without_on(line)
    if command.run == "experiment.start_cell":
        return _run_cell(notebook, options, words, cell)
    if command.run == "experiment.start":
        return _start(notebook, options, words.removeprefix("start").lstrip())
    if command.run == "experiment.end":
        return _end_elsewhere(notebook, options)
    if command.run == "autofit.fit_cell":
        reports: list[Report] = loaded("cluster_fit.fit")(notebook, options, cell)
        return reports
    return _look(notebook, magic.name.lstrip("%"), words, options)


def _unless(struck: list[int], notebook: Notebook, reports: list[Report]) -> list[Report]:
    """Return the reports; if there was a Ctrl-C, show them and raise it."""
    if struck:
        notebook.tools.screen.show(reports)
        raise KeyboardInterrupt
    return reports


def without_on(line: str) -> str:
    """Return the words of a line without ``--on`` and its value."""
    words = shlex.split(line)
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--on":
            del words[:1]
        elif not word.startswith("--on="):
            kept.append(word)
    return shlex.join(kept)


def _run_cell(notebook: Notebook, options: Options, line: str, cell: str) -> list[Report]:
    """Run a cell as an experiment on all engines at once, and raise what it raised there once all is shown."""
    __tracebackhide__ = True
    engines = engines_of(notebook.tools.shell, options.on)
    experiment = ClusterExperiment(options.name, engines, options.report)
    with notebook.tools.screen.working(f"experiment on {count(len(engines.numbers), 'engine')}") as progress:
        experiment.start(line, is_for_cell=True)
        results: Asked = {}
        try:
            results, interrupted = experiment.run(
                cell, lambda asked: engines.wait(asked, progress=progress, to_all=True)
            )
        finally:
            interrupted_end = experiment.end(progress)
    try:
        show_outputs(results)
        notebook.tools.screen.show(_cluster(notebook).ended(experiment))
        if interrupted or interrupted_end:
            raise KeyboardInterrupt
        engines.check(results)
        raise_errors(results)
    finally:
        engines.forget(results)
    return []


def _start(notebook: Notebook, options: Options, line: str) -> list[Report]:
    experiment = ClusterExperiment(options.name, engines_of(notebook.tools.shell, options.on), options.report)
    for other in _open_as(notebook, options.name):
        notebook.tools.screen.show(end(notebook, other))
    experiment.start(line)
    _cluster(notebook).open.append(experiment)
    return []


def _cluster(notebook: Notebook) -> Cluster:
    """Return what goes along with cells since the first experiment on engines."""
    for part in notebook.session.parts:
        if type(part) is Cluster:
            return part
    made = Cluster(notebook.tools, notebook.experiments, notebook.subscribers, notebook.on_cluster)
    notebook.join(made)
    return made


def _open_as(notebook: Notebook, name: str) -> list[ClusterExperiment]:
    """Return what is open under a name, without that which a closed client has begun."""
    cluster = _cluster(notebook)
    cluster.open[:] = [item for item in cluster.open if item.name != name or not is_closed(item.all.client)]
    return [item for item in cluster.open if item.name == name]


def end(notebook: Notebook, experiment: ClusterExperiment) -> list[Report]:
    """End an experiment that engines have open, and return its report."""
    if is_closed(experiment.all.client):
        _open_as(notebook, experiment.name)
        raise ClusterError(
            f"the client that began {quoted(experiment.name)} is closed: connect again, and end it with "
            "%experiment end NAME --on all"
        )
    with interrupts.noted() as struck, notebook.tools.screen.working(f"experiment {experiment.name}") as progress:
        experiment.end(progress)
        reports = _cluster(notebook).ended(experiment)
    return _unless(struck, notebook, reports)


def described(experiment: ClusterExperiment) -> str:
    """Return one line on an open experiment."""
    where = engine_numbers(experiment.engines.numbers)
    return f"experiment {experiment.name} · on {where} · {format_seconds(experiment.elapsed_seconds)}"


def _end_elsewhere(notebook: Notebook, options: Options) -> list[Report]:
    """End an experiment by name, even one that another client has started."""
    named = _open_as(notebook, options.name)
    if named:
        return end(notebook, named[-1])
    if not options.name:
        raise ClusterError("%experiment end --on: which experiment? Write its name")
    experiment = ClusterExperiment(options.name, engines_of(notebook.tools.shell, options.on))
    experiment.engines = experiment.all
    with notebook.tools.screen.working(f"experiment {experiment.name}") as progress:
        experiment.end(progress)
    if not experiment.records:
        raise ClusterError(experiment.reasons)
    return _cluster(notebook).ended(experiment)


def _look(notebook: Notebook, magic: str, line: str, options: Options) -> list[Report]:
    """Let each engine run a command, and return its reports below one table of figures."""
    engines = engines_of(notebook.tools.shell, options.on)
    asked = engines.ask("look", magic, line)
    with notebook.tools.screen.working(f"%{magic} {line}") as progress:
        engines.wait(asked, progress=progress)
    found, failed = engines.answers(asked)
    engines.forget(asked)
    looks = {
        number: (one["host"], one["text"], _values(one, is_freeing=line == "free")) for number, one in found.items()
    }
    by_error: dict[str, list[int]] = defaultdict(list)
    for number, why in failed.items():
        by_error[why].append(number)
    return [looks_report(f"%{magic} {line}", looks, by_error)]


def _values(answer: dict[str, dict[str, int]], *, is_freeing: bool) -> Values:
    found: Values = {}
    for device, size in answer["after"].items():
        key = kind_of(device)
        _add(found, ("in use", key), size)
        if is_freeing:
            _add(found, ("came back", key), max(0, answer["before"].get(device, 0) - size))
        if device in answer["free"]:
            _add(found, ("free", key), answer["free"][device])
    return found


def _add(values: Values, key: tuple[str, str], size: int) -> None:
    values[key] = Value(values.get(key, Value(0)).value + size)
