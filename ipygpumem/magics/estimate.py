"""``%%estimate``: estimates the memory that a cell would allocate, without running
it on a device.
"""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import loading
from ipygpumem.estimating.effects import refuse_without_tensors
from ipygpumem.estimating.records import Estimate
from ipygpumem.estimating.user_lines import users_part
from ipygpumem.notebook import running_cell
from ipygpumem.report.estimate import estimate_report
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, byte_size, command, duration, option
from ipygpumem.units import MIB

T = TypeVar("T")
_CALL_OF_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)'")


@command(
    "%%estimate",
    "estimate a cell's memory without running it on a device: its tensors are fake",
    option(
        "--device-memory",
        "SIZE",
        "check that it fits in this much, instead of the free memory",
        to=byte_size(minimum=MIB),
    ),
    option(
        "--device",
        "D",
        "assume all tensors on this device; you need not have it",
        offers=("RAM", "cuda:0"),
    ),
    option("--timeout", "SECONDS", "stop after this time and name the line (300)", to=duration),
    option(
        "--assume",
        "LINE=FRACTION",
        "what a line selects, such as x[x > 0]: --assume 5=0.25; else all that it can",
        many=True,
    ),
    details=(
        "The cell runs at once, in the notebook's process, and its changes are undone. Build the "
        "model inside the cell:\n16 GB of weights take no memory there."
    ),
)
def of_cell(app: App, options: Options, cell: str) -> list[Report]:
    """Return the report of a cell's estimate. Below ``%%autofit`` return none, because the autofit
    shows the report of its last try.
    """
    __tracebackhide__ = True  # of the user's errors

    def estimate(code: types.CodeType) -> Estimate:
        __tracebackhide__ = True
        timeout = options.timeout or loading.import_estimator().TIMEOUT_SECONDS
        estimation = loading.new_estimation(
            options.device, options.device_memory, timeout, options.assume
        )
        result: Estimate = estimation.of_code(code, app.context.namespace)
        return result

    result = with_code(app, cell, estimate)
    reports = [estimate_report(result)]
    running = app.context.cells.running()
    if not running or running[-1].fit is None:
        return reports
    running[-1].fit.estimated(result, reports)
    return []


def with_code(app: App, cell: str, use: Callable[[types.CodeType], T]) -> T:
    """Compile a cell, call ``use`` with its code, and return the result.

    Raises:
        EstimateError: the cell is empty, or torch cannot make estimates.
        Exception: a ``SyntaxError`` of the cell, which IPython then shows like a plain cell's.
    """
    __tracebackhide__ = True
    if not cell.strip():
        problem = "the cell is empty: write the code to estimate below the line with %%estimate"
        raise EstimateError(f"%%estimate: {problem}")
    shell = app.context.shell
    try:
        code = _compiled(shell, cell)
        refuse_without_tensors(code, (app.context.namespace,))  # before torch takes seconds
        # Without a torch that can make estimates, that is the error, not the cell's own ones.
        loading.import_estimator()
        return use(code)
    except SyntaxError as error:
        # IPython shows a SyntaxError with all frames, also ours. So another exception of this name
        # is raised, which shows the text that IPython has for the SyntaxError of a plain cell.
        frames = traceback.extract_tb(users_part(error.__traceback__))
        shown = shell.SyntaxTB.structured_traceback(type(error), error, frames)
        kind: type[Exception] = type(
            type(error).__name__, (Exception,), {"_render_traceback_": lambda _: shown}
        )
        raise kind(str(error)) from None


def _compiled(shell: Any, cell: str) -> Any:
    """Compile the cell with its own line numbers; the magic's line is the first.

    Raises:
        EstimateError: the cell contains another magic, or an ``await`` at its top level.
        SyntaxError: the cell is not Python.
    """
    source = "\n" + shell.transform_cell(cell)
    call = _CALL_OF_MAGIC.search(source)
    if call is not None:
        kind, name_of_magic = call.groups()
        if name_of_magic == "autofit":
            raise EstimateError("write %%autofit above %%estimate")
        sign = "%%" if kind == "cell" else "%"
        raise EstimateError(
            f"{sign}{name_of_magic} acts on the notebook itself: take it out of a cell to estimate"
        )
    name = shell.compile.cache(source, running_cell(shell))
    try:
        return compile(source, name, "exec")
    except SyntaxError as error:
        if "await" in str(error) or "async" in str(error):
            raise EstimateError(
                "%%estimate: an estimated cell can await only inside an async function"
            ) from None
        raise
