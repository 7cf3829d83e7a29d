"""The report after an error: its cause, the memory that its frames held, and the memory freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ipygpumem.records import OUTSIDE, CutListing, KeptError, RecoveryRecord
from ipygpumem.report.freeing import failures_of, freed_reserved, sizes_or_nothing
from ipygpumem.report.layout import Listing, Report, Table
from ipygpumem.report.retained_arrays import held_table
from ipygpumem.report.words import clean, clean_name, count
from ipygpumem.units import MIB, format_at_least, format_bytes

_KINDS = {"oom": "out of memory", "interrupt": "interrupted", "error": "failed"}
"""Kinds of errors, in words."""
_KEEPS = {"oom": "never", "interrupt": "oom", "error": "oom+interrupt"}
"""Kinds of errors, with the value of ``release_frames`` that keeps their frames' locals."""


def recovery_reports(record: RecoveryRecord, min_held_bytes: int) -> list[Report]:
    """Return the report after an error, in a list. An out-of-memory error always has one; another
    error only if its frames kept much memory alive, or could not be released.
    """
    has_arrays = any(item.size_bytes >= min_held_bytes for item in record.held)
    has_errors = bool(_large_errors(record, min_held_bytes))
    has_failed = bool(failures_of(record.steps))
    if not (record.kind == "oom" or has_arrays or has_errors or has_failed or record.poisoned):
        return []
    tables = list[Table]()
    if has_arrays:
        title = "held by the traceback"
        if record.cut is not None:
            title += ", at least"
        tables.append(held_table(title, record.held, min_held_bytes, _also_freed(record)))
    locals_of_frames = list(map(clean, record.plain))
    listings = [Listing("small locals of these frames", locals_of_frames)]
    lines = _recovery_lines(record, min_held_bytes)
    head = _recovery_head(record)
    return [Report("recovery", head, lines, tables, listings=listings, is_trouble=True)]


def _recovery_head(record: RecoveryRecord) -> list[str]:
    """Return the headline: the error, the requested bytes, the free bytes and the freed bytes."""
    head = [f"{_KINDS[record.kind]} ({clean_name(record.error)})"]
    if record.requested_bytes is not None:
        head.append(f"asked for {format_bytes(record.requested_bytes)}")
    if record.kind == "oom":
        head.append(f"free: {sizes_or_nothing(record.free)}")
    freed: dict[str, int] = {}
    for device, size in record.freed.items():
        if device not in OUTSIDE or size >= MIB:
            freed[device] = max(0, size)
    head.append(f"freed: {sizes_or_nothing(freed)}")
    return head


def _large_errors(record: RecoveryRecord, min_held_bytes: int) -> list[KeptError]:
    """Return the errors that still hold at least ``min_held_bytes``."""
    return [error for error in record.kept_errors if error.size_bytes >= min_held_bytes]


def _also_freed(record: RecoveryRecord) -> dict[str, int]:
    """Return the bytes that were freed in addition to the held arrays, on their devices, if they
    deserve a row. If an object is on several accelerators, return nothing: the arrays' share of
    each is not known.
    """
    held_bytes = Counter[str]()
    for item in record.held:
        *hosts, device = item.device.split(", ")  # the last of an optimizer's is not the host
        if not set(hosts) <= {"cpu"}:
            return {}
        held_bytes[device] += item.size_bytes
    also_freed: dict[str, int] = {}
    for device, size in held_bytes.items():
        further_bytes = record.freed.get(device, 0) - size
        if further_bytes >= max(MIB, size // 100):
            also_freed[device] = further_bytes
    return also_freed


_CONTEXT_IS_BROKEN = (
    "This error has broken the device's context: nothing on the device can be used or freed any "
    "more. Restart the kernel."
)


def _recovery_lines(record: RecoveryRecord, min_held_bytes: int) -> list[str]:
    """Return lines about the cause, about memory that errors still hold, and about changes that the
    recovery has made.
    """
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
    reserved = freed_reserved(record.steps)
    if any(size > 0 for size in reserved.values()):
        lines.append(f"freed reserved memory: {sizes_or_nothing(reserved)}")
    if record.frames and (record.held or record.plain):
        option = f"%config IPyGpuMem.release_frames = '{_KEEPS[record.kind]}'"
        lines.append(f"%debug no longer shows the locals of these frames; to keep them: {option}")
    return lines + failures_of(record.steps)


_CUTS = {
    "time": "listing stopped after half a second, so that nothing waits for it",
    "memory": "listing stopped, because little memory was left",
    "objects": "listing stopped, because there were too many objects",
}


def _cut_text(cut: CutListing) -> str:
    """Return the reason why the list of held memory is not complete, in words."""
    reason = _CUTS[cut.reason]
    names = count(cut.names, "local")
    return f"not everything was counted: {reason}; {cut.uncounted} of {names} may hold more"


_ERRORS_SHOWN = 5


def _error_lines(errors: Sequence[KeptError]) -> list[str]:
    """Return a line for each of the largest errors that still hold memory, and one line for all
    smaller ones.
    """
    lines = list(map(_error_line, errors[:_ERRORS_SHOWN]))
    not_shown = errors[_ERRORS_SHOWN:]
    if not_shown:
        number = count(len(not_shown), "more error")
        verb = "holds" if len(not_shown) == 1 else "hold"
        size = sum(error.size_bytes for error in not_shown)
        lines.append(f"{number} {verb} {format_bytes(size)}")
    return lines


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
