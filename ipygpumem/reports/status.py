"""Makes the report of ``%gpumem status``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipygpumem.model import CellRecord, Reading
from ipygpumem.probes.host import Child
from ipygpumem.reconcile.device import Part, Reconciliation
from ipygpumem.reports.layout import SEPARATOR, Bar, Report, Segment, Table, clean, clean_name, device_label
from ipygpumem.units import format_bytes

_ROWS_SHOWN = 24
_CHILDREN_SHOWN = 10
_CLOCK_SECONDS = 0.01
"""A process's clock and ours differ by up to so much: the kernel counts hundredths, and we take their middle."""


def status_report(
    headline: str,
    lines: Iterable[str],
    readings: Iterable[Reading],
    reconciliations: Iterable[Reconciliation] = (),
    children: Sequence[Child] = (),
    cells: Sequence[CellRecord] = (),
) -> Report:
    """Return what is on and open, each device's memory and its parts, and the processes that ``cells`` have started."""
    readings, reconciliations = list(readings), list(reconciliations)
    notes = [f"{device_label(item.device)}: {clean(item.note)}" for item in readings if item.note]
    for item in reconciliations:
        notes += [f"{_label(item)}: {clean(note)}" for note in item.notes]
    tables = [_readings_table(readings), *map(_parts_table, reconciliations)]
    if children:
        tables.append(_children_table(children, cells))
    return Report.of("status", map(Segment, headline.split(SEPARATOR)), (*map(clean, lines), *notes), tables)


def _children_table(children: Sequence[Child], cells: Sequence[CellRecord]) -> Table:
    """Return the processes below this one, each with the cell during which it was started."""
    largest = sorted(children, key=lambda child: (-sum(dict(child.on_devices).values()), -child.memory_bytes))
    rest = largest[_CHILDREN_SHOWN:]
    rows = [
        (
            format_bytes(child.memory_bytes),
            ", ".join(f"{device_label(device)} {format_bytes(size)}" for device, size in child.on_devices),
            str(child.pid),
            clean_name(child.name),
            started_in(child, cells),
        )
        for child in largest[:_CHILDREN_SHOWN]
    ]
    if rest:
        size = format_bytes(sum(child.memory_bytes for child in rest))
        rows.append((size, "", "", f"and {len(rest):,} smaller", ""))
    kind = "PSS: shared pages count by share" if children[0].is_shared_out else "RSS: shared pages count fully"
    columns = ("size", "on devices", "process", "name", "started in")
    table = Table(f"child processes, by {kind}", columns, tuple(rows), frozenset(columns[:3]))
    return table.without_empty()


def started_in(child: Child, cells: Sequence[CellRecord]) -> str:
    """Return the cell that ran when a process was started; of two that its clock cannot tell apart, both."""
    near = [
        str(cell.execution_count)
        for cell in cells
        if cell.execution_count is not None
        and cell.started_at - _CLOCK_SECONDS <= child.started_at
        and child.started_at <= cell.started_at + cell.duration_seconds + _CLOCK_SECONDS
    ]
    return f"cell {' or '.join(near)}" if near else "no cell that is known"


def _readings_table(readings: Sequence[Reading]) -> Table:
    """Return a table of all devices, without the columns that are empty for each."""
    columns = ("device", "in use", "reserved", "device used", "others", "total", "children")
    rows = []
    for item in readings:
        wide = (item.reserved_bytes, item.used_bytes, item.other_bytes, item.total_bytes, item.children_bytes or None)
        sizes = ("" if size is None else format_bytes(size) for size in wide)
        rows.append((device_label(item.device), format_bytes(item.current_bytes), *sizes))
    return Table("", columns, tuple(rows), frozenset(columns[1:]), bars=tuple(map(_use, readings))).without_empty()


def _use(reading: Reading) -> Bar | None:
    """Return how full the device is, as far as it is known, with what is this process's apart."""
    if not reading.total_bytes:
        return None
    mine = reading.current_bytes if reading.reserved_bytes is None else reading.reserved_bytes
    used = max(mine, reading.used_bytes or 0)
    label = (
        f"{device_label(reading.device)}: {format_bytes(mine)} this process, "
        f"{format_bytes(used - mine)} others, of {format_bytes(reading.total_bytes)}"
    )
    return Bar(label, reading.total_bytes, used - mine, mine)


def _parts_table(found: Reconciliation) -> Table:
    """Return the parts of one device that are not empty; "unknown" is a part like any other."""
    parts = _shortened([part for part in found.parts if part.size_bytes != 0])
    sizes = ["unknown" if part.size_bytes is None else format_bytes(part.size_bytes) for part in parts]
    rows = [(size, clean(part.name), clean(part.advice)) for size, part in zip(sizes, parts, strict=True)]
    title = f"{_label(found)}: {format_bytes(found.total_bytes)}, {clean(found.basis)}"
    columns = ("size", "part", "what it is, what you can do")
    bars = tuple(_share(part, found.total_bytes) for part in parts)
    return Table(title, columns, tuple(rows), frozenset({"size"}), bars=bars)


def _share(part: Part, total_bytes: int) -> Bar | None:
    if part.size_bytes is None or total_bytes <= 0 or part.size_bytes < total_bytes // 100:
        return None
    label = f"{clean(part.name)}: {format_bytes(part.size_bytes)} of {format_bytes(total_bytes)}"
    return Bar(label, total_bytes, part.size_bytes)


def _shortened(parts: list[Part]) -> list[Part]:
    """Return the parts with the smallest in the end as one, where there are too many (processes, mostly)."""
    if len(parts) <= _ROWS_SHOWN:
        return parts
    known = sorted((part for part in parts if part.size_bytes is not None), key=lambda part: part.size_bytes or 0)
    small = known[: len(parts) - _ROWS_SHOWN + 1]
    rest = Part(f"{len(small)} smaller parts", sum(part.size_bytes or 0 for part in small), "processes, mostly")
    return [*(part for part in parts if not any(part is other for other in small)), rest]


def _label(found: Reconciliation) -> str:
    return clean(device_label(found.device))
