"""The report of ``%gpumem status``: devices, parts of their memory, child processes, kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ipygpumem.inventory.devices.breakdown import Part, Reconciliation
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
    """Return the report of ``%gpumem status``.

    Args:
        headline: the settings, with separators.
        lines: lines about open experiments and further features.
        readings: each device's memory.
        reconciliations: the parts of each device's memory.
        children: the child processes.
        cells: the cells, one of which may have started a child process.
        kernels: the user's other Jupyter kernels.
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
    """Return the notes on the devices' figures, then those on their parts, each with its device."""
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
    """Return the table of the child processes, each with the cell that ran when it was started."""
    largest_first = sorted(children, key=_sort_key_of_child, reverse=True)
    rows = [_child_row(child, cells) for child in largest_first[:_CHILDREN_SHOWN]]
    not_shown = largest_first[_CHILDREN_SHOWN:]
    if not_shown:
        row = _row_of_more(not_shown, "name")
        row["on devices"] = _devices_text(not_shown)
        rows.append(row)
    measure = "RSS: shared pages count fully"
    if all(child.is_shared_out for child in children):
        measure = "PSS: shared pages count by share"
    numbers = {"size", "on devices", "process"}
    return Table.of(rows, numbers, f"child processes, by {measure}", code={"to end it"})


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
    """Return the row that sums up processes without a row of their own.

    Args:
        processes: the processes.
        column: the column for their number.
    """
    size = sum(process.memory_bytes for process in processes)
    return row_of_more(len(processes), size, column)


def _sort_key_of_child(child: Child) -> tuple[int, int]:
    """Return the bytes that a process uses on all devices, then those in RAM: the table is sorted
    by them.
    """
    return _bytes_on_devices([child]).total(), child.memory_bytes


def _devices_text(children: Iterable[Child]) -> str:
    """Return the bytes that processes use on each device, in words."""
    return ", ".join(sizes(_bytes_on_devices(children)))


def _bytes_on_devices(children: Iterable[Child]) -> Counter[str]:
    """Return the bytes that processes use together on each device."""
    bytes_used = Counter[str]()
    for child in children:
        bytes_used.update(dict(child.on_devices))
    return bytes_used


def _kernels_table(kernels: Sequence[OtherKernel]) -> Table:
    """Return the table of the user's other Jupyter kernels, each with its notebook."""
    rows = [_kernel_row(kernel) for kernel in kernels[:_CHILDREN_SHOWN]]
    not_shown = kernels[_CHILDREN_SHOWN:]
    if not_shown:
        rows.append(_row_of_more(not_shown, "notebook"))
    measure = "RSS"
    if all(kernel.is_shared_out for kernel in kernels):
        measure = "PSS"
    return Table.of(rows, {"size", "process"}, f"your other Jupyter kernels, by {measure}")


def _kernel_row(kernel: OtherKernel) -> dict[str, str]:
    """Return the row of another kernel."""
    return {
        "size": format_bytes(kernel.memory_bytes),
        "process": str(kernel.pid),
        "notebook": clean(kernel.notebook) or "unknown",
    }


def started_in(child: Child, cells: Sequence[CellRecord]) -> str:
    """Return the cell that ran when a process was started, such as ``cell 3``. Return all possible
    ones (``cell 3 or 4``), if the process's clock is not exact enough to tell them apart.
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
    """Return the table of the devices' memory, with a bar for each."""
    rows = list(map(_reading_row, readings))
    bars = list(map(_bar_of_use, readings))
    columns = set().union(*rows)
    numbers = columns - {"device"}
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
    """Return the bar of a device's use: first other processes' memory, then that of this process.
    Return None if the device's total is unknown.
    """
    total = reading.total_bytes
    if not total:
        return None
    of_this_process = reading.reserved_bytes
    if of_this_process is None:
        of_this_process = reading.current_bytes
    used = max(of_this_process, reading.used_bytes or 0)
    of_other_processes = used - of_this_process
    label = (
        f"{device_label(reading.device)}: {format_bytes(of_this_process)} this process, "
        f"{format_bytes(of_other_processes)} other processes, of {format_bytes(total)}"
    )
    return Bar(label, total, of_other_processes, of_this_process)


def _parts_table(device: Reconciliation) -> Table:
    """Return the table of one device's parts. Parts of unknown size have a row, empty or tiny ones
    have none.
    """
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
