"""Stand-ins for torch.cuda and its like while code is estimated: nothing of a device is changed, asked or needed."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.lives import Log
from ipygpumem.estimating.places import users_line

_NOTHING = (
    *("init", "synchronize", "empty_cache", "empty_host_cache", "ipc_collect", "set_stream", "cudart"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "set_sync_debug_mode"),
    *("reset_accumulated_memory_stats", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
    *("set_per_process_memory_fraction", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_rng_state", "set_rng_state_all", "_lazy_init"),
)
_AS_IT_IS = ("get_arch_list", "get_gencode_flags", "check_error", "cudaStatus", "is_initialized", "Device", "lru_cache")
_DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}


class Stream:
    """A stream of nothing."""

    device_index = stream_id = cuda_stream = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no graph is made."""
        return False

    def wait_stream(self, *_: Any) -> None:
        """Wait for nothing."""

    wait_event = synchronize = wait_stream


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def record(self, *_: Any) -> None:
        """Record nothing."""

    wait = synchronize = record

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def elapsed_time(self, *_: Any) -> float:
        """Return one millisecond."""
        return 1.0


class Accelerators:
    """The stand-ins of one estimate.

    Args:
        kind: of the device that all tensors are taken to be on; None: there is none but those that are here.
        place: says what the log calls a device.
        room_bytes: what the device has, if that was said.
        note: takes what the report is to say.
    """

    def __init__(
        self,
        log: Log,
        kind: str | None,
        place: Callable[[Any], str],
        room_bytes: int | None,
        note: Callable[[str], None],
    ) -> None:
        self._log = log
        self._kind = kind
        self._place = place
        self._room_bytes = room_bytes
        self._note = note
        self.current = 0
        # In a forked child torch would not tell them.
        known = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        self._properties = {number: torch.cuda.get_device_properties(number) for number in range(known)}

    def capability(self, device: Any) -> tuple[int, int] | None:
        """Return a device's compute capability; None if it is not known."""
        found = self._properties.get(device.index or 0) if device.type == "cuda" else None
        return None if found is None else (found.major, found.minor)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace the functions and classes of torch's modules for accelerators."""
        kinds = {"cuda", self._kind or "cuda"} & {"cuda", "xpu", "mps"}
        modules = [getattr(torch, kind, None) for kind in kinds]
        modules += [torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.nvtx, torch.cuda.graphs]
        modules += [getattr(torch, "accelerator", None), getattr(torch.cuda, "memory", None)]
        replaced: list[tuple[Any, str, Any]] = []
        seen: dict[int, Any] = {}
        try:
            for module in dict.fromkeys(module for module in modules if module is not None):
                for name, old in list(vars(module).items()):
                    new = seen[id(old)] if id(old) in seen else self._instead(module, name, old)
                    if new is not old:
                        new = seen[id(old)] = new if isinstance(new, type) else _here_alone(new, old)
                        replaced.append((module, name, old))
                        setattr(module, name, new)
            if self._kind == "mps":
                replaced.append((torch.backends.mps, "is_available", torch.backends.mps.is_available))
                torch.backends.mps.is_available = lambda: True
            yield
        finally:
            for module, name, old in reversed(replaced):
                setattr(module, name, old)

    def _instead(self, module: ModuleType, name: str, old: Any) -> Any:
        """Return what stands in for an attribute of a module; itself, if it can be as it is."""
        short = module.__name__.removeprefix("torch.")
        if name in _NOTHING:
            return _nothing
        if short == "cuda.nvtx":
            return _nothing if type(old) is FunctionType and not name.startswith("_") and name != "range" else old
        if name in _DTYPES_BY_NAME:
            return _legacy(_DTYPES_BY_NAME[name], name)
        answer = getattr(self, f"_{name}", None) if not name.startswith("_") else None
        if answer is not None:
            return answer
        public = not name.startswith("_") and getattr(old, "__module__", "").startswith(module.__name__)
        if not public or name in _AS_IT_IS or (isinstance(old, type) and issubclass(old, BaseException)):
            return old
        if type(old) is FunctionType or name in ("CUDAGraph", "MemPool", "graph", "GreenContext"):
            return functools.partial(_refuse, f"torch.{short.partition('.')[0]}.{name}")
        return old

    # -- answers, by the names of torch's functions ---------------------------------------------------------------

    def _is_available(self) -> bool:
        return self._kind not in (None, "cpu") or bool(self._here())

    def _here(self) -> int:
        return int(torch._C._cuda_getDeviceCount()) if hasattr(torch._C, "_cuda_getDeviceCount") else 0

    def _device_count(self) -> int:
        return max(self._here(), 1 if self._is_available() else 0)

    def _current_device(self) -> int:
        return self.current

    _current_device_index = _current_device_idx = _current_device

    def _current_accelerator(self, *_: Any, **__: Any) -> Any:
        return torch.device(self._kind or "cuda") if self._is_available() else None

    def _set_device(self, device: Any) -> None:
        self.current = self._index(device)

    _set_device_index = _set_device_idx = _set_device

    def _index(self, device: Any) -> int:
        if device is None:
            return self.current
        if isinstance(device, int):
            return device if device >= 0 else self.current
        index = torch.device(device).index
        return self.current if index is None else int(index)

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._index(device)
        try:
            yield
        finally:
            self.current = before

    def _device_of(self, tensor: Any) -> Any:
        return self._device(tensor.device if tensor.device.type == "cuda" else None)

    def _is_bf16_supported(self, *_: Any, **__: Any) -> bool:
        return True

    def _is_tf32_supported(self) -> bool:
        return True

    def _is_current_stream_capturing(self) -> bool:
        return False

    def _get_device_name(self, device: Any = None) -> str:
        return str(self._get_device_properties(device).name)

    def _get_device_capability(self, device: Any = None) -> tuple[int, int]:
        found = self._get_device_properties(device)
        return found.major, found.minor

    def _get_device_properties(self, device: Any = None) -> Any:
        index = self._index(device)
        if index in self._properties:
            return self._properties[index]
        name = f"{self._kind or 'cuda'}:{index}"
        self._note(f"{users_line()}: {name} is not asked, answered as a device of compute capability 8.0")
        return _Properties(name, self._room_bytes)

    def _mem_get_info(self, device: Any = None) -> tuple[int, int]:
        found = self._properties.get(self._index(device))
        total = self._room_bytes or (found.total_memory if found is not None else None)
        if total is None:
            raise EstimateError(f"{_UNKNOWN_SIZE}: mem_get_info in {users_line()}")
        return max(0, total - self._memory_allocated(device)), total

    _get_memory_info = _mem_get_info

    def _memory_allocated(self, device: Any = None) -> int:
        return self._log.now.get(self._place(torch.device("cuda", self._index(device))), 0)

    def _max_memory_allocated(self, device: Any = None) -> int:
        return self._log.peak.get(self._place(torch.device("cuda", self._index(device))), 0)

    _memory_reserved = _memory_cached = _memory_allocated
    _max_memory_reserved = _max_memory_cached = _max_memory_allocated
    _current_allocated_memory = _driver_allocated_memory = _memory_allocated

    def _memory_stats(self, device: Any = None) -> dict[str, int]:
        now, peak = self._memory_allocated(device), self._max_memory_allocated(device)
        found: dict[str, int] = defaultdict(int)
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            found[f"{name}.all.current"], found[f"{name}.all.peak"] = now, peak
        return found

    def _memory_summary(self, device: Any = None, *_: Any, **__: Any) -> str:
        return f"allocated in the estimate: {self._memory_allocated(device)}"

    def _get_rng_state(self, *_: Any) -> Any:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def _get_rng_state_all(self) -> list[Any]:
        return [self._get_rng_state()]

    def _initial_seed(self) -> int:
        return 0

    def _current_stream(self, *_: Any) -> Stream:
        return Stream()

    _default_stream = _get_stream_from_external = _current_stream
    _Stream, _ExternalStream, _Event = Stream, Stream, Event

    def _stream(self, *_: Any) -> Any:
        return nullcontext()

    _StreamContext = _stream


