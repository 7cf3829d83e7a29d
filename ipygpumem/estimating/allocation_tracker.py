"""Intercepts the operations of code on fake tensors, and logs the storages that they allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.devices.devices import CARD, Devices
from ipygpumem.estimating.devices.tensor_locations import TensorLocations
from ipygpumem.estimating.isolation.fake_copies import FakeCopies
from ipygpumem.estimating.memory.storage_follower import StorageFollower, hide_from_compiler
from ipygpumem.estimating.memory.storages import PARAMETERS, StorageLog, tensors_in
from ipygpumem.estimating.operators.assumptions import Assumptions
from ipygpumem.estimating.operators.card import Operation
from ipygpumem.estimating.operators.card_operations import CardOperations
from ipygpumem.estimating.operators.convolutions import takes_cudnn
from ipygpumem.estimating.operators.guesses import COMPARISONS, Guesses, KnownValues
from ipygpumem.estimating.operators.in_place import IN_PLACE, works_in_place
from ipygpumem.estimating.operators.largest import LARGEST, is_known, is_mask, of_share
from ipygpumem.estimating.operators.layouts import may_differ_in_layout, with_layout_of_card
from ipygpumem.estimating.operators.missing_operators import (
    STAND_INS,
    with_saved_workspace,
    without_channels_last,
)
from ipygpumem.estimating.operators.result_cache import ResultCache
from ipygpumem.estimating.operators.sparse import (
    OF_PARTS,
    coalesce,
    coalesce_on_host,
    has_unknown_entries,
    is_sparse,
    parts_of,
    stand_in,
)
from ipygpumem.estimating.operators.torch_functions import UNKNOWN
from ipygpumem.estimating.operators.transients import least_bytes, operator_name
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.unfollowed import Unfollowed
from ipygpumem.estimating.user_lines import user_line

_ATEN = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SCALAR = _ATEN._local_scalar_dense.default
_CONVOLUTIONS = (_ATEN.convolution.default, _ATEN.convolution_backward.default)
_COALESCE = _ATEN._coalesce.default
_BINCOUNT = _ATEN.bincount.default
_INDEX = _ATEN.index.Tensor
_REPEAT = _ATEN.repeat_interleave.Tensor
_SELECT = _ATEN.masked_select.default
_EMPTY = frozenset({"empty_like", "new_empty", "new_empty_strided"})
"""Operators whose results have no values, even if those of their arguments are known."""
_CONSTANTS = (_ATEN.lift_fresh.default, _ATEN.lift.default)
"""Operators whose arguments are real tensors that the code has just created from constants."""
_UNFOLLOWED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    NotImplementedError,
    AssertionError,
    AttributeError,
    KeyError,
)
"""Errors that torch raises if it cannot run an operation on fake tensors.

The user's mistakes raise other errors.
"""
_NOT_INFERRED = (
    "this code cannot be estimated, because torch cannot infer the result of an operation"
)
_HOOKED = "_ipygpumem_hooked"
"""Attribute of a fake tensor whose gradient we hook: the tensor's identity.

