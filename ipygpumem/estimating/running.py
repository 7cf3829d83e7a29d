"""Runs code on fake copies of its tensors, rolls its changes back, and derives the estimate from
the log.
"""

from __future__ import annotations

import builtins
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest.mock import patch

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ipygpumem import interrupts
from ipygpumem.errors import EstimateError
from ipygpumem.estimating import FOR_FAKES, user_line, user_line_of, users_part
from ipygpumem.estimating.accelerator_modules import UNKNOWN_SIZE, Accelerators
from ipygpumem.estimating.allocation_tracker import AllocationTracker
from ipygpumem.estimating.autocast import Autocast
from ipygpumem.estimating.caching_allocator import unfollowed_settings
from ipygpumem.estimating.card_functions import CardFunctions
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.effects import WAITS, closure_of, effects_of, refuse_numpy
from ipygpumem.estimating.fake_copies import FakeCopies, loading, run_code
from ipygpumem.estimating.patches import Patches, choose_loop
from ipygpumem.estimating.records import DeviceEstimate, Estimate, ModelSummary, ModuleRow
from ipygpumem.estimating.replay import read
from ipygpumem.estimating.rollback import Rollback, imports_undone
from ipygpumem.estimating.room import advice, with_room
from ipygpumem.estimating.storages import WORKSPACES, StorageLife, StorageLog, tensors_in
from ipygpumem.estimating.torch_functions import TorchFunctions
from ipygpumem.estimating.workspaces import Workspaces
from ipygpumem.introspect import is_exactly, is_instance, type_name
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import format_bytes

_TICK_SECONDS, _AGAIN_SECONDS = 0.1, 1.0
_STOP: Any = (
    getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", None))
    if hasattr(signal, "pthread_kill")
    else None
)
"""Signal that interrupts the code; users' code rarely has a handler for it. None on Windows."""


class Limits:
    """A ``with`` block that interrupts its code after the timeout, or when it has taken 3/4 of the
    free host memory.

    The main thread gets a KeyboardInterrupt, which Python raises between two bytecode instructions:
    a call into C++ returns first. Other threads, and Windows, are only interrupted by ``check``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._ended = threading.Event()
        self._line = self.why = ""
        """Reason of the interruption; empty if there was none."""

    def __enter__(self) -> None:
        self._until = time.monotonic() + self._timeout_seconds
        self._process = psutil.Process()
        self._most_bytes = self._process.memory_info().rss + available_bytes() * 3 // 4
        self._handlers: dict[int, Any] = {}
        if _STOP is not None and threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
            signal.signal(_STOP, self._interrupt)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_AGAIN_SECONDS if self.why else _TICK_SECONDS):
            if not self.why and time.monotonic() > self._until:
                self.why = f"after {self._timeout_seconds:g} s"
            elif not self.why and (took := self._process.memory_info().rss) > self._most_bytes:
                self.why = (
                    f"because it took most of the host memory that was free ({format_bytes(took)} "
                    f"now)"
                )
            if self.why and self._handlers:  # repeatedly: the code may catch it
                signal.pthread_kill(threading.main_thread().ident or 0, _STOP)

    def _interrupt(self, _: int, frame: Any) -> None:
        # An exception in that file makes torch's C++ code abort the process; another signal follows
        # soon.
        if not self._ended.is_set() and not frame.f_code.co_filename.endswith("simple_registry.py"):
            self._line = self._line or user_line(frame)
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise an EstimateError if the code must stop; called for each operation on tensors."""
        if self.why:
            self._line = self._line or user_line()
            raise self.error()

    def error(self) -> EstimateError:
        """Return the error with the line at which the code was interrupted."""
        return EstimateError(
            f"the estimate was stopped {self.why} in {self._line or 'an unknown line'}"
        )

    def __exit__(self, kind: object, error: BaseException | None, traceback: Any) -> None:
        self._ended.set()
        if self.why and error is not None:
            self._line = self._line or user_line_of(traceback)
        handlers = self._handlers.items()  # the code may have changed more handlers than ours
        changed = [
            (number, old)
            for number, old in handlers
            if old is not None and signal.getsignal(number) is not old
        ]
        with interrupts.deferred() as struck:
            self._thread.join()
            if changed:
                # a system call: a pending signal arrives before its handler is removed
                signal.sigpending()
            for number, old in changed:
                signal.signal(number, old)
        if struck:
            raise KeyboardInterrupt


Namespaces = tuple[dict[str, Any], ...]
Result = TypeVar("Result")
TIMEOUT_SECONDS = 300.0
_GUESSES_SHOWN = 5
_INTERNAL = {
    "data is not allocated yet": "code in C++ that reads a tensor",
    "Cannot get CUDA generator": "a generator of a device that is not available",
    "shape_env must not be None": "nested tensors",
    "no rule registered for HigherOrderOperator": (
        "operators that take functions, such as flex_attention,"
    ),
}
"""Parts of torch's messages for code that needs a tensor's values or its device, and a description
of that code.
"""
_AFTER_GUESSES = (
    "before the error, these lines got guessed values of tensors, which may be its cause"
)


