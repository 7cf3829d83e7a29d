"""The report of ``%%peak``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow, draw
from ipygpumem.extras.peak.words import LEAST_MISSED_BYTES, headline, title
from ipygpumem.records import Usage
from ipygpumem.report.devices import peak_label
from ipygpumem.report.estimate import share_rows
from ipygpumem.report.layout import Fact, Report, Table
from ipygpumem.report.registration import shows
from ipygpumem.report.words import clean, clean_name, count
from ipygpumem.units import KIB, MIB, format_bytes, format_seconds

_ROWS_SHOWN = 20
_COLUMNS = ("parameters", "gradients", "optimizer state", "activations")
"""Roles of memory that modules have."""
_LONGEST_LABEL = 80
_LEAST_SHARE = 0.001
"""Memory with a smaller share of the largest one is in the headline, and has no table."""
_LEAST_RESERVED_BYTES = MIB
"""Less is not shown: parts of pages, memory that is just about to be used."""
_RESERVED_SHOWN = 3
_AT_MOST = (
    "at most: the memory in use that the kernel counted. It counts pages, not lines, so it is "
    "assumed which rows are not used: mapped memory first, then zeroed memory, then torch's, then "
    "the largest rows"
)
_WHAT = "name, layer or operation"
"""Heading of the column with a layer's label."""
LayerKey = tuple[Any, ...]
"""The key of a layer or of a part of it: the parts of a module's path, and below them, for memory
that is not the module's own, the row's name, operation and line: ``("net", "blocks", "3")``,
``("net", ("loss", "mse_loss", "line 7: ..."))``.
"""
RowsByLayer = Mapping[LayerKey, Sequence[PeakRow]]


@shows(PeakRecord)
def peak_report(record: PeakRecord, *, top: int = _ROWS_SHOWN) -> Report:
    """Return the report: for each device the memory at the moment, by role, and by layer, name or
    origin.
    """
    devices = sorted(record.devices, key=lambda device: (not device.ran_out, -device.size_bytes))
    segments = ["peak", *map(headline, devices)]
    if record.ram is not None and not devices:
        segments.append(_ram_text(record.ram))
    duration = f"in {format_seconds(record.duration_seconds)}"
    if devices:  # each allocation was followed
        duration += ", faster without %%peak"
    segments.append(duration)
    tables = list[Table]()
    for device in devices:
        if device.ran_out or device.size_bytes >= _LEAST_SHARE * devices[0].size_bytes:
            tables += _tables_of_device(device, top)
    notes = list(map(clean, record.notes))
    if any(device.is_bound for device in record.devices):
        notes.append(_AT_MOST)
    facts = list[Fact]()
    for device in record.devices:
        facts += [*_reserved_facts(device), *_missed_facts(device)]
    return Report("peak", segments, notes, tables, facts, records=[record])


def _ram_text(ram: Usage) -> str:
    """Return the peak of the whole process, which is known without memray and torch."""
    most = f"RAM of the process {peak_label(ram)} at its peak"
    return f"{most}, {format_bytes(ram.peak_bytes)} in use"


@draw.register
def _(record: PeakRecord) -> Any:
    """Return a record's picture; other records of ``draw`` do not exist."""
    from ipygpumem.extras.peak import picture  # needs matplotlib

    return picture.draw(record)


def _missed_facts(device: DevicePeak) -> list[Fact]:
    """Return one fact: the RAM that the process used at another moment, which memray has not
    recorded; nothing if that is not more.
    """
    if device.missed_bytes < LEAST_MISSED_BYTES:
        return []
    size = format_bytes(device.missed_bytes)
    why = "memray keeps only the moment at which most memory was in use or reserved"
    return [Fact("RAM at another moment", [f"{size} more, which no row lists: {why}"])]


def _reserved_facts(device: DevicePeak) -> list[Fact]:
    """Return one fact: the bytes that are reserved and not used, with the names or lines that have
    most of them; nothing if they are few.
    """
    reserved_bytes = device.reserved_bytes
    if reserved_bytes < _LEAST_RESERVED_BYTES:
        return []
    rows = sorted(device.rows, key=lambda row: -row.reserved_bytes)
    origins = list[str]()
    for row in rows[:_RESERVED_SHOWN]:
        if row.reserved_bytes >= _LEAST_RESERVED_BYTES:
            origin = ", ".join(filter(None, [row.name or row.module, row.operation, row.line]))
            origins.append(
                f"{format_bytes(row.reserved_bytes)} by {clean_name(origin or row.role)}"
            )
    return [
        Fact(
            f"{title(device)} reserved, not used",
            [f"{format_bytes(reserved_bytes)} ({'; '.join(origins)})"],
        )
    ]


