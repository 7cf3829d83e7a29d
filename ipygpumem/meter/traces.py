"""Stores the traces of one shell or script with the meter that measures them."""

from __future__ import annotations

import functools
from collections import deque

from ipygpumem.meter.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.pools import finder_of_probes
from ipygpumem.records import TraceRecord

_MOST = 10_000


class Traces:
    """The meter for traces, and the records of the ``most`` last finished ones."""

    def __init__(self, meter: Meter, most: int = _MOST) -> None:
        self.meter = meter
        self.finished: deque[TraceRecord] = deque(maxlen=most)


@functools.cache
def of_script() -> Traces:
    """Return the traces of this process outside a notebook.

    Their meter stays open: opening one takes longer than a trace may, and while it is open, torch's
    ``max_memory_allocated()`` still returns the peaks that the meter has reset.
    """
    return Traces(Meter([HostProbe(), OutsideProbe()], find_more=finder_of_probes()))
