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
    OUTSIDE,
    CellRecord,
    CutListing,
    ExperimentRecord,
    FreeingStep,
    KeptError,
    RecoveryRecord,
    RetainedArray,
    TraceRecord,
    Usage,
)
from ipygpumem.report import layout
from ipygpumem.report.layout import (
    SEPARATOR,
    LineSegment,
    Report,
    Table,
    clean,
    clean_name,
    count,
    device_label,
)
from ipygpumem.units import MIB, format_bytes, format_change, format_seconds, format_share

_ROWS_SHOWN = 20
_ROWS_OPEN = 8
"""Maximum number of rows of a details table that is shown unfolded."""


# -- cells --------------------------------------------------------------------------------------


def cell_report(record: CellRecord, scales: layout.Scales | None = None) -> Report:
    """Return the one-line report of a cell, with bars scaled by ``scales``; short if nothing
    changed.
    """
    number = record.execution_count
    segments = _span_segments(record, scales or layout.Scales())
    if (
        number is not None
        and record.error is None
        and not any(type(part) is LineSegment for part in segments)
    ):
        return Report("cell", [str(number), *segments[record.duration_seconds < 1 :]])
    return Report("cell", ["cell" if number is None else f"cell {number}", *segments])


def trace_report(record: TraceRecord, note: str = "") -> Report:
    """Return the one-line report of a trace."""
    head = " ".join(filter(None, ("trace", clean_name(record.label))))
    return Report(
        "trace", [head, *[clean(note)] * bool(note), *trace_segments(record)], records=[record]
    )


def trace_segments(record: TraceRecord) -> list[LineSegment | str]:
    """Return a trace's headline after its name: its time, its error, each device in use."""
    return _span_segments(record) + ["memory was not measured"] * (not record.usages)


def _span_segments(
    record: CellRecord | TraceRecord, scales: layout.Scales | None = None
) -> list[LineSegment | str]:
    segments: list[LineSegment | str] = [format_seconds(record.duration_seconds)]
    if record.error is not None:
        segments.append(clean_name(record.error))
    if isinstance(record, CellRecord) and record.child_peak_bytes is not None:
        segments.append(f"child process peak +{format_bytes(record.child_peak_bytes)}")
    for usage in filter(layout.in_use, record.usages):
        if has_moved(usage):
            segments.append(
                LineSegment(_usage_part(usage), None if scales is None else scales.bar(usage))
            )
        else:
            segments.append(f"{_label(usage)} {_now(usage).removesuffix(' now')}")
    return segments


def is_ours(record: CellRecord) -> bool:
    """Return True if a cell consists of our commands, which show their own reports."""
    return record.source_line.startswith(
        ("%gpumem", "%experiment", "%%estimate", "%%gpumemit", "%config IPyGpuMem")
    )


def is_quiet(record: CellRecord) -> bool:
    """Return True if a cell has nothing to report: no device changed, nothing failed, no child
    process holds memory.
    """
    fine = record.error is None and record.recovery is None
    return fine and not any(
        has_moved(usage) or (usage.device in OUTSIDE and usage.after_bytes)
        for usage in record.usages
    )


def usage_parts(usages: Iterable[Usage]) -> list[str]:
    """Return one headline part per device, without accelerators that were and are empty."""
    return [_usage_part(usage) for usage in usages if layout.in_use(usage)]


def has_moved(usage: Usage) -> bool:
    """Return True if kept, freed or temporary memory reaches a MiB; less is usually not caused by
    the cell.
    """
    return max(abs(usage.delta_bytes), usage.peak_delta_bytes) >= MIB


def _usage_part(usage: Usage) -> str:
    peak = [] if usage.device in OUTSIDE else [f"peak {layout.peak_label(usage)}"]
    return ", ".join([f"{_label(usage)} {format_change(usage.delta_bytes)}", *peak, _now(usage)])


def _label(usage: Usage) -> str:
    """Return the name of the device, with the measure of child processes where it is not PSS."""
    return device_label(usage.device) + " by RSS" * bool(usage.device == "children" and usage.note)


def _now(usage: Usage) -> str:
    if usage.used_bytes is not None and usage.total_bytes is not None:
        return format_share(usage.used_bytes, usage.total_bytes)
    if usage.device == "shm" and usage.total_bytes is not None:  # the mount's limit
        return f"{format_bytes(usage.after_bytes)} of {format_bytes(usage.total_bytes)}"
    return f"{format_bytes(usage.after_bytes)} now"


