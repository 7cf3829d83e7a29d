"""``ipygpumem.memory``."""

from __future__ import annotations

from ipygpumem.probes import device_memory
from ipygpumem.probes.device_memory import DeviceMemory


def memory(device: object = "cpu") -> DeviceMemory:
    """Return how much memory a device has, has free, and has in use. It makes no CUDA context.

    Args:
        device: ``cpu``, ``cuda:0``, a number, or a ``torch.device``.

    Raises:
        DeviceError: there is no such device.
    """
    return device_memory.read(device_memory.checked_device(device))
