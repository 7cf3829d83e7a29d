"""The reports of ``%gpumem tensors``: of an inventory of tensors and arrays, of groups of them, and
of the difference of two inventories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, islice, repeat
from operator import attrgetter, is_
from typing import NamedTuple

from ipygpumem.inventory.arrays.records import Inventory, InventoryDiff, TensorGroup, TensorRecord
from ipygpumem.report.devices import sizes
from ipygpumem.report.layout import SEPARATOR, Report, Table, and_more, row_of_more
from ipygpumem.report.leaks import LAST_INDEX
from ipygpumem.report.registration import shows
from ipygpumem.report.words import clean, count, number_text, shape_label
from ipygpumem.units import format_bytes, format_change

_NOTES_SHOWN = 10
"""Maximum number of the largest tensors whose notes are shown."""
_MOST_GROUPED = 10_000
"""Maximum number of the largest tensors that are compared with each other."""


@shows(Inventory)
def tensors_report(
    inventory: Inventory, *, top: int = 20, holders: Mapping[tuple[str, int], str] | None = None
) -> Report:
    """Return the report of ``%gpumem tensors``.

    Args:
        inventory: the tensors and arrays.
        top: maximum number of rows; a last one sums up the smaller tensors.
        holders: the holders of tensors without a name, by library and storage.
    """
    return _inventory_report(inventory, _table_of_tensors(inventory.tensors, top, holders=holders))


def groups_report(
    inventory: Inventory, by: str, groups: Sequence[TensorGroup], *, top: int
) -> Report:
    """Return the report of ``%gpumem tensors --by``.

    Args:
        inventory: the tensors and arrays.
        by: the property by which they are grouped, such as ``dtype``: the heading of its column.
        groups: the groups, the largest first.
        top: maximum number of rows; a last one sums up the smaller groups.
    """
    rows = [_group_row(group, by) for group in groups[:top]]
    not_shown = groups[top:]
    if not_shown:
        number = sum(group.tensors for group in not_shown)
        size = sum(group.size_bytes for group in not_shown)
        sums = TensorGroup(and_more(len(not_shown)), number, size)
        rows.append(_group_row(sums, by))
    return _inventory_report(inventory, Table.of(rows, {"tensors", "size"}))


def _group_row(group: TensorGroup, by: str) -> dict[str, str]:
    """Return the row of a group of tensors.

    Args:
        group: the group.
        by: the heading of the column with the group's label.
    """
    return {
        "size": format_bytes(group.size_bytes),
        "tensors": str(group.tensors),
        by: clean(group.label),
    }


def _inventory_report(inventory: Inventory, table: Table) -> Report:
    """Return a report of an inventory, with the notes on its largest tensors."""
    number = count(len(inventory.tensors), "storage")
    head = [f"tensors and arrays: {number}", *sizes(inventory.device_bytes)]
    lines = list(map(clean, inventory.notes))
    for row in inventory.tensors[:_NOTES_SHOWN]:
        if row.note:
            name = row.name or row.type_name
            lines.append(clean(f"{name}: {row.note}"))
    return Report("tensors", SEPARATOR.join(head), lines, [table], records=[inventory])


@shows(InventoryDiff)
def difference_report(difference: InventoryDiff, *, top: int = 20) -> Report:
    """Return the report of the difference of two inventories.

    Args:
        difference: the difference.
        top: maximum number of added tensors, and of removed ones.
    """
    before = difference.before or "before"
    after = difference.after or "after"
    changes = sizes(difference.changed_bytes, format_change) or ["no change"]
    places = clean(f"from {before} to {after}")
    headline = SEPARATOR.join(["tensors and arrays", places, *changes])
    tables = changed_tables(difference, top)
    return Report("difference", headline, (), tables, records=[difference])


def changed_tables(difference: InventoryDiff, top: int) -> list[Table]:
    """Return a table of the ``top`` largest tensors that were added, and one of those that were
    removed.
    """
    tables = []
    for change, tensors in (("added", difference.added), ("removed", difference.removed)):
        title = f"{change}: {len(tensors):,}"
        tables.append(_table_of_tensors(tensors, top, title))
    return tables


def _table_of_tensors(
    tensors: Sequence[TensorRecord],
    top: int,
    title: str = "",
    *,
    holders: Mapping[tuple[str, int], str] | None = None,
) -> Table:
    """Return a table of tensors. Equal ones without a name in one container have one row.

    Args:
        tensors: the tensors, the largest first.
        top: maximum number of rows; a last one sums up the smaller tensors.
        title: its title.
        holders: the holders of tensors without a name, by library and storage.
    """
    # These loops run in C, because there may be a million tensors, the largest first.
    names = list(map(attrgetter("name"), tensors))
    are_nameless = list(map(is_, names, repeat(None)))
    largest_nameless = list(islice(compress(tensors, are_nameless), _MOST_GROUPED))
    largest_named = islice(compress(tensors, names), top)
    all_bytes = sum(map(attrgetter("size_bytes"), tensors))
    groups = [_EqualTensors([tensor], holder="") for tensor in largest_named]
    groups += _groups_of_equal(largest_nameless, holders or {})
    groups.sort(key=attrgetter("size_bytes"), reverse=True)
    groups_shown = groups[:top]
    rows = list(map(_tensor_row, groups_shown))
    tensors_left = len(tensors) - sum(len(group.tensors) for group in groups_shown)
    if tensors_left:
        bytes_left = all_bytes - sum(group.size_bytes for group in groups_shown)
        rows.append(row_of_more(tensors_left, bytes_left, "name"))
    expendable = ("cell", "grad", "kind", "dtype", "type", "device")
    return Table.of(rows, {"cell", "size"}, title, expendable=expendable)


class _EqualTensors(NamedTuple):
    """The tensors in one row of a table: one with a name, or all equal ones without a name in one
    container.
    """

    tensors: list[TensorRecord]
    holder: str
    """The path of their holder, or their container; empty for a tensor with a name."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def _groups_of_equal(
    nameless: Sequence[TensorRecord], holders: Mapping[tuple[str, int], str]
) -> list[_EqualTensors]:
    """Return groups of tensors without a name: those that look alike and are in one container are a
    group.
    """
    groups: dict[object, _EqualTensors] = {}
    for tensor in nameless:
        holder = holders.get((tensor.library, tensor.storage), "")
        container = LAST_INDEX.sub("[…]", holder) if holder else ""
        shown_fields = (container, *tuple(tensor)[_FIELDS_OF_EQUAL], tensor.note)
        group = groups.get(shown_fields)
        if group is None:
            groups[shown_fields] = _EqualTensors([tensor], holder)
            continue
        if len(group.tensors) == 1:
            # The group gets its second tensor: from now on it shows ``runs[…]``, not ``runs[3]``.
            group = groups[shown_fields] = _EqualTensors(group.tensors, container)
        group.tensors.append(tensor)
    return list(groups.values())


