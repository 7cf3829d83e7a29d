"""Intercepts the operations of code on fake tensors, and logs the storages that they allocate."""

from __future__ import annotations

import dis
import functools
import linecache
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.optim import lbfgs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import user_line
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.fake_copies import FakeCopies
from ipygpumem.estimating.largest import LARGEST, is_known, is_mask, largest_value
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageLog,
    Workspaces,
    takes_cudnn,
)
from ipygpumem.estimating.torch_functions import UNKNOWN
from ipygpumem.estimating.transients import loss_bytes, operator_name
from ipygpumem.heap.holders.frames import stack
from ipygpumem.introspect import is_ours, is_users

_ATEN = torch.ops.aten
_COMPILER = tuple(str(Path(torch.__file__).with_name(name)) for name in ("_compile.py", "_dynamo"))
"""Files of torch that wrap the methods of modes."""
_ENDS = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "YIELD", "RERAISE")


def _answer_without_error() -> bool | None:
    """Return the truth value with which the calling code passes its ``assert`` or ``raise``; None
    if it has none.
    """
    for frame in stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name == torch.__file__ and frame.f_code.co_name.startswith(
            "_check"
        ):  # torch._check() and its like
            return True
        if not is_ours(name) and not name.startswith(_COMPILER):
            return _answer(frame.f_code, frame.f_lasti)
    return None


@functools.lru_cache(maxsize=64)
def _answer(code: types.CodeType, offset: int) -> bool | None:
    steps = [
        step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "NOP")
    ]
    places = {step.offset: number for number, step in enumerate(steps)}
    number, as_it_is = places.get(offset, len(steps)), True
    if number < len(steps) and steps[number].opname.startswith("CALL"):  # of item or bool
        number += 1
    for place in range(number, len(steps)):
        name = steps[place].opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            jumps = ("IF_TRUE" in name) is as_it_is
            here, there = (
                _raises(steps, start)
                for start in (place + 1, places.get(steps[place].argval, len(steps)))
            )
            return None if here is there else jumps if here else not jumps
        if name == "UNARY_NOT":
            as_it_is = not as_it_is
        elif name != "TO_BOOL":
            return None
    return None


def _raises(steps: list[dis.Instruction], start: int) -> bool:
    """Return True if the code from step ``start`` reaches a ``raise`` without a jump."""
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(_ENDS):
            return False
    return False


