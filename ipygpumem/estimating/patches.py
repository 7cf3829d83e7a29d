"""Replaces torch functions that fail on fake tensors, and those of torch.cuda that change or query
a device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.utils import _device
from torch.utils._python_dispatch import _disable_current_modes

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import fused, user_line
from ipygpumem.estimating.autocast import CudaAutocast, cast_type
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import StorageLog
from ipygpumem.estimating.transients import HOPPERS_PROCESSORS
from ipygpumem.introspect import is_users
from ipygpumem.probes.nvml import Nvml


def choose_loop(optimizer: Any, devices: Devices) -> None:
    """Choose an optimizer's loop as torch does on accelerators; for fake parameters it would choose
    another.
    """
    kinds = type.mro(type(optimizer))
    modules = [
        sys.modules.get(kind.__module__) for kind in kinds if kind is not torch.optim.Optimizer
    ]
    if not any(hasattr(module, "_default_to_fused_or_foreach") for module in modules):
        return  # such as Adafactor, which always uses the plain loop
    named = (devices.named or "cpu").partition(":")[0]
    for group in optimizer.param_groups:
        is_chosen = (
            group.get("fused")
            or group.get("differentiable")
            or group.get("foreach", False) is not None
        )
        if not is_chosen and any(
            name != "cpu" for name in (named, *(item.device.type for item in group["params"]))
        ):
            group["foreach"] = True


COMPILED = "torch.compile: the figures are those of eager code"

MOST_VALUES = 1 << 16
"""Maximum number of elements of a tensor that keeps its values: one made from numbers, or of
integers on the host.
"""

NO_PROCESSES = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
    "timeout": 0,
    "_DataLoader__multiprocessing_context": None,
}
"""Attributes of a data loader that loads in this process, because worker processes cannot get fake
tensors.
"""


def fake_parameter(kind: Any, tensor: Any, requires_grad: bool) -> Any:
    """Return a fake tensor that is also an instance of a library's own parameter class."""
    made = torch.Tensor.detach(tensor).requires_grad_(requires_grad)
    made.__class__ = _fake_kind(kind)
    return made


@functools.lru_cache(maxsize=64)
def _fake_kind(kind: Any) -> Any:
    def detach(tensor: Any) -> Any:  # of the same class, as torch.nn.Parameter() demands
        made = fake_parameter(kind, torch.Tensor.detach(tensor), False)
        vars(made).update(vars(tensor))
        return made

    bases = (kind, fake_tensor.FakeTensor)
    return type(kind)(kind.__name__, bases, {"__module__": kind.__module__, "detach": detach})


