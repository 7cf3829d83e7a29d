"""Follows the operations of code on fake tensors, and logs the storages that they make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import sparse
from ipygpumem.estimating.answers import Answers
from ipygpumem.estimating.devices import UNKNOWN, Devices
from ipygpumem.estimating.gradients import accumulates_in_place
from ipygpumem.estimating.limits import Limits
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.recurrent import UNTOLD, lstm_workspace
from ipygpumem.estimating.roles import Roles, tensors_in
from ipygpumem.estimating.storage_log import StorageLog
from ipygpumem.estimating.users_line import users_line
from ipygpumem.estimating.workspaces import Workspaces

_UNFOLLOWED = (
    *(fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException),
    *(fake_tensor.UnsupportedOperatorException, NotImplementedError, AssertionError, AttributeError, KeyError),
)
"""What torch raises where it cannot follow an operation; the user's mistakes are other errors."""
_UNTOLD = "this code cannot be estimated, because torch cannot say what an operation returns"
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
"""Their arguments are real, and were made by the code itself a moment ago."""


class Follower(TorchDispatchMode):
    """Logs the storages that operations make, and answers for values that fake tensors do not have.

    Args:
        copy_of: returns the fake copy of a real tensor that code has reached.
        limits: are checked for each operation.
    """

    def __init__(
        self,
        log: StorageLog,
        devices: Devices,
        *,
        workspaces: Workspaces,
        note: Note,
        copy_of: Callable[[Any], Any],
        limits: Limits,
    ) -> None:
        super().__init__()
        self._workspaces = workspaces
        self._log = log
        self._devices = devices
        self._note = note
        self._copy_of = copy_of
        self._limits = limits
        self.roles = Roles(log)
        """Tells the log what storages are for."""
        self.answers = Answers(note)
        self.paused = False
        self.lock = threading.RLock()
        """Held for each operation: a fake mode is no mode for several threads at once."""
        self.handles: list[Any] = []
        """What ends the hooks on real tensors."""
        self._strays: dict[int, tuple[Any, Any]] = {}
        """Real tensors by id, with their fake copies."""

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
        self._limits.check()
        in_backward = self.roles.backward_is_running()
        arguments = list(tensors_in((args, kwargs))) if func not in _CONSTANTS else []
        known = [self._is_known(tensor) for tensor in arguments]
        if not all(known):
            args, kwargs = self._with_copies((args, kwargs))
        if func is _ADD and in_backward and accumulates_in_place(args):
            return args[0]
        try:
            result = UNTOLD.get(func, func)(*args, **kwargs)
        except _UNFOLLOWED as error:
            return self._stand_in(func, args, error)
        result = self._corrected(func, args, kwargs, arguments, result)
        self.answers.known.see(func, args, result)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)
        results = list(tensors_in(result))
        for tensor in results:
            device = tensor.fake_device if isinstance(tensor, fake_tensor.FakeTensor) else tensor.device
            if device.type != "meta":  # those take no bytes on any device
                self._log.see(tensor, self._devices.name(device), recorded=recorded, in_backward=in_backward)
        self._workspaces.see(func, args, results, in_backward=in_backward)
        return result

    def _is_known(self, tensor: Any) -> bool:
        """Return whether an argument is fake. A real one gets a fake copy, and a hook for its gradient."""
        if isinstance(tensor, fake_tensor.FakeTensor):
            self.roles.argument(tensor)
            return True
        if id(tensor) not in self._strays:
            self._strays[id(tensor)] = tensor, self._copy_of(tensor)
            handle = self.roles.follow(tensor)
            if handle is not None:
                self.handles.append(handle)
        return False

    def _with_copies(self, value: Any) -> Any:
        """Return an operation's arguments with fake copies in the place of real tensors."""
        if isinstance(value, torch.Tensor):
            return self._strays.get(id(value), (value, value))[1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._with_copies, value))
        if isinstance(value, dict):
            return {name: self._with_copies(item) for name, item in value.items()}
        return value

    def _corrected(self, func: Any, args: Any, kwargs: Any, arguments: list[Any], result: Any) -> Any:
        """Return a result with what fake tensors do not know of it."""
        if func is torch.ops.aten.mkldnn_rnn_layer.default and _argument("train", func, args, kwargs):
            workspace = torch.empty(lstm_workspace(*args), dtype=torch.uint8, device=result[0].device)
            return (*result[:3], workspace)
        if func is torch.ops.aten._cudnn_rnn.default:
            self._note(f"{users_line()}: what cuDNN keeps of a recurrent layer is not counted")
        if sparse.is_sparse(result):
            if not any(map(sparse.is_sparse, arguments)) and not sparse.is_made_of_parts(func):
                raise EstimateError(f"{UNKNOWN}: {_name(func)} in {users_line()}")
            if func in sparse.AT_MOST:
                self._note(f"{users_line()}: every entry of a sparse tensor is assumed to have a place of its own")
            return sparse.with_entries(func, arguments, result)
        return result

    def _stand_in(self, func: Any, args: Any, error: Exception) -> Any:
        """Return a value for an operation that asks for one.

        Raises:
            EstimateError: the operation gives a tensor whose shape depends on values.
        """
        if self.answers.can_answer(func):
            return self.answers.answer(func, args[0])
        unknown = isinstance(error, fake_tensor.UnsupportedOperatorException)
        raise EstimateError(f"{_UNTOLD if unknown else UNKNOWN}: {_name(func)} in {users_line()}") from error


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _argument(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}[name]
