"""``ipygpumem.memory`` and ``most_free_device``."""

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


def most_free_device() -> str | None:
    """Return the CUDA device with the most free memory, such as ``cuda:1``; None without one. It makes no context.

    Raises:
        DeviceError: there are several, and nobody can say what each has free.
    """
    return device_memory.most_free()
