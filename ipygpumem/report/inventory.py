"""Reports inventories: tensors and arrays, the names that hold the most, and what deleting a name
would free.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.heap.parts import CACHED
from ipygpumem.heap.sizes import Share
from ipygpumem.introspect import target_of
from ipygpumem.inventory.ownership import Ownership
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
    sizes,
)
from ipygpumem.report.showing import shows
from ipygpumem.units import format_bytes, format_change

_PARTS_SHOWN, _HOLDERS_SHOWN = 3, 10
_LEAST_SHARE = 0.01
"""Parts and holders with a smaller share of the object are not shown."""

# -- tensors and arrays --------------------------------------------------------------------------


@shows(Inventory)
def tensors_report(inventory: Inventory, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors, and the sum of the rest."""
    return _report(inventory, _table("", inventory.tensors, top))


def groups_report(
    inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int
) -> Report:
    """Return the ``top`` largest groups of tensors, and the sum of the rest."""
    shown = [(item.size_bytes, item.tensors, clean(item.label)) for item in groups[:top]]
    if rest := groups[top:]:
        size, tensors = sum(item.size_bytes for item in rest), sum(item.tensors for item in rest)
        shown.append((size, tensors, f"and {len(rest):,} more"))
    rows = [
        {"size": format_bytes(size), "tensors": str(number), by: label}
        for size, number, label in shown
    ]
    return _report(inventory, Table.of(rows, {"tensors", "size"}))


def _report(inventory: Inventory, table: Table) -> Report:
    head = [
        f"tensors and arrays: {count(len(inventory.tensors), 'storage')}",
        *sizes(inventory.device_bytes),
    ]
    notes = [
        f"{row.name or row.type_name}: {row.note}" for row in inventory.tensors[:10] if row.note
    ]
    notes = list(map(clean, [*inventory.notes, *notes]))
    return Report("tensors", SEPARATOR.join(head), notes, [table], records=[inventory])


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
    rows = [
        {
            "size": "?" if row.note.startswith("could not") else format_bytes(row.size_bytes),
            "name": clean((row.name or "(no name)") + f" +{row.aliases}" * bool(row.aliases))
            + " shared" * row.shared,
            "type": clean(row.type_name),
            "shape": "" if row.shape is None else layout.shape_label(row.shape),
            "dtype": clean(row.dtype),
            "device": clean(row.device),
            "kind": row.kind,
            "grad": "graph" if row.in_graph else "requires" if row.requires_grad else "",
            "cell": "" if row.cell is None else str(row.cell),
        }
        for row in tensors[:top]
    ]
    if rest := tensors[top:]:
        size = format_bytes(sum(row.size_bytes for row in rest))
        rows.append({"size": size, "name": f"and {len(rest):,} more"})
    return Table.of(rows, {"cell", "size"}, title)


# -- names --------------------------------------------------------------------------------------


@shows(LargestNames)
def top_report(found: LargestNames, *, top: int = 20) -> Report:
    """Return the ``top`` largest names, and the sum of the rest."""
    head = [f"memory by name: {count(len(found.names), 'name')}"]
    for device, size in (dict.fromkeys(found.used_bytes, 0) | found.device_bytes).items():
        used = f" of {format_bytes(found.used_bytes[device])}" if device in found.used_bytes else ""
        head += [f"{device_label(device)} {format_bytes(size)}{used}"] * (
            size > 0 or device not in OUTSIDE
        )
    rows = [(row, device, size) for row in found.names for device, size in row.device_bytes.items()]
    rows = [item for item in rows if item[2] >= _LEAST_SHARE * item[0].size_bytes]
    rows.sort(key=lambda item: -item[2])
    lines = [f"{row.name}: {row_note}" for row in found.names[:top] for row_note in row.notes]
    table = [
        _row(row, device, size, found.used_bytes.get(device, 0)) for row, device, size in rows[:top]
    ]
    if rest := rows[top:]:
        sizes = format_bytes(sum(size for _, _, size in rest))
        table.append({"size": sizes, "name": f"and {len(rest):,} more"})
    table += _without_name(found)
    notes = list(map(clean, [*found.notes, *lines]))
    return Report(
        "top",
        head,
        notes,
        [Table.of(table, {"cell", "size", "share", "del frees"}, whole={"to free it"})],
        records=[found],
    )


def _row(row: NamedSize, device: str, size: int, used: int) -> dict[str, str]:
    share = f"{size / used:.0%}" if used else ""
    holders = f"; {listed(row.held_by, 3)} also refer{'s' * (len(row.held_by) == 1)} to it"
    least = "at least " if row.is_at_least else ""
    return {
        "size": least + format_bytes(size),
        "share": "" if share in ("0%", "") else share,
        "del frees": ""
        if row.freed_bytes is None
        else least + format_bytes(row.freed_bytes.get(device, 0)),
        "name": clean(", ".join([row.name, *row.same])),
        "device": "" if device == "cpu" else device,
        "type": clean(row.type_name),
        "content": content_of(row),
        "cell": "" if row.cell is None else str(row.cell),
        "to free it": clean((row.remedy + holders * bool(row.held_by)).removeprefix("; ")),
    }


