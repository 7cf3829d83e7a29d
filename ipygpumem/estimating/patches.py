"""Replaces functions of torch that fake tensors would break, or that take another way on a device that is not here."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.nn import functional

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.users_line import users_line


def functions_as_there(devices: Devices) -> list[tuple[Any, str, Any]]:
    """Return where functions are, what they are called there and what stands in for them."""
    attend: Any = getattr(functional, "scaled_dot_product_attention", None)
    drop = functional.dropout

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        # With dropout the CPU has no kernel that leaves the matrix of weights out; CUDA has.
        return attend(query, key, value, attn_mask, 0.0 if devices.is_elsewhere else dropout_p, *rest, **more)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002  # torch's
        if training and 0 < p < 1 and not inplace and devices.is_elsewhere:
            return torch.native_dropout(input, p, True)[0]  # it keeps a byte for each number; the CPU's keeps a number
        return drop(input, p, training, inplace)

    return [(functional, "dropout", dropout), *([(functional, attend.__name__, attention)] if attend else [])]


def choose_loop(optimizer: Any, devices: Devices) -> None:
    """Choose an optimizer's loop as torch does on accelerators: it sees that the parameters are fake."""
    kinds = type.mro(type(optimizer))
    modules = [sys.modules.get(kind.__module__) for kind in kinds if kind is not torch.optim.Optimizer]
    if not any(hasattr(module, "_default_to_fused_or_foreach") for module in modules):
        return  # such as Adafactor, which takes the plain loop everywhere
    named = (devices.named or "cpu").partition(":")[0]
    for group in optimizer.param_groups:
        is_chosen = group.get("fused") or group.get("differentiable") or group.get("foreach", False) is not None
        if not is_chosen and any(name != "cpu" for name in (named, *(item.device.type for item in group["params"]))):
            group["foreach"] = True


COMPILED = "torch.compile: the figures are those of eager code"

NO_PROCESSES = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
    "timeout": 0,
    "_DataLoader__multiprocessing_context": None,
}
"""Attributes of a data loader: a worker's process would get fake tensors."""


@contextmanager
def patched(note: Note, devices: Devices, following: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Replace them meanwhile; ``following`` makes the modes for threads that the code starts."""
    with ExitStack() as stack:
        for place, name, value in _changes(note, devices, following):
            stack.enter_context(patch.object(place, name, value))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _changes(
    note: Note, devices: Devices, following: Callable[[], AbstractContextManager[Any]]
) -> list[tuple[Any, str, Any]]:
    """Return where functions are, what they are called there and what stands in for them."""
    fakes, tensor = fake_tensor.FakeTensor, torch.Tensor
    changes: list[tuple[Any, str, Any]] = [
        (torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors)),
        (torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])),
        *zip([torch] * 2, ("save", "load"), _without_files(torch.load, note), strict=True),
        (torch, "set_num_threads", lambda _: None),
        (fake_tensor.log, "disabled", True),  # errors are raised, too
        (fakes, "tolist", _tolist),
        (tensor, "record_stream", lambda *_: None),
        (tensor, "__format__", _format(tensor.__format__)),
        (torch.utils.data.DataLoader, "__init__", _without_processes(torch.utils.data.DataLoader.__init__)),
        (threading.Thread, "start", _followed(threading.Thread.start, following)),
        (torch.amp.GradScaler, "_maybe_opt_step", _step_always),
        *functions_as_there(devices),
    ]
    if hasattr(fake_tensor, "init_gpu_context"):
        changes.append((fake_tensor, "init_gpu_context", lambda *_: None))  # it takes memory there
    if hasattr(torch, "compile"):
        changes.append((torch, "compile", _uncompiled(note)))
        changes.append((torch.nn.Module, "compile", lambda *_, **__: note(COMPILED)))
    if devices.on_cpu:
        cast = torch.amp.autocast_mode.autocast
        changes.append((cast, "__init__", _cast_here(cast.__init__)))
    return changes


def _swap(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def call(first: Any, second: Any) -> None:
        # torch refuses to swap a tensor that anybody refers to weakly, as fake tensors' own memo does.
        if first.device.type == second.device.type:
            first.data = second.data
        else:
            swap(first, second)

    return call


def _without_files(load: Callable[..., Any], note: Note) -> tuple[Callable[..., Any], ...]:
    """Return replacements: a ``torch.save`` that writes nothing, and a ``torch.load`` that says so."""
    written: dict[Any, Any] = {}

    def key(file: Any) -> Any:
        return Path(file).absolute() if isinstance(file, (str, os.PathLike)) else id(file)

    def save(_: Any, f: Any, *__: Any, **___: Any) -> None:
        written[key(f)] = f  # kept, for its id
        note(f"{users_line()}: torch.save wrote nothing")

    @functools.wraps(load)
    def load_what_was_there(f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(f, *args, **kwargs)
        except Exception as error:
            if key(f) not in written:
                raise
            raise EstimateError(f"torch.save wrote nothing that could be loaded in {users_line()}") from error

    return save, load_what_was_there


def _tolist(tensor: Any) -> Any:
    values: Any = torch.ops.aten._local_scalar_dense(tensor)  # so that the guess is noted
    values = 0 if type(values) is int else values  # it may be an index
    for length in reversed(tensor.shape):
        values = [values] * length
    return values


def _format(method: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    def call(tensor: Any, form: str) -> str:
        if not isinstance(tensor, fake_tensor.FakeTensor):
            return method(tensor, form)
        return format(tensor.item(), form) if tensor.dim() == 0 else str(tensor)

    return call


def _without_processes(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def call(loader: Any, *args: Any, **kwargs: Any) -> None:
        init(loader, *args, **kwargs)
        vars(loader).update(NO_PROCESSES)

    return call


def _followed(
    start: Callable[[Any], None], following: Callable[[], AbstractContextManager[Any]]
) -> Callable[[Any], None]:
    def call(thread: Any) -> None:
        if torch._C._len_torch_dispatch_stack():  # the estimate's own, not one of those that are beside it
            run = thread.run

            def follow() -> None:
                with following():
                    run()

            thread.run = follow
        start(thread)

    return call


def _step_always(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    """Step always: nobody knows whether a gradient overflowed, and a step that is left out takes no memory."""
    return optimizer.step(*args, **kwargs)


def _uncompiled(note: Note) -> Callable[..., Any]:
    def compile_nothing(model: Any = None, **_: Any) -> Any:
        note(COMPILED)
        return (lambda function: function) if model is None else model

    return compile_nothing


def _cast_here(begin: Callable[..., None]) -> Callable[..., None]:
    def call(mode: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type != "cpu":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
        begin(mode, device_type, dtype, *args, **kwargs)

    return call
