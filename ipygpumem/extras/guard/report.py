"""The report of an error that the guard caused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.top import top_report
from ipygpumem.report.words import clean
from ipygpumem.units import format_bytes

_ROWS = 5


def guard_report(
    action: str, remarks: Iterable[str], room_bytes: int, names: LargestNames | None
) -> Report:
    """Return the report of the guard's action, with the memory left and the largest names."""
    head = [
        f"the memory guard {clean(action)}",
        f"the next cell can use {format_bytes(room_bytes)}",
    ]
    tables: list[Table] = []
    if names is not None:
        report = top_report(dataclasses.replace(names, used_bytes={}), top=_ROWS)
        tables = [dataclasses.replace(table, title="the largest names") for table in report.tables]
    return Report("guard", head, list(map(clean, remarks)), tables, is_trouble=True)