class Estimation:
    """One estimate: the fake copies that code works on, and the log of their storages.

    All tensors are assumed to be on ``device`` (None: where the code puts them), which has
    ``room_bytes`` of memory for them (None: its free memory).
    """

    def __init__(
        self,
        device: str | None = None,
        room_bytes: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._devices = Devices(device)
        self._room_bytes = room_bytes
        self._limits = Limits(timeout_seconds)
        self.log = StorageLog()
        self._notes: dict[str, None] = {}
        # As a fallback torch runs an operation on zeros; on a device, that would allocate memory
        # there.
        tries = self._devices.on_cpu
        with (
            imports_undone(),
            growth_for(FOR_FAKES),
        ):  # the first one imports torch's compiler, 800 modules
            self._fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=tries)
        keeps = self._fakes.may_turn_const
        self._fakes.may_turn_const = lambda tensor: (
            keeps(tensor) and (tensor.numel() < 2 or tensor.device.type == "cpu")
        )
        self.copies = FakeCopies(self.log, self._devices, self._fakes, self._note)
        self._accelerators = Accelerators(self.log, self._devices, room_bytes, self._note)
        known_properties, check = self._accelerators.known_properties, self._limits.check
        self._workspaces = Workspaces(self.log, self._devices, known_properties, self._note)
        self._follower = AllocationTracker(
            self.log, self._devices, self._workspaces, self.copies, self._note, check
        )
        autocast = Autocast(self._devices)
        card = CardFunctions(self._devices, autocast)
        self._functions = TorchFunctions(self._devices, card)
        self._patches = Patches(
            self._note, self._devices, autocast, card, self._functions, self._modes
        )

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def of_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        namespaces: Namespaces,
    ) -> Estimate:
        """Return the estimate of a call; functions defined in ``namespaces`` see fake copies of
        their globals.
        """
        __tracebackhide__ = True  # of the user's errors
        of = self.copies.of
        for namespace in namespaces:
            self.copies.namespace(namespace)
        code, spaces = getattr(function, "__code__", None), (closure_of(function), *namespaces)
        own = getattr(function, "__globals__", {})
        refuse_numpy(
            code, (*spaces, own), (*args, *kwargs.values(), getattr(function, "__self__", None))
        )
        self._notes.update(dict.fromkeys(effects_of(code, spaces, (*args, *kwargs.values()))))
        return self._of(lambda: of(function)(*of(args), **of(kwargs)))

    def of_code(
        self, code: types.CodeType, namespace: dict[str, Any], around: Any = None
    ) -> Estimate:
        """Return the estimate of ``code`` in ``namespace``, which is not changed.

        The code runs inside the context ``around``, which also observes its operations.
        """
        __tracebackhide__ = True  # of the user's errors
        refuse_numpy(code, (namespace,), ())
        self._notes.update(dict.fromkeys(effects_of(code, (namespace,))))
        self._follower.observe = around and around.observe

        def run() -> None:
            with around or nullcontext():
                run_code(code, self.copies.namespace(namespace))

        return self._of(run)

    def place_of(self, tensor: Any) -> str:
        """Return the device that a fake tensor is assumed to be on."""
        return self._devices.assumed(tensor.device)

    def _of(self, run: Callable[[], Any]) -> Estimate:
        __tracebackhide__ = True  # of the user's errors
        started = time.perf_counter()
        found = self.carry_out(lambda: self._figures(run))
        devices = tuple(
            with_room(figures, there_bytes, self._room_bytes) for figures, there_bytes in found
        )
        self._notes.update(dict.fromkeys(filter(None, map(advice, devices))))
        for device in devices:
            if device.room_bytes is None:
                self._note(f"{device.device}: {UNKNOWN_SIZE}")
        seconds, follower = time.perf_counter() - started, self._follower
        return Estimate(
            devices,
            seconds,
            tuple(follower.guesses),
            tuple(self._notes),
            tuple(follower.upper_bounds),
        )

    def _figures(self, code: Callable[[], Any]) -> list[tuple[DeviceEstimate, int]]:
        """Run ``code``; return each device's figures, and the bytes of them that this process holds
        already.
        """
        self.run(code)
        if self._devices.label is None and self._devices.asked:
            names = ", ".join(self._devices.asked)
            self._note(
                f"{names} is not available: tensors on it and on the host are counted together"
            )
        for line in self._functions.recurrent:
            self._note(
                f"{line}: memory of a card's kernels for a recurrent layer, such as cuDNN's, is "
                f"not counted"
            )
            self._workspaces.unknown.setdefault("_cudnn_rnn")
        devices = []
        for place in dict.fromkeys(life.device for life in self.log.lives):
            device, there_bytes = read(self.log, place, self._devices.named or place)
            held = [
                life
                for life in self.log.lives
                if life.before and life.role == WORKSPACES and life.device == place
            ]
            of_copies = self.copies.originals_bytes.get(device.device, 0) + sum(
                life.size_bytes for life in held
            )
            if device.device.startswith("cuda"):
                device = replace(device, unknown_operators=tuple(self._workspaces.unknown))
            devices.append((device, there_bytes or of_copies))
        if any(device.device.startswith("cuda") for device, _ in devices) and (
            settings := unfollowed_settings()
        ):
            self._note(
                f"{', '.join(settings)}: not followed, reserved and needed are the figures without "
                f"it"
            )
        return devices

    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, roll its changes back, and return its result."""
        __tracebackhide__ = True  # of the user's errors
        restorer = self.copies.restorer = Rollback(self._fakes, self._note)
        try:
            # Our callback runs inside the user's code, whenever a storage is freed.
            with self._limits, interrupts.reraise_swallowed(around_users_code=True):
                result = work()
            if not self._limits.why:
                return result
        except BaseException as error:
            if not self._limits.why:
                error.__traceback__ = users_part(error.__traceback__)
                raise
        finally:
            with interrupts.deferred() as struck:
                self.copies.forget()
                self._follower.forget()
                restorer.put_back()
            if struck:
                raise KeyboardInterrupt
        waiting = [note for note in self._notes if note.startswith(WAITS)]
        raise EstimateError("; ".join([str(self._limits.error()), *waiting]))

    def run(self, code: Callable[[], Any]) -> None:
        """Run ``code`` on fake tensors."""
        with ExitStack() as stack:
            chosen = register_optimizer_step_pre_hook(
                lambda optimizer, *_: choose_loop(optimizer, self._devices)
            )
            stack.callback(chosen.remove)
            stack.callback(register_optimizer_step_post_hook(self._follower.mark_state).remove)
            stack.enter_context(self._accelerators.standing_in())
            stack.enter_context(self._patches.applied())
            for run in (eval, exec):
                stack.enter_context(patch.object(builtins, run.__name__, loading(run)))
            stack.enter_context(self._modes())
            result = self._result_of(code)
            for known in self.copies.optimizers:
                if (optimizer := known()) is not None:
                    self._follower.mark_state(optimizer)
            self.log.close()
            del result  # kept until here, as the code's caller would keep it

    def _result_of(self, code: Callable[[], Any]) -> Any:
        """Run the user's code. If it raises an error of its own, print the last lines that got
        guesses.
        """
        __tracebackhide__ = True  # of the user's errors
        try:
            return code()
        except EstimateError:
            raise
        except (Exception, SystemExit) as error:
            text = (
                str(error)
                if is_exactly(error, RuntimeError, NotImplementedError, AssertionError)
                else ""
            )
            for words, what in _INTERNAL.items():
                if words in text:
                    line = user_line_of(error.__traceback__)
                    raise EstimateError(f"an estimate cannot follow {what} in {line}") from error
            lines = list(self._follower.guesses)[-_GUESSES_SHOWN:]
            if lines:
                shown = "".join(f"  {line}\n" for line in lines)
                with suppress(Exception):  # the code may have replaced stderr
                    sys.stderr.write(f"ipygpumem: {_AFTER_GUESSES}:\n{shown}")
            raise

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # The fake mode is the outermost: it gets the calls that the inner modes do not handle.
        with self._fakes, self._follower, self._functions:
            yield


# -- summaries of models ------------------------------------------------------------------------


@dataclass
class _Calls:
    """Calls of a module: when they began and ended on the log's clock, and the shape of the last
    output.
    """

    begun: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    output_shape: tuple[int, ...] | None = None

    def listen(self, module: Any, log: StorageLog) -> None:
        def ends(module: Any, args: Any, output: Any) -> None:
            self.spans.append((self.begun.pop(), log.clock))
            first = next(tensors_in(output), None)
            self.output_shape = None if first is None else tuple(first.shape)

        module.register_forward_pre_hook(lambda *_: self.begun.append(log.clock))
        module.register_forward_hook(ends)


def summarize(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelSummary:
    """Return the summary of a model from one forward pass of a copy; the model is not changed."""
    if not is_instance(model, torch.nn.Module):
        raise EstimateError(f"a summary takes a torch.nn.Module, not {type_name(model)}")
    __tracebackhide__ = True  # of the user's errors
    run = Estimation()
    calls: dict[str, _Calls] = {}

    def forward() -> Any:
        copy = run.copies.of(model)
        for name, module in copy.named_modules():
            calls[name] = _Calls()
            calls[name].listen(module, run.log)
        with torch.enable_grad():
            return copy(*run.copies.of(args), **run.copies.of(dict(kwargs)))

    def summarized() -> ModelSummary:
        run.run(forward)
        # for backward
        kept = [life for life in run.log.lives if life.recorded and life.died is None]
        rows = [_row(name, module, calls[name], kept) for name, module in model.named_modules()]
        trainable = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        return ModelSummary(tuple(rows), trainable)

    return run.carry_out(summarized)


def _row(name: str, module: Any, calls: _Calls, kept: list[StorageLife]) -> ModuleRow:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    return ModuleRow(
        name=name,
        type_name=type_name(module),
        depth=name.count(".") + bool(name),
        output_shape=calls.output_shape,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        buffer_bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers),
        activation_bytes=sum(
            life.size_bytes for life in kept if any(a < life.born <= b for a, b in calls.spans)
        ),
        calls=len(calls.spans),
    )
