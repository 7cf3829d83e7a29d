"""Decides where tensors are while code is estimated. Those of devices that are not here are followed on the CPU."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import users_line
from ipygpumem.probes.accelerators import current_device, parse_device

UNKNOWN = "this code cannot be estimated, because it needs the values of tensors"
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_FACTORIES = frozenset(
    {
        *(torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros, torch.as_tensor),
        torch.logspace,
    }
)


def _array(tensor: Any) -> Any:
    """Return an array with one guessed value in the place of a tensor's values."""
    if getattr(tensor, "constant", None) is not None:
        with torch._C._DisableTorchDispatch():
            return tensor.constant.numpy().copy()
    value = torch.ops.aten._local_scalar_dense(tensor)  # so that the guess is noted
    kind = str(tensor.dtype).removeprefix("torch.")
    return importlib.import_module("numpy").full(tuple(tensor.shape), 0 if type(value) is int else value, kind)


class Devices(TorchFunctionMode):
    """Sends tensors to a device that can be followed here, and knows on which one they are taken to be.

    That is ``device``; None: where the code puts them.
    """

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.label = None if device is None else current_device(parse_device(device, kinds=("cuda", "xpu", "mps")))
        """The full name of ``device``."""
        has_cuda = torch.cuda.is_available()
        # Without the device its tensors are followed on the CPU: torch's kernels for it may not even be there.
        self._target = (
            torch.device(self.label if self.label and has_cuda else "cpu") if self.label or not has_cuda else None
        )
        self.asked: dict[str, None] = {}
        """The accelerators that code named and that are not here, in order."""

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors are followed on the CPU, wherever they are taken to be."""
        return self._target is not None and self._target.type == "cpu"

    @property
    def named(self) -> str | None:
        """The one device that all tensors are taken to be on: the user's, or the code's; None: where they are."""
        return None if self._target is None else self.label or next(iter(self.asked), "cpu")

    @property
    def is_elsewhere(self) -> bool:
        """Whether code runs now as if it were on a device that is not here: on the CPU in its place."""
        return self.on_cpu and self.named != "cpu"

    def name(self, device: Any) -> str:
        """Return what the log calls a device."""
        return str(self._target or device)

    def place(self, device: Any) -> Any:
        """Return where the fake copy of a tensor is that is on ``device``."""
        if self.label is not None:
            return self._target
        return torch.device("cpu") if device.type == "meta" else device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function of torch's with other devices."""
        kwargs = kwargs or {}
        if func is torch.Tensor.data_ptr:
            raise EstimateError(f"{UNKNOWN}: data_ptr in {users_line()}")
        if func in _TO_NUMPY:
            return _array(args[0])
        if func in (torch.Tensor.pin_memory, torch.Tensor.share_memory_):
            # The host's memory, as before; or counted with the device's.
            pins_here = func is torch.Tensor.pin_memory and self._target is None
            return args[0].clone() if pins_here else args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs) if self._target is None else self._sent(func, args, kwargs)

    def _sent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch's with the target in the place of other devices."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith("torch.optim."):  # its counters stay on the host
            return func(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            self.asked.setdefault("cuda:0" if func is torch.Tensor.cuda else "xpu:0")
            return args[0].to(self._target)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self._other(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._other(kwargs["device"])}
        elif self.label is not None and func in _FACTORIES and not self.on_cpu:
            kwargs = {**kwargs, "device": self._target}
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        if self._target is None:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        if isinstance(value, str):
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type == "meta":
            return value
        if value.type == "cpu":
            return self._target if self.label is not None else value
        self.asked.setdefault(str(value) if value.index is not None else f"{value.type}:0")
        return self._target