def _tables_of_device(device: DevicePeak, top: int) -> list[Table]:
    """Return the tables of a device: of its parts, if it has several, and of the largest layers."""
    parts = share_rows(device.parts, device.size_bytes)
    rows_of_layers = _rows_of_layers(device, top)
    numbers = {"size", *_COLUMNS}
    if len(parts) < 2:
        return [Table.of(rows_of_layers, numbers, title(device), code={_WHAT})]
    table_of_parts = Table.of(parts, {"size", "share"}, title(device))
    return [table_of_parts, Table.of(rows_of_layers, numbers, code={_WHAT})]


def _rows_of_layers(device: DevicePeak, top: int) -> list[dict[str, str]]:
    """Return the rows of a device's largest layers, at most ``top``, and one for the smaller ones
    together. Layers with less than a thousandth of the bytes have no row of their own.
    """
    in_use = [row for row in device.rows if row.size_bytes]  # all other rows are only reserved
    groups = sorted(layers(in_use, top).items(), key=lambda group: -_bytes_of_rows(group[1]))
    by_role = any(len({row.role for row in rows}) > 1 for _, rows in groups)
    least_bytes = max(device.size_bytes / 1000, KIB)
    large = [rows for _, rows in groups if _bytes_of_rows(rows) >= least_bytes]
    number_shown = min(top, len(large) or 1)
    table_rows = [_layer_row(key, rows, by_role=by_role) for key, rows in groups[:number_shown]]
    smaller = groups[number_shown:]
    if smaller:
        size = format_bytes(sum(_bytes_of_rows(rows) for _, rows in smaller))
        table_rows.append({"size": size, _WHAT: count(len(smaller), "smaller row")})
    return table_rows


def _layer_row(key: LayerKey, rows: Sequence[PeakRow], *, by_role: bool) -> dict[str, str]:
    """Return the table's row of a layer, with a column for each role if ``by_role``."""
    bytes_by_role = Counter[str]()
    for row in rows:
        bytes_by_role[row.role] += row.size_bytes
    texts = {"size": format_bytes(_bytes_of_rows(rows))}
    if by_role:
        for role in _COLUMNS:
            texts[role] = format_bytes(bytes_by_role[role]) if role in bytes_by_role else ""
    texts["role"] = ""
    if len(bytes_by_role) == 1:
        (only_role,) = bytes_by_role
        if only_role not in texts:  # it has no column
            texts["role"] = only_role
    texts[_WHAT] = clean_name(_layer_label(key, rows))
    return texts


def _layer_label(key: LayerKey, rows: Sequence[PeakRow]) -> str:
    """Return the path of a layer, with the operation of its rows if all have the same.

    ``net.blocks.*.linear (12 layers): addmm, line 4: ...`` has the sums of all blocks.
    """
    path = [part for part in key if isinstance(part, str)]
    label = ".".join(path)
    if "*" in path:
        position = path.index("*")
        items = {_path_of_row(row)[position] for row in rows}
        label += f" ({len(items)} layers)"
    operations = {(row.name, row.operation, row.line) for row in rows if row.name or row.operation}
    if len(operations) != 1:
        return label
    (operation,) = operations
    words = ", ".join(filter(None, operation))
    if not label:
        return words
    with_operation = f"{label}: {words}"
    if len(with_operation) > _LONGEST_LABEL:
        return label
    return with_operation


# -- layers -------------------------------------------------------------------------------------


