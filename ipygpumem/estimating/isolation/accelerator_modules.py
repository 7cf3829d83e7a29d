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
from ipygpumem.estimating.devices.devices import Devices
from ipygpumem.estimating.memory.storages import StorageLog
from ipygpumem.estimating.operators.card import HOPPERS_PROCESSORS
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.user_lines import user_line
from ipygpumem.probes.nvml import Nvml

_DO_NOTHING = (
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
_NOT_REPLACED = (
    "get_arch_list",
    "get_gencode_flags",
    "check_error",
    "cudaStatus",
    "is_initialized",
    "Device",
    "lru_cache",
)
"""Names in torch's modules that need no device, or that only the modules themselves use."""
UNKNOWN_SIZE = "device memory size unknown, pass --device-memory (device_memory=)"


def _does_nothing(*_: Any, **__: Any) -> None:
    return None


class Stream:
    """Stands for torch's classes of streams and events: a stream on which nothing runs, or an event
    that has happened.
    """

    device_index = stream_id = cuda_stream = priority = 0
    wait = synchronize = record = wait_event = wait_stream = __exit__ = _does_nothing

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    @staticmethod
    def query() -> bool:
        return True

    @staticmethod
    def is_capturing() -> bool:
        return False

    @staticmethod
    def elapsed_time(*_: Any) -> float:
        return 1.0

    @staticmethod
    def record_event(event: Any = None) -> Any:
        return event or Stream()


class Accelerators:
    """Replaces functions and classes of torch's accelerator modules during one estimate.

    A public method or attribute replaces the function or class of its name: ``device_count`` that
    of ``torch.cuda``. Only ``known_properties`` and ``applied`` replace nothing.

    Args:
        log: the storages of the estimate, for functions such as ``torch.cuda.memory_allocated``.
        devices: the devices of the estimate.
        room_bytes: memory that the device has for the code; None if it is unknown.
        note: adds a line to the notes.
    """

    def __init__(
        self, log: StorageLog, devices: Devices, room_bytes: int | None, note: Note
    ) -> None:
        self._log = log
        self._devices = devices
        self._room_bytes = room_bytes
        self._note = note
        self._device_type: str | None = None
        """Type of the named device, such as ``cuda``."""
        if devices.requested_device is not None:
            self._device_type, _, _ = devices.requested_device.partition(":")
        self._current = 0
        """Index of the device that the code has made the current one."""
        self._torchs_properties = _properties_from_torch()
        """Properties of the CUDA devices that torch knows, by index."""
        self._drivers_properties: dict[int, _Properties] = {}
        """Properties of the CUDA devices that only NVML knows, by index."""
        if not self._torchs_properties:
            with closing(Nvml()) as nvml:  # which needs no context
                for index, capability in enumerate(nvml.capabilities()):
                    name = f"cuda:{index}"
                    self._drivers_properties[index] = _Properties(name, room_bytes, *capability)

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        available = 0
        if hasattr(torch._C, "_cuda_getDeviceCount"):
            available = int(torch._C._cuda_getDeviceCount())
        if self._device_type in (None, "cpu"):
            return available
        return max(available, 1)  # the device that the user has named

    def current_device(self) -> int:
        return self._current

    def current_accelerator(self, *_: Any, **__: Any) -> Any:
        if self.device_count() == 0:
            return None
        return torch.device(self._device_type or "cuda")

    def set_device(self, device: Any) -> None:
        self._current = self._index_of(device)

    current_device_index = current_device_idx = current_device
    set_device_index = set_device_idx = set_device

    def _index_of(self, device: Any) -> int:
        """Return the index of ``1``, ``"cuda:1"`` or a device; of None, that of the current one."""
        if device is None:
            return self._current
        index = device
        if not isinstance(device, int):
            index = torch.device(device).index
        if index is None or index < 0:
            return self._current
        return int(index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._current
        self._current = self._index_of(device)
        try:
            yield
        finally:
            self._current = before

    def device_of(self, tensor: Any) -> Any:
        if tensor.device.type != "cuda":
            return self.device(None)  # the current device stays the current one
        return self.device(tensor.device)

    def get_device_name(self, device: Any = None) -> str:
        return str(self.get_device_properties(device).name)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def get_device_properties(self, device: Any = None) -> Any:
        """Return the properties of a device, from torch or from NVML.

        A device that is unknown to both has those of a Hopper, which is noted.
        """
        index = self._index_of(device)
        if index in self._torchs_properties:
            return self._torchs_properties[index]
        device_type = self._device_type or "cuda"
        if device_type == "cuda" and index in self._drivers_properties:
            return self._drivers_properties[index]
        name = f"{device_type}:{index}"
        self._note(f"{user_line()}: {name} is assumed to have compute capability 9.0")
        return _Properties(name, self._room_bytes)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total_bytes = self._total_bytes(device)
        free_bytes = max(0, total_bytes - self.memory_allocated(device))
        return free_bytes, total_bytes

    def _total_bytes(self, device: Any) -> int:
        """Return the memory of a device; EstimateError if it is unknown."""
        if self._room_bytes:
            return self._room_bytes
        properties = self._torchs_properties.get(self._index_of(device))
        if properties is None:
            raise EstimateError(f"{UNKNOWN_SIZE}: mem_get_info in {user_line()}")
        return int(properties.total_memory)

    get_memory_info = mem_get_info

    def cudart(self) -> Any:
        profiler = dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), _does_nothing)
        # Functions that a library has imported by name before, such as torch's own mem_get_info,
        # call this.
        return SimpleNamespace(cudaMemGetInfo=self.mem_get_info, **profiler)

    def _name_in_log(self, device: Any) -> str:
        """Return the name that the log has for a device, by its index or name."""
        named = torch.device("cuda", self._index_of(device))
        return self._devices.name_in_log(named)

    def memory_allocated(self, device: Any = None) -> int:
        name = self._name_in_log(device)
        return self._log.now.get(name, 0)

    def max_memory_allocated(self, device: Any = None) -> int:
        name = self._name_in_log(device)
        return self._log.peak.get(name, 0)

    memory_reserved = memory_cached = current_allocated_memory = driver_allocated_memory = (
        memory_allocated
    )
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the statistics of a device that follow from the log; other keys have the value
        0.
        """
        current_bytes = self.memory_allocated(device)
        peak_bytes = self.max_memory_allocated(device)
        stats: dict[str, int] = defaultdict(int)
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats[f"{name}.all.current"] = current_bytes
            stats[f"{name}.all.peak"] = peak_bytes
        return stats

    def memory_summary(self, device: Any = None, *_: Any, **__: Any) -> str:
        return f"allocated in the estimate: {self.memory_allocated(device)}"

    @staticmethod
    def get_rng_state(*_: Any) -> Any:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def get_rng_state_all(self) -> list[Any]:
        return [self.get_rng_state()]

    @staticmethod
    def current_stream(*_: Any) -> Any:
        return Stream()

    default_stream = get_stream_from_external = current_stream

    @staticmethod
    def stream(*_: Any) -> Any:
        return nullcontext()

    StreamContext = stream

    @staticmethod
    def is_bf16_supported(*_: Any, **__: Any) -> bool:
        return True

    is_tf32_supported = is_bf16_supported

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False

    @staticmethod
    def initial_seed() -> int:
        return 0

    Stream = ExternalStream = Event = Stream  # torch's names

    def known_properties(self, device: Any) -> Any:
        """Return the properties of an available CUDA device; None if they are unknown."""
        if device.type != "cuda":
            return None
        index = device.index or 0
        if index in self._torchs_properties:
            return self._torchs_properties[index]
        return self._drivers_properties.get(index)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the functions and classes of torch's accelerator modules during the block."""
        with ExitStack() as stack:
            for module, name, replacement in self._replacements():
                stack.enter_context(patch.object(module, name, replacement))
            if self._device_type == "mps":
                mps = torch.backends.mps
                stack.enter_context(patch.object(mps, "is_available", self.is_available))
            yield

    def _replacements(self) -> list[tuple[ModuleType, str, Any]]:
        """Return module, name and replacement of each function or class to replace.

        One that several modules have gets the same replacement in all of them.
        """
        by_original: dict[int, Any] = {}
        replacements = []
        for module in self._modules():
            for name, original in list(vars(module).items()):
                replacement = by_original.get(id(original))
                if replacement is None:
                    replacement = self._replacement_of(module, name, original)
                if replacement is original:
                    continue
                if not isinstance(replacement, type):
                    replacement = _in_estimates_only(replacement, original)
                by_original[id(original)] = replacement
                replacements.append((module, name, replacement))
        return replacements

    def _modules(self) -> list[ModuleType]:
        """Return torch's modules of the device, each once."""
        names = ["cuda", "accelerator"]
        if self._device_type in ("xpu", "mps"):
            names.insert(1, self._device_type)
        modules = [getattr(torch, name) for name in names if hasattr(torch, name)]
        cuda = torch.cuda
        modules += [cuda.memory, cuda.random, cuda.streams]
        modules += [cuda.nvtx, cuda.graphs]
        return list(dict.fromkeys(modules))

    def _replacement_of(self, module: ModuleType, name: str, original: Any) -> Any:
        """Return the replacement of a module's attribute; the attribute itself if it needs none.

        It is a method of this class, a function that does nothing, or one that refuses: an estimate
        does not know what an unknown function of an accelerator does.
        """
        is_private = name.startswith("_")
        is_function = type(original) is FunctionType
        if module is torch.cuda.nvtx:  # marks for a profiler; ``range`` calls the other functions
            if is_private or not is_function or name == "range":
                return original
            return _does_nothing
        if hasattr(self, name) and not is_private:
            return getattr(self, name)
        if name.startswith(_DO_NOTHING):
            return _does_nothing
        if is_private or name in _NOT_REPLACED or not _is_defined_in(module, original):
            return original
        package, _, _ = module.__name__.removeprefix("torch.").partition(".")
        refuse = functools.partial(_refuse, f"torch.{package}.{name}")
        if name in ("CUDAGraph", "MemPool", "graph", "GreenContext"):
            return _refusing_class(name, _in_estimates_only(refuse, original))
        if is_function:
            return refuse
        return original


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
    defined_in: str = getattr(value, "__module__", "")
    return defined_in.startswith(module.__name__)


def _refusing_class(name: str, make: Callable[..., Any]) -> type:
    """Return a class in whose place a call of ``make`` raises an error.

    A function would not do, because code may use the class in ``isinstance``.
    """

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return type(name, (), {"__new__": new})


class _Properties(SimpleNamespace):
    """Properties of a device without a context, with the names of torch's ``CudaDeviceProperties``.

    The compute capability is that of a Hopper if it is not given.
    """

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


def _in_estimates_only(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return a function that calls ``replacement`` in the thread of the estimated code, and
    ``original`` in other threads.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        is_estimated_code = torch._C._len_torch_dispatch_stack() > 0
        if is_estimated_code:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise an EstimateError for a call of a function with a dotted name, and any arguments."""
    raise EstimateError(f"an estimate cannot follow {name} in {user_line()}")
