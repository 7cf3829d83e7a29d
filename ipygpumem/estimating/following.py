"""The modes under which code is estimated: operations make fake tensors, devices that are not there are others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import lbfgs, sparse
from ipygpumem.estimating.accelerators import legacy_dtype
from ipygpumem.estimating.apart import stopped_text
from ipygpumem.estimating.gradients import accumulates_in_place
from ipygpumem.estimating.lives import Log
from ipygpumem.estimating.places import users_line
from ipygpumem.estimating.purposes import Purposes, tensors_in
from ipygpumem.estimating.recurrent import UNTOLD, lstm_workspace
from ipygpumem.estimating.truths import Truths
from ipygpumem.estimating.ways import answer_without_error
from ipygpumem.estimating.workspaces import Workspaces

_UNFOLLOWED = (
    *(fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException),
    *(fake_tensor.UnsupportedOperatorException, NotImplementedError, AssertionError, AttributeError, KeyError),
)
"""What torch raises where it cannot follow an operation; the user's mistakes are other errors."""
_UNKNOWN = "this code cannot be estimated, since it needs the values of tensors, which an estimate does not have"
_UNTOLD = "this code cannot be estimated, since torch does not tell of an operation what it gives"
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
"""Their arguments are real, and were made by the code itself a moment ago."""
_MOST_GUESSES = 10_000
"""Answers that one line gets: more, and it is taken for a loop that waits for a value."""


