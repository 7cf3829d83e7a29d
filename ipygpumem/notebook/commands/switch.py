"""``%gpumem on`` and ``%gpumem off``: the line after each cell."""

from __future__ import annotations

from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.session import Session
from ipygpumem.reports.content import Report, note


def switch_on(session: Session, options: Options) -> list[Report]:
    """Show the line after each cell from now on."""
    session.config.report = True
    return [note("the report after each cell is on")]


def switch_off(session: Session, options: Options) -> list[Report]:
    """Show no line after cells any more; measuring goes on."""
    session.config.report = False
    return [note("the report after each cell is off")]
