"""``%gpumemit`` and ``%%gpumemit``: parses their lines and statements, and reports the costs."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from types import CodeType
from typing import Any, TypeVar

from IPython.core.error import UsageError

from ipygpumem.extras.lines.statements import Cost, Statement, measure
from ipygpumem.introspect import code_lines
from ipygpumem.magics import completions
from ipygpumem.report.devices import device_label
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.words import clean, clean_name, count
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, argument, command, integer, option
from ipygpumem.units import format_bytes, format_change, format_short_seconds

T = TypeVar("T", int, float)
_SEPARATING_LINE = re.compile(r"^---[ \t]*$", re.MULTILINE)


_RUNS = option(
    "-r", "RUNS", "measured runs, after one warm-up run", to=integer(maximum=10_000), default=5
)
_SETUP = option("-s", "'SETUP'", "code to run before each run, not measured", default="")


@command(
    "%gpumemit",
    "measure a statement: memory kept, peak and time",
    _RUNS,
    _SETUP,
    argument(
        "code",
        "STATEMENT",
        offers=completions.names,
        is_code=True,
        missing="which statement? For instance: %gpumemit -r 3 torch.relu(x)",
    ),
    details=(
        "Names that the statement binds are local to it; its changes to your objects remain. "
        "``%%gpumemit`` compares\nseveral."
    ),
)
def of_line(app: App, options: Options) -> list[Report]:
    """Return the cost of the statement in a line."""
    __tracebackhide__ = True
    statement = _statement(app.context.shell, options.code)
    return _report_of(app, options, [statement])


@command(
    "%%gpumemit",
    "compare statements: memory kept, peak and time",
    _RUNS,
    _SETUP,
    argument("code", "", is_code=True),  # refused below, with a hint
    details=(
        "Each line of the cell is a statement; separate longer ones with lines ``---``. Names that "
        "a statement binds\nare local to it; its changes to your objects remain."
    ),
)
def of_cell(app: App, options: Options, cell: str) -> list[Report]:
    """Return the costs of the statements of a cell, side by side."""
    __tracebackhide__ = True
    if options.code:
        word = clean(options.code)
        raise UsageError(
            f"%%gpumemit: {word!r} cannot stand on the first line: write statements below it, "
            f"setup after -s"
        )
    statements = _statements_of_cell(app.context.shell, cell)
    if not statements:
        raise UsageError("%%gpumemit: which statements? Write them below, one on each line")
    return _report_of(app, options, statements)


def _report_of(app: App, options: Options, statements: list[Statement]) -> list[Report]:
    """Run statements as the options say, and return the report of their costs."""
    __tracebackhide__ = True
    context = app.context
    setup = _compiled(context.shell, options.s) if options.s else None
    costs, nothing = measure(
        context.meter, statements, context.namespace, setup=setup, repeats=options.r
    )
    return [statements_report(costs, nothing)]


def _statements_of_cell(shell: Any, cell: str) -> list[Statement]:
    """Return the statements of a cell: the code between ``---`` lines, or one per line if there is
    none.
    """
    if _SEPARATING_LINE.search(cell):
        parts = _SEPARATING_LINE.split(cell)
        return [_statement(shell, part) for part in parts if part.strip()]
    source = shell.transform_cell(cell)
    with _mistakes_told_in_one_line(source):
        tree = ast.parse(source, "<gpumemit>")
    spans: list[tuple[int, int]] = []
    """First and last line of each statement; ``a = 1; b = 2`` is one."""
    for node in tree.body:
        first = _first_line(node)
        last = node.end_lineno or node.lineno
        if spans and first <= spans[-1][1]:
            spans[-1] = (spans[-1][0], last)
        else:
            spans.append((first, last))
    lines = code_lines(source)
    return [_statement(shell, "\n".join(lines[first - 1 : last])) for first, last in spans]


def _statement(shell: Any, text: str) -> Statement:
    """Return a statement with its compiled code."""
    return Statement(text, _compiled(shell, text))


def _first_line(node: ast.stmt) -> int:
    """Return the line on which a statement begins: a function's or class's first decorator."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def _compiled(shell: Any, text: str) -> CodeType:
    """Return code whose lines a traceback can show."""
    source = shell.transform_cell(text)
    name = shell.compile.cache(source)
    with _mistakes_told_in_one_line(source):
        code: CodeType = shell.compile(ast.parse(source, name), name, "exec")
    return code


