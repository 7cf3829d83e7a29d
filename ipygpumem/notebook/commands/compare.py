"""``%experiment list`` and ``%experiment compare``: the experiments that have finished."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports import history as reports
from ipygpumem.reports.layout import Report

_NAMES_SHOWN = 10


def list_experiments(notebook: Notebook, options: Options) -> list[Report]:
    """Return one row per finished experiment."""
    still_open = [item.name for item in notebook.experiments.open]
    return [reports.experiments_report(list(notebook.experiments.finished), still_open)]


def compare(notebook: Notebook, options: Options) -> list[Report]:
    """Return finished experiments side by side: those that names, globs or ``name#2`` say; all without any."""
    runs = reports.numbered(notebook.experiments.finished)
    if not runs:
        raise ExperimentError("no experiment has finished yet: there is nothing to compare")
    for pattern in options.names:
        if not any(_fits(run, pattern) for run in runs):
            raise ExperimentError(
                f"no finished experiment matches {quoted(pattern)}; {there_are([run.name for run in runs])}"
            )
    chosen = [run for run in runs if not options.names or any(_fits(run, pattern) for pattern in options.names)]
    return [reports.comparison_report(chosen)]


def _fits(run: reports.NumberedRun, pattern: str) -> bool:
    return fnmatchcase(run.name, pattern) or pattern == f"{run.name}#{run.number}"


def there_are(names: list[str]) -> str:
    """Return which experiments there are, for an error."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NAMES_SHOWN} more" if len(unique) > _NAMES_SHOWN else ""
    return f"there are: {', '.join(unique[:_NAMES_SHOWN])}{more}" if unique else "there is none"
