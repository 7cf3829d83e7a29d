"""Stores the traces of one shell or script with the meter that measures them; measures the cost of
a context.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from ipygpumem.errors import DeviceError, describe_error, not_installed
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import has_mps, loaded_torch
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.nvml import has_driver
from ipygpumem.probes.outside import OutsideProbe
from ipygpumem.probes.pools import finder
from ipygpumem.records import TraceRecord

_MOST = 10_000
_BUILT_FOR = re.compile(r"^(cuda|hip|rocm|xpu)\b[^=\n]*= *(.+)$", re.MULTILINE)
"""Lines of torch's ``version.py``: the version of each platform that it was built for, or ``None``.
"""


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
    """Create the context now, and return its cost, labelled as the device; None without an
    accelerator.
    """
    if importlib.util.find_spec("torch") is None:
        raise not_installed(DeviceError, "preload needs", "torch")
    if why_no_accelerator():
        return None
    torch: Any = importlib.import_module("torch")
    name = next((name for name in ("cuda", "xpu", "mps") if _is_available(torch, name)), None)
    if name is None:
        return None
    started_at = time.time()
    started = time.perf_counter()
    with meter.span() as span:
        try:
            torch.ones(1, device=name).add_(1).cpu()
        except RuntimeError as error:
            raise DeviceError(f"{name} cannot be used ({describe_error(error)})") from None
        return TraceRecord(name, started_at, time.perf_counter() - started, None, span.stop())


def why_no_accelerator() -> str:
    """Return why there is no accelerator, without importing torch, which takes long; empty if torch
    must be asked.
    """
    if loaded_torch() is not None or sys.platform == "darwin":
        spec = None
    else:
        spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        kinds = {kind for kind, value in _BUILT_FOR.findall(text) if value != "None"}
        if not kinds and _BUILT_FOR.search(text):
            return "this build of torch has no accelerator"
        if kinds == {"cuda"} and not has_driver():
            return "there is no NVIDIA driver here"
    return ""


def _is_available(torch: Any, name: str) -> bool:
    module = getattr(torch, name, None)
    if name == "mps":
        return has_mps(torch)
    return module is not None and bool(module.is_available())
