"""Says what the reports of cells, experiments, errors and leaks contain, apart from how it looks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, RecoveryRecord, TraceRecord, Usage
from ipygpumem.reports.bars import Scales
from ipygpumem.reports.layout import (
    SEPARATOR,
    Fact,
    Listing,
    Report,
    Segment,
    Table,
    clean,
    clean_name,
    count,
    device_label,
    in_use,
    peak_label,
    shape_label,
)
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds, format_share

_ROWS_SHOWN = 20
_ROWS_OPEN = 8
"""Rows of a table of details that are shown without asking."""


# -- cells ----------------------------------------------------------------------------------------------------


def cell_report(record: CellRecord, scales: Scales | None = None) -> Report:
    """Return the one-line report of a cell, with bars as long as ``scales`` says."""
    head = "cell" if record.execution_count is None else f"cell {record.execution_count}"
    return Report.of("cell", [head, *_span_segments(record, scales or Scales())])


def trace_report(record: TraceRecord, note: str = "") -> Report:
    """Return the one-line report of a trace."""
    head = " ".join(filter(None, ("trace", clean_name(record.label))))
    return Report.of("trace", [head, *([clean(note)] if note else []), *trace_segments(record)])


def trace_segments(record: TraceRecord) -> list[Segment | str]:
    """Return what is said of a trace after its name: its time, its error, each device in use."""
    return _span_segments(record) + ["memory was not measured"] * (not record.usages)


def _span_segments(record: CellRecord | TraceRecord, scales: Scales | None = None) -> list[Segment | str]:
    segments: list[Segment | str] = [format_seconds(record.duration_seconds)]
    if record.error is not None:
        segments.append(clean_name(record.error))
    for usage in record.usages:
        device = device_label(usage.device)
        if in_use(usage) and _has_moved(usage):
            segments.append(Segment(_usage_part(usage), None if scales is None else scales.bar(device, usage)))
        elif in_use(usage):
            segments.append(f"{device} {_now(usage).removesuffix(' now')}{_children(usage)}")
    return segments


def is_quiet(record: CellRecord) -> bool:
    """Whether the line of a cell says nothing new: no device moved, nothing failed, no child process holds memory."""
    fine = record.error is None and record.recovery is None
    return fine and not any(_has_moved(usage) or usage.children_bytes for usage in record.usages)


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return one part of a line per device; accelerators that hold nothing and held nothing are left out."""
    return [_usage_part(usage) for usage in usages if in_use(usage)]


def _has_moved(usage: Usage) -> bool:
    """Whether what was kept, given back or needed meanwhile comes to a MiB: less is mostly not the cell's doing."""
    return max(abs(usage.delta_bytes), usage.peak_delta_bytes) >= MIB


def _usage_part(usage: Usage) -> str:
    kept = f"{device_label(usage.device)} {format_change(usage.delta_bytes)}"
    return f"{kept}, peak {peak_label(usage)}, {_now(usage)}{_children(usage)}"


def _children(usage: Usage) -> str:
    return f", children {format_bytes(usage.children_bytes)}" if usage.children_bytes else ""


def _now(usage: Usage) -> str:
    if usage.used_bytes is not None and usage.total_bytes is not None:
        return format_share(usage.used_bytes, usage.total_bytes)
    return f"{format_bytes(usage.after_bytes)} now"


# -- experiments ----------------------------------------------------------------------------------------------


def experiment_reports(record: ExperimentRecord, style: str, scales: Scales | None = None) -> list[Report]:
    """Return the report of a finished experiment in ``style``: ``full``, ``compact`` or ``none``."""
    if style == "none":
        return []
    scales = scales or Scales()
    segments: list[Segment | str] = [f"experiment {clean_name(record.name)}"]
    segments += [count(len(record.cells), "cell")] * bool(record.cells) + [format_seconds(record.duration_seconds)]
    notes = tuple(map(clean, record.notes))
    used = [usage for usage in record.usages if in_use(usage)]
    bars = [scales.bar(device_label(usage.device), usage) for usage in used]
    rows = [
        (
            device_label(usage.device),
            format_change(record.consumed.get(usage.device, 0)),
            reclaimed_label(record, usage.device),
            peak_label(usage),
        )
        for usage in used
    ]
    if style == "compact":
        parts = ["{} consumed {}, reclaimed {}, peak {}".format(*row) for row in rows]
        return [Report.of("experiment", [*segments, *map(Segment, parts, bars)], notes)]
    columns = ("device", "consumed", "reclaimed", "peak")  # what is in use now stands in the cell's line
    title = "still alive, because something outside the experiment refers to it"
    listings = [Listing(title, leak_lines(record.survivors))] if record.survivors else []
    tables = [Table("", columns, rows, columns[1:], bars=bars)]
    return [Report.of("experiment", segments, notes, tables, _experiment_facts(record), listings)]