A copy of the tensor has the attribute, too, but not the hook, and another identity.
"""


class _OperatorCall(NamedTuple):
    """One call of an operator on fake tensors."""

    func: Any
    """The operator, as torch passes it to a mode."""
    args: Any
    """The arguments that it gets by position."""
    kwargs: Any
    """The arguments that it gets by name."""
    tensors: list[Any]
    """The tensors among the arguments that the code has passed, of which some may be real."""
    sparse_parts: list[Any]
    """The parts of its sparse tensors: an operator may replace them, and they must stay alive until
    the results are logged.
    """
    in_backward: bool
    """True if a backward pass runs."""


class AllocationTracker(StorageFollower):
    """Logs the storages that operations allocate, and guesses the values of fake tensors.

    Args:
        log: the log of storages.
        devices: the devices of the estimate.
        locations: the location of each tensor, on a card or on the host.
        operations: logs the results of operations, and the other memory of a card's kernels.
        copies: makes fake copies of real tensors that the code reaches.
        note: adds a line to the notes.
        check: is called before each operation, and may raise to stop the code.
        assumptions: the shares of values that lines select.
        results: runs operators on fake tensors.
        unfollowed: gets the kinds of code whose memory is not followed.
    """

    def __init__(
        self,
        log: StorageLog,
        devices: Devices,
        locations: TensorLocations,
        operations: CardOperations,
        copies: FakeCopies,
        note: Note,
        check: Callable[[], object],
        assumptions: Assumptions,
        results: ResultCache,
        unfollowed: Unfollowed,
    ) -> None:
        super().__init__(log)
        self._assumptions = assumptions
        self._devices = devices
        self._locations = locations
        self._operations = operations
        self._copies = copies
        self._check = check
        self._results = results
        self._unfollowed = unfollowed
        self._guesses = Guesses(note)
        self.observe: Callable[[Any, Any, Any, Any], object] | None = None
        """Called with each operation, its arguments and its result."""
        self.upper_bounds: dict[str, None] = {}
        """Lines whose results are assumed to be as large as possible, in order; a set."""
        self._handles: list[Any] = []
        """Handles of the hooks on real tensors."""
        self._late_copies: dict[int, tuple[Any, Any]] = {}
        """Real tensors that the code reached without a name that was copied, such as those of a
        C extension, each with its fake copy; by the identity of the real one.
        """

    @property
    def known_values(self) -> KnownValues:
        """Values of fake tensors that follow from the operations alone."""
        return self._guesses.values

    @property
    def guesses(self) -> dict[str, int]:
        """Lines that asked for a tensor's value and got a guess, in order, and how often."""
        return self._guesses.lines

    def forget(self) -> None:
        """Remove the hooks on real tensors, and the references to them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._late_copies.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors, and log its storages; torch calls it for each one."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], fake_tensor.FakeTensor):
            return args[0].fake_device  # frequent, and slow in torch
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operations on its inner tensors come here
        if not self._copies.paused:
            parts = self.run_decomposed(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        with self._copies.lock:
            if self._copies.paused:
                return func(*args, **kwargs)
            self._check()
            # In a backward pass the mode of torch functions is active here, too: each attribute of
            # a tensor that we or torch's fakes read would be a call of its handler.
            with torch._C.DisableTorchFunction():
                if not self._devices.uses_host:
                    return self._follow_operation(func, args, kwargs)
                with self._devices.placing(self._location_of_results(args, kwargs)):
                    return self._follow_operation(func, args, kwargs)

    def _location_of_results(self, args: Any, kwargs: Any) -> str:
        """Return the location of an operation's results: the one that the code has named for the
        current call, as in ``torch.zeros(3, device="cpu")``, or else that of its arguments.
        """
        if self._devices.location is not None:
            return self._devices.location
        return self._locations.of_results(tensors_in((args, kwargs)))

    def _follow_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and log the storages of its results: choose the function that runs for
        it, run that, correct its result, and log it.
        """
        call = self._prepare_call(func, args, kwargs)
        if call.in_backward and func in IN_PLACE and works_in_place(func, call.args):
            return self._log_change_in_place(call)
        operator = self._choose_operator(call)
        try:
            result = self._run_operator(call, operator)
        except _UNFOLLOWED as error:
            if func is _SCALAR or func in COMPARISONS:
                return self._guesses.guess_for(func, call.args[0])
            raise _refusal(_reason_of(error), func) from error
        result = self._correct(call, result)
        self._show_to_observers(call, result)
        self._log_results(call, operator, result)
        return result

    def _prepare_call(self, func: Any, args: Any, kwargs: Any) -> _OperatorCall:
        """Return the call of an operator, with fake copies instead of real tensors.

        The roles of its tensors are marked in the log.
        """
        in_backward = self.note_backward_pass()
        if func in _CONSTANTS:  # torch itself makes fake tensors of these real ones
            return _OperatorCall(func, args, kwargs, [], [], in_backward)
        tensors = list(tensors_in((args, kwargs)))
        args, kwargs = self._with_fakes(tensors, args, kwargs)
        sparse_parts = [parts_of(tensor) for tensor in tensors if is_sparse(tensor)]
        return _OperatorCall(func, args, kwargs, tensors, sparse_parts, in_backward)

    def _choose_operator(self, call: _OperatorCall) -> Any:
        """Return the function to run for a call: its operator, or one that knows the result.

        If the result has a size that depends on values, the assumption that is made is noted.
        """
        if call.sparse_parts:
            if call.func is _COALESCE:
                device = self._devices.assumed_for(call.args[0].device)
                is_on_card = device.startswith("cuda")
                largest = coalesce if is_on_card else coalesce_on_host
                return self._assume_size(call.func, largest)
            operator = stand_in(call.func, call.args)
            if operator is not None:
                return operator
        return self._choose_by_values(call.func, call.args, call.tensors)

    def _run_operator(self, call: _OperatorCall, operator: Any) -> Any:
        """Return the result of ``operator``, which runs for a call.

        Raises:
            EstimateError: the result is sparse, and its number of entries is not known.
        """
        func, args, kwargs = call.func, call.args, call.kwargs
        if _copies_values(func, args, kwargs):
            with _without_values(args[0]):  # torch would really copy them
                result = self._results.run(func, operator, args, kwargs)
        else:
            result = self._results.run(func, operator, args, kwargs)
        if isinstance(result, torch.Tensor) and has_unknown_entries(func, operator, result):
            raise _refusal("an estimate cannot follow sparse tensors", func)
        return result

    def _show_to_observers(self, call: _OperatorCall, result: Any) -> None:
        """Let the known values follow from a call, and call the observer if there is one."""
        func, args, kwargs = call.func, call.args, call.kwargs
        self._guesses.values.note_operation(func, args, kwargs, result)
        if self.observe is not None:
            self.observe(func, args, kwargs, result)

    def _log_change_in_place(self, call: _OperatorCall) -> Any:
        """Log a call that autograd makes in place, and return its result: its first argument.

        The result needs no memory, but a card's kernel may take other blocks.
        """

        def log_nothing(_: Any) -> None:
            return

        name, changed = operator_name(call.func), call.args[0]
        operation = Operation(name, call.args, {}, results=[changed], in_backward=True)
        self._operations.log(operation, log_nothing)
        return changed

    def _log_results(self, call: _OperatorCall, operator: Any, result: Any) -> None:
        """Log the storages of a call's results, and the other memory that it takes.

        Values of the results that torch has read from uninitialised memory are forgotten.

        Args:
            call: the call.
            operator: the function that has run for it.
            result: its result, a tensor or several.
        """
        name = operator_name(call.func)
        if call.sparse_parts and operator is call.func and call.func not in OF_PARTS:
            name = f"sparse {name}"  # has no rule: those are for dense tensors
            self._operations.unknown_operators.setdefault(name)
        may_have_values = operator is call.func and name not in _EMPTY
        if not may_have_values or not all(map(_may_be_known, call.tensors)):
            _forget_values(tensors_in(result))
        recorded = _is_recorded(call.tensors)

        def log_result(tensor: Any) -> None:
            self._log_result(name, call, tensor, recorded=recorded)

        results = list(tensors_in(result))
        operation = Operation(name, call.args, call.kwargs, results, call.in_backward)
        self._operations.log(operation, log_result)

    def _log_result(self, name: str, call: _OperatorCall, tensor: Any, *, recorded: bool) -> None:
        """Log the storage of one result of a call.

        Args:
            name: the operator in the log, such as ``addmm``.
            call: the call.
            tensor: the result.
            recorded: True if autograd records the call for the backward pass.
        """
        device = tensor.device
        if isinstance(tensor, fake_tensor.FakeTensor):
            device = tensor.fake_device
        if device.type == "meta":  # meta tensors have no memory
            return
        is_on_card = self._devices.assumed_for(device).startswith("cuda")
        self.log.log_tensor(
            tensor,
            self._devices.name_in_log(device),
            least_bytes=least_bytes(name, call.args, tensor, is_on_card=is_on_card),
            recorded=recorded,
            in_backward=call.in_backward,
        )

    def _with_fakes(self, arguments: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an operation's arguments by position and by name, with fake copies instead of real
        tensors.

        ``arguments`` are all tensors among them; their roles are marked in the log.
        """
        has_real_tensors = False
        for tensor in arguments:
            if isinstance(tensor, fake_tensor.FakeTensor):
                self._mark_argument(tensor)
            else:
                self._copy_real_tensor(tensor)
                has_real_tensors = True
        if not has_real_tensors:
            return args, kwargs

        def fake_of(tensor: Any) -> Any:
            """Return the fake copy of a real tensor; a fake tensor itself."""
            if id(tensor) not in self._late_copies:
                return tensor
            _, fake = self._late_copies[id(tensor)]
            return fake

        copies: tuple[Any, Any] = tree_map_only(torch.Tensor, fake_of, (args, kwargs))
        return copies

    def _copy_real_tensor(self, tensor: Any) -> None:
        """Make a fake copy of a real tensor, once, and hook its gradient."""
        if id(tensor) in self._late_copies:
            return
        # A copy made in inference mode could not be a part of code that autograd follows, and torch
        # makes no views of it.
        with torch.inference_mode(tensor.is_inference()), self._devices.placing(CARD):
            original = self._copies.share(tensor)
            copy = self._copies.of(original)
        self._late_copies[id(tensor)] = tensor, copy
        handle = self._hook_leaf(tensor)
        if handle is not None:
            self._handles.append(handle)

    def _choose_by_values(self, func: Any, args: Any, arguments: list[Any]) -> Any:
        """Return the function to run for an operation without sparse arguments.

        If the size of the result depends on values, as that of ``x[x > 0]``, and these are unknown,
        it is a function that assumes a size (see ``_assume_size``).
        """
        if func is _SCALAR and is_known(args[0]) and args[0].numel() == 1:
            return _known_value
        if func is _INDEX and not any(map(is_mask, args[1])):
            return STAND_INS.get(func, func)
        largest = LARGEST.get(func.name())
        if largest is None or all(map(is_known, arguments)):
            return STAND_INS.get(func, func)
        deciding = _tensors_that_decide(func, args, arguments)
        if all(map(is_known, deciding)):
            return largest
        return self._assume_size(func, largest)

    def _assume_size(self, func: Any, largest: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function whose result has the share that the user has assumed for the line.

        Without such a share it is ``largest``, whose result is as large as possible, and the line
        is noted as an upper bound. Counts have no bound: their line is noted as not followed.
        """
        line = user_line()
        share = self._assumptions.share_of(line)
        if share is not None:
            with_share = of_share(largest, share)
            if with_share is not None:
                self._assumptions.used[line] = share
                return with_share
        if func is _BINCOUNT:
            self._unfollowed.note_counting_line(line)
        else:
            self.upper_bounds[line] = None
        return largest

    def _correct(self, call: _OperatorCall, result: Any) -> Any:
        """Return a call's result, corrected where fake tensors differ from the device's kernels."""
        func, args = call.func, call.args
        if func is _ATEN.mkldnn_rnn_layer.default:
            return with_saved_workspace(func, args, call.kwargs, result)
        if may_differ_in_layout(func) and self._is_on_card(result):
            result = with_layout_of_card(func, args, result)
        if not self._devices.cpu_is_stand_in:
            return result
        if func in _CONVOLUTIONS and not takes_cudnn():
            return without_channels_last(result)
        if func is _ATEN.log_sigmoid_forward.default:
            output, buffer = result
            return output, buffer.new_empty(0)  # CUDA saves nothing for backward
        return result

    def _is_on_card(self, result: Any) -> bool:
        """Return True if an operation's first result has strides, and is assumed on a card."""
        first = next(tensors_in(result), None)
        if first is None or first.layout is not torch.strided:
            return False
        return self._devices.assumed_for(first.device).startswith("cuda")

    # -- roles of storages, from torch's hooks on leaves -------------------------------------------

    def _mark_argument(self, tensor: Any) -> None:
        """Mark a fake tensor in the log if it is a parameter; hook the gradient of a leaf once."""
        is_hooked = vars(tensor).get(_HOOKED) == id(tensor)
        if tensor.requires_grad and tensor.is_leaf and not is_hooked:
            vars(tensor)[_HOOKED] = id(tensor)
            self._hook_leaf(tensor)
        elif isinstance(tensor, torch.nn.Parameter):
            self.log.mark(tensor, PARAMETERS)

    def _hook_leaf(self, tensor: Any) -> Any:
        """Mark a parameter in the log, and hook the gradient of a leaf, so that it is marked, too.

        Return the handle of the hook; None if the tensor gets no gradient.
        """
        if isinstance(tensor, torch.nn.Parameter):
            self.log.mark(tensor, PARAMETERS)
        if not tensor.requires_grad or not tensor.is_leaf:
            return None

        def mark(leaf: Any) -> None:
            with torch._C.DisableTorchFunction():
                self.mark_gradient(leaf, leaf.grad)

        return tensor.register_post_accumulate_grad_hook(mark)


hide_from_compiler(AllocationTracker)


def _tensors_that_decide(func: Any, args: Any, arguments: list[Any]) -> list[Any]:
    """Return the tensors whose values decide on the size of an operation's result.

    These are masks; for ``x.unique()`` and the like, all ``arguments``.
    """
    if func is _INDEX:
        return [index for index in args[1] if is_mask(index)]
    if func is _SELECT:
        return arguments[1:]
    return arguments


def _known_value(tensor: Any) -> Any:
    """Return the known value of a tensor of one element, for which torch asks its dispatcher."""
    with no_dispatch():
        return tensor.constant.item()


def _is_recorded(arguments: list[Any]) -> bool:
    """Return True if autograd records an operation for the backward pass."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in arguments)


def _may_be_known(argument: Any) -> bool:
    """Return False for a fake tensor without values, and True for a real tensor."""
    return is_known(argument) or not isinstance(argument, fake_tensor.FakeTensor)


def _forget_values(results: Iterable[Any]) -> None:
    """Forget the values of results, which torch has read from uninitialised memory.

    torch's rules for some operators, such as indexing, call ``new_empty`` on known values.
    """
    for tensor in results:
        if is_known(tensor):
            tensor.constant = None


@contextmanager
def _without_values(tensor: Any) -> Iterator[None]:
    """Hide the known values of a fake tensor from torch during the block."""
    constant = tensor.constant
    tensor.constant = None
    try:
        yield
    finally:
        tensor.constant = constant


def _copies_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operation copies a tensor of several known values to another device than
    the CPU.
    """
    if func is not _ATEN._to_copy.default:
        return False
    source = args[0]
    if not isinstance(source, fake_tensor.FakeTensor):
        return False
    if source.constant is None or source.constant.numel() < 2:
        return False
    device = torch.device(kwargs.get("device") or "cpu")
    return bool(device.type != "cpu")


def _reason_of(error: BaseException) -> str:
    """Return why an operation cannot be followed, from the error that torch raised."""
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return _NOT_INFERRED
    return UNKNOWN


def _refusal(reason: str, func: Any) -> EstimateError:
    """Return the error of an estimate that cannot follow an operation on the current line."""
    operation, _, _ = str(func).removeprefix("aten.").partition(".")
    hint = ""
    if func is _REPEAT:
        hint = "; pass it the size of its result, output_size"
    return EstimateError(f"{reason}: {operation} in {user_line()}{hint}")
