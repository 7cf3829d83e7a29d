"""``%%estimate``: estimates the memory that a cell would allocate, without running
it on a device.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import loading, users_part
from ipygpumem.magics.parsing import Options
from ipygpumem.report.estimate import estimate_report
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.registry import EXTRAS, loaded

_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)'")


def of_cell(app: App, options: Options, cell: str) -> list[Report]:
    """Return the estimate of a cell as a report."""
    if not cell.strip():
        raise EstimateError(
            "%%estimate: the cell is empty; write the code to estimate below the first line"
        )
    __tracebackhide__ = True  # of the user's errors
    shell = app.context.shell
    module = loading.loaded()
    try:
        if options.fit is not None:
            return loaded(f"extras.{EXTRAS['--fit']}.of_cell")(app, options, _compiled(shell, cell))  # type: ignore[no-any-return]
        if options.batch is not None:
            raise EstimateError(
                "%%estimate: --batch names what --fit makes smaller: write --fit 24GiB, too"
            )
        timeout = options.timeout or module.TIMEOUT_SECONDS
        estimation = loading.estimation(options.device, options.device_memory, timeout)
        result = estimation.of_code(_compiled(shell, cell), app.context.namespace)
    except SyntaxError as error:
        # Shown like a plain cell's: for a real SyntaxError IPython would show our frames too.
        frames = traceback.extract_tb(users_part(error.__traceback__))
        shown = shell.SyntaxTB.structured_traceback(type(error), error, frames)
        kind: type[Exception] = type(
            type(error).__name__, (Exception,), {"_render_traceback_": lambda _: shown}
        )
        raise kind(str(error)) from None
    reports = [estimate_report(result)]
    running = app.context.cells.running()
    if not running or running[-1].fit is None:
        return reports
    running[-1].fit.estimated(result, reports)
    return []


def _compiled(shell: Any, cell: str) -> Any:
    """Compile the cell with its own line numbers; the magic's line is the first."""
    source = "\n" + shell.transform_cell(cell)
    magic = _MAGIC.search(source)
    if magic is not None:
        if magic[2] == "autofit":
            raise EstimateError("write %%autofit above %%estimate")
        sign = "%%" if magic[1] == "cell" else "%"
        raise EstimateError(
            f"{sign}{magic[2]} acts on the notebook itself: take it out of a cell to estimate"
        )
    # execution_count may be the next cell's
    number = len(shell.history_manager.input_hist_parsed) - 1
    name = shell.compile.cache(source, number)
    try:
        return compile(source, name, "exec")
    except SyntaxError as error:
        if "await" in str(error) or "async" in str(error):
            raise EstimateError(
                "%%estimate: an estimated cell can await only inside an async function"
            ) from None
        raise
