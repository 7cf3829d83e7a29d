"""Reads how much memory a device has, has free and has in use, for a caller who asks about one device now."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from ipygpumem.errors import DeviceError, quoted, said
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.probes import host
from ipygpumem.probes.accelerators import in_use, loaded_torch, uncounted
from ipygpumem.probes.nvml import DeviceWide, Nvml
from ipygpumem.record import Record

_CUDA = re.compile(r"cuda:(0|[1-9]\d{0,8})")


@dataclass(frozen=True)
class DeviceMemory(Record):
    """The memory of one device at one moment. None where nobody can tell; then ``note`` says why."""

    device: str
    total_bytes: int | None = None
    """Of the whole device; on the host no more than a container's limit."""
    free_bytes: int | None = None
    """What anybody could still get; on the host what this process could."""
    used_bytes: int | None = None
    """What is in use by all processes: the rest of the total."""
    allocated_bytes: int | None = None
    """Live tensors of this process; on the host its RSS."""
    reserved_bytes: int | None = None
    """What torch's allocator has got from the device; None on the host, which has no such cache."""
    note: str = ""

    @property
    def free_with_cache_bytes(self) -> int | None:
        """What this process could still use: what is free, and what torch's allocator has in its cache."""
        if self.free_bytes is None or self.device == "cpu":
            return self.free_bytes
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes


def checked_device(device: object) -> str:
    """Return the name of a device, ``cpu`` or such as ``cuda:0``, that a caller gives in one of torch's ways.

    Raises:
        DeviceError: it is none of these.
    """
    torch_device = getattr(loaded_torch(), "device", None)
    name: str | None = None
    if type(device) is str or (is_instance(torch_device, type) and type(device) is torch_device):
        name = str(device)
    elif type(device) is int and device.bit_length() < 64:
        name = f"cuda:{device}"
    if name == "cpu:0":
        name = "cpu"
    elif name == "cuda":
        cuda = in_use("cuda")
        name = f"cuda:{0 if cuda is None else cuda.current_device()}"
    if name is None or (name != "cpu" and _CUDA.fullmatch(name) is None):
        given = device if type(device) is int else name
        what = type_name(device) if given is None else quoted(given)
        raise DeviceError(f"a device is 'cpu', or one such as 'cuda:0' or its number, and not {what}")
    return name


def memory(device: object = "cpu") -> DeviceMemory:
    """Return how much memory a device has, has free, and has in use. It makes no CUDA context.

    Args:
        device: ``cpu``, ``cuda:0``, a number, or a ``torch.device``.

    Raises:
        DeviceError: there is no such device.
    """
    name = checked_device(device)
    if name == "cpu":
        return _host()
    index, cuda = int(name[5:]), in_use("cuda")
    with contextlib.closing(Nvml()) as nvml:
        wide = _unused(nvml, index) if cuda is None else _used(nvml, cuda, index)
    free = None if wide.total_bytes is None or wide.used_bytes is None else wide.total_bytes - wide.used_bytes
    note = wide.note
    allocated: tuple[int | None, int | None] = (0, 0)
    if cuda is not None and uncounted():
        note, allocated = "; ".join(filter(None, (note, uncounted()))), (None, None)
    elif cuda is not None:
        allocated = cuda.memory_allocated(index), cuda.memory_reserved(index)
    return DeviceMemory(name, wide.total_bytes, free, wide.used_bytes, *allocated, note)


def _host() -> DeviceMemory:
    total, free = host.total_bytes(), host.available_bytes()
    with contextlib.closing(host.HostProbe(exact=False)) as probe:
        rss = probe.read(peak=False)[0].current_bytes
    return DeviceMemory("cpu", total, free, max(0, total - free), rss)


def _used(nvml: Nvml, cuda: Any, index: int) -> DeviceWide:
    """Return what is known of a device where torch has initialised CUDA, though perhaps not on this one."""
    if index >= cuda.device_count():
        raise DeviceError(f"there is no cuda:{index} here")
    wide = nvml.device(cuda, index, processes=False, has_context=False)
    if wide.used_bytes is not None:
        return wide
    if uncounted() or not cuda.memory_reserved(index):  # then asking might make a context
        return DeviceWide(cuda.get_device_properties(index).total_memory, note=wide.note)
    try:
        free, total = cuda.mem_get_info(index)
    except RuntimeError as error:  # a broken context answers no question
        return DeviceWide(cuda.get_device_properties(index).total_memory, note=f"cuda: {said(error)}")
    return DeviceWide(total, total - free)


def _unused(nvml: Nvml, index: int) -> DeviceWide:
    """Return what the driver says of a device where this process does not use CUDA."""
    try:
        cards = nvml.visible()
    except LookupError as error:
        return DeviceWide(note=str(error))
    if index >= len(cards):
        raise DeviceError(f"there is no cuda:{index} here" + (f" ({nvml.missing})" if nvml.missing else ""))
    return cards[index]
