"""Runs code on twins under fake tensors, and reads the estimate off the log of storages."""

from __future__ import annotations

import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.following import Devices, Follower, patched
from ipygpumem.estimating.free import free_bytes, has_context
from ipygpumem.estimating.lives import PARAMETERS, Log
from ipygpumem.estimating.reading import read
from ipygpumem.estimating.records import DeviceEstimate, Estimate
from ipygpumem.estimating.twins import Twins

_EFFECTS = frozenset(
    [
        *("Popen", "add_scalar", "input", "print", "savefig", "system", "to_csv", "urlopen"),
        *("load", "open", "read_bytes", "read_csv", "read_parquet", "read_text", "write", "write_bytes", "write_text"),
    ]
)
"""Names whose calls reach beyond the estimate."""


def estimate_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    namespaces: tuple[dict[str, Any], ...],
    *,
    device: str | None,
    room_bytes: int | None,
) -> Estimate:
    """Return what a call would take; functions that live in ``namespaces`` see their twins."""
    run = Run(device, room_bytes)
    for namespace in namespaces:
        run.twins.namespace(namespace)
    run.note_effects(getattr(function, "__code__", None), namespaces)
    return run.of(lambda: run.twins.of(function)(*run.twins.of(args), **run.twins.of(dict(kwargs))))


def estimate_code(
    code: types.CodeType, namespace: dict[str, Any], *, device: str | None, room_bytes: int | None
) -> Estimate:
    """Return what ``code`` would take in ``namespace``, which stays as it is."""
    run = Run(device, room_bytes)
    run.note_effects(code, (namespace,))
    return run.of(lambda: exec(code, run.twins.namespace(namespace)))  # noqa: S102  # the user's own cell


class Run:
    """One estimate: the twins that code works on, and the log of what becomes of them.

    Args:
        device: where all tensors are taken to be; None: where the code puts them.
        room_bytes: what that device has; None: what it has now, if it is here.
    """

    def __init__(self, device: str | None = None, room_bytes: int | None = None) -> None:
        self._label = _checked(device)
        self._room_bytes = room_bytes
        self.log = Log()
        has_cuda = torch.cuda.is_available()
        # Without the device its tensors are followed on the CPU: torch's kernels for it may not even be there.
        self._target = torch.device(device if device and has_cuda else "cpu") if device or not has_cuda else None
        self._devices = Devices(self._target, everything=device is not None)
        self._follower = Follower(self.log, str)
        self.twins = Twins(self._made, self._place, self._quietly)
        self._there: dict[str, int] = {}
        """Bytes of the originals, by device."""
        self._notes: dict[str, None] = {}

    def note_effects(self, code: types.CodeType | None, namespaces: tuple[dict[str, Any], ...]) -> None:
        """Note what ``code`` and the functions of ``namespaces`` that it names do beyond the estimate."""
        found = sorted(_EFFECTS & _names(code, namespaces, {})) if code is not None else []
        if found:
            self._notes[f"only tensors are fake, the rest ran for real: {', '.join(found)}"] = None

    def _place(self, device: Any) -> Any:
        everywhere = self._label is not None or device.type == "meta"
        return self._target or torch.device("cpu") if everywhere else device

    def _made(self, original: Any, twin: Any) -> None:
        life = self.log.see(twin, str(twin.device), before=True)
        if life is not None:
            place = str(original.device)
            self._there[place] = self._there.get(place, 0) + life.size_bytes
        if isinstance(twin, torch.nn.Parameter):
            self.log.mark(twin, PARAMETERS)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._follower.paused = self._follower.paused, True
        try:
            with torch._C._DisableFuncTorch():  # a twin that is made inside torch.func's grad or vmap is not of it
                yield
        finally:
            self._follower.paused = before

    def of(self, code: Callable[[], Any]) -> Estimate:
        """Run ``code`` under fake tensors and return what it would take."""
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(_generators_kept(self.twins.generators))
            stack.callback(self._put_gradients_back)
            self._enter(stack)
            result = code()
            for optimizer in self.twins.optimizers:
                self._follower.purposes.stepped(optimizer)
            self.log.close()
            del result  # it was kept until here, as the code's caller would
        if self._label is None and self._devices.asked and self._target is not None:
            here = f"{', '.join(self._devices.asked)} is not here: tensors on it and on the host are counted together"
            self._notes[here] = None
        seconds = time.perf_counter() - started
        return Estimate(self._read(), seconds, tuple(self._follower.guesses), tuple(self._notes))

    def _enter(self, stack: ExitStack) -> None:
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._follower.purposes.stepped).remove)
        stack.enter_context(patched(self._notes, accelerated=self._target is None))
        # What the modes inside it are not asked for goes through to fake tensors.
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), self._follower, self._devices):
            stack.enter_context(mode)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Choose the loop that torch chooses on accelerators, where it sees that the parameters are fake."""
        for group in optimizer.param_groups:
            undecided = group.get("foreach", False) is None and not group.get("fused") and not group["differentiable"]
            if undecided and self._is_accelerated(group["params"]):
                group["foreach"] = True

    def _is_accelerated(self, parameters: list[Any]) -> bool:
        fakes = all(isinstance(parameter, FakeTensor) for parameter in parameters)
        named = (self._label or next(iter(self._devices.asked), "cpu")).partition(":")[0]
        return fakes and (named != "cpu" or any(parameter.device.type != "cpu" for parameter in parameters))

    def _put_gradients_back(self) -> None:
        for tensor, gradient in self._follower.strays:
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

    def _read(self) -> tuple[DeviceEstimate, ...]:
        lives, backwards = self.log.lives, self.log.backwards
        label = self._label or (next(iter(self._devices.asked), "cpu") if self._target is not None else None)
        found = []
        for place in dict.fromkeys(life.device for life in lives):
            name = label or place
            figures = read(lives, backwards, place, name)
            room = self._room_bytes if self._room_bytes is not None else self._room_on(name)
            found.append(DeviceEstimate(**{**vars(figures), "room_bytes": room}))
        return tuple(found)

    def _room_on(self, name: str) -> int | None:
        """Return the bytes that are free on a device, or taken there by what the estimate counts anew."""
        free = free_bytes(name)
        if free is None:
            return None
        if not has_context(name):
            self._notes[f"{name} has no context of this process yet, which will take some of what is free"] = None
        return free + self._there.get(name, 0)


def _names(code: types.CodeType, namespaces: tuple[dict[str, Any], ...], seen: dict[int, types.CodeType]) -> set[str]:
    """Return the names in ``code``, in what it contains, and in functions of ``namespaces`` that it names."""
    seen[id(code)] = code
    named = (namespace.get(name) for name in code.co_names for namespace in namespaces)
    # Libraries' own functions name much that they seldom do.
    functions = [f for f in named if type(f) is types.FunctionType and any(f.__globals__ is n for n in namespaces)]
    inner = [*(item for item in code.co_consts if type(item) is types.CodeType), *(f.__code__ for f in functions)]
    return set(code.co_names).union(*(_names(item, namespaces, seen) for item in inner if id(item) not in seen))


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


@contextmanager
def _generators_kept(others: list[tuple[Any, Any]]) -> Iterator[None]:
    """Put every random generator back to where it was; ``others`` are generators of torch's and their states."""
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    numpys = numpy.get_state() if numpy is not None else None
    pythons, torchs = random.getstate(), torch.get_rng_state()
    cudas = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(pythons)
        torch.set_rng_state(torchs)
        if cudas:
            torch.cuda.set_rng_state_all(cudas)
        if numpy is not None:
            numpy.set_state(numpys)
        for generator, state in others:
            generator.set_state(state)
