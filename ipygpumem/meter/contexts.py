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
"""A line of torch's ``version.py`` about a platform: the version that torch was built for, or
``None``, as in ``cuda: Optional[str] = '12.4'`` and ``hip: Optional[str] = None``.
"""


def create_context(meter: Meter) -> TraceRecord | None:
    """Create the context of torch's accelerator now, and return its cost under the name of the
    device.

    Imports torch, unless it is clear without it that there is no accelerator; None if there is
    none.

    Raises:
        DeviceError: torch is not installed, or the device cannot be used.
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
            # The first kernel loads the code of all kernels, which counts as part of the context;
            # the copy waits for it.
            torch.ones(1, device=name).add_(1).cpu()
        except RuntimeError as error:
            raise DeviceError(f"{name} cannot be used ({describe_error(error)})") from None
        return TraceRecord(
            name,
            started_at=started_at,
            duration_seconds=time.perf_counter() - started,
            error=None,
            usages=span.stop(),
        )


def why_no_accelerator() -> str:
    """Return the reason why there is no accelerator; empty if only torch itself can say.

    Importing torch takes seconds, so this reads the file in which torch states its platforms.
    """
    is_loaded = loaded_torch() is not None
    if is_loaded or sys.platform == "darwin":  # on a Mac every build supports Apple's GPU
        return ""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        lines = _BUILT_FOR.findall(text)
        platforms = {platform for platform, version in lines if version != "None"}
        if lines and not platforms:
            return "this build of torch has no accelerator"
        if platforms == {"cuda"} and not has_driver():
            return "there is no NVIDIA driver here"
    return ""


def _available_backend(torch: Any) -> str | None:
    """Return the device type of torch's first backend that works here; None if none does."""
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    if has_mps(torch):
        return "mps"
    return None
