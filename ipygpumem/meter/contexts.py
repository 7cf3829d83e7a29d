"""Creates the context of torch's accelerator, and measures its cost."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
from pathlib import Path
from typing import Any

from ipygpumem.errors import DeviceError, describe_error, not_installed
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.accelerators import has_mps, loaded_torch
from ipygpumem.probes.nvml import has_driver
from ipygpumem.records import TraceRecord

_BUILT_FOR = re.compile(r"^(cuda|hip|rocm|xpu)\b[^=\n]*= *(.+)$", re.MULTILINE)
"""Lines of torch's ``version.py``: the version of each platform that it was built for, or ``None``.
"""


def create_context(meter: Meter) -> TraceRecord | None:
    """Create the context now, and return its cost, labelled as the device; None without an
    accelerator.
    """
    if importlib.util.find_spec("torch") is None:
        raise not_installed(DeviceError, "preload needs", "torch")
    if why_no_accelerator():
        return None
    torch: Any = importlib.import_module("torch")
    name = _available_backend(torch)
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
        return ""
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


def _available_backend(torch: Any) -> str | None:
    """Return the first of torch's backends that works here."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    if has_mps(torch):
        return "mps"
    return None
