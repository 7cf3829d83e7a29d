"""Reports what lines cost: the source, and beside each line what it kept, its peak, its runs and its time."""

from __future__ import annotations

from collections.abc import Callable

from ipygpumem.profiling.account import LineCost
from ipygpumem.profiling.blocks import CodeBlock, LinesRecord
from ipygpumem.reports.layout import Report, Table, clean, count, device_label
from ipygpumem.units import format_change, format_seconds, format_short_seconds

_UNSEEN = "lines that took such pages again show less than they used"
_LONGEST_SHOWN = 100
"""Lines of a block that are shown with those that did not run."""

_KEYS: dict[str, Callable[[LineCost], float]] = {
    "kept": lambda cost: max(cost.kept_bytes.values(), default=0),
    "peak": lambda cost: max(cost.peak_bytes.values(), default=0),
    "time": lambda cost: cost.seconds,
    "hits": lambda cost: cost.hits,
}
ORDERS = ("line", *_KEYS)


def lines_report(record: LinesRecord, order: str) -> Report:
    """Return one table per block, in the order of lines or of what they cost, the most first."""
    devices = _devices(record)
    ran = {block for block, _ in record.costs}
    tables = [
        _table(record, number, block, devices, order) for number, block in enumerate(record.blocks) if number in ran
    ]
    idle = [f"{clean(block.title)} did not run" for number, block in enumerate(record.blocks) if number not in ran]
    if record.untrimmed:
        times = count(record.untrimmed, "time")
        idle.append(f"{times} free heap pages were not given back before a line, since that takes long: {_UNSEEN}")
    share = f"{format_seconds(record.seconds)}, of which measuring took {format_short_seconds(record.own_seconds)}"
    headline = f"memlines · {count(len(record.costs), 'line')} ran · {share}"
    return Report("memlines", headline, (*record.notes, *idle), tuple(tables))


def _devices(record: LinesRecord) -> list[str]:
    """Return the host, and the accelerators on which something was allocated."""
    used = {
        device: None
        for cost in record.costs.values()
        for device, peak in cost.peak_bytes.items()
        if device == "cpu" or peak or cost.kept_bytes.get(device)
    }
    return sorted(used, key=lambda device: (device != "cpu", device)) or ["cpu"]


def _table(record: LinesRecord, number: int, block: CodeBlock, devices: list[str], order: str) -> Table:
    costs = {line: cost for (owner, line), cost in record.costs.items() if owner == number}
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak")]
    rows = [_row(line, block, costs.get(line), devices) for line in _lines(block, costs, order)]
    columns = ("line", "hits", "time", *figures, "source")
    return Table(clean(block.title), columns, tuple(rows), frozenset(columns[:-1]), frozenset({"source"}))


def _lines(block: CodeBlock, costs: dict[int, LineCost], order: str) -> list[int]:
    if order != "line":
        return sorted(costs, key=lambda line: -_KEYS[order](costs[line]))
    if len(block.source) > _LONGEST_SHOWN:
        return sorted(costs)
    return sorted({*costs, *range(block.first_line, block.first_line + len(block.source))})


def _row(line: int, block: CodeBlock, cost: LineCost | None, devices: list[str]) -> tuple[str, ...]:
    index = line - block.first_line
    source = block.source[index].expandtabs(4) if 0 <= index < len(block.source) else ""
    if cost is None:
        return (str(line), "", "", *("" for _ in devices for _ in range(2)), source)
    memory = [
        format_change(figure.get(device, 0)) for device in devices for figure in (cost.kept_bytes, cost.peak_bytes)
    ]
    return (str(line), str(cost.hits), format_short_seconds(cost.seconds), *memory, source)