def _without_name(found: LargestNames) -> list[dict[str, str]]:
    """Return a row for each device with memory in no name, and the command that shows it."""
    rows = []
    for device, size in found.unnamed_bytes.items():
        used = found.used_bytes.get(device, 0)
        if device in OUTSIDE or not used or size < _LEAST_SHARE * used:
            continue
        row = {"size": format_bytes(size), "share": f"{size / used:.0%}", "name": "(no name)"}
        command = "%gpumem" if device == "cpu" else "%gpumem leaks"
        rows.append(
            {**row, "device": "" if device == "cpu" else device, "content": f"see {command}"}
        )
    return rows


def content_of(row: NamedSize) -> str:
    """Return the largest parts of an object and their sizes, such as ``3 columns: text 120 MiB,
    number 8 MiB``.
    """
    large = [
        part for part in row.parts if part.size_bytes >= _LEAST_SHARE * row.size_bytes
    ] or row.parts[:1]
    shown = large[:_PARTS_SHOWN]
    if not shown:
        return ""
    kind = next((part.kind for part in shown if part.kind != "index"), "")
    kinds = {part.type_name for part in row.parts}
    if kind == "items":
        texts = [
            f"{part.items:,} {part.name}" + _size(part) * (row.part_count > 1) for part in shown
        ]
    else:
        texts = [part.name + _size(part) for part in shown]
    head = (
        count(row.part_count, kind[:-1])
        if kind != "keys" or len(kinds) > 1
        else f"{row.part_count} {kinds.pop()}"
    )
    more = ", …" if len(large) > len(shown) else ""
    return (
        (f"{head}: " if kind in ("columns", "variables", "keys") else "")
        + ", ".join(map(clean_name, texts))
        + more
    )


def kind_of(row: NamedSize) -> str:
    """Return the type of an object and its largest parts, without figures: ``list of str``,
    ``DataFrame: text``.
    """
    parts = [
        part
        for part in row.parts
        if part.kind != "index" and part.size_bytes >= _LEAST_SHARE * row.size_bytes
    ]
    typed = (part for part in parts if part.kind in ("items", "keys") and part.name != CACHED)
    kinds = dict.fromkeys(part.type_name for part in typed)
    is_of = len(kinds) == 1 or any(part.kind == "items" for part in parts)
    names = list(kinds) if is_of else [part.name for part in parts]
    of = (" of " if is_of else ": ") * bool(names)
    return clean_name(row.type_name) + of + ", ".join(map(clean_name, names[:_PARTS_SHOWN]))


def _size(part: Share) -> str:
    return f" {format_bytes(part.size_bytes)}"


# -- holders ------------------------------------------------------------------------------------


@shows(Ownership)
def why_report(found: Ownership) -> Report:
    """Return the report on a name or an expression."""
    total, freed = found.size_bytes, sum(found.freed_bytes.values())
    head = [clean_name(found.name), clean_name(found.type_name), *sizes(found.device_bytes)]
    if found.is_at_least or not found.complete:
        head[2:3] = [f"at least {part}" for part in head[2:3]]
    if found.is_name and (freed or found.complete):
        head.append(f"del {clean_name(target_of(found.name))} frees {_freed_text(found, freed)}")
    large = [
        part for part in found.held if part.size_bytes >= _LEAST_SHARE * total or part.is_shared
    ]
    rows = [
        {
            "still held": format_bytes(part.size_bytes)
            if part.size_bytes >= _LEAST_SHARE * total
            else "shared",
            "by": clean(part.holder.path)
            + f", and {count(part.objects - 1, 'more object')}" * (part.objects > 1),
            "freed by": clean(part.holder.advice),
        }
        for part in large[:_HOLDERS_SHOWN]
    ]
    parts = ", ".join(f"{clean_name(name)} {format_bytes(size)}" for name, size in found.parts)
    lines = [f"and {count(len(large) - len(rows), 'more holder')}"] * (len(large) > len(rows))
    lines += [f"consists of {parts}"] * bool(parts)
    lines += map(clean, found.notes)
    if not found.followed:
        lines.append("the content of a module, class, frame or part of IPython is not counted")
    if not found.complete:
        lines.append(
            "there are too many objects to follow all: figures are lower bounds, and any of it may "
            "have more holders"
        )
    return Report(
        "why", head, lines, [Table.of(rows, {"still held"}, code={"freed by"})], records=[found]
    )


def _freed_text(found: Ownership, freed: int) -> str:
    """Return the bytes that ``del`` frees; all of them only if each byte is known."""
    if found.is_at_least:
        return f"at least {format_bytes(freed)}"
    return format_bytes(freed) if found.held else "all of it"


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
