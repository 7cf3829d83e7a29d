"""Follows torch's storages while real code runs: their roles, the modules and lines that allocated
them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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
from ipygpumem.extras.peak.timeline import Clock, Timeline, alive_at
from ipygpumem.heap.arrays import answers_itself
from ipygpumem.heap.holders.frames import peek, stack
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import instance_dict, is_exactly, is_instance, is_users, type_name
from ipygpumem.inventory.records import Inventory
from ipygpumem.inventory.survey import roles_of_objects
from ipygpumem.probes.host import PAGE_BYTES, resident_bytes
from ipygpumem.units import MIB

BUFFERS, DATA = "buffers", "data"
_ROLES = {
    "parameter": PARAMETERS,
    "gradient": GRADIENTS,
    "optimizer state": OPTIMIZER,
    "buffer": BUFFERS,
}
Names = Callable[[], Iterable[tuple[str, object]]]
"""Returns the names that the user's code sees now."""
Place = tuple[str, str, str, tuple[str, int] | None]
"""The user's name, the path of a module, the name of an operation, and file and number of a line.
"""
_BEFORE: Place = ("", "", "existed before", None)
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_FUNCTION_CALL = torch.autograd.Function.apply.__func__.__code__
_SET = torch.ops.aten.set_
_device_name = functools.lru_cache(64)(str)
_operation = functools.lru_cache(4096)(operator_name)
_RESIZE = torch.ops.aten.resize_.default
_FAKE = "torch._subclasses.fake_tensor"
_FROM_ELSEWHERE = (
    torch.ops.aten.lift_fresh.default,
    _SET.source_Storage,
    _SET.source_Storage_storage_offset,
)
"""Operations in place on a storage that no operation has made: of Python's numbers, or loaded from
a file.
"""
_LEAST_PLACED = 4096
"""Bytes of the smallest storage whose module and line are kept."""
_LEAST_COUNTED_BYTES = 8 * MIB
"""Bytes of the smallest storage whose pages in RAM are counted, which takes some microseconds for
each MiB.
"""
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
                if is_from_signal(error):
                    raise
                self.error = describe_error(error)

    return call


class _PagesLog(StorageLog):
    """Logs storages, and counts the pages of large ones in RAM: ``torch.empty(2**28)`` reserves 1
    GiB and uses none.
    """

    def _gone(self, key: int, reference: Any) -> None:
        life, _ = self._alive[key]
        super()._gone(key, reference)
        if life.device == "cpu" and life.address:
            # torch frees the bytes only after this callback. No page at all: resize_ has freed them
            # before.
            resident = _resident_bytes(life.address, _whole_bytes(life))
            if resident:
                _note_pages(life, resident)

    def count_pages(self) -> None:
        """Count the pages of the storages that are alive, as far as code has used them by now."""
        for life, reference in list(self._alive.values()):
            storage = reference()
            if storage is not None and life.device == "cpu" and life.address:
                life.address = storage.data_ptr()
                resident = _resident_bytes(life.address, min(storage.nbytes(), _whole_bytes(life)))
                if resident is not None:
                    _note_pages(life, resident)


def _resident_bytes(address: int, size_bytes: int) -> int | None:
    """Return the bytes in RAM of a range; None if the system does not tell."""
    try:
        return resident_bytes(address, size_bytes)
    except OSError:
        return None


def _whole_bytes(life: StorageLife) -> int:
    return life.size_bytes + life.reserved_bytes


def _note_pages(life: StorageLife, resident: int) -> None:
    """Split the bytes of a storage into those with a page in RAM and those that are
    only reserved.
    """
    whole = _whole_bytes(life)
    rounding = whole % PAGE_BYTES  # the log rounds sizes up to 512 bytes, beyond the last page
    life.size_bytes = min(whole, resident + rounding)
    life.reserved_bytes = whole - life.size_bytes


