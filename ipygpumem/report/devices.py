"""Words for devices and their memory: ``RAM 1 MiB``; and the devices that are worth a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ipygpumem.records import OUTSIDE, Usage
from ipygpumem.report.words import clean_name
from ipygpumem.units import MIB, format_bytes, format_change

_LABELS = {"cpu": "RAM", "shm": "shared memory", "children": "child processes"}


def device_label(device: str) -> str:
    """Return the display name of a device: the host is ``RAM``."""
    return _LABELS.get(device, device)


def accelerator(device: str) -> str:
    """Return a device's name for the column of a table; an empty text for the host, where most
    objects are.
    """
    return "" if device == "cpu" else clean_name(device)


def is_worth_a_row(device: str, size_bytes: int) -> bool:
    """Return True if the memory of a device is worth a row. Less than a MiB of shared memory or of
    child processes is not: semaphores of libraries take a few KiB, which no user asks about.
    """
    return device not in OUTSIDE or abs(size_bytes) >= MIB


def is_worth_reporting(usage: Usage) -> bool:
    """Return True for the host, and for any other device that is or was in use."""
    most_bytes = max(usage.peak_bytes, usage.before_bytes)
    if usage.device in OUTSIDE:
        return is_worth_a_row(usage.device, most_bytes)
    return usage.device == "cpu" or most_bytes > 0 or bool(usage.reserved_bytes)


def sizes(by_device: Mapping[str, int], form: Callable[[int], str] = format_bytes) -> list[str]:
    """Return a text such as ``RAM 1 MiB`` for each device that is worth a row.

    Args:
        by_device: bytes by device.
        form: formats the bytes; ``format_change`` adds a sign.
    """
    texts = []
    for device, size in by_device.items():
        if is_worth_a_row(device, size):
            texts.append(f"{device_label(device)} {form(size)}")
    return texts


def size_text(size: int | None) -> str:
    """Return bytes with their unit; an empty text if they are unknown."""
    if size is None:
        return ""
    return format_bytes(size)


def size_or_unknown(size: int | None) -> str:
    """Return bytes with their unit, or "unknown"."""
    return size_text(size) or "unknown"


def peak_label(usage: Usage) -> str:
    """Return the peak above the start, such as ``+1 MiB``. A sampled one is marked, because it may
    miss the highest point.
    """
    return format_change(usage.peak_delta_bytes) + sampled_mark(usage)


def sampled_mark(usage: Usage) -> str:
    """Return the mark of a sampled peak; empty for an exact one."""
    if usage.method == "sampled":
        return " (sampled)"
    return ""
