"""The commands of ``%experiment``, and ``%%experiment``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.errors import ExperimentError, ellipsize, quoted
from ipygpumem.fitting.budgets import parse_budget
from ipygpumem.magics import completions
from ipygpumem.notebook import running_cell
from ipygpumem.report import history as reports
from ipygpumem.report.cells import usage_parts
from ipygpumem.report.experiments import times
from ipygpumem.report.layout import Report, note
from ipygpumem.report.words import clean, listed
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import (
    Options,
    argument,
    command,
    integer,
    option,
    switch,
)
from ipygpumem.shell.experiments.experiment_handle import Experiment
from ipygpumem.shell.experiments.experiment_options import PARAMETER, Parameters, plain_number
from ipygpumem.shell.experiments.experiments import ExperimentManager
from ipygpumem.shell.experiments.managed_experiment import ManagedExperiment
from ipygpumem.units import format_bytes

_WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
_GLOB = re.compile(r"(?=.*[*?\[])[\w*?\[\]!-]+")
"""Matches a glob of names, which has at least one of its special characters: ``y*``."""


_OPTIONS = (
    option(
        "--keep",
        "NAME",
        "names or globs to keep, separated by blanks or commas: --keep model 'loss*'",
        offers=completions.names,
        many=True,
    ),
    switch("--drop-imports", "delete the names of imported modules too"),
    option(
        "--seed",
        "N",
        "seed Python's, NumPy's and torch's random generators first",
        to=integer(minimum=-(2**63), maximum=2**64 - 1),
    ),
    option("--report", "", "level of detail of the report", choices=("full", "compact", "none")),
    option(
        "--note",
        "NAME=VALUE",
        "parameters to store in the record: --note lr=1e-3 bs=64",
        many=True,
    ),
    option("--budget", "gpu=SIZE", "limit torch's memory on a GPU: --budget gpu=8GiB", many=True),
)


@command(
    "%experiment start",
    "open one",
    argument(
        "name",
        "NAME",
        is_joined=True,
        # It is not optional: run again from the top, the notebook ends the open one of this name.
        missing="which name? Write it first: %experiment start demo --keep x",
    ),
    *_OPTIONS,
)
def start(app: App, options: Options) -> list[Report]:
    """Open an experiment; return a note about it, and notes about devices that its budget cannot
    limit.
    """
    experiment = new_experiment(app, options)
    app.experiments.begin(experiment)
    lines = list[str]()
    if not experiment.is_silent:
        lines.append(_line_on_opened(app, experiment))
    if experiment.budget is not None:
        lines += experiment.budget.notes
    return [note(line) for line in lines]


def _line_on_opened(app: App, experiment: ManagedExperiment) -> str:
    """Return the line about an experiment that was opened, with the one around it."""
    names_around = [other.name for other in app.experiments.here() if other is not experiment]
    inside = f" inside {names_around[-1]}" if names_around else ""
    return f"experiment {experiment.name} is open{inside}: %experiment end ends it"


@command(
    "%%experiment",
    "run a cell like a function: at the end its new names are deleted and its memory is freed",
    argument(
        "name", "NAME", "to find its record; the cell's number by default: cell7", is_joined=True
    ),
    *_OPTIONS,
)
def of_cell(app: App, options: Options) -> list[Report]:
    """Open an experiment that ends with the running cell; the cell's end shows its report."""
    experiment = new_experiment(app, options)
    app.experiments.end_with_cell(experiment)
    app.experiments.begin(experiment)
    return []


def new_experiment(app: App, options: Options) -> Experiment:
    """Return a new experiment, not started yet; invalid options raise an error."""
    name = _checked_name(app, options.name) if options.name else _name_of_cell(app)
    budget = parse_budget(",".join(options.budget)) if options.budget else None
    return Experiment(
        app.experiments,
        name,
        patterns_of("--keep", options.keep),
        options.drop_imports,
        options.seed,
        options.report,
        parse_parameters(options.note),
        budget,
    )


def _name_of_cell(app: App) -> str:
    """Return the name of an experiment to which the user has given none."""
    return f"cell{running_cell(app.context.shell)}"


def _checked_name(app: App, name: str) -> str:
    """Return an experiment's name if it is one word.

    Raises:
        UsageError: there are further words, which may be a comment (``demo # first run``), an
            option without its dashes (``demo seed=0``), names to keep, or a part of the name; its
            message says how to write them.
    """
    word, *further_words = name.split()
    if not further_words:
        return word
    second, *words_after_second = further_words
    option = re.search(r"\w[\w-]*", second)
    if "#" in second:
        fix = "put the comment on its own line"
    elif option is not None and f"--{option[0]}" in _option_names(app):
        _, _, value = second.partition("=")
        values = [value, *words_after_second] if value else words_after_second
        fix = " ".join([f"write {word} --{option[0]}", *values])
    else:
        fix = f"write {'-'.join([word, *further_words])}; --keep goes before names to keep"
    message = f"an experiment's name is one word, not {quoted(name)}: {ellipsize(fix)}"
    raise UsageError(clean(message))


