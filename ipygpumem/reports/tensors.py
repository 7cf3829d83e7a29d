"""Reports inventories of tensors and arrays, and the calls of a tracker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ipygpumem.model import Usage
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord, TrackerRecord
from ipygpumem.reports import layout
from ipygpumem.reports.layout import Report, Table, clean, count, device_label, sizes
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
    """Return the ``top`` largest tensors that came, as many that went, and the sources of the inventories."""
    places = clean(f"from {difference.before or 'before'} to {difference.after or 'after'}")
    changes = sizes(difference.changed_bytes, format_change) or ["no change"]
    headline = layout.SEPARATOR.join(["tensors and arrays", places, *changes])
    return Report("difference", headline, (), _changed(difference, top))


def _changed(difference: InventoryDiff, top: int) -> list[Table]:
    came, went = difference.came, difference.went
    return _tables(_table(f"came: {len(came):,}", came, top), _table(f"went: {len(went):,}", went, top))


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


# -- trackers -------------------------------------------------------------------------------------------------


def tracker_report(record: TrackerRecord, *, top: int) -> Report:
    """Return the ``top`` largest tensors that came, as many that went, and each device's totals."""
    changes = sizes(record.changed_bytes, format_change) or ["nothing came or went"]
    headline = layout.SEPARATOR.join(filter(None, [f"tracker {record.number}", record.after, *changes]))
    return Report(
        "tracker", clean(headline), list(map(clean, (*_totals(record), *record.notes))), _changed(record, top)
    )


def _totals(record: TrackerRecord) -> Iterator[str]:
    since = "since the tracker was made" if record.number == 1 else "since the last call"
    left = dict(record.tensor_bytes)
    for usage in record.usages:
        own = left.pop(usage.device, None)
        own = left.pop(f"{usage.device}:0", 0) if own is None else own  # a single device: mps
        if layout.in_use(usage) or own:
            peak = f"peak {format_bytes(usage.peak_bytes)}{layout.sampled_mark(usage)} {since}"
            yield f"{device_label(usage.device)}: {format_bytes(own)} in tensors{_beside(usage, own)}, {peak}"
    yield from (f"{device_label(device)}: {format_bytes(size)} in tensors" for device, size in left.items() if size)


def _beside(usage: Usage, own: int) -> str:
    if usage.device == "cpu":
        return f" and arrays; RSS {format_bytes(usage.after_bytes)}"
    rest = usage.after_bytes - own
    reserved = "" if usage.reserved_bytes is None else f", reserved {format_bytes(usage.reserved_bytes)}"
    more = f"{format_bytes(rest)} of it in no Python tensor, or rounding"
    if rest < 0:
        more = f"{format_bytes(-rest)} less: some are memory that torch does not count here"
    return f"; torch has allocated {format_bytes(usage.after_bytes)}{f' ({more})' if rest else ''}{reserved}"
