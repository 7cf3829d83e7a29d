"""What pictures read out of records: which devices there are, what a cell cost on one of them, how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipygpumem.errors import PlotError
from ipygpumem.model import CellRecord, Usage
from ipygpumem.reports.layout import clean, device_label

_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError", "_ArrayMemoryError"})


def devices_of(usages: Iterable[Usage], wanted: str | None = None) -> list[str]:
    """Return the devices that were in use, the host first.

    Args:
        usages: of any number of cells.
        wanted: only ``cuda:0``, or all that are ``cuda``; ``RAM`` is the host.

    Raises:
        PlotError: none of the devices is the wanted one.
    """
    found = {"cpu": True}
    for usage in usages:
        if usage.peak_bytes or usage.before_bytes or usage.reserved_bytes:
            found[usage.device] = True
    if wanted is None:
        return list(found)
    chosen = [device for device in found if wanted in (device, device.partition(":")[0], device_label(device))]
    if not chosen:
        there = ", ".join(clean(device_label(device)) for device in found)
        raise PlotError(f"device {clean(wanted)!r} was not in use; there are: {there}")
    return chosen


def usage_on(usages: Sequence[Usage], device: str) -> Usage | None:
    """Return what happened on ``device``; None where it was not there yet."""
    return next((usage for usage in usages if usage.device == device), None)


def ran_out(cell: CellRecord) -> bool:
    """Return whether the cell ended with an out-of-memory error."""
    return cell.error in _OUT_OF_MEMORY or (cell.recovery is not None and cell.recovery.kind == "oom")


def cell_name(cell: CellRecord) -> str:
    """Return how pictures call a cell: by its number."""
    return "·" if cell.execution_count is None else str(cell.execution_count)
