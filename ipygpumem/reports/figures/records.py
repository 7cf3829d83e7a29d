"""Reads what pictures need out of records: which devices there are, and how a cell ended."""

from __future__ import annotations

from collections.abc import Iterable

from ipygpumem.errors import PlotError
from ipygpumem.model import CellRecord, Usage, devices_of
from ipygpumem.reports.layout import clean, device_label, in_use

_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError", "_ArrayMemoryError"})


def devices_in(usages: Iterable[Usage], wanted: str | None = None) -> list[str]:
    """Return the devices that were in use, the host first; none but the ``wanted`` one (``PlotError``)."""
    return chosen(["cpu", *devices_of(filter(in_use, usages))], wanted, "was not in use")


def chosen(devices: Iterable[str], wanted: str | None, why_not: str) -> list[str]:
    """Return the devices that ``wanted`` names: ``RAM``, ``cuda:0``, ``cuda`` for all of its kind; None names all.

    Raises:
        PlotError: it names none of them.
    """
    there = list(dict.fromkeys(devices))
    found = [name for name in there if wanted in (None, name, name.partition(":")[0], device_label(name))]
    if not found:
        names = ", ".join(clean(device_label(device)) for device in there) or "none"
        raise PlotError(f"device {clean(str(wanted))!r} {why_not}; there are: {names}")
    return found


def ran_out(cell: CellRecord) -> bool:
    """Return whether the cell ended with an out-of-memory error."""
    return cell.error in _OUT_OF_MEMORY or (cell.recovery is not None and cell.recovery.kind == "oom")


def cell_name(cell: CellRecord) -> str:
    """Return how pictures call a cell: by its number."""
    return "·" if cell.execution_count is None else str(cell.execution_count)
