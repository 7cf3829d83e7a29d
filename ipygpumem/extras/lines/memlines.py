"""``%%memlines``: follows the lines of a cell and of functions, from the cell's first line to its
end.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.extras.lines.lines import (
    MOST_RUNS,
    CodeBlock,
    LineCost,
    LinesRecord,
    Tracer,
    code_of,
)
from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.introspect import code_lines
from ipygpumem.magics import completions
from ipygpumem.report.devices import device_label, is_worth_a_row
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.words import clean, count, listed
from ipygpumem.shell.app import App
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.commands.declarations import Options, command, option
from ipygpumem.units import format_change, format_seconds, format_short_seconds

_PROG = "%%memlines"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_UNSEEN = "lines that reuse such pages show less than they used"
_LONGEST_SHOWN = 100
"""Maximum length of a block that is shown including lines that did not run."""

ORDERS = ("line", "kept", "peak", "time", "hits")


@command(
    _PROG,
    "measure each line of a cell, and of functions: memory kept, peak, runs and time",
    option(
        "-f",
        "FUNCTION",
        "functions or methods to measure too: -f train Model.forward",
        offers=completions.functions,
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
    running = app.context.cells.running()
    namespace = app.context.namespace
    frame = _frame_of_cell(sys._getframe(1), namespace)
    if not running or frame is None:
        raise UsageError(f"{_PROG} must be the first line of a cell that you run yourself")
    if _has_lines_below(frame):
        raise UsageError(
            f"{_PROG} comes too late here: write it above %%autofit, as the cell's first line"
        )
    cell = running[-1]
    file = frame.f_code.co_filename
    tracer = Tracer(app.context.meter, file, _cell_block(file, cell))
    _follow_functions(tracer, options.f, cell, namespace)

    def finish() -> list[Report]:
        """End the measurement, and return its report."""
        if not tracer.has_started:
            return []
        return [lines_report(tracer.finish(), options.sort)]

    def drop() -> list[Report]:
        """End the measurement without a report."""
        tracer.drop()
        return []

    # They run in the other order. If a Ctrl-C stops ``finish``, ``drop`` still ends it.
    cell.at_code_end += [drop, finish]
    tracer.start()
    return []


def _follow_functions(
    tracer: Tracer, words: Iterable[str], cell: Cell, namespace: dict[str, Any]
) -> None:
    """Follow the functions that the user names: ``-f train,Model.forward test``.

    Functions that the cell itself defines are followed as parts of the cell.

    Raises:
        UsageError: there is no such function.
    """
    bindings = cell.code.bindings()
    defined_here = bindings.bound - bindings.imported
    for word in words:
        for name in word.split(","):
            if name and name.partition(".")[0] not in defined_here:
                tracer.add(name, _code_of_function(name, namespace))


def _frame_of_cell(frame: FrameType | None, namespace: dict[str, Any]) -> FrameType | None:
    """Return the innermost frame that runs a cell's own lines; None if there is none.

    It is in the notebook's namespace, and not in a function. IPython versions name a cell's code
    differently, so its flags are examined.
    """
    for caller in stack(frame):
        is_function = caller.f_code.co_flags & inspect.CO_NEWLOCALS
        if caller.f_globals is namespace and not is_function:
            return caller
    return None


def _has_lines_below(frame: FrameType) -> bool:
    """Return True if the code of a frame goes on after its current line.

    The code of a cell magic is one call alone, which gets the rest of the cell as a text.
    """
    lines = [line for _, _, line in frame.f_code.co_lines() if line is not None]
    return max(lines, default=0) > frame.f_lineno


def _cell_block(file: str, cell: Cell) -> CodeBlock:
    """Return a cell's lines as they were compiled, but its magics as they were written."""
    compiled = [line.rstrip("\n") for line in linecache.getlines(file)]
    written = cell.source.splitlines()  # as IPython splits what it has compiled
    if len(written) == len(compiled):
        return CodeBlock("cell", first_line=1, source=tuple(code_lines(cell.source.rstrip("\n"))))
    # A magic with several lines is one compiled line, so that later lines have other numbers.
    lines = []
    for position, line in enumerate(compiled):
        is_magic = line.startswith("get_ipython().") and position < len(written)
        if is_magic:
            line = written[position]
        lines.append(line)
    return CodeBlock("cell", first_line=1, source=tuple(lines))


