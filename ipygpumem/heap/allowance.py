"""Limits the CPU time and the memory of walks for which the freeing of memory waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from ipygpumem.errors import GpuMemError
from ipygpumem.interrupts import is_from_signal
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import MIB

LISTING_SECONDS = 0.5
"""CPU time for listing the objects that an error keeps alive."""
SPARE_BYTES = 32 * MIB
"""Memory that must stay available: a walk takes a few MiB between two looks."""
_SECONDS_BETWEEN_LOOKS = 0.01
"""Seconds between two looks at the memory that is available, each of which takes half a
millisecond.
"""


class AllowanceError(GpuMemError):
    """Work was stopped, because its allowance was spent."""


class Allowance:
    """CPU time of this thread, and memory, that some walks may take together.

    A walk asks ``is_spent`` before each chunk of objects, and stops if it is. A spent allowance
    stays spent.

    Args:
        seconds: CPU time from now on.
        clock: returns the CPU time used so far.
        available: returns the bytes of host memory that can still be allocated.
        whole: the allowance of which this one is a share.

    Attributes:
        reason: ``time`` or ``memory`` once it is spent.

    >>> Allowance(0).is_spent()
    True
    """

    def __init__(
        self,
        seconds: float = LISTING_SECONDS,
        *,
        clock: Callable[[], float] = time.thread_time,
        available: Callable[[], int] = available_bytes,
        whole: Allowance | None = None,
    ) -> None:
        self.reason: Literal["time", "memory", ""] = ""
        self._clock = clock
        self._available = available
        self._whole = whole
        if whole is None and self._is_memory_short():
            self.reason = "memory"
        started = clock()  # the first look at the memory may have imported psutil
        self._end = started + seconds
        self._next_look = started + _SECONDS_BETWEEN_LOOKS

    def is_spent(self) -> bool:
        """Return True if the time is over, or so little memory is available that a walk would take
        the last of it. It also sets ``reason``.
        """
        if self.reason:
            return True
        now = self._clock()
        if now >= self._end:
            self.reason = "time"
        elif self._whole is not None:
            if self._whole.is_spent():
                self.reason = self._whole.reason
        elif now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            if self._is_memory_short():
                self.reason = "memory"
        return bool(self.reason)

    def _is_memory_short(self) -> bool:
        """Return True if too little memory is available; False if that is unknown, as where
        ``open`` was replaced.
        """
        try:
            return self._available() < SPARE_BYTES
        except Exception as error:
            if is_from_signal(error):
                raise
            return False

    def share(self, parts: int) -> Allowance:
        """Return an allowance of one of ``parts`` equal parts of the remaining time, so that one
        object cannot take it all: ``share(3)`` has a third of it.

        It is also spent once this one is.
        """
        remaining_seconds = max(0.0, self._end - self._clock())
        return Allowance(
            remaining_seconds / parts, clock=self._clock, available=self._available, whole=self
        )

    def check(self, *_: object) -> None:
        """Stop work whose result is needed as a whole; serves as a progress callback.

        Raises:
            AllowanceError: the allowance is spent.
        """
        if self.is_spent():
            raise AllowanceError(f"stopped to save {self.reason}")
