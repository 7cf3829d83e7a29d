"""Runs code on twins under fake tensors, in a child process where it can, and reads the estimate off the log."""

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
from ipygpumem.estimating import apart
from ipygpumem.estimating.accelerators import Accelerators
from ipygpumem.estimating.caching import unfollowed, users_rules
from ipygpumem.estimating.effects import effects_of
from ipygpumem.estimating.following import Devices, Follower
from ipygpumem.estimating.free import CONTEXT_BYTES, SPARE_SHARE, free_bytes, has_context
from ipygpumem.estimating.lives import PARAMETERS, WORKSPACES, Log
from ipygpumem.estimating.packing import users_part
from ipygpumem.estimating.patches import patched
from ipygpumem.estimating.places import users_line_of
from ipygpumem.estimating.reading import read
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.estimating.snapshot import Snapshot
from ipygpumem.estimating.twins import Twins
from ipygpumem.estimating.workspaces import Workspaces
from ipygpumem.objects import interrupts

TIMEOUT_SECONDS = 300.0
_GUESSES_TOLD = 5
_INTERNAL = {
    "data is not allocated yet": "code in C++ that reads a tensor",
    "Cannot get CUDA generator": "a generator of a device that is not here",
    "no rule registered for HigherOrderOperator": "operators that take functions, such as flex_attention,",
}
"""Words of torch's where it cannot do without a tensor's values or its device, and what it is that it cannot do."""
_AFTER_GUESSES = (
    "an estimate has no values, so that these lines got guesses for them before the error, which may come of that"
)


def estimate_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    namespaces: tuple[dict[str, Any], ...],
    *,
    device: str | None,
    room_bytes: int | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    front: apart.Front | None = None,
) -> Estimate:
    """Return what a call would take; functions that live in ``namespaces`` see their twins."""
    __tracebackhide__ = True  # of the user's errors
    run = Run(device, room_bytes, timeout_seconds)
    for namespace in namespaces:
        run.twins.namespace(namespace)
    run.note_effects(getattr(function, "__code__", None), namespaces)
    return run.estimate(lambda: run.twins.of(function)(*run.twins.of(args), **run.twins.of(dict(kwargs))), front)


def estimate_code(
    code: types.CodeType,
    namespace: dict[str, Any],
    *,
    device: str | None,
    room_bytes: int | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    front: apart.Front | None = None,
) -> Estimate:
    """Return what ``code`` would take in ``namespace``, which stays as it is."""
    __tracebackhide__ = True  # of the user's errors
    run = Run(device, room_bytes, timeout_seconds)
    run.note_effects(code, (namespace,))
    return run.estimate(lambda: exec(code, run.twins.namespace(namespace)), front)  # noqa: S102  # the user's own cell


