"""``ipygpumem.preload`` and ``register_probe``."""

from __future__ import annotations

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import ProbeError
from ipygpumem.introspect import type_name
from ipygpumem.measuring import traces
from ipygpumem.model import TraceRecord
from ipygpumem.probes import Probe
from ipygpumem.probes.pools import PluginProbe


def preload() -> TraceRecord | None:
    """Create the context of torch's accelerator now, and return what that costs; None where torch sees none.

    Raises:
        DeviceError: torch is not installed, or its accelerator does not work.
    """
    return traces.preload(current_traces().meter)


def register_probe(name: str, probe: Probe) -> None:
    """Measure with ``probe``, too, from now on: in this notebook, or in this script's traces.

    It needs a method ``read(*, detail, peak)`` that returns ``ipygpumem.model.Reading`` tuples, and may have
    ``rearm()``, ``close()`` and ``sampled``. It is read at the start and end of each cell, and dropped with a warning
    if that takes more than half a second. It replaces a probe that was registered by the same name.

    Args:
        name: what its devices are called: ``tpu``, or ``tpu:0`` and so on.
        probe: what measures.

    Raises:
        ProbeError: the name is none for a device, or the first reading failed or makes no sense.
    """
    if not callable(getattr(probe, "read", None)):
        raise ProbeError(f"a probe needs a method read(*, detail, peak), which {type_name(probe)} lacks")
    plugin = PluginProbe(name, probe)
    plugin.read(detail=True)
    current_traces().meter.add(plugin)