def layers(rows: Sequence[PeakRow], top: int) -> dict[LayerKey, list[PeakRow]]:
    """Return rows in groups, by layer, so that the ``top`` largest groups say most.

    It begins with the outermost layers. The largest layer is split into its parts, again and
    again, while the ``top`` largest groups still have 95 % of the bytes. The items of a list, such
    as a transformer's blocks, are split together. A list with too many items becomes one layer
    ``blocks.*``, so that its parts are sums over all items.
    """
    total_bytes = _bytes_of_rows(rows)
    groups = _parts_of_layer(rows, ())
    final_layers = set[LayerKey]()
    """Layers that are not split further."""
    while True:
        key = _layer_to_split(groups, final_layers)
        if not key or _bytes_of_rows(groups[key]) < total_bytes / top:
            return groups
        layers_together = _layers_split_together(key, groups)
        parts = _parts_of_layers(layers_together, groups)
        other_layers = {
            item: rows_of_item
            for item, rows_of_item in groups.items()
            if item not in layers_together
        }
        bytes_left_out = _bytes_beyond({**other_layers, **parts}, top)
        has_too_many = bytes_left_out > max(0.05 * total_bytes, _bytes_beyond(groups, top))
        is_list = all(_is_item_of_list(part, key) for part in parts)
        has_inner = any(_has_inner_layers(item, parts) for item in layers_together)
        if has_too_many and is_list:
            parts = {(*key, "*"): groups[key]}
        elif has_too_many or not has_inner:
            parts = {item: groups[item] for item in layers_together}  # not split after all
        groups = {**other_layers, **parts}
        # A layer that is still its own part, because it was not split, or for its own memory.
        final_layers.update(item for item in layers_together if item in parts)


def _parts_of_layers(
    keys: Iterable[LayerKey], groups: RowsByLayer
) -> dict[LayerKey, list[PeakRow]]:
    """Return the parts of several layers, with the rows of each part."""
    parts = dict[LayerKey, list[PeakRow]]()
    for key in keys:
        parts.update(_parts_of_layer(groups[key], key))
    return parts


def _layer_to_split(groups: RowsByLayer, final_layers: Container[LayerKey]) -> LayerKey:
    """Return the key of the largest layer that may be split; empty if there is none."""
    sizes = {key: _bytes_of_rows(rows) for key, rows in groups.items() if key not in final_layers}
    return max(sizes, key=sizes.__getitem__, default=())


def _layers_split_together(key: LayerKey, groups: Iterable[LayerKey]) -> list[LayerKey]:
    """Return the layers that are split together with one: all items of its list, if it is an item,
    otherwise itself alone.
    """
    if not _is_item_of_list(key):
        return [key]
    return [other for other in groups if _is_item_of_list(other, key[:-1])]


def _parts_of_layer(rows: Sequence[PeakRow], key: LayerKey) -> dict[LayerKey, list[PeakRow]]:
    """Return the rows of a layer by its parts, one step further on the path of each row.

    For ``("net",)``, a row of ``net.blocks.3`` is in the part ``("net", "blocks")``. Rows of the
    layer's own memory stay under its key.
    """
    parts: dict[LayerKey, list[PeakRow]] = {}
    depth_of_parts = len(key) + 1
    for row in rows:
        further_steps = _path_of_row(row)[len(key) : depth_of_parts]  # one, or none at its end
        parts.setdefault((*key, *further_steps), []).append(row)
    return parts


def _bytes_beyond(groups: RowsByLayer, top: int) -> int:
    """Return the bytes of all groups but the ``top`` largest ones."""
    sizes = sorted(map(_bytes_of_rows, groups.values()), reverse=True)
    return sum(sizes[top:])


def _has_inner_layers(key: LayerKey, parts: Iterable[LayerKey]) -> bool:
    """Return True if a layer has inner layers, or several operations.

    A layer with one operation is not split: the report names both in one row.
    """
    inner = [part for part in parts if part[:-1] == key]
    return len(inner) > 1 or any(isinstance(part[-1], str) for part in inner)


def _is_item_of_list(key: LayerKey, parent: LayerKey | None = None) -> bool:
    """Return True for an item of a list of modules, such as ``blocks.3``.

    Args:
        key: the key of a layer.
        parent: the list of which it must be an item; None for any list.
    """
    if not key or (parent is not None and key[:-1] != parent):
        return False
    return isinstance(key[-1], str) and key[-1].isdigit()


def _path_of_row(row: PeakRow) -> LayerKey:
    """Return the parts of the path to a row's module, and the row's own part below it."""
    path = row.module.split(".") if row.module else []
    if row.name or row.operation:
        return (*path, (row.name, row.operation, row.line))
    return tuple(path)


def _bytes_of_rows(rows: Sequence[PeakRow]) -> int:
    """Return the sum of the rows' bytes in use."""
    return sum(row.size_bytes for row in rows)
