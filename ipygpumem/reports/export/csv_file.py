"""Writes a table for spreadsheets: one row per cell and device."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from ipygpumem.model import USAGE_BYTES, CellRecord, SessionRecord
from ipygpumem.reports.layout import clean

_CELL = ("execution_count", "cell_id", "experiment", "started_at", "duration_seconds", "success", "error")
_SOURCE = ("source_line", "source_digest")
_USAGE = ("device", *USAGE_BYTES, "method")
COLUMNS = (*_CELL, *_SOURCE, "recovery", *_USAGE)

# A spreadsheet takes text that begins with one of these for a formula, or would after dropping the space before it.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # the last four are full-width


def render(record: SessionRecord) -> str:
    """Return the cells as CSV; a cell without a measured device has one row with none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in record.cells:
        writer.writerows(_rows(cell))
    return buffer.getvalue()


def is_ours(head: str) -> bool:
    """Whether a file that begins with ``head`` was written by ``render``."""
    return head.startswith(",".join(COLUMNS))


def _rows(cell: CellRecord) -> Iterator[list[object]]:
    first = [*(getattr(cell, name) for name in (*_CELL, *_SOURCE)), cell.recovery and cell.recovery.kind]
    for usage in cell.usages or (None,):
        figures = [getattr(usage, name, None) for name in _USAGE]
        yield [_plain(value) for value in (*first, *figures)]


def _plain(value: object) -> object:
    """Return a figure as it is, and text so that no spreadsheet runs it."""
    if type(value) is not str:
        return value
    text = clean(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
