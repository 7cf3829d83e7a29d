"""Chooses the devices of tensors while code is estimated: the CPU stands for devices that are not
available.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import user_line
from ipygpumem.heap.holders.frames import stack
from ipygpumem.probes.accelerators import current_device, parse_device

UNKNOWN = "this code cannot be estimated, because it needs the values of tensors"
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def _array(tensor: Any) -> Any:
    """Return a tensor's values as an array; unknown ones all get the same guess."""
    if getattr(tensor, "constant", None) is not None:
        with torch._C._DisableTorchDispatch():
            return tensor.constant.numpy().copy()
    value = torch.ops.aten._local_scalar_dense(tensor)  # which records the guess
    kind = str(tensor.dtype).removeprefix("torch.")
    return importlib.import_module("numpy").full(
        tuple(tensor.shape), 0 if type(value) is int else value, kind
    )


class Devices(TorchFunctionMode):
    """Redirects tensors to a device that is available, and knows which one they are assumed to be
    on.

    That is ``device``; None: the one that the code puts them on.
    """

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.label = (
            None
            if device is None
            else current_device(parse_device(device, kinds=("cuda", "xpu", "mps")))
        )
        """Full name of ``device``."""
        has_cuda = torch.cuda.is_available()
        # Without CUDA the CPU stands for the device: this build of torch may lack kernels for it.
        self._target = (
            torch.device(self.label if self.label and has_cuda else "cpu")
            if self.label or not has_cuda
            else None
        )
        self.asked: dict[str, None] = {}
        """Accelerators that the code named and that another device stands for, in order."""
        self.recurrent: dict[str, None] = {}
        """Lines that call recurrent layers with other kernels on a card, such as cuDNN's, in order.
        """

    @property
    def on_cpu(self) -> bool:
        """True if all tensors are on the CPU, whichever device they are assumed to be on."""
        return self._target is not None and self._target.type == "cpu"

    @property
    def named(self) -> str | None:
        """The device that all tensors are assumed to be on: the user's or the code's; None: each on
        its own.
        """
        return None if self._target is None else self.label or next(iter(self.asked), "cpu")

    @property
    def is_elsewhere(self) -> bool:
        """True if the CPU stands for another device."""
        return self.on_cpu and self.named != "cpu"

    def name(self, device: Any) -> str:
        """Return a device's name in the log."""
        return str(self._target or device)

    def place(self, device: Any) -> Any:
        """Return the device for the fake copy of a tensor on ``device``."""
        if self.label is not None:
            return self._target
        return torch.device("cpu") if device.type == "meta" else device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, with its devices redirected."""
        kwargs = kwargs or {}
        if func is torch.Tensor.data_ptr:
            saves = any(
                frame.f_code.co_name == "save_pretrained" for frame in stack(sys._getframe(1))
            )
            hint = "; leave out that it saves the model: save_strategy='no' for a Trainer" * saves
            raise EstimateError(f"{UNKNOWN}: data_ptr in {user_line()}{hint}")
        if func in _TO_NUMPY:
            return _array(args[0])
        if func in _RECURRENT and (torch.backends.cudnn.enabled or self.is_elsewhere):
            place = self.named or str(args[0].device)
            self.recurrent.update({user_line(): None} if place.startswith("cuda") else {})
        if func in (torch.Tensor.pin_memory, torch.Tensor.share_memory_):
            # Pinning makes a copy on the host, unless host and device are counted together.
            pins_here = func is torch.Tensor.pin_memory and self._target is None
            return args[0].clone() if pins_here else args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs) if self._target is None else self._sent(func, args, kwargs)

    def _sent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function with the target instead of other devices."""
        if (
            sys._getframe(2).f_globals.get("__name__", "").startswith("torch.optim.")
        ):  # step counters stay on the host
            return func(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            self.asked.setdefault("cuda:0" if func is torch.Tensor.cuda else "xpu:0")
            return args[0].to(self._target)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self.place_for(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.place_for(kwargs["device"])}
        elif self.label is not None and func in _device_constructors() and not self.on_cpu:
            kwargs = {**kwargs, "device": self._target}
        return func(*args, **kwargs)

    def place_for(self, value: Any) -> Any:
        """Return the device that stands for another; other values unchanged."""
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
