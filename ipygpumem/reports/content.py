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
    scales = scales or Scales()
    head = "cell" if record.execution_count is None else f"cell {record.execution_count}"
    segments = [Segment(head), Segment(format_seconds(record.duration_seconds))]
    if record.error is not None:
        segments.append(Segment(clean_name(record.error)))
    segments += [_usage_segment(usage, scales) for usage in record.usages if in_use(usage)]
    return Report.of("cell", segments)


def trace_report(record: TraceRecord, note: str = "") -> Report:
    """Return the one-line report of a trace."""
    head = [Segment(" ".join(filter(None, ("trace", clean_name(record.label)))))]
    return Report.of("trace", [*head, *([Segment(clean(note))] if note else []), *trace_segments(record)])


def trace_segments(record: TraceRecord) -> list[Segment]:
    """Return what is said of a trace after its name: its time, its error, each device in use."""
    segments = [Segment(format_seconds(record.duration_seconds))]
    if record.error is not None:
        segments.append(Segment(clean_name(record.error)))
    if not record.usages:
        segments.append(Segment("memory was not measured"))
    return segments + [_usage_segment(usage) for usage in record.usages if in_use(usage)]


def is_quiet(record: CellRecord) -> bool:
    """Whether the line of a cell says nothing new: no device moved, nothing failed, no child process holds memory."""
    fine = record.error is None and record.recovery is None
    return fine and not any(_has_moved(usage) or usage.children_bytes for usage in record.usages)


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return one part of a line per device; accelerators that hold nothing and held nothing are left out."""
    return [_usage_part(usage) for usage in usages if in_use(usage)]


def _usage_segment(usage: Usage, scales: Scales | None = None) -> Segment:
    if _has_moved(usage):
        bar = None if scales is None else scales.bar(device_label(usage.device), usage)
        return Segment(_usage_part(usage), bar)
    return Segment(f"{device_label(usage.device)} {_now(usage).removesuffix(' now')}{_children(usage)}")


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
    segments = [Segment(f"experiment {clean_name(record.name)}"), Segment(format_seconds(record.duration_seconds))]
    if record.cells:
        segments.insert(1, Segment(count(len(record.cells), "cell")))
    notes = tuple(map(clean, record.notes))
    used = [usage for usage in record.usages if in_use(usage)]
    bars = tuple(scales.bar(device_label(usage.device), usage) for usage in used)
    if style == "compact":
        segments += [Segment(_experiment_part(record, usage), bar) for usage, bar in zip(used, bars, strict=True)]
        return [Report.of("experiment", segments, notes)]
    rows = tuple(_experiment_row(record, usage) for usage in used)
    columns = ("device", "consumed", "reclaimed", "peak")  # what is in use now stands in the cell's line
    tables = (Table("", columns, rows, frozenset(columns[1:]), bars=bars),)
    title = "still alive, because something outside the experiment refers to it"
    listings = (Listing(title, tuple(leak_lines(record.survivors))),) if record.survivors else ()
    return [Report.of("experiment", segments, notes, tables, _experiment_facts(record), listings)]


def _experiment_part(record: ExperimentRecord, usage: Usage) -> str:
    device, consumed, reclaimed, peak = _experiment_row(record, usage)
    return f"{device} consumed {consumed}, reclaimed {reclaimed}, peak {peak}"


def _experiment_row(record: ExperimentRecord, usage: Usage) -> tuple[str, ...]:
    consumed = format_change(record.consumed.get(usage.device, 0))
    return device_label(usage.device), consumed, reclaimed_label(record, usage.device), peak_label(usage)


def reclaimed_label(record: ExperimentRecord, device: str) -> str:
    """Return what the end gave back; nothing where its own work took more than came back."""
    return format_bytes(max(0, record.reclaimed.get(device, 0)))


def _experiment_facts(record: ExperimentRecord) -> tuple[Fact, ...]:
    names = {
        "noted": [f"{name}={value}" for name, value in record.parameters.items()],
        "deleted": record.deleted,
        "restored": record.restored,
        "kept": record.kept,
    }
    facts = [Fact(title, tuple(map(clean_name, found)), code=True) for title, found in names.items()]
    facts.append(Fact("given back", tuple(_step_list(record.steps, record.reclaimed))))
    return tuple(fact for fact in facts if fact.values)


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
    held = tuple(item for item in record.held if item.size_bytes >= min_held_bytes)
    if record.kind != "oom" and not held and not record.let_go and not record.poisoned:
        return []
    came_back = {device: max(0, size) for device, size in record.reclaimed.items()}
    segments = [Segment(f"{_CAUSES[record.kind]} ({clean_name(record.error)})")]
    if record.requested_bytes is not None:
        segments.append(Segment(f"asked for {format_bytes(record.requested_bytes)}"))
    columns = {"free": record.free} if record.kind == "oom" else {}
    columns["came back"] = came_back
    segments += [Segment(f"{title}: {_sizes(sizes)}", tabled=True) for title, sizes in columns.items()]
    tables = [_devices_table(columns)]
    if held:
        tables.append(held_table("the frames of the traceback held", held))
    return [Report.of("recovery", segments, _recovery_lines(record), tables, is_trouble=True)]


def _devices_table(columns: Mapping[str, Mapping[str, int]]) -> Table:
    devices = dict.fromkeys(device for sizes in columns.values() for device in sizes)
    rows = tuple(
        (device_label(device), *(format_bytes(sizes[device]) if device in sizes else "" for sizes in columns.values()))
        for device in devices
    )
    return Table("", ("device", *columns), rows, frozenset(columns), echo=True)


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


def held_table(title: str, held: tuple[Held, ...]) -> Table:
    """Return a row for each, the largest first, and one for those that are too many."""
    located = any(item.function for item in held)
    columns = ("size", *("function", "line") * located, "name", "type", "shape", "dtype", "device")
    rows = [
        (
            format_bytes(item.size_bytes),
            *(clean_name(item.function), str(item.line)) * located,
            clean_name(item.name),
            clean_name(item.type_name),
            _shape(item),
            clean_name(item.dtype),
            clean_name(item.device),
        )
        for item in held[:_ROWS_SHOWN]
    ]
    rest = held[_ROWS_SHOWN:]
    if rest:
        rows.append((format_bytes(_total(rest)), f"and {len(rest)} more", *[""] * (len(columns) - 2)))
    return Table(
        f"{title}: {format_bytes(_total(held))}" if len(held) > _ROWS_OPEN else title,
        columns,
        tuple(rows),
        frozenset({"line", "size"}),
        frozenset({"function", "name"}),
        folded=len(held) > _ROWS_OPEN,
    )


def _shape(item: Held) -> str:
    return count(item.arrays, "array") if item.shape is None else shape_label(item.shape)


# -- the rest ------------------------------------------------------------------------------------------------


def freed_report(
    title: str, steps: Iterable[ReclaimStep], reclaimed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return what giving memory back by hand gave."""
    steps = list(steps)
    given = ", ".join(_step_list(steps, reclaimed))
    lines = [*[given] * bool(given), *notes, *_failed_steps(steps)]
    sizes = [_came_back(device, size, steps) for device, size in reclaimed.items()]
    return Report("note", f"{title}: {', '.join(sizes) or 'nothing'}", tuple(lines))


