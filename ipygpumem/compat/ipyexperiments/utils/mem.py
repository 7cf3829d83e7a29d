"""What a CUDA device has, in MiB, and ways to fill it: under the names of ipyexperiments."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
from typing import Any, NamedTuple

from ipygpumem.errors import DeviceError, GpuMemError, quoted
from ipygpumem.introspect import type_name
from ipygpumem.objects.arrays import is_of_library
from ipygpumem.probes.nvml import Nvml
from ipygpumem.units import MIB

__all__ = [  # with an asterisk "use_gpu" comes only if it is named
    "GPUMemory",
    "b2mb",
    "get_nvml_gpu_id",
    "gpu_mem_allocate_mbs",
    "gpu_mem_get_free_mbs",
    "gpu_mem_get_free_no_cache_mbs",
    "gpu_mem_get_mbs",
    "gpu_mem_get_total_mbs",
    "gpu_mem_get_used_mbs",
    "gpu_mem_get_used_no_cache_mbs",
    "gpu_mem_leave_free_mbs",
    "preload_pytorch",
    "use_gpu",  # noqa: F822  # below, asked for when it is needed
]

_MOST = 1 << 60
"""Elements of a tensor: no device has so many, and torch refuses larger numbers by another error."""


class GPUMemory(NamedTuple):
    """A device's memory; in MiB, but for ``device_memory``."""

    total: int
    free: int
    used: int


def __getattr__(name: str) -> bool:
    if name == "use_gpu":
        return _torch() is not None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _torch() -> Any | None:
    """Return torch if it is installed and sees a CUDA device."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def _needed_torch() -> Any:
    torch = _torch()
    if torch is None:
        raise GpuMemError("this needs torch and a CUDA device that it sees")
    return torch


def _bytes(mib: Any) -> int:
    """Return a number of MiB as bytes (GpuMemError if it is none)."""
    try:
        size = int(mib / 1 * MIB)  # divided, since a text can be multiplied
    except (TypeError, ValueError, OverflowError):
        size = -1
    if size < 0:
        raise GpuMemError(f"this takes a number of MiB, 0 or more, and not {_shown(mib)}")
    return size


def _shown(given: Any) -> str:
    return quoted(given) if type(given) in (int, float, str) else type_name(given)


def _index(torch: Any, given: Any) -> int | None:
    """Return the number of one of torch's devices; None where it has none of that number."""
    if is_of_library(given, "numpy", "integer"):
        given = given.item()
    return given if type(given) is int and 0 <= given < torch.cuda.device_count() else None


def _needed_index(torch: Any, given: Any) -> int:
    index = _index(torch, given)
    if index is None:
        count = torch.cuda.device_count()
        raise DeviceError(f"torch numbers its CUDA devices from 0 to {count - 1}, and has no {_shown(given)}")
    return index


@functools.cache
def _nvml() -> Nvml:
    return Nvml()


def device_memory(torch_gpu_id: int) -> GPUMemory:
    """Return what the driver says of a whole device, in bytes.

    Raises:
        Exception: torch has no such device.
    """
    torch = _needed_torch()
    found = _nvml().device(torch.cuda, torch_gpu_id, processes=False, has_context=True)
    if found.total_bytes is None or found.used_bytes is None:
        free, total = torch.cuda.mem_get_info(torch_gpu_id)
        return GPUMemory(total, free, total - free)
    return GPUMemory(found.total_bytes, found.total_bytes - found.used_bytes, found.used_bytes)


def preload_pytorch(device_id: int = 0) -> None:
    """Create torch's CUDA context now, unless there is one.

    Raises:
        GpuMemError: torch has no such device.
    """
    torch = _needed_torch()
    index = _needed_index(torch, device_id)
    if not torch.cuda.is_initialized():
        torch.ones((1, 1)).to(index)


def get_nvml_gpu_id(torch_gpu_id: int) -> int:
    """Return the driver's number of torch's device, whatever ``CUDA_VISIBLE_DEVICES`` names; found by its UUID.

    Raises:
        GpuMemError: torch has no such device, or the driver cannot tell.
    """
    torch = _needed_torch()
    number = _nvml().number(torch.cuda, _needed_index(torch, torch_gpu_id))
    if number is None:
        raise GpuMemError(f"the driver cannot tell its number of torch's device {torch_gpu_id}")
    return number


def b2mb(num: float) -> int:
    """Return bytes as whole MiB, rounded towards zero.

    Raises:
        GpuMemError: ``num`` is no number.
    """
    try:
        return int(num / MIB)
    except (TypeError, ValueError, OverflowError):
        raise GpuMemError(f"b2mb takes a number of bytes, and not {_shown(num)}") from None


def gpu_mem_get_mbs(torch_gpu_id: int | None = None) -> GPUMemory:
    """Return a device's memory, by default the current one's; zeros where there is no such device."""
    torch = _torch()
    if torch is None:
        return GPUMemory(0, 0, 0)
    index = torch.cuda.current_device() if torch_gpu_id is None else _index(torch, torch_gpu_id)
    if index is None:
        return GPUMemory(0, 0, 0)
    return GPUMemory(*map(b2mb, device_memory(index)))


def gpu_mem_get_total_mbs(torch_gpu_id: int | None = None) -> int:
    """Return how much a device has."""
    return gpu_mem_get_mbs(torch_gpu_id).total


def gpu_mem_get_free_mbs(torch_gpu_id: int | None = None) -> int:
    """Return how much of a device nobody uses; torch's cache counts as used."""
    return gpu_mem_get_mbs(torch_gpu_id).free


def gpu_mem_get_used_mbs(torch_gpu_id: int | None = None) -> int:
    """Return how much of a device is used, by all processes and torch's cache."""
    return gpu_mem_get_mbs(torch_gpu_id).used


def gpu_mem_get_free_no_cache_mbs(torch_gpu_id: int | None = None) -> int:
    """Collect garbage, empty torch's cache, and return how much of a device is free."""
    _empty_cache()
    return gpu_mem_get_free_mbs(torch_gpu_id)


def gpu_mem_get_used_no_cache_mbs(torch_gpu_id: int | None = None) -> int:
    """Collect garbage, empty torch's cache, and return how much of a device is used."""
    _empty_cache()
    return gpu_mem_get_used_mbs(torch_gpu_id)


def _empty_cache() -> None:
    gc.collect()
    torch = _torch()
    if torch is not None:
        torch.cuda.empty_cache()


def gpu_mem_allocate_mbs(n: float, fatal: bool = False) -> Any | None:
    """Return a tensor of ``n`` MiB on the current device; None where it does not fit, unless that is ``fatal``.

    Raises:
        GpuMemError: ``n`` is no number of MiB.
    """
    torch, size = _needed_torch(), _bytes(n)
    try:
        return torch.ones(min(size // 4, _MOST), device="cuda")
    except RuntimeError:
        if fatal:
            raise
        return None


def gpu_mem_leave_free_mbs(n: float) -> Any:
    """Return a tensor that fills the current device so that about ``n`` MiB stay free; deleted it gives them back.

    Raises:
        AssertionError: no more than that is free, or the tensor does not fit.
        GpuMemError: ``n`` is no number of MiB, or there is no device.
    """
    _needed_torch()
    n = _bytes(n) / MIB
    free = gpu_mem_get_free_mbs()
    if free <= n:
        raise AssertionError(f"{free} MiB are free: too few to leave {n} MiB")
    filler = gpu_mem_allocate_mbs(free - n)
    if filler is None:
        raise AssertionError(f"{free - n} MiB, to leave {n} MiB free, do not fit")
    return filler
