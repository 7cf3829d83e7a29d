"""The memory freed, by step: a report of its own, and parts of other reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ipygpumem.records import FREE_HEAP_PAGES, OUTSIDE, FreeingStep
from ipygpumem.report import devices
from ipygpumem.report.devices import device_label
from ipygpumem.report.layout import Report
from ipygpumem.report.words import clean
from ipygpumem.units import MIB, format_bytes


def freed_report(
    title: str, steps: Sequence[FreeingStep], freed: Mapping[str, int], notes: Sequence[str] = ()
) -> Report:
    """Return the report of memory that a command has freed.

    Args:
        title: begins the headline, such as ``freed``.
        steps: the steps that freed it.
        freed: the bytes freed on each device.
        notes: further lines.
    """
    sizes = []
    for device, size in freed.items():
        if device not in OUTSIDE or size >= MIB:
            label = _freed_label(device, size, steps)
            sizes.append(f"{device_label(device)} {label}")
    headline = f"{title}: {', '.join(sizes) or 'nothing'}"
    lines = []
    by_step = ", ".join(step_shares(steps, freed))
    if by_step:
        lines.append(f"freed by: {by_step}")
    lines += [*notes, *failures_of(steps)]
    return Report("note", headline, tuple(lines), records=steps)


def _freed_label(device: str, size: int, steps: Iterable[FreeingStep]) -> str:
    """Return the bytes freed on a device in words. If no tensor was freed, but memory that the
    allocator had reserved, say that.
    """
    reserved_bytes = 0
    for step in steps:
        reserved_bytes += max(0, step.freed_reserved.get(device, 0))
    if reserved_bytes and size <= 0:
        return f"reserved {format_bytes(reserved_bytes)}"
    return format_bytes(max(0, size))


_TINY_BYTES = MIB // 10
"""Minimum bytes of a step to show."""
_SMALL_TRIM_BYTES = 4 * MIB
"""Minimum bytes of free heap pages to show: any code leaves some."""


def step_shares(steps: Iterable[FreeingStep], total: Mapping[str, int]) -> list[str]:
    """Return the memory freed by each step, such as ``names (RAM 1 GiB)``; then by processes that
    ended; last, the part of the total that no step has freed.

    Steps that freed less than 1 % are one item together, and tiny ones are left out.

    Args:
        steps: the steps that freed memory.
        total: the bytes freed on each device.
    """
    shares = _FreedShares(total)
    unexplained = Counter(total)
    for step in steps:
        freed: dict[str, int] = {}
        for device, size in step.freed.items():
            if size > 0:
                # A later step may take some of it again, such as a page for its own work.
                freed[device] = min(size, unexplained[device])
                unexplained[device] -= freed[device]
        for device, size in step.freed_reserved.items():
            freed[f"{device_label(device)} reserved"] = size
        is_noise = step.name == FREE_HEAP_PAGES and freed.get("cpu", 0) < _SMALL_TRIM_BYTES
        if not is_noise:
            shares.add(step.name, freed)
    # Processes may end by themselves, such as the workers of a data loader that was deleted.
    freed_by_ended_processes = unexplained.pop("children", 0)
    if freed_by_ended_processes >= _TINY_BYTES:
        shares.texts.append(f"processes that ended ({format_bytes(freed_by_ended_processes)})")
    shares.add("smaller steps", dict(shares.small))
    shares.add("allocators by themselves", unexplained)
    return shares.texts


class _FreedShares:
    """Collects the shares of freed memory that are large enough to be shown.

    Args:
        total: the bytes freed on each device.

    Attributes:
        texts: the shares that are shown.
        small: the bytes of the smaller ones by device.
    """

    def __init__(self, total: Mapping[str, int]) -> None:
        self._total = total
        self.texts: list[str] = []
        self.small = Counter[str]()

    def add(self, name: str, sizes: Mapping[str, int]) -> None:
        """Add the bytes that one step freed on each device: as a text, or to the small ones."""
        large: dict[str, int] = {}
        for device, size in sizes.items():
            hundredth = self._total.get(device, 0) // 100
            if size >= max(_TINY_BYTES, hundredth):
                large[device] = size
            else:
                self.small[device] += size
        if large:
            self.texts.append(f"{name} ({sizes_or_nothing(large)})")


def freed_reserved(steps: Iterable[FreeingStep]) -> Counter[str]:
    """Return the memory that allocators had reserved and that steps have returned to each
    device.
    """
    reserved = Counter[str]()
    for step in steps:
        reserved.update(step.freed_reserved)
    return reserved


def failures_of(steps: Iterable[FreeingStep]) -> list[str]:
    """Return a line for each step that failed."""
    lines = []
    for step in steps:
        if step.error:
            error = clean(step.error)
            lines.append(f"{step.name}: {error}")
    return lines


def sizes_or_nothing(by_device: Mapping[str, int]) -> str:
    """Return the bytes on each device in words."""
    return ", ".join(devices.sizes(by_device)) or "nothing"
