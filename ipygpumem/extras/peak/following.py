"""Follows torch's storages while real code runs: their roles, the modules and lines that allocated them."""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ipygpumem.errors import describe_error
from ipygpumem.estimating import users_part
from ipygpumem.estimating.allocation_tracker import tensors_in
from ipygpumem.estimating.storages import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
    StorageLife,
    StorageLog,
    workspace_sizes,
)
from ipygpumem.estimating.transients import operator_name
from ipygpumem.extras.peak.cuda import Block, History
from ipygpumem.extras.peak.records import DevicePeak
from ipygpumem.extras.peak.timeline import Clock, Timeline, alive_at, device_peak
from ipygpumem.heap.arrays import answers_itself
from ipygpumem.heap.holders.frames import peek, stack
from ipygpumem.introspect import is_exactly, is_users, type_name
from ipygpumem.inventory.records import Inventory
from ipygpumem.inventory.survey import roles_of_objects

BUFFERS, DATA = "buffers", "data"
_ROLES = {"parameter": PARAMETERS, "gradient": GRADIENTS, "optimizer state": OPTIMIZER, "buffer": BUFFERS}
Names = Callable[[], Iterable[tuple[str, object]]]
"""Returns the names that the user's code sees now."""
Place = tuple[str, str, tuple[str, int] | None]
"""Path of a module, name of an operation, and file and number of a line."""
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_SET = torch.ops.aten.set_
_RESIZE = torch.ops.aten.resize_.default
_FAKE = "torch._subclasses.fake_tensor"
_FROM_ELSEWHERE = (torch.ops.aten.lift_fresh.default, _SET.source_Storage, _SET.source_Storage_storage_offset)
"""Operations in place on a storage that no operation has made: of Python's numbers, or loaded from a file."""
_LEAST_PLACED = 4096
"""Bytes of the smallest storage whose module and line are kept."""
_MOST_LIVES = 50_000
"""Number of storages after which those that were freed are summed up."""


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method whose failures are noted, and end the following; the user's code goes on."""

    @functools.wraps(method)
    def call(self: Follower, *arguments: Any, **more: Any) -> None:
        if not self.error:
            try:
                method(self, *arguments, **more)
            except Exception as error:
                self.error = describe_error(error)

    return call