def _option_names(app: App) -> Iterable[str]:
    """Return the names of an experiment's options, with those that optional features add."""
    return app.commands.with_further_options(of_cell).options


def parse_parameters(words: Iterable[str]) -> Parameters:
    """Parse parameters such as ``lr=1e-3``; values become numbers where possible."""
    parameters: Parameters = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not PARAMETER.fullmatch(name):
            raise ExperimentError(
                f"--note: {word!r} is not NAME=VALUE, such as --note lr=1e-3 bs=64"
            )
        if name in parameters:
            raise ExperimentError(f"--note: {name} is given twice")
        parameters[name] = _number_or_text(value)
    return parameters


def _number_or_text(text: str) -> int | float | str:
    """Return the number that a text means; the text itself if that is none."""
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text) if len(text) < 19 else text  # records hold 64 bits
    if not text.isascii() or "_" in text:  # ``1_000`` is a number for Python alone
        return text
    try:
        return plain_number(float(text))
    except ValueError:
        return text


def patterns_of(source: str, words: Iterable[str]) -> list[str]:
    """Return the names and globs in the words of a line, which are split at commas.

    Args:
        source: the option or command that has the words, for errors.
        words: the words.

    Raises:
        UsageError: one of them is neither a name nor a glob.
    """
    patterns = [part for part in ",".join(words).split(",") if part]
    for pattern in patterns:
        if not pattern.isidentifier() and not _GLOB.fullmatch(pattern):
            problem = f"{source}: {quoted(pattern)} is neither a name nor a glob"
            raise UsageError(clean(f"{problem}; write names such as x or 'y*'"))
    return patterns


@command(
    "%experiment end",
    "delete its names, restore overwritten ones, free the memory",
    argument("name", "NAME", offers=completions.open_experiments, is_joined=True),
)
def end(app: App, options: Options) -> list[Report]:
    """End the named experiment, or the one started last, here or on engines."""
    on_engines = _experiment_on_engines(app, options.name)
    if on_engines is not None:
        reports: list[Report] = on_engines.finish(app)
        return reports
    app.experiments.finish(_named_or_innermost(app, options.name))
    return []


def _experiment_on_engines(app: App, name: str) -> Any:
    """Return the last experiment on engines of a cluster that has this name. If ``name`` is empty,
    return the last one, unless an experiment here was started after it. None if there is none.
    """
    on_engines = list(app.on_cluster)
    if name:
        on_engines = [item for item in on_engines if item.name == name]
    if not on_engines:
        return None
    last = on_engines[-1]
    here = app.experiments.here()
    if here and not name:
        was_started_before = here[-1].log.elapsed_seconds < last.elapsed_seconds
        if was_started_before:
            return None
    return last


def _named_or_innermost(app: App, name: str) -> ManagedExperiment:
    """Return the open experiment with this name; the innermost one if ``name`` is empty."""
    if not name or not app.experiments.open:
        return _innermost(app)
    for experiment in app.experiments.open:
        if experiment.name == name:
            return experiment
    raise ExperimentError(f"no experiment {quoted(name)} is open, only {_open_names(app)}")


_WHICH_NAMES = "which names? For instance: %experiment keep model 'loss*'"


@command(
    "%experiment keep",
    "keep these names or globs, such as 'y*', at the end too",
    argument("names", "NAME", offers=completions.names, many=True, missing=_WHICH_NAMES),
)
def keep(app: App, options: Options) -> list[Report]:
    """Keep names at the end of the innermost experiment."""
    patterns = patterns_of("%experiment keep", options.names)
    if not patterns:  # ``%experiment keep ,``
        raise UsageError(f"%experiment keep: {_WHICH_NAMES}")
    experiment = _innermost(app)
    experiment.keep(*patterns)
    if experiment.is_silent:
        return []
    return [note(_line_on_kept_names(experiment))]


def _line_on_kept_names(experiment: ManagedExperiment) -> str:
    """Return the line about the names and globs that an experiment keeps; those that match no name
    yet are in brackets.
    """
    line = f"experiment {experiment.name} keeps {', '.join(experiment.options.keep)}"
    unmatched = experiment.scope.unmatched_keep()
    if unmatched:
        line += f" (no name matches {', '.join(unmatched)} yet)"
    return line


