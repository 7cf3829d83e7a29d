"""Runs code on fake copies of its tensors, puts back what it changed, and reads the estimate off the log."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.accelerators import Accelerators
from ipygpumem.estimating.caching import unfollowed
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.effects import closure_of, effects_of
from ipygpumem.estimating.fake_copies import FakeCopies
from ipygpumem.estimating.following import Follower
from ipygpumem.estimating.limits import Limits
from ipygpumem.estimating.patches import choose_loop, patched
from ipygpumem.estimating.reading import read, with_room
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.estimating.restoring import Restorer
from ipygpumem.estimating.storage_log import PARAMETERS, WORKSPACES, StorageLog, Workspaces
from ipygpumem.estimating.users_line import users_line_of, users_part
from ipygpumem.introspect import is_exactly
from ipygpumem.objects import interrupts

Namespaces = tuple[dict[str, Any], ...]
Result = TypeVar("Result")
TIMEOUT_SECONDS = 300.0
_GUESSES_SHOWN = 5
_INTERNAL = {
    "data is not allocated yet": "code in C++ that reads a tensor",
    "Cannot get CUDA generator": "a generator of a device that is not here",
    "no rule registered for HigherOrderOperator": "operators that take functions, such as flex_attention,",
}
"""Words of torch's where it cannot do without a tensor's values or its device, and what it is that it cannot do."""
_AFTER_GUESSES = "before the error these lines got guesses for values of tensors, which may be its cause"


class Estimation:
    """One estimate: the fake copies that code works on, and the log of what becomes of them.

    Args:
        device: where all tensors are taken to be; None: where the code puts them.
        room_bytes: what that device has; None: what it has now, if it is here.
        timeout_seconds: how long it may take.
    """

    def __init__(
        self, device: str | None = None, room_bytes: int | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._devices = Devices(device)
        self._room_bytes = room_bytes
        self._limits = Limits(timeout_seconds)
        self.log = StorageLog()
        self._notes: dict[str, None] = {}
        # What torch cannot tell of an operation it would try with zeros: on a device, that takes memory there.
        tries = self._devices.on_cpu
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=tries)
        self._restorer: Restorer | None = None
        self.copies = FakeCopies(self._made, self._devices.place, self._quietly, self._keep, self._note)
        self._accelerators = Accelerators(self.log, self._devices, room_bytes, self._note)
        workspaces = Workspaces(self.log, self._devices, self._accelerators.capability, self._note)
        self._follower = Follower(self.log, self._devices, workspaces, self._note, self._copy_of_stray, self._limits)
        self._originals_bytes: dict[str, int] = {}
        """Bytes of the originals, by device."""

    def _note(self, text: str) -> None:
        self._notes[text] = None

    # -- what fake copies are made of -----------------------------------------------------------------------------

    def _keep(self, value: Any) -> None:
        """Keep what code may change in this process, to put it back."""
        if self._restorer is not None:
            self._restorer.take(value)

    def _copy_of_stray(self, tensor: Any) -> Any:
        self._keep(tensor)
        return self.copies.of(tensor)

    def _made(self, original: Any, copy: Any) -> None:
        life = self.log.see(copy, self._devices.name(copy.device), before=True)
        if life is not None:
            place = str(original.device)
            self._originals_bytes[place] = self._originals_bytes.get(place, 0) + life.size_bytes
        if isinstance(copy, torch.nn.Parameter):
            self.log.mark(copy, PARAMETERS)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        # A copy that is made inside torch.func's grad or vmap is not of it.
        with self._follower.lock, torch._C._DisableFuncTorch():
            before, self._follower.paused = self._follower.paused, True
            # torch's cache of results would hold a storage for good that a copy lies in.
            caching, self._fakes.cache_enabled = getattr(self._fakes, "cache_enabled", False), False
            try:
                yield
            finally:
                self._follower.paused, self._fakes.cache_enabled = before, caching

    # -- what is estimated ----------------------------------------------------------------------------------------

    def of_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], namespaces: Namespaces
    ) -> Estimate:
        """Return what a call would take; functions that live in ``namespaces`` see fake copies of their names."""
        __tracebackhide__ = True  # of the user's errors
        of = self.copies.of
        for namespace in namespaces:
            self.copies.namespace(namespace)
        code, spaces = getattr(function, "__code__", None), (closure_of(function), *namespaces)
        self._notes.update(dict.fromkeys(effects_of(code, spaces, (*args, *kwargs.values()))))
        return self._of(lambda: of(function)(*of(args), **of(kwargs)))

    def of_code(self, code: types.CodeType, namespace: dict[str, Any]) -> Estimate:
        """Return what ``code`` would take in ``namespace``, which stays as it is."""
        __tracebackhide__ = True  # of the user's errors
        self._notes.update(dict.fromkeys(effects_of(code, (namespace,))))
        return self._of(lambda: exec(code, self.copies.namespace(namespace)))  # noqa: S102  # the user's own cell

    def _of(self, run: Callable[[], Any]) -> Estimate:
        __tracebackhide__ = True  # of the user's errors
        started = time.perf_counter()
        found = self.carry_out(lambda: self._figures(run))
        devices = tuple(with_room(figures, there_bytes, self._room_bytes) for figures, there_bytes in found)
        guesses = tuple(self._follower.answers.guesses)
        return Estimate(devices, time.perf_counter() - started, guesses, tuple(self._notes))

    def _figures(self, code: Callable[[], Any]) -> list[tuple[DeviceEstimate, int]]:
        """Run ``code`` and return for each device the figures, and the bytes that this process holds there already."""
        self.run(code)
        if self._devices.label is None and self._devices.asked:
            names = ", ".join(self._devices.asked)
            self._note(f"{names} is not here: tensors on it and on the host are counted together")
        devices = []
        for place in dict.fromkeys(life.device for life in self.log.lives):
            device = read(self.log, place, self._devices.named or place)
            held = [life for life in self.log.lives if life.before and life.role == WORKSPACES and life.device == place]
            there_bytes = self._originals_bytes.get(device.device, 0) + sum(life.size_bytes for life in held)
            devices.append((device, there_bytes))
        if any(device.device.startswith("cuda") for device, _ in devices) and (settings := unfollowed()):
            self._note(f"{', '.join(settings)}: not followed, reserved and needed are the figures without it")
        return devices

    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns. Then put back what it has changed.

        Raises:
            EstimateError: it took too long, or too much host memory.
        """
        __tracebackhide__ = True  # of the user's errors
        restorer = self._restorer = Restorer(self._fakes, self._note)
        try:
            with interrupts.kept(), self._limits:  # among the user's code runs ours, at each death of a tensor
                result = work()
            if not self._limits.why:
                return result
        except BaseException as error:
            if not self._limits.why:
                error.__traceback__ = users_part(error.__traceback__)
                raise
        finally:
            with interrupts.noted() as struck:
                self.copies.forget()
                self._follower.forget()
                self._restorer = None
                restorer.put_back()
            if struck:
                raise KeyboardInterrupt
        raise self._limits.error()

    def run(self, code: Callable[[], Any]) -> None:
        """Run ``code`` under fake tensors."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._follower.stepped).remove)
            stack.enter_context(self._accelerators.standing_in())
            stack.enter_context(patched(self._note, self._devices, self._modes))
            stack.enter_context(self._modes())
            with self._guesses_added_to_errors():
                result = code()
            for optimizer in self.copies.optimizers:
                self._follower.stepped(optimizer)
            self.log.close()
            del result  # it was kept until here, as the code's caller would

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        choose_loop(optimizer, self._devices)

    @contextmanager
    def _guesses_added_to_errors(self) -> Iterator[None]:
        """Print, for an error of the user's code, the lines before it that got guesses.

        Raises:
            EstimateError: the error was torch's own word for what it cannot do without values.
        """
        try:
            yield
        except EstimateError:
            raise
        except (Exception, SystemExit) as error:
            text = str(error) if is_exactly(error, RuntimeError, NotImplementedError) else ""
            for words, what in _INTERNAL.items():
                if words in text:
                    line = users_line_of(error.__traceback__)
                    raise EstimateError(f"an estimate cannot follow {what} in {line}") from error
            lines = list(self._follower.answers.guesses)[-_GUESSES_SHOWN:]
            if lines:
                shown = "".join(f"  {line}\n" for line in lines)
                with suppress(Exception):  # whatever stands for stderr now
                    sys.stderr.write(f"ipygpumem: {_AFTER_GUESSES}:\n{shown}")
            raise

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # What the modes inside it are not asked for goes through to fake tensors.
        with self._fakes, self._follower, self._devices:
            yield
