"""The report of an autofit: the value that fits, and a row for each try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ipygpumem.estimating.records import FITS
from ipygpumem.fitting.fit import Try, values_as_text
from ipygpumem.records import usage_on
from ipygpumem.report.devices import device_label, sampled_mark
from ipygpumem.report.layout import Report, Table
from ipygpumem.report.words import clean, clean_name, value_text
from ipygpumem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ipygpumem.fitting.plan import Plan


def autofit_report(tries: Sequence[Try], notes: Sequence[str], plan: Plan) -> Report:
    """Return the report of an autofit: the values of the last try with its outcome, and a table of
    all tries.

    Args:
        tries: the tries, in order.
        notes: lines below the headline.
        plan: the plan of the tries.
    """
    last = tries[-1]
    values = values_as_text(last.values)
    outcome = f"{values}: {last.outcome}"
    if last.outcome == FITS:
        outcome = f"{values} {FITS}"
    number = "1 try" if len(tries) == 1 else f"{len(tries)} tries"
    seconds = sum(item.duration_seconds for item in tries)
    head = ["autofit", clean(outcome), number, format_seconds(seconds)]
    lines = list(map(clean, notes))
    if plan.exhausted and plan.best is not None:
        values_not_tried = "larger values"
        if plan.smallest_failing is not None:
            values_not_tried = f"a value below {plan.smallest_failing:g}"
        lines.append(f"all tries are used up: {values_not_tried} may fit, too")
    tables = []
    if len(tries) > 1:
        tables.append(_table_of_tries(tries, plan))
    return Report("autofit", head, tuple(lines), tables, records=tries)


def _table_of_tries(tries: Sequence[Try], plan: Plan) -> Table:
    """Return a row for each try: its values, the peak of each device in use, and the outcome."""
    devices = _devices(tries)
    rows = []
    for item in tries:
        row = {}
        for name, value in item.values.items():
            row[clean_name(name)] = value_text(value)
        for device in devices:
            peak = ""
            usage = usage_on(item.usages, device)
            if usage is not None:
                peak = format_bytes(usage.peak_bytes) + sampled_mark(usage)
            row[f"peak {device_label(device)}"] = peak
        outcome = item.outcome
        if item.requested_bytes is not None:
            outcome += f", asked for {format_bytes(item.requested_bytes)}"
        row["outcome"] = clean_name(outcome)
        row["time"] = format_seconds(item.duration_seconds)
        rows.append(row)
    numbers = rows[0].keys() - {"outcome"}
    return Table.of(rows, numbers, code=plan.values.keys())


def _devices(tries: Sequence[Try]) -> list[str]:
    """Return the accelerators on which any try allocated memory; the host if there is none."""
    devices: dict[str, None] = {}
    for item in tries:
        for usage in item.usages:
            if usage.device != "cpu" and usage.peak_delta_bytes > 0:
                devices[usage.device] = None
    return list(devices) or ["cpu"]
