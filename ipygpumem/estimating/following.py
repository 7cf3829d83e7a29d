"""Follows the operations of code on fake tensors, and logs the storages that they make."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.answers import Answers
from ipygpumem.estimating.devices import UNKNOWN, Devices
from ipygpumem.estimating.limits import Limits
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storage_log import GRADIENTS, OPTIMIZER, PARAMETERS, StorageLog, Workspaces
from ipygpumem.estimating.users_line import users_line
from ipygpumem.introspect import is_ours
from ipygpumem.objects.holders.frames import stack

_PAGE_BYTES, _LINE_BYTES = 4096, 64


def lstm_workspace(source: Any, *weights: Any) -> int:
    """Return what oneDNN keeps of a recurrent layer for backward, which no fake tensor tells.

    Gates and outputs of every step, and states and their gradients, those of inputs padded, each from a new page on:
    seen to be exact with oneDNN of torch 2.13.
    """
    gates, wide = weights[1].shape
    steps, batch, given = source.shape
    size = source.element_size()
    padded = 2 * (steps + 1) * batch * _row(max(given, wide), size)
    plain = 2 * (steps + 1) * batch * wide
    spaces = (steps * batch * _row(gates, size), steps * batch * _row(wide, size), *[padded] * 3, *[plain] * 2)
    return sum(-(-space * size // _PAGE_BYTES) * _PAGE_BYTES for space in spaces)


def _row(wide: int, size: int) -> int:
    """Return the length of a row as oneDNN lays it out: whole lines of the cache, and none of a multiple of 256."""
    line = _LINE_BYTES // size
    row = -(-wide // line) * line
    return row + line if row % 256 == 0 else row


def _gru_cell(gates: Any, _: Any, state: Any, *biases: Any) -> tuple[Any, Any]:
    return torch.empty_like(state), state.new_empty(len(state), 5 * state.shape[1])


def _gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:  # torch's own
    count, wide = gradient.shape
    gates = [gradient.new_empty(count, 3 * wide) for _ in range(2)]
    biases = [gradient.new_empty(3 * wide) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


UNTOLD = {
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""What stands in for operations of which torch does not tell what they give: a GRU's cell on a card without cuDNN."""


_ATEN = torch.ops.aten
_SUMS = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.cat.default})
"""Their results have the entries of all arguments."""
AT_MOST = frozenset({_ATEN._coalesce.default, *_SUMS})
"""Their results may have fewer entries than is said here, since several may be in one place."""


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor that is its indices and values."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def is_made_of_parts(func: Any) -> bool:
    """Whether an operation makes a sparse tensor of indices and values, or an empty one."""
    name = str(func)
    return "sparse_coo_tensor" in name or name.startswith(("aten.empty", "aten.zeros", "aten.detach"))


def with_entries(func: Any, arguments: list[Any], result: Any) -> Any:
    """Return the sparse result of an operation with as many entries as its arguments have."""
    given = [tensor._nnz() for tensor in arguments if is_sparse(tensor)]
    if not given or any(result is tensor for tensor in arguments) or result._nnz():
        return result
    entries = sum(given) if func in _SUMS else max(given)
    dense = result.shape[result.sparse_dim() :]
    indices = torch.empty((result.sparse_dim(), entries), dtype=torch.long, device=result.device)
    values = torch.empty((entries, *dense), dtype=result.dtype, device=result.device)
    made = torch.sparse_coo_tensor(indices, values, result.shape, check_invariants=False)
    return made._coalesced_(True) if func is _ATEN._coalesce.default else made


_MOST_USES, _MOST_OF_STORAGE = 4, 2
"""Uses of a tensor that autograd alone has, and of its storage, as they are seen while it adds to it."""
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")  # not in the oldest ones
_HERE = Path(torch.__file__).parent
_WRAPPERS = {*(str(_HERE / name) for name in ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py"))}
_STARTERS = {*(str(_HERE / "autograd" / name) for name in ("graph.py", "__init__.py"))}


def accumulates_in_place(args: Any) -> bool:
    """Whether a sum in a backward pass is autograd's own, of gradients that meet, and needs no memory."""
    first = args[0]
    return (
        _CAN_COUNT
        and not torch.is_grad_enabled()
        and isinstance(args[1], torch.Tensor)
        and first.shape == args[1].shape
        and first.layout is torch.strided
        and first._use_count() <= _MOST_USES
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= _MOST_OF_STORAGE
        and first.untyped_storage().nbytes() == first.nbytes  # neither a part nor an expanded one
        and _is_called_by_autograd()
    )


def _is_called_by_autograd() -> bool:
    """Whether autograd has called the operation: Python only began the backward pass, or has no part in its thread."""
    files = (frame.f_code.co_filename for frame in stack(sys._getframe(1)))
    caller = next((file for file in files if file not in _WRAPPERS and not is_ours(file)), None)
    return caller is None or caller in _STARTERS


_HOOKED = "_ipygpumem_hooked"


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in an operation's arguments or results: these hold lists and tuples, and nothing deeper."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


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

    ``copy_of`` returns the fake copy of a real tensor that code has reached.
    """

    def __init__(
        self,
        log: StorageLog,
        devices: Devices,
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
        self._last_graph = -1
        self.answers = Answers(note)
        self.paused = False
        self.lock = threading.RLock()
        """Held for each operation: a fake mode is no mode for several threads at once."""
        self._handles: list[Any] = []  # what ends the hooks on real tensors
        self._strays: dict[int, tuple[Any, Any]] = {}  # real tensors by id, with their fake copies

    def forget(self) -> None:
        """Leave real tensors alone, and keep none."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
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
        in_backward = self._backward_is_running()
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
        self.answers.see(func, args, result)
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
            self._see_argument(tensor)
            return True
        if id(tensor) not in self._strays:
            self._strays[id(tensor)] = tensor, self._copy_of(tensor)
            handle = self._follow(tensor)
            if handle is not None:
                self._handles.append(handle)
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
        if is_sparse(result):
            if not any(map(is_sparse, arguments)) and not is_made_of_parts(func):
                raise EstimateError(f"{UNKNOWN}: {_name(func)} in {users_line()}")
            if func in AT_MOST:
                self._note(f"{users_line()}: every entry of a sparse tensor is assumed to have a place of its own")
            return with_entries(func, arguments, result)
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

    # -- what storages are for, by torch's hooks for leaves and optimizers ------------------------------------------

    def _see_argument(self, tensor: Any) -> None:
        """Look at a fake tensor that an operation gets: a parameter, or a leaf whose gradient will come."""
        if tensor.requires_grad and tensor.is_leaf and vars(tensor).get(_HOOKED) != id(tensor):
            vars(tensor)[_HOOKED] = id(tensor)  # a copy has the original's attributes, and not its hooks
            self._follow(tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)

    def _follow(self, tensor: Any) -> Any:
        """Mark what a tensor and its gradient are for; return the handle that ends that, or None."""
        if isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)
        if not tensor.requires_grad or not tensor.is_leaf:
            return None
        return tensor.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, leaf: Any) -> None:
        if leaf.grad is not None:
            self._log.mark(leaf.grad, GRADIENTS)

    def _backward_is_running(self) -> bool:
        """Whether autograd runs the current operation; a backward pass that begins is noted."""
        graph = torch._C._current_graph_task_id()
        if graph > self._last_graph:
            self._last_graph = graph
            self._log.backwards.append(self._log.clock)
        return bool(graph != -1)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Look at an optimizer's state."""
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                self._log.mark(tensor, OPTIMIZER)


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _argument(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}[name]
