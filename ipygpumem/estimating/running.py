"""Runs code on fake copies of its tensors, rolls its changes back, and derives the estimate from
the log.
"""

from __future__ import annotations

import builtins
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ipygpumem import interrupts
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.allocation_tracker import AllocationTracker
from ipygpumem.estimating.devices.devices import HOST, Devices
from ipygpumem.estimating.devices.room import advice, with_room
from ipygpumem.estimating.devices.tensor_locations import TensorLocations
from ipygpumem.estimating.effects import WAITS, closure_of, effects_of, refuse_without_tensors
from ipygpumem.estimating.isolation.accelerator_modules import UNKNOWN_SIZE, Accelerators
from ipygpumem.estimating.isolation.copied_names import copying_names_first, run_code
from ipygpumem.estimating.isolation.fake_copies import FakeCopies
from ipygpumem.estimating.isolation.patches import Patches, choose_loop
from ipygpumem.estimating.isolation.rollback import Rollback
from ipygpumem.estimating.isolation.settings import imports_undone
from ipygpumem.estimating.limits import RunLimits
from ipygpumem.estimating.memory.caching_allocator import unfollowed_settings
from ipygpumem.estimating.memory.replay import DeviceFigures, device_figures
from ipygpumem.estimating.memory.storages import WORKSPACES, StorageLog
from ipygpumem.estimating.operators.assumptions import Assumptions
from ipygpumem.estimating.operators.autocast import Autocast
from ipygpumem.estimating.operators.card_functions import CardFunctions
from ipygpumem.estimating.operators.card_operations import CardOperations
from ipygpumem.estimating.operators.result_cache import ResultCache
from ipygpumem.estimating.operators.torch_functions import TorchFunctions
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.estimating.unfollowed import Unfollowed
from ipygpumem.estimating.user_lines import user_line_of, users_part
from ipygpumem.introspect import is_exactly
from ipygpumem.meter.own_growth import FOR_FAKES, growth_for

Namespaces = tuple[dict[str, Any], ...]
Result = TypeVar("Result")
TIMEOUT_SECONDS = 300.0
_MOST_GUESSES_PRINTED = 5
_UNFOLLOWED_BY_MESSAGE = {
    "data is not allocated yet": "code in C++ that reads a tensor",
    "Cannot get CUDA generator": "a generator of a device that is not available",
    "shape_env must not be None": "nested tensors",
    "no rule registered for HigherOrderOperator": (
        "operators that take functions, such as flex_attention,"
    ),
}
"""Descriptions of code that needs a tensor's values or its device, by a part of the message with
which torch refuses it.
"""
_AFTER_GUESSES = (
    "before the error, these lines got guessed values of tensors, which may be its cause"
)


