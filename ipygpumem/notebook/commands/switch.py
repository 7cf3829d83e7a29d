"""``%gpumem on`` and ``%gpumem off``: the line after each cell."""

from __future__ import annotations

from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.layout import Report, note


def switch_on(notebook: Notebook, options: Options) -> list[Report]:
    """Show the line after each cell from now on."""
    notebook.tools.config.report = True
    return [note("the report after each cell is on")]


def switch_off(notebook: Notebook, options: Options) -> list[Report]:
    """Show no line after cells any more; measuring goes on."""
    notebook.tools.config.report = False
    return [note("the report after each cell is off")]
