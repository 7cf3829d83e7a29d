"""Says what the reports of cells, experiments, errors and leaks contain, apart from how it looks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, RecoveryRecord, Usage
from ipygpumem.reports.bars import Bar, Scales
from ipygpumem.reports.layout import SEPARATOR, Fact, Listing, Segment, clean_name, headline, in_use, shape_label
from ipygpumem.reports.layout import Report as Report
from ipygpumem.reports.layout import Table as Table
from ipygpumem.reports.layout import clean as clean
from ipygpumem.reports.layout import count as count
from ipygpumem.reports.layout import device_label as device_label
from ipygpumem.reports.layout import note as note
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds, format_share

_NAMES_SHOWN = 40
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
    return Report("cell", headline(segments), segments=tuple(segments))


def is_quiet(record: CellRecord) -> bool:
    """Whether the line of a cell says nothing new: no device moved, nothing failed, no child process holds memory."""
    fine = record.error is None and record.recovery is None
    return fine and not any(_has_moved(usage) or usage.children_bytes for usage in record.usages)


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return one part of a line per device; accelerators that hold nothing and held nothing are left out."""
    return [_usage_part(usage) for usage in usages if in_use(usage)]


def _usage_segment(usage: Usage, scales: Scales) -> Segment:
    if _has_moved(usage):
        return Segment(_usage_part(usage), scales.bar(device_label(usage.device), usage))
    return Segment(f"{device_label(usage.device)} {_now(usage).removesuffix(' now')}{_children(usage)}")


def _has_moved(usage: Usage) -> bool:
    """Whether what was kept, given back or needed meanwhile comes to a MiB: less is mostly not the cell's doing."""
    return max(abs(usage.delta_bytes), usage.peak_delta_bytes) >= MIB


def _usage_part(usage: Usage) -> str:
    peak = f"peak {format_change(usage.peak_delta_bytes)}"
    if usage.method == "sampled":
        peak += " (sampled)"
    kept = f"{device_label(usage.device)} {format_change(usage.delta_bytes)}"
    return ", ".join([kept, peak, _now(usage)]) + _children(usage)


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
        return [Report("experiment", headline(segments), notes, segments=tuple(segments))]
    return [
        Report(
            "experiment",
            headline(segments),
            notes,
            (_experiment_table(record, used, bars),),
            _experiment_facts(record),
            _survivors(record.survivors),
            tuple(segments),
        )
    ]


def _survivors(held: Sequence[Held]) -> tuple[Listing, ...]:
    title = "still alive, because something outside the experiment refers to it"
    return (Listing(title, tuple(leak_lines(held))),) if held else ()


def _experiment_part(record: ExperimentRecord, usage: Usage) -> str:
    return (
        f"{device_label(usage.device)} consumed {format_change(record.consumed.get(usage.device, 0))}, "
        f"reclaimed {format_bytes(record.reclaimed.get(usage.device, 0))}, "
        f"peak {format_change(usage.peak_delta_bytes)}"
    )


def _experiment_table(record: ExperimentRecord, used: Sequence[Usage], bars: tuple[Bar | None, ...]) -> Table:
    rows = [
        (
            device_label(usage.device),
            format_change(record.consumed.get(usage.device, 0)),
            format_bytes(record.reclaimed.get(usage.device, 0)),
            format_change(usage.peak_delta_bytes) + (" (sampled)" if usage.method == "sampled" else ""),
        )
        for usage in used
    ]
    columns = ("device", "consumed", "reclaimed", "peak")  # what is in use now stands in the cell's line
    return Table("", columns, tuple(rows), frozenset(columns[1:]), bars=bars)