class Follower(TorchDispatchMode):
    """Logs the storages that operations of this thread, and of its backward passes, allocate."""

    supports_higher_order_operators = True

    def __init__(self, names: Names, *, keep_history: bool = False) -> None:
        super().__init__()
        self.log = _PagesLog()
        self.clock = Clock()
        self.error = ""
        """Why following stopped early; empty if it did not."""
        self.failed: tuple[int, float, Any] | None = None
        """The log's clock, the time and the place of the last operation that raised an error."""
        self._user_names = names
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        """Modules that ran and those inside them, with their paths, by identity."""
        self._replaced: set[Place | None] = set()
        """Places of tensors whose names had other values when the code ended."""
        self._last_graph = -1
        self._timelines: dict[str, Timeline] = {}
        self._most_lives = _MOST_LIVES
        self._keeps_history, self._has_history = keep_history, True
        self._history: History | None = None
        self.snapshot: Any = None
        """torch's snapshot of the CUDA allocator at the end, with its history; None without CUDA.
        """
        self.notes: dict[str, None] = {}
        self.began = time.perf_counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled; torch asks for this."""
        return True

    # -- start and end ---------------------------------------------------------------------------

    def start(self) -> None:
        """Log the storages that exist, and follow this thread."""
        with torch._C.DisableTorchFunction():
            for item, role in roles_of_objects():
                if is_exactly(item, torch.Tensor, torch.nn.Parameter):
                    life = self._see(item, before=True)
                    if life is not None:
                        life.role = _ROLES.get(role, "")
            for name, value in self._user_names():
                if is_exactly(value, torch.Tensor, torch.nn.Parameter):
                    self.log.mark(value, "", (name, "", "", None))
            self._know_names()
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
                if life.address and life.device != "cpu":
                    self._history.saw(life)
        except (
            RuntimeError,
            TypeError,
            AttributeError,
        ) as error:  # another allocator, an old torch
            (
                self._has_history,
                self.notes[f"CUDA's allocator has no history ({describe_error(error)})"],
            ) = False, None

    def stop(self) -> None:
        """Stop following; the storages that are alive stay in the log."""
        for handle in self._handles:
            handle.remove()
        self._leave()
        if self._history is not None:
            if (
                not torch._C._cuda_isHistoryEnabled()
            ):  # by another block that began it, or by the code
                self.notes[
                    "torch's recording of CUDA memory ended early: what came later is not shown"
                ] = None
            self.snapshot = self._history.replay(last=True)

    def _leave(self) -> None:
        """Leave torch's stack of modes; those that were entered later, and have not ended, stay on
        it.
        """
        if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
            self.error = self.error or "the block ended in another thread, or inside an operation"
            return
        later = list[Any]()
        try:
            while (last := _get_current_dispatch_mode_stack()[-1]) is not self:
                # not its own, which may do more than leave
                TorchDispatchMode.__exit__(last, None, None, None)
                later.append(last)
            self.__exit__(None, None, None)
        except (IndexError, AttributeError) as error:  # a mode that has not come by its __enter__
            self.error = self.error or f"a dispatch mode is still open ({describe_error(error)})"
        finally:
            for mode in reversed(later):
                TorchDispatchMode.__enter__(mode)

    def read(self, inventory: Inventory | None, *, ran_out: bool) -> list[DevicePeak]:
        """Return each device's peak, or the moment of the failed allocation; names are those of
        ``inventory``.
        """
        self._name(inventory)
        self._user_names = tuple  # none: they hold the frame
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
            found.append(timeline.peak(device, self._row, source=source, moment=moment))
        return found

    def _name(self, inventory: Inventory | None) -> None:
        """Give the storages that are alive the names and roles of an inventory, or the modules that
        they belong to.
        """
        for record in inventory.tensors if inventory is not None else ():
            life = self.log.life(record.storage) if record.library == "torch" else None
            if life is not None:
                if record.kind != "other" and (not life.role or record.kind == "parameter"):
                    life.role = _ROLES[record.kind]
                if record.name is not None and not _is_owned(life):
                    life.place = (record.name, "", "", None)
        self._know_names()
        replaced = (life for life in self.log.lives if life.before and life.died is not None)
        self._replaced = {
            life.place
            for life in replaced
            if life.role == PARAMETERS or (life.place and life.place[0])
        }

    @_guarded
    def _know_names(self) -> None:
        """Note the modules and optimizers that have names."""
        for name, value in self._user_names():
            if is_instance(value, torch.nn.Module):
                self._know(value, name)
        for _, value in self._user_names():
            if is_instance(value, torch.optim.Optimizer):
                self._will_step(value)
                self._stepped(value)

    def _fold(self, *, last: bool = False) -> None:
        """Sum up the storages so far, and drop those that were freed."""
        self.log.count_pages()
        if last:
            self.log.close()
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
        return (
            WORKSPACES
            if life.died is None and life.size_bytes in sizes
            else DATA
            if life.before
            else TEMPORARIES
        )

    def _row(self, life: StorageLife) -> tuple[str, str, str, str, tuple[str, int] | None]:
        if type(life.place) is Block:
            if life.place.storage is not None:
                return self._row(life.place.storage)
            return (
                self.role(life),
                "",
                "",
                "held by C++" if life.before else "inside an operation",
                life.place.line,
            )
        name, module, *place = life.place or _BEFORE
        if life.before and life.place in self._replaced:
            name, module = f"{name or module.partition('.')[0]} (earlier value)", ""
        return self.role(life), name, module, *place

    # -- what torch calls ------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        __tracebackhide__ = True  # of the user's errors
        kwargs = kwargs or {}
        if any(
            kind.__module__ == _FAKE for kind in types
        ):  # of a mode inside this one, which has no memory
            return func(*args, **kwargs)
        if types and any(
            kind is not torch.Tensor and answers_itself(torch, kind) for kind in types
        ):
            return (
                NotImplemented  # a subclass's operation; those on the tensors inside it come here
            )
        if not isinstance(
            func, torch._ops.OpOverload
        ):  # takes functions, whose operations come here
            return func(*args, **kwargs)
        if (
            torch.is_inference_mode_enabled()
        ):  # outside of it, autograd decomposes composite operators
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._raised(func)
            error.__traceback__ = users_part(error.__traceback__)
            raise
        may_grow = func is _RESIZE or "out" in kwargs
        if (
            may_grow or func in _FROM_ELSEWHERE or not (args and result is args[0])
        ):  # any other is in place
            self._followed(func, args, kwargs, result, may_grow=may_grow)
        return result

    @_guarded
    def _raised(self, func: Any) -> None:
        self.failed = self.log.clock, time.perf_counter() - self.began, self._place(func)[0]

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
                    _note_address(life, tensor)
            if life is not None:
                self.clock.note(self.log.clock, time.perf_counter() - self.began)
                inputs, given = (args, kwargs), None
                life.place = "", "", _operation(func), None
                if life.size_bytes >= _LEAST_PLACED:
                    life.place, given = self._place(func)
                    inputs = given or inputs
                life.recorded = (inputs is given or torch.is_grad_enabled()) and any(
                    item.requires_grad for item in tensors_in(inputs)
                )
        if len(self.log.lives) > self._most_lives:
            self._fold()
            self._most_lives = len(self.log.lives) + _MOST_LIVES

    def _see(self, tensor: Any, **more: bool) -> StorageLife | None:
        """Log a tensor's storage, and return its life if it is new."""
        device = _device_name(tensor.device)
        life = None if device == "meta" else self.log.see(tensor, device, **more)
        if life is not None and device.startswith("cuda") and tensor.layout is torch.strided:
            life.address = tensor.untyped_storage().data_ptr()
            if self._history is not None:
                self._history.saw(life)
            elif self._has_history and not life.before:
                self._record_cuda()
        elif life is not None and device == "cpu" and tensor.layout is torch.strided:
            _note_address(life, tensor)
        return life

    def _place(self, func: Any) -> tuple[Place, Any]:
        """Return the running module's path, the operation, and the user's line; and a custom
        function's arguments.
        """
        line = inner = outer = given = None
        for frame in stack(sys._getframe(1)):
            code = frame.f_code
            if code is _MODULE_CALL:
                inner, outer = inner or frame, frame
            elif code is _FUNCTION_CALL:
                given = peek(frame)["args"]
            elif line is None and is_users(code.co_filename):
                line = code.co_filename, frame.f_lineno
            if not code.co_flags & inspect.CO_OPTIMIZED:  # the cell or script
                break
        path = self._path(peek(inner)["self"], peek(outer)["self"]) if inner and outer else ""
        return ("", path, _operation(func), line), given

    def _path(self, module: Any, whole: Any) -> str:
        """Return the path of a running module; the outermost one is searched if it is new.

        Hooks of modules would tell it too, but torch's compiler cannot compile them.
        """
        reference, path = self._paths.get(id(module), (None, ""))
        if reference is None or reference() is not module:
            self._paths[id(module)] = weakref.ref(module), type_name(module)
            self._know(
                whole,
                next(
                    (name for name, value in self._user_names() if value is whole), type_name(whole)
                ),
            )
            path = self._paths[id(module)][1]
        return path

    def _know(self, whole: Any, label: str) -> None:
        """Note the modules inside one by their paths, and what their tensors are for."""
        for path, module in reversed(_modules_in(whole, label)):  # of several paths, the first one
            self._paths[id(module)] = weakref.ref(module), path
            parts, place = instance_dict(module) or {}, ("", path, "", None)
            for kind, role in (("_buffers", BUFFERS), ("_parameters", PARAMETERS)):
                for tensor in parts.get(kind, {}).values():
                    if tensor is not None:
                        self.log.mark(tensor, role, place)
                    if is_exactly(tensor, torch.nn.Parameter):
                        with torch._C.DisableTorchFunction():
                            gradient = tensor.grad
                        if gradient is not None:
                            self.log.mark(gradient, GRADIENTS, place)

    @_guarded
    def _will_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            if parameter.grad is not None:
                self.log.mark(parameter.grad, GRADIENTS, self._owner(parameter))

    @_guarded
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(state):
                self.log.mark(tensor, OPTIMIZER, self._owner(parameter))

    def _owner(self, parameter: Any) -> Place | None:
        """Return the place of a parameter's module, if it is known."""
        is_plain = (
            is_exactly(parameter, torch.nn.Parameter, torch.Tensor)
            and parameter.layout is torch.strided
        )
        life = self.log.life(parameter.untyped_storage()._cdata) if is_plain else None
        return life.place if life is not None and _is_owned(life) else None


