"""Reports inventories: tensors and arrays, the names that hold the most, and what deleting a name
would free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipygpumem.heap.holders.roots import NOTEBOOK
from ipygpumem.heap.parts import CACHED
from ipygpumem.heap.sizes import Share
from ipygpumem.introspect import target_of
from ipygpumem.inventory.ownership import HeldPart, Ownership
from ipygpumem.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.inventory.top import LargestNames, NamedSize
from ipygpumem.records import OUTSIDE, RetainedArray
from ipygpumem.report import layout
from ipygpumem.report.content import leak_lines
from ipygpumem.report.layout import (
    SEPARATOR,
    Report,
    Table,
    clean,
    clean_name,
    count,
    device_label,
    listed,
    number_text,
    sizes,
)
from ipygpumem.report.showing import shows
from ipygpumem.units import format_bytes, format_change

_NOTES_SHOWN = 10
"""Maximum number of the largest tensors whose notes are shown."""
_PARTS_SHOWN, _HOLDERS_SHOWN = 3, 10
_LEAST_SHARE = 0.01
"""Parts and holders with a smaller share of the object are not shown."""

_SHARING_SHOWN = 2
"""Maximum number of holders to name that share parts of an object."""
_NEARLY_ALL = 0.99
"""Minimum share of an object's memory that a holder keeps as a whole."""

# -- tensors and arrays --------------------------------------------------------------------------


