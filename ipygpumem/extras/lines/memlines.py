"""``%%memlines``: follows the lines of a cell and of functions, from the cell's first line to its
end.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.extras.lines.lines import CodeBlock, LineCost, LinesRecord, Tracer, code_of
from ipygpumem.magics import sources
from ipygpumem.report.layout import Report, Table, clean, count, device_label
from ipygpumem.shell.app import App
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.commands.declarations import Options, command, option
from ipygpumem.units import format_change, format_seconds, format_short_seconds

_PROG = "%%memlines"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_UNSEEN = "lines that reuse such pages show less than they used"
_LONGEST_SHOWN = 100
"""Maximum length of a block that is shown including lines that did not run."""

_KEYS: dict[str, Callable[[LineCost], float]] = {
    "kept": lambda cost: max(cost.kept_bytes.values(), default=0),
    "peak": lambda cost: max(cost.peak_bytes.values(), default=0),
    "time": lambda cost: cost.seconds,
    "hits": lambda cost: cost.hits,
}
ORDERS = ("line", *_KEYS)


@command(
    _PROG,
    "measure each line of a cell, and of functions: memory kept, peak, runs and time",
    option(
        "-f",
        "FUNCTION",
        "functions or methods to measure too: -f train Model.forward",
        offers=sources.functions,
        many=True,
    ),
    option(
        "--sort",
        "",
        "order of the lines: by number, or most expensive first",
        choices=ORDERS,
        default="line",
    ),
)
def of_cell(app: App, options: Options) -> list[Report]:
    """Follow the lines of the running cell until it ends."""
    running, namespace = app.context.cells.running(), app.context.namespace
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals is not namespace or frame.f_code.co_flags & inspect.CO_NEWLOCALS
    ):
        # by its flags, because IPython versions name a cell's code differently
        frame = frame.f_back
    if not running or frame is None:
        raise UsageError(f"{_PROG} must be the first line of a cell that you run yourself")
    if any(
        number > frame.f_lineno for _, _, number in frame.f_code.co_lines() if number is not None
    ):
        raise UsageError(
            f"{_PROG} comes too late here: write it above %%autofit, as the cell's first line"
        )
    file = frame.f_code.co_filename
    bindings = running[-1].code.bindings()
    tracer = Tracer(app.context.meter, file, _cell_block(file, running[-1]))
    for name in (part for word in options.f for part in word.split(",") if part):
        if name.partition(".")[0] not in bindings.bound - bindings.imported:
            _add(tracer, name, namespace)

    def finish() -> list[Report]:
        return [lines_report(tracer.finish(), options.sort)]

    def drop() -> list[Report]:
        tracer.drop()
        return []

    # the last one first; a Ctrl-C that ends it leaves the other
    running[-1].closers += [
        drop,
        finish,
    ]
    tracer.start()
    return []


def _cell_block(file: str, cell: Cell) -> CodeBlock:
    compiled = [line.rstrip("\n") for line in linecache.getlines(file)]
    written = str(getattr(cell.info, "raw_cell", "")).splitlines()
    if len(written) != len(compiled):  # a magic's line has taken up those below it
        ours = {
            at
            for at, line in enumerate(compiled)
            if line.startswith("get_ipython().") and at < len(written)
        }
        written = [written[at] if at in ours else line for at, line in enumerate(compiled)]
    return CodeBlock("cell", 1, tuple(written))


def _add(tracer: Tracer, name: str, namespace: dict[str, Any]) -> None:
    """Follow the function called ``name``."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{_PROG}: {clean(name)!r} is not a name: write -f train or -f Model.forward"
        )
    first, *rest = name.split(".")
    if first not in namespace:
        hint = (
            "import it in an earlier cell; functions that the cell itself defines are followed "
            "without -f"
        )
        raise UsageError(f"{_PROG}: there is no {clean(first)!r} here; {hint}")
    value = namespace[first]
    for part in rest:
        static = inspect.getattr_static(value, part, None)
        try:
            value = static if isinstance(static, property) else getattr(value, part)
        except AttributeError:
            raise UsageError(f"{_PROG}: {clean(name)!r}: there is no {part!r}") from None
    code = None if isinstance(value, type) else code_of(value)
    if code is None:
        hint = (
            "write a method as Model.forward"
            if isinstance(value, type)
            else "it has no lines of Python"
        )
        raise UsageError(
            f"{_PROG}: {clean(name)!r} is a {clean(type(value).__name__)}, not a function: {hint}"
        )
    tracer.add(name, code)


# -- the report ---------------------------------------------------------------------------------


def lines_report(record: LinesRecord, order: str) -> Report:
    """Return one table per block, in the order of lines or of cost, the most expensive first."""
    used = {
        device: None
        for cost in record.costs.values()
        for device, peak in cost.peak_bytes.items()
        if device == "cpu" or peak or cost.kept_bytes.get(device)
    }
    devices = sorted(used, key=lambda device: (device != "cpu", device)) or ["cpu"]
    ran = {block for block, _ in record.costs}
    blocks = list(enumerate(record.blocks))
    tables = [
        _table(record, number, block, devices, order) for number, block in blocks if number in ran
    ]
    notes = [f"measuring stopped early: {clean(record.error)}"] * bool(record.error)
    notes += [f"{clean(block.title)} did not run" for number, block in blocks if number not in ran]
    if record.untrimmed:
        times = count(record.untrimmed, "time")
        notes.append(
            f"{times} free heap pages were not freed before a line, because that takes too long: "
            f"{_UNSEEN}"
        )
    share = (
        f"{format_seconds(record.seconds)}, of which measuring took "
        f"{format_short_seconds(record.own_seconds)}"
    )
    headline = f"memlines · {count(len(record.costs), 'line')} ran · {share}"
    return Report("memlines", headline, notes, tables)


def _table(
    record: LinesRecord, number: int, block: CodeBlock, devices: list[str], order: str
) -> Table:
    costs = {line: cost for (owner, line), cost in record.costs.items() if owner == number}
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak")]
    shown = range(
        block.first_line,
        block.first_line + len(block.source) * (len(block.source) <= _LONGEST_SHOWN),
    )
    lines = sorted({*costs, *shown})
    if order != "line":
        lines = sorted(costs, key=lambda line: -_KEYS[order](costs[line]))
    rows = [_row(line, block, costs.get(line), devices) for line in lines]
    columns = ("line", "hits", "time", *figures, "source")
    return Table(
        clean(block.title), columns, tuple(rows), frozenset(columns[:-1]), frozenset({"source"})
    )


def _row(line: int, block: CodeBlock, cost: LineCost | None, devices: list[str]) -> tuple[str, ...]:
    index = line - block.first_line
    source = block.source[index].expandtabs(4) if 0 <= index < len(block.source) else ""
    if cost is None:
        return (str(line), "", "", *("" for _ in devices for _ in range(2)), source)
    memory = [
        format_change(figure.get(device, 0))
        for device in devices
        for figure in (cost.kept_bytes, cost.peak_bytes)
    ]
    return (str(line), str(cost.hits), format_short_seconds(cost.seconds), *memory, source)