def reclaimed_label(record: ExperimentRecord, device: str) -> str:
    """Return what the end gave back; nothing where its own work took more than came back."""
    return format_bytes(max(0, record.reclaimed.get(device, 0)))


def _experiment_facts(record: ExperimentRecord) -> list[Fact]:
    names = {
        "noted": [f"{name}={value}" for name, value in record.parameters.items()],
        "deleted": record.deleted,
        "restored": record.restored,
        "kept": record.kept,
    }
    facts = [Fact(title, list(map(clean_name, found)), code=True) for title, found in names.items()]
    facts.append(Fact("given back", _step_list(record.steps, record.reclaimed)))
    return [fact for fact in facts if fact.values]


def _step_list(steps: Iterable[ReclaimStep], total: Mapping[str, int]) -> list[str]:
    """Return what each step gave of ``total``, leaving out those that gave less than a tenth of a MiB."""
    texts, left = [], dict(total)
    for step in steps:
        # A later step may take some of it again, if only a page for its own work.
        given = {device: min(size, left.get(device, 0)) for device, size in step.reclaimed.items() if size > 0}
        left.update({device: left.get(device, 0) - size for device, size in given.items()})
        sizes = [*given.items(), *((f"{device} reserved", size) for device, size in step.returned.items())]
        shown = [f"{device_label(device)} {format_bytes(size)}" for device, size in sizes if size >= 2**20 // 10]
        if shown:
            texts.append(f"{step.name} ({', '.join(shown)})")
    return texts


def interrupted_exit(name: str) -> Report:
    """Return what is said when Ctrl-C stops an experiment's end."""
    return Report("note", f"experiment {clean_name(name)}: its end was interrupted; %experiment end completes it")


# -- errors ---------------------------------------------------------------------------------------------------

_CAUSES = {"oom": "out of memory", "interrupt": "interrupted", "error": "failed"}


def recovery_reports(record: RecoveryRecord, min_held_bytes: int) -> list[Report]:
    """Return the report after an OOM, or after another error whose frames held something worth a line."""
    held = [item for item in record.held if item.size_bytes >= min_held_bytes]
    if record.kind != "oom" and not held and not record.let_go and not record.poisoned:
        return []
    segments: list[Segment | str] = [f"{_CAUSES[record.kind]} ({clean_name(record.error)})"]
    if record.requested_bytes is not None:
        segments.append(f"asked for {format_bytes(record.requested_bytes)}")
    columns = {"free": record.free} if record.kind == "oom" else {}
    columns["came back"] = {device: max(0, size) for device, size in record.reclaimed.items()}
    segments += [Segment(f"{title}: {_sizes(sizes)}", tabled=True) for title, sizes in columns.items()]
    devices = dict.fromkeys(device for sizes in columns.values() for device in sizes)
    rows = [
        (device_label(device), *(format_bytes(sizes[device]) if device in sizes else "" for sizes in columns.values()))
        for device in devices
    ]
    tables = [Table("", ("device", *columns), rows, columns, echo=True)]
    if held:
        tables.append(held_table("the frames of the traceback held", held))
    return [Report.of("recovery", segments, _recovery_lines(record), tables, is_trouble=True)]


def _recovery_lines(record: RecoveryRecord) -> list[str]:
    lines = []
    if record.poisoned:
        lines.append(
            "This error has broken the device's context: nothing on the device can be used or freed any more. "
            "Restart the kernel."
        )
    if record.refused_by:
        lines.append(clean(record.refused_by))
    if record.half_made:
        lines.append(
            f"{clean_name(record.half_made)} has only half of its state: its next step fails on that (KeyError). "
            "Make a new optimizer, or call its state.clear()."
        )
    lines += let_go_lines(record.let_go)
    returned: Counter[str] = Counter()
    for step in record.steps:
        returned.update(step.returned)
    if any(size > 0 for size in returned.values()):
        lines.append("returned to the device: " + _sizes(returned))
    return lines + _failed_steps(record.steps)


def _failed_steps(steps: Iterable[ReclaimStep]) -> list[str]:
    return [f"{step.name}: {clean(step.error)}" for step in steps if step.error]


def let_go_lines(held: Sequence[Held]) -> list[str]:
    """Return what is said of the objects that were taken off an exception."""
    names = ", ".join(f"{item.name} ({item.type_name}, {format_bytes(item.size_bytes)})" for item in held)
    return [f"taken off the error, which nothing of yours referred to: {clean(names)}"] if held else []


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{device_label(device)} {format_bytes(size)}" for device, size in sizes.items()) or "nothing"


def held_table(title: str, held: Sequence[Held]) -> Table:
    """Return a row for each, the largest first, and one for those that are too many."""
    located = any(item.function for item in held)
    columns = ("size", *("function", "line") * located, "name", "type", "shape", "dtype", "device")
    rows = []
    for item in held[:_ROWS_SHOWN]:
        where = (clean_name(item.function), str(item.line)) * located
        words = map(clean_name, (item.name, item.type_name, _shape(item), item.dtype, item.device))
        rows.append((format_bytes(item.size_bytes), *where, *words))
    rest = held[_ROWS_SHOWN:]
    if rest:
        rows.append((format_bytes(_total(rest)), f"and {len(rest)} more", *[""] * (len(columns) - 2)))
    is_long = len(held) > _ROWS_OPEN
    title = f"{title}: {format_bytes(_total(held))}" if is_long else title
    return Table(title, columns, rows, {"line", "size"}, {"function", "name"}, folded=is_long)


def _shape(item: Held) -> str:
    return count(item.arrays, "array") if item.shape is None else shape_label(item.shape)


# -- the rest ------------------------------------------------------------------------------------------------


def freed_report(
    title: str, steps: Iterable[ReclaimStep], reclaimed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return what giving memory back by hand gave."""
    steps = list(steps)
    given = ", ".join(_step_list(steps, reclaimed))
    sizes = []
    for device, size in reclaimed.items():
        returned = sum(max(0, step.returned.get(device, 0)) for step in steps)  # its cache, where no tensor went
        what = f"reserved {format_bytes(returned)}" if returned and size <= 0 else format_bytes(max(0, size))
        sizes.append(f"{device_label(device)} {what}")
    lines = (*[given] * bool(given), *notes, *_failed_steps(steps))
    return Report("note", f"{title}: {', '.join(sizes) or 'nothing'}", lines)


# -- leaks ----------------------------------------------------------------------------------------------------


_LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")


def leaks_report(held: Sequence[Held], smallest: int, beyond: Sequence[Held] = (), kept: Sequence[str] = ()) -> Report:
    """Return the answer of ``%gpumem leaks``; ``beyond`` was too much to be looked into, ``kept`` are other lines."""
    lines = leak_lines(held)
    if beyond:
        rest = f"{count(len(beyond), 'smaller storage')}, {format_bytes(_total(beyond))} in all"
        lines.append(f"{rest}: not examined, there are too many; free others first, then ask again")
    lines += kept
    found = f"{count(len(held), 'leak')} · {format_bytes(_total(held))}"
    return Report("leaks", found if held else f"no leak of at least {format_bytes(smallest)} was found", lines)


def kept_line(size: int, device: str, what: str, remedy: str) -> str:
    """Return the line of memory that is kept by mistake, as it seems, with a remedy."""
    return SEPARATOR.join([f"{format_bytes(size)} on {device}", clean(what), clean(remedy)])


def leak_lines(held: Sequence[Held]) -> list[str]:
    """Return one line for each, those in one container together, and one line for those that are too many."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for item in held:
        where = None if item.holder is None else (_LAST_INDEX.sub("", item.holder.path), item.holder.advice)
        what = (item.name, item.type_name, item.dtype, item.shape, item.device, item.cell, where)
        groups.setdefault(what, []).append(item)
    ordered = sorted(groups.values(), key=lambda group: -_total(group))
    lines = [_leak_line(group) for group in ordered[:_ROWS_SHOWN]]
    rest = [item for group in ordered[_ROWS_SHOWN:] for item in group]
    return [*lines, f"and {len(rest)} more: {format_bytes(_total(rest))}"] if rest else lines


def _total(held: Iterable[Held]) -> int:
    return sum(item.size_bytes for item in held)


def _leak_line(group: Sequence[Held]) -> str:
    first = group[0]
    number = f"{len(group)} × " if len(group) > 1 else ""
    parts = [format_bytes(_total(group)), number + _what(first)]
    if first.cell is not None:
        parts.append(f"cell {first.cell}")
    if first.holder is not None:
        path = _LAST_INDEX.sub("[…]", first.holder.path) if number else first.holder.path
        parts.append(f"held by {clean(path)}")
        if first.holder.advice:
            parts.append(f"to free it: {clean(first.holder.advice)}")
    return SEPARATOR.join(parts)


def _what(item: Held) -> str:
    kind = clean_name(item.type_name) if item.shape is not None else f"{clean_name(item.type_name)} with {_shape(item)}"
    shape = " × ".join(map(str, item.shape or ()))
    words = " ".join(clean_name(word) for word in (kind, item.dtype, shape, f"on {item.device}") if word)
    return f"{clean_name(item.name)}: {words}" if item.name else words
