"""``%gpumem panel``."""

from __future__ import annotations

from IPython.display import display

from ipygpumem.extras.panel.panel import panel, why_no_panel
from ipygpumem.report.layout import Report, note
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, command


@command("%gpumem panel", "show a live panel, which moves while cells run")
def show_panel(app: App, options: Options) -> list[Report]:
    """Display the panel, or return why there can be none."""
    reason = why_no_panel(app)
    if reason:
        return [note(reason)]
    display(panel())
    return []
