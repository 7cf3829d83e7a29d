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
from ipygpumem.magics import sources
from ipygpumem.report.layout import Report, Table, clean, clean_name, count, device_label
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, argument, command, integer, option
from ipygpumem.units import format_bytes, format_change, format_short_seconds

T = TypeVar("T", int, float)
_RULE = re.compile(r"^---[ \t]*$", re.MULTILINE)


_RUNS = option(
    "-r", "RUNS", "measured runs, after one warm-up run", to=integer(most=10_000), default=5
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
        offers=sources.names,
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
    return _measured(
        app, options, [Statement(options.code, _compiled(app.context.shell, options.code))]
    )


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
    found = _statements(app.context.shell, cell)
    if not found:
        raise UsageError("%%gpumemit: which statements? Write them below, one on each line")
    return _measured(app, options, found)


def _measured(app: App, options: Options, found: list[Statement]) -> list[Report]:
    __tracebackhide__ = True
    context = app.context
    setup = _compiled(context.shell, options.s) if options.s else None
    return [
        statements_report(
            *measure(context.meter, found, context.namespace, setup=setup, repeats=options.r)
        )
    ]


def _statements(shell: Any, cell: str) -> list[Statement]:
    """Return the statements of a cell: the code between ``---`` lines, else one per line."""
    if _RULE.search(cell):
        return [
            Statement(part, _compiled(shell, part)) for part in _RULE.split(cell) if part.strip()
        ]
    source = shell.transform_cell(cell)
    groups: list[list[ast.stmt]] = []
    with _one_line(source):
        tree = ast.parse(source, "<gpumemit>")
    for node in tree.body:
        if groups and _first_line(node) <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)  # after a semicolon
        else:
            groups.append([node])
    lines = source.splitlines()
    texts = ["\n".join(lines[_first_line(group[0]) - 1 : group[-1].end_lineno]) for group in groups]
    return [Statement(text, _compiled(shell, text)) for text in texts]


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def _compiled(shell: Any, text: str) -> CodeType:
    """Return code whose lines a traceback can show."""
    source = shell.transform_cell(text)
    name = shell.compile.cache(source)
    with _one_line(source):
        code: CodeType = shell.compile(ast.parse(source, name), name, "exec")
    return code


@contextlib.contextmanager
def _one_line(source: str) -> Iterator[None]:
    """Raise IPython's one-line error for a mistake in ``source``."""
    try:
        yield
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        what = str(getattr(error, "msg", error))
        if "await" in what or "async" in what:
            raise UsageError(
                "gpumemit cannot measure await: run it in a plain cell and read the line below"
            ) from None
        line = getattr(error, "text", None) or source
        raise UsageError(f"gpumemit: {what}: {clean(' '.join(line.split()))!r}") from None


def statements_report(costs: Sequence[Cost], nothing: Cost) -> Report:
    """Return statements side by side, each figure as median, minimum and maximum of its runs."""
    rows = [_row(cost, device) for cost in costs for device in cost.devices]
    table = Table.of(rows, {"kept", "peak", "all peaks", "time", "all times"}, code={"statement"})
    runs = count(len(nothing.runs), "run")
    headline = (
        f"{count(len(costs), 'statement')} · {runs}{' of each' if len(costs) > 1 else ''} after "
        f"one to warm up"
    )
    peaks = {
        device: max(usage.peak_delta_bytes for usage in nothing.usages(device))
        for device in nothing.devices
    }
    noise = ", ".join(
        f"{device_label(device)} {format_bytes(peak)}" for device, peak in peaks.items()
    )
    time = format_short_seconds(median(run.seconds for run in nothing.runs))
    return Report(
        "gpumemit", headline, [f"noise: an empty statement took {noise} and {time}"], [table]
    )


def _row(cost: Cost, device: str) -> dict[str, str]:
    usages = cost.usages(device)
    peaks, seconds = (
        [usage.peak_delta_bytes for usage in usages],
        [run.seconds for run in cost.runs],
    )
    statement = " ⏎ ".join(
        " ".join(line.split()) for line in cost.text.splitlines() if line.strip()
    )
    row = {
        "statement": clean_name(statement),
        "device": device_label(device)
        + " (sampled)" * any(usage.method == "sampled" for usage in usages),
        "kept": format_change(round(median(usage.delta_bytes for usage in usages))),
        "peak": format_change(round(median(peaks))),
        "all peaks": _range(peaks, format_bytes),
        "time": format_short_seconds(median(seconds)),
        "all times": _range(seconds, format_short_seconds),
    }
    is_first = device == cost.devices[0]
    return row if is_first else row | dict.fromkeys(("statement", "time", "all times"), "")


def _range(values: Sequence[T], shown: Callable[[T], str]) -> str:
    least, most = shown(min(values)), shown(max(values))
    return "" if least == most else f"{least} to {most}"
