"""Registers all commands and optional features: it stands above all rooms.

A new command is declared above its function, in a file of ``magics/`` or of a folder in
``extras/``; its name in a table below makes it known. To remove an optional feature, delete its
folder in ``extras/``, its lines here, and if it has functions or records, those in ``__init__.py``
and ``reading.py``. Nothing else imports one.

Each function below imports its module when one of its commands is used for the first time, so that
loading the extension stays fast.
"""

from __future__ import annotations

from typing import Any

from ipygpumem.shell.commands.declarations import (
    Argument,
    Command,
    CommandGroup,
    CommandModule,
    CommandTable,
    Features,
    Magic,
)

# -- the core --------------------------------------------------------------------------------------


def _experiment() -> tuple[Command, ...]:
    from ipygpumem.magics import experiment as module  # on first use, as in all functions below

    return (module.start, module.end, module.keep, module.status, module.list_, module.compare)


def _experiment_cell() -> Command:
    from ipygpumem.magics.experiment import of_cell  # on first use

    return of_cell


def _short_status() -> Command:
    from ipygpumem.magics.gpumem import short_status  # on first use

    return short_status


def _settings() -> tuple[Command, ...]:
    from ipygpumem.magics import gpumem as module  # on first use

    return (module.on, module.off, module.quiet, module.status, module.preload, module.free)


def _leaks() -> tuple[Command, ...]:
    from ipygpumem.magics.leaks import leaks  # on first use

    return (leaks,)


def _why() -> tuple[Command, ...]:
    from ipygpumem.magics.why import why  # on first use

    return (why,)


def _tensors() -> tuple[Command, ...]:
    from ipygpumem.magics.tensors import tensors, top  # on first use

    return (top, tensors)


def _history_and_export() -> tuple[Command, ...]:
    from ipygpumem.magics.gpumem import export, history  # on first use

    return (history, export)


def _autofit() -> Command:
    from ipygpumem.magics.autofit import of_cell  # on first use

    return of_cell


def _estimate() -> Command:
    from ipygpumem.magics.estimate import of_cell  # on first use

    return of_cell


# -- optional features -----------------------------------------------------------------------------


def _guard() -> tuple[Command, ...]:
    from ipygpumem.extras.guard.guard_command import guard  # on first use

    return (guard,)


def _plot() -> tuple[Command, ...]:
    from ipygpumem.extras.pictures.plot_command import plot  # on first use

    return (plot,)


def _panel() -> tuple[Command, ...]:
    from ipygpumem.extras.panel.panel_command import show_panel  # on first use

    return (show_panel,)


def _recorder_commands() -> tuple[Command | CommandGroup, ...]:
    from ipygpumem.extras.recorder.recorder_commands import RECORDER, postmortem  # on first use

    return (RECORDER, postmortem)


def _recorder(context: Any) -> Any:
    from ipygpumem.extras.recorder.recorder import Recorder  # on first use

    return Recorder(context)


def _gpumemit() -> Command:
    from ipygpumem.extras.lines.gpumemit import of_line  # on first use

    return of_line


def _gpumemit_cell() -> Command:
    from ipygpumem.extras.lines.gpumemit import of_cell  # on first use

    return of_cell


def _memlines() -> Command:
    from ipygpumem.extras.lines.memlines import of_cell  # on first use

    return of_cell


def _isolate() -> Command:
    from ipygpumem.extras.isolate.isolate import of_cell  # on first use

    return of_cell


def _peak() -> Command:
    from ipygpumem.extras.peak.peak_command import of_cell  # on first use

    return of_cell


def _on() -> tuple[Argument, ...]:
    from ipygpumem.extras.cluster.on_option import ON  # on first use

    return (ON,)


def _fit() -> tuple[Argument, ...]:
    from ipygpumem.extras.fit.fit_options import BATCH, FIT  # on first use

    return (FIT, BATCH)


# -- the tables ------------------------------------------------------------------------------------


_EXPERIMENT = CommandGroup(
    "%experiment",
    "group several cells into an experiment",
    (CommandModule(("start", "end", "keep", "status", "list", "compare"), _experiment),),
    details="``%%experiment`` as a cell's first line does all of this for one cell.",
)
_GPUMEM = CommandGroup(
    "%gpumem",
    "show what uses memory, and free it",
    (
        CommandModule(("on", "off", "quiet", "status", "preload", "free"), _settings),
        CommandModule(("leaks",), _leaks),
        CommandModule(("why",), _why),
        CommandModule(("top", "tensors"), _tensors),
        CommandModule(("history", "export"), _history_and_export),
        CommandModule(("plot",), _plot),
        CommandModule(("panel",), _panel),
        CommandModule(("guard",), _guard),
        CommandModule(("recorder", "postmortem"), _recorder_commands),
    ),
    alone=_short_status,
    details=(
        "``%gpumem`` alone shows a short status and the largest names. Options: "
        "``%config IPyGpuMem``.\n\n"
        "More magics, each with ``-h``: ``%%experiment``, ``%experiment``, ``%%peak``, "
        "``%%estimate``, ``%%autofit``,\n``%%isolate``, ``%%memlines``, ``%gpumemit``, "
        "``%%gpumemit``."
    ),
)
_MAGICS = (
    Magic("%experiment", lambda: _EXPERIMENT),
    Magic("%%experiment", _experiment_cell),
    Magic("%gpumem", lambda: _GPUMEM),
    Magic("%gpumemit", _gpumemit, runs_line=True),
    Magic("%%gpumemit", _gpumemit_cell, runs_line=True),
    Magic("%%isolate", _isolate),
    Magic("%%memlines", _memlines),
    Magic("%%peak", _peak),
    Magic("%%autofit", _autofit),
    Magic("%%estimate", _estimate),
)
_MORE_OPTIONS = {
    "%experiment start": _on,
    "%experiment end": _on,
    "%%experiment": _on,
    "%gpumem status": _on,
    "%gpumem free": _on,
    "%gpumem leaks": _on,
    "%%estimate": _fit,
}
"""Functions that return further options of a command, by its name."""


def all_features() -> Features:
    """Return all commands and optional features, for one shell."""
    return Features(CommandTable(_MAGICS, _MORE_OPTIONS), _recorder)
