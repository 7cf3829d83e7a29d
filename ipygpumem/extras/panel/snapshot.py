"""The figures of a panel at one moment, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ipygpumem.inventory.names.top import NamedSize
from ipygpumem.probes.nvml import CardLoad
from ipygpumem.records import Reading
from ipygpumem.report.devices import device_label, is_worth_a_row
from ipygpumem.report.words import clean_name
from ipygpumem.units import KIB

_STEP = 64 * KIB
"""Sizes are multiples of this, less than the last digit shown: smaller changes send no message."""
_NAMES_SHOWN = 5
_LEAST_SHARE = 0.01
"""Smallest share of a name's bytes for which its device is shown: a model on a card has some KiB in
RAM.
"""

Figures = dict[str, int]
"""Bytes by the name of a figure: own, allocated, reserved, used, total; and ``load`` in percent."""


def devices(readings: Iterable[Reading], cards: Mapping[int, CardLoad]) -> dict[str, Figures]:
    """Return each device's known figures: those of the process by device, and the driver's of each
    visible card.

    A card that the process does not use yet has only the driver's.
    """
    figures_by_device: dict[str, Figures] = {}
    for reading in readings:
        if not is_worth_a_row(reading.device, reading.current_bytes):
            continue
        sizes = {"reserved": reading.reserved_bytes, "total": reading.total_bytes}
        if reading.reserved_bytes is None and reading.used_bytes is None:  # memory without a pool
            sizes["own"] = reading.current_bytes
        else:
            sizes["allocated"] = reading.current_bytes
            sizes["used"] = reading.used_bytes
        figures_by_device[device_label(reading.device)] = _rounded(sizes)
    for index, card in cards.items():
        figures = figures_by_device.setdefault(f"cuda:{index}", {})
        figures |= _rounded({"used": card.whole.used_bytes, "total": card.whole.total_bytes})
        if card.utilization is not None:
            figures["load"] = card.utilization
    return figures_by_device


def _rounded(sizes: Mapping[str, int | None]) -> Figures:
    """Return the sizes that are known, rounded."""
    return {name: round(size / _STEP) * _STEP for name, size in sizes.items() if size is not None}


def names(rows: Sequence[NamedSize]) -> list[dict[str, Any]]:
    """Return the largest names with their sizes, devices, and the certainty of the sizes."""
    return [_name_entry(row) for row in rows[:_NAMES_SHOWN]]


def _name_entry(row: NamedSize) -> dict[str, Any]:
    """Return the entry of one name."""
    least_bytes = row.size_bytes * _LEAST_SHARE
    devices = [device for device, size in row.device_bytes.items() if size >= least_bytes]
    return {
        "name": clean_name(row.name),
        "size": row.size_bytes,
        "at_least": row.is_at_least,
        "devices": " + ".join(map(device_label, devices)),
    }
