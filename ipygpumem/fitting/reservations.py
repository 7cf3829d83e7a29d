"""Simulates smaller memory: reserves memory of a device, and limits this process on the host."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from ipygpumem.errors import DeviceError, describe_error
from ipygpumem.fitting.budgets import index_of, torch_cuda
from ipygpumem.probes import host, own_limits
from ipygpumem.probes.accelerators import limit_bytes, loaded_torch
from ipygpumem.probes.device_memory import checked_device
from ipygpumem.units import MIB, checked_bytes, format_bytes

_HOST_SHARE = 0.95
"""Maximum share of the available memory to reserve; with more, the system may kill a process."""
_BLOCK_BYTES = 2 * MIB
"""torch's allocator asks the driver for multiples of this."""
_MOST_BYTES_OF_TABLES = 128 * MIB
"""Upper bound of the driver's own tables of reserved memory, which come out of its free memory."""


class MemoryReservation:
    """Reserved memory, or a limit, until ``free()``, the end of ``with``, or the deletion of this
    object.
    """

    def __init__(
        self, device: str, size_bytes: int, state: str, release: Callable[[], None]
    ) -> None:
        self.device = device
        self._state = state
        """Text for ``repr`` until it is freed."""
        self.size_bytes = size_bytes
        """Reserved bytes; 0 if a limit was set instead."""
        self.free = weakref.finalize(self, release)
        """Free it; further calls do nothing."""
        self.free.atexit = False

    def __repr__(self) -> str:
        state = self._state if self.free.alive else "freed"
        return f"<{self.device}: {state}>"

    def __enter__(self) -> MemoryReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def allocate(size: int | str, device: object = "cuda") -> MemoryReservation:
    """Reserve ``size`` bytes of a device until ``free()`` or the end of ``with``; keep the returned
    object.

    Use it to test code next to another process. On a CUDA device the memory is a tensor, and the
    context is created if there is none.

    Raises:
        DeviceError: the device does not exist, or has too little memory.
        UnitError: ``size`` is not a size.

    >>> with ipygpumem.allocate("16 MiB", "RAM") as reservation:
    ...     reservation.size_bytes
    16777216
    """
    size_bytes = checked_bytes(size)
    name = checked_device(device)
    state = f"{format_bytes(size_bytes)} reserved until free()"
    if name != "cpu":
        return _reserve_by_tensor(_torch_with(name), name, size_bytes, state)
    spare = int(host.available_bytes() * _HOST_SHARE)
    if size_bytes > spare:
        raise DeviceError(
            f"the host can spare only {format_bytes(spare)}, not {format_bytes(size_bytes)}"
        )
    pages = [bytearray(b"\1") * size_bytes]  # written to, so that they are in RAM
    return MemoryReservation("cpu", size_bytes, state, pages.clear)


def leave_free(size: int | str, device: object = "cuda") -> MemoryReservation:
    """Leave only ``size`` bytes free on a device until ``free()`` or the end of ``with``; keep the
    returned object.

    Use it to test code for a smaller device. On a CUDA device, torch's cache is emptied, and all
    memory but ``size``, rounded up to torch's 2 MiB, is reserved. On the host nothing is allocated:
    the address space of this process is limited (``RLIMIT_AS``), to at least 32 MiB more than it
    uses.

    Raises:
        DeviceError: the device does not exist, has too little memory, or cannot be limited.
        UnitError: ``size`` is not a size.

    >>> with ipygpumem.leave_free("1GiB", "RAM") as reservation:
    ...     reservation.device
    'cpu'
    """
    leave_bytes = checked_bytes(size)
    name = checked_device(device)
    if name == "cpu":
        state = f"limited to {format_bytes(leave_bytes)} more until free()"
        return MemoryReservation(name, size_bytes=0, state=state, release=_limit_host(leave_bytes))
    return _reserve_all_but(leave_bytes, name)


def _reserve_all_but(leave_bytes: int, name: str) -> MemoryReservation:
    """Reserve all free memory of a CUDA device except ``leave_bytes``.

    Raises:
        DeviceError: the device does not exist, or has too little memory.
    """
    torch = _torch_with(name)
    leave_text = format_bytes(leave_bytes)
    free = _free_for_torch(torch, name)
    if free < leave_bytes:
        raise DeviceError(
            f"{name} has only {format_bytes(free)} free: {leave_text} cannot stay free"
        )
    # The driver's tables come out of its free memory, too: reserve a block less each time, until
    # ``leave_bytes`` can be allocated next to it.
    largest = (free - leave_bytes) // _BLOCK_BYTES * _BLOCK_BYTES
    below_smallest = max(-1, largest - _MOST_BYTES_OF_TABLES)
    for reserved_bytes in range(largest, below_smallest, -_BLOCK_BYTES):
        reservation = None  # frees the last one
        with contextlib.suppress(DeviceError, RuntimeError):  # torch's OutOfMemoryError is one
            reserved_text = format_bytes(reserved_bytes)
            state = f"{reserved_text} reserved until free(), so that {leave_text} stay free"
            reservation = _reserve_by_tensor(torch, name, reserved_bytes, state)
            torch.empty(leave_bytes, dtype=torch.uint8, device=name)
            torch.cuda.empty_cache()
            return reservation
    raise DeviceError(f"{name} has less free than it reports: {leave_text} cannot stay free")


