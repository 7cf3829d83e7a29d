"""Names a device's figures of ``%%peak``, for its report and its picture."""

from __future__ import annotations

from ipygpumem.extras.peak.host import ALLOCATED
from ipygpumem.extras.peak.records import DevicePeak
from ipygpumem.report.devices import device_label
from ipygpumem.units import MIB, format_bytes, format_seconds

LEAST_MISSED_BYTES = 8 * MIB
"""Less is not shown: pages of loaded libraries, which memray does not count."""


def title(device: DevicePeak) -> str:
    """Return a device's name, such as ``cuda:0``.

    If torch is loaded, RAM has two records: ``RAM of tensors`` and ``RAM outside torch``.
    """
    label = device_label(device.device)
    if device.device != "cpu":
        return label
    if device.source == "storages":
        return f"{label} of tensors"
    if device.source == "memray":
        is_without_torch = any(row.role == ALLOCATED for row in device.rows)
        return f"allocated {label}" if is_without_torch else f"{label} outside torch"
    return label


def headline(device: DevicePeak) -> str:
    """Return a device's bytes at the moment, and when that was."""
    moment = "highest with"
    if device.ran_out:
        moment = "out of memory with"
    if device.missed_bytes >= LEAST_MISSED_BYTES:
        moment = "with most reserved:"  # not the highest moment of RAM
    words = [title(device), moment, format_bytes(device.size_bytes)]
    if device.is_bound:
        words.append("at most")
    if device.at_seconds is not None:
        words.append(f"after {format_seconds(device.at_seconds)}")
    return " ".join(words)
