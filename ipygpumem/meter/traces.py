"""Stores the traces of one shell or script with the meter that measures them."""

from __future__ import annotations

import functools
from collections import deque

from ipygpumem.meter.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.pools import finder_of_probes
from ipygpumem.records import TraceRecord

_HISTORY_LENGTH = 10_000
"""Number of finished traces that a script keeps."""


class Traces:
    """The meter for traces, and the records of the last ``history_length`` finished traces."""

    def __init__(self, meter: Meter, history_length: int = _HISTORY_LENGTH) -> None:
        self.meter = meter
        self.finished: deque[TraceRecord] = deque(maxlen=history_length)
        """The oldest first."""


@functools.cache
def of_script() -> Traces:
    """Return the traces of this process outside a notebook.

    Their meter stays open: opening one takes longer than a trace may, and while it is open, torch's
    ``max_memory_allocated()`` still returns the peaks that the meter has reset.
    """
    return Traces(Meter([HostProbe(), OutsideProbe()], find_more=finder_of_probes()))
