"""Builds the report of ``%gpumem status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ipygpumem.inventory.breakdown import Part, Reconciliation
from ipygpumem.probes.children import Child
from ipygpumem.probes.other_kernels import OtherKernel
from ipygpumem.records import CellRecord, Reading
from ipygpumem.report.devices import device_label, is_worth_a_row, size_or_unknown, size_text, sizes
from ipygpumem.report.layout import SEPARATOR, Bar, Report, Table, row_of_more
from ipygpumem.report.words import clean, clean_name
from ipygpumem.units import format_bytes

_CHILDREN_SHOWN = 10
_LEAST_BYTES = 1 << 12
"""Minimum bytes of a part: pyarrow holds 26 bytes as soon as pandas is imported."""
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
    readings = [
        reading for reading in readings if is_worth_a_row(reading.device, reading.current_bytes)
    ]
    tables = [
        _readings_table(readings),
        *map(_parts_table, reconciliations),
        _children_table(children, cells),
        _kernels_table(kernels),
    ]
    texts = [*map(clean, lines), *_notes(readings, reconciliations)]
    head = headline.split(SEPARATOR)
    return Report("status", head, tuple(texts), tables, records=reconciliations)


def _notes(readings: Sequence[Reading], reconciliations: Sequence[Reconciliation]) -> list[str]:
    """Return the notes on the devices' figures, and then on their parts."""
    texts = []
    for reading in readings:
        if reading.note:
            label = device_label(reading.device)
            texts.append(clean(f"{label}: {reading.note}"))
    for reconciliation in reconciliations:
        label = device_label(reconciliation.device)
        texts += [clean(f"{label}: {note}") for note in reconciliation.notes]
    return texts


def _children_table(children: Sequence[Child], cells: Sequence[CellRecord]) -> Table:
    """Return the child processes, each with the cell during which it was started."""
    largest = sorted(children, key=_sizes_of, reverse=True)
    rows = [_child_row(child, cells) for child in largest[:_CHILDREN_SHOWN]]
    more = largest[_CHILDREN_SHOWN:]
    if more:
        row = _row_of_more(more, "name")
        row["on devices"] = _devices_text(more)
        rows.append(row)
    kind = "RSS: shared pages count fully"
    if all(child.is_shared_out for child in children):
        kind = "PSS: shared pages count by share"
    right = {"size", "on devices", "process"}
    return Table.of(rows, right, f"child processes, by {kind}", code={"to end it"})


def _child_row(child: Child, cells: Sequence[CellRecord]) -> dict[str, str]:
    """Return the row of a child process."""
    return {
        "size": format_bytes(child.memory_bytes),
        "on devices": _devices_text([child]),
        "process": str(child.pid),
        "name": clean_name(child.name),
        "started in": started_in(child, cells),
        "to end it": clean(child.ends_by),
    }


def _row_of_more(processes: Sequence[Child | OtherKernel], column: str) -> dict[str, str]:
    """Return the row of all processes that are too many to have a row each."""
    size = sum(process.memory_bytes for process in processes)
    return row_of_more(len(processes), size, column)


def _sizes_of(child: Child) -> tuple[int, int]:
    """Return the bytes that a process uses on all devices, and in RAM."""
    return _on_devices([child]).total(), child.memory_bytes


def _devices_text(children: Iterable[Child]) -> str:
    """Return the bytes that processes use on each device, as a text."""
    return ", ".join(sizes(_on_devices(children)))


def _on_devices(children: Iterable[Child]) -> Counter[str]:
    """Return the bytes that processes use on each device."""
    used = Counter[str]()
    for child in children:
        used.update(dict(child.on_devices))
    return used


def _kernels_table(kernels: Sequence[OtherKernel]) -> Table:
    """Return the other Jupyter kernels of the user, each with its notebook."""
    rows = [_kernel_row(kernel) for kernel in kernels[:_CHILDREN_SHOWN]]
    more = kernels[_CHILDREN_SHOWN:]
    if more:
        rows.append(_row_of_more(more, "notebook"))
    kind = "RSS"
    if all(kernel.is_shared_out for kernel in kernels):
        kind = "PSS"
    return Table.of(rows, {"size", "process"}, f"your other Jupyter kernels, by {kind}")


def _kernel_row(kernel: OtherKernel) -> dict[str, str]:
    """Return the row of another kernel."""
    return {
        "size": format_bytes(kernel.memory_bytes),
        "process": str(kernel.pid),
        "notebook": clean(kernel.notebook) or "unknown",
    }


def started_in(child: Child, cells: Sequence[CellRecord]) -> str:
    """Return the cell that ran when a process was started, or all such cells if its clock cannot
    tell them apart.
    """
    numbers = []
    for cell in cells:
        if cell.execution_count is None:
            continue
        seconds = child.started_at - cell.started_at
        if -_CLOCK_SECONDS <= seconds <= cell.duration_seconds + _CLOCK_SECONDS:
            numbers.append(str(cell.execution_count))
    if not numbers:
        return "unknown cell"
    return f"cell {' or '.join(numbers)}"


def _readings_table(readings: Sequence[Reading]) -> Table:
    rows = list(map(_reading_row, readings))
    bars = list(map(_bar_of_use, readings))
    numbers = set().union(*rows) - {"device"}
    return Table.of(rows, numbers, bars=bars)


def _reading_row(reading: Reading) -> dict[str, str]:
    """Return the row of a device."""
    return {
        "device": device_label(reading.device),
        "in use": size_text(reading.current_bytes),
        "reserved": size_text(reading.reserved_bytes),
        "device used": size_text(reading.used_bytes),
        "others": size_text(reading.other_bytes),
        "total": size_text(reading.total_bytes),
    }


def _bar_of_use(reading: Reading) -> Bar | None:
    """Return the bar of the device's use, as far as known, with this process's share separate."""
    total = reading.total_bytes
    if not total:
        return None
    mine = reading.reserved_bytes
    if mine is None:
        mine = reading.current_bytes
    used = max(mine, reading.used_bytes or 0)
    label = (
        f"{device_label(reading.device)}: {format_bytes(mine)} this process, "
        f"{format_bytes(used - mine)} other processes, of {format_bytes(total)}"
    )
    return Bar(label, total, used - mine, mine)


def _parts_table(device: Reconciliation) -> Table:
    """Return the parts of one device, including "unknown", but no empty or tiny ones."""
    parts = list[Part]()
    for part in device.parts:
        if part.size_bytes is None or part.size_bytes >= _LEAST_BYTES:
            parts.append(part)
    rows = list(map(_part_row, parts))
    total = format_bytes(device.total_bytes)
    title = f"{clean(device_label(device.device))}: {total}, {clean(device.basis)}"
    bars = [_bar_of_part(part, device.total_bytes) for part in parts]
    return Table.of(rows, {"size"}, title, bars=bars)


def _part_row(part: Part) -> dict[str, str]:
    """Return the row of a part of a device's memory."""
    return {
        "size": size_or_unknown(part.size_bytes),
        "part": clean(part.name),
        "what it is, what you can do": clean(part.advice),
    }


def _bar_of_part(part: Part, total_bytes: int) -> Bar | None:
    """Return the bar of a part of a device's memory; None if it would be too short to see."""
    size = part.size_bytes
    if size is None or total_bytes <= 0 or size < total_bytes // 100:
        return None
    label = f"{clean(part.name)}: {format_bytes(size)} of {format_bytes(total_bytes)}"
    return Bar(label, total_bytes, size)
