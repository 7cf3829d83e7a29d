"""Options of ``%%estimate``: ``--fit`` and ``--batch``."""

from __future__ import annotations

import types

from ipygpumem.errors import EstimateError
from ipygpumem.magics import completions
from ipygpumem.magics.estimate import with_code
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Call, option


def _fit(app: App, call: Call) -> list[Report]:
    """Find changes with which the cell fits: the command of both options."""
    __tracebackhide__ = True  # of the user's errors
    if call.options.fit is None:
        problem = "--batch names what --fit makes smaller: write --fit 24GiB, too"
        raise EstimateError(f"%%estimate: {problem}")

    def search(code: types.CodeType) -> list[Report]:
        """Return the reports on the cell's code."""
        __tracebackhide__ = True
        from ipygpumem.extras.fit import fit_command  # imports torch

        return fit_command.of_cell(app, call.options, code)

    return with_code(app, call.cell[0], search)


FIT = option(
    "--fit",
    "SIZE",
    "find changes with which it fits in this much, or on a device here: --fit cuda:0",
    run=_fit,
)
BATCH = option(
    "--batch",
    "NAME",
    "the variable with the size of a batch, for --fit",
    offers=completions.numbers,
    run=_fit,
)