# -- experiments --------------------------------------------------------------------------------


def experiment_reports(
    record: ExperimentRecord, style: str, scales: layout.Scales | None = None
) -> list[Report]:
    """Return the report of a finished experiment in ``style``: ``full``, ``compact``
    or ``none``.
    """
    if style == "none":
        return []
    head = [
        f"experiment {clean_name(record.name)}",
        *[count(len(record.cells), "cell")] * bool(record.cells),
    ]
    head += times(record.duration_seconds, record.span_seconds)
    notes = tuple(map(clean, record.notes))
    used = list(filter(layout.in_use, record.usages))
    bars = list(map((scales or layout.Scales()).bar, used))
    rows = [
        {
            "device": _label(usage),
            **end_labels(record, usage.device),
            "peak": ""
            if usage.device in OUTSIDE
            else layout.peak_label(usage),  # the line shows what is in use now
        }
        for usage in used
    ]
    if style == "compact":
        parts = ["{device} consumed {consumed}, freed {freed}".format_map(row) for row in rows]
        parts = [
            part + f", peak {row['peak']}" * bool(row["peak"])
            for part, row in zip(parts, rows, strict=True)
        ]
        return [
            Report("experiment", [*head, *map(LineSegment, parts, bars)], notes, records=[record])
        ]
    title = "still alive, because something outside the experiment refers to it"
    listings = [layout.Listing(title, leak_lines(record.survivors))]
    tables = [Table.of(rows, {"consumed", "freed", "peak"}, bars=bars)]
    names = {
        "noted": [f"{name}={value}" for name, value in record.parameters.items()],
        "deleted": record.deleted,
        "restored": record.restored,
        "kept": record.kept,
    }
    facts = [
        layout.Fact(title, list(map(clean_name, found)), code=True)
        for title, found in names.items()
    ]
    facts.append(layout.Fact("freed by", _step_list(record.steps, record.freed)))
    return [Report("experiment", head, notes, tables, facts, listings, records=[record])]


def end_labels(record: ExperimentRecord, device: str) -> dict[str, str]:
    """Return the labels of the memory held at an experiment's end, and of the decrease: negative
    for an increase.
    """
    consumed, freed = record.consumed.get(device, 0), record.freed.get(device)
    if freed is None:
        return {"consumed": "unknown", "freed": "unknown"}
    return {"consumed": format_change(consumed), "freed": format_bytes(freed)}


def times(seconds: float, span_seconds: float) -> list[str]:
    """Return the time in an experiment's cells, and the span from start to end if that is more than
    a second longer.
    """
    return [
        format_seconds(seconds),
        *[f"span {format_seconds(span_seconds)}"] * (span_seconds > seconds + 1),
    ]


