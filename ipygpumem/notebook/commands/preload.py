"""``%gpumem preload``: the accelerator's context is created now."""

from __future__ import annotations

from ipygpumem.measuring.preloading import preload as create
from ipygpumem.model import Usage
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.reports.layout import Report, note
from ipygpumem.units import format_bytes, format_change, format_seconds


def preload(notebook: Notebook, options: Options) -> list[Report]:
    """Create the context of torch's accelerator now, so that no cell pays for it, and say what it costs.

    Raises:
        DeviceError: torch is not installed, or its accelerator does not work.
    """
    record = create(notebook.tools.meter)
    if record is None:
        return [note("torch sees no accelerator here: there is nothing to preload")]
    costs = map(_cost, record.usages)
    return [
        note(" · ".join([f"{record.label} is ready", format_seconds(record.duration_seconds), *filter(None, costs)]))
    ]


def _cost(usage: Usage) -> str:
    if usage.device == "cpu":
        return f"RAM {format_change(usage.delta_bytes)}"
    return "" if usage.used_bytes is None else f"{usage.device} {format_bytes(usage.used_bytes)} used by all"