def _free_for_torch(torch: Any, name: str) -> int:
    """Return the bytes of a device that torch's allocator can still get, once its cache is
    empty.
    """
    torch.empty(0, device=name)  # create the context before reading the free memory
    cuda = torch.cuda
    index = index_of(name)
    with cuda.device(name):
        cuda.synchronize()
        cuda.empty_cache()
    allowed: int = limit_bytes(cuda, index) - cuda.memory_reserved(index)
    free, _ = cuda.mem_get_info(name)
    return min(int(free), max(0, allowed))


def _torch_with(name: str) -> Any:
    """Return torch; DeviceError if it has no such device."""
    cuda = torch_cuda()
    number = 0 if cuda is None else cuda.device_count()
    if index_of(name) < number:
        return importlib.import_module("torch")
    if not loaded_torch():
        reason = "torch cannot be imported"
    elif number > 1:
        reason = f"torch sees {number} CUDA devices"
    else:
        reason = f"torch sees {number or 'no'} CUDA device"
    raise DeviceError(f"there is no {name} here: {reason}")


def _reserve_by_tensor(torch: Any, name: str, size_bytes: int, state: str) -> MemoryReservation:
    """Reserve memory of a device by a tensor; ``state`` is for the reservation's ``repr``."""
    tensors = []
    reason = ""
    try:
        tensors.append(torch.empty(size_bytes, dtype=torch.uint8, device=name))
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        reason = describe_error(error)
    if not tensors:
        # Here, without torch's error as context, which would look like the user's.
        raise DeviceError(f"{name} cannot reserve {format_bytes(size_bytes)} ({reason})")

    def drop() -> None:
        tensors.clear()
        torch.cuda.empty_cache()  # frees it for other processes

    return MemoryReservation(name, size_bytes, state, drop)


class _HostLimits:
    """The limits on this process's address space, by each call of ``leave_free(size, "RAM")``."""

    def __init__(self) -> None:
        self.original = 0
        """The limit of the system, or of other code, before ours."""
        self.ours: list[int] = []
        """Our limits that have not ended, the lowest of which counts."""

    @property
    def lowest(self) -> int:
        """The limit that is in force unless other code has changed it."""
        return min(self.ours, default=self.original)


_host_limits = _HostLimits()


def _limit_host(leave_bytes: int) -> Callable[[], None]:
    """Limit the address space of this process to ``leave_bytes`` more than it uses; return a
    function that ends this limit.

    Raises:
        DeviceError: the host has less memory, or its system has no such limits.
    """
    _refuse_unless_available(leave_bytes)
    try:
        limit = own_limits.used_bytes("RLIMIT_AS") + leave_bytes
        resource: Any = own_limits.resource
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (OSError, ValueError, AttributeError):  # Windows has no such module
        raise DeviceError(
            "this system cannot limit a process's memory: leave_free needs Linux here"
        ) from None

    def end() -> None:
        in_force = resource.getrlimit(resource.RLIMIT_AS)[0]
        is_set_by_us = in_force == _host_limits.lowest
        _host_limits.ours.remove(limit)  # may raise the lowest one
        if is_set_by_us:  # else other code has changed it, and its limit stays
            resource.setrlimit(resource.RLIMIT_AS, (_host_limits.lowest, hard))

    if not _host_limits.ours:
        _host_limits.original = soft
    _host_limits.ours.append(limit)
    resource.setrlimit(resource.RLIMIT_AS, (_host_limits.lowest, hard))
    return end


def _refuse_unless_available(leave_bytes: int) -> None:
    """Raise ``DeviceError`` if the host has less memory available, or Python itself needs more."""
    available = host.available_bytes()
    if leave_bytes < 32 * MIB:
        raise DeviceError("leave the host at least 32 MiB: Python itself needs some memory")
    if leave_bytes > available:
        text = f"{format_bytes(leave_bytes)} cannot stay free"
        raise DeviceError(f"the host has only {format_bytes(available)} available: {text}")