_NEVER = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_NOT = frozenset({"logical_not", "bitwise_not"})
_AND = frozenset({"logical_and", "bitwise_and", "mul"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_SAME = (
    *(
        "alias",
        "detach",
        "clone",
        "_to_copy",
        "view",
        "_unsafe_view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "expand",
    ),
    *("all", "any", "_is_all_true", "_is_any_true", "select", "slice", "permute", "transpose", "t"),
    *("max", "min", "amax", "amin", "prod"),
)
"""Operators whose results have the values of their arguments."""
_COUNTS = frozenset({"sum", "count_nonzero"})
_MOST_GUESSES = 10_000
"""Maximum number of guesses for one line; a line that asks more often is taken for a loop that
waits for a value.
"""
_SCALAR = _ATEN._local_scalar_dense.default
_COMPARES = (_ATEN.equal.default, _ATEN.allclose.default)


def _frame_of(package: types.ModuleType) -> types.FrameType | None:
    """Return the innermost frame of a torch package if it is inside all frames of the user's code,
    else None.
    """
    ours_and_torchs = takewhile(
        lambda frame: not is_users(frame.f_code.co_filename), stack(sys._getframe(1))
    )
    folder = str(Path(package.__file__ or "").parent)
    return next(
        (frame for frame in ours_and_torchs if frame.f_code.co_filename.startswith(folder)), None
    )


_PAGE_BYTES, _LINE_BYTES = 4096, 64


def _lstm_workspace(source: Any, *weights: Any) -> int:
    """Return the bytes that oneDNN saves for a recurrent layer's backward, which fake tensors do
    not report.

    It saves gates and outputs of every step, states and gradients, padded for the inputs, each on
    its own pages. The result was exact with the oneDNN of torch 2.13.
    """
    gates, wide = weights[1].shape
    steps, batch, given = source.shape
    size = source.element_size()
    padded = 2 * (steps + 1) * batch * _row(max(given, wide), size)
    plain = 2 * (steps + 1) * batch * wide
    spaces = (
        steps * batch * _row(gates, size),
        steps * batch * _row(wide, size),
        *[padded] * 3,
        *[plain] * 2,
    )
    return sum(-(-space * size // _PAGE_BYTES) * _PAGE_BYTES for space in spaces)


def _row(wide: int, size: int) -> int:
    """Return oneDNN's row length: whole cache lines, and one more line if that is a multiple of
    256.
    """
    line = _LINE_BYTES // size
    row = -(-wide // line) * line
    return row + line if row % 256 == 0 else row


def _gru_cell_backward(
    gradient: Any, workspace: Any, has_bias: bool
) -> tuple[Any, ...]:  # torch's own
    count, wide = gradient.shape
    gates = [gradient.new_empty(count, 3 * wide) for _ in range(2)]
    biases = [gradient.new_empty(3 * wide) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


def _grouped_mm(
    first: Any, second: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return a grouped product with the padded rows of CUDA's kernel; torch's own rule accepts
    bfloat16 only.
    """
    groups = (
        [len(offs)]
        if first.dim() == second.dim() == 2
        else list(first.shape[:-2] if second.dim() > 2 else ())
    )
    rows, columns, kind = first.shape[-2], second.shape[-1], out_dtype or first.dtype
    wide = -(-columns * kind.itemsize // _ALIGNED) * _ALIGNED // kind.itemsize
    return first.new_empty((*groups, rows, wide), dtype=kind)[..., :columns]


_ALIGNED = 16
_FUSED_SGD = getattr(_ATEN, "_fused_sgd_", None)
_ASK_FOR_CTC = [
    getattr(_ATEN, name, None) for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
]
_EMPTY = frozenset({"empty_like", "new_empty", "new_empty_strided"})
_STAND_INS = {
    **({_ATEN._grouped_mm.default: _grouped_mm} if hasattr(_ATEN, "_grouped_mm") else {}),
    _ATEN._thnn_fused_lstm_cell.default: lambda gates, _, state, *__: (
        torch.empty_like(state),
        torch.empty_like(state),
        torch.empty_like(gates),
    ),
    _ATEN._ctc_loss_backward.Tensor: lambda _, log_probabilities, *__: torch.empty_like(
        log_probabilities
    ),
    **{
        getattr(ask, kind, None): lambda *_: False
        for ask in _ASK_FOR_CTC
        for kind in ("default", "Tensor")
    },
    _ATEN._thnn_fused_gru_cell.default: lambda gates, _, state, *__: (
        torch.empty_like(state),
        state.new_empty(len(state), 5 * state.shape[1]),
    ),
    _ATEN._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    **{getattr(_FUSED_SGD, kind, None): lambda *_, **__: None for kind in ("default", "tensor_lr")},
}
"""Replacements of operations whose results torch cannot infer, or infers for the CPU only."""


@contextmanager
def _without_values(func: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Hide a tensor's values while it is copied to a device: torch would really copy them."""
    kept = (
        args[0].constant
        if func is _ATEN._to_copy.default and isinstance(args[0], fake_tensor.FakeTensor)
        else None
    )
    if (
        kept is None
        or kept.numel() < 2
        or torch.device(kwargs.get("device") or "cpu").type == "cpu"
    ):
        yield
        return
    args[0].constant = None
    try:
        yield
    finally:
        args[0].constant = kept


_MOST_USES, _MOST_OF_STORAGE = 4, 2
"""Maximum reference counts of a tensor, and of its storage, that only autograd references."""
# not in older versions
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_HERE = Path(torch.__file__).parent
_WRAPPERS = {
    *(
        str(_HERE / name)
        for name in ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py")
    )
}
_STARTERS = {*(str(_HERE / "autograd" / name) for name in ("graph.py", "__init__.py"))}


def _works_in_place(func: Any, args: Any) -> bool:
    """Return True if autograd itself calls an operator, and for plain tensors would call it in
    place.

    For tensor subclasses, such as fake tensors, autograd calls the out-of-place operator instead.
    """
    first = args[0]
    may_be = (
        _CAN_COUNT
        and not torch.is_grad_enabled()
        and _formula_works_in_place(func)
        and (
            func is not _ADD or (isinstance(args[1], torch.Tensor) and first.shape == args[1].shape)
        )
        and (
            func not in _LOSS_IN_PLACE
            or first.shape == torch.broadcast_shapes(first.shape, args[1].shape)
        )
        and first.layout is torch.strided
        and first._use_count()
        <= _MOST_USES + (func is _ATEN.index_put.default) + 2 * (func in _LOSS_IN_PLACE)
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= _MOST_OF_STORAGE
        and first.untyped_storage().nbytes() == first.nbytes  # neither a slice nor expanded
    )
    if not may_be:
        return False
    # Autograd is the caller if the nearest Python frame started the backward pass, or if the thread
    # has no such frame.
    files = (frame.f_code.co_filename for frame in stack(sys._getframe(1)))
    caller = next((file for file in files if file not in _WRAPPERS and not is_ours(file)), None)
    return caller is None or caller in _STARTERS


_NODE: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_COPIED = re.compile(
    "(MaskedFill|MaskedScatter|Xlogy|Scatter|ScatterReduce|Index(Put|Fill|Copy|Reduce))Backward"
)
"""Nodes whose formulas never change a gradient in place."""
_LOSS = "BinaryCrossEntropyWithLogitsBackward"


def _formula_works_in_place(func: Any) -> bool:
    """Return True if the current autograd node may change a gradient in place, or if autograd
    accumulates gradients.
    """
    node = _NODE()
    name = "" if node is None else node.name()
    if func in _LOSS_IN_PLACE:
        return bool(name.startswith(_LOSS))
    return not _COPIED.match(name)


_HOOKED = "_ipygpumem_hooked"


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in an operation's arguments or results, or in other nested lists, tuples
    and mappings.
    """
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
    *(
        fake_tensor.UnsupportedOperatorException,
        NotImplementedError,
        AssertionError,
        AttributeError,
        KeyError,
    ),
)
"""Errors that torch raises if it cannot run an operation on fake tensors; the user's mistakes raise
other errors.
"""
_UNTOLD = "this code cannot be estimated, because torch cannot infer the result of an operation"
_DEVICE = torch.ops.prim.device.default
_CONVOLUTIONS = frozenset([_ATEN.convolution.default, _ATEN.convolution_backward.default])
_ADD, _INDEX, _SELECT = _ATEN.add.Tensor, _ATEN.index.Tensor, _ATEN.masked_select.default
_LOSS_IN_PLACE = (_ATEN.mul.Tensor, _ATEN.sub.Tensor)
_IN_PLACE = (
    *(
        _ADD,
        _ATEN.scatter.src,
        _ATEN.scatter.value,
        _ATEN.scatter_add.default,
        _ATEN.index_add.default,
    ),
    *(_ATEN.index_put.default, _ATEN.index_fill.int_Scalar, _ATEN.index_fill.int_Tensor),
    *(_ATEN.masked_fill.Scalar, _ATEN.put.default, *_LOSS_IN_PLACE),
)
"""Operators that autograd calls in place if nothing else references the tensor."""
_CONSTANTS = (_ATEN.lift_fresh.default, _ATEN.lift.default)
"""Operators whose arguments are real tensors that the code has just created from constants."""


class AllocationTracker(TorchDispatchMode):
    """Logs the storages that operations allocate, and guesses the values that fake tensors do not
    have.

    ``check`` is called before each operation, and may raise to stop the code.
    """

    def __init__(
        self,
        log: StorageLog,
        devices: Devices,
        workspaces: Workspaces,
        copies: FakeCopies,
        note: Note,
        check: Any,
    ) -> None:
        super().__init__()
        self._log, self._devices, self._workspaces = log, devices, workspaces
        self._copies, self._note, self._check = copies, note, check
        self._last_graph = -1
        self._known: Any = WeakIdKeyDictionary()
        self._largest: Any = WeakIdKeyDictionary()  # values of random numbers and positions
        self._given_to_lbfgs = 0
        self.observe: Callable[[Any, Any, Any, Any], object] | None = None
        """Called with each operation, its arguments and its result."""
        self.guesses: dict[str, int] = {}
        """Lines that asked for a tensor's value and got a guess, in order, and how often they did.
        """
        self.upper_bounds: dict[str, None] = {}
        """Lines whose results are assumed to be as large as possible, in order."""
        self._handles: list[Any] = []  # of the hooks on real tensors
        self._strays: dict[int, tuple[Any, Any]] = {}  # real tensors by id, with their fake copies

    def forget(self) -> None:
        """Remove the hooks on real tensors, and the references to them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._strays.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors."""
        if func is _DEVICE and isinstance(
            args[0], fake_tensor.FakeTensor
        ):  # frequent, and slow in torch
            return args[0].fake_device
        if any(
            hasattr(kind, "__tensor_flatten__") for kind in types
        ):  # the operations on its inner tensors come here
            return NotImplemented
        if torch.is_inference_mode_enabled() and not self._copies.paused:
            with self:  # outside inference mode, autograd decomposes composite operators
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        with self._copies.lock:
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._copies.paused:
            return func(*args, **kwargs)
        self._check()
        in_backward = self._backward_is_running()
        arguments = list(tensors_in((args, kwargs))) if func not in _CONSTANTS else []
        known = [self._is_known(tensor) for tensor in arguments]
        if not all(known):
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda tensor: self._strays.get(id(tensor), (tensor, tensor))[1],
                (args, kwargs),
            )
        if in_backward and func in _IN_PLACE and _works_in_place(func, args):
            self._workspaces.see(operator_name(func), args, [args[0]], in_backward=True)
            return args[0]
        operator = self._operator(func, args, arguments)
        try:
            with _without_values(func, args, kwargs):
                result = operator(*args, **kwargs)
        except _UNFOLLOWED as error:
            if func is _SCALAR or func in _COMPARES:
                return self._answer(func, args[0])
            is_unsupported = isinstance(error, fake_tensor.UnsupportedOperatorException)
            raise _refusal(_UNTOLD if is_unsupported else UNKNOWN, func) from error
        result = self._corrected(func, args, kwargs, result)
        self._see_value(func, args, kwargs, result)
        if self.observe is not None:
            self.observe(func, args, kwargs, result)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)
        results, name = list(tensors_in(result)), operator_name(func)
        for tensor in filter(is_known, results) if operator is not func or name in _EMPTY else ():
            tensor.constant = None  # read from uninitialised memory
        for tensor in (
            results[::-1] if name == "native_dropout" else results
        ):  # in the order of allocation
            device = (
                tensor.fake_device if isinstance(tensor, fake_tensor.FakeTensor) else tensor.device
            )
            if device.type != "meta":  # meta tensors have no memory
                there = self._devices.named or str(device)
                least = loss_bytes(name, args, tensor) if there.startswith("cuda") else 0
                place = self._devices.name(device)
                self._log.see(
                    tensor, place, least_bytes=least, recorded=recorded, in_backward=in_backward
                )
        self._workspaces.see(name, args, results, in_backward=in_backward)
        return result

    def _operator(self, func: Any, args: Any, arguments: list[Any]) -> Any:
        """Return the function to run for an operation; note the line if its result is the largest
        possible.
        """
        operator = _STAND_INS.get(func, func)
        largest = (
            LARGEST.get(func.name()) if func is not _INDEX or any(map(is_mask, args[1])) else None
        )
        if largest is not None and not all(map(is_known, arguments)):
            operator = largest
            masks = (
                filter(is_mask, args[1])
                if func is _INDEX
                else arguments[1:]
                if func is _SELECT
                else arguments
            )
            if not all(map(is_known, masks)):
                self.upper_bounds[user_line()] = None
        return operator

    def _is_known(self, tensor: Any) -> bool:
        """Return True if an argument is fake; make a fake copy of a real one, and hook its
        gradient.
        """
        if isinstance(tensor, fake_tensor.FakeTensor):
            self._see_argument(tensor)
            return True
        if id(tensor) not in self._strays:
            self._strays[id(tensor)] = tensor, self._copies.of(self._copies.share(tensor))
            handle = self._follow(tensor)
            self._handles += [handle] if handle is not None else []
        return False

    def _corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return a result, corrected where fake tensors differ from the device's kernels."""
        if func is _ATEN.mkldnn_rnn_layer.default:
            names = [argument.name for argument in func._schema.arguments]
            if not {**dict(zip(names, args, strict=False)), **kwargs}["train"]:
                return result
            workspace = torch.empty(
                _lstm_workspace(*args), dtype=torch.uint8, device=result[0].device
            )
            return (*result[:3], workspace)
        if (
            func in _CONVOLUTIONS and self._devices.is_elsewhere and not takes_cudnn()
        ):  # the CPU keeps channels last
            return tree_map_only(
                torch.Tensor, lambda tensor: tensor.new_empty(tensor.shape), result
            )
        if func is _ATEN.log_sigmoid_forward.default and self._devices.is_elsewhere:
            return result[0], result[1].new_empty(0)  # CUDA saves nothing for backward
        if isinstance(result, torch.Tensor) and result.layout is torch.sparse_coo:
            raise _refusal("an estimate cannot follow sparse tensors", func)
        return result

    # -- guesses: 1, 1.0 or False, or the value that passes an ``assert`` or ``raise`` -----------

    def _answer(self, func: Any, tensor: Any) -> bool | float | complex:
        """Return a guess for an operation that reads a value."""
        compares, dtype = func in _COMPARES, tensor.dtype
        is_condition = compares or dtype is torch.bool
        frame = _frame_of(torch.optim)
        if (
            frame is not None and frame.f_code.co_filename == lbfgs.__file__
        ):  # it reads values in each iteration
            self._note("LBFGS: assumed to run all its iterations, and to keep their history")
            if (
                is_condition
            ):  # it keeps a step only if ``ys`` is positive, and stops if its loss does not change
                return "ys >" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self._given_to_lbfgs += 1
            return 1.0 / self._given_to_lbfgs
        line = user_line()
        if _frame_of(torch.utils.data) is None:  # the value of a seed does not matter
            self.guesses[line] = self.guesses.get(line, 0) + 1
        if self.guesses.get(line, 0) > _MOST_GUESSES:
            raise EstimateError(
                f"this line asked for a tensor's value {_MOST_GUESSES:,} times. An estimate has no "
                f"values, so the "
                f"loop may never end: {line}"
            )
        known = None if compares else self._known_value(tensor)
        if is_condition:
            return bool(_answer_without_error() if known is None else known)
        real = 1.0 if frame is None else 0.5  # an optimizer may divide by 1 minus the value
        plain = real if dtype.is_floating_point else 1j if dtype.is_complex else 1
        return type(plain)(self._largest.get(tensor, plain) if known is None else known)

    def _known_value(self, value: Any) -> bool | None:
        """Return the truth value that all elements of a tensor are known to have, or None."""
        return self._known.get(value) if isinstance(value, torch.Tensor) else None

    def _see_value(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the known values of an operation's result, and drop values that it has changed."""
        if not args:
            return
        name = func.__name__.partition(".")[0].rstrip("_")
        largest = largest_value(name, args, kwargs, result)
        if largest is None and (name in _SAME or name == "unbind") and args[0] in self._largest:
            largest = result, self._largest[args[0]]
        given, value = largest or ((), 0)
        for tensor in tensors_in(given):
            self._largest[tensor] = value
        if not isinstance(result, torch.Tensor):
            return
        if largest is None:
            self._largest.pop(result, None)
        truth = True if name == "full" and args[1] is True else self._given_by(name, *args[:2])
        if result is args[0] and result._base is not None:
            self._known.pop(result._base, None)
        if truth is not None:
            self._known[result] = truth
        else:
            self._known.pop(result, None)

    def _given_by(self, name: str, first: Any, second: Any = None) -> bool | None:
        known = self._known_value(first)
        if name in _NEVER:
            return False
        if name in _NOT:
            return None if known is None else not known
        if name in _AND or name in _OR:
            decides = name in _OR
            both = (known, self._known_value(second))
            return decides if decides in both else None if None in both else not decides
        if name in _COMPARED:
            if isinstance(second, (int, float)) and known is not None:
                return bool(_COMPARED[name](known, second))
            # NaN or infinity?
            asks_for_odd = first is second or (isinstance(second, float) and math.isinf(second))
            return (
                (name == "eq") is (first is second)
                if asks_for_odd and name in ("eq", "ne")
                else None
            )
        if name in _COUNTS:
            return False if known is False else None
        return known if name in _SAME else None

    # -- roles of storages, from torch's hooks on leaves and optimizers --------------------------

    def _see_argument(self, tensor: Any) -> None:
        if tensor.requires_grad and tensor.is_leaf and vars(tensor).get(_HOOKED) != id(tensor):
            # a copy has the original's attributes, but not its hooks
            vars(tensor)[_HOOKED] = id(tensor)
            self._follow(tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)

    def _follow(self, tensor: Any) -> Any:
        """Mark the roles of a tensor and of its gradient; return the handle of the gradient's hook,
        or None.
        """
        if isinstance(tensor, torch.nn.Parameter):
            self._log.mark(tensor, PARAMETERS)
        if not tensor.requires_grad or not tensor.is_leaf:
            return None
        return tensor.register_post_accumulate_grad_hook(
            lambda leaf: self._log.mark(leaf.grad, GRADIENTS) if leaf.grad is not None else None
        )

    def _backward_is_running(self) -> bool:
        """Return True if autograd runs the current operation; log the start of a backward pass."""
        graph = torch._C._current_graph_task_id()
        if graph > self._last_graph:
            self._last_graph = graph
            self._log.backwards.append(self._log.clock)
        return bool(graph != -1)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Mark the tensors of an optimizer's state."""
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                self._log.mark(tensor, OPTIMIZER)


def _refusal(words: str, func: Any) -> EstimateError:
    return EstimateError(
        f"{words}: {str(func).removeprefix('aten.').partition('.')[0]} in {user_line()}"
    )