_FIELDS_OF_EQUAL = slice(
    TensorRecord._fields.index("type_name"), TensorRecord._fields.index("storage")
)
"""Fields of a tensor that are the same in equal ones."""


def _tensor_row(group: _EqualTensors) -> dict[str, str]:
    """Return the row of a tensor, or of equal tensors without a name."""
    row = group.tensors[0]
    size = format_bytes(group.size_bytes)
    if row.note.startswith("could not"):  # be read
        size = "?"
    shape = ""
    if row.shape is not None:
        shape = shape_label(row.shape)
    name = _tensor_name(row)
    if len(group.tensors) > 1:
        name = f"{len(group.tensors):,} × {name}"
    return {
        "size": size,
        "name": name,
        "type": clean(row.type_name),
        "shape": shape,
        "dtype": clean(row.dtype),
        "device": clean(row.device),
        "kind": row.kind,
        "grad": _gradient_label(row),
        "cell": number_text(row.cell),
        "held by": clean(group.holder),
    }


def _tensor_name(row: TensorRecord) -> str:
    """Return a tensor's name; with ``+2`` if two further tensors are on its storage, and with
    ``shared`` if other processes may share the memory.
    """
    name = row.name or "(no name)"
    if row.aliases:
        name += f" +{row.aliases}"
    if row.shared:
        return f"{clean(name)} shared"
    return clean(name)


def _gradient_label(row: TensorRecord) -> str:
    """Return ``graph`` for a result of autograd, ``requires`` for a leaf that requires a gradient,
    and an empty text for any other tensor.
    """
    if row.in_graph:
        return "graph"
    if row.requires_grad:
        return "requires"
    return ""
