"""Selects the content of the reports of cells, experiments, errors and leaks, independent of their
layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ipygpumem.records import (
    FREE_HEAP_PAGES,
    OUTSIDE,
    SEVERAL_TYPES,
    CellRecord,
    CutListing,
    ExperimentRecord,
    FreeingStep,
    KeptError,
    RecoveryRecord,
    RetainedArray,
    TraceRecord,
    Usage,
    uncounted_note,
)
from ipygpumem.report import layout
from ipygpumem.report.layout import (
    SEPARATOR,
    TO_FREE,
    LineSegment,
    Report,
    Table,
    accelerator,
    clean,
    clean_name,
    count,
    device_label,
    row_of_more,
)
from ipygpumem.units import (
    MIB,
    format_at_least,
    format_bytes,
    format_change,
    format_seconds,
    format_shape,
    format_share,
)

_ROWS_SHOWN = 20
_ROWS_OPEN = 8
"""Maximum number of rows of a details table that is shown open."""


# -- cells --------------------------------------------------------------------------------------


def cell_report(record: CellRecord, scales: layout.Scales | None = None) -> Report:
    """Return the one-line report of a cell, with bars scaled by ``scales``; short if nothing
    changed.
    """
    number = record.execution_count
    segments = _span_segments(record, scales or layout.Scales())
    if number is None:
        return Report("cell", ["cell", *segments])
    has_bars = any(isinstance(segment, LineSegment) for segment in segments)
    is_short = record.error is None and not has_bars
    if is_short and record.duration_seconds < 1:
        segments.pop(0)  # the time
    return Report("cell", [f"cell {number}", *segments])


def trace_report(record: TraceRecord, note: str = "") -> Report:
    """Return the one-line report of a trace."""
    title = "trace"
    if record.label:
        title = f"trace {clean_name(record.label)}"
    head: list[LineSegment | str] = [title]
    if note:
        head.append(clean(note))
    head += trace_segments(record)
    return Report("trace", head, records=[record])


def trace_segments(record: TraceRecord) -> list[LineSegment | str]:
    """Return a trace's headline after its name: its time, its error, each device in use."""
    segments = _span_segments(record)
    if not record.usages:
        segments.append("memory was not measured")
    return segments


def _span_segments(
    record: CellRecord | TraceRecord, scales: layout.Scales | None = None
) -> list[LineSegment | str]:
    """Return a headline's parts: time, error, a child process's peak, each device in use."""
    segments: list[LineSegment | str] = [format_seconds(record.duration_seconds)]
    if record.error is not None:
        segments.append(clean_name(record.error))
    if isinstance(record, CellRecord) and record.child_peak_bytes is not None:
        segments.append(f"child process peak +{format_bytes(record.child_peak_bytes)}")
    for usage in _worth_reporting(record.usages):
        if not has_changed(usage):
            in_use = _of_total(usage) or format_bytes(usage.after_bytes)
            segments.append(f"{_label(usage)} {in_use}")
            continue
        bar = None if scales is None else scales.bar(usage)
        segments.append(LineSegment(_usage_part(usage), bar))
    return segments


def _worth_reporting(usages: Iterable[Usage]) -> list[Usage]:
    """Return the usages without those of accelerators that were and are empty."""
    return list(filter(layout.is_worth_reporting, usages))


def begins_with_our_command(record: CellRecord) -> bool:
    """Return True if a cell's first line is one of our commands, which show their own reports."""
    return record.source_line.startswith(
        ("%gpumem", "%experiment", "%%estimate", "%%gpumemit", "%config IPyGpuMem")
    )


