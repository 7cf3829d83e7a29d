"""Knows which devices tensors are assumed to be on while code is estimated.

The CPU stands for devices that are not available. Then a tensor is on the host only if the code
itself says so (``named_devices.py``), and the log of storages knows those tensors by ``HOST``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ipygpumem.estimating.devices.named_devices import ON_HOST, STAND_IN, names_host
from ipygpumem.probes.accelerators import current_device, parse_device

CARD = "card"
"""The location of tensors that are on a card, or for which it is assumed."""
HOST = "host"
"""The location of tensors that the code itself puts on the CPU, and their device in the log."""


class Devices:
    """Finds the available device for a tensor, and the device that it is assumed to be on.

    The tensors are assumed to be on ``device``; None: on the device that the code puts them on.
    """

    def __init__(self, device: str | None) -> None:
        self.requested_device: str | None = None
        """Full name of ``device``, which the user asked for."""
        if device is not None:
            parsed = parse_device(device, kinds=("cuda", "xpu", "mps"))
            self.requested_device = current_device(parsed)
        self.real_device = _common_device(self.requested_device)
        """The one available device that all tensors are really on; None: each is on its own."""
        self.accelerators_named_by_code: dict[str, None] = {}
        """Accelerators for which the code asks and that another device stands for, in order."""
        self.moves_host_tensors = False
        """True if the code puts tensors on the host, which count on the requested device."""
        self.uses_host = False
        """True once the code itself has put a tensor on the CPU, next to those of a card."""
        self._current = threading.local()
        """Has the location of each thread's current operation or call."""

    @property
    def all_on_cpu(self) -> bool:
        """True if all tensors are on the CPU, whichever device they are assumed to be on."""
        if self.real_device is None:
            return False
        return bool(self.real_device.type == "cpu")

    @property
    def assumed_device(self) -> str | None:
        """The device that all tensors are assumed to be on; None: each is assumed on its own.

        It is the user's, or else the first one that the code has named.
        """
        if self.real_device is None:
            return None
        if self.requested_device:
            return self.requested_device
        return next(iter(self.accelerators_named_by_code), "cpu")

    @property
    def cpu_is_stand_in(self) -> bool:
        """True if the CPU stands for a card in this thread's current call.

        It does not in a call of the code's own CPU, such as ``torch.zeros(3, device="cpu")``.
        """
        return self.all_on_cpu and self.assumed_device != "cpu" and self.location != HOST

    @property
    def cpu_is_ambiguous(self) -> bool:
        """True if a tensor on the CPU may stand for one on a card, or may be on the host: the log
        knows its location.
        """
        return self.real_device is not None and self.requested_device != "cpu"

    def name_in_log(self, device: Any) -> str:
        """Return the name that the log has for a device."""
        if self.real_device is None:
            return str(device)
        if self.is_on_host(device):
            return HOST
        return str(self.real_device)

    def assumed_for(self, device: Any) -> str:
        """Return the name of the device that a tensor on ``device`` is assumed to be on."""
        if self.is_on_host(device):
            return "cpu"
        return self.assumed_device or str(device)

    def is_on_host(self, device: Any) -> bool:
        """Return True if the current operation's result on ``device`` is a tensor on the host."""
        if self.real_device is None:
            return bool(device.type == "cpu")
        if not self.uses_host or not self.cpu_is_ambiguous:
            return False
        if self.all_on_cpu:
            return self.location == HOST
        return bool(device.type == "cpu")

    @property
    def location(self) -> str | None:
        """Place of the results of this thread's current call; None if that of its arguments
        decides.
        """
        return getattr(self._current, "location", None)

    @contextmanager
    def placing(self, location: str | None) -> Iterator[None]:
        """Let the results of this thread's operations in the block be in a location.

        None: in the location of their arguments.
        """
        location_before = self.location
        self._current.location = location
        if location == HOST:
            self.uses_host = True
        try:
            yield
        finally:
            self._current.location = location_before

    def location_named_by(self, value: Any) -> str | None:
        """Return the location of tensors for which code names the device ``value``, as in
        ``x.to("cuda")``.

        None if the value is no device, or the meta device, whose tensors have no memory.
        """
        if isinstance(value, torch.device) and value.type == "meta":
            return None
        if isinstance(value, (str, torch.device, int)):
            return HOST if names_host(value) else CARD
        return None

    def real_device_of_copy(self, device: Any) -> Any:
        """Return the device of the fake copy of a tensor on ``device``."""
        if self.requested_device is not None:
            return self.real_device
        if device.type == "meta":
            return torch.device("cpu")
        return device

    def real_device_instead_of(self, value: Any) -> Any:
        """Return the available device that stands for one that the code names, such as the CPU for
        ``cuda:0``; return a value that is no device unchanged.

        An accelerator is added to those that the code names; for the CPU it is noted if tensors on
        the host count on the requested device.
        """
        if self.real_device is None:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        if isinstance(value, str):
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type == "meta":
            return value
        if value.type == "cpu":
            return self._device_instead_of_cpu()
        name = str(value)
        if value.index is None:
            name = f"{value.type}:0"
        self.accelerators_named_by_code.setdefault(name)
        return self.real_device

    def _device_instead_of_cpu(self) -> Any:
        """Return the device for tensors that the code puts on the CPU."""
        if self.location == HOST:
            return ON_HOST
        if self.requested_device is None:
            return STAND_IN
        if self.requested_device != "cpu":
            self.moves_host_tensors = True
        return self.real_device


def _common_device(requested_device: str | None) -> Any:
    """Return the available device that all tensors are put on; None if each stays on its own.

    Without CUDA that is the CPU, because this build of torch may lack kernels for the device.
    """
    if not torch.cuda.is_available():
        return STAND_IN
    if requested_device is None:
        return None
    return torch.device(requested_device)
