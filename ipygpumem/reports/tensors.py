"""Reports inventories of tensors and arrays, and the calls of a tracker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ipygpumem.model import Usage
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff, TensorGroup, TensorRecord, TrackerRecord
from ipygpumem.reports.layout import (
    SEPARATOR,
    Report,
    Table,
    clean,
    count,
    device_label,
    in_use,
    sampled_mark,
    shape_label,
)
from ipygpumem.units import format_bytes, format_change

_COLUMNS = ("size", "name", "type", "shape", "dtype", "device", "kind", "grad", "cell")


def tensors_report(inventory: Inventory, *, top: int) -> Report:
    """Return the ``top`` largest tensors, and what the others come to."""
    return _report(inventory, _table("", inventory.tensors, top))


def groups_report(inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int) -> Report:
    """Return the ``top`` largest groups of tensors, and what the others come to."""
    rows = [(format_bytes(item.size_bytes), str(item.tensors), clean(item.label)) for item in groups[:top]]
    rest = groups[top:]
    if rest:
        tensors, size = sum(item.tensors for item in rest), sum(item.size_bytes for item in rest)
        rows.append((format_bytes(size), str(tensors), f"and {len(rest):,} smaller"))
    return _report(inventory, Table("", ("size", "tensors", by), tuple(rows), frozenset({"tensors", "size"})))


def difference_report(difference: InventoryDiff, *, top: int) -> Report:
    """Return the ``top`` largest tensors that came, as many that went, and where the inventories were taken."""
    places = clean(f"from {difference.before or 'before'} to {difference.after or 'after'}")
    changes = [f"{device_label(device)} {format_change(size)}" for device, size in difference.changed_bytes.items()]
    tables = _changed_tables(difference, top=top)
    headline = SEPARATOR.join(["tensors and arrays", places, *(changes or ["no change"])])
    return Report("difference", headline, (), tables)


def _changed_tables(difference: InventoryDiff, *, top: int) -> tuple[Table, ...]:
    """Return a table of the ``top`` largest tensors that came, and one of as many that went."""
    parts = ((f"came: {len(difference.came):,}", difference.came), (f"went: {len(difference.went):,}", difference.went))
    return tuple(_table(title, tensors, top) for title, tensors in parts if tensors)


def _report(inventory: Inventory, table: Table) -> Report:
    sizes = [f"{device_label(device)} {format_bytes(size)}" for device, size in inventory.device_bytes.items()]
    headline = SEPARATOR.join([f"tensors and arrays: {count(len(inventory.tensors), 'storage')}", *sizes])
    notes = [f"{row.name or row.type_name}: {row.note}" for row in inventory.tensors[:10] if row.note]
    return Report("tensors", headline, tuple(map(clean, [*inventory.notes, *notes])), (table,) * bool(table.rows))


def _table(title: str, tensors: Sequence[TensorRecord], top: int) -> Table:
    rows = [
        {
            "size": "?" if row.note.startswith("could not") else format_bytes(row.size_bytes),
            "name": clean(" ".join([row.name or "(no name)", *[f"+{row.aliases}"] * bool(row.aliases)]))
            + " shared" * row.shared,
            "type": clean(row.type_name),
            "shape": "" if row.shape is None else shape_label(row.shape),
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
        rows.append({**dict.fromkeys(_COLUMNS, ""), "size": size, "name": f"and {len(rest):,} smaller"})
    return Table(title, _COLUMNS, [tuple(row.values()) for row in rows], {"cell", "size"}).without_empty()


# -- trackers -------------------------------------------------------------------------------------------------


def tracker_report(record: TrackerRecord, *, top: int) -> Report:
    """Return the ``top`` largest tensors that came, as many that went, and each device's totals."""
    by = [f"{device_label(device)} {format_change(size)}" for device, size in record.changed_bytes.items()]
    headline = SEPARATOR.join(
        filter(None, [f"tracker {record.number}", record.after, *(by or ["nothing came or went"])])
    )
    lines = [clean(line) for line in (*_totals(record), *record.notes)]
    return Report("tracker", clean(headline), tuple(lines), _changed_tables(record, top=top))


def _totals(record: TrackerRecord) -> Iterator[str]:
    since = "since the tracker was made" if record.number == 1 else "since the last call"
    left = dict(record.tensor_bytes)
    for usage in record.usages:
        own = left.pop(usage.device, None)
        own = left.pop(f"{usage.device}:0", 0) if own is None else own  # where there is only one: mps
        if in_use(usage) or own:
            tensors = f"{device_label(usage.device)}: {format_bytes(own)} in tensors"
            yield f"{tensors}{_beside(usage, own)}, peak {format_bytes(usage.peak_bytes)}{sampled_mark(usage)} {since}"
    for device, size in left.items():
        if size:
            yield f"{device_label(device)}: {format_bytes(size)} in tensors"


def _beside(usage: Usage, own: int) -> str:
    if usage.device == "cpu":
        return f" and arrays; RSS {format_bytes(usage.after_bytes)}"
    rest = usage.after_bytes - own
    reserved = "" if usage.reserved_bytes is None else f", reserved {format_bytes(usage.reserved_bytes)}"
    more = f"{format_bytes(rest)} of it in no Python tensor, or rounding"
    if rest < 0:
        more = f"{format_bytes(-rest)} less: some are memory that torch does not count here"
    return f"; torch has allocated {format_bytes(usage.after_bytes)}{f' ({more})' if rest else ''}{reserved}"