class Run:
    """One estimate: the twins that code works on, and the log of what becomes of them.

    Args:
        device: where all tensors are taken to be; None: where the code puts them.
        room_bytes: what that device has; None: what it has now, if it is here.
        timeout_seconds: how long it may take.
    """

    def __init__(
        self,
        device: str | None = None,
        room_bytes: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._label = _checked(device)
        self._room_bytes = room_bytes
        self._timeout_seconds = timeout_seconds
        self.log = Log()
        has_cuda = torch.cuda.is_available()
        # Without the device its tensors are followed on the CPU: torch's kernels for it may not even be there.
        self._target = torch.device(device if device and has_cuda else "cpu") if device or not has_cuda else None
        self._devices = Devices(self._target, everything=device is not None)
        self._notes: dict[str, None] = {}
        # What torch cannot tell of an operation it would try with zeros: on a device, that takes memory there.
        tries = self._target is not None and self._target.type == "cpu"
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=tries)
        self._kept: Callable[[Any], None] = lambda _: None
        self.twins = Twins(self._made, self._place, self._quietly, shared=self._keep, note=self._note)
        kind = self._label.partition(":")[0] if self._label is not None else None
        self._accelerators = Accelerators(self.log, kind, self._name, room_bytes, self._note)
        workspaces = Workspaces(self.log, self._cuda_place, self._accelerators.capability, self._note)
        self._follower = Follower(
            self.log,
            self._name,
            workspaces=workspaces,
            note=self._note,
            twin_of=self._twin_of_stray,
            timeout_seconds=timeout_seconds,
        )
        self._there: dict[str, int] = {}
        """Bytes of the originals, by device."""

    def note_effects(self, code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...]) -> None:
        """Note what ``code`` and the functions that it names do beyond the estimate."""
        found = effects_of(code, namespaces) if code is not None else []
        if found:
            self._note(f"only tensors are fake, the rest ran for real: {', '.join(found)}")

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _keep(self, value: Any) -> None:
        self._kept(value)

    def _twin_of_stray(self, tensor: Any) -> Any:
        self._kept(tensor)
        return self.twins.of(tensor)

    def _name(self, device: Any) -> str:
        """Return what the log calls a device."""
        if self._label is not None and device.type != "meta":
            return str(self._target)
        return "cpu" if self._target is not None else str(device)

    def _place(self, device: Any) -> Any:
        everywhere = self._label is not None or device.type == "meta"
        return self._target or torch.device("cpu") if everywhere else device

    def _cuda_place(self, tensor: Any) -> tuple[Any, str] | None:
        """Return the CUDA device that a tensor is taken to be on, and what the log calls it."""
        device = tensor.device
        there = self._label or (next(iter(self._devices.asked), "cpu") if self._target is not None else str(device))
        return (torch.device(there), self._name(device)) if there.startswith("cuda") else None

    def _made(self, original: Any, twin: Any) -> None:
        life = self.log.see(twin, self._name(twin.device), before=True)
        if life is not None:
            place = str(original.device)
            self._there[place] = self._there.get(place, 0) + life.size_bytes
        if isinstance(twin, torch.nn.Parameter):
            self.log.mark(twin, PARAMETERS)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        # A twin that is made inside torch.func's grad or vmap is not of it.
        with self._follower.lock, torch._C._DisableFuncTorch():
            before, self._follower.paused = self._follower.paused, True
            # torch's cache of results would hold a storage for good that a twin lies in.
            caching, self._fakes.cache_enabled = getattr(self._fakes, "cache_enabled", False), False
            try:
                yield
            finally:
                self._follower.paused, self._fakes.cache_enabled = before, caching

    # -- apart, or in place ---------------------------------------------------------------------------------------

    def estimate(self, code: Callable[[], Any], front: apart.Front | None) -> Estimate:
        """Run ``code`` under fake tensors and return what it would take."""
        __tracebackhide__ = True  # of the user's errors
        started = time.perf_counter()
        found, forked = self.carry_out(lambda: self._figures(code), front)
        devices = tuple(self._with_room(device) for device in found["devices"])
        notes = tuple(dict.fromkeys([*found["notes"], *self._notes]))
        seconds = time.perf_counter() - started
        return Estimate(devices, seconds, tuple(found["guesses"]), notes, forked)

    def carry_out(self, work: Callable[[], Any], front: apart.Front | None = None) -> tuple[Any, bool]:
        """Return the plain data of ``work``, and whether it ran in a child: if not, what it changed is put back."""
        __tracebackhide__ = True  # of the user's errors
        try:
            timeout = self._timeout_seconds
            return apart.run(work, self._probe, timeout_seconds=timeout, front=front or apart.Front()), True
        except apart.UnfitError as why:
            self._note(f"made in this process, not in a child: {why}")
        snapshot = Snapshot()
        self._kept = snapshot.take
        try:
            with interrupts.kept():  # among the user's code runs ours, at each death of a tensor
                return work(), False
        except BaseException as error:
            error.__traceback__ = users_part(error.__traceback__)
            raise
        finally:
            self.twins.forget()
            self._follower.forget()
            self._kept = lambda _: None
            for told in snapshot.put_back():
                self._note(told)

    def _probe(self) -> None:
        """Do in a child what an estimate does, for torch may refuse it there.

        Raises:
            RuntimeError: autograd has threads for devices, which a child has not, or the driver refuses.
        """
        torch.set_num_threads(1)  # the others are not in a child
        torch.ones(1, requires_grad=True).sum().backward()
        if self._target is not None and self._target.type == "cpu":
            return
        if hasattr(fake_tensor, "init_gpu_context"):
            fake_tensor.init_gpu_context = lambda *_: None  # a child makes no context, and needs none
        with FakeTensorMode():
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()

    def _figures(self, code: Callable[[], Any]) -> dict[str, Any]:
        self.of(code)
        if self._label is None and self._devices.asked and self._target is not None:
            self._note(
                f"{', '.join(self._devices.asked)} is not here: tensors on it and on the host are counted together"
            )
        devices = [(place, figures.to_dict()) for place, figures in self._read()]
        if any(figures["device"].startswith("cuda") for _, figures in devices) and (settings := unfollowed()):
            what = ", ".join(settings)
            self._note(f"{what}: not followed, what is reserved and needed is that of the allocator without it")
        return {
            "devices": [{**figures, "there_bytes": self._there_bytes(figures["device"])} for _, figures in devices],
            "guesses": list(self._follower.guesses),
            "notes": list(self._notes),
        }

    def _there_bytes(self, place: str) -> int:
        """Return what of this process's own memory on a device the estimate counts anew."""
        held = [life for life in self.log.lives if life.before and life.part == WORKSPACES and life.device == place]
        return self._there.get(place, 0) + sum(life.size_bytes for life in held)

    def of(self, code: Callable[[], Any]) -> None:
        """Run ``code`` under fake tensors."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._follower.purposes.stepped).remove)
            stack.enter_context(self._accelerators.standing_in())
            accelerated, elsewhere = self._target is None, self._is_elsewhere
            replaced = patched(self._note, accelerated=accelerated, is_elsewhere=elsewhere, following=self._modes)
            stack.enter_context(replaced)
            stack.enter_context(self._modes())
            with self._guesses_told():
                result = code()
            for optimizer in self.twins.optimizers:
                self._follower.purposes.stepped(optimizer)
            self.log.close()
            del result  # it was kept until here, as the code's caller would

    @contextmanager
    def _guesses_told(self) -> Iterator[None]:
        """Say of an error of the user's code which lines before it got answers that nobody knows.

        Raises:
            EstimateError: the error was torch's own word for what it cannot do without values.
        """
        try:
            yield
        except EstimateError:
            raise
        except (Exception, SystemExit) as error:
            text = str(error) if type(error) in (RuntimeError, NotImplementedError) else ""
            for words, what in _INTERNAL.items():
                if words in text:
                    line = users_line_of(error.__traceback__)
                    raise EstimateError(f"an estimate cannot follow {what} in {line}") from error
            lines = list(self._follower.guesses)[-_GUESSES_TOLD:]
            if lines:
                told = "".join(f"  {line}\n" for line in lines)
                with suppress(Exception):  # whatever stands for stderr now
                    sys.stderr.write(f"ipygpumem: {_AFTER_GUESSES}:\n{told}")
            raise

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # What the modes inside it are not asked for goes through to fake tensors.
        with self._fakes, self._follower, self._devices:
            yield

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Choose the loop that torch chooses on accelerators, where it sees that the parameters are fake."""
        kinds = type.mro(type(optimizer))
        modules = [sys.modules.get(kind.__module__) for kind in kinds if kind is not torch.optim.Optimizer]
        if not any(hasattr(module, "_default_to_fused_or_foreach") for module in modules):
            return  # such as Adafactor, which takes the plain loop everywhere
        for group in optimizer.param_groups:
            one_way = group.get("fused") or group.get("differentiable")
            unset = "foreach" in group and group["foreach"] is None
            if unset and not one_way and self._is_accelerated(group["params"]):
                group["foreach"] = True

    def _is_elsewhere(self) -> bool:
        """Whether code runs now as if it were on a device that is not here: on the CPU in its place."""
        named = self._label or next(iter(self._devices.asked), "cpu")
        return named != "cpu" and self._target is not None and self._target.type == "cpu"

    def _is_accelerated(self, parameters: list[Any]) -> bool:
        named = (self._label or next(iter(self._devices.asked), "cpu")).partition(":")[0]
        return named != "cpu" or any(parameter.device.type != "cpu" for parameter in parameters)

    def _read(self) -> list[tuple[str, DeviceEstimate]]:
        lives, backwards = self.log.lives, self.log.backwards
        label = self._label or (next(iter(self._devices.asked), "cpu") if self._target is not None else None)
        places, rules = dict.fromkeys(life.device for life in lives), users_rules()
        return [(place, read(lives, backwards, place, label or place, rules)) for place in places]

    def _with_room(self, figures: dict[str, Any]) -> DeviceEstimate:
        """Return a device's figures with the bytes that are free there, or taken by what the estimate counts anew."""
        name, room = figures["device"], self._room_bytes
        context = CONTEXT_BYTES if name.startswith("cuda") else 0
        if room is None:
            free = free_bytes(name)
            room = None if free is None else free + figures["there_bytes"]
            context = 0 if room is None or has_context(name) else context
        spare = figures["needed_bytes"] // SPARE_SHARE if name != "cpu" else 0
        return DeviceEstimate.from_dict({**figures, "room_bytes": room, "context_bytes": context, "spare_bytes": spare})


def _checked(device: str | None) -> str | None:
    """Return the full name of a device.

    Raises:
        EstimateError: there is no such device.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError:
        raise EstimateError(f"{device!r} is no device: write cuda:0, cuda, xpu, mps or cpu") from None
    return str(found) if found.type in ("cpu", "mps") or found.index is not None else f"{found.type}:0"