def _step_list(steps: Iterable[FreeingStep], total: Mapping[str, int]) -> list[str]:
    """Return each step's share of ``total``, those below 1 % together, and the rest; tiny ones are
    left out.
    """
    least = {device: max(MIB // 10, size // 100) for device, size in total.items()}
    texts, left = [], dict(total)
    small: Counter[str] = Counter()

    def add(name: str, shares: Mapping[str, int]) -> None:
        shown = {
            device: size for device, size in shares.items() if size >= least.get(device, MIB // 10)
        }
        small.update({device: size for device, size in shares.items() if device not in shown})
        if shown:
            texts.append(f"{name} ({_sizes(shown)})")

    for step in steps:
        # A later step may take some of it again, such as a page for its own work.
        shares = {
            device: min(size, left.get(device, 0))
            for device, size in step.freed.items()
            if size > 0
        }
        left |= {device: left.get(device, 0) - size for device, size in shares.items()}
        add(
            step.name,
            shares
            | {
                f"{device_label(device)} reserved": size
                for device, size in step.freed_reserved.items()
            },
        )
    ended = left.pop("children", 0)
    texts += [f"processes that ended ({format_bytes(ended)})"] * (ended >= MIB // 10)
    add("smaller steps", dict(small))
    add("allocators by themselves", left)
    return texts


# -- errors -------------------------------------------------------------------------------------

_CAUSES = {"oom": "out of memory", "interrupt": "interrupted", "error": "failed"}
_KEEPS = {"oom": "never", "interrupt": "oom", "error": "oom+interrupt"}
"""The option's value that keeps the locals of frames for such an error."""


def recovery_reports(record: RecoveryRecord, min_held_bytes: int) -> list[Report]:
    """Return the report after an OOM, or after another error whose frames kept a relevant amount of
    memory alive.
    """
    held = [item for item in record.held if item.size_bytes >= min_held_bytes]
    has_kept_errors = any(kept.size_bytes >= min_held_bytes for kept in record.kept_errors)
    if record.kind != "oom" and not held and not has_kept_errors and not record.poisoned:
        return []
    head = [f"{_CAUSES[record.kind]} ({clean_name(record.error)})"]
    if record.requested_bytes is not None:
        head.append(f"asked for {format_bytes(record.requested_bytes)}")
    head += [f"free: {_sizes(record.free)}"] * (record.kind == "oom")
    freed = {
        device: max(0, size)
        for device, size in record.freed.items()
        if size > 0 or device not in OUTSIDE
    }
    head.append(f"freed: {_sizes(freed)}")
    tables = list[Table]()
    if held:
        title = "held by the traceback" if record.cut is None else "held by the traceback, at least"
        tables.append(held_table(title, record.held, min_held_bytes, _also_freed(record)))
    listings = [layout.Listing("small locals of these frames", list(map(clean, record.plain)))]
    lines = _recovery_lines(record, min_held_bytes)
    return [Report("recovery", head, lines, tables, listings=listings, is_trouble=True)]


def _also_freed(record: RecoveryRecord) -> dict[str, int]:
    """Return the memory freed on the held tensors' devices in addition to them, if it deserves a
    row.
    """
    held: Counter[str] = Counter()
    for item in record.held:
        *hosts, device = item.device.split(", ")  # the last of an optimizer's is not the host
        if not set(hosts) <= {"cpu"}:
            return {}
        held[device] += item.size_bytes
    more = Counter(record.freed)
    more.subtract(held)
    return {
        device: more[device] for device in held if more[device] >= max(MIB, held[device] // 100)
    }


_CUTS = {
    "time": "listing stopped after half a second, so that nothing waits for it",
    "memory": "listing stopped, because little memory was left",
    "objects": "listing stopped, because there were too many objects",
}


def _cut_text(cut: CutListing) -> str:
    """Return why a list is not complete."""
    names = count(cut.names, "local")
    return (
        f"not everything was counted: {_CUTS[cut.reason]}; {cut.uncounted} of {names} may hold more"
    )


_ERRORS_SHOWN = 5


def _kept_text(kept: KeptError) -> str:
    """Return the memory that an error still holds, and the line that frees it."""
    what = f"the error in {clean(kept.place)}" if kept.place else "the last error"
    least = "" if kept.is_complete else "at least "
    size = format_bytes(kept.size_bytes)
    inside = ", ".join(map(clean, kept.names))
    loses = f"All other items of {clean(kept.loses)} go with it. " if kept.loses else ""
    return (
        f"{what} still holds {least}{size} ({inside}). {loses}This line frees it: "
        f"{clean(kept.remedy)}"
    )


def _recovery_lines(record: RecoveryRecord, min_held_bytes: int) -> list[str]:
    lines = []
    if record.cut is not None:
        lines.append(_cut_text(record.cut))
    if record.poisoned:
        lines.append(
            "This error has broken the device's context: nothing on the device can be used or "
            "freed any more. "
            "Restart the kernel."
        )
    if record.cause is not None and record.cause.kind != "guard":  # which has a report of its own
        lines.append(clean(": ".join(filter(None, (record.cause.text, record.cause.remedy)))))
    large = [kept for kept in record.kept_errors if kept.size_bytes >= min_held_bytes]
    lines += map(_kept_text, large[:_ERRORS_SHOWN])
    if more := large[_ERRORS_SHOWN:]:
        size = format_bytes(sum(kept.size_bytes for kept in more))
        lines.append(
            f"{count(len(more), 'more error')} {'holds' if len(more) == 1 else 'hold'} {size}"
        )
    if record.incomplete_optimizer:
        lines.append(
            f"{clean_name(record.incomplete_optimizer)}: optimizer state is incomplete; the next "
            f"step() would raise "
            "KeyError. Make a new optimizer, or call its state.clear()."
        )
    reserved: Counter[str] = Counter()
    for step in record.steps:
        reserved.update(step.freed_reserved)
    if any(size > 0 for size in reserved.values()):
        lines.append("freed reserved memory: " + _sizes(reserved))
    if record.frames and (record.held or record.plain):
        option = f"%config IPyGpuMem.release_frames = '{_KEEPS[record.kind]}'"
        lines.append(f"%debug finds no locals in these frames: {option} keeps them")
    return lines + _failed_steps(record.steps)


def _failed_steps(steps: Iterable[FreeingStep]) -> list[str]:
    return [f"{step.name}: {clean(step.error)}" for step in steps if step.error]


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
    shown = [item for item in held if item.size_bytes >= smallest][:_ROWS_SHOWN]
    rows = [
        {
            "size": format_bytes(item.size_bytes),
            "function": clean_name(item.function),
            "line": str(item.line) if item.function else "",
            "name": clean_name(item.name),
            "type": clean_name(item.type_name),
            "shape": clean_name(_shape(item)),
            "contents": clean_name(_contents(item)),
            "dtype": clean_name(item.dtype),
            "device": clean_name(item.device),
        }
        for item in shown
    ]
    rest = held[len(shown) :]
    first = "function" if any(row["function"] for row in rows) else "name"
    extra = [
        (format_bytes(size), "garbage and caches", device) for device, size in (more or {}).items()
    ]
    extra += (
        [(_total(rest), f"and {len(rest)} more", "")] if rest and _sum(rest) >= smallest else []
    )
    rows += [{"size": size, first: what, "device": device} for size, what, device in extra]
    is_long = len(shown) > _ROWS_OPEN
    title = f"{title}: {_total(held)}" if is_long else title
    return Table.of(rows, {"line", "size"}, title, code={"function", "name"}, folded=is_long)


def _shape(item: RetainedArray) -> str:
    if item.shape is None:
        return count(item.arrays, "array") if item.arrays and not item.parts else ""
    return layout.shape_label(item.shape)


def _contents(item: RetainedArray) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in item.parts.items())


def freed_report(
    title: str, steps: Sequence[FreeingStep], freed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return the report of memory freed by hand."""
    by_step = ", ".join(_step_list(steps, freed))
    found = []
    for device, size in freed.items():
        # if no tensor was freed
        reserved = sum(max(0, step.freed_reserved.get(device, 0)) for step in steps)
        what = (
            f"reserved {format_bytes(reserved)}"
            if reserved and size <= 0
            else format_bytes(max(0, size))
        )
        found += [f"{device_label(device)} {what}"] * (size > 0 or device not in OUTSIDE)
    lines = (*[f"freed by: {by_step}"] * bool(by_step), *notes, *_failed_steps(steps))
    return Report("note", f"{title}: {', '.join(found) or 'nothing'}", lines, records=steps)


# -- leaks --------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Memory that is probably kept by mistake, but is no leak."""

    size_bytes: int
    device: str
    what: str
    remedy: str
    new_bytes: int
    """Bytes that no leak's row counts."""
    is_at_least: bool = False
    """True if it is more than its bytes."""


_LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")


def leaks_report(
    held: Sequence[RetainedArray],
    smallest: int,
    beyond: Sequence[RetainedArray] = (),
    kept: Sequence[Kept] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Return the report of ``%gpumem leaks``; ``beyond`` were too many to examine, ``kept`` are no
    leaks.
    """
    kept_rows = [Kept(*item) for item in kept]
    headline = _leaks_headline(held, smallest, beyond, kept_rows)
    rows = [*_leak_rows(held), *_kept_rows(kept_rows)]
    rows.sort(key=itemgetter(0), reverse=True)
    lines = [line for _, line in rows]
    if beyond:
        rest = f"{count(len(beyond), 'smaller storage')}, {_total(beyond)} in all"
        lines.append(f"{rest}: too many to examine; free larger ones first, then run it again")
    return Report("leaks", headline, [*lines, *notes], records=held)


def _leaks_headline(
    held: Sequence[RetainedArray],
    smallest: int,
    beyond: Sequence[RetainedArray],
    kept: Sequence[Kept],
) -> str:
    """Return the number of leaks and of other rows, and the bytes of all of them together."""
    size_bytes = _sum(held) + _sum(beyond) + sum(item.new_bytes for item in kept)
    is_at_least = any(row.is_at_least for row in held) or any(row.is_at_least for row in kept)
    total = _at_least(size_bytes, is_at_least=is_at_least)
    other_rows = len(beyond) + sum(item.new_bytes > 0 for item in kept)
    if held:
        rows = count(len(held), "leak")
        if other_rows:
            rows += f" and {count(other_rows, 'other row')}"
        return f"{rows}{SEPARATOR}{total}"
    none = f"no leak of at least {format_bytes(smallest)}"
    if other_rows:
        return f"{none}, but {total} are kept by what is listed below"
    return f"{none} was found"


def _kept_rows(kept: Sequence[Kept]) -> list[tuple[int, str]]:
    """Return the bytes and the line of each memory that is kept by mistake, and one line for the
    rest.
    """
    ordered = sorted(kept, key=attrgetter("new_bytes"), reverse=True)
    rows = [(item.new_bytes, _kept_line(item)) for item in ordered[:_ROWS_SHOWN]]
    more = ordered[_ROWS_SHOWN:]
    if more:
        total = format_bytes(sum(item.new_bytes for item in more))
        rows.append((0, f"and {len(more)} more: {total}"))
    return rows


def _kept_line(item: Kept) -> str:
    """Return the line of memory that is kept by mistake, with the bytes that only it counts."""
    size = _at_least(item.new_bytes, is_at_least=item.is_at_least)
    what = item.what
    if item.new_bytes < item.size_bytes:
        rest = format_bytes(item.size_bytes - item.new_bytes)
        what = f"{what} ({rest} more of it in the rows of leaks)"
    return SEPARATOR.join([f"{size} on {item.device}", clean(what), clean(item.remedy)])


def _at_least(size_bytes: int, *, is_at_least: bool) -> str:
    size = format_bytes(size_bytes)
    return f"at least {size}" if is_at_least else size


def leak_lines(held: Sequence[RetainedArray]) -> list[str]:
    """Return one line per leak, those in one container together, and one line for the rest."""
    return [line for _, line in _leak_rows(held)]


def _leak_rows(held: Sequence[RetainedArray]) -> list[tuple[int, str]]:
    """Return the bytes and the line of each group of leaks, the largest first, and one line for the
    rest.
    """
    groups: dict[tuple[object, ...], list[RetainedArray]] = {}
    for item in held:
        where = (
            None
            if item.holder is None
            else (_LAST_INDEX.sub("", item.holder.path), item.holder.advice)
        )
        what = (item.name, item.type_name, item.dtype, item.shape, item.device, item.cell, where)
        groups.setdefault(what, []).append(item)
    ordered = sorted(groups.values(), key=_sum, reverse=True)
    rows = [(_sum(group), _leak_line(group)) for group in ordered[:_ROWS_SHOWN]]
    rest = [item for group in ordered[_ROWS_SHOWN:] for item in group]
    if rest:
        rows.append((0, f"and {len(rest)} more: {_total(rest)}"))
    return rows


def _total(held: Iterable[RetainedArray]) -> str:
    return format_bytes(_sum(held))


def _sum(held: Iterable[RetainedArray]) -> int:
    return sum(item.size_bytes for item in held)


def _leak_line(group: Sequence[RetainedArray]) -> str:
    """Return the line of leaks of the same kind in one container."""
    first = group[0]
    is_at_least = any(item.is_at_least for item in group)
    parts = [_at_least(_sum(group), is_at_least=is_at_least), _leaked_objects(group)]
    libraries = sorted({library for item in group for library in item.uncounted})
    if libraries:
        verb = "keeps" if len(libraries) == 1 else "keep"
        parts.append(f"{clean(', '.join(libraries))} {verb} memory that is not counted")
    if first.cell is not None:
        parts.append(f"cell {first.cell}")
    if first.holder is not None:
        path = first.holder.path
        if len(group) > 1:
            path = _LAST_INDEX.sub("[…]", path)
        parts.append(f"held by {clean(path)}")
        if first.holder.advice:
            parts.append(f"to free it: {clean(first.holder.advice)}")
    return SEPARATOR.join(parts)


def _leaked_objects(group: Sequence[RetainedArray]) -> str:
    """Return the number, name, type and content of leaks of the same kind."""
    first = group[0]
    kind = clean_name(first.type_name)
    if first.shape is None:
        inside = _contents(first) or _shape(first)
        if inside:
            kind = f"{kind} with {inside}"
    shape = " × ".join(map(str, first.shape or ()))
    words = [kind, first.dtype, shape, f"on {first.device}"]
    text = " ".join(clean_name(word) for word in words if word)
    if first.name:
        text = f"{clean_name(first.name)}: {text}"
    objects = sum(item.objects for item in group)
    return f"{objects:,} × {text}" if objects > 1 else text
