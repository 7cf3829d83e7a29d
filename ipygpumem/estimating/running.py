"""Runs code on fake copies of its tensors, in a child process if possible, and reads the estimate off the log."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import child
from ipygpumem.estimating.accelerators import Accelerators
from ipygpumem.estimating.as_on_cuda import choose_loop
from ipygpumem.estimating.caching import unfollowed
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.effects import effects_of
from ipygpumem.estimating.fake_copies import FakeCopies
from ipygpumem.estimating.following import Follower
from ipygpumem.estimating.free import with_room
from ipygpumem.estimating.packing import users_part
from ipygpumem.estimating.patches import patched
from ipygpumem.estimating.reading import read
from ipygpumem.estimating.records import Estimate
from ipygpumem.estimating.restoring import Restorer
from ipygpumem.estimating.storage_log import PARAMETERS, WORKSPACES, StorageLog
from ipygpumem.estimating.users_line import users_line_of
from ipygpumem.estimating.workspaces import Workspaces
from ipygpumem.introspect import is_exactly
from ipygpumem.objects import interrupts

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
        front: takes a child process off the front-end; None: there is no front-end.
    """

    def __init__(
        self,
        device: str | None = None,
        room_bytes: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        front: child.Front | None = None,
    ) -> None:
        self._devices = Devices(device)
        self._room_bytes = room_bytes
        self._timeout_seconds = timeout_seconds
        self._front = front or child.Front()
        self.log = StorageLog()
        self._notes: dict[str, None] = {}
        # What torch cannot tell of an operation it would try with zeros: on a device, that takes memory there.
        tries = self._devices.on_cpu
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=tries)
        self._restorer: Restorer | None = None
        self.copies = FakeCopies(self._made, self._devices.place, self._quietly, shared=self._keep, note=self._note)
        self._accelerators = Accelerators(self.log, self._devices, room_bytes, self._note)
        workspaces = Workspaces(self.log, self._devices, self._accelerators.capability, self._note)
        self._follower = Follower(
            self.log,
            self._devices,
            workspaces=workspaces,
            note=self._note,
            copy_of=self._copy_of_stray,
            timeout_seconds=timeout_seconds,
        )
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
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        namespaces: tuple[dict[str, Any], ...],
    ) -> Estimate:
        """Return what a call would take; functions that live in ``namespaces`` see fake copies of their names."""
        __tracebackhide__ = True  # of the user's errors
        of = self.copies.of
        for namespace in namespaces:
            self.copies.namespace(namespace)
        code = getattr(function, "__code__", None)
        return self._of(lambda: of(function)(*of(args), **of(dict(kwargs))), code, namespaces)

    def of_code(self, code: types.CodeType, namespace: dict[str, Any]) -> Estimate:
        """Return what ``code`` would take in ``namespace``, which stays as it is."""
        __tracebackhide__ = True  # of the user's errors
        run = lambda: exec(code, self.copies.namespace(namespace))  # noqa: E731, S102  # the user's own cell
        return self._of(run, code, (namespace,))

    def _of(
        self, run: Callable[[], Any], code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...]
    ) -> Estimate:
        __tracebackhide__ = True  # of the user's errors
        if code is not None and (effects := effects_of(code, namespaces)):
            self._note(f"only tensors are fake; calls of these run for real: {', '.join(effects)}")
        started = time.perf_counter()
        result, forked = self.carry_out(lambda: self._figures(run))
        devices = tuple(with_room(figures, self._room_bytes) for figures in result["devices"])
        notes = tuple(dict.fromkeys([*result["notes"], *self._notes]))
        return Estimate(devices, time.perf_counter() - started, tuple(result["guesses"]), notes, forked)

    def _figures(self, code: Callable[[], Any]) -> dict[str, Any]:
        """Run ``code`` and return the estimate as plain data."""
        self.run(code)
        if self._devices.label is None and self._devices.asked:
            names = ", ".join(self._devices.asked)
            self._note(f"{names} is not here: tensors on it and on the host are counted together")
        devices = []
        for place in dict.fromkeys(life.device for life in self.log.lives):
            device = read(self.log, place, self._devices.named or place)
            devices.append({**device.to_dict(), "there_bytes": self._there_bytes(device.device)})
        if any(figures["device"].startswith("cuda") for figures in devices) and (settings := unfollowed()):
            self._note(f"{', '.join(settings)}: not followed, reserved and needed are the figures without it")
        return {"devices": devices, "guesses": list(self._follower.answers.guesses), "notes": list(self._notes)}

    def _there_bytes(self, place: str) -> int:
        """Return what of this process's own memory on a device the estimate counts anew."""
        held = [life for life in self.log.lives if life.before and life.role == WORKSPACES and life.device == place]
        return self._originals_bytes.get(place, 0) + sum(life.size_bytes for life in held)

    # -- in a child, or in place ----------------------------------------------------------------------------------

    def carry_out(self, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the plain data of ``work``, and whether it ran in a child. If not, what it changed is put back."""
        __tracebackhide__ = True  # of the user's errors
        try:
            return child.run(work, self._probe, timeout_seconds=self._timeout_seconds, front=self._front), True
        except child.UnfitError as why:
            self._note(f"made in this process, not in a child: {why}")
        restorer = self._restorer = Restorer(self._fakes)
        try:
            with interrupts.kept():  # among the user's code runs ours, at each death of a tensor
                return work(), False
        except BaseException as error:
            error.__traceback__ = users_part(error.__traceback__)
            raise
        finally:
            self.copies.forget()
            self._follower.forget()
            self._restorer = None
            for problem in restorer.put_back():
                self._note(problem)

    def _probe(self) -> None:
        """Try in a child what an estimate does: torch may refuse it there.

        Raises:
            RuntimeError: autograd has threads for devices, which a child has not, or the driver refuses.
        """
        torch.set_num_threads(1)  # the others are not in a child
        torch.ones(1, requires_grad=True).sum().backward()
        if self._devices.on_cpu:
            return
        if hasattr(fake_tensor, "init_gpu_context"):
            fake_tensor.init_gpu_context = lambda *_: None  # a child makes no context, and needs none
        with FakeTensorMode():
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()

    def run(self, code: Callable[[], Any]) -> None:
        """Run ``code`` under fake tensors."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._follower.roles.stepped).remove)
            stack.enter_context(self._accelerators.standing_in())
            stack.enter_context(patched(self._note, self._devices, self._modes))
            stack.enter_context(self._modes())
            with self._guesses_added_to_errors():
                result = code()
            for optimizer in self.copies.optimizers:
                self._follower.roles.stepped(optimizer)
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