@contextmanager
def patched(
    note: Note, devices: Devices, following: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Replace torch functions during the block; ``following`` makes the modes for threads that the
    code starts.
    """
    casts = CudaAutocast()
    with ExitStack() as stack:
        stack.callback(casts.close)
        made = [patch.object(*change) for change in _changes(note, devices, casts, following)]
        for one in made:
            stack.enter_context(one)
        stack.enter_context(_libraries_imported_without(made))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _libraries_imported_without(made: list[Any]) -> Iterator[None]:
    """Import libraries with torch's own functions and tensors: what they take at their import, they
    keep for good.
    """
    basics: Any = importlib._bootstrap_external._LoaderBasics  # type: ignore[attr-defined]  # of all Python files
    own, importing = basics.exec_module, set[int]()

    def exec_module(loader: Any, module: Any) -> None:
        if importing or is_users(loader.path):
            own(loader, module)
            return
        importing.add(id(module))
        # the code may wrap a replacement
        current = [vars(one.target).get(one.attribute, one.new) for one in made]
        for one in reversed(made):
            one.__exit__(None, None, None)
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                own(loader, module)
        finally:
            for one, replacement in zip(made, current, strict=True):
                one.__enter__()
                setattr(one.target, one.attribute, replacement)
            importing.clear()

    with patch.object(basics, "exec_module", exec_module):
        yield


def _changes(  # noqa: C901  # one small function after another
    note: Note,
    devices: Devices,
    casts: CudaAutocast,
    following: Callable[[], AbstractContextManager[Any]],
) -> list[tuple[Any, str, Any]]:
    """Return the owner, the name and the replacement of each function to replace."""
    tensor, loader, thread = torch.Tensor, torch.utils.data.DataLoader, threading.Thread
    aten: Any = torch.ops.aten
    cast: Any = torch.amp.autocast_mode.autocast
    cast_inputs: Any = torch.amp.autocast_mode._cast
    drop, is_cast = functional.dropout, torch.is_autocast_enabled
    written: dict[Any, Any] = {}
    # Imported here, since the estimated code may import it, and a trainer saves at its end.
    safetensors = (
        importlib.import_module("safetensors.torch")
        if importlib.util.find_spec("safetensors")
        else None
    )
    make: Any = tensor._make_subclass

    def set_data(fake: Any, value: Any) -> None:
        tensor.data.__set__(fake, value)
        fake.fake_device = value.fake_device  # torch does not set it

    def make_subclass(kind: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, fake_tensor.FakeTensor) and issubclass(kind, torch.nn.Parameter):
            return fake_parameter(
                kind, data, bool(kwargs.get("require_grad", args[0] if args else False))
            )
        return make(kind, data, *args, **kwargs)

    def swap_tensors(own: Any, first: Any, second: Any) -> None:
        # torch refuses to swap a tensor with weak references, and the memo of fake tensors has
        # some.
        if first.device.type == second.device.type:
            first.data = second.data
        else:
            own(first, second)

    def key(file: Any) -> Any:
        return Path(file).absolute() if isinstance(file, (str, os.PathLike)) else id(file)

    def save(_: Any, f: Any, *__: Any, **___: Any) -> None:
        written[key(f)] = f  # keeps its id unique
        note(f"{user_line()}: torch.save wrote nothing")

    def serialize(*_: Any, **__: Any) -> bytes:
        note(f"{user_line()}: safetensors wrote nothing")
        return b""

    def load_what_was_there(own: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(f, *args, **kwargs)
        except Exception as error:
            if key(f) not in written:
                raise
            raise EstimateError(
                f"torch.save wrote nothing, so it cannot be loaded in {user_line()}"
            ) from error

    def tolist(tensor: Any) -> Any:
        if tensor.constant is not None:
            with torch._C._DisableTorchDispatch():
                return tensor.constant.tolist()
        values: Any = torch.ops.aten._local_scalar_dense(tensor)  # which records the guess
        values = 0 if type(values) is int else values  # it may be an index
        for length in reversed(tensor.shape):
            values = [values] * length
        return values

    def formatted(own: Any, tensor: Any, how: str) -> str:
        if not isinstance(tensor, fake_tensor.FakeTensor):
            return str(own(tensor, how))
        return format(tensor.item(), how) if tensor.dim() == 0 else str(tensor)

    def without_processes(own: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        own(loader, *args, **kwargs)
        vars(loader).update(NO_PROCESSES)

    def start_followed(own: Any, thread: Any) -> None:
        if torch._C._len_torch_dispatch_stack():  # started by the estimated code, not next to it
            run = thread.run

            def follow() -> None:
                with following():
                    run()

            thread.run = follow
        own(thread)

    def step_always(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
        # It is unknown whether a gradient overflowed, and a skipped step would take no memory.
        return optimizer.step(*args, **kwargs)

    def compile_nothing(model: Any = None, **_: Any) -> Any:
        note(COMPILED)
        return (lambda function: function) if model is None else model

    def cast_here(
        own: Any, mode: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type != "cpu":
            casts.register()
            device_type, dtype = "cpu", dtype or cast_type(device_type)
        own(mode, device_type, dtype, *args, **kwargs)

    def clear_casts(own: Any) -> None:
        casts.forget_weights()
        own()

    def casts_now(device_type: str = "cuda") -> bool:
        return bool(is_cast("cpu" if devices.is_elsewhere else device_type))

    def type_of_casts(device_type: str = "cuda") -> Any:
        return cast_type("cpu" if casts_now(device_type) and devices.is_elsewhere else device_type)

    def attention(own: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        def of_products(*args: Any, **more: Any) -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return own(*args, **more)

        if not devices.is_elsewhere:
            return own(query, key, value, *rest, **more)
        items = query, key, value, *rest
        if casts_now():
            kind = type_of_casts()
            items = tuple(cast_inputs(item, "cpu", kind) for item in items)
            more = {name: cast_inputs(item, "cpu", kind) for name, item in more.items()}
        return fused.attention(of_products, *items, **more)

    def on_card(kernel: Any, own: Any, first: Any, *args: Any, **more: Any) -> Any:
        is_there = devices.is_elsewhere or first.device.type == "cuda"
        return (kernel if is_there else own)(first, *args, **more)

    def to_float32(kernel: Any, own: Any, first: Any, *args: Any, **more: Any) -> Any:
        converts = (
            first.dtype is torch.float16 and more.get("dtype") is torch.float32 and not casts_now()
        )
        if converts and devices.is_elsewhere:  # CUDA makes no converted copy
            return kernel(first, more["dim"] if "dim" in more else args[0], True)
        return own(first, *args, **more)

    def linear(own: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002  # torch's
        in_one_product = input.dim() == 2 or input.is_contiguous()
        if bias is None or in_one_product or weight.dim() != 2:
            return own(input, weight, bias)
        # torch adds in place, but not for fake tensors
        return torch.matmul(input, weight.t()).add_(bias)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002  # torch's
        if training and 0 < p < 1 and not inplace and devices.is_elsewhere:
            # saves a byte for each number; the CPU's saves a number
            return torch.native_dropout(input, p, True)[0]
        return drop(input, p, training, inplace)

    def rms_norm(
        own: Any,
        input: Any,  # noqa: A002  # as above
        shape: Any,
        weight: Any = None,
        eps: float | None = None,
    ) -> Any:
        fuses = hasattr(torch.ops.aten, "_fused_rms_norm") and (
            weight is None or weight.dtype is input.dtype
        )
        if devices.is_elsewhere and (fuses or casts_now()):
            # saves as much; the CPU runs several kernels
            return functional.layer_norm(input, shape, weight)
        return own(input, shape, weight, eps)

    def is_other_tensor(own: Any, items: Any) -> bool:
        # Modules use their fused kernels for torch's own tensors only, and our modes must not
        # disable these.
        return any(
            type(item) not in (*_PLAIN, fake_tensor.FakeTensor) and own(items) for item in items
        )

    def ctc_loss(own: Any, scores: Any, targets: Any, *rest: Any, **more: Any) -> Any:
        # For fake tensors torch takes a path that cannot read lengths on the host.
        lengths = [torch.as_tensor(item, device=scores.device) for item in rest[:2]]
        return own(scores, targets, *lengths, *rest[2:], **more)

    def in_context(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its mode may be called after ours.
        adds = func in _device._device_constructors() and (kwargs or {}).get("device") is None
        more = {"device": devices.place_for(context.device)} if adds else {}
        return func(*args, **{**(kwargs or {}), **more})

    def run_backward(own: Any, *args: Any, **more: Any) -> Any:
        with devices:  # left by Tensor.backward; a checkpoint runs the user's code again
            return own(*args, **more)

    changes: list[tuple[Any, str, Any]] = [
        (tensor, "_make_subclass", staticmethod(make_subclass)),
        (torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])),
        (torch, "save", save),
        *((safetensors, name, serialize) for name in ("serialize", "serialize_file")),
        *(
            (safetensors, name, lambda *_: {}) for name in ("_flatten", "_flatten_as_ptr")
        ),  # these read addresses
        (torch, "set_num_threads", lambda _: None),
        (fake_tensor.log, "disabled", True),  # its errors are raised, too
        (
            fake_tensor.FakeTensorMode,
            "avoid_device_init",
            True,
        ),  # else torch.tensor makes a real tensor on a device
        (fake_tensor.FakeTensor, "tolist", tolist),
        (fake_tensor.FakeTensor, "data", property(tensor.data.__get__, set_data)),
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_VALUES),
        (tensor, "record_stream", lambda *_: None),
        (torch.amp.GradScaler, "_maybe_opt_step", step_always),
        (functional, "dropout", dropout),
        (torch, "dropout", dropout),
        (_device.DeviceContext, "__torch_function__", in_context),
        (
            fake_tensor,
            "init_gpu_context",
            lambda *_: None,
        ),  # it would allocate memory on the device
        (torch, "compile", compile_nothing),
        (torch.nn.Module, "compile", lambda *_, **__: note(COMPILED)),
    ]
    around: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.utils, "swap_tensors", swap_tensors),
        (torch, "load", load_what_was_there),
        (tensor, "__format__", formatted),
        (loader, "__init__", without_processes),
        (thread, "start", start_followed),
        (torch, "ctc_loss", ctc_loss),
        (torch.autograd, "_engine_run_backward", run_backward),
        (torch.overrides, "has_torch_function", is_other_tensor),
        (functional, "linear", linear),
        (functional, "rms_norm", rms_norm),
        (functional, "scaled_dot_product_attention", attention),
        (torch._VF, "lstm_cell", functools.partial(on_card, fused.lstm_cell)),
        (torch._VF, "gru_cell", functools.partial(on_card, fused.gru_cell)),
        (torch, "_transformer_encoder_layer_fwd", functools.partial(on_card, fused.encoder_layer)),
        (
            torch,
            "_native_multi_head_attention",
            functools.partial(on_card, fused.multi_head_attention),
        ),
        *(
            (place, "softmax", functools.partial(to_float32, aten._softmax))
            for place in (torch, tensor)
        ),
        *(
            (place, "log_softmax", functools.partial(to_float32, aten._log_softmax))
            for place in (torch, tensor)
        ),
    ]
    if devices.on_cpu:
        optimizers = [
            module for name, module in list(sys.modules.items()) if name.startswith("torch.optim.")
        ]
        changes += [
            *(
                (module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
                for module in optimizers
            ),
            (
                torch.amp.autocast_mode,
                "_cast",
                lambda value, _, dtype: cast_inputs(value, "cpu", dtype),
            ),
            (torch, "is_autocast_enabled", casts_now),
            (torch, "get_autocast_dtype", type_of_casts),
            (torch, "get_autocast_gpu_dtype", type_of_casts),
        ]
        around += [(cast, "__init__", cast_here), (torch, "clear_autocast_cache", clear_casts)]
    changes += [(place, name, _around(getattr(place, name), new)) for place, name, new in around]
    # older versions of torch lack some
    return [change for change in changes if hasattr(*change[:2])]


def _around(own: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the function ``own`` that passes it to ``new``."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return new(own, *args, **kwargs)

    return call


_PLAIN = (type(None), torch.Tensor, torch.nn.Parameter)
_NOTHING = (
    "init",
    "synchronize",
    "empty_",
    "ipc_collect",
    "set_",
    "reset_",
    "manual_seed",
    "seed",
    "_lazy_init",
)
"""Beginnings of the names of functions that do nothing during an estimate."""
_AS_IT_IS = (
    "get_arch_list",
    "get_gencode_flags",
    "check_error",
    "cudaStatus",
    "is_initialized",
    "Device",
    "lru_cache",
)
UNKNOWN_SIZE = "device memory size unknown, pass --device-memory (device_memory=)"


def _does_nothing(*_: Any, **__: Any) -> None:
    return None


class Stream:
    """A stream on which nothing runs, or a completed event."""

    device_index = stream_id = cuda_stream = priority = 0
    wait = synchronize = record = wait_event = wait_stream = __exit__ = _does_nothing
    query = staticmethod(lambda: True)
    is_capturing = staticmethod(lambda: False)
    elapsed_time = staticmethod(lambda *_: 1.0)
    record_event = staticmethod(lambda event=None: event or Stream())

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self


class Accelerators:
    """Replaces torch's accelerator modules during one estimate: public methods have the names of
    their functions.

    ``room_bytes``: memory that the device has for the code.
    """

    def __init__(
        self, log: StorageLog, devices: Devices, room_bytes: int | None, note: Note
    ) -> None:
        self._log, self._devices, self._room_bytes, self._note = log, devices, room_bytes, note
        self._type = devices.label.partition(":")[0] if devices.label is not None else None
        self._current = 0
        known = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        self._known = {number: torch.cuda.get_device_properties(number) for number in range(known)}
        with closing(Nvml()) as nvml:  # which needs no context
            told = nvml.capabilities() if not known else []
        self._told = {
            at: _Properties(f"cuda:{at}", room_bytes, *told[at]) for at in range(len(told))
        }

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        here = (
            int(torch._C._cuda_getDeviceCount()) if hasattr(torch._C, "_cuda_getDeviceCount") else 0
        )
        return max(here, int(self._type not in (None, "cpu")))

    def current_device(self) -> int:
        return self._current

    def current_accelerator(self, *_: Any, **__: Any) -> Any:
        return torch.device(self._type or "cuda") if self.device_count() else None

    def set_device(self, device: Any) -> None:
        self._current = self._index(device)

    current_device_index = current_device_idx = current_device
    set_device_index = set_device_idx = set_device

    def _index(self, device: Any) -> int:
        if device is None:
            return self._current
        if isinstance(device, int):
            return device if device >= 0 else self._current
        index = torch.device(device).index
        return self._current if index is None else int(index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._current = self._current, self._index(device)
        try:
            yield
        finally:
            self._current = before

    def device_of(self, tensor: Any) -> Any:
        return self.device(tensor.device if tensor.device.type == "cuda" else None)

    def get_device_name(self, device: Any = None) -> str:
        return str(self.get_device_properties(device).name)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def get_device_properties(self, device: Any = None) -> Any:
        index = self._index(device)
        if index in self._known:
            return self._known[index]
        if self._type in (None, "cuda") and index in self._told:
            return self._told[index]
        name = f"{self._type or 'cuda'}:{index}"
        self._note(f"{user_line()}: {name} is assumed to have compute capability 9.0")
        return _Properties(name, self._room_bytes)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        known = self._known.get(self._index(device))
        total = self._room_bytes or (known.total_memory if known is not None else None)
        if total is None:
            raise EstimateError(f"{UNKNOWN_SIZE}: mem_get_info in {user_line()}")
        return max(0, total - self.memory_allocated(device)), total

    get_memory_info = mem_get_info

    def cudart(self) -> Any:
        profiler = dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), _does_nothing)
        # for functions imported by name
        return SimpleNamespace(cudaMemGetInfo=self.mem_get_info, **profiler)

    def _logged_as(self, device: Any) -> str:
        return str(self._devices.name(torch.device("cuda", self._index(device))))

    def memory_allocated(self, device: Any = None) -> int:
        return self._log.now.get(self._logged_as(device), 0)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._log.peak.get(self._logged_as(device), 0)

    memory_reserved = memory_cached = current_allocated_memory = driver_allocated_memory = (
        memory_allocated
    )
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        stats: dict[str, int] = defaultdict(int)
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats[f"{name}.all.current"] = self.memory_allocated(device)
            stats[f"{name}.all.peak"] = self.max_memory_allocated(device)
        return stats

    def memory_summary(self, device: Any = None, *_: Any, **__: Any) -> str:
        return f"allocated in the estimate: {self.memory_allocated(device)}"

    get_rng_state = staticmethod(lambda *_: torch.empty(16, dtype=torch.uint8, device="cpu"))
    get_rng_state_all = staticmethod(lambda: [torch.empty(16, dtype=torch.uint8, device="cpu")])
    current_stream = default_stream = get_stream_from_external = staticmethod(lambda *_: Stream())
    Stream = ExternalStream = Event = Stream  # torch's names
    stream = StreamContext = staticmethod(lambda *_: nullcontext())
    is_bf16_supported = is_tf32_supported = staticmethod(lambda *_, **__: True)
    is_current_stream_capturing = staticmethod(lambda: False)
    initial_seed = staticmethod(lambda: 0)

    def known_properties(self, device: Any) -> Any:
        """Return the properties of an available CUDA device; None if they are unknown."""
        index = device.index or 0
        return self._known.get(index, self._told.get(index)) if device.type == "cuda" else None

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace the functions and classes of torch's accelerator modules during the block."""
        names = {"cuda", self._type or "cuda"} & {"cuda", "xpu", "mps"}
        modules = [getattr(torch, name, None) for name in [*names, "accelerator"]]
        modules += [
            torch.cuda.memory,
            torch.cuda.random,
            torch.cuda.streams,
            torch.cuda.nvtx,
            torch.cuda.graphs,
        ]
        seen: dict[int, Any] = {}
        with ExitStack() as stack:
            for module in dict.fromkeys(module for module in modules if module is not None):
                for name, old in list(vars(module).items()):
                    new = seen[id(old)] if id(old) in seen else self._instead(module, name, old)
                    if new is not old:
                        new = seen[id(old)] = (
                            new if isinstance(new, type) else _here_alone(new, old)
                        )
                        stack.enter_context(patch.object(module, name, new))
            if self._type == "mps":
                stack.enter_context(patch.object(torch.backends.mps, "is_available", lambda: True))
            yield

    def _instead(self, module: ModuleType, name: str, old: Any) -> Any:
        """Return the replacement of a module's attribute; the attribute itself if it needs none."""
        short = module.__name__.removeprefix("torch.")
        if short == "cuda.nvtx":
            does_something = (
                type(old) is FunctionType and not name.startswith("_") and name != "range"
            )
            return _does_nothing if does_something else old
        if hasattr(self, name) and not name.startswith("_"):
            return getattr(self, name)
        if name.startswith(_NOTHING):
            return _does_nothing
        if name.startswith("_"):
            return old
        is_own = getattr(old, "__module__", "").startswith(module.__name__)
        if (
            not is_own
            or name in _AS_IT_IS
            or (isinstance(old, type) and issubclass(old, BaseException))
        ):
            return old
        refuse = functools.partial(_refuse, f"torch.{short.partition('.')[0]}.{name}")
        if name in ("CUDAGraph", "MemPool", "graph", "GreenContext"):  # classes, for annotations
            return type(
                name,
                (),
                {"__new__": lambda _, *args, **more: _here_alone(refuse, old)(*args, **more)},
            )
        return refuse if type(old) is FunctionType else old


class _Properties(SimpleNamespace):
    """Assumed properties of a device that is not queried."""

    def __init__(self, name: str, total_bytes: int | None, major: int = 9, minor: int = 0) -> None:
        super().__init__(
            name=name,
            major=major,
            minor=minor,
            multi_processor_count=HOPPERS_PROCESSORS,
            warp_size=32,
        )
        self.is_integrated = False
        self._total_bytes = total_bytes

    @property
    def total_memory(self) -> int:
        if self._total_bytes is None:
            raise EstimateError(f"{UNKNOWN_SIZE}: total_memory in {user_line()}")
        return self._total_bytes


def _here_alone(new: Callable[..., Any], old: Any) -> Callable[..., Any]:
    """Return a function that calls ``new`` in estimated code, and ``old`` in other threads, such as
    ours.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if torch._C._len_torch_dispatch_stack() else old)(*args, **kwargs)

    return call


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise EstimateError(f"an estimate cannot follow {name} in {user_line()}")
