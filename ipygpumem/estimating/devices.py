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
        self.label: str | None = None
        """Full name of ``device``."""
        if device is not None:
            parsed = parse_device(device, kinds=("cuda", "xpu", "mps"))
            self.label = current_device(parsed)
        self.target = _target(self.label)
        """The one available device that all tensors are really on; None: each is on its own."""
        self.asked: dict[str, None] = {}
        """Accelerators that the code named and that another device stands for, in order."""

    @property
    def on_cpu(self) -> bool:
        """True if all tensors are on the CPU, whichever device they are assumed to be on."""
        if self.target is None:
            return False
        return bool(self.target.type == "cpu")

    @property
    def named(self) -> str | None:
        """The device that all tensors are assumed to be on; None: each is on its own.

        It is the user's, or else the first one that the code has named.
        """
        if self.target is None:
            return None
        if self.label:
            return self.label
        return next(iter(self.asked), "cpu")

    @property
    def is_elsewhere(self) -> bool:
        """True if the CPU stands for another device."""
        return self.on_cpu and self.named != "cpu"

    def name(self, device: Any) -> str:
        """Return a device's name in the log."""
        return str(self.target or device)

    def assumed(self, device: Any) -> str:
        """Return the name of the device that a tensor on ``device`` is assumed to be on."""
        return self.named or str(device)

    def of_copy(self, device: Any) -> Any:
        """Return the device for the fake copy of a tensor on ``device``."""
        if self.label is not None:
            return self.target
        if device.type == "meta":
            return torch.device("cpu")
        return device

    def standing_for(self, value: Any) -> Any:
        """Return the device that stands for another; other values unchanged."""
        if self.target is None:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        if isinstance(value, str):
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type == "meta":
            return value
        if value.type == "cpu":
            if self.label is None:
                return value
            return self.target
        name = str(value)
        if value.index is None:
            name = f"{value.type}:0"
        self.asked.setdefault(name)
        return self.target


def _target(label: str | None) -> Any:
    """Return the available device that all tensors are put on; None if each stays on its own.

    Without CUDA that is the CPU, because this build of torch may lack kernels for the device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if label is None:
        return None
    return torch.device(label)
