"""Stores the traces of one shell or script with the meter that measures them; measures the cost of a context."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections import deque
from typing import Any

from ipygpumem.errors import DeviceError, describe_error
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import has_mps
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.pools import finder
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
    return Traces(Meter([HostProbe(), OutsideProbe()], find_more=finder()))


def preload(meter: Meter) -> TraceRecord | None:
    """Create the context now, and return its cost, labelled as the device; None without an accelerator."""
    if importlib.util.find_spec("torch") is None:
        raise DeviceError("preload needs torch, which is not installed")
    torch: Any = importlib.import_module("torch")
    name = next((name for name in ("cuda", "xpu", "mps") if _is_available(torch, name)), None)
    if name is None:
        return None
    started_at, started, span = time.time(), time.perf_counter(), meter.start()
    try:
        torch.ones(1, device=name).add_(1).cpu()
    except RuntimeError as error:
        meter.drop(span)
        raise DeviceError(f"{name} cannot be used ({describe_error(error)})") from None
    return TraceRecord(name, started_at, time.perf_counter() - started, None, meter.stop(span))


def _is_available(torch: Any, name: str) -> bool:
    module = getattr(torch, name, None)
    return has_mps(torch) if name == "mps" else module is not None and bool(module.is_available())