_UNKNOWN_SIZE = "the size of the device is not known to the estimate, say --device-memory (device_memory=)"


class _Properties(SimpleNamespace):
    """A device that is not asked."""

    def __init__(self, name: str, total_bytes: int | None) -> None:
        super().__init__(name=name, major=8, minor=0, multi_processor_count=108, warp_size=32, is_integrated=False)
        self._total_bytes = total_bytes

    @property
    def total_memory(self) -> int:
        if self._total_bytes is None:
            raise EstimateError(f"{_UNKNOWN_SIZE}: total_memory in {users_line()}")
        return self._total_bytes


def _here_alone(new: Callable[..., Any], old: Any) -> Callable[..., Any]:
    """Return ``new`` for threads in which code is estimated, and ``old`` for others, such as the one that measures."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if torch._C._len_torch_dispatch_stack() else old)(*args, **kwargs)

    return call


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise EstimateError(f"an estimate cannot follow {name} in {users_line()}")


_DTYPES_BY_NAME = {f"{name}Tensor": dtype for name, dtype in _DTYPES.items()}


class _LegacyKind(type):
    """The class of the classes that are made of sizes or of data, such as torch.cuda.FloatTensor."""

    dtype: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype is cls.dtype and value.device.type != "cpu"

    def __call__(cls, *args: Any, device: Any = "cuda") -> Any:
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=device)
        return torch.empty(args or (0,), dtype=cls.dtype, device=device)


def _legacy(dtype: Any, name: str) -> type:
    return _LegacyKind(name, (), {"dtype": dtype, "__module__": "torch.cuda"})


def legacy_dtype(value: Any) -> Any:
    """Return the dtype that ``tensor.type(value)`` asks for on CUDA; None if it is something else."""
    if isinstance(value, _LegacyKind):
        return value.dtype
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return _DTYPES_BY_NAME.get(value.rpartition(".")[2])
    return None


def dynamo() -> Any:
    """Return torch's compiler, if anything has loaded it."""
    return sys.modules.get("torch._dynamo")