def is_quiet(record: CellRecord) -> bool:
    """Return True if a cell has nothing to report: no device changed, nothing failed, no child
    process holds memory.
    """
    if record.error is not None or record.recovery is not None:
        return False
    for usage in record.usages:
        if has_changed(usage):
            return False
        if usage.device in OUTSIDE and usage.after_bytes:
            return False
    return True


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return one headline part per device, without accelerators that were and are empty."""
    return list(map(_usage_part, _worth_reporting(usages)))


def has_changed(usage: Usage) -> bool:
    """Return True if kept, freed or temporary memory reaches a MiB; less is usually not caused by
    the cell.
    """
    return max(abs(usage.delta_bytes), usage.peak_delta_bytes) >= MIB


def _usage_part(usage: Usage) -> str:
    """Return a device's change, peak and use in words."""
    parts = [f"{_label(usage)} {format_change(usage.delta_bytes)}"]
    if usage.device not in OUTSIDE:
        parts.append(f"peak {layout.peak_label(usage)}")
    parts.append(_of_total(usage) or f"{format_bytes(usage.after_bytes)} now")
    return ", ".join(parts)


def _label(usage: Usage) -> str:
    """Return the name of the device, with the measure of child processes where it is not PSS."""
    label = device_label(usage.device)
    if usage.device == "children" and usage.note:
        label += " by RSS"
    return label


def _of_total(usage: Usage) -> str:
    """Return the memory in use now out of the total; empty if the report shows no total."""
    total = usage.total_bytes
    if total is None:
        return ""
    if usage.used_bytes is not None:
        return format_share(usage.used_bytes, total)
    if usage.device == "shm":  # the mount's limit
        return f"{format_bytes(usage.after_bytes)} of {format_bytes(total)}"
    return ""


# -- experiments --------------------------------------------------------------------------------


def experiment_reports(
    record: ExperimentRecord, style: str, scales: layout.Scales | None = None
) -> list[Report]:
    """Return the report of a finished experiment in ``style``: ``full``, ``compact``
    or ``none``.
    """
    if style == "none":
        return []
    scales = scales or layout.Scales()
    head: list[LineSegment | str] = [f"experiment {clean_name(record.name)}"]
    if record.cells:
        head.append(count(len(record.cells), "cell"))
    head += times(record.duration_seconds, record.span_seconds)
    notes = tuple(map(clean, record.notes))
    usages = _worth_reporting(record.usages)
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
    """Return an experiment's figures on one device in a few words."""
    labels = end_labels(record, usage.device)
    consumed, freed = labels["consumed"], labels["freed"]
    text = f"{_label(usage)} consumed {consumed}, freed {freed}"
    if usage.device in OUTSIDE:
        return text
    return f"{text}, peak {layout.peak_label(usage)}"


def _devices_table(
    record: ExperimentRecord, usages: Sequence[Usage], scales: layout.Scales
) -> Table:
    """Return one row per device; the cell's line shows what is in use now."""
    rows = []
    for usage in usages:
        row = {"device": _label(usage)} | end_labels(record, usage.device)
        if usage.device not in OUTSIDE:
            row["peak"] = layout.peak_label(usage)
        rows.append(row)
    bars = list(map(scales.bar, usages))
    return Table.of(rows, {"consumed", "freed", "peak"}, bars=bars)


def _experiment_facts(record: ExperimentRecord) -> list[layout.Fact]:
    """Return an experiment's parameters, what happened to its names, and the steps that freed."""
    parameters = [clean_name(f"{name}={value}") for name, value in record.parameters.items()]
    return [
        layout.Fact("noted", parameters, code=True),
        *name_facts(record),
        layout.Fact("freed by", _step_list(record.steps, record.freed)),
    ]


def name_facts(record: ExperimentRecord) -> list[layout.Fact]:
    """Return the facts on an experiment's names: deleted, restored and kept ones."""
    names = {"deleted": record.deleted, "restored": record.restored, "kept": record.kept}
    facts = []
    for title, values in names.items():
        facts.append(layout.Fact(title, list(map(clean_name, values)), code=True))
    return facts


def end_labels(record: ExperimentRecord, device: str) -> dict[str, str]:
    """Return the labels of the memory held at an experiment's end, and of the memory freed: none
    if it grew while the experiment ended, by our own records for instance.
    """
    freed = record.freed.get(device)
    if freed is None:
        return {"consumed": "unknown", "freed": "unknown"}
    consumed = record.consumed.get(device, 0)
    return {"consumed": format_change(consumed), "freed": format_bytes(max(0, freed))}