@shows(Inventory)
def tensors_report(inventory: Inventory, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors, and the sum of the rest."""
    return _report(inventory, _table("", inventory.tensors, top))


def groups_report(
    inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int
) -> Report:
    """Return the ``top`` largest groups of tensors, and the sum of the rest."""
    rows = [_group_row(group, by) for group in groups[:top]]
    remaining = groups[top:]
    if remaining:
        sum_of_remaining = TensorGroup(
            f"and {len(remaining):,} more",
            sum(group.tensors for group in remaining),
            sum(group.size_bytes for group in remaining),
        )
        rows.append(_group_row(sum_of_remaining, by))
    return _report(inventory, Table.of(rows, {"tensors", "size"}))


def _group_row(group: TensorGroup, by: str) -> dict[str, str]:
    return {
        "size": format_bytes(group.size_bytes),
        "tensors": str(group.tensors),
        by: clean(group.label),
    }


def _report(inventory: Inventory, table: Table) -> Report:
    """Return a report of an inventory, with the notes on its largest tensors."""
    number = count(len(inventory.tensors), "storage")
    head = [f"tensors and arrays: {number}", *sizes(inventory.device_bytes)]
    noted = [row for row in inventory.tensors[:_NOTES_SHOWN] if row.note]
    notes = [f"{row.name or row.type_name}: {row.note}" for row in noted]
    lines = [clean(note) for note in (*inventory.notes, *notes)]
    return Report("tensors", SEPARATOR.join(head), lines, [table], records=[inventory])


@shows(InventoryDiff)
def difference_report(difference: InventoryDiff, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors that were added, as many removed ones, and the sources of
    the inventories.
    """
    places = clean(f"from {difference.before or 'before'} to {difference.after or 'after'}")
    changes = sizes(difference.changed_bytes, format_change) or ["no change"]
    headline = SEPARATOR.join(["tensors and arrays", places, *changes])
    return Report("difference", headline, (), changed_tables(difference, top), records=[difference])


def changed_tables(difference: InventoryDiff, top: int) -> list[Table]:
    """Return a table of the ``top`` largest tensors that were added, and one of the
    removed ones.
    """
    added, removed = difference.added, difference.removed
    return [
        _table(f"added: {len(added):,}", added, top),
        _table(f"removed: {len(removed):,}", removed, top),
    ]


def _table(title: str, tensors: Sequence[TensorRecord], top: int) -> Table:
    rows = [_tensor_row(row) for row in tensors[:top]]
    remaining = tensors[top:]
    if remaining:
        size = format_bytes(sum(row.size_bytes for row in remaining))
        rows.append({"size": size, "name": f"and {len(remaining):,} more"})
    return Table.of(rows, {"cell", "size"}, title)


def _tensor_row(row: TensorRecord) -> dict[str, str]:
    size = format_bytes(row.size_bytes)
    if row.note.startswith("could not"):  # be read
        size = "?"
    shape = "" if row.shape is None else layout.shape_label(row.shape)
    return {
        "size": size,
        "name": _tensor_name(row),
        "type": clean(row.type_name),
        "shape": shape,
        "dtype": clean(row.dtype),
        "device": clean(row.device),
        "kind": row.kind,
        "grad": _gradient_label(row),
        "cell": number_text(row.cell),
    }


def _tensor_name(row: TensorRecord) -> str:
    """Return a tensor's name, the number of its other names, and whether it is shared."""
    name = row.name or "(no name)"
    if row.aliases:
        name += f" +{row.aliases}"
    name = clean(name)
    return f"{name} shared" if row.shared else name


def _gradient_label(row: TensorRecord) -> str:
    if row.in_graph:
        return "graph"
    return "requires" if row.requires_grad else ""


# -- names --------------------------------------------------------------------------------------


@shows(LargestNames)
def top_report(names: LargestNames, *, top: int = 20) -> Report:
    """Return the ``top`` largest names, and the sum of the rest."""
    shares = _shares(names)
    rows = [_name_row(share, names.used_bytes) for share in shares[:top]]
    remaining = shares[top:]
    if remaining:
        size = sum(share.size_bytes for share in remaining)
        rows.append({"size": format_bytes(size), "name": f"and {len(remaining):,} more"})
    rows += _rows_without_name(names)
    notes = [*names.notes]
    for row in names.names[:top]:
        notes += [f"{row.name}: {note}" for note in row.notes]
    numbers = {"cell", "size", "share", "del frees"}
    table = Table.of(rows, numbers, whole={"to free it"})
    return Report("top", _top_head(names), [*map(clean, notes)], [table], records=[names])


def _top_head(names: LargestNames) -> list[str]:
    """Return the number of names, and the memory of each device that they hold."""
    head = [f"memory by name: {count(len(names.names), 'name')}"]
    for device, size in (dict.fromkeys(names.used_bytes, 0) | names.device_bytes).items():
        if size <= 0 and device in OUTSIDE:
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
    """Return the memory of each name on each device, the largest first; small parts of a name are
    left out.
    """
    shares = []
    for row in names.names:
        least = _LEAST_SHARE * row.size_bytes
        for device, size in row.device_bytes.items():
            if size >= least:
                shares.append(_DeviceShare(row, device, size))
    return sorted(shares, key=lambda share: share.size_bytes, reverse=True)


def _name_row(share: _DeviceShare, used_bytes: Mapping[str, int]) -> dict[str, str]:
    """Return the row of a name on one device, on which ``used_bytes`` are in use."""
    row, device = share.row, share.device
    at_least = "at least " if row.is_at_least else ""
    freed = ""
    if row.freed_bytes is not None:
        freed = at_least + format_bytes(row.freed_bytes.get(device, 0))
    share_text = _share_text(share.size_bytes, used_bytes.get(device, 0))
    names = [row.name, *row.same]
    return {
        "size": at_least + format_bytes(share.size_bytes),
        "share": share_text,
        "del frees": freed,
        "name": clean(", ".join(names)),
        "device": _accelerator(device),
        "type": clean(row.type_name),
        "content": content_of(row),
        "cell": number_text(row.cell),
        "to free it": _remedy_text(row),
    }


def _share_text(size: int, used: int) -> str:
    """Return a share of the memory in use; empty if it is unknown or rounds to nothing."""
    if not used:
        return ""
    share = f"{size / used:.0%}"
    return "" if share == "0%" else share


def _remedy_text(row: NamedSize) -> str:
    """Return the line that frees a name's memory, and the other names that refer to it."""
    parts = [row.remedy] if row.remedy else []
    if row.held_by:
        verb = "refers" if len(row.held_by) == 1 else "refer"
        parts.append(f"{listed(row.held_by, 3)} also {verb} to it")
    return clean("; ".join(parts))


def _rows_without_name(names: LargestNames) -> list[dict[str, str]]:
    """Return a row for each device with memory in no name, and the command that shows it."""
    rows = []
    for device, size in names.unnamed_bytes.items():
        used = names.used_bytes.get(device, 0)
        if device in OUTSIDE or not used or size < _LEAST_SHARE * used:
            continue
        row = {"size": format_bytes(size), "share": f"{size / used:.0%}", "name": "(no name)"}
        row["device"] = _accelerator(device)
        row["content"] = "see %gpumem" if device == "cpu" else "see %gpumem leaks"
        rows.append(row)
    return rows


def _accelerator(device: str) -> str:
    """Return a device's name; an empty text for the host, where most names are."""
    return "" if device == "cpu" else device


def content_of(row: NamedSize) -> str:
    """Return the largest parts of an object and their sizes, such as ``3 columns: text 120 MiB,
    number 8 MiB``.
    """
    large = _large_parts(row) or list(row.parts[:1])
    shown = large[:_PARTS_SHOWN]
    if not shown:
        return ""
    kind = next((part.kind for part in shown if part.kind != "index"), "")
    texts = []
    for part in shown:
        text = f"{part.items:,} {part.name}" if kind == "items" else part.name
        if kind != "items" or row.part_count > 1:
            text += _size(part)
        texts.append(clean_name(text))
    content = ", ".join(texts)
    if kind in ("columns", "variables", "keys"):
        content = f"{_number_of_parts(row, kind)}: {content}"
    return f"{content}, …" if len(large) > len(shown) else content


def _large_parts(row: NamedSize) -> list[Share]:
    """Return the parts of an object that have at least a hundredth of its memory."""
    least = _LEAST_SHARE * row.size_bytes
    return [part for part in row.parts if part.size_bytes >= least]


def _number_of_parts(row: NamedSize, kind: str) -> str:
    """Return ``3 columns``, or ``3 str`` for keys of one type."""
    type_names = {part.type_name for part in row.parts}
    if kind == "keys" and len(type_names) == 1:
        return f"{row.part_count} {type_names.pop()}"
    return count(row.part_count, kind[:-1])


def kind_of(row: NamedSize) -> str:
    """Return the type of an object and its largest parts, without figures: ``list of str``,
    ``DataFrame: text``.
    """
    parts = [part for part in _large_parts(row) if part.kind != "index"]
    types: dict[str, None] = {}
    for part in parts:
        if part.kind in ("items", "keys") and part.name != CACHED:
            types[part.type_name] = None
    names, separator = [part.name for part in parts], ": "
    if len(types) == 1 or any(part.kind == "items" for part in parts):
        names, separator = list(types), " of "
    if not names:
        return clean_name(row.type_name)
    shown = ", ".join(map(clean_name, names[:_PARTS_SHOWN]))
    return f"{clean_name(row.type_name)}{separator}{shown}"


def _size(part: Share) -> str:
    return f" {format_bytes(part.size_bytes)}"


# -- holders ------------------------------------------------------------------------------------


@shows(Ownership)
def why_report(ownership: Ownership) -> Report:
    """Return the report on a name or an expression."""
    least = _LEAST_SHARE * ownership.size_bytes
    holders = [
        part for part in ownership.held if part.size_bytes >= least or _holds_all(ownership, part)
    ]
    rows = [_row_of_holder(part, least) for part in holders[:_HOLDERS_SHOWN]]
    table = Table.of(rows, {"still held"}, code={"freed by"})
    lines = _lines_of_why(ownership, holders)
    return Report("why", _head_of_why(ownership), lines, [table], records=[ownership])


def _lines_of_why(ownership: Ownership, holders: Sequence[HeldPart]) -> list[str]:
    """Return lines about holders without a row, the object's parts, and limits of the figures."""
    lines = list[str]()
    if len(holders) > _HOLDERS_SHOWN:
        lines.append(f"and {count(len(holders) - _HOLDERS_SHOWN, 'more holder')}")
    sharing = [part for part in ownership.held if part.is_shared and part not in holders]
    if sharing:
        names = [clean(part.holder.path.removeprefix(NOTEBOOK)) for part in sharing]
        verb = "shares" if len(names) == 1 else "share"
        lines.append(f"{listed(names, _SHARING_SHOWN)} {verb} parts of it")
    if ownership.parts:
        parts = [f"{clean_name(name)} {format_bytes(size)}" for name, size in ownership.parts]
        lines.append(f"consists of {', '.join(parts)}")
    lines += map(clean, ownership.notes)
    if not ownership.followed:
        lines.append("the content of a module, class, frame or part of IPython is not counted")
    if not ownership.complete:
        lines.append(
            "there are too many objects to follow all: figures are lower bounds, and any of it may "
            "have more holders"
        )
    return lines


def _head_of_why(ownership: Ownership) -> list[str]:
    """Return the headline: the object, its size, and the memory that ``del`` frees."""
    on_devices = sizes(ownership.device_bytes)
    if on_devices and (ownership.is_at_least or not ownership.complete):
        on_devices[0] = f"at least {on_devices[0]}"
    head = [clean_name(ownership.name), clean_name(ownership.type_name), *on_devices]
    freed = sum(ownership.freed_bytes.values())
    if ownership.is_name and (freed or ownership.complete):
        head.append(
            f"del {clean_name(target_of(ownership.name))} frees {_freed_text(ownership, freed)}"
        )
    return head


def _holds_all(ownership: Ownership, part: HeldPart) -> bool:
    """Return True if a holder alone would keep nearly all of what is held, as earlier rows do."""
    held_bytes = sum(other.size_bytes for other in ownership.held)
    return part.is_shared and part.shared_bytes >= _NEARLY_ALL * held_bytes


def _row_of_holder(part: HeldPart, least: float) -> dict[str, str]:
    """Return the row of a holder, which says "shared" if it adds less than ``least`` bytes."""
    path = clean(part.holder.path)
    if part.objects > 1:
        path += f", and {count(part.objects - 1, 'more object')}"
    return {
        "still held": format_bytes(part.size_bytes) if part.size_bytes >= least else "shared",
        "by": path,
        "freed by": clean(part.holder.advice),
    }


def _freed_text(ownership: Ownership, freed: int) -> str:
    """Return the bytes that ``del`` frees; all of them only if each byte is known."""
    if ownership.is_at_least:
        return f"at least {format_bytes(freed)}"
    return format_bytes(freed) if ownership.held else "all of it"


def left_report(name: str, cell: int | None, left: Sequence[RetainedArray]) -> Report:
    """Return the report on a deleted name: its object or arrays that are still alive."""
    bound = "" if cell is None else f"; cell {cell} bound it"
    if left:
        return Report(
            "why",
            f"{clean_name(name)} is not defined{bound}, but part of it is alive",
            leak_lines(left),
        )
    hint = "%gpumem leaks lists memory that no name leads to"
    return Report(
        "why",
        f"{clean_name(name)} is not defined{bound}; it is not known to have left anything",
        [hint],
    )
