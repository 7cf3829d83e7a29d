"""``%%estimate``: what a cell would take, without running it on a device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import EstimateError
from ipygpumem.notebook.parsing import Parser, size, split
from ipygpumem.reports.layout import Report

if TYPE_CHECKING:
    from ipygpumem.notebook.session import Session

_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)'")


def estimate(session: Session, shell: Any, line: str, cell: str) -> list[Report]:
    """Return the report on a cell.

    Raises:
        EstimateError: torch is missing or too old, or the cell cannot be followed.
    """
    parser = Parser(prog="%%estimate", add_help=False, allow_abbrev=False)
    parser.add_argument("--device-memory", type=size, metavar="SIZE")
    parser.add_argument("--device", metavar="D")
    options = parser.parse_args(split("%%estimate", line))
    if not cell.strip():
        raise EstimateError("%%estimate: the cell is empty; write the code to estimate below the first line")
    from ipygpumem import estimating  # loading the extension must stay fast
    from ipygpumem.reports.estimate import estimate_report

    code = _compiled(shell, cell)
    found = estimating.estimator().estimate_code(
        code, session.namespace, device=options.device, room_bytes=options.device_memory
    )
    return [estimate_report(found)]


def _compiled(shell: Any, cell: str) -> Any:
    """Return the cell's code, whose lines have the numbers that the user sees: the magic's is the first.

    Raises:
        EstimateError: the cell has magics, whose code would run in the notebook's own namespace, or awaits.
    """
    source = "\n" + shell.transform_cell(cell)
    magic = _MAGIC.search(source)
    if magic is not None:
        sign = "%%" if magic[1] == "cell" else "%"
        raise EstimateError(f"{sign}{magic[2]} works on the notebook itself: leave it out of a cell to estimate")
    name = shell.compile.cache(source)
    try:
        return compile(source, name, "exec")
    except SyntaxError as error:
        if "await" in str(error) or "async" in str(error):
            raise EstimateError("%%estimate: await works inside async functions only, in a cell to estimate") from None
        raise