class Follower(TorchDispatchMode):
    """Logs the storages that operations make, and answers for values that fake tensors do not have.

    Args:
        log: the storages.
        device_of: says what the log calls a device.
        workspaces: looks at what operations need beside their results.
        note: takes what the report is to say.
        twin_of: returns the twin of a real tensor that code reached past its twin.
        timeout_seconds: from now on; then nothing more is followed.
    """

    def __init__(
        self,
        log: Log,
        device_of: Callable[[Any], str],
        *,
        workspaces: Workspaces,
        note: Callable[[str], None],
        twin_of: Callable[[Any], Any],
        timeout_seconds: float,
    ) -> None:
        super().__init__()
        self._workspaces = workspaces
        self._log = log
        self._device_of = device_of
        self._note = note
        self._twin_of = twin_of
        self._timeout_seconds = timeout_seconds
        self._until = time.monotonic() + timeout_seconds
        self._purposes = Purposes(log)
        self._truths = Truths()
        self.paused = False
        self.lock = threading.RLock()
        """Held for each operation: a fake mode is no mode for several threads at once."""
        self.guesses: dict[str, int] = {}
        """The lines that asked for a tensor's value and got a stand-in, in order, and how often they did."""
        self.handles: list[Any] = []
        """What ends the hooks on real tensors."""
        self._strays: dict[int, tuple[Any, Any]] = {}
        """Real tensors by id, with their twins."""
        self._answers = 0

    @property
    def purposes(self) -> Purposes:
        """What tells the log what storages are for."""
        return self._purposes

    def forget(self) -> None:
        """Leave real tensors alone, and keep none."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._strays.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors."""
        if func is _DEVICE and isinstance(args[0], fake_tensor.FakeTensor):  # asked for all the time, torch is slow
            return args[0].fake_device
        with self.lock:
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.paused:
            return func(*args, **kwargs)
        if time.monotonic() > self._until:
            raise EstimateError(stopped_text(f"after {self._timeout_seconds:g} s", users_line()))
        in_backward = self._purposes.backward_is_running()
        arguments = list(tensors_in((args, kwargs))) if func not in _CONSTANTS else []
        known = [self._is_known(tensor) for tensor in arguments]
        if not all(known):
            args, kwargs = self._with_twins((args, kwargs))
        if func is _ADD and in_backward and accumulates_in_place(args):
            return args[0]
        try:
            result = UNTOLD.get(func, func)(*args, **kwargs)
        except _UNFOLLOWED as error:
            return self._stand_in(func, args, error)
        result = self._corrected(func, args, kwargs, arguments, result)
        self._truths.see(func, args, result)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)
        results = list(tensors_in(result))
        for tensor in results:
            device = tensor.fake_device if isinstance(tensor, fake_tensor.FakeTensor) else tensor.device
            if device.type != "meta":  # those take no bytes on any device
                self._log.see(tensor, self._device_of(device), recorded=recorded, in_backward=in_backward)
        self._workspaces.see(func, args, results, in_backward=in_backward)
        return result

    def _is_known(self, tensor: Any) -> bool:
        """Look at an argument, and return whether it is fake: a real one gets a twin, and its own gradient is told."""
        if isinstance(tensor, fake_tensor.FakeTensor):
            self._purposes.argument(tensor)
            return True
        if id(tensor) not in self._strays:
            self._strays[id(tensor)] = tensor, self._twin_of(tensor)
            handle = self._purposes.follow(tensor)
            if handle is not None:
                self.handles.append(handle)
        return False

    def _with_twins(self, value: Any) -> Any:
        """Return an operation's arguments with twins in the place of real tensors."""
        if isinstance(value, torch.Tensor):
            return self._strays.get(id(value), (value, value))[1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._with_twins, value))
        if isinstance(value, dict):
            return {name: self._with_twins(item) for name, item in value.items()}
        return value

    def _corrected(self, func: Any, args: Any, kwargs: Any, arguments: list[Any], result: Any) -> Any:
        """Return a result with what fake tensors do not know of it."""
        if func is torch.ops.aten.mkldnn_rnn_layer.default and _arguments(func, args, kwargs)["train"]:
            workspace = torch.empty(lstm_workspace(*args), dtype=torch.uint8, device=result[0].device)
            return (*result[:3], workspace)
        if func is torch.ops.aten._cudnn_rnn.default:
            self._note(f"{users_line()}: what cuDNN keeps of a recurrent layer is not counted")
        if sparse.is_sparse(result):
            if not any(map(sparse.is_sparse, arguments)) and not sparse.is_made_of_parts(func):
                raise EstimateError(f"{_UNKNOWN}: {_name(func)} in {users_line()}")
            if func in sparse.AT_MOST:
                self._note(f"{users_line()}: no two entries of a sparse tensor are taken to be in the same place")
            return sparse.with_entries(func, arguments, result)
        return result

    def _stand_in(self, func: Any, args: Any, error: Exception) -> Any:
        """Return a value for an operation that asks for one: its type is right.

        Raises:
            EstimateError: the operation gives a tensor whose shape depends on values.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            if self._guessed_for_lbfgs():
                self._answers += 1
                return lbfgs.goes_on() if kind is torch.bool else 1.0 / self._answers
            plain = False if kind is torch.bool else 1.0 if kind.is_floating_point else 1j if kind.is_complex else 1
            truth = self._truths.of(args[0])
            if truth is None and kind is torch.bool:
                truth = answer_without_error()
            return plain if truth is None else type(plain)(truth)
        if func in (torch.ops.aten.equal.default, torch.ops.aten.allclose.default):
            return lbfgs.goes_on() if self._guessed_for_lbfgs() else bool(answer_without_error())
        unknown = isinstance(error, fake_tensor.UnsupportedOperatorException)
        raise EstimateError(f"{_UNTOLD if unknown else _UNKNOWN}: {_name(func)} in {users_line()}") from error

    def _guessed_for_lbfgs(self) -> bool:
        """Note that the user's line gets an answer that nobody knows, and return whether it is LBFGS that asks.

        Raises:
            EstimateError: the line has got so many that it is a loop without end.
        """
        if lbfgs.asks():
            self._note("LBFGS: taken to go through all its iterations, its history as long as that makes it")
            return True
        line = users_line()
        self.guesses[line] = count = self.guesses.get(line, 0) + 1
        if count > _MOST_GUESSES:
            raise EstimateError(
                f"this line asked for a tensor's value {_MOST_GUESSES:,} times, which an estimate does not have, so "
                f"that a loop may wait for it without end: {line}"
            )
        return False


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


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
        if func in _REFUSED:
            raise EstimateError(f"{_UNKNOWN}: {_REFUSED[func]} in {users_line()}")
        if func in (torch.Tensor.pin_memory, torch.Tensor.share_memory_):
            # The host's memory, as before; or counted with the device's.
            pins_here = func is torch.Tensor.pin_memory and self._target is None
            return args[0].clone() if pins_here else args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.type and len(args) > 1 and (dtype := legacy_dtype(args[1])) is not None:
            return torch.Tensor.to(args[0], device=self._other("cuda"), dtype=dtype)
        return func(*args, **kwargs) if self._target is None else self._sent(func, args, kwargs)

    def _sent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch's with the target in the place of other devices."""
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            self.asked.setdefault("cuda:0" if func is torch.Tensor.cuda else "xpu:0")
            return args[0].to(self._target)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self._other(args[1]), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._other(kwargs["device"])}
        elif self._everything and func in _FACTORIES and self._target.type != "cpu":
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
            return self._target if self._everything else value
        self.asked.setdefault(str(value) if value.index is not None else f"{value.type}:0")
        return self._target


_REFUSED = {
    torch.Tensor.numpy: "NumPy",
    torch.Tensor.__array__: "NumPy",
    torch.Tensor.data_ptr: "data_ptr",
}
_FACTORIES = frozenset(
    {
        *(torch.arange, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace, torch.ones),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros, torch.as_tensor),
        torch.logspace,
    }
)
