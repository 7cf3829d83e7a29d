"""Creates the context of torch's accelerator, and measures what that costs."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

from ipygpumem.errors import DeviceError, said
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import TraceRecord


def preload(meter: Meter) -> TraceRecord | None:
    """Create the context now, and return what it costs, labelled as the device; None where torch sees no accelerator.

    Raises:
        DeviceError: torch is not installed, or its accelerator does not work.
    """
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
        raise DeviceError(f"{name} cannot be used ({said(error)})") from None
    return TraceRecord(name, started_at, time.perf_counter() - started, None, meter.stop(span))


def _is_available(torch: Any, name: str) -> bool:
    module = getattr(torch.backends, "mps", None) if name == "mps" else getattr(torch, name, None)
    return module is not None and bool(module.is_available())
