"""The report of a finished experiment: its devices, the objects still alive, its names."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.records import OUTSIDE, ExperimentRecord, Usage
from ipygpumem.report import devices
from ipygpumem.report.cells import usage_label, worth_reporting
from ipygpumem.report.freeing import step_shares
from ipygpumem.report.layout import Fact, LineSegment, Report, Table
from ipygpumem.report.leaks import leak_table
from ipygpumem.report.scales import Scales
from ipygpumem.report.words import clean, clean_name, count
from ipygpumem.units import format_bytes, format_change, format_seconds

_LEAST_SHARE = 0.01
"""Minimum share of a kept object's memory on a device to show."""


def experiment_reports(
    record: ExperimentRecord, style: str, scales: Scales | None = None
) -> list[Report]:
    """Return the report of a finished experiment in a list; no report with the style ``none``.

    Args:
        record: its record.
        style: its level of detail: ``full``, ``compact`` or ``none``.
        scales: the lengths of the bars; None outside of a session.
    """
    if style == "none":
        return []
    scales = scales or Scales()
    head: list[LineSegment | str] = [f"experiment {clean_name(record.name)}"]
    if record.cells:
        head.append(count(len(record.cells), "cell"))
    head += times(record.duration_seconds, record.span_seconds)
    notes = tuple(map(clean, record.notes))
    usages = worth_reporting(record.usages)
    if style == "compact":
        for usage in usages:
            text = _compact_part(record, usage)
            head.append(LineSegment(text, scales.bar(usage)))
        return [Report("experiment", head, notes, records=[record])]
    table = _devices_table(record, usages, scales)
    title = "still alive, because something outside the experiment refers to it"
    survivors = leak_table(record.survivors, title)
    facts = _experiment_facts(record)
    return [Report("experiment", head, notes, [table, survivors], facts, records=[record])]


def _compact_part(record: ExperimentRecord, usage: Usage) -> str:
    """Return an experiment's figures on one device in words: ``RAM consumed +64 MiB, freed 64 MiB,
    peak +128 MiB``.
    """
    labels = end_labels(record, usage.device)
    consumed, freed = labels["consumed"], labels["freed"]
    text = f"{usage_label(usage)} consumed {consumed}, freed {freed}"
    if usage.device in OUTSIDE:
        return text
    return f"{text}, peak {devices.peak_label(usage)}"


def _devices_table(record: ExperimentRecord, usages: Sequence[Usage], scales: Scales) -> Table:
    """Return the table of the devices: the memory consumed and freed, and the peak."""
    rows = []
    for usage in usages:
        row = {"device": usage_label(usage)} | end_labels(record, usage.device)
        if usage.device not in OUTSIDE:
            row["peak"] = devices.peak_label(usage)
        rows.append(row)
    bars = list(map(scales.bar, usages))
    return Table.of(rows, {"consumed", "freed", "peak"}, bars=bars)


def _experiment_facts(record: ExperimentRecord) -> list[Fact]:
    """Return the facts on an experiment: its parameters, its deleted, restored and kept names, and
    the memory freed by each step.
    """
    parameters = [clean_name(f"{name}={value}") for name, value in record.parameters.items()]
    return [
        Fact("noted", parameters, code=True),
        *name_facts(record),
        Fact("freed by", step_shares(record.steps, record.freed)),
    ]


def name_facts(record: ExperimentRecord) -> list[Fact]:
    """Return the facts on an experiment's names: the deleted, the restored and the kept names."""
    names = {"deleted": record.deleted, "restored": record.restored}
    facts = []
    for title, values in names.items():
        facts.append(Fact(title, list(map(clean_name, values)), code=True))
    facts.append(Fact("kept", _kept_names(record), code=True))
    return facts


def _kept_names(record: ExperimentRecord) -> list[str]:
    """Return the kept names, such as ``model (RAM 12 MiB)``, the largest first; small objects
    without their memory.
    """
    texts = dict[str, str]()
    for item in record.kept_objects:
        bound = "at least " if item.is_at_least else ""
        least_bytes = _LEAST_SHARE * sum(item.device_bytes.values())
        large = {device: size for device, size in item.device_bytes.items() if size >= least_bytes}
        sizes = ", ".join(devices.sizes(large))
        texts[item.name] = f"{clean_name(item.name)} ({bound}{sizes})"
    for name in record.kept:
        texts.setdefault(name, clean_name(name))
    return list(texts.values())


def end_labels(record: ExperimentRecord, device: str) -> dict[str, str]:
    """Return two labels for a device: the memory that an experiment held at its end (``consumed``),
    and the part of it that was freed. That is 0 B if memory grew during the end, for instance by
    our own records.
    """
    freed = record.freed.get(device)
    if freed is None:
        return {"consumed": "unknown", "freed": "unknown"}
    consumed = record.consumed.get(device, 0)
    return {"consumed": format_change(consumed), "freed": format_bytes(max(0, freed))}


def times(seconds: float, span_seconds: float) -> list[str]:
    """Return the time in an experiment's cells; and the span from start to end, if there were
    pauses between cells.
    """
    texts = [format_seconds(seconds)]
    if has_pauses(seconds, span_seconds):
        texts.append(f"span {format_seconds(span_seconds)}")
    return texts


def has_pauses(seconds: float, span_seconds: float) -> bool:
    """Return True if an experiment took at least a second longer than its cells: there were pauses
    between them.
    """
    return span_seconds > seconds + 1
