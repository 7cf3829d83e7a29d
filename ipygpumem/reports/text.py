"""Reports as plain text, for terminals and as the fallback of every notebook output."""

from __future__ import annotations

import io
from collections.abc import Iterable

from ipygpumem.reports.content import Report, Table

_WIDTH = 120


def render(reports: Iterable[Report]) -> str:
    """Return the reports one below the other, without colour."""
    return "\n".join(_report(report) for report in reports)


def _report(report: Report) -> str:
    blocks = [report.headline]
    blocks += [_table(table) for table in report.tables]
    blocks += [f"  {line}" for line in report.lines]
    return "\n".join(blocks)


def _table(table: Table) -> str:
    # Imported here: most cells show one line, and loading the extension must stay fast.
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, title=None, pad_edge=False, show_edge=False)
    for column in table.columns:
        drawn.add_column(Text(column), justify="right" if column in table.numbers else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(value) for value in row))
    buffer = io.StringIO()
    console = Console(file=buffer, width=_WIDTH, color_system=None, force_jupyter=False, legacy_windows=False)
    console.print(drawn)
    lines = ["  " + line.rstrip() for line in buffer.getvalue().splitlines() if line.strip()]
    return "\n".join([f"  {table.title}"] * bool(table.title) + lines)
