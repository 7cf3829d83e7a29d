"""The report of ``%%peak``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.extras.peak.records import DevicePeak, PeakRecord, PeakRow, draw
from ipygpumem.extras.peak.words import LEAST_MISSED_BYTES, headline, title
from ipygpumem.records import Usage
from ipygpumem.report.estimate import share_rows
from ipygpumem.report.layout import (
    Fact,
    Report,
    Table,
    clean,
    clean_name,
    count,
    peak_label,
)
from ipygpumem.report.showing import shows
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
    "assumed which rows are "
    "not used: mapped memory first, then zeroed memory, then torch's, then the largest rows"
)
_WHAT = "name, layer or operation"


@shows(PeakRecord)
def peak_report(record: PeakRecord, *, top: int = _ROWS_SHOWN) -> Report:
    """Return the report: for each device the memory at the moment, by role, and by layer, name or
    origin.
    """
    devices = sorted(record.devices, key=lambda device: (not device.ran_out, -device.size_bytes))
    segments = ["peak", *map(headline, devices)]
    if record.ram is not None and not devices:
        segments.append(_ram_text(record.ram))
    segments.append(f"in {format_seconds(record.duration_seconds)}")
    tables = list[Table]()
    for device in devices:
        if device.ran_out or device.size_bytes >= _LEAST_SHARE * devices[0].size_bytes:
            tables += _tables(device, top)
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
    from ipygpumem.extras.peak import picture  # needs matplotlib

    return picture.draw(record)


def _missed_facts(device: DevicePeak) -> list[Fact]:
    """Return how much more the process used at another moment, which no row lists."""
    if device.missed_bytes < LEAST_MISSED_BYTES:
        return []
    size = format_bytes(device.missed_bytes)
    why = "memray keeps only the moment at which most memory was in use or reserved"
    return [Fact("RAM at another moment", [f"{size} more, which no row lists: {why}"])]


def _reserved_facts(device: DevicePeak) -> list[Fact]:
    """Return the bytes that are reserved and not used, with the names or lines that have most of
    them.
    """
    reserved_bytes = device.reserved_bytes
    if reserved_bytes < _LEAST_RESERVED_BYTES:
        return []
    rows = sorted(device.rows, key=lambda row: -row.reserved_bytes)
    places = list[str]()
    for row in rows[:_RESERVED_SHOWN]:
        if row.reserved_bytes >= _LEAST_RESERVED_BYTES:
            origin = ", ".join(filter(None, [row.name or row.module, row.operation, row.line]))
            places.append(f"{format_bytes(row.reserved_bytes)} by {clean_name(origin or row.role)}")
    return [
        Fact(
            f"{title(device)} reserved, not used",
            [f"{format_bytes(reserved_bytes)} ({'; '.join(places)})"],
        )
    ]


def _tables(device: DevicePeak, top: int) -> list[Table]:
    parts = share_rows(device.parts, device.size_bytes)
    in_ram = [row for row in device.rows if row.size_bytes]
    groups = sorted(layers(in_ram, top).items(), key=lambda group: -_size(group[1]))
    by_role = any(len({row.role for row in rows}) > 1 for _, rows in groups)
    least = max(device.size_bytes / 1000, KIB)
    large = [rows for _, rows in groups if _size(rows) >= least]
    top = min(top, len(large) or 1)
    rows = [_row(key, rows, by_role=by_role) for key, rows in groups[:top]]
    if rest := groups[top:]:
        size = format_bytes(sum(_size(found) for _, found in rest))
        rows.append({"size": size, _WHAT: count(len(rest), "smaller row")})
    what = Table.of(rows, {"size", *_COLUMNS}, title(device) * (len(parts) < 2), code={_WHAT})
    return [Table.of(parts, {"size", "share"}, title(device)), what] if len(parts) > 1 else [what]


def _row(key: Key, rows: Sequence[PeakRow], *, by_role: bool) -> dict[str, str]:
    roles: dict[str, int] = {}
    for row in rows:
        roles[row.role] = roles.get(row.role, 0) + row.size_bytes
    path = [part for part in key if isinstance(part, str)]
    what = ".".join(path)
    if "*" in path:
        what += f" ({len({_parts(row)[path.index('*')] for row in rows})} layers)"
    labels = {(row.name, row.operation, row.line) for row in rows if row.name or row.operation}
    if len(labels) == 1:
        whole = ": ".join(filter(None, [what, ", ".join(filter(None, *labels))]))
        what = whole if not what or len(whole) <= _LONGEST_LABEL else what
    columns = [role for role in _COLUMNS if by_role]
    return {
        "size": format_bytes(_size(rows)),
        **{role: format_bytes(roles[role]) if role in roles else "" for role in columns},
        "role": "".join(roles) if len(roles) == 1 and not roles.keys() & set(columns) else "",
        _WHAT: clean_name(what),
    }


# -- layers -------------------------------------------------------------------------------------

Key = tuple[Any, ...]
"""Parts of a module's path, and below them the name, operation and line of a row that is not the
module's own.
"""


def layers(rows: Sequence[PeakRow], most: int) -> dict[Key, list[PeakRow]]:
    """Return rows in groups: the largest layer is split into its parts while ``most`` groups have
    95 % of the bytes.

    The items of a list, such as a transformer's blocks, are split together. A list with too many
    items becomes one layer ``blocks.*``, so that its parts are sums over all items.
    """
    groups, whole, total = _split(rows, ()), set[Key](), _size(rows)
    while True:
        sizes = {key: _size(found) for key, found in groups.items() if key not in whole}
        key = max(sizes, key=sizes.__getitem__, default=())
        if not key or sizes[key] < total / most:
            return groups
        family = [
            other
            for other in groups
            if other == key or (_is_item(key) and _is_item(other, key[:-1]))
        ]
        rest = {other: found for other, found in groups.items() if other not in family}
        parts = {
            part: found for item in family for part, found in _split(groups[item], item).items()
        }
        is_long = _below(rest | parts, most) > max(0.05 * total, _below(groups, most))
        if is_long and all(_is_item(part, key) for part in parts):
            parts = {(*key, "*"): groups[key]}
        elif is_long or not any(_has_parts(item, parts) for item in family):
            parts = {item: groups[item] for item in family}
        groups = rest | parts
        whole.update(item for item in family if item in parts)


def _split(rows: Sequence[PeakRow], key: Key) -> dict[Key, list[PeakRow]]:
    """Return the rows of a layer by its parts; its own memory stays under its key."""
    parts: dict[Key, list[PeakRow]] = {}
    for row in rows:
        parts.setdefault((*key, *_parts(row)[len(key) :][:1]), []).append(row)
    return parts


def _below(groups: Mapping[Key, Sequence[PeakRow]], most: int) -> int:
    """Return the bytes of all groups but the ``most`` largest ones."""
    return sum(sorted(map(_size, groups.values()), reverse=True)[most:])


def _has_parts(key: Key, parts: Iterable[Key]) -> bool:
    """Return True if a layer has inner layers, or several operations."""
    inner = [part for part in parts if part[:-1] == key]
    return len(inner) > 1 or any(isinstance(part[-1], str) for part in inner)


def _is_item(key: Key, of: Key | None = None) -> bool:
    """Return True for an item of a list of modules."""
    return isinstance(key[-1], str) and key[-1].isdigit() and of in (None, key[:-1])


def _parts(row: PeakRow) -> Key:
    path = row.module.split(".") if row.module else []
    return (*path, *[(row.name, row.operation, row.line)] * bool(row.name or row.operation))


def _size(rows: Sequence[PeakRow]) -> int:
    return sum(row.size_bytes for row in rows)