def _came_back(device: str, size: int, steps: Iterable[ReclaimStep]) -> str:
    """Return what came back of a device: of its cache where no tensor went."""
    returned = sum(max(0, step.returned.get(device, 0)) for step in steps)
    what = f"reserved {format_bytes(returned)}" if returned and size <= 0 else format_bytes(max(0, size))
    return f"{device_label(device)} {what}"


# -- leaks ----------------------------------------------------------------------------------------------------


_LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")


def leaks_report(held: Sequence[Held], smallest: int, beyond: Sequence[Held] = (), kept: Sequence[str] = ()) -> Report:
    """Return the answer of ``%gpumem leaks``; ``beyond`` was too much to be looked into, ``kept`` are other lines."""
    lines = leak_lines(held)
    if beyond:
        rest = f"{count(len(beyond), 'smaller storage')}, {format_bytes(_total(beyond))} in all"
        lines.append(f"{rest}: not examined, there are too many; free others first, then ask again")
    lines += kept
    if not held:
        return Report("leaks", f"no leak of at least {format_bytes(smallest)} was found", tuple(lines))
    return Report("leaks", f"{count(len(held), 'leak')} · {format_bytes(_total(held))}", tuple(lines))


def kept_line(size: int, device: str, what: str, remedy: str) -> str:
    """Return the line of memory that is kept by mistake, as it seems, with a remedy."""
    return SEPARATOR.join([f"{format_bytes(size)} on {device}", clean(what), clean(remedy)])


def leak_lines(held: Sequence[Held]) -> list[str]:
    """Return one line for each, those in one container together, and one line for those that are too many."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for item in held:
        groups.setdefault(_what_and_where(item), []).append(item)
    ordered = sorted(groups.values(), key=lambda group: -_total(group))
    lines = [_leak_line(group) for group in ordered[:_ROWS_SHOWN]]
    rest = [item for group in ordered[_ROWS_SHOWN:] for item in group]
    return [*lines, f"and {len(rest)} more: {format_bytes(_total(rest))}"] if rest else lines


def _total(held: Iterable[Held]) -> int:
    return sum(item.size_bytes for item in held)


def _what_and_where(item: Held) -> tuple[object, ...]:
    where = None if item.holder is None else (_LAST_INDEX.sub("", item.holder.path), item.holder.advice)
    return (item.name, item.type_name, item.dtype, item.shape, item.device, item.cell, where)


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
