"""Follows torch's storages while real code runs: their roles, and what allocated them."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ipygpumem.errors import describe_error
from ipygpumem.estimating.memory.storage_follower import StorageFollower, hide_from_compiler
from ipygpumem.estimating.memory.storages import GRADIENTS, PARAMETERS, StorageLife, tensors_in
from ipygpumem.estimating.user_lines import users_part
from ipygpumem.extras.peak.cuda import BackwardOperation, CudaRecording, now_us
from ipygpumem.extras.peak.graph import WITHOUT_MEMORY, FollowedGraph
from ipygpumem.extras.peak.origins import (
    CallingCode,
    Modules,
    Names,
    OperationNames,
    Origin,
    is_owned,
)
from ipygpumem.extras.peak.pages import LEAST_COUNTED_BYTES, PagesLog
from ipygpumem.extras.peak.records import DevicePeak
from ipygpumem.extras.peak.row_keys import BUFFERS, ROLES, RowKeys
from ipygpumem.extras.peak.timeline import (
    Clock,
    FailureTime,
    Lives,
    MemoryAtTime,
    Timeline,
    alive_at,
)
from ipygpumem.heap.kinds.tensors import answers_itself
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import instance_dict, is_exactly, is_instance
from ipygpumem.inventory.arrays.records import Inventory
from ipygpumem.inventory.arrays.survey import roles_of_tensors

_SET = torch.ops.aten.set_
_MAY_HAVE_MEMORY = object()
"""Stands for the result of an operation that has not run yet, and may allocate memory."""
_OPERATOR = torch._ops.OpOverload
_PARAMETER = torch.nn.Parameter
_STRIDED = torch.strided
_is_in_inference_mode = torch.is_inference_mode_enabled
_device_name = functools.lru_cache(64)(str)
_RESIZE = torch.ops.aten.resize_.default
_FAKE = "torch._subclasses.fake_tensor"
_ON_NEW_STORAGE = {
    id(torch.ops.aten.lift_fresh.default),
    id(_SET.source_Storage),
    id(_SET.source_Storage_storage_offset),
}
"""Identities of operations in place on a storage that no operation has made.

It is made of Python's numbers, or loaded from a file.
"""
Inputs = tuple[Any, dict[str, Any]]
"""An operation's arguments, those by name apart."""
_LEAST_BYTES_WITH_LINE = 4096
"""Bytes of the smallest storage whose module and line are kept."""
_MOST_LIVES = 50_000
"""Number of storages after which the timelines get those that were freed, and the log drops them.
"""


class FailedOperation(NamedTuple):
    """An operation that raised an error."""

    failure: FailureTime
    """Its time."""
    origin: Origin
    """The operation, its module and its line."""