class Follower(TorchDispatchMode):
    """Logs the storages that operations of this thread, and of its backward passes, allocate."""

    supports_higher_order_operators = True

    def __init__(self, names: Names, *, keep_history: bool = False) -> None:
        super().__init__()
        self.log = StorageLog()
        self.clock = Clock()
        self.error = ""
        """Why following stopped early; empty if it did not."""
        self.failed: tuple[int, float, Any] | None = None
        """The log's clock, the time and the place of the last operation that raised an error."""
        self._user_names = names
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        """Modules that ran and those inside them, with their paths, by identity."""
        self._operations: dict[Any, str] = {}
        self._gradients: dict[int, int] = {}
        """Identities of the parameters' storages, by the identity of their gradient's life."""
        self._names: dict[int, str] = {}
        """Names of the lives that are alive at the end, by identity."""
        self._last_graph = -1
        self._labels: dict[Any, str] = {}
        self._timelines: dict[str, Timeline] = {}
        self._most_lives = _MOST_LIVES
        self._keeps_history, self._has_history = keep_history, True
        self._history: History | None = None
        self.snapshot: Any = None
        """torch's snapshot of the CUDA allocator at the end, with its history; None without CUDA."""
        self.notes: dict[str, None] = {}
        self.began = time.perf_counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled; torch asks for this."""
        return True

    # -- start and end ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Log the storages that exist, and follow this thread."""
        with torch._C.DisableTorchFunction():
            for item, role in roles_of_objects():
                if is_exactly(item, torch.Tensor, torch.nn.Parameter):
                    life = self._see(item, before=True)
                    if life is not None:
                        life.role = _ROLES.get(role, "")
        self.began = time.perf_counter()
        if torch.cuda.is_initialized():
            self._record_cuda()
        self._handles = [
            register_optimizer_step_pre_hook(self._will_step),
            register_optimizer_step_post_hook(self._stepped),
        ]
        self.__enter__()

    def _record_cuda(self) -> None:
        began_us = time.time_ns() // 1000 - int((time.perf_counter() - self.began) * 1e6)
        try:
            self._history = History(began_us, keep=self._keeps_history)
            for life in self.log.lives:
                if life.address:
                    self._history.saw(life)
        except (RuntimeError, TypeError, AttributeError) as error:  # another allocator, an old torch
            self._has_history, self.notes[f"CUDA's allocator has no history ({describe_error(error)})"] = False, None

    def stop(self) -> None:
        """Stop following; the storages that are alive stay in the log."""
        for handle in self._handles:
            handle.remove()
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        else:
            self.error = self.error or "the code left a dispatch mode open"
        if self._history is not None:
            self.snapshot = self._history.replay(last=True)

    def read(self, inventory: Inventory | None, *, ran_out: bool) -> list[DevicePeak]:
        """Return each device's peak, or the moment of the failed allocation; names are those of ``inventory``."""
        by_key: dict[int, str] = {}
        for record in inventory.tensors if inventory is not None else ():
            life = self.log.life(record.storage) if record.library == "torch" else None
            if life is None:
                continue
            if record.name is not None:
                by_key[record.storage] = self._names[id(life)] = record.name
            if record.kind != "other" and (not life.role or record.kind == "parameter"):
                life.role = _ROLES[record.kind]
        for gradient, key in self._gradients.items():
            if key in by_key:
                self._names.setdefault(gradient, f"{by_key[key]}.grad")
        self.log.close()
        self._fold(last=True)
        found = []
        for device, timeline in self._timelines.items():
            blocks = self._history.devices.get(device) if self._history is not None else None
            failed = self.failed if blocks is None else blocks.failed
            moment = None
            if ran_out and failed is not None:
                lives = [life for life in (blocks or self.log).lives if life.device == device]
                moment = alive_at(lives, failed[0]), failed[1]
            source = "storages" if blocks is None else "allocator"
            found.append(device_peak(device, timeline, self._row, source=source, moment=moment))
        return found

    def _fold(self, *, last: bool = False) -> None:
        """Sum up the storages so far, and drop those that were freed."""
        by_device: dict[str, tuple[list[StorageLife], Clock, int]] = {}
        for life in self.log.lives:
            by_device.setdefault(life.device, ([], self.clock, self.log.clock))[0].append(life)
        if not (last or self._history is None or self._keeps_history):
            self._history.replay(last=False)
        for device, blocks in self._history.devices.items() if self._history is not None else ():
            by_device[device] = blocks.lives, blocks.clock, blocks.tick
        for device, (lives, clock, tick) in by_device.items():
            if device not in self._timelines:
                self._timelines[device] = Timeline(self.role, clock)
            self._timelines[device].add(lives, tick)
        if not last:
            self.log.lives = [life for life in self.log.lives if life.died is None]
            for blocks in self._history.devices.values() if self._history is not None else ():
                blocks.prune()

    def role(self, life: StorageLife) -> str:
        """Return the role of a storage, or of a block and the storage in it."""
        if type(life.place) is not Block:
            role = self.log.role(life)
            return DATA if role == OTHER else role
        if life.place.storage is not None:
            return self.role(life.place.storage)
        sizes = {*workspace_sizes(None), *workspace_sizes((0, 0))}
        return WORKSPACES if life.died is None and life.size_bytes in sizes else DATA if life.before else TEMPORARIES

    def _row(self, life: StorageLife) -> tuple[str, str, str, str, tuple[str, int] | None]:
        if type(life.place) is Block:
            if life.place.storage is not None:
                return self._row(life.place.storage)
            return self.role(life), "", "", "held by C++" if life.before else "inside an operation", life.place.line
        name = self._names.get(id(life), "")
        place = ("", "", None) if name else life.place or ("", "existed before", None)
        return (self.role(life), name, *place)

    # -- what torch calls ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        __tracebackhide__ = True  # of the user's errors
        kwargs = kwargs or {}
        if any(kind.__module__ == _FAKE for kind in types):  # of a mode inside this one, which has no memory
            return func(*args, **kwargs)
        if types and any(kind is not torch.Tensor and answers_itself(torch, kind) for kind in types):
            return NotImplemented  # a subclass's operation; those on the tensors inside it come here
        if not isinstance(func, torch._ops.OpOverload):  # takes functions, whose operations come here
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # outside of it, autograd decomposes composite operators
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.failed = self.log.clock, time.perf_counter() - self.began, self._place(func)
            error.__traceback__ = users_part(error.__traceback__)
            raise
        may_grow = func is _RESIZE or "out" in kwargs
        if may_grow or func in _FROM_ELSEWHERE or not (args and result is args[0]):  # any other is in place
            self._followed(func, args, kwargs, result, may_grow=may_grow)
        return result

    @_guarded
    def _followed(self, func: Any, args: Any, kwargs: Any, result: Any, *, may_grow: bool) -> None:
        graph = torch._C._current_graph_task_id()
        if graph > self._last_graph:
            self._last_graph = graph
            self.log.backwards.append(self.log.clock)
        for tensor in (result,) if type(result) is torch.Tensor else tensors_in(result):
            if type(tensor) is not torch.Tensor:
                continue
            life = self._see(tensor, in_backward=graph != -1)
            if may_grow and life is None and tensor.device.type == "cpu":
                life = self.log.grown(tensor, "cpu")
            if life is not None:
                self.clock.note(self.log.clock, time.perf_counter() - self.began)
                life.recorded = torch.is_grad_enabled() and any(
                    item.requires_grad for item in tensors_in((args, kwargs))
                )
                life.place = (
                    self._place(func) if life.size_bytes >= _LEAST_PLACED else ("", self._operation(func), None)
                )
        if len(self.log.lives) > self._most_lives:
            self._fold()
            self._most_lives = len(self.log.lives) + _MOST_LIVES

    def _see(self, tensor: Any, **more: bool) -> StorageLife | None:
        """Log a tensor's storage, and return its life if it is new."""
        device = self._labels.get(tensor.device) or self._labels.setdefault(tensor.device, str(tensor.device))
        life = None if device == "meta" else self.log.see(tensor, device, **more)
        if life is not None and device.startswith("cuda") and tensor.layout is torch.strided:
            life.address = tensor.untyped_storage().data_ptr()
            if self._history is not None:
                self._history.saw(life)
            elif self._has_history and not life.before:
                self._record_cuda()
        return life

    def _place(self, func: Any) -> Place:
        """Return the running module's path, the operation, and the user's line."""
        line = inner = outer = None
        for frame in stack(sys._getframe(1)):
            code = frame.f_code
            if code is _MODULE_CALL:
                inner, outer = inner or frame, frame
            elif line is None and is_users(code.co_filename):
                line = code.co_filename, frame.f_lineno
            if not code.co_flags & inspect.CO_OPTIMIZED:  # the cell or script
                break
        return "" if inner is None else self._path(inner, outer), self._operation(func), line

    def _operation(self, func: Any) -> str:
        return self._operations.get(func) or self._operations.setdefault(func, operator_name(func))

    def _path(self, inner: Any, outer: Any) -> str:
        """Return the path of the module that a frame runs; its outermost module is searched if it is new.

        Hooks of modules would tell it too, but torch's compiler cannot compile them.
        """
        module = peek(inner)["self"]
        reference, path = self._paths.get(id(module), (None, ""))
        if reference is not None and reference() is module:
            return path
        whole, path = peek(outer)["self"], type_name(module)
        label = next((name for name, value in self._user_names() if value is whole), type_name(whole))
        for name, part in torch.nn.Module.named_modules(whole):
            self._paths[id(part)] = weakref.ref(part), f"{label}.{name}".rstrip(".")
            path = self._paths[id(part)][1] if part is module else path
        self._paths[id(module)] = weakref.ref(module), path
        for role, tensors in ((PARAMETERS, torch.nn.Module.parameters), (BUFFERS, torch.nn.Module.buffers)):
            for tensor in tensors(whole):
                self.log.mark(tensor, role)
        return path

    @_guarded
    def _will_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                life = self.log.life(gradient.untyped_storage()._cdata)
                if life is not None:
                    life.role = life.role or GRADIENTS
                    self._gradients[id(life)] = parameter.untyped_storage()._cdata

    @_guarded
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for state in optimizer.state.values():
            for tensor in tensors_in(state):
                self.log.mark(tensor, OPTIMIZER)


_COMPILER = torch._C._dynamo.eval_frame
if hasattr(_COMPILER, "set_code_exec_strategy"):
    # torch wraps the method to hide it from its compiler, and so imports 1,000 modules. This hides it, too.
    Follower.__torch_dispatch__ = vars(Follower)["__torch_dispatch__"].__wrapped__  # type: ignore[method-assign]
    _SKIP = _COMPILER._FrameAction.SKIP
    _COMPILER.set_code_exec_strategy(Follower.__torch_dispatch__.__code__, _COMPILER._FrameExecStrategy(_SKIP, _SKIP))
