"""``ipygpumem.memory``: the total, free and used memory of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ipygpumem.errors import DeviceError
from ipygpumem.probes import host
from ipygpumem.probes.accelerators import (
    WholeDevice,
    current_device,
    has_context,
    initialized_backend,
    loaded_torch,
    parse_device,
    why_torch_counts_nothing,
)
from ipygpumem.probes.nvml import Nvml
from ipygpumem.records import Record


@dataclass(frozen=True)
class DeviceMemory(Record):
    """The memory of one device at one moment; None where unknown, and ``note`` says why."""

    device: str
    total_bytes: int | None = None
    """Bytes of the whole device; on the host at most a container's limit."""
    free_bytes: int | None = None
    """Free bytes for any process; on the host those that this process could allocate."""
    used_bytes: int | None = None
    """Bytes in use by all processes: total minus free."""
    allocated_bytes: int | None = None
    """Live tensors of this process; on the host its RSS."""
    reserved_bytes: int | None = None
    """Bytes that torch's allocator has reserved; None on the host, which has no such cache."""
    note: str = ""
    """Message for the user about an unknown figure."""

    @property
    def free_with_cache_bytes(self) -> int | None:
        """Bytes that this process could still use: free bytes of the device, and reserved bytes of
        torch's allocator that no tensor uses. None if unknown.
        """
        if self.free_bytes is None or self.device == "cpu":
            return self.free_bytes
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes


def checked_device(device: object) -> str:
    """Return the name of the host or of one CUDA device, which ``device`` means as in
    ``parse_device``; for ``cuda`` alone, it is torch's current device.
    """
    return current_device(parse_device(device, kinds=("cuda",)))


def device_here(device: object, known: Collection[str]) -> str:
    """Return the name of a device that is present or ``known``, as ``parse_device`` reads it.

    Args:
        device: as for ``parse_device``.
        known: names of devices to accept without a check, such as those of the caller's records.

    Raises:
        DeviceError: there is no such device.
    """
    name = parse_device(device, known=known)
    known_kinds = {known_name.partition(":")[0] for known_name in known}
    if name == "cpu" or name in known or name in known_kinds:
        return name
    kind, _, index = name.partition(":")
    torch = loaded_torch()
    if kind == "cuda" and torch is None:
        memory(name)  # asks the driver, and raises DeviceError without such a card
        return name
    device_count = getattr(getattr(torch, kind, None), "device_count", None)
    if device_count is None or int(index or 0) >= device_count():
        raise DeviceError(f"there is no {name} here")
    return name


def memory(device: object = "cpu") -> DeviceMemory:
    """Return the total, free and used memory of a device, without creating a CUDA context.

    Use it before loading a model. Only NVIDIA devices and the host are supported, and the driver
    does not report every figure in a container or under MIG: those are None.

    Args:
        device: ``RAM``, ``cuda:0``, a number, or a ``torch.device``.

    Raises:
        DeviceError: there is no such device.

    >>> ram = ipygpumem.memory("RAM")
    >>> ram.total_bytes == ram.free_bytes + ram.used_bytes
    True
    """
    name = checked_device(device)
    if name == "cpu":
        return _memory_of_host()
    return _memory_of_card(int(name.removeprefix("cuda:")))


def _memory_of_host() -> DeviceMemory:
    """Return the memory of the host."""
    total = host.total_bytes()
    available = host.available_bytes()
    with contextlib.closing(host.HostProbe(exact=False)) as probe:
        (reading,) = probe.read(peak=False)
    used = max(0, total - available)
    return DeviceMemory(
        "cpu",
        total_bytes=total,
        free_bytes=available,
        used_bytes=used,
        allocated_bytes=reading.current_bytes,
    )


def _memory_of_card(index: int) -> DeviceMemory:
    """Return the memory of the CUDA device ``index``; DeviceError if there is none."""
    cuda = initialized_backend("cuda")
    with contextlib.closing(Nvml()) as nvml:
        if cuda is None:
            whole = _before_use(nvml, index)
        else:
            whole = _after_initialization(nvml, cuda, index)
    free = None
    if whole.total_bytes is not None and whole.used_bytes is not None:
        free = whole.total_bytes - whole.used_bytes
    without_torch = DeviceMemory(
        f"cuda:{index}",
        total_bytes=whole.total_bytes,
        free_bytes=free,
        used_bytes=whole.used_bytes,
        allocated_bytes=0,
        reserved_bytes=0,
        note=whole.note,
    )
    if cuda is None:
        return without_torch
    reason = why_torch_counts_nothing()
    if reason:
        note = f"{whole.note}; {reason}" if whole.note else reason
        return replace(without_torch, allocated_bytes=None, reserved_bytes=None, note=note)
    return replace(
        without_torch,
        allocated_bytes=cuda.memory_allocated(index),
        reserved_bytes=cuda.memory_reserved(index),
    )


def _after_initialization(nvml: Nvml, cuda: Any, index: int) -> WholeDevice:
    """Return the figures of a device once torch has initialised CUDA, though perhaps not on this
    device: from the driver, else from CUDA's runtime. DeviceError if there is no such device.
    """
    if index >= cuda.device_count():
        raise DeviceError(f"there is no cuda:{index} here")
    by_driver = nvml.device(cuda, index, processes=False, has_context=False)
    if by_driver.used_bytes is not None:
        return by_driver
    total = int(cuda.get_device_properties(index).total_memory)
    # ``mem_get_info`` would create a context where there is none, and some builds of torch can only
    # tell by their counts whether there is one.
    if why_torch_counts_nothing() or not has_context(index):
        return WholeDevice(total, note=by_driver.note)
    return WholeDevice.from_runtime("cuda", cuda, index, total)


def _before_use(nvml: Nvml, index: int) -> WholeDevice:
    """Return the driver's figures of a device before this process has initialised CUDA; DeviceError
    if there is no such device.
    """
    try:
        cards = nvml.visible()
    except LookupError as error:
        return WholeDevice(note=str(error))
    if index >= len(cards):
        reason = f" ({nvml.missing})" if nvml.missing else ""
        raise DeviceError(f"there is no cuda:{index} here{reason}")
    return cards[index]
