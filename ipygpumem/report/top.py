"""The report of ``%gpumem top``: the names that hold the most memory, with their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.paths.remedies import Remedy
from ipygpumem.heap.sizes.sizes import Share
from ipygpumem.heap.walks.parts import CACHED
from ipygpumem.inventory.names.top import SMALLEST, LargestNames, NamedSize
from ipygpumem.records import COMMENT, OUTSIDE
from ipygpumem.report.devices import accelerator, device_label, is_worth_a_row
from ipygpumem.report.layout import TO_FREE, Report, Table, row_of_more
from ipygpumem.report.registration import shows
from ipygpumem.report.words import clean, clean_name, count, listed, number_text
from ipygpumem.units import format_at_least, format_bytes

_PARTS_SHOWN = 3
_LEAST_SHARE = 0.01
"""Parts with a smaller share of the object are not shown."""
_LEAST_FREE_SHARE = 0.05
"""Smallest share of RAM at which free heap pages are mentioned: a few MiB are always free."""
_COUNTED_ONCE = "memory of several names is counted once; %gpumem why NAME counts all of it"
_DELETES_ALL = "a row with several names: its line deletes all of them"


@shows(LargestNames)
def top_report(names: LargestNames, *, top: int = 20, small: Sequence[str] = ()) -> Report:
    """Return the report of ``%gpumem top``.

    Args:
        names: the memory of all names.
        top: maximum number of rows; a last one sums up the smaller names.
        small: names that the user has asked for and that hold hardly any memory.
    """
    shares = _shares(names)
    rows_by_name = {share.row.name: share.row for share in shares[:top]}
    rows_shown = list(rows_by_name.values())  # a name on two devices has two shares
    table = _table_of_names(names, shares, top)
    lines = _lines_on_names(names, rows_shown, small)
    # The table shows the bytes that ``del`` of each name frees, so a user may run it.
    deletions = [f"del {row.name}" for row in rows_shown]
    return Report("top", _top_head(names), lines, [table], records=[names], advised=deletions)


def _table_of_names(names: LargestNames, shares: Sequence[_DeviceShare], top: int) -> Table:
    """Return the table of the ``top`` largest shares; then one row that sums up the smaller ones,
    and a row for each device with memory in no name.
    """
    rows = [_name_row(share, names.used_bytes) for share in shares[:top]]
    not_shown = shares[top:]
    if not_shown:
        size_bytes = sum(share.size_bytes for share in not_shown)
        rows.append(row_of_more(len(not_shown), size_bytes, "name"))
    rows += _rows_without_name(names)
    numbers = {"cell", "size", "share", "del frees"}
    expendable = ("share", "cell", "type", "content")
    return Table.of(rows, numbers, code={TO_FREE}, whole={TO_FREE}, expendable=expendable)


def _lines_on_names(
    names: LargestNames, shown: Sequence[NamedSize], small: Sequence[str]
) -> list[str]:
    """Return the lines below the table.

    Args:
        names: the memory of all names.
        shown: the names with a row.
        small: names that the user has asked for and that hold hardly any memory.
    """
    lines = list(map(clean, names.notes))
    if any(row.held_by for row in shown):
        lines.append(_COUNTED_ONCE)
    if any(row.same for row in shown):
        lines.append(_DELETES_ALL)
    if small:
        lines.append(clean(f"{listed(small)}: less than {format_bytes(SMALLEST)}"))
    for row in shown:
        lines += [clean(f"{row.name}: {note}") for note in row.notes]
    return lines


def _top_head(names: LargestNames) -> list[str]:
    """Return the headline: the number of names, and the memory that they hold on each device."""
    head = [f"memory by name: {count(len(names.names), 'name')}"]
    for device in dict.fromkeys([*names.used_bytes, *names.device_bytes]):
        size = names.device_bytes.get(device, 0)
        if not is_worth_a_row(device, size):
            continue
        text = f"{device_label(device)} {format_bytes(size)}"
        if device in names.used_bytes:
            text += f" of {format_bytes(names.used_bytes[device])}"
        head.append(text)
    return head


class _DeviceShare(NamedTuple):
    """The memory of a name on one device."""

    row: NamedSize
    device: str
    size_bytes: int


def _shares(names: LargestNames) -> list[_DeviceShare]:
    """Return the memory of each name on each device, the largest first. A name's small share on a
    second device is left out.
    """
    shares = []
    for row in names.names:
        least_bytes = _LEAST_SHARE * row.size_bytes
        for device, size in row.device_bytes.items():
            if size >= least_bytes:
                shares.append(_DeviceShare(row, device, size))
    return sorted(shares, key=attrgetter("size_bytes"), reverse=True)


def _name_row(share: _DeviceShare, used_bytes: Mapping[str, int]) -> dict[str, str]:
    """Return the row of a name on one device.

    Args:
        share: the memory of the name there.
        used_bytes: the process's memory by device, of which the row shows the share.
    """
    row = share.row
    device = share.device
    freed = ""
    if row.freed_bytes is not None:
        freed = format_at_least(row.freed_bytes.get(device, 0), is_at_least=row.is_at_least)
    names = [row.name, *row.same]
    return {
        "size": format_at_least(share.size_bytes, is_at_least=row.is_at_least),
        "share": _share_text(share.size_bytes, used_bytes.get(device, 0)),
        "del frees": freed,
        "name": clean(", ".join(names)),
        "device": accelerator(device),
        "type": clean(row.type_name),
        "content": content_of(row),
        "cell": number_text(row.cell),
        TO_FREE: _remedy_text(row),
    }


def _share_text(size: int, used: int) -> str:
    """Return a share of the memory in use, such as ``12%``; empty if that memory is unknown, or the
    share is too small to show.
    """
    if not used:
        return ""
    share = f"{size / used:.0%}"
    return "" if share == "0%" else share


def _remedy_text(row: NamedSize) -> str:
    """Return the line that frees a name's memory. Other names that hold it are in a comment:
    ``del model  # also held by runs``.
    """
    if not row.held_by:
        return clean(row.remedy)
    words = f"also held by {listed(row.held_by, 3)}"
    if not row.remedy:
        return clean(words)
    remedy = Remedy(row.remedy)
    # A magic would take a comment as its argument: ``as_code`` writes it as a call.
    joint = COMMENT if remedy.is_code else "; "
    return clean(remedy.as_code + joint + words)


def _rows_without_name(names: LargestNames) -> list[dict[str, str]]:
    """Return a row for each device with much memory in no name, and the command that tells more
    about it.
    """
    rows = []
    for device, size in names.unnamed_bytes.items():
        used = names.used_bytes.get(device, 0)
        if device in OUTSIDE or not used or size < _LEAST_SHARE * used:
            continue
        row = {
            "size": format_bytes(size),
            "share": f"{size / used:.0%}",
            "name": "(no name)",
            "device": accelerator(device),
            "content": "see %gpumem leaks",
        }
        if device == "cpu":
            row.update(_host_memory_without_name(names, size))
        rows.append(row)
    return rows


def _host_memory_without_name(names: LargestNames, size: int) -> dict[str, str]:
    """Return the cells in which the row on RAM in no name differs from that of another device: if
    much of it is free in malloc's heap, the line that returns this to the system.

    Args:
        names: the memory of all names.
        size: the bytes in no name.
    """
    free = min(size, names.free_heap_bytes)
    if free < _LEAST_FREE_SHARE * names.used_bytes["cpu"]:
        return {"content": "see %gpumem status"}
    return {
        "content": f"{format_bytes(free)} of free heap pages; see %gpumem status",
        TO_FREE: "%gpumem free",
    }


def content_of(row: NamedSize) -> str:
    """Return the largest parts of an object and their sizes, such as ``3 columns: text 120 MiB,
    number 8 MiB``.
    """
    large_parts = _large_parts(row) or list(row.parts[:1])
    parts_shown = large_parts[:_PARTS_SHOWN]
    if not parts_shown:
        return ""
    kind = _kind_of_parts(parts_shown)
    texts = []
    for part in parts_shown:
        text = part.name
        if kind == "items":
            text = _number_of_items(part)
        if kind != "items" or row.part_count > 1:  # else the row's size is that of its only part
            text += f" {format_bytes(part.size_bytes)}"
        texts.append(clean_name(text))
    content = ", ".join(texts)
    if kind in ("columns", "variables", "keys"):
        content = f"{_number_of_parts(row, kind)}: {content}"
    if len(large_parts) > len(parts_shown):
        content += ", …"
    return content


def _number_of_items(part: Share) -> str:
    """Return ``1,000 str`` for the items of one type, or ``1 cached result``."""
    if part.name == CACHED:
        return count(part.items, CACHED.removesuffix("s"))
    return f"{part.items:,} {part.name}"


def _kind_of_parts(parts: Sequence[Share]) -> str:
    """Return the kind of parts, such as ``columns``: that of the first one that is no index. Return
    an empty text if all are.
    """
    for part in parts:
        if part.kind != "index":
            return part.kind
    return ""


def _large_parts(row: NamedSize) -> list[Share]:
    """Return the parts of an object that have at least a hundredth of its memory."""
    least_bytes = _LEAST_SHARE * row.size_bytes
    return [part for part in row.parts if part.size_bytes >= least_bytes]


def _number_of_parts(row: NamedSize, kind: str) -> str:
    """Return the number of an object's parts: ``3 columns``, or ``3 str`` for keys of one type."""
    type_names = {part.type_name for part in row.parts}
    if kind == "keys" and len(type_names) == 1:
        return f"{row.part_count} {type_names.pop()}"
    return count(row.part_count, kind[:-1])


