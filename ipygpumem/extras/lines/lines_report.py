"""Reports costs of lines (``%%memlines``) and of statements (``%gpumemit``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipygpumem.extras.lines.lines import CodeBlock, LineCost, LinesRecord
from ipygpumem.extras.lines.statements import Cost, Spread
from ipygpumem.report.layout import Report, Table, clean, clean_name, count, device_label
from ipygpumem.units import format_bytes, format_change, format_seconds, format_short_seconds

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
    tables = [_table(record, number, block, devices, order) for number, block in blocks if number in ran]
    notes = [f"measuring stopped early: {clean(record.error)}"] * bool(record.error)
    notes += [f"{clean(block.title)} did not run" for number, block in blocks if number not in ran]
    if record.untrimmed:
        times = count(record.untrimmed, "time")
        notes.append(f"{times} free heap pages were not freed before a line, because that takes too long: {_UNSEEN}")
    share = f"{format_seconds(record.seconds)}, of which measuring took {format_short_seconds(record.own_seconds)}"
    headline = f"memlines · {count(len(record.costs), 'line')} ran · {share}"
    return Report("memlines", headline, notes, tables)


def _table(record: LinesRecord, number: int, block: CodeBlock, devices: list[str], order: str) -> Table:
    costs = {line: cost for (owner, line), cost in record.costs.items() if owner == number}
    figures = [f"{device_label(device)} {what}" for device in devices for what in ("kept", "peak")]
    shown = range(block.first_line, block.first_line + len(block.source) * (len(block.source) <= _LONGEST_SHOWN))
    lines = sorted({*costs, *shown})
    if order != "line":
        lines = sorted(costs, key=lambda line: -_KEYS[order](costs[line]))
    rows = [_row(line, block, costs.get(line), devices) for line in lines]
    columns = ("line", "hits", "time", *figures, "source")
    return Table(clean(block.title), columns, tuple(rows), frozenset(columns[:-1]), frozenset({"source"}))


def _row(line: int, block: CodeBlock, cost: LineCost | None, devices: list[str]) -> tuple[str, ...]:
    index = line - block.first_line
    source = block.source[index].expandtabs(4) if 0 <= index < len(block.source) else ""
    if cost is None:
        return (str(line), "", "", *("" for _ in devices for _ in range(2)), source)
    memory = [
        format_change(figure.get(device, 0)) for device in devices for figure in (cost.kept_bytes, cost.peak_bytes)
    ]
    return (str(line), str(cost.hits), format_short_seconds(cost.seconds), *memory, source)


# -- statements -----------------------------------------------------------------------------------------------


def statements_report(costs: Sequence[Cost], nothing: Cost) -> Report:
    """Return statements side by side, each figure as median, minimum and maximum of its runs."""
    rows = [_statement_row(cost, device) for cost in costs for device in cost.devices]
    table = Table.of(rows, {"kept", "peak", "all peaks", "time", "all times"}, code={"statement"})
    runs = count(len(nothing.runs), "run")
    headline = f"{count(len(costs), 'statement')} · {runs}{' of each' if len(costs) > 1 else ''} after one to warm up"
    memory = [f"{device_label(name)} {format_bytes(round(nothing.peak_bytes(name).most))}" for name in nothing.devices]
    time = format_short_seconds(nothing.seconds.median)
    return Report("gpumemit", headline, [f"noise: an empty statement took {', '.join(memory)} and {time}"], [table])


def _statement_row(cost: Cost, device: str) -> dict[str, str]:
    is_first = device == cost.devices[0]
    peak, seconds = cost.peak_bytes(device), cost.seconds
    statement = " ⏎ ".join(" ".join(line.split()) for line in cost.text.splitlines() if line.strip())
    return {
        "statement": clean_name(statement) if is_first else "",
        "device": device_label(device) + " (sampled)" * cost.is_sampled(device),
        "kept": format_change(round(cost.kept_bytes(device).median)),
        "peak": format_change(round(peak.median)),
        "all peaks": _range(peak, lambda value: format_bytes(round(value))),
        "time": format_short_seconds(seconds.median) if is_first else "",
        "all times": _range(seconds, format_short_seconds) if is_first else "",
    }


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    least, most = shown(spread.least), shown(spread.most)
    return "" if least == most else f"{least} to {most}"