@command("%experiment status", "show the open experiments and their memory so far")
def status(app: App, options: Options) -> list[Report]:
    """Return one line for each open experiment."""
    lines = lines_on_open_experiments(app.experiments)
    lines += [experiment.description for experiment in app.on_cluster]
    if not lines:
        lines.append("no experiment is open")
    return [note(line) for line in lines]


def _innermost(app: App) -> ManagedExperiment:
    """Return the experiment that was opened last here."""
    here = app.experiments.here()
    if here:
        return here[-1]
    if app.experiments.open:
        names = _open_names(app)
        raise ExperimentError(f"no experiment is open in this subshell; open elsewhere: {names}")
    raise ExperimentError("no experiment is open: %experiment start NAME opens one")


def _open_names(app: App) -> str:
    """Return the names of the open experiments, for an error message."""
    return ", ".join(repr(item.name) for item in app.experiments.open)


def lines_on_open_experiments(experiments: ExperimentManager) -> list[str]:
    """Return one line about each open experiment: time, memory, names, and objects to restore at
    its end.
    """
    lines = list[str]()
    names_inside: dict[object, set[str]] = {}
    """The new names of inner experiments, by the thread and client that opened them."""
    for experiment in reversed(experiments.open.copy()):  # the inner ones first
        inner_names = names_inside.setdefault((experiment.thread, experiment.client), set())
        # A new name of an inner experiment is new in the outer one, too, but not its own.
        names = [name for name in experiment.scope.own_names() if name not in inner_names]
        inner_names.update(name for name in names if name not in experiment.scope.saved)
        lines.append(_description(experiment, names))
    return lines[::-1]


def _description(experiment: ManagedExperiment, names: list[str]) -> str:
    """Return the line about one open experiment, which has bound ``names``."""
    log = experiment.log
    seconds = log.seconds(experiment.seconds_in_running_cell())
    parts = [f"experiment {experiment.name}", *times(seconds, log.elapsed_seconds)]
    parts += usage_parts(experiment.usage())
    parts.append(f"names: {listed(names) or 'none yet'}")
    to_restore = list[str]()
    of_kept_names = list[str]()
    for item in experiment.measured_scope.saved_memory():
        text = f"{item.name} {format_bytes(item.size_bytes)}"
        if experiment.scope.stays(item.name):
            of_kept_names.append(text)
        else:
            to_restore.append(text)
    if to_restore:
        parts.append(f"restored at the end: {', '.join(to_restore)}")
    if of_kept_names:
        sizes = ", ".join(of_kept_names)
        parts.append(f"kept names, whose earlier objects stay until the end: {sizes}")
    return " · ".join(parts)


_NAMES_SHOWN = 10


@command("%experiment list", "show the finished experiments, one row each")
def list_(app: App, options: Options) -> list[Report]:
    """Return one row per finished experiment."""
    still_open = [item.name for item in app.experiments.open]
    return [reports.experiments_report(list(app.experiments.finished), still_open)]


@command(
    "%experiment compare",
    "compare finished experiments: names, globs, or A#2 for the second run of A",
    argument("names", "NAME", offers=completions.finished_experiments, many=True),
)
def compare(app: App, options: Options) -> list[Report]:
    """Return the report that compares the finished experiments which match names, globs or
    ``name#2``; all by default.
    """
    runs = reports.numbered(app.experiments.finished)
    if not runs:
        raise ExperimentError("no experiment has finished yet: there is nothing to compare")
    for pattern in options.names:
        if not any(_matches(run, pattern) for run in runs):
            existing = available_names([run.name for run in runs])
            raise ExperimentError(f"no finished experiment matches {quoted(pattern)}; {existing}")
    if options.names:
        runs = [run for run in runs if _matches_any(run, options.names)]
    return [reports.comparison_report(runs)]


def _matches_any(run: reports.NumberedRun, patterns: Sequence[str]) -> bool:
    """Return True if a finished experiment matches one of the patterns."""
    return any(_matches(run, pattern) for pattern in patterns)


def _matches(run: reports.NumberedRun, pattern: str) -> bool:
    """Return True if ``pattern`` is a name or glob of a finished experiment, or ``name#2``."""
    return fnmatchcase(run.name, pattern) or pattern == f"{run.name}#{run.number}"


def available_names(names: list[str]) -> str:
    """Return the names of finished experiments, each once, for an error message."""
    unique = list(dict.fromkeys(names))
    if not unique:
        return "there is none"
    return f"available: {listed(unique, _NAMES_SHOWN)}"
