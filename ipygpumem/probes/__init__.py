"""Reads memory: one file for each kind. A probe returns numbers and never prints."""

from __future__ import annotations

from typing import Protocol

from ipygpumem.model import Reading


class Probe(Protocol):
    """One source of memory figures, with a high-water mark that can be rearmed."""

    @property
    def sampled(self) -> bool:
        """Whether peaks are only seen by reading often, for want of a high-water mark."""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return each device's memory now and its peak since the last ``rearm``.

        Without ``peak`` that may be left at the current value. With ``detail`` figures that cost more than microseconds
        come too (totals of every device, other processes). A device that the user's code has not used yet is left out.
        """

    def glance(self) -> tuple[Reading, ...]:
        """Return each device's memory now, without a peak, from any thread: it never waits for a device."""
        return self.read()

    def rearm(self) -> None:
        """Begin a new peak: from now on ``peak_bytes`` counts from the current value."""
        return

    def close(self) -> None:
        """Give back what the probe holds: descriptors, and functions that it wrapped."""
        return