def _ends_following_on_failure(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that ends the following if it fails, and notes why; the user's code goes on.

    It does nothing once the following has ended.
    """

    @functools.wraps(method)
    def call(self: Follower, *arguments: Any, **more: Any) -> None:
        if self.error:
            return
        try:
            method(self, *arguments, **more)
        except Exception as error:
            if is_from_signal(error):
                raise
            self.error = describe_error(error)

    return call


class Follower(StorageFollower):
    """Logs the storages that operations of this thread, and of its backward passes, allocate.

    It is a dispatch mode: torch calls its ``__torch_dispatch__`` in place of each operation.

    Args:
        names: returns the names that the user's code sees now.
        keep_history: keep all events of CUDA's allocator, because the user wants torch's snapshot.
    """

    supports_higher_order_operators = True
    log: PagesLog

    def __init__(self, names: Names, *, keep_history: bool) -> None:
        super().__init__(PagesLog())
        self.clock = Clock()
        """Converts times of the log to seconds."""
        self.error = ""
        """Why following stopped early; empty if it did not."""
        self.failed_operation: FailedOperation | None = None
        """The last operation that raised an error."""
        self.notes: dict[str, None] = {}
        """Notes for the report, each once; the values mean nothing."""
        self.began = time.perf_counter()
        """The start of the code, on ``time.perf_counter``."""
        self._modules = Modules(names, self._mark_tensors_of_module)
        """Finds the module and the line of the user that ask for an operation."""
        self._graph = FollowedGraph()
        """Finds the line of the forward pass for an operation of a backward pass."""
        self._operations = OperationNames()
        self._row_keys = RowKeys(self.log)
        """Decides which storages share a row of the report."""
        self._recording = CudaRecording(keep=keep_history)
        """torch's history of CUDA's allocator, once the code uses CUDA."""
        self._timelines: dict[str, Timeline] = {}
        """The memory over time, by device."""
        self._most_lives = _MOST_LIVES
        """Number of storages in the log at which it is shortened next."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled; torch asks for this."""
        return True

    @property
    def snapshot(self) -> Any:
        """Torch's snapshot of the CUDA allocator at the end; None without CUDA."""
        return self._recording.snapshot

    @property
    def has_storages(self) -> bool:
        """True if any storage was alive since the start, so that names are needed."""
        return bool(self.log.lives or self._timelines)  # a timeline has storages that were freed

    @property
    def has_new_storages(self) -> bool:
        """True if the code has allocated or freed any storage."""
        return self.log.clock > 0

    # -- start and end -----------------------------------------------------------------------------

    def start(self) -> None:
        """Log the storages that exist, and follow this thread."""
        with torch._C.DisableTorchFunction():
            self._log_existing()
            self._note_named_objects()
        self.began = time.perf_counter()
        if torch.cuda.is_initialized():
            self._record_cuda()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self.__enter__()

    def _log_existing(self) -> None:
        """Log the storages of all plain tensors that exist, with their roles and names."""
        for item, role in roles_of_tensors():
            if is_exactly(item, torch.Tensor, torch.nn.Parameter):
                life = self._log_storage(item, existed_before=True)
                if life is not None:
                    life.role = ROLES.get(role, "")
        for name, value in self._modules.names():
            if is_exactly(value, torch.Tensor, torch.nn.Parameter):
                self.log.mark(value, role="", origin=Origin(name=name))

    def _record_cuda(self) -> None:
        """Start to record CUDA's allocations; note why if that is not possible."""
        error = self._recording.start(self.began, self.log.lives)
        if error:
            self.notes[error] = None

    def stop(self) -> None:
        """Stop following; the storages that are alive stay in the log."""
        for handle in self._handles:
            handle.remove()
        self._leave_mode_stack()
        if self._recording.stop():
            note = "torch's recording of CUDA memory ended early: what came later is not shown"
            self.notes[note] = None

    def _leave_mode_stack(self) -> None:
        """Leave torch's stack of modes; later modes that have not ended stay on it."""
        if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
            problem = "the block ended in another thread, or inside an operation"
            self.error = self.error or problem
            return
        later_modes = list[Any]()
        try:
            while (last := _get_current_dispatch_mode_stack()[-1]) is not self:
                # The base class's method: the mode's own __exit__ may do more than leave.
                TorchDispatchMode.__exit__(last, None, None, None)
                later_modes.append(last)
            self.__exit__(None, None, None)
        # A mode that was pushed in another way than by its __enter__ cannot be popped like this.
        except (IndexError, AttributeError) as error:
            problem = f"a dispatch mode is still open ({describe_error(error)})"
            self.error = self.error or problem
        finally:
            for mode in reversed(later_modes):
                TorchDispatchMode.__enter__(mode)

    def read(self, inventory: Inventory | None, *, ran_out: bool) -> list[DevicePeak]:
        """Return each device's peak, or the moment of the failed allocation. Call it once, after
        ``stop``.

        Args:
            inventory: has the names of the tensors that are alive; None if they are not known.
            ran_out: True if the code ended because memory ran out.
        """
        if inventory is not None:
            self._row_keys.add_names(inventory)
        self._note_named_objects()
        self._row_keys.note_replaced_values()
        self._modules.names = tuple  # none: they hold the frame
        self._sum_up(last=True)
        return [self._device_peak(device, ran_out=ran_out) for device in self._timelines]

    def _device_peak(self, device: str, *, ran_out: bool) -> DevicePeak:
        """Return the record of a device at its peak, or at the request that failed."""
        failure: FailureTime | None = None
        blocks = self._recording.blocks.get(device)
        if blocks is not None:
            source = "allocator"
            lives = blocks.lives
            failure = blocks.failure
        else:
            source = "storages"
            lives = self.log.lives
            if self.failed_operation is not None:
                failure = self.failed_operation.failure
        moment: MemoryAtTime | None = None
        if ran_out and failure is not None:
            on_device = [life for life in lives if life.device == device]
            moment = MemoryAtTime(alive_at(on_device, failure.tick), failure.seconds)
        timeline = self._timelines[device]
        return timeline.peak(device, self._row_keys.key, source=source, moment=moment)

    def _sum_up(self, *, last: bool = False) -> None:
        """Add the memory since the last call to the timelines.

        The log and the recording then forget the storages and blocks that were freed, unless this
        is the last call: ``_device_peak`` may need them for the moment of a failure.
        """
        self.log.count_pages()
        if last:
            self.log.close()
        else:
            self._recording.replay()
        lives_by_device: dict[str, list[StorageLife]] = {}
        for life in self.log.lives:
            lives_by_device.setdefault(life.device, []).append(life)
        blocks_by_device = self._recording.blocks
        for device in dict.fromkeys([*lives_by_device, *blocks_by_device]):
            blocks = blocks_by_device.get(device)
            if blocks is None:
                self._add_to_timeline(device, lives_by_device[device], self.clock, self.log.clock)
            else:
                self._add_to_timeline(device, blocks.lives, blocks.clock, blocks.tick)
        if not last:
            self.log.lives = [life for life in self.log.lives if life.died is None]
            for blocks in blocks_by_device.values():
                blocks.drop_freed_blocks()

    def _add_to_timeline(self, device: str, lives: Lives, clock: Clock, tick: int) -> None:
        """Add memory to the timeline of a device.

        Args:
            device: its name.
            lives: the storages or blocks since the last call, and those that are alive.
            clock: converts their ticks to seconds.
            tick: the tick until which they are known.
        """
        if device not in self._timelines:
            self._timelines[device] = Timeline(self._row_keys.role, clock)
        self._timelines[device].add(lives, tick)

    # -- what torch calls --------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        __tracebackhide__ = True  # of the user's errors
        kwargs = kwargs or {}
        is_view = id(func) in WITHOUT_MEMORY
        if types or is_view or not isinstance(func, _OPERATOR) or _is_in_inference_mode():
            result = self._result_without_memory(func, types, args, kwargs)
            if result is not _MAY_HAVE_MEMORY:
                return result
        call: CallingCode | None = None
        operation: BackwardOperation | None = None
        node_number = self._graph.note_operation(func)
        if node_number is not None or self._recording.is_on:
            call, operation = self._begin_operation(func, node_number)
        try:
            # What func(*args, **kwargs) calls, without its Python frame
            result = func._op(*args, **kwargs)
        except Exception as error:
            self._note_failed_operation(func)
            error.__traceback__ = users_part(error.__traceback__)
            raise
        finally:
            if operation is not None:
                operation.ended_us = now_us()
        # ``torch.add(x, y, out=z)`` enlarges the storage of an empty ``z``
        may_grow = func is _RESIZE or "out" in kwargs
        is_in_place = bool(args) and result is args[0]
        if is_in_place and not may_grow and id(func) not in _ON_NEW_STORAGE:
            return result  # ``x.add_(1)`` allocates nothing
        if not self.error:  # as _ends_following_on_failure does, without another call
            try:
                self._log_results(func, args, kwargs, result, call, may_grow=may_grow)
            except Exception as error:
                if is_from_signal(error):
                    raise
                self.error = describe_error(error)
        return result

    def _result_without_memory(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation if it cannot allocate memory itself, and return its result; otherwise
        return ``_MAY_HAVE_MEMORY``, and do not run it.

        The result is NotImplemented for an operation of a subclass: torch then dispatches its
        operations on the tensors inside.
        """
        kinds = []
        for kind in types:  # usually parameters alone; a comprehension would be one more frame
            if kind is not _PARAMETER and kind is not torch.Tensor:
                kinds.append(kind)  # noqa: PERF401
        # Fake tensors, of a mode inside this one, have no memory.
        if kinds and any(kind.__module__ == _FAKE for kind in kinds):
            return func(*args, **kwargs)
        # The operations on the tensors inside a subclass come here.
        if kinds and any(answers_itself(torch, kind) for kind in kinds):
            return NotImplemented
        if id(func) in WITHOUT_MEMORY:  # half of the operations of many steps
            try:
                return func._op(*args, **kwargs)
            except Exception as error:
                error.__traceback__ = users_part(error.__traceback__)
                raise
        # An operator that takes functions, whose operations come here.
        if not isinstance(func, _OPERATOR):
            return func(*args, **kwargs)
        # If the operation consists of smaller ones, it has run by now, and those have come here.
        result = self.run_decomposed(func, args, kwargs)
        if result is NotImplemented:
            return _MAY_HAVE_MEMORY
        return result

    @_ends_following_on_failure
    def _note_failed_operation(self, func: Any) -> None:
        """Note the time and the origin of an operation that raised an error."""
        origin = self._origin_of(func, self._modules.calling_code(sys._getframe(1)))
        failure = FailureTime(self.log.clock, time.perf_counter() - self.began)
        self.failed_operation = FailedOperation(failure, origin)

    def _origin_of(self, func: Any, call: CallingCode) -> Origin:
        """Return the origin of an operation that runs now, asked for by ``call``."""
        is_in_backward_pass = torch._C._current_graph_task_id() != -1
        if is_in_backward_pass:
            return self._graph.origin(self._operations.name(func), call)
        return Origin(module=call.module, operation=self._operations.name(func), line=call.line)

    def _begin_operation(
        self, func: Any, node_number: int | None
    ) -> tuple[CallingCode | None, BackwardOperation | None]:
        """Note the node that autograd has made for an operation, and the time of an operation of a
        backward pass, by which CUDA's blocks without a line are found.

        Args:
            func: the operation.
            node_number: the number of its node in autograd's graph; None without one.

        Returns:
            The code that asks for the operation, and the operation of the backward pass; None for
            each that was not needed.
        """
        if self.error:
            return None, None
        try:
            is_timed = self._recording.is_on and torch._C._current_graph_task_id() != -1
            if node_number is None and not is_timed:
                return None, None
            call = self._modules.calling_code(sys._getframe(1))
            if node_number is not None:
                self._graph.record_node(node_number, self._operations.name(func), call)
            if not is_timed:
                return call, None
            return call, self._recording.begin_operation(self._origin_of(func, call))
        except Exception as error:
            if is_from_signal(error):
                raise
            self.error = describe_error(error)
            return None, None

    def _log_results(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        call: CallingCode | None,
        *,
        may_grow: bool,
    ) -> None:
        """Log the storages of an operation's results.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its named arguments.
            result: a tensor, or a nested tuple or list of tensors and other values.
            call: the code that asks for the operation; None if it was not looked up yet.
            may_grow: True if the operation may have enlarged a storage that is in the log.
        """
        has_new_life = False
        tensors: Sequence[Any] = (result,)
        if type(result) is not torch.Tensor:
            tensors = _plain_tensors(result)
        for tensor in tensors:
            life = self._log_storage(tensor)
            # On a card a storage that grows gets another block, which its history shows.
            if may_grow and life is None and tensor.device.type == "cpu":
                life = self.log.log_growth(tensor, "cpu")
                if life is not None:
                    self.log.note_address(life, tensor)
            if life is None:
                continue
            has_new_life = True
            self.clock.note(self.log.clock, time.perf_counter() - self.began)
            self._note_origin(life, func, (args, kwargs), call)
        if not has_new_life:
            return
        is_full = self._recording.is_on and self._recording.is_full
        if is_full or len(self.log.lives) > self._most_lives:
            self._sum_up()
            self._most_lives = len(self.log.lives) + _MOST_LIVES

    def _note_origin(
        self, life: StorageLife, func: Any, inputs: Inputs, call: CallingCode | None
    ) -> None:
        """Note where a storage was allocated, and if autograd recorded the operation, whose
        backward pass may need it.
        """
        life.recorded = torch.is_grad_enabled() and _require_gradients(inputs)
        if life.size_bytes < _LEAST_BYTES_WITH_LINE:
            life.origin = self._operations.origin(func)
            return
        if call is None:
            call = self._modules.calling_code(sys._getframe(1))
        life.origin = self._origin_of(func, call)
        # In a custom function's forward method gradients are disabled; its call is recorded.
        if call.functions and call.functions[-1].arguments:
            arguments = call.functions[-1].arguments
            life.recorded = any(item.requires_grad for item in tensors_in(arguments))

    def _log_storage(self, tensor: Any, *, existed_before: bool = False) -> StorageLife | None:
        """Log a tensor's storage, and return its life in the log; None if nothing was logged.

        A view's storage is in the log already, and a tensor on the device ``meta`` has none.
        """
        is_strided = tensor.layout is _STRIDED
        if is_strided:
            storage = tensor.untyped_storage()
            if storage._cdata in self.log.alive:
                return None
        device = "cpu" if tensor.is_cpu else _device_name(tensor.device)
        if device == "meta":
            return None
        # Before the storage is logged: it is allocated after the backward pass has begun.
        in_backward = not existed_before and self.note_backward_pass()
        if not is_strided:  # sparse: it has several storages, and no address
            return self.log.log_tensor(
                tensor, device, existed_before=existed_before, in_backward=in_backward
            )
        life = self.log.log_storage(
            storage, storage.nbytes(), device, existed_before=existed_before
        )
        life.in_backward = in_backward
        if device == "cpu":
            if life.size_bytes >= LEAST_COUNTED_BYTES:
                self.log.note_address(life, tensor)
        elif device.startswith("cuda"):
            life.address = tensor.untyped_storage().data_ptr()
            self._match_block(life)
        return life

    def _match_block(self, life: StorageLife) -> None:
        """Let the recording of CUDA's allocations match a new storage with its block.

        The first storage that the code allocates starts the recording.
        """
        if self._recording.is_on:
            self._recording.note_storage(life)
        elif self._recording.is_possible and not life.existed_before:
            self._record_cuda()

    # -- what tensors are for ----------------------------------------------------------------------

    @_ends_following_on_failure
    def _note_named_objects(self) -> None:
        """Note the tensors of the modules and optimizers that have names."""
        # the paths of the first name replace those of later ones, such as ``Out[5]``
        for name, value in reversed(list(self._modules.names())):
            if is_instance(value, torch.nn.Module):
                self._modules.note_modules(value, name)
        for _, value in self._modules.names():
            if is_instance(value, torch.optim.Optimizer):
                self._before_step(value)
                self._after_step(value)

    def _mark_tensors_of_module(self, path: str, module: Any) -> None:
        """Mark the parameters, gradients and buffers of a module."""
        parts = instance_dict(module) or {}
        origin = Origin(module=path)
        for kind, role in (("_buffers", BUFFERS), ("_parameters", PARAMETERS)):
            for tensor in parts.get(kind, {}).values():
                if tensor is None:
                    continue
                self.log.mark(tensor, role, origin)
                if is_exactly(tensor, torch.nn.Parameter):
                    with torch._C.DisableTorchFunction():
                        gradient = tensor.grad
                    if gradient is not None:
                        self.log.mark(gradient, GRADIENTS, origin)

    @_ends_following_on_failure
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Mark the gradients before an optimizer's step."""
        if torch.compiler.is_compiling():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.mark_gradient(parameter, parameter.grad)

    @_ends_following_on_failure
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Mark the tensors of the optimizer's state after its step, which may have created them."""
        if not torch.compiler.is_compiling():
            self.mark_state(optimizer)

    def owner(self, parameter: Any) -> Origin | None:
        """Return the origin of a parameter, which names its module; None if it is not known.

        The base class asks for it to mark the parameter's gradient and its optimizer's state.
        """
        is_plain = is_exactly(parameter, torch.nn.Parameter, torch.Tensor)
        if not is_plain or parameter.layout is not torch.strided:
            return None
        life = self.log.life(parameter.untyped_storage()._cdata)
        return life.origin if life is not None and is_owned(life) else None


def _require_gradients(inputs: Inputs) -> bool:
    """Return True if a tensor in an operation's arguments requires gradients.

    Most of them are not in lists: this takes half of the time of ``tensors_in``.
    """
    args, kwargs = inputs
    values = args if not kwargs else (*args, *kwargs.values())
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif type(value) is list and any(item.requires_grad for item in tensors_in(value)):
            return True
    return False


def _plain_tensors(result: Any) -> list[Any]:
    """Return the tensors in an operation's result that are not of a subclass."""
    return [tensor for tensor in tensors_in(result) if type(tensor) is torch.Tensor]


hide_from_compiler(Follower)