@contextlib.contextmanager
def _mistakes_told_in_one_line(source: str) -> Iterator[None]:
    """Raise IPython's one-line error for a mistake in ``source`` that the block finds."""
    try:
        yield
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        problem = str(getattr(error, "msg", error))
        if "await" in problem or "async" in problem:
            raise UsageError(
                "gpumemit cannot measure await: run it in a plain cell and read the line below"
            ) from None
        line = getattr(error, "text", None) or source
        words = " ".join(line.split())
        raise UsageError(f"gpumemit: {problem}: {clean(words)!r}") from None


def statements_report(costs: Sequence[Cost], nothing: Cost) -> Report:
    """Return the report of statements side by side: median, minimum and maximum of their runs.

    Args:
        costs: the costs of the statements.
        nothing: the cost of an empty statement, which is noise.
    """
    rows = []
    for cost in costs:
        rows += [
            _memory_columns(cost, device) | _time_columns(cost, device) for device in cost.devices
        ]
    table = Table.of(rows, {"kept", "peak", "all peaks", "time", "all times"}, code={"statement"})
    runs = count(len(nothing.runs), "run")
    if len(costs) > 1:
        runs += " of each"
    headline = f"{count(len(costs), 'statement')} · {runs} after one to warm up"
    return Report("gpumemit", headline, [_noise_text(nothing)], [table])


def _noise_text(nothing: Cost) -> str:
    """Return the memory and time that an empty statement seems to cost."""
    peaks = []
    for device in nothing.devices:
        peak = max(usage.peak_delta_bytes for usage in nothing.usages(device))
        peaks.append(f"{device_label(device)} {format_bytes(peak)}")
    time = format_short_seconds(median(run.seconds for run in nothing.runs))
    return f"noise: an empty statement took {', '.join(peaks)} and {time}"


def _memory_columns(cost: Cost, device: str) -> dict[str, str]:
    """Return the columns of a statement's memory on a device; its code is in the first row only."""
    usages = cost.usages(device)
    changes = [usage.delta_bytes for usage in usages]
    peaks = [usage.peak_delta_bytes for usage in usages]
    label = device_label(device)
    if any(usage.method == "sampled" for usage in usages):
        label += " (sampled)"
    is_first_row = device == cost.devices[0]
    return {
        "statement": _in_one_line(cost.text) if is_first_row else "",
        "device": label,
        "kept": format_change(round(median(changes))),
        "peak": format_change(round(median(peaks))),
        "all peaks": _range_text(peaks, format_bytes),
    }


def _time_columns(cost: Cost, device: str) -> dict[str, str]:
    """Return the columns of a statement's time, which are in its first row only."""
    if device != cost.devices[0]:
        return {"time": "", "all times": ""}
    seconds = [run.seconds for run in cost.runs]
    return {
        "time": format_short_seconds(median(seconds)),
        "all times": _range_text(seconds, format_short_seconds),
    }


def _in_one_line(source: str) -> str:
    """Return source code in one line, with a sign in place of each line's end."""
    lines = [" ".join(line.split()) for line in code_lines(source) if line.strip()]
    return clean_name(" ⏎ ".join(lines))


def _range_text(values: Sequence[T], shown: Callable[[T], str]) -> str:
    """Return the smallest and the largest value, as ``shown`` writes them; nothing if that looks
    the same.
    """
    smallest = shown(min(values))
    largest = shown(max(values))
    if smallest == largest:
        return ""
    return f"{smallest} to {largest}"