def _note_address(life: StorageLife, tensor: Any) -> None:
    """Note the address of a tensor's storage if it is large enough that its pages are counted."""
    if life.size_bytes >= _LEAST_COUNTED_BYTES:
        life.address = tensor.untyped_storage().data_ptr()


def _is_owned(life: StorageLife) -> bool:
    """Return True for memory that belongs to a module, in contrast to results of its operations."""
    return bool(life.place and life.place[1] and not life.place[2])


def _modules_in(whole: Any, label: str) -> list[tuple[str, Any]]:
    """Return a module and those inside it with their paths; torch would hash them, which not all
    allow.
    """
    found, seen, waiting = list[tuple[str, Any]](), set[int](), [(label, whole)]
    while waiting:
        path, module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.append((path, module))
            inner = (instance_dict(module) or {}).get("_modules", {})
            waiting += [(f"{path}.{name}", part) for name, part in reversed(inner.items())]
    return found


_COMPILER = torch._C._dynamo.eval_frame
if hasattr(_COMPILER, "set_code_exec_strategy"):
    # torch wraps the method to hide it from its compiler, and so imports 1,000 modules. This hides
    # it, too.
    Follower.__torch_dispatch__ = vars(Follower)["__torch_dispatch__"].__wrapped__  # type: ignore[method-assign]
    _SKIP = _COMPILER._FrameAction.SKIP
    _COMPILER.set_code_exec_strategy(
        Follower.__torch_dispatch__.__code__, _COMPILER._FrameExecStrategy(_SKIP, _SKIP)
    )
