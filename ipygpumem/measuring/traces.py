"""Keeps the traces of one shell, or of a script: the meter that measures them, and those that are over."""

from __future__ import annotations

import functools
from collections import deque

from ipygpumem.measuring.meter import Meter
from ipygpumem.model import TraceRecord
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import add_installed, finder

_MOST = 10_000


class Traces:
    """What measures traces, and the records of those that are over.

    Args:
        meter: measures them.
        most: records that are kept; the oldest are dropped.
    """

    def __init__(self, meter: Meter, most: int = _MOST) -> None:
        self.meter = meter
        self.finished: deque[TraceRecord] = deque(maxlen=most)


@functools.cache
def of_script() -> Traces:
    """Return the traces of this process outside a notebook.

    Their meter stays: opening one takes longer than a trace may, and while it is there torch's own
    ``max_memory_allocated()`` still gives the peaks that the meter has reset.
    """
    meter = Meter([HostProbe()], find_more=finder())
    add_installed(meter.add, meter.failures)
    return Traces(meter)