def kind_of(row: NamedSize) -> str:
    """Return the type of an object and the names of its largest parts, without figures:
    ``list of str``, ``DataFrame: text``.
    """
    parts = [part for part in _large_parts(row) if part.kind != "index"]
    type_names = _types_of_items(parts)
    has_items = any(part.kind == "items" for part in parts)
    # Items have no names. Keys have, but "dict of Tensor" says more than some of its many keys.
    if has_items or len(type_names) == 1:
        return _with_words(row, " of ", type_names)
    return _with_words(row, ": ", [part.name for part in parts])


def _types_of_items(parts: Sequence[Share]) -> list[str]:
    """Return the names of the types of items, and of the values of keys, each once. The
    part of cached results has no such type.
    """
    types: dict[str, None] = {}
    for part in parts:
        if part.kind in ("items", "keys") and part.name != CACHED:
            types[part.type_name] = None
    return list(types)


def _with_words(row: NamedSize, separator: str, words: Sequence[str]) -> str:
    """Return the type of an object with the first of some words, such as ``DataFrame: text``; the
    type alone if there are no words.
    """
    type_name = clean_name(row.type_name)
    if not words:
        return type_name
    words_shown = ", ".join(map(clean_name, words[:_PARTS_SHOWN]))
    return f"{type_name}{separator}{words_shown}"
