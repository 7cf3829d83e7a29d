"""Reports the names that hold the most memory."""

from __future__ import annotations

from ipygpumem.heap.sizes import Share
from ipygpumem.inventory.top import LargestNames, NamedSize
from ipygpumem.report.layout import SEPARATOR, Report, Table, clean, clean_name, count, device_label, listed
from ipygpumem.units import format_bytes

_PARTS_SHOWN = 3
_LEAST_SHARE = 0.01
"""Parts with a smaller share of the object are not shown."""


def top_report(found: LargestNames, *, top: int = 20) -> Report:
    """Return the ``top`` largest names, and the sum of the rest."""
    named = found.device_bytes
    parts = [_of_total(device, named.get(device, 0), used) for device, used in found.used_bytes.items()]
    parts += [
        f"{device_label(device)} {format_bytes(size)}"
        for device, size in named.items()
        if device not in found.used_bytes
    ]
    head = [f"memory by name: {count(len(found.names), 'name')}", *parts]
    rows = [(row, device, size) for row in found.names for device, size in row.device_bytes.items()]
    rows = [item for item in rows if item[2] >= _LEAST_SHARE * item[0].size_bytes]
    rows.sort(key=lambda item: -item[2])
    lines = [f"{row.name}: {row_note}" for row in found.names[:top] for row_note in row.notes]
    table = [_row(row, device, size, found.used_bytes.get(device, 0)) for row, device, size in rows[:top]]
    rest = rows[top:]
    if table and rest:
        sizes = format_bytes(sum(size for _, _, size in rest))
        table.append(dict.fromkeys(table[0], "") | {"size": sizes, "name": f"and {len(rest):,} more"})
    return Report(
        "top",
        SEPARATOR.join(head),
        list(map(clean, [*found.notes, *lines])),
        [Table.of(table, {"cell", "size", "share"})] if table else [],
    )


def _of_total(device: str, named: int, used: int) -> str:
    return f"{device_label(device)} {format_bytes(named)} of {format_bytes(used)}"


def _row(row: NamedSize, device: str, size: int, used: int) -> dict[str, str]:
    share = f"{size / used:.0%}" if used else ""
    return {
        "size": format_bytes(size),
        "share": "" if share in ("0%", "") else share,
        "name": clean(", ".join([row.name, *row.same])),
        "device": "" if device == "cpu" else device,
        "type": clean(row.type_name),
        "content": content_of(row),
        "cell": "" if row.cell is None else str(row.cell),
        "to free it": clean(_remedy(row)),
    }


def content_of(row: NamedSize) -> str:
    """Return the largest parts of an object and their sizes, such as ``3 columns: text 120 MiB, number 8 MiB``."""
    shown = [part for part in row.parts[:_PARTS_SHOWN] if part.size_bytes >= _LEAST_SHARE * row.size_bytes]
    if not shown:
        return ""
    kind = next((part.kind for part in shown if part.kind != "index"), "")
    kinds = {part.type_name for part in row.parts}
    if kind == "items":
        texts = [f"{part.items:,} {part.name}" + _size(part) * (row.part_count > 1) for part in shown]
    else:
        texts = [part.name + _size(part) for part in shown]
    head = f"{row.part_count} {kind if kind != 'keys' or len(kinds) > 1 else kinds.pop()}: "
    more = ", …" if row.part_count > len(shown) else ""
    return (head if kind in ("columns", "variables", "keys") else "") + ", ".join(map(clean_name, texts)) + more


def _size(part: Share) -> str:
    return f" {format_bytes(part.size_bytes)}"


def _remedy(row: NamedSize) -> str:
    """Return the line that deletes the object, and the names that keep some of it alive."""
    return (
        f"{row.remedy}; {listed(row.held_by, 3)} also refer{'s' * (len(row.held_by) == 1)} to it"
        if row.held_by
        else row.remedy
    )
