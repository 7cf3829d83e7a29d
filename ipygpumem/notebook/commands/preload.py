"""``%gpumem preload``: the accelerator's context is created now."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

from ipygpumem.errors import ExperimentError, said
from ipygpumem.model import Usage
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.layout import Report, note
from ipygpumem.units import format_bytes, format_change, format_seconds


def preload(notebook: Notebook, options: Options) -> list[Report]:
    """Create the context of torch's accelerator now, so that no cell pays for it, and say what it costs.

    Raises:
        ExperimentError: torch is not installed, or its accelerator does not work.
    """
    if importlib.util.find_spec("torch") is None:
        raise ExperimentError("%gpumem preload needs torch, which is not installed")
    torch: Any = importlib.import_module("torch")
    name = next((name for name in ("cuda", "xpu", "mps") if _is_available(torch, name)), None)
    if name is None:
        return [note("torch sees no accelerator here: there is nothing to preload")]
    started = time.perf_counter()
    span = notebook.tools.meter.start()
    try:
        torch.ones(1, device=name).add_(1).cpu()
    except RuntimeError as error:
        notebook.tools.meter.stop(span)
        raise ExperimentError(f"{name} cannot be used ({said(error)})") from None
    costs = map(_cost, notebook.tools.meter.stop(span))
    seconds = format_seconds(time.perf_counter() - started)
    return [note(" · ".join([f"{name} is ready", seconds, *filter(None, costs)]))]


def _is_available(torch: Any, name: str) -> bool:
    module = getattr(torch.backends, "mps", None) if name == "mps" else getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def _cost(usage: Usage) -> str:
    if usage.device == "cpu":
        return f"RAM {format_change(usage.delta_bytes)}"
    return "" if usage.used_bytes is None else f"{usage.device} {format_bytes(usage.used_bytes)} used by all"