def times(seconds: float, span_seconds: float) -> list[str]:
    """Return the time in an experiment's cells, and the span from start to end if it has pauses."""
    texts = [format_seconds(seconds)]
    if has_pauses(seconds, span_seconds):
        texts.append(f"span {format_seconds(span_seconds)}")
    return texts


def has_pauses(seconds: float, span_seconds: float) -> bool:
    """Return True if an experiment's span is notably longer than the time in its cells."""
    return span_seconds > seconds + 1


def _step_list(steps: Iterable[FreeingStep], total: Mapping[str, int]) -> list[str]:
    """Return each step's share of the ``total`` freed on each device, and the remainder.

    Shares below 1 % are one item together, and tiny ones are left out.
    """
    shares = _Shares(total)
    remaining = Counter(total)
    for step in steps:
        freed: dict[str, int] = {}
        for device, size in step.freed.items():
            if size > 0:
                # A later step may take some of it again, such as a page for its own work.
                freed[device] = min(size, remaining[device])
                remaining[device] -= freed[device]
        for device, size in step.freed_reserved.items():
            freed[f"{device_label(device)} reserved"] = size
        is_noise = step.name == FREE_HEAP_PAGES and freed.get("cpu", 0) < _SMALL_TRIM_BYTES
        if not is_noise:
            shares.add(step.name, freed)
    of_ended_processes = remaining.pop("children", 0)
    if of_ended_processes >= _TINY_BYTES:
        shares.texts.append(f"processes that ended ({format_bytes(of_ended_processes)})")
    shares.add("smaller steps", dict(shares.small))
    shares.add("allocators by themselves", remaining)
    return shares.texts


_TINY_BYTES = MIB // 10
"""Less than that in a step is not shown."""
_SMALL_TRIM_BYTES = 4 * MIB
"""Less than that, of free heap pages, is not shown: any code leaves some."""


class _Shares:
    """The shares that are large enough to be shown, as texts, and the sum of the rest."""

    def __init__(self, total: Mapping[str, int]) -> None:
        self._total = total
        self.texts: list[str] = []
        self.small = Counter[str]()

    def add(self, name: str, sizes: Mapping[str, int]) -> None:
        """Add the bytes that one step freed on each device."""
        large: dict[str, int] = {}
        for device, size in sizes.items():
            hundredth = self._total.get(device, 0) // 100
            if size >= max(_TINY_BYTES, hundredth):
                large[device] = size
            else:
                self.small[device] += size
        if large:
            self.texts.append(f"{name} ({_sizes(large)})")


# -- errors -------------------------------------------------------------------------------------

_CAUSES = {"oom": "out of memory", "interrupt": "interrupted", "error": "failed"}
_KEEPS = {"oom": "never", "interrupt": "oom", "error": "oom+interrupt"}
"""The option's value that keeps the locals of frames for such an error."""


def recovery_reports(record: RecoveryRecord, min_held_bytes: int) -> list[Report]:
    """Return the report after an OOM, or after another error whose frames kept a relevant amount of
    memory alive or could not be released.
    """
    has_arrays = any(item.size_bytes >= min_held_bytes for item in record.held)
    has_errors = bool(_large_errors(record, min_held_bytes))
    has_failed = bool(_failed_steps(record.steps))
    if not (record.kind == "oom" or has_arrays or has_errors or has_failed or record.poisoned):
        return []
    tables = list[Table]()
    if has_arrays:
        title = "held by the traceback"
        if record.cut is not None:
            title += ", at least"
        tables.append(held_table(title, record.held, min_held_bytes, _also_freed(record)))
    locals_of_frames = list(map(clean, record.plain))
    listings = [layout.Listing("small locals of these frames", locals_of_frames)]
    lines = _recovery_lines(record, min_held_bytes)
    head = _recovery_head(record)
    return [Report("recovery", head, lines, tables, listings=listings, is_trouble=True)]


