"""Builds the report of ``%gpumem status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ipygpumem.inventory.breakdown import Part, Reconciliation
from ipygpumem.probes.children import Child
from ipygpumem.probes.other_kernels import OtherKernel
from ipygpumem.records import CellRecord, Reading
from ipygpumem.report.layout import (
    SEPARATOR,
    Bar,
    Report,
    Table,
    clean,
    clean_name,
    device_label,
    size_text,
    sizes,
)
from ipygpumem.units import format_bytes

_CHILDREN_SHOWN = 10
_CLOCK_SECONDS = 0.01
"""Maximum difference of a process's clock from ours: the kernel counts hundredths of a second."""


def status_report(
    headline: str,
    lines: Iterable[str],
    readings: Iterable[Reading],
    reconciliations: Sequence[Reconciliation] = (),
    children: Sequence[Child] = (),
    cells: Sequence[CellRecord] = (),
    kernels: Sequence[OtherKernel] = (),
) -> Report:
    """Return the open features, each device's memory and its parts, the processes started by
    ``cells``, and kernels.
    """
    readings = list(readings)
    notes = [(item.device, item.note) for item in readings if item.note]
    for item in reconciliations:
        notes += [(item.device, note) for note in item.notes]
    tables = [
        _readings_table(readings),
        *map(_parts_table, reconciliations),
        _children_table(children, cells),
        _kernels_table(kernels),
    ]
    shown = [clean(f"{device_label(device)}: {note}") for device, note in notes]
    return Report(
        "status",
        headline.split(SEPARATOR),
        (*map(clean, lines), *shown),
        tables,
        records=reconciliations,
    )


def _children_table(children: Sequence[Child], cells: Sequence[CellRecord]) -> Table:
    """Return the child processes, each with the cell during which it was started."""
    largest = sorted(children, key=_sizes_of, reverse=True)
    rows = []
    for child in largest[:_CHILDREN_SHOWN]:
        row = {
            "size": format_bytes(child.memory_bytes),
            "on devices": ", ".join(sizes(dict(child.on_devices))),
            "process": str(child.pid),
            "name": clean_name(child.name),
            "started in": started_in(child, cells),
            "to end it": clean(child.ends_by),
        }
        rows.append(row)
    more = largest[_CHILDREN_SHOWN:]
    if more:
        row = {
            "size": format_bytes(sum(child.memory_bytes for child in more)),
            "on devices": ", ".join(sizes(_on_devices(more))),
            "name": f"and {len(more):,} more",
        }
        rows.append(row)
    kind = "RSS: shared pages count fully"
    if all(child.is_shared_out for child in children):
        kind = "PSS: shared pages count by share"
    right = {"size", "on devices", "process"}
    return Table.of(rows, right, f"child processes, by {kind}", code={"to end it"})


def _sizes_of(child: Child) -> tuple[int, int]:
    """Return the bytes that a process uses on all devices, and in RAM."""
    return _on_devices([child]).total(), child.memory_bytes


def _on_devices(children: Iterable[Child]) -> Counter[str]:
    """Return the bytes that processes use on each device."""
    used = Counter[str]()
    for child in children:
        used.update(dict(child.on_devices))
    return used


def _kernels_table(kernels: Sequence[OtherKernel]) -> Table:
    """Return the other Jupyter kernels of the user, each with its notebook."""
    rows = []
    for kernel in kernels[:_CHILDREN_SHOWN]:
        row = {
            "size": format_bytes(kernel.memory_bytes),
            "process": str(kernel.pid),
            "notebook": clean(kernel.notebook) or "unknown",
        }
        rows.append(row)
    more = kernels[_CHILDREN_SHOWN:]
    if more:
        size = format_bytes(sum(kernel.memory_bytes for kernel in more))
        rows.append({"size": size, "notebook": f"and {len(more):,} more"})
    is_pss = all(kernel.is_shared_out for kernel in kernels)
    title = f"your other Jupyter kernels, by {'PSS' if is_pss else 'RSS'}"
    return Table.of(rows, {"size", "process"}, title)


def started_in(child: Child, cells: Sequence[CellRecord]) -> str:
    """Return the cell that ran when a process was started, or all such cells if its clock cannot
    tell them apart.
    """
    near = []
    for cell in cells:
        seconds = child.started_at - cell.started_at
        is_near = -_CLOCK_SECONDS <= seconds <= cell.duration_seconds + _CLOCK_SECONDS
        if is_near and cell.execution_count is not None:
            near.append(str(cell.execution_count))
    return f"cell {' or '.join(near)}" if near else "unknown cell"


def _readings_table(readings: Sequence[Reading]) -> Table:
    rows = []
    for item in readings:
        row = {
            "device": device_label(item.device),
            "in use": size_text(item.current_bytes),
            "reserved": size_text(item.reserved_bytes),
            "device used": size_text(item.used_bytes),
            "others": size_text(item.other_bytes),
            "total": size_text(item.total_bytes),
        }
        rows.append(row)
    numbers = set().union(*rows) - {"device"}
    return Table.of(rows, numbers, bars=[*map(_use, readings)])


def _use(reading: Reading) -> Bar | None:
    """Return the bar of the device's use, as far as known, with this process's share separate."""
    if not reading.total_bytes:
        return None
    mine = reading.current_bytes if reading.reserved_bytes is None else reading.reserved_bytes
    used = max(mine, reading.used_bytes or 0)
    label = (
        f"{device_label(reading.device)}: {format_bytes(mine)} this process, "
        f"{format_bytes(used - mine)} other processes, of {format_bytes(reading.total_bytes)}"
    )
    return Bar(label, reading.total_bytes, used - mine, mine)


def _parts_table(device: Reconciliation) -> Table:
    """Return the parts of one device that are not empty, including "unknown"."""
    parts = [part for part in device.parts if part.size_bytes != 0]
    rows = []
    for part in parts:
        row = {
            "size": "unknown" if part.size_bytes is None else format_bytes(part.size_bytes),
            "part": clean(part.name),
            "what it is, what you can do": clean(part.advice),
        }
        rows.append(row)
    total = format_bytes(device.total_bytes)
    title = f"{clean(device_label(device.device))}: {total}, {clean(device.basis)}"
    bars = [_share(part, device.total_bytes) for part in parts]
    return Table.of(rows, {"size"}, title, bars=bars)


def _share(part: Part, total_bytes: int) -> Bar | None:
    if part.size_bytes is None or total_bytes <= 0 or part.size_bytes < total_bytes // 100:
        return None
    label = f"{clean(part.name)}: {format_bytes(part.size_bytes)} of {format_bytes(total_bytes)}"
    return Bar(label, total_bytes, part.size_bytes)