class Estimation:
    """One estimate: the fake copies that code works on, and the log of their storages.

    Call ``of_call`` or ``of_code`` once. A summary of a model runs code of its own with
    ``with_rollback`` and ``run_on_fakes``, and reads the log itself.

    Args:
        device: the device that all tensors are assumed to be on; None: where the code puts them.
        room_bytes: memory of the device for the code; None: its free memory.
        timeout_seconds: the code is interrupted after that time.
        assumed: texts such as ``5=0.25``: line 5 selects a quarter of all values.
    """

    def __init__(
        self,
        device: str | None = None,
        room_bytes: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        assumed: Iterable[str] = (),
    ) -> None:
        # The user's options.
        self._assumptions = Assumptions.parse(assumed)
        """The shares of values that lines select."""
        self._devices = Devices(device)
        """The device that tensors are assumed to be on, and the devices that the code names."""
        self._room_bytes = room_bytes
        """Memory of the device for the code; None: its free memory."""
        self._limits = RunLimits(timeout_seconds)
        """Interrupts the code when it takes too much time or host memory."""
        # The findings: storages, and notes in order, each once.
        self.log = StorageLog()
        """The storages of the code, with the times at which they are allocated and freed."""
        self._notes: dict[str, None] = {}
        """The notes of the estimate; the values mean nothing."""
        self._unfollowed = Unfollowed(self._note)
        """Collects the code whose memory is not followed exactly, and notes it."""
        # The tensors that the code gets instead of its own.
        self._fakes = _fake_mode(self._devices)
        """torch's mode, which runs operations on fake tensors."""
        self.copies = FakeCopies(self.log, self._devices, self._fakes, self._unfollowed)
        """The fake copies of the tensors and other objects that the code gets."""
        self._locations = TensorLocations(self.log, self._devices)
        """The location of each fake tensor, on a card or on the host."""
        # The handlers of operations, of torch's functions, and of all other functions to replace.
        self._accelerators = Accelerators(self.log, self._devices, room_bytes, self._note)
        """Replaces functions of ``torch.cuda`` and its like, such as ``memory_allocated``."""
        self._operations = CardOperations(
            self.log, self._devices, self._accelerators.known_properties, self._note
        )
        """Logs the results of each operation, and the other memory of a card's kernels."""
        self._tracker = self._new_tracker()
        """torch's mode that intercepts each operation, and has it logged."""
        autocast = Autocast(self._devices)
        card = CardFunctions(self._devices, autocast, self._tracker.known_values, self._unfollowed)
        self._functions = TorchFunctions(
            self._devices, self._locations, card, self._tracker.upper_bounds
        )
        """torch's mode that intercepts each function of torch, such as ``Tensor.to``."""
        self._patches = self._new_patches(autocast, card)
        """Replaces functions that torch passes to no mode."""

    def _new_tracker(self) -> AllocationTracker:
        """Return the mode that logs the storages of operations."""
        return AllocationTracker(
            self.log,
            self._devices,
            self._locations,
            self._operations,
            self.copies,
            self._note,
            self._limits.check,
            self._assumptions,
            ResultCache(self._fakes),
            self._unfollowed,
        )

    def _new_patches(self, autocast: Autocast, card: CardFunctions) -> Patches:
        """Return the replacements of functions that torch passes to no mode."""
        return Patches(
            self._note,
            self._unfollowed,
            self._devices,
            autocast,
            card,
            self._functions,
            self._modes,
        )

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._note(text)

    def of_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        namespaces: Namespaces,
    ) -> Estimate:
        """Return the estimate of ``function(*args, **kwargs)``, of which nothing lasts.

        Functions that are defined in ``namespaces``, such as the notebook's, see fake copies of
        their globals.
        """
        __tracebackhide__ = True  # of the user's errors
        code = getattr(function, "__code__", None)
        spaces = (closure_of(function), *namespaces)
        function_globals = getattr(function, "__globals__", {})
        values = (*args, *kwargs.values())
        bound_to = getattr(function, "__self__", None)
        refuse_without_tensors(code, (*spaces, function_globals), (*values, bound_to))
        self._note_all(effects_of(code, spaces, values))

        def run() -> Any:
            # The copies are made here, inside the rollback: it collects no garbage among objects
            # that exist before it.
            for namespace in namespaces:
                self.copies.namespace(namespace)
            copy_of = self.copies.of
            return copy_of(function)(*copy_of(args), **copy_of(kwargs))

        return self._estimate_of(run)

    def of_code(
        self, code: types.CodeType, namespace: dict[str, Any], around: Any = None
    ) -> Estimate:
        """Return the estimate of ``code`` in ``namespace``, which is not changed.

        The code runs inside ``with around:``, whose method ``observe`` is called with each
        operation, its arguments and its result.
        """
        __tracebackhide__ = True  # of the user's errors
        refuse_without_tensors(code, (namespace,))
        self._note_all(effects_of(code, (namespace,)))
        if around is not None:
            self._tracker.observe = around.observe

        def run() -> None:
            with around or nullcontext():
                run_code(code, self.copies.namespace(namespace))

        return self._estimate_of(run)

    def assumed_device_of(self, tensor: Any) -> str:
        """Return the name of the device that a fake tensor is assumed to be on."""
        if self._locations.of(tensor) == HOST:
            return "cpu"
        return self._devices.assumed_for(tensor.device)

    def _estimate_of(self, run: Callable[[], Any]) -> Estimate:
        """Return the estimate of a call of ``run``, which is undone afterwards."""
        __tracebackhide__ = True  # of the user's errors
        started = time.perf_counter()
        figures = self.with_rollback(lambda: self._figures_of_run(run))
        devices = []
        for estimate, already_held_bytes in figures:
            room_bytes = self._room_bytes
            if estimate.device == "cpu" and len(figures) > 1:
                room_bytes = None  # the user's figure is that of a card, not of the host's RAM
            devices.append(with_room(estimate, already_held_bytes, room_bytes))
        self._note_advice(devices)
        self._note_all(self._assumptions.notes(self._tracker.upper_bounds))
        return Estimate(
            devices=tuple(devices),
            duration_seconds=time.perf_counter() - started,
            guesses=tuple(self._tracker.guesses),
            notes=tuple(self._notes),
            upper_bounds=tuple(self._tracker.upper_bounds),
        )

    def _note_advice(self, devices: list[DeviceEstimate]) -> None:
        """Note what would help on the devices, and the devices whose size is unknown."""
        for device in devices:
            text = advice(device)
            if text:
                self._note(text)
        for device in devices:
            if device.room_bytes is None:
                self._note(f"{device.device}: {UNKNOWN_SIZE}")

    def _figures_of_run(self, code: Callable[[], Any]) -> list[DeviceFigures]:
        """Run ``code`` on fake tensors, and return each device's figures.

        What was assumed, and settings that are not followed, are noted.
        """
        self.run_on_fakes(code)
        self._note_assumptions()
        if self._devices.assumed_device == "cpu":  # all tensors are in RAM
            self.log.change_device(HOST, "cpu")
        device_names = dict.fromkeys(life.device for life in self.log.lives)
        figures = []
        for device_name in device_names:
            unfollowed = self._unfollowed_on(device_name, device_names)
            figures.append(self._figures_of_device(device_name, unfollowed))
        uses_cuda = any(estimate.device.startswith("cuda") for estimate, _ in figures)
        settings = ", ".join(unfollowed_settings())
        if settings and uses_cuda:
            self._note(f"{settings}: not followed, reserved and needed are the figures without it")
        return figures

    def _unfollowed_on(self, device_name: str, device_names: Iterable[str]) -> tuple[str, ...]:
        """Return the kinds of code that ran on a device, and whose memory is not followed.

        ``device_names`` are those of all devices that the code used.
        """
        # Code on a card also makes tensors on the host, whose memory its compiler hardly changes.
        uses_card = any(other not in ("cpu", HOST) for other in device_names)
        if device_name == HOST or (device_name == "cpu" and uses_card):
            return ()
        return self._unfollowed.kinds

    def _note_assumptions(self) -> None:
        """Note devices that are not available, and recurrent layers with unknown kernels.

        Such a layer also counts as an operator whose memory is unknown.
        """
        if self._devices.requested_device is None and self._devices.accelerators_named_by_code:
            names = ", ".join(self._devices.accelerators_named_by_code)
            note = f"{names} is not available: tensors on it and on the host are counted together"
            if self._devices.uses_host:
                note += ", except those that the code itself puts on the CPU"
            self._note(note)
        if self._devices.moves_host_tensors:
            name = self._devices.requested_device
            self._note(f"tensors that the code puts on the CPU are counted on {name}, too")
        for line in self._functions.lines_of_recurrent_layers:
            self._note(
                f"{line}: memory of a card's kernels for a recurrent layer, such as cuDNN's, is "
                f"not counted"
            )
            self._operations.unknown_operators.setdefault("_cudnn_rnn")

    def _figures_of_device(self, device_name: str, unfollowed: tuple[str, ...]) -> DeviceFigures:
        """Return the figures of one device of the log.

        ``unfollowed`` are the kinds of code that ran there, and whose memory is not followed.
        """
        if device_name == HOST:  # tensors in RAM next to those of a card, for which the CPU stands
            estimate, _ = device_figures(self.log, HOST, "cpu")
            return DeviceFigures(estimate, already_held_bytes=0)
        estimate, already_held_bytes = device_figures(
            self.log, device_name, self._devices.assumed_device or device_name
        )
        if not already_held_bytes:  # no segments: count the originals and the existing workspaces
            originals_bytes = self.copies.originals_bytes.get(estimate.device, 0)
            already_held_bytes = originals_bytes + self._existing_workspaces_bytes(device_name)
        if estimate.device.startswith("cuda"):
            unknown_operators = tuple(self._operations.unknown_operators)
            estimate = replace(estimate, unknown_operators=unknown_operators)
        estimate = replace(estimate, unfollowed=unfollowed)
        return DeviceFigures(estimate, already_held_bytes)

    def _existing_workspaces_bytes(self, device_name: str) -> int:
        """Return the bytes of the workspaces that a device had before the code ran."""
        size_bytes = 0
        for life in self.log.lives:
            if life.existed_before and life.role == WORKSPACES and life.device == device_name:
                size_bytes += life.size_bytes
        return size_bytes

    def with_rollback(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, roll its changes back, and return its result.

        Raises:
            EstimateError: a limit on time or memory stopped the work, even if it caught the
                interruption and returned.
        """
        __tracebackhide__ = True  # of the user's errors
        rollback = Rollback(self._fakes, self._note)
        self.copies.rollback = rollback
        try:
            rollback.freeze_heap()
            # Our callback runs inside the user's code, whenever a storage is freed.
            with self._limits, interrupts.reraise_swallowed(around_users_code=True):
                result = work()
            if not self._limits.why:
                return result
        except BaseException as error:
            if not self._limits.why:
                error.__traceback__ = users_part(error.__traceback__)
                raise
            # Otherwise it is our interruption, or what the code made of it.
        finally:
            with interrupts.deferred() as struck:
                self.copies.forget()
                self._tracker.forget()
                rollback.put_back()
            if struck:
                raise KeyboardInterrupt
        reasons = [str(self._limits.error())]
        reasons += [note for note in self._notes if note.startswith(WAITS)]
        raise EstimateError("; ".join(reasons))

    def run_on_fakes(self, code: Callable[[], Any]) -> None:
        """Run ``code`` on fake tensors, and log their storages until it returns."""
        with ExitStack() as stack:
            for handle in self._hooks_of_optimizers():
                stack.callback(handle.remove)
            stack.enter_context(self._accelerators.applied())
            stack.enter_context(self._patches.applied())
            stack.enter_context(patch.object(builtins, "eval", copying_names_first(eval)))
            stack.enter_context(patch.object(builtins, "exec", copying_names_first(exec)))
            stack.enter_context(self._modes())
            result = self._call_users_code(code)
            self._mark_optimizer_states()
            self.log.close()
            del result  # kept until here, as the code's caller would keep it

    def _mark_optimizer_states(self) -> None:
        """Mark the states of the copied optimizers that are still alive."""
        for reference in self.copies.optimizers:
            optimizer = reference()
            if optimizer is not None:
                self._tracker.mark_state(optimizer)

    def _hooks_of_optimizers(self) -> list[Any]:
        """Register hooks on the steps of all optimizers, and return the handles that remove them.

        Before a step, the optimizer's loop is chosen; after it, its state is marked in the log.
        """

        def before_step(optimizer: Any, *_: Any) -> None:
            choose_loop(optimizer, self._devices, self._locations)

        return [
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(self._tracker.mark_state),
        ]

    def _call_users_code(self, code: Callable[[], Any]) -> Any:
        """Run the user's code, and return its result.

        An error that torch's fakes cause becomes an EstimateError. With any other one, the lines
        that got guesses are printed: these may be its cause.
        """
        __tracebackhide__ = True  # of the user's errors
        try:
            return code()
        except EstimateError:
            raise
        except (Exception, SystemExit) as error:
            cause = _unfollowed_code(error)
            if cause:
                line = user_line_of(error.__traceback__)
                raise EstimateError(f"an estimate cannot follow {cause} in {line}") from error
            self._print_last_guesses()
            raise

    def _print_last_guesses(self) -> None:
        """Print the last lines that got guesses, if there are any."""
        lines = list(self._tracker.guesses)
        if not lines:
            return
        shown = "".join(f"  {line}\n" for line in lines[-_MOST_GUESSES_PRINTED:])
        with suppress(Exception):  # the code may have replaced stderr
            sys.stderr.write(f"ipygpumem: {_AFTER_GUESSES}:\n{shown}")

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Run the block on fake tensors, with their operations and torch's functions handled."""
        # The fake mode is the outermost: it gets the calls that the inner modes do not handle.
        with self._fakes, self._tracker, self._functions:
            yield


def _fake_mode(devices: Devices) -> FakeTensorMode:
    """Return torch's mode of fake tensors, which on devices keeps values of single elements only.

    torch itself keeps the values of small tensors everywhere.
    """
    # As a fallback torch runs an operation on zeros; on a device, that would allocate memory there.
    allows_fallback = devices.all_on_cpu
    # The first mode imports torch's compiler, 800 modules.
    with imports_undone(), growth_for(FOR_FAKES):
        mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=allows_fallback)
    may_turn_const = mode.may_turn_const

    def may_keep_values(tensor: Any) -> bool:
        if tensor.numel() > 1 and tensor.device.type != "cpu":
            return False
        return bool(may_turn_const(tensor))

    mode.may_turn_const = may_keep_values
    return mode


def _unfollowed_code(error: BaseException) -> str:
    """Return the kind of code that one of torch's own errors is about; empty for another error."""
    if not is_exactly(error, RuntimeError, NotImplementedError, AssertionError):
        return ""
    text = str(error)
    for words, kind in _UNFOLLOWED_BY_MESSAGE.items():
        if words in text:
            return kind
    return ""
