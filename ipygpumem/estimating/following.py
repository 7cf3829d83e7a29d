"""The modes under which code is estimated: operations make fake tensors, devices that are not there are others."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.lives import Log
from ipygpumem.estimating.purposes import Purposes, tensors_in

_HERE, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
_UNFOLLOWED = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
)
_UNKNOWN = "this code cannot be estimated, since it needs the values of tensors, which an estimate does not have"
_DEVICE = torch.ops.prim.device.default
_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
"""Their arguments are real, and were made by the code itself a moment ago."""


def users_line() -> str:
    """Return where the user's code is now: the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<frozen", "<string")) and "contextlib" not in name:
            break
        frame = frame.f_back
    name = frame.f_code.co_filename
    source = linecache.getline(name, frame.f_lineno).strip()
    place = f"{Path(name).name}, line {frame.f_lineno}" if Path(name).is_file() else f"line {frame.f_lineno}"
    return f"{place}: {source}" if source else place


class Follower(TorchDispatchMode):
    """Logs the storages that operations make, and answers for values that fake tensors do not have."""

    def __init__(self, log: Log, device_of: Callable[[Any], str]) -> None:
        super().__init__()
        self._log = log
        self._device_of = device_of
        self._purposes = Purposes(log)
        self.paused = False
        self.guesses: dict[str, None] = {}
        """The lines that asked for a tensor's value and got a stand-in, in order."""
        self.strays: list[tuple[Any, Any]] = []
        """Real tensors that code reached past their twins, each with its gradient."""
        self._known_strays: set[int] = set()

    @property
    def purposes(self) -> Purposes:
        """What tells the log what storages are for."""
        return self._purposes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors."""
        if func is _DEVICE and isinstance(args[0], fake_tensor.FakeTensor):  # asked for all the time, torch is slow
            return args[0].fake_device
        if self.paused:
            return func(*args, **(kwargs or {}))
        in_backward = self._purposes.backward_is_running()
        recorded = False
        for tensor in tensors_in((args, kwargs or {})) if func not in _CONSTANTS else ():
            recorded = recorded or tensor.requires_grad
            self._argument(tensor)
        try:
            result = func(*args, **(kwargs or {}))
        except _UNFOLLOWED as error:
            return self._stand_in(func, args, error)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and _arguments(func, args, kwargs)["train"]:
            result = (*result[:3], torch.empty(_lstm_workspace(*args), dtype=torch.uint8, device=result[0].device))
        recorded = recorded and torch.is_grad_enabled()
        for tensor in tensors_in(result):
            device = tensor.fake_device if isinstance(tensor, fake_tensor.FakeTensor) else tensor.device
            if device.type != "meta":  # those take no bytes on any device
                self._log.see(tensor, self._device_of(device), recorded=recorded, in_backward=in_backward)
        return result

    def _argument(self, tensor: Any) -> None:
        if isinstance(tensor, fake_tensor.FakeTensor):
            self._purposes.argument(tensor)
        elif id(tensor) not in self._known_strays:
            self._known_strays.add(id(tensor))
            self.strays.append((tensor, tensor.grad if tensor.is_leaf else None))
            self._log.see(tensor, self._device_of(tensor.device), before=True)

    def _stand_in(self, func: Any, args: Any, error: Exception) -> Any:
        """Return a value for an operation that asks for one: its type is right.

        Raises:
            EstimateError: the operation gives a tensor whose shape depends on values.
        """
        line = users_line()
        if func is torch.ops.aten._local_scalar_dense.default:
            self.guesses[line] = None
            kind = args[0].dtype
            return False if kind is torch.bool else 1.0 if kind.is_floating_point else 1j if kind.is_complex else 1
        if func in (torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default):
            self.guesses[line] = None
            return False
        name = str(func).removeprefix("aten.").partition(".")[0]
        raise EstimateError(f"{_UNKNOWN}: {name} in {line}") from error


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


def _lstm_workspace(source: Any, *weights: Any) -> int:
    """Return about what oneDNN keeps of a recurrent layer for backward, which no fake tensor tells.

    Gates, and the states of every step, forward and back; seen to be within 2 % from some MiB on.
    """
    gates, wide = weights[1].shape
    steps, batch, given = source.shape
    return int((steps * gates + (steps + 1) * (6 * wide + 5 * max(wide, given))) * batch * source.element_size())


class Devices(TorchFunctionMode):
    """Sends tensors to ``target`` where code names an accelerator; if ``everything``, where it names any device."""

    def __init__(self, target: Any, *, everything: bool) -> None:
        super().__init__()
        self._target = target
        self._everything = everything
        self.asked: dict[str, None] = {}
        """The accelerators that code named, in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function of torch's with other devices."""
        kwargs = kwargs or {}
        if func is torch.Tensor.numpy or func is torch.Tensor.__array__:
            raise EstimateError(f"{_UNKNOWN}: NumPy in {users_line()}")
        if self._target is None:
            return func(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            self.asked.setdefault("cuda:0" if func is torch.Tensor.cuda else "xpu:0")
            return args[0].to(self._target)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self._other(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._other(kwargs["device"])}
        elif self._everything and func in _FACTORIES:
            kwargs = {**kwargs, "device": self._target}
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        if isinstance(value, int):
            value = torch.device("cuda", value)
        if isinstance(value, str):
            value = torch.device(value)
        if not isinstance(value, torch.device) or value.type == "meta":
            return value
        if value.type == "cpu":
            return self._target if self._everything else value
        self.asked.setdefault(str(value) if value.index is not None else f"{value.type}:0")
        return self._target


_FACTORIES = frozenset(
    {
        *(torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros),
    }
)


@contextmanager
def patched(notes: dict[str, None], *, accelerated: bool) -> Iterator[None]:
    """Replace the few functions of torch's that fake tensors would break, or that would do harm with them.

    Unless ``accelerated``, autocast of an accelerator's operations is that of the CPU's.
    """

    def swap(first: Any, second: Any) -> None:
        # torch refuses to swap a tensor that anybody refers to weakly, as fake tensors' own memo does.
        if first.device.type == second.device.type:
            first.data = second.data
        else:
            real_swap(first, second)

    real_swap = torch.utils.swap_tensors

    def do_not_save(*_: Any, **__: Any) -> None:
        notes[f"{users_line()}: torch.save wrote nothing"] = None

    def tolist(tensor: Any) -> Any:
        found: Any = 1.0 if tensor.dtype.is_floating_point else False if tensor.dtype is torch.bool else 0
        for length in reversed(tensor.shape):
            found = [found] * length
        return found

    def cast(mode: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type != "cpu":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
        begin(mode, device_type, dtype, *args, **kwargs)

    begin = torch.amp.autocast_mode.autocast.__init__

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        stack.enter_context(patch.object(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])))
        stack.enter_context(patch.object(torch, "save", do_not_save))
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))  # errors are raised, too
        stack.enter_context(patch.object(fake_tensor.FakeTensor, "tolist", tolist))
        if not accelerated:
            stack.enter_context(patch.object(torch.amp.autocast_mode.autocast, "__init__", cast))
        yield
