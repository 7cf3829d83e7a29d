"""Knows which devices tensors are assumed to be on while code is estimated.

The CPU stands for devices that are not available.
"""

from __future__ import annotations

from typing import Any

import torch

from ipygpumem.probes.accelerators import current_device, parse_device


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

    @property
    def on_cpu(self) -> bool:
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
    def is_elsewhere(self) -> bool:
        """True if the CPU stands for another device."""
        return self.on_cpu and self.assumed_device != "cpu"

    def log_name(self, device: Any) -> str:
        """Return the name that the log has for a device."""
        return str(self.real_device or device)

    def assumed_for(self, device: Any) -> str:
        """Return the name of the device that a tensor on ``device`` is assumed to be on."""
        return self.assumed_device or str(device)

    def real_device_of_copy(self, device: Any) -> Any:
        """Return the device of the fake copy of a tensor on ``device``."""
        if self.requested_device is not None:
            return self.real_device
        if device.type == "meta":
            return torch.device("cpu")
        return device

    def real_device_instead_of(self, value: Any) -> Any:
        """Return the device that stands for another; other values unchanged."""
        if self.real_device is None:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        if isinstance(value, str):
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type == "meta":
            return value
        if value.type == "cpu":
            if self.requested_device is None:
                return value
            if self.requested_device != "cpu":
                self.moves_host_tensors = True
            return self.real_device
        name = str(value)
        if value.index is None:
            name = f"{value.type}:0"
        self.accelerators_named_by_code.setdefault(name)
        return self.real_device


def _common_device(requested_device: str | None) -> Any:
    """Return the available device that all tensors are put on; None if each stays on its own.

    Without CUDA that is the CPU, because this build of torch may lack kernels for the device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if requested_device is None:
        return None
    return torch.device(requested_device)
