"""Reports inventories of tensors and arrays."""

from __future__ import annotations

from collections.abc import Sequence

from ipygpumem.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.report import layout
from ipygpumem.report.layout import Report, Table, clean, count, sizes
from ipygpumem.units import format_bytes, format_change


def tensors_report(inventory: Inventory, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors, and the sum of the rest."""
    return _report(inventory, _table("", inventory.tensors, top))


def groups_report(inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int) -> Report:
    """Return the ``top`` largest groups of tensors, and the sum of the rest."""
    rows = [(format_bytes(item.size_bytes), str(item.tensors), clean(item.label)) for item in groups[:top]]
    rest = groups[top:]
    if rest:
        tensors, size = sum(item.tensors for item in rest), sum(item.size_bytes for item in rest)
        rows.append((format_bytes(size), str(tensors), f"and {len(rest):,} more"))
    return _report(inventory, Table("", ("size", "tensors", by), rows, {"tensors", "size"}))


def _report(inventory: Inventory, table: Table) -> Report:
    head = [f"tensors and arrays: {count(len(inventory.tensors), 'storage')}", *sizes(inventory.device_bytes)]
    notes = [f"{row.name or row.type_name}: {row.note}" for row in inventory.tensors[:10] if row.note]
    return Report("tensors", layout.SEPARATOR.join(head), list(map(clean, [*inventory.notes, *notes])), _tables(table))


def _tables(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]


def difference_report(difference: InventoryDiff, *, top: int = 20) -> Report:
    """Return the ``top`` largest tensors that were added, as many removed ones, and the sources of the inventories."""
    places = clean(f"from {difference.before or 'before'} to {difference.after or 'after'}")
    changes = sizes(difference.changed_bytes, format_change) or ["no change"]
    headline = layout.SEPARATOR.join(["tensors and arrays", places, *changes])
    return Report("difference", headline, (), changed_tables(difference, top))


def changed_tables(difference: InventoryDiff, top: int) -> list[Table]:
    """Return a table of the ``top`` largest tensors that were added, and one of the removed ones."""
    added, removed = difference.added, difference.removed
    return _tables(_table(f"added: {len(added):,}", added, top), _table(f"removed: {len(removed):,}", removed, top))


def _table(title: str, tensors: Sequence[TensorRecord], top: int) -> Table:
    rows = [
        {
            "size": "?" if row.note.startswith("could not") else format_bytes(row.size_bytes),
            "name": clean((row.name or "(no name)") + f" +{row.aliases}" * bool(row.aliases)) + " shared" * row.shared,
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
    rest = tensors[top:]
    if rest:
        size = format_bytes(sum(row.size_bytes for row in rest))
        rows.append(dict.fromkeys(rows[0], "") | {"size": size, "name": f"and {len(rest):,} more"})
    return Table.of(rows, {"cell", "size"}, title)