def _experiment_facts(record: ExperimentRecord) -> tuple[Fact, ...]:
    facts = [
        Fact(title, tuple(map(clean_name, names[:_NAMES_SHOWN])), code=True, more=max(0, len(names) - _NAMES_SHOWN))
        for title, names in (("deleted", record.deleted), ("restored", record.restored), ("kept", record.kept))
        if names
    ]
    noted = tuple(clean_name(f"{name}={value}") for name, value in record.parameters.items())
    if noted:
        facts.insert(0, Fact("noted", noted[:_NAMES_SHOWN], code=True, more=max(0, len(noted) - _NAMES_SHOWN)))
    steps = _step_list(record.steps, record.reclaimed)
    return (*facts, Fact("given back", tuple(steps))) if steps else tuple(facts)


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
        tables.append(_held_table("the frames of the traceback held", held))
    lines = tuple(_recovery_lines(record))
    return [Report("recovery", headline(segments), lines, tuple(tables), segments=tuple(segments), is_trouble=True)]


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
    returned: dict[str, int] = {}
    for step in record.steps:
        for device, size in step.returned.items():
            returned[device] = returned.get(device, 0) + size
    if any(size > 0 for size in returned.values()):
        lines.append("returned to the device: " + _sizes(returned))
    lines += [f"{step.name}: {clean(step.error)}" for step in record.steps if step.error]
    return lines


def let_go_lines(held: Sequence[Held]) -> list[str]:
    """Return what is said of the objects that were taken off an exception."""
    names = ", ".join(f"{item.name} ({item.type_name}, {format_bytes(item.size_bytes)})" for item in held)
    return [f"taken off the error, which nothing of yours referred to: {clean(names)}"] if held else []


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{device_label(device)} {format_bytes(size)}" for device, size in sizes.items()) or "nothing"


def _held_table(title: str, held: tuple[Held, ...]) -> Table:
    located = any(item.function for item in held)
    columns: tuple[str, ...] = ("size", "name", "type", "shape", "dtype", "device")
    rows: list[tuple[str, ...]] = [
        (
            format_bytes(item.size_bytes),
            clean_name(item.name),
            clean_name(item.type_name),
            _shape(item),
            clean_name(item.dtype),
            clean_name(item.device),
        )
        for item in held[:_ROWS_SHOWN]
    ]
    if located:
        columns = ("size", "function", "line", *columns[1:])
        rows = [
            (row[0], clean_name(item.function), str(item.line), *row[1:])
            for item, row in zip(held[:_ROWS_SHOWN], rows, strict=True)
        ]
    rest = held[_ROWS_SHOWN:]
    if rest:
        total = format_bytes(sum(item.size_bytes for item in rest))
        rows.append((total, f"and {len(rest)} more", *[""] * (len(columns) - 2)))
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


def name_list(names: Sequence[str]) -> str:
    """Return names with commas, and how many more there are where they are too many."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def freed_report(
    title: str, steps: Iterable[ReclaimStep], reclaimed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return what giving memory back by hand gave."""
    steps = list(steps)
    lines = [*notes, *(f"{step.name}: {clean(step.error)}" for step in steps if step.error)]
    given = _step_list(steps, reclaimed)
    if given:
        lines.insert(0, ", ".join(given))
    sizes = {device: max(0, size) for device, size in reclaimed.items()}
    return Report("note", f"{title}: {_sizes(sizes)}", tuple(lines))


# -- leaks ----------------------------------------------------------------------------------------------------


_LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")


def leaks_report(held: Sequence[Held], smallest: int, beyond: Sequence[Held] = ()) -> Report:
    """Return the answer of ``%gpumem leaks``; ``beyond`` was too much to be looked into."""
    lines = leak_lines(held)
    if beyond:
        rest = f"{count(len(beyond), 'smaller storage')}, {format_bytes(_total(beyond))} in all"
        lines.append(f"{rest}: not examined, there are too many; free others first, then ask again")
    if not held:
        return Report("leaks", f"no leak of at least {format_bytes(smallest)} was found", tuple(lines))
    return Report("leaks", f"{count(len(held), 'leak')} · {format_bytes(_total(held))}", tuple(lines))


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
