"""The report of ``%gpumem leaks``, and the table of leaks in other reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ipygpumem.records import SEVERAL_TYPES, RetainedArray, uncounted_note
from ipygpumem.report.devices import accelerator
from ipygpumem.report.layout import SEPARATOR, TO_FREE, Report, Table, row_of_more
from ipygpumem.report.retained_arrays import (
    ROWS_OPEN,
    ROWS_SHOWN,
    contents_text,
    large_contents_text,
    shape_text,
    total_bytes,
    total_text,
)
from ipygpumem.report.words import clean, clean_name, count, number_text
from ipygpumem.units import format_at_least, format_bytes, format_shape

_SizedRow = tuple[int, dict[str, str]]
"""The bytes and the texts of a row of leaks."""


class ReclaimableItem(NamedTuple):
    """Memory that was probably kept by accident, but is no leak, such as a cache's."""

    size_bytes: int
    device: str
    what: str
    """Its holder and its content in words."""
    remedy: str
    """Line or advice that frees it."""
    new_bytes: int
    """Bytes that no leak's row counts."""
    is_at_least: bool = False
    """True if the figures are lower bounds."""


LAST_INDEX = re.compile(r"\[\d+\](?=[^\[\]]*$)")
"""The index of an item in the path of its holder."""


def leaks_report(
    held: Sequence[RetainedArray],
    smallest: int,
    not_examined: Sequence[RetainedArray] = (),
    kept: Sequence[ReclaimableItem] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Return the report of ``%gpumem leaks``.

    Args:
        held: the leaks.
        smallest: minimum bytes of each row.
        not_examined: smaller arrays that were too many to examine.
        kept: memory that is kept by mistake, but is no leak.
        notes: lines below the table.
    """
    headline = _leaks_headline(held, smallest, not_examined, kept)
    sized_rows = _leak_rows(held) + _kept_rows(kept)
    sized_rows.sort(key=itemgetter(0), reverse=True)
    table = _table_of_leaks(sized_rows)
    lines = list(notes)
    if not_examined:
        number = count(len(not_examined), "smaller storage")
        total = total_text(not_examined)
        hint = "free larger ones first, then run it again"
        lines.insert(0, f"{number}, {total} in total: too many to examine; {hint}")
    return Report("leaks", headline, lines, [table], records=held)


def note_on_unreached(rows: Sequence[RetainedArray]) -> str:
    """Return a line about memory for which the search for a holder ended at its limits. A name may
    lead to it, so it may be no leak.
    """
    it, they = ("it", "it") if len(rows) == 1 else ("them", "they")
    leak = "no leak" if len(rows) == 1 else "no leaks"
    return (
        f"{count(len(rows), 'object')}, {total_text(rows)} in total: the search ended at its "
        f"limits before it knew what holds {it}; {they} may be {leak}"
    )


def _leaks_headline(
    held: Sequence[RetainedArray],
    smallest: int,
    not_examined: Sequence[RetainedArray],
    kept: Sequence[ReclaimableItem],
) -> str:
    """Return the headline: the numbers of leaks, of reclaimable items and of unexamined storages,
    and the bytes of all of them; or that no leak was found.

    Args:
        held: the leaks.
        smallest: minimum bytes of a leak.
        not_examined: smaller arrays that were too many to examine.
        kept: the reclaimable items.
    """
    reclaimable_items = 0
    size_bytes = total_bytes(held) + total_bytes(not_examined)
    is_at_least = any(row.is_at_least for row in held)
    for item in kept:
        size_bytes += item.new_bytes
        is_at_least |= item.is_at_least
        if item.new_bytes > 0:
            reclaimable_items += 1
    total = format_at_least(size_bytes, is_at_least=is_at_least)
    if held:
        numbers = [count(len(_groups_of_leaks(held)), "leak")]
        if reclaimable_items:
            numbers.append(count(reclaimable_items, "reclaimable item"))
        if not_examined:
            numbers.append(count(len(not_examined), "unexamined storage"))
        return f"{', '.join(numbers)}{SEPARATOR}{total}"
    no_leak = f"no leak of at least {format_bytes(smallest)}"
    if reclaimable_items or not_examined:
        return f"{no_leak}, but {total} are kept by what is listed below"
    return f"{no_leak} was found"


def _kept_rows(kept: Sequence[ReclaimableItem]) -> list[_SizedRow]:
    """Return the rows of the largest items, and one that sums up the smaller ones."""
    largest_first = sorted(kept, key=attrgetter("new_bytes"), reverse=True)
    rows = [(item.new_bytes, _kept_row(item)) for item in largest_first[:ROWS_SHOWN]]
    not_shown = largest_first[ROWS_SHOWN:]
    if not_shown:
        size = sum(item.new_bytes for item in not_shown)
        rows.append((0, row_of_more(len(not_shown), size, "what")))
    return rows


def _kept_row(item: ReclaimableItem) -> dict[str, str]:
    """Return the row of a reclaimable item. Its size has only the bytes that no row of a leak
    counts.
    """
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


def leak_table(held: Sequence[RetainedArray], title: str = "") -> Table:
    """Return a table of leaks; without rows if there are none. Equal items of one container have
    one row, and the last row sums up those beyond ``ROWS_SHOWN``.
    """
    return _table_of_leaks(_leak_rows(held), title)


def _table_of_leaks(sized_rows: Sequence[_SizedRow], title: str = "") -> Table:
    """Return a table of leaks: size, object, holder, and the line that frees it.

    Args:
        sized_rows: the rows, the largest first.
        title: its title; a long table with a title is collapsed.
    """
    rows = [row for _, row in sized_rows]
    is_long = bool(title) and len(rows) > ROWS_OPEN
    numbers, lines_to_paste = {"size", "cell"}, {TO_FREE}
    return Table.of(
        rows, numbers, title, code=lines_to_paste, whole=lines_to_paste, is_collapsed=is_long
    )


def _leak_rows(held: Sequence[RetainedArray]) -> list[_SizedRow]:
    """Return the rows of the largest groups of leaks, and one that sums up the smaller ones."""
    groups = _groups_of_leaks(held)
    rows = [(total_bytes(group), _leak_row(group)) for group in groups[:ROWS_SHOWN]]
    not_shown = list[RetainedArray]()
    for group in groups[ROWS_SHOWN:]:
        not_shown += group
    if not_shown:
        rows.append((0, row_of_more(len(not_shown), total_bytes(not_shown), "what")))
    return rows


def _groups_of_leaks(held: Sequence[RetainedArray]) -> list[list[RetainedArray]]:
    """Return the leaks in groups, the largest first: a group has one row."""
    groups: dict[tuple[object, ...], list[RetainedArray]] = {}
    for item in held:
        groups.setdefault(_key_of_group(item), []).append(item)
    return sorted(groups.values(), key=total_bytes, reverse=True)


def _key_of_group(item: RetainedArray) -> tuple[object, ...]:
    """Return a key that is equal for leaks with one row: they look alike, are items of one
    container, and have the same line.
    """
    kind = (item.name, item.type_name, item.dtype, item.shape, item.device, item.cell)
    if item.holder is None:
        return kind
    container = LAST_INDEX.sub("", item.holder.path)
    return (*kind, container, item.holder.advice)


def _leak_row(group: Sequence[RetainedArray]) -> dict[str, str]:
    """Return the row of a group of leaks, which look alike and are in one container."""
    first = group[0]
    is_at_least = any(item.is_at_least for item in group)
    row = {
        "size": format_at_least(total_bytes(group), is_at_least=is_at_least),
        "what": _words_on_objects(group) + _uncounted_text(group),
        "device": accelerator(first.device),
        "cell": number_text(first.cell),
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
    """Return the end of a sentence about libraries whose memory is not counted, such as
    ``; duckdb's memory is not counted``; empty if there are none.
    """
    libraries = set[str]()
    for item in group:
        libraries.update(item.uncounted)
    if not libraries:
        return ""
    return f"; {clean(uncounted_note(sorted(libraries)))}"


def _words_on_objects(group: Sequence[RetainedArray]) -> str:
    """Return the number, name, type and content of a group of leaks, such as
    ``3 × data: Tensor float32 1024×1024``.
    """
    first = group[0]
    objects = sum(item.objects for item in group)
    is_of_many_types = first.type_name == SEVERAL_TYPES and bool(first.parts) and objects > 1
    words = [_type_and_content(first, objects, is_of_many_types=is_of_many_types)]
    if not first.parts:
        words.append(first.dtype)
    words.append(format_shape(first.shape or ()))
    text = " ".join(clean_name(word) for word in words if word)
    if first.name:
        text = f"{clean_name(first.name)}: {text}"
    if objects > 1 and not is_of_many_types:
        return f"{objects:,} × {text}"
    return text


def _type_and_content(first: RetainedArray, objects: int, *, is_of_many_types: bool) -> str:
    """Return the type of a group of leaks, with their content if they are no arrays.

    Args:
        first: the first of the group.
        objects: the number of objects in the group.
        is_of_many_types: True if they have several types, which their content lists.
    """
    type_name = clean_name(first.type_name)
    if is_of_many_types:
        return f"{objects:,} objects ({contents_text(first)})"
    if first.shape is None:
        contents = large_contents_text(first) or shape_text(first)
        if contents:
            return f"{type_name} with {contents}"
    return type_name
