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
    """Return the report of memory freed by hand."""
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
    """Return the bytes freed on a device; if no tensor was freed, the reserved memory."""
    reserved = 0
    for step in steps:
        reserved += max(0, step.freed_reserved.get(device, 0))
    if reserved and size <= 0:
        return f"reserved {format_bytes(reserved)}"
    return format_bytes(max(0, size))


_TINY_BYTES = MIB // 10
"""Less than that in a step is not shown."""
_SMALL_TRIM_BYTES = 4 * MIB
"""Less than that, of free heap pages, is not shown: any code leaves some."""


def step_shares(steps: Iterable[FreeingStep], total: Mapping[str, int]) -> list[str]:
    """Return each step's share of the ``total`` freed on each device, and the remainder.

    Shares below 1 % are one item together, and tiny ones are left out.
    """
    shares = _Shares(total)
    remaining = Counter(total)
    for step in steps:
        freed: dict[str, int] = {}
        for device, size in step.freed.items():
            if size > 0:
                # A later step may take some of it again, such as a page for its own work.
                freed[device] = min(size, remaining[device])
                remaining[device] -= freed[device]
        for device, size in step.freed_reserved.items():
            freed[f"{device_label(device)} reserved"] = size
        is_noise = step.name == FREE_HEAP_PAGES and freed.get("cpu", 0) < _SMALL_TRIM_BYTES
        if not is_noise:
            shares.add(step.name, freed)
    of_ended_processes = remaining.pop("children", 0)
    if of_ended_processes >= _TINY_BYTES:
        shares.texts.append(f"processes that ended ({format_bytes(of_ended_processes)})")
    shares.add("smaller steps", dict(shares.small))
    shares.add("allocators by themselves", remaining)
    return shares.texts


class _Shares:
    """The shares that are large enough to be shown, as texts, and the sum of the rest."""

    def __init__(self, total: Mapping[str, int]) -> None:
        self._total = total
        self.texts: list[str] = []
        self.small = Counter[str]()

    def add(self, name: str, sizes: Mapping[str, int]) -> None:
        """Add the bytes that one step freed on each device."""
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
    """Return the reserved memory that steps freed on each device."""
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
