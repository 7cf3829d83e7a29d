"""Replaces torch's accelerator modules, such as ``torch.cuda``, which change or query a device."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating import user_line
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import StorageLog
from ipygpumem.estimating.transients import HOPPERS_PROCESSORS
from ipygpumem.probes.nvml import Nvml

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
        self._log = log
        self._devices = devices
        self._room_bytes = room_bytes
        self._note = note
        self._type = None if devices.label is None else devices.label.partition(":")[0]
        self._current = 0
        self._known = _properties_from_torch()
        """Properties of the CUDA devices that torch knows, by index."""
        self._told: dict[int, _Properties] = {}
        """Properties of the CUDA devices that only NVML knows, by index."""
        if not self._known:
            with closing(Nvml()) as nvml:  # which needs no context
                for index, capability in enumerate(nvml.capabilities()):
                    self._told[index] = _Properties(f"cuda:{index}", room_bytes, *capability)

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        here = 0
        if hasattr(torch._C, "_cuda_getDeviceCount"):
            here = int(torch._C._cuda_getDeviceCount())
        has_named_device = self._type not in (None, "cpu")
        return max(here, 1) if has_named_device else here

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
        properties = self._known.get(self._index(device))
        if self._room_bytes:
            total_bytes = self._room_bytes
        elif properties is not None:
            total_bytes = properties.total_memory
        else:
            raise EstimateError(f"{UNKNOWN_SIZE}: mem_get_info in {user_line()}")
        return max(0, total_bytes - self.memory_allocated(device)), total_bytes

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
        if device.type != "cuda":
            return None
        index = device.index or 0
        return self._known.get(index, self._told.get(index))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace the functions and classes of torch's accelerator modules during the block."""
        replacements: dict[int, Any] = {}
        with ExitStack() as stack:
            for module in self._modules():
                for name, original in list(vars(module).items()):
                    new = replacements.get(id(original))
                    if new is None:
                        new = self._instead(module, name, original)
                    if new is original:
                        continue
                    if not isinstance(new, type):
                        new = _here_alone(new, original)
                    replacements[id(original)] = new
                    stack.enter_context(patch.object(module, name, new))
            if self._type == "mps":
                stack.enter_context(patch.object(torch.backends.mps, "is_available", lambda: True))
            yield

    def _modules(self) -> list[ModuleType]:
        """Return torch's modules of the device, each once."""
        names = ["cuda", "accelerator"]
        if self._type in ("xpu", "mps"):
            names.insert(1, self._type)
        modules = [getattr(torch, name, None) for name in names]
        cuda = torch.cuda
        modules += [cuda.memory, cuda.random, cuda.streams, cuda.nvtx, cuda.graphs]
        return [module for module in dict.fromkeys(modules) if module is not None]

    def _instead(self, module: ModuleType, name: str, original: Any) -> Any:
        """Return the replacement of a module's attribute; the attribute itself if it needs none."""
        is_private = name.startswith("_")
        is_function = type(original) is FunctionType
        if module is torch.cuda.nvtx:
            is_call = is_function and not is_private and name != "range"
            return _does_nothing if is_call else original
        if hasattr(self, name) and not is_private:
            return getattr(self, name)
        if name.startswith(_NOTHING):
            return _does_nothing
        if is_private or name in _AS_IT_IS or not _is_defined_in(module, original):
            return original
        package = module.__name__.removeprefix("torch.").partition(".")[0]
        refuse = functools.partial(_refuse, f"torch.{package}.{name}")
        if name in ("CUDAGraph", "MemPool", "graph", "GreenContext"):
            return _refusing_class(name, _here_alone(refuse, original))
        return refuse if is_function else original


def _properties_from_torch() -> dict[int, Any]:
    """Return the properties of all CUDA devices by index; empty if torch has not used CUDA."""
    if not torch.cuda.is_initialized():
        return {}
    indices = range(torch.cuda.device_count())
    return {index: torch.cuda.get_device_properties(index) for index in indices}


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    """Return True for a module's own function or class, unless it is an exception."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return False
    return bool(getattr(value, "__module__", "").startswith(module.__name__))


def _refusing_class(name: str, make: Callable[..., Any]) -> type:
    """Return a class, for annotations and ``isinstance``, of which ``make`` makes the objects."""

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return type(name, (), {"__new__": new})


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
        function = new if torch._C._len_torch_dispatch_stack() else old
        return function(*args, **kwargs)

    return call


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise EstimateError(f"an estimate cannot follow {name} in {user_line()}")
