"""Finds and changes the location of fake tensors, on a card or on the host. If the CPU stands for
the card, both kinds are on the CPU, and a tensor's location is that of its storage in the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ipygpumem.estimating.devices.devices import CARD, HOST, Devices
from ipygpumem.estimating.memory.storages import StorageLog, storages_of


class TensorLocations:
    """Finds the location of each tensor: ``CARD`` or ``HOST``."""

    def __init__(self, log: StorageLog, devices: Devices) -> None:
        self._log = log
        self._devices = devices

    def of(self, tensor: Any) -> str:
        """Return the location of a fake tensor."""
        devices = self._devices
        if not devices.all_on_cpu:
            is_on_host = devices.is_on_host(tensor.device)
            return HOST if is_on_host else CARD
        if not devices.uses_host:
            return CARD
        with torch._C.DisableTorchFunction():
            storages = list(storages_of(tensor))
        lives = [self._log.life(storage._cdata) for storage in storages]
        devices_in_log = {None if life is None else life.device for life in lives}
        return HOST if devices_in_log == {HOST} else CARD

    def of_results(self, arguments: Iterable[Any]) -> str:
        """Return the location of the results of an operation, from the tensors among its arguments.

        An operation on a card may have a number on the host as an argument, or indices: the results
        are on the host only if all arguments with dimensions are.
        """
        arguments = list(arguments)
        deciding = [tensor for tensor in arguments if tensor.dim()] or arguments
        if deciding and all(self.of(tensor) == HOST for tensor in deciding):
            return HOST
        return CARD

    def move(self, tensor: Any, location: str) -> Any:
        """Return a copy of a fake tensor in another location, through which gradients flow back."""
        return _Move.apply(tensor, self._devices, location, self.of(tensor))


class _Move(torch.autograd.Function):  # type: ignore[misc]
    """Copies a tensor to another location, and its gradient back."""

    @staticmethod
    def forward(context: Any, tensor: Any, devices: Devices, target: str, source: str) -> Any:
        context.devices = devices
        context.source = source
        context.target = target
        with devices.placing(target):
            return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        moved = _Move.apply(gradient, context.devices, context.source, context.target)
        return moved, None, None, None


def is_transformed() -> bool:
    """Return True inside a transform of torch.func, whose tensors cannot be moved."""
    return torch._C._functorch.peek_interpreter_stack() is not None
