"""Holds memory of a device, or limits this process on the host, so that an out-of-memory error can be reproduced."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from ipygpumem.errors import DeviceError, said
from ipygpumem.fitting.budgets import torch_allows
from ipygpumem.probes import host, own_limits
from ipygpumem.units import MIB, format_bytes

_HOST_SHARE = 0.95
"""Of the available memory: beyond it the system may kill a process."""


class Filler:
    """Memory that is held, or a limit, until ``free()``, the end of ``with``, or the end of this object."""

    def __init__(self, device: str, size_bytes: int, text: str, release: Callable[[], object]) -> None:
        self.device = device
        self.size_bytes = size_bytes
        """Bytes that are held; 0 where a limit was set instead."""
        self._text = text
        self._release: Callable[[], object] | None = release

    def free(self) -> None:
        """Free it; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __repr__(self) -> str:
        return f"<{self.device}: {self._text if self._release is not None else 'given back'}>"

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __del__(self) -> None:
        self.free()

    def __getstate__(self) -> NoReturn:  # the end of a copy would free what this one holds
        raise DeviceError("a memory reservation cannot be copied: call allocate or leave_free again")


def hold(size_bytes: int, name: str) -> Filler:
    """Hold ``size_bytes`` of a device (``DeviceError`` if it has less)."""
    text = f"{format_bytes(size_bytes)} held; free() gives them back"
    if name != "cpu":
        return _held(_torch(name), name, size_bytes, text)
    spare = int(host.available_bytes() * _HOST_SHARE)
    if size_bytes > spare:
        raise DeviceError(f"the host can spare {format_bytes(spare)}, and not {format_bytes(size_bytes)}")
    pages = [bytearray(b"\1") * size_bytes]  # written to, so that they are in RAM
    return Filler("cpu", size_bytes, text, pages.clear)


def fill(leave_bytes: int, name: str) -> Filler:
    """Leave ``leave_bytes`` free on a device (``DeviceError`` if it has less)."""
    if name == "cpu":
        text = f"{format_bytes(leave_bytes)} were left to this process; free() ends that"
        return Filler(name, 0, text, _HostLimit(leave_bytes).end)
    torch = _torch(name)
    torch.empty(0, device=name)  # the context must be there before what is free is read
    with torch.cuda.device(name):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    free = min(int(torch.cuda.mem_get_info(name)[0]), torch_allows(torch.cuda, int(name[5:])))
    if free < leave_bytes:
        raise DeviceError(f"{name} has only {format_bytes(free)} free: {format_bytes(leave_bytes)} cannot stay free")
    rest = (free - leave_bytes) // (2 * MIB) * 2 * MIB  # torch's allocator asks the driver for multiples of 2 MiB
    text = f"{format_bytes(rest)} held, so that {format_bytes(leave_bytes)} stay free; free() gives them back"
    return _held(torch, name, rest, text)


class _HostLimit:
    """A limit on the address space of this process (``RLIMIT_AS``)."""

    _active: ClassVar[dict[_HostLimit, int]] = {}
    """All limits in force: the system has one for the process, the least of these."""
    _before: ClassVar[tuple[int, int]]
    """The system's limits before the first of them."""

    def __init__(self, leave_bytes: int) -> None:
        available = host.available_bytes()
        if leave_bytes < 32 * MIB:
            raise DeviceError("leave the host 32 MiB at least: Python itself needs some to go on")
        if leave_bytes > available:
            text = f"{format_bytes(leave_bytes)} cannot stay free"
            raise DeviceError(f"the host has only {format_bytes(available)} available: {text}")
        try:
            used = own_limits.used_bytes("RLIMIT_AS")
        except (OSError, ValueError):
            raise DeviceError("this system cannot limit a process's memory: leave_free needs Linux here") from None
        resource: Any = own_limits.resource
        if not self._active:
            _HostLimit._before = resource.getrlimit(resource.RLIMIT_AS)
        self._active[self] = used + leave_bytes
        resource.setrlimit(resource.RLIMIT_AS, (min(self._active.values()), self._before[1]))

    def end(self) -> None:
        """Restore the next-tightest limit, or the one before; one that was set by other code meanwhile stays."""
        resource: Any = own_limits.resource
        is_ours = resource.getrlimit(resource.RLIMIT_AS)[0] == min(self._active.values())
        del self._active[self]
        if is_ours:
            limit = min(self._active.values(), default=self._before[0])
            resource.setrlimit(resource.RLIMIT_AS, (limit, self._before[1]))


def _held(torch: Any, name: str, size_bytes: int, text: str) -> Filler:
    try:
        tensors = [torch.empty(size_bytes, dtype=torch.uint8, device=name)]
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        why = said(error)  # raised below: as its context it would be taken for the user's
    else:

        def drop() -> None:
            tensors.clear()
            torch.cuda.empty_cache()  # other processes could not have the memory otherwise

        return Filler(name, size_bytes, text, drop)
    raise DeviceError(f"{name} does not give {format_bytes(size_bytes)} ({why})")


def _torch(name: str) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise DeviceError(f"{name} needs torch, which is not installed")
    torch: Any = importlib.import_module("torch")
    if int(name[5:]) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise DeviceError(f"there is no {name} here")
    return torch
