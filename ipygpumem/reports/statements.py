"""Reports what statements cost: one row per statement and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipygpumem.profiling.statements import Cost, Spread
from ipygpumem.reports.layout import Report, Table, clean_name, count, device_label
from ipygpumem.units import format_bytes, format_change, format_short_seconds

_FIGURES = ("kept", "peak", "all peaks", "time", "all times")


def statements_report(costs: Sequence[Cost], nothing: Cost) -> Report:
    """Return statements side by side, each figure the median of its runs, with the least and the most."""
    rows = [_row(cost, device) for cost in costs for device in cost.devices]
    columns = ("statement", "device", *_FIGURES)
    table = Table("", columns, tuple(rows), frozenset(_FIGURES), frozenset({"statement"}))
    runs = count(len(nothing.runs), "run")
    headline = f"{count(len(costs), 'statement')} · {runs}{' of each' if len(costs) > 1 else ''} after one to warm up"
    return Report("gpumemit", headline, (_noise(nothing),), (table.without_empty(),))


def _row(cost: Cost, device: str) -> tuple[str, ...]:
    first = device == cost.devices[0]
    peak, seconds = cost.peak_bytes(device), cost.seconds
    return (
        clean_name(" ⏎ ".join(" ".join(line.split()) for line in cost.text.splitlines() if line.strip()))
        if first
        else "",
        device_label(device) + " (sampled)" * cost.is_sampled(device),
        format_change(round(cost.kept_bytes(device).median)),
        format_change(round(peak.median)),
        _range(peak, lambda value: format_bytes(round(value))),
        format_short_seconds(seconds.median) if first else "",
        _range(seconds, format_short_seconds) if first else "",
    )


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    least, most = shown(spread.least), shown(spread.most)
    return "" if least == most else f"{least} to {most}"


def _noise(nothing: Cost) -> str:
    memory = [f"{device_label(name)} {format_bytes(round(nothing.peak_bytes(name).most))}" for name in nothing.devices]
    return f"noise: an empty statement came to {', '.join(memory)} and {format_short_seconds(nothing.seconds.median)}"
