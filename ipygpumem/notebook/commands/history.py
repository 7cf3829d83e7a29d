"""``%gpumem history`` and ``export``, ``%experiment list`` and ``compare``: what has finished, chosen and shown."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ipygpumem.errors import ExperimentError
from ipygpumem.model import CellRecord
from ipygpumem.notebook.commands.parsing import Parser
from ipygpumem.reports import content
from ipygpumem.reports import history as reports
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook

_SHOWN = 20
_NAMES_SHOWN = 10


def history(notebook: Notebook, words: list[str]) -> list[content.Report]:
    """Return one row per finished cell, the last ones."""
    parser = Parser(prog="%gpumem history", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=_positive, default=_SHOWN, metavar="N")
    parser.add_argument("--experiment", metavar="NAME")
    options = parser.parse_args(words)
    cells = list(notebook.session.history)
    if options.experiment is not None:
        cells = _cells_of(notebook, options.experiment, cells)
    return [reports.history_report(cells[-options.n :], total=len(cells), experiment=options.experiment)]


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cells")
    return int(text)


def _cells_of(notebook: Notebook, pattern: str, cells: list[CellRecord]) -> list[CellRecord]:
    """Return the cells that ran in experiments whose name fits, or in an experiment inside them.

    Raises:
        ExperimentError: no experiment has that name.
    """
    known = [(item.name, item.cells) for item in notebook.experiments.finished] + [
        (e.name, e.cells) for e in notebook.experiments.open
    ]
    inside = {id(cell) for name, own in known for cell in own if fnmatchcase(name, pattern)}
    if not any(fnmatchcase(name, pattern) for name, _ in known):
        raise ExperimentError(f"no experiment fits {pattern!r}; {_there_are([name for name, _ in known])}")
    return [cell for cell in cells if id(cell) in inside]


def list_experiments(notebook: Notebook, words: list[str]) -> list[content.Report]:
    """Return one row per finished experiment."""
    Parser(prog="%experiment list", add_help=False).parse_args(words)
    return [
        reports.experiments_report(
            list(notebook.experiments.finished), [item.name for item in notebook.experiments.open]
        )
    ]


def compare(notebook: Notebook, words: list[str]) -> list[content.Report]:
    """Return finished experiments side by side: those that names, globs or ``name#2`` say; all without any."""
    runs = reports.numbered(notebook.experiments.finished)
    if not runs:
        raise ExperimentError("no experiment has finished yet: there is nothing to compare")
    for pattern in words:
        if not any(_fits(run, pattern) for run in runs):
            raise ExperimentError(f"no finished experiment fits {pattern!r}; {_there_are([run.name for run in runs])}")
    chosen = [run for run in runs if not words or any(_fits(run, pattern) for pattern in words)]
    return [reports.comparison_report(chosen)]


def _fits(run: reports.Run, pattern: str) -> bool:
    return fnmatchcase(run.name, pattern) or pattern == f"{run.name}#{run.number}"


def _there_are(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NAMES_SHOWN} more" if len(unique) > _NAMES_SHOWN else ""
    return f"there are: {', '.join(unique[:_NAMES_SHOWN])}{more}" if unique else "there is none"


def export(notebook: Notebook, words: list[str]) -> list[content.Report]:
    """Write what has finished to a file."""
    from ipygpumem.reports.export import formats  # loading the extension must stay fast

    parser = Parser(prog="%gpumem export", add_help=False, allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("--force", action="store_true")
    options = parser.parse_args(words)
    record = notebook.records()
    place, size_bytes = formats.save(options.file, record, force=options.force)
    cells, experiments = content.count(len(record.cells), "cell"), content.count(len(record.experiments), "experiment")
    return [content.note(f"{cells} and {experiments} are in {place} ({format_bytes(size_bytes)})")]


def names_of(notebook: Notebook) -> list[str]:
    """Return the names of the finished experiments."""
    return sorted({item.name for item in notebook.experiments.finished})
