"""Makes the bars of devices: decides how long each bar is, and divides the memory in use into
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ipygpumem.records import Usage
from ipygpumem.report.devices import device_label
from ipygpumem.report.layout import LEAST_SHARE, Bar
from ipygpumem.units import format_bytes, rounded_up


class Scales:
    """The lengths of the devices' bars in a session: each fits the device's highest use so far, so
    that changes are visible.
    """

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}
        """The highest use of each device in bytes."""

    def lengthen_for(self, usages: Iterable[Usage]) -> None:
        """Lengthen the bars, if need be, so that the memory of ``usages`` fits."""
        for usage in usages:
            highest = self._highest.get(usage.device, 0)
            self._highest[usage.device] = max(highest, sum(_pieces_of(usage)))

    def bar(self, usage: Usage) -> Bar | None:
        """Return the bar of a device's usage. Return None if the device's total is unknown, or if
        the memory that was kept, freed or needed temporarily is too little to see: less than 1 % of
        the bar.
        """
        total = usage.total_bytes
        if not total:
            return None
        pieces = _pieces_of(usage)
        length = min(total, self._length(usage.device, sum(pieces)))
        if max(pieces.kept, pieces.peak) < LEAST_SHARE * length:
            return None
        in_use = format_bytes(pieces.before + pieces.kept)
        label = f"{device_label(usage.device)}: {in_use} of {format_bytes(total)} in use"
        if length < total:
            label += f"; the bar ends at {format_bytes(length)}"
        grain = rounded_up(length, 1024) // 1024  # so that equal-looking bars are equal
        before, kept, peak = [rounded_up(size, grain) for size in pieces]
        return Bar(label, length, before, kept, peak, is_whole=length == total)

    def _length(self, device: str, size_bytes: int) -> int:
        """Return the bytes for which a device's bar stands: its highest use so far, rounded up to
        1, 1.5, 2, 3, 4, 6, ... GiB, so that the length seldom changes.

        Args:
            device: the device.
            size_bytes: its use now.
        """
        highest = max(size_bytes, self._highest.get(device, 0))
        with_margin = highest + highest // 20
        step = 1 << max(0, with_margin.bit_length() - 2)
        return rounded_up(with_margin, step) or 1


class _Pieces(NamedTuple):
    """The bytes of the pieces of a bar."""

    before: int
    """In use before, and still."""
    kept: int
    """Kept in addition."""
    peak: int
    """The peak above both."""


def _pieces_of(usage: Usage) -> _Pieces:
    """Return the pieces of a device's bar.

    If they are known, other processes, the context and the allocator's cache count as in use
    before. All pieces together are the use of the whole device at the peak.
    """
    kept = max(0, usage.delta_bytes)
    peak = max(0, usage.peak_bytes - usage.after_bytes)
    before = usage.after_bytes - kept
    if usage.used_bytes is not None:
        of_this_process = usage.reserved_bytes
        if of_this_process is None:
            of_this_process = usage.after_bytes
        not_ours = usage.used_bytes - of_this_process
        # The peak lay in the allocator's cache, unless that has been freed.
        before = max(usage.used_bytes - kept - peak, not_ours + before)
    return _Pieces(before, kept, peak)