def _code_of_function(name: str, namespace: dict[str, Any]) -> CodeType:
    """Return the code of the function or method called ``name``.

    Raises:
        UsageError: there is none.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{_PROG}: {clean(name)!r} is not a name: write -f train or -f Model.forward"
        )
    variable, *attributes = name.split(".")
    if variable not in namespace:
        hint = (
            "import it in an earlier cell; functions that the cell itself defines are followed "
            "without -f"
        )
        raise UsageError(f"{_PROG}: there is no {clean(variable)!r} here; {hint}")
    value = namespace[variable]
    for attribute in attributes:
        static = inspect.getattr_static(value, attribute, None)
        try:
            value = static if isinstance(static, property) else getattr(value, attribute)
        except AttributeError:
            raise UsageError(f"{_PROG}: {clean(name)!r}: there is no {attribute!r}") from None
    is_class = isinstance(value, type)
    code = None if is_class else code_of(value)
    if code is not None:
        return code
    hint = "write a method as Model.forward" if is_class else "it has no lines of Python"
    kind = clean(type(value).__name__)
    raise UsageError(f"{_PROG}: {clean(name)!r} is a {kind}, not a function: {hint}")


# -- the report ---------------------------------------------------------------------------------


def lines_report(record: LinesRecord, order: str) -> Report:
    """Return one table per block, in the order of lines or of cost, the most expensive first."""
    devices = _devices_changed(record)
    blocks_that_ran = {block for block, _ in record.costs}
    notes = []
    if record.error:
        notes.append(f"measuring stopped early: {clean(record.error)}")
    tables = []
    for number, block in enumerate(record.blocks):
        if number in blocks_that_ran:
            tables.append(_table_of_block(record, number, devices, order))
        else:
            notes.append(f"{clean(block.title)} did not run")
    notes += _notes_on_runs_together(record)
    if record.untrimmed:
        times = count(record.untrimmed, "time")
        notes.append(
            f"{times} free heap pages were not freed before a line, because that takes too long: "
            f"{_UNSEEN}"
        )
    lines = f"{count(len(record.costs), 'line')} ran"
    measuring = f"of which measuring took {format_short_seconds(record.own_seconds)}"
    headline = f"memlines · {lines} · {format_seconds(record.seconds)}, {measuring}"
    return Report("memlines", headline, notes, tables)


def _notes_on_runs_together(record: LinesRecord) -> list[str]:
    """Return a note for each line whose figures include runs that were not measured one by one."""
    notes = []
    for (block, line), keys in sorted(record.measured_together.items()):
        further_lines = [f"line {number}" for _, number in sorted(keys - {(block, line)})]
        all_lines = listed([f"line {line}", *further_lines], 6)
        title = clean(record.blocks[block].title)
        notes.append(
            f"{all_lines}: each run after the first {MOST_RUNS:,} was not measured alone; together "
            f"they count as one run of line {line} ({title})"
        )
    return notes


def _devices_changed(record: LinesRecord) -> list[str]:
    """Return the devices whose memory the lines changed, the host first."""
    devices = set[str]()
    for cost in record.costs.values():
        for device, peak in cost.peak_bytes.items():
            largest_bytes = max(peak, abs(cost.kept_bytes.get(device, 0)))
            if device == "cpu" or (largest_bytes and is_worth_a_row(device, largest_bytes)):
                devices.add(device)
    return sorted(devices, key=lambda device: (device != "cpu", device)) or ["cpu"]


def _table_of_block(record: LinesRecord, number: int, devices: list[str], order: str) -> Table:
    """Return the table of a block.

    Args:
        record: the costs of all lines.
        number: the number of the block.
        devices: the devices to show.
        order: the value of ``--sort``.
    """
    block = record.blocks[number]
    costs = {line: cost for (owner, line), cost in record.costs.items() if owner == number}
    figures = []
    for device in devices:
        figures += [f"{device_label(device)} kept", f"{device_label(device)} peak"]
    columns = ("line", "hits", "time", *figures, "source")
    lines = _lines_to_show(block, costs, order)
    rows = [_line_row(line, block, costs.get(line), devices) for line in lines]
    is_cell_alone = block.title == "cell" and len(record.blocks) == 1
    title = "" if is_cell_alone else clean(block.title)
    return Table(title, columns, rows, set(columns[:-1]), {"source"})


def _lines_to_show(block: CodeBlock, costs: Mapping[int, LineCost], order: str) -> list[int]:
    """Return the numbers of the lines of a block in their order in the table.

    By number, a short block also has the lines that did not run; by cost, only lines that ran.
    """
    if order != "line":
        return sorted(costs, key=lambda line: _figure_to_sort_by(costs[line], order), reverse=True)
    lines = set(costs)
    if len(block.source) <= _LONGEST_SHOWN:
        lines.update(range(block.first_line, block.first_line + len(block.source)))
    return sorted(lines)


def _figure_to_sort_by(cost: LineCost, order: str) -> float:
    """Return the figure of a line by which ``--sort`` orders the lines; for memory, that of the
    device where it is highest.
    """
    match order:
        case "kept":
            return max(cost.kept_bytes.values(), default=0)
        case "peak":
            return max(cost.peak_bytes.values(), default=0)
        case "time":
            return cost.seconds
        case _:
            return cost.hits


def _line_row(line: int, block: CodeBlock, cost: LineCost | None, devices: list[str]) -> list[str]:
    """Return the cells of a line's row; a line that did not run has only its source."""
    index = line - block.first_line
    source = ""
    if 0 <= index < len(block.source):
        source = block.source[index].expandtabs(4)
    if cost is None:
        no_figures = [""] * (2 + 2 * len(devices))
        return [str(line), *no_figures, source]
    memory = []
    for device in devices:
        memory.append(format_change(cost.kept_bytes.get(device, 0)))
        memory.append(format_change(cost.peak_bytes.get(device, 0)))
    return [str(line), str(cost.hits), format_short_seconds(cost.seconds), *memory, source]
