"""``ipygpumem.memory``, ``preload``, ``allocate``, ``leave_free`` and ``register_probe``."""

from __future__ import annotations

from ipygpumem.api.shell import current_traces
from ipygpumem.errors import ProbeError
from ipygpumem.fitting import filling
from ipygpumem.fitting.filling import Filler
from ipygpumem.introspect import type_name
from ipygpumem.measuring import traces
from ipygpumem.model import TraceRecord
from ipygpumem.probes import Probe, device_memory
from ipygpumem.probes.device_memory import DeviceMemory
from ipygpumem.probes.pools import PluginProbe
from ipygpumem.units import checked_bytes


def memory(device: object = "cpu") -> DeviceMemory:
    """Return how much memory a device has, has free, and has in use. It makes no CUDA context.

    Args:
        device: ``cpu``, ``cuda:0``, a number, or a ``torch.device``.

    Raises:
        DeviceError: there is no such device.
    """
    return device_memory.read(device_memory.checked_device(device))


def preload() -> TraceRecord | None:
    """Create the context of torch's accelerator now, and return what that costs; None where torch sees none.

    Raises:
        DeviceError: torch is not installed, or its accelerator does not work.
    """
    return traces.preload(current_traces().meter)


def allocate(size: int | str, device: object = "cuda") -> Filler:
    """Hold ``size`` bytes of a device until ``free()`` or the end of ``with``; keep what is returned.

    On a CUDA device it is a tensor, and the context is created if there is none.

    Args:
        size: bytes, or a text such as ``"512 MiB"``.
        device: as for ``memory``.

    Raises:
        DeviceError: the device is not there, or has not so much.
        UnitError: ``size`` is not a size.
    """
    return filling.hold(checked_bytes(size), device_memory.checked_device(device))


def leave_free(size: int | str, device: object = "cuda") -> Filler:
    """Leave ``size`` bytes to be had on a device, until ``free()`` or the end of ``with``; keep what is returned.

    On a CUDA device torch's cache is emptied and the rest is held. What stays free is ``size``, rounded up to the 2 MiB
    that torch's allocator asks for. On the host nothing is filled: this process gets a limit on its address space
    (``RLIMIT_AS``), and others notice nothing.

    Args:
        size: bytes, or a text such as ``"512 MiB"``; on the host 32 MiB at least.
        device: as for ``memory``.

    Raises:
        DeviceError: the device is not there, has not so much, or cannot be limited.
        UnitError: ``size`` is not a size.
    """
    return filling.fill(checked_bytes(size), device_memory.checked_device(device))


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