def _recovery_head(record: RecoveryRecord) -> list[str]:
    """Return the error, the memory that it asked for, and what was free and was freed."""
    head = [f"{_CAUSES[record.kind]} ({clean_name(record.error)})"]
    if record.requested_bytes is not None:
        head.append(f"asked for {format_bytes(record.requested_bytes)}")
    if record.kind == "oom":
        head.append(f"free: {_sizes(record.free)}")
    freed: dict[str, int] = {}
    for device, size in record.freed.items():
        if device not in OUTSIDE or size >= MIB:
            freed[device] = max(0, size)
    head.append(f"freed: {_sizes(freed)}")
    return head


def _large_errors(record: RecoveryRecord, min_held_bytes: int) -> list[KeptError]:
    return [error for error in record.kept_errors if error.size_bytes >= min_held_bytes]


def _also_freed(record: RecoveryRecord) -> dict[str, int]:
    """Return the memory freed on the held tensors' devices in addition to them, if it deserves a
    row.
    """
    held_bytes = Counter[str]()
    for item in record.held:
        *hosts, device = item.device.split(", ")  # the last of an optimizer's is not the host
        if not set(hosts) <= {"cpu"}:
            return {}
        held_bytes[device] += item.size_bytes
    rows: dict[str, int] = {}
    for device, size in held_bytes.items():
        more = record.freed.get(device, 0) - size
        if more >= max(MIB, size // 100):
            rows[device] = more
    return rows


_CUTS = {
    "time": "listing stopped after half a second, so that nothing waits for it",
    "memory": "listing stopped, because little memory was left",
    "objects": "listing stopped, because there were too many objects",
}


def _cut_text(cut: CutListing) -> str:
    """Return why a list is not complete."""
    reason = _CUTS[cut.reason]
    names = count(cut.names, "local")
    return f"not everything was counted: {reason}; {cut.uncounted} of {names} may hold more"


_ERRORS_SHOWN = 5


def _error_line(error: KeptError) -> str:
    """Return the memory that an error still holds, and the line that frees it."""
    place = f"the error in {clean(error.place)}" if error.place else "the last error"
    size = format_at_least(error.size_bytes, is_at_least=not error.is_complete)
    names = ", ".join(map(clean, error.names))
    sentences = [f"{place} still holds {size} ({names})."]
    if error.loses:
        sentences.append(f"All other items of {clean(error.loses)} go with it.")
    # No promise: errors deep in containers, and those of objects, are not searched.
    sentences.append(f"To free it: {clean(error.remedy)}")
    return " ".join(sentences)


_CONTEXT_IS_BROKEN = (
    "This error has broken the device's context: nothing on the device can be used or freed any "
    "more. Restart the kernel."
)


def _recovery_lines(record: RecoveryRecord, min_held_bytes: int) -> list[str]:
    """Return lines about the cause, what is still held, and what the recovery has changed."""
    lines = []
    if record.cut is not None:
        lines.append(_cut_text(record.cut))
    if record.poisoned:
        lines.append(_CONTEXT_IS_BROKEN)
    cause = record.cause
    if cause is not None and cause.kind != "guard":  # which has a report of its own
        sentences = [text for text in (cause.text, cause.remedy) if text]
        lines.append(clean(": ".join(sentences)))
    lines += _error_lines(_large_errors(record, min_held_bytes))
    if record.incomplete_optimizer:
        lines.append(
            f"{clean_name(record.incomplete_optimizer)}: optimizer state is incomplete; the next "
            "step() would raise KeyError. Make a new optimizer, or call its state.clear()."
        )
    reserved = _freed_reserved(record.steps)
    if any(size > 0 for size in reserved.values()):
        lines.append(f"freed reserved memory: {_sizes(reserved)}")
    if record.frames and (record.held or record.plain):
        option = f"%config IPyGpuMem.release_frames = '{_KEEPS[record.kind]}'"
        lines.append(f"%debug no longer shows the locals of these frames; to keep them: {option}")
    return lines + _failed_steps(record.steps)


def _freed_reserved(steps: Iterable[FreeingStep]) -> Counter[str]:
    """Return the reserved memory that steps freed on each device."""
    reserved = Counter[str]()
    for step in steps:
        reserved.update(step.freed_reserved)
    return reserved


def _error_lines(errors: Sequence[KeptError]) -> list[str]:
    """Return one line for each of the largest errors that hold memory, and one for the rest."""
    lines = list(map(_error_line, errors[:_ERRORS_SHOWN]))
    more = errors[_ERRORS_SHOWN:]
    if more:
        number = count(len(more), "more error")
        verb = "holds" if len(more) == 1 else "hold"
        size = sum(error.size_bytes for error in more)
        lines.append(f"{number} {verb} {format_bytes(size)}")
    return lines


def _failed_steps(steps: Iterable[FreeingStep]) -> list[str]:
    lines = []
    for step in steps:
        if step.error:
            error = clean(step.error)
            lines.append(f"{step.name}: {error}")
    return lines


def _sizes(by_device: Mapping[str, int]) -> str:
    return ", ".join(layout.sizes(by_device)) or "nothing"


def held_table(
    title: str,
    held: Sequence[RetainedArray],
    smallest: int = 0,
    more: Mapping[str, int] | None = None,
) -> Table:
    """Return a table of the largest arrays held, one row for the rest, and one for each device of
    ``more``.
    """
    large = [item for item in held if item.size_bytes >= smallest]
    shown = large[:_ROWS_SHOWN]
    remaining = held[len(shown) :]
    rows = list(map(_held_row, shown))
    for device, size in (more or {}).items():
        rows.append({"size": format_bytes(size), "name": "garbage and caches", "device": device})
    if remaining and _sum(remaining) >= smallest:
        rows.append({"size": _total(remaining), "name": f"and {len(remaining)} more"})
    is_long = len(shown) > _ROWS_OPEN
    if is_long:
        title = f"{title}: {_total(held)}"
    numbers = {"line", "size"}
    code = {"function", "name"}
    return Table.of(rows, numbers, title, code=code, is_collapsed=is_long)


def _held_row(item: RetainedArray) -> dict[str, str]:
    """Return the row of an array that a frame or a traceback holds."""
    row = {
        "size": format_bytes(item.size_bytes),
        "function": item.function,
        "line": "",
        "name": item.name,
        "type": item.type_name,
        "shape": _shape(item),
        "contents": _contents(item),
        "dtype": item.dtype,
        "device": item.device,
    }
    if item.function:
        row["line"] = str(item.line)
    return {column: clean_name(text) for column, text in row.items()}


def _shape(item: RetainedArray) -> str:
    """Return the shape of an array, or the number of arrays in a container."""
    if item.shape is not None:
        return layout.shape_label(item.shape)
    if item.arrays and not item.parts:
        return count(item.arrays, "array")
    return ""


def _contents(item: RetainedArray) -> str:
    """Return the parts of an object with their sizes."""
    parts = [f"{name} {format_bytes(size)}" for name, size in item.parts.items()]
    return ", ".join(parts)


def freed_report(
    title: str, steps: Sequence[FreeingStep], freed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return the report of memory freed by hand."""
    sizes = []
    for device, size in freed.items():
        if device not in OUTSIDE or size >= MIB:
            label = _freed_label(device, size, steps)
            sizes.append(f"{device_label(device)} {label}")
    headline = f"{title}: {', '.join(sizes) or 'nothing'}"
    lines = []
    by_step = ", ".join(_step_list(steps, freed))
    if by_step:
        lines.append(f"freed by: {by_step}")
    lines += [*notes, *_failed_steps(steps)]
    return Report("note", headline, tuple(lines), records=steps)


def _freed_label(device: str, size: int, steps: Iterable[FreeingStep]) -> str:
    """Return the bytes freed on a device; if no tensor was freed, the reserved memory."""
    reserved = 0
    for step in steps:
        reserved += max(0, step.freed_reserved.get(device, 0))
    if reserved and size <= 0:
        return f"reserved {format_bytes(reserved)}"
    return format_bytes(max(0, size))


# -- leaks --------------------------------------------------------------------------------------


_SizedRow = tuple[int, dict[str, str]]
"""The bytes and the texts of a row of leaks."""


class ReclaimableItem(NamedTuple):
    """Memory that was probably kept by accident, but is no leak."""

    size_bytes: int
    device: str
    what: str
    remedy: str
    new_bytes: int
    """Bytes that no leak's row counts."""
    is_at_least: bool = False
    """True if it is more than its bytes."""


LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")
"""The index of an item in the path of its holder."""


def leaks_report(
    held: Sequence[RetainedArray],
    smallest: int,
    beyond: Sequence[RetainedArray] = (),
    kept: Sequence[ReclaimableItem] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Return the report of ``%gpumem leaks``; ``beyond`` were too many to examine, ``kept`` are no
    leaks.
    """
    headline = _leaks_headline(held, smallest, beyond, kept)
    sized_rows = _leak_rows(held) + _kept_rows(kept)
    sized_rows.sort(key=itemgetter(0), reverse=True)
    table = _table_of_leaks(sized_rows)
    lines = list(notes)
    if beyond:
        number = count(len(beyond), "smaller storage")
        hint = "free larger ones first, then run it again"
        lines.insert(0, f"{number}, {_total(beyond)} in total: too many to examine; {hint}")
    return Report("leaks", headline, lines, [table], records=held)


def note_on_unreached(rows: Sequence[RetainedArray]) -> str:
    """Return a line about memory that may be no leak: the search ended before it knew."""
    it, they = ("it", "it") if len(rows) == 1 else ("them", "they")
    leak = "no leak" if len(rows) == 1 else "no leaks"
    return (
        f"{count(len(rows), 'object')}, {_total(rows)} in total: the search ended at its limits "
        f"before it knew what holds {it}; {they} may be {leak}"
    )


def _leaks_headline(
    held: Sequence[RetainedArray],
    smallest: int,
    beyond: Sequence[RetainedArray],
    kept: Sequence[ReclaimableItem],
) -> str:
    """Return the number of leaks, of reclaimable items and of unexamined storages, and the bytes
    of all of them.
    """
    reclaimable = 0
    size_bytes = _sum(held) + _sum(beyond)
    is_at_least = any(row.is_at_least for row in held)
    for item in kept:
        size_bytes += item.new_bytes
        is_at_least |= item.is_at_least
        if item.new_bytes > 0:
            reclaimable += 1
    total = format_at_least(size_bytes, is_at_least=is_at_least)
    if held:
        kinds = [count(len(_groups_of_leaks(held)), "leak")]
        if reclaimable:
            kinds.append(count(reclaimable, "reclaimable item"))
        if beyond:
            kinds.append(count(len(beyond), "unexamined storage"))
        return f"{', '.join(kinds)}{SEPARATOR}{total}"
    none = f"no leak of at least {format_bytes(smallest)}"
    if reclaimable or beyond:
        return f"{none}, but {total} are kept by what is listed below"
    return f"{none} was found"


def _kept_rows(kept: Sequence[ReclaimableItem]) -> list[_SizedRow]:
    """Return a row for each memory that is kept by mistake, and one for the rest."""
    ordered = sorted(kept, key=attrgetter("new_bytes"), reverse=True)
    rows = [(item.new_bytes, _kept_row(item)) for item in ordered[:_ROWS_SHOWN]]
    more = ordered[_ROWS_SHOWN:]
    if more:
        size = sum(item.new_bytes for item in more)
        rows.append((0, row_of_more(len(more), size, "what")))
    return rows


def _kept_row(item: ReclaimableItem) -> dict[str, str]:
    """Return the row of memory that is kept by mistake, with the bytes that only it counts."""
    what = item.what
    if item.new_bytes < item.size_bytes:
        in_leaks = format_bytes(item.size_bytes - item.new_bytes)
        what = f"{what} ({in_leaks} more of it in the rows of leaks)"
    return {
        "size": format_at_least(item.new_bytes, is_at_least=item.is_at_least),
        "what": clean(what),
        "device": accelerator(item.device),
        "cell": "",
        "held by": "",
        TO_FREE: clean(item.remedy),
    }


def leak_table(held: Sequence[RetainedArray], title: str) -> Table:
    """Return a table with a row for each leak, those in one container together, and one for the
    rest; without rows if there are no leaks.
    """
    return _table_of_leaks(_leak_rows(held), title)


def _table_of_leaks(sized_rows: Sequence[_SizedRow], title: str = "") -> Table:
    """Return the table of rows of leaks: size, object, holder, and the line that frees it."""
    rows = [row for _, row in sized_rows]
    is_long = bool(title) and len(rows) > _ROWS_OPEN
    numbers, lines_to_paste = {"size", "cell"}, {TO_FREE}
    return Table.of(
        rows, numbers, title, code=lines_to_paste, whole=lines_to_paste, is_collapsed=is_long
    )


def _leak_rows(held: Sequence[RetainedArray]) -> list[_SizedRow]:
    """Return a row for each group of leaks, the largest first, and one for the rest."""
    groups = _groups_of_leaks(held)
    rows = [(_sum(group), _leak_row(group)) for group in groups[:_ROWS_SHOWN]]
    remaining = list[RetainedArray]()
    for group in groups[_ROWS_SHOWN:]:
        remaining += group
    if remaining:
        rows.append((0, row_of_more(len(remaining), _sum(remaining), "what")))
    return rows


def _groups_of_leaks(held: Sequence[RetainedArray]) -> list[list[RetainedArray]]:
    """Return the leaks by line, the largest first."""
    by_line: dict[tuple[object, ...], list[RetainedArray]] = {}
    for item in held:
        by_line.setdefault(_group_of(item), []).append(item)
    return sorted(by_line.values(), key=_sum, reverse=True)


def _group_of(item: RetainedArray) -> tuple[object, ...]:
    """Return a key that is equal for leaks of one line, such as the items of one list."""
    kind = (item.name, item.type_name, item.dtype, item.shape, item.device, item.cell)
    if item.holder is None:
        return kind
    container = LAST_INDEX.sub("", item.holder.path)
    return (*kind, container, item.holder.advice)


def _total(held: Iterable[RetainedArray]) -> str:
    return format_bytes(_sum(held))


def _sum(held: Iterable[RetainedArray]) -> int:
    return sum(item.size_bytes for item in held)


def _leak_row(group: Sequence[RetainedArray]) -> dict[str, str]:
    """Return the row of leaks of the same kind in one container."""
    first = group[0]
    is_at_least = any(item.is_at_least for item in group)
    row = {
        "size": format_at_least(_sum(group), is_at_least=is_at_least),
        "what": _leaked_objects(group) + _uncounted_text(group),
        "device": accelerator(first.device),
        "cell": layout.number_text(first.cell),
        "held by": "",
        TO_FREE: "",
    }
    if first.holder is not None:
        path = first.holder.path
        if len(group) > 1:
            path = LAST_INDEX.sub("[…]", path)
        row["held by"] = clean(path)
        row[TO_FREE] = clean(first.holder.advice)
    return row


def _uncounted_text(group: Sequence[RetainedArray]) -> str:
    """Return a sentence about libraries whose memory is not counted; empty if there are none."""
    libraries = set[str]()
    for item in group:
        libraries.update(item.uncounted)
    if not libraries:
        return ""
    return f"; {clean(uncounted_note(sorted(libraries)))}"


def _leaked_objects(group: Sequence[RetainedArray]) -> str:
    """Return the number, name, type and content of leaks of the same kind."""
    first = group[0]
    objects = sum(item.objects for item in group)
    kind = clean_name(first.type_name)
    is_of_many_types = first.type_name == SEVERAL_TYPES and bool(first.parts) and objects > 1
    if is_of_many_types:
        kind = f"{objects:,} objects ({_contents(first)})"
    elif first.shape is None:
        contents = _contents(first) or _shape(first)
        if contents:
            kind = f"{kind} with {contents}"
    shape = format_shape(first.shape or ())
    words = [kind, shape]
    if not first.parts:
        words.insert(1, first.dtype)
    text = " ".join(clean_name(word) for word in words if word)
    if first.name:
        text = f"{clean_name(first.name)}: {text}"
    if objects > 1 and not is_of_many_types:
        return f"{objects:,} × {text}"
    return text
