"""The option ``--on`` of experiments and of commands that look at memory."""

from __future__ import annotations

from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Call, option


def _on_engines(app: App, call: Call) -> list[Report]:
    """Run a command on the engines that ``--on`` names."""
    __tracebackhide__ = True
    from ipygpumem.extras.cluster.on_engines import on_engines  # rarely used

    return on_engines(app, call)


ON = option(
    "--on",
    "ENGINES",
    "run on engines of an ipyparallel cluster: all, 0-3, or a view's name",
    offers=("all",),
    run=_on_engines,
)
