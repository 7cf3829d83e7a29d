"""Simulates smaller memory: limits torch's CUDA allocator, reserves memory, limits this process on
the host.

Also recognises the out-of-memory errors of torch that a limit caused.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ipygpumem.errors import BudgetError, DeviceError, UnitError, describe_error, quoted
from ipygpumem.failures import GuardedBlock
from ipygpumem.interrupts import is_from_signal
from ipygpumem.probes import host, own_limits
from ipygpumem.probes.accelerators import (
    fractions,
    limit_bytes,
    loaded_torch,
    memory_fraction,
    parse_device,
    uncounted,
)
from ipygpumem.probes.allocator import failed_allocation
from ipygpumem.probes.device_memory import checked_device
from ipygpumem.units import MIB, checked_bytes, format_bytes

_HOST_SHARE = 0.95
"""Maximum share of the available memory to reserve; with more, the system may kill a process."""

in_force: list[Budget] = []
"""The budgets in force, innermost last."""


def parse_budget(text: str) -> dict[str, int]:
    """Parse sizes such as ``gpu=8GiB,cuda:1=4GiB``."""
    sizes = dict[str, str]()
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if part and not equals:
            raise BudgetError(
                f"budget: {quoted(name)} must be a device and a size: write for instance gpu=8GiB"
            )
        if part:
            sizes[name] = size
    return checked(sizes)


def checked(sizes: Mapping[str, object]) -> dict[str, int]:
    """Return a budget in bytes (``BudgetError`` for an invalid size, or a device other than ``gpu``
    or ``cuda:N``).
    """
    if not isinstance(sizes, Mapping):
        raise BudgetError("budget: write sizes by device, such as {'gpu': '8GiB'}")
    size_bytes: dict[str, int] = {}
    for name, size in sizes.items():
        if size is None:
            continue
        device = _limitable(name)
        try:
            size_bytes[device] = checked_bytes(size, least=MIB)
        except UnitError as error:
            raise BudgetError(f"budget: {name}: {error}") from None
    if not size_bytes:
        raise BudgetError("budget: name a device, such as gpu=8GiB")
    return size_bytes


def _limitable(name: object) -> str:
    """Return ``gpu`` or the name of a CUDA device (``BudgetError`` for any other)."""
    try:
        device = parse_device(name, kinds=("cuda",))
    except DeviceError:
        text = f"budget: {quoted(name)} is not a device; write gpu, or one device such as cuda:1"
        raise BudgetError(text) from None
    if device == "cpu":
        raise BudgetError(
            "budget: RAM cannot be limited; write gpu=SIZE, or use leave_free(SIZE, 'RAM')"
        )
    return "gpu" if device == "cuda" else device


class Budget(GuardedBlock):
    """Limits torch's allocator from ``start`` to ``stop``, or in a ``with`` block.

    The device ``gpu`` means the current one and each on which this process has memory. ``leaving``
    is called at the end of the block, while the budget is still in force, with the error that
    leaves it.
    """

    _block_name = "a budget"
    _lost_at_start = "it runs without this limit"
    _lost_at_end = "the refusals of this limit are not reported"

    def __init__(
        self,
        sizes: Mapping[str, int],
        of: str = "the with block",
        leaving: Callable[[Budget, BaseException | None], None] = lambda budget, error: None,
    ) -> None:
        self.sizes = dict(sizes)
        self.of = of
        self._leaving = leaving
        self.limits: dict[str, int] = {}
        """Bytes by device, without devices that cannot be limited."""
        self.notes: list[str] = []
        """Sentences about devices that cannot be limited."""
        self.refusals: list[str] = []
        """Sentences about requests that it refused."""
        self._earlier: dict[int, tuple[float, float]] = {}
        """torch's previous limit and ours, as shares of the device, by device index."""

    def size_of(self, device: str) -> int:
        """Return the size that the budget gives to a device; 0 if it gives none."""
        return self.sizes.get(device, self.sizes.get("gpu", 0))

    def start(self) -> None:
        """Set the limits; note devices that cannot be limited."""
        try:
            with self._noted("no device can be limited"):
                self._limit_all()
            in_force.append(self)
        except BaseException:  # an interrupt, too
            self.stop()
            raise

    @contextlib.contextmanager
    def _noted(self, fault: str) -> Iterator[None]:
        """Turn an error of a device into a note; if its context is broken, the user's code will
        raise that itself.
        """
        try:
            yield
        except Exception as error:
            if is_from_signal(error):
                raise
            self.notes.append(f"budget: {fault} ({describe_error(error)})")

    def _limit_all(self) -> None:
        """Limit each device that can be limited."""
        cuda = torch_cuda()
        reason = uncounted()
        if cuda is None:
            reason = "there is no CUDA device here, so it limits nothing"
        if reason:
            self.notes.append(f"budget: {reason}")
            return
        count = cuda.device_count()
        for name, size in self._sizes_by_device(cuda, count).items():
            if _index_of(name) < count:
                with self._noted(f"{name} cannot be limited"):
                    self._limit(cuda, name, size)
            else:
                self.notes.append(f"budget: there is no {name} here")

    def _sizes_by_device(self, cuda: Any, count: int) -> dict[str, int]:
        """Return the sizes, that of ``gpu`` for each device in use; a limit on any other device
        would create a context there.
        """
        sizes = dict[str, int]()
        named = dict(self.sizes)
        size = named.pop("gpu", None)
        if size is not None:
            for index in range(count):
                if index == cuda.current_device() or cuda.memory_reserved(index):
                    sizes[f"cuda:{index}"] = size
        return sizes | named

    def _limit(self, cuda: Any, name: str, size: int) -> None:
        """Limit one device, to at most the limit that it has."""
        index = _index_of(name)
        total = cuda.get_device_properties(name).total_memory
        # cudaMallocAsync reports no limit as more than 1
        earlier = min(1.0, memory_fraction(cuda, index))
        # one byte less would cost a block of 2 MiB
        share = min(earlier, math.nextafter(size / total, 1.0))
        self._earlier[index] = earlier, share  # before the change, in case of an interrupt
        _set_fraction(cuda, index, share)
        limit = self.limits[name] = min(size, int(earlier * total))
        if cuda.memory_reserved(name) > limit:  # the allocator keeps using memory reserved before
            cuda.empty_cache()
            self._note_reserved(cuda, name, limit)

    def _note_reserved(self, cuda: Any, name: str, limit: int) -> None:
        """Note reserved memory beyond a limit."""
        reserved = cuda.memory_reserved(name)
        if reserved > limit:
            live = format_bytes(cuda.memory_allocated(name))
            text = (
                f"{format_bytes(reserved)} of {name} stay reserved, {live} of them by live tensors"
            )
            self.notes.append(f"budget: {text}: more than the {format_bytes(limit)} allowed")

    def stop(self) -> None:
        """Restore the previous limits, except those that other code has changed."""
        if self in in_force:
            in_force.remove(self)
        cuda = torch_cuda() if self._earlier else None
        for index, (earlier, ours) in list(self._earlier.items()):
            with self._noted(f"cuda:{index} stays limited"):
                now = min(1.0, memory_fraction(cuda, index))
                if _is_same_share(now, ours):
                    _set_fraction(cuda, index, earlier)
                elif not _is_same_share(now, earlier):  # else it could not be set
                    self.notes.append(
                        f"budget: other code changed the limit on cuda:{index}; it is kept"
                    )
            self._earlier.pop(index)

    def _open_block(self) -> Budget:
        """Set the limits at the start of a ``with`` block."""
        self.start()
        return self

    def _close_block(self, error: BaseException | None) -> None:
        """Restore the previous limits at the end of a ``with`` block."""
        try:
            with contextlib.suppress(MemoryError):  # the user's own error matters more
                self._leaving(self, error)
        finally:
            self.stop()

    def _after_failed_end(self) -> None:
        """Restore the previous limits after a failed end."""
        self.stop()


def _index_of(name: str) -> int:
    """Return the index of a CUDA device's name."""
    return int(name.removeprefix("cuda:"))


def _is_same_share(share: float, other: float) -> bool:
    """Return True if two limits are the same: torch rounds them to bytes."""
    return abs(share - other) < 1e-6


def limits() -> dict[str, int]:
    """Return the limits in force, in bytes by device."""
    in_bytes = dict[str, int]()
    for budget in in_force:
        in_bytes |= budget.limits
    return in_bytes


class LimitRefusal(NamedTuple):
    """A request that a limit on torch's allocator refused, though the device had the
    memory free.
    """

    device: str
    limit_bytes: int
    budget: Budget | None
    text: str
    remedy: str = ""


def refusal(message: str) -> LimitRefusal | None:
    """Return the limit on torch's allocator that caused an out-of-memory error; None if the device
    ran out.
    """
    failed = failed_allocation(message)
    if failed is None or failed.limit is None:
        return None
    if failed.limit >= failed.total or failed.free < failed.requested:
        return None
    device = failed.device
    limit = failed.limit
    budget = _budget_of(device, limit)
    if budget is None:
        limiter = f"the limit of {format_bytes(limit)} on torch's allocator"
        remedy = f"torch.cuda.set_per_process_memory_fraction(1.0, {_index_of(device)})"
    else:
        limiter = f"the budget of {budget.of} ({format_bytes(budget.size_of(device))})"
        remedy = ""
    text = (
        f"{limiter} refused {format_bytes(failed.requested)} of {device}, although "
        f"{format_bytes(failed.free)} of it were free"
    )
    if budget is not None and text not in budget.refusals:
        budget.refusals.append(text)
    return LimitRefusal(device, limit, budget, text, remedy)


def _budget_of(device: str, limit: int) -> Budget | None:
    """Return the innermost budget that set a limit; torch's text of it has two decimals."""
    for budget in reversed(in_force):
        if device in budget.limits and abs(budget.size_of(device) - limit) <= limit // 100:
            return budget
    return None


# -- reserved memory ----------------------------------------------------------------------------


class MemoryReservation:
    """Reserved memory, or a limit, until ``free()``, the end of ``with``, or the deletion of this
    object.
    """

    def __init__(
        self, device: str, size_bytes: int, text: str, release: Callable[[], None]
    ) -> None:
        self.device = device
        self._text = text
        self.size_bytes = size_bytes
        """Reserved bytes; 0 if a limit was set instead."""
        self.free = weakref.finalize(self, release)
        """Free it; further calls do nothing."""
        self.free.atexit = False

    def __repr__(self) -> str:
        state = self._text if self.free.alive else "freed"
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
    text = f"{format_bytes(size_bytes)} reserved until free()"
    if name != "cpu":
        return _tensor(_torch_with(name), name, size_bytes, text)
    spare = int(host.available_bytes() * _HOST_SHARE)
    if size_bytes > spare:
        raise DeviceError(
            f"the host can spare only {format_bytes(spare)}, not {format_bytes(size_bytes)}"
        )
    pages = [bytearray(b"\1") * size_bytes]  # written to, so that they are in RAM
    return MemoryReservation("cpu", size_bytes, text, pages.clear)


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
    left = format_bytes(leave_bytes)
    if name == "cpu":
        return MemoryReservation(
            name, 0, f"limited to {left} more until free()", _limit_host(leave_bytes)
        )
    torch = _torch_with(name)
    free = _free_for_torch(torch, name)
    if free < leave_bytes:
        raise DeviceError(f"{name} has only {format_bytes(free)} free: {left} cannot stay free")
    # The driver's tables come out of its free memory, too: reserve a block less each time, until
    # ``leave_bytes`` can be allocated next to it.
    largest = (free - leave_bytes) // _BLOCK_BYTES * _BLOCK_BYTES
    for reserved_bytes in range(largest, max(-1, largest - _MOST_TABLES_BYTES), -_BLOCK_BYTES):
        reserved = None  # frees the last one
        with contextlib.suppress(DeviceError, RuntimeError):  # torch's OutOfMemoryError is one
            text = f"{format_bytes(reserved_bytes)} reserved until free(), so that {left} stay free"
            reserved = _tensor(torch, name, reserved_bytes, text)
            torch.empty(leave_bytes, dtype=torch.uint8, device=name)
            torch.cuda.empty_cache()
            return reserved
    raise DeviceError(f"{name} has less free than it reports: {left} cannot stay free")


def _free_for_torch(torch: Any, name: str) -> int:
    """Return the bytes of a device that torch's allocator can still get, once its cache is
    empty.
    """
    torch.empty(0, device=name)  # create the context before reading the free memory
    cuda = torch.cuda
    index = _index_of(name)
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
    if _index_of(name) < number:
        return importlib.import_module("torch")
    if not loaded_torch():
        reason = "torch cannot be imported"
    elif number > 1:
        reason = f"torch sees {number} CUDA devices"
    else:
        reason = f"torch sees {number or 'no'} CUDA device"
    raise DeviceError(f"there is no {name} here: {reason}")


def _tensor(torch: Any, name: str, size_bytes: int, text: str) -> MemoryReservation:
    """Reserve memory of a device by a tensor."""
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

    return MemoryReservation(name, size_bytes, text, drop)


_BLOCK_BYTES = 2 * MIB
"""torch's allocator asks the driver for multiples of this."""
_MOST_TABLES_BYTES = 128 * MIB
"""The driver's own tables of reserved memory are surely smaller; they come out of its free memory.
"""


class _HostLimits:
    """The limits on this process's address space.

    Attributes:
        original: the limit of the system, or of other code.
        ours: our limits in force, the lowest of which counts.
    """

    def __init__(self) -> None:
        self.original = 0
        self.ours: list[int] = []

    @property
    def lowest(self) -> int:
        """The limit that is in force unless other code has changed it."""
        return min(self.ours, default=self.original)


_host_limits = _HostLimits()


def _limit_host(leave_bytes: int) -> Callable[[], None]:
    """Limit the address space of this process to the lowest of our limits; return a function that
    ends this one.
    """
    available = host.available_bytes()
    if leave_bytes < 32 * MIB:
        raise DeviceError("leave the host at least 32 MiB: Python itself needs some memory")
    if leave_bytes > available:
        text = f"{format_bytes(leave_bytes)} cannot stay free"
        raise DeviceError(f"the host has only {format_bytes(available)} available: {text}")
    try:
        limit = own_limits.used_bytes("RLIMIT_AS") + leave_bytes
        resource: Any = own_limits.resource
        now, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (OSError, ValueError, AttributeError):  # Windows has no such module
        raise DeviceError(
            "this system cannot limit a process's memory: leave_free needs Linux here"
        ) from None

    def end() -> None:
        is_ours = resource.getrlimit(resource.RLIMIT_AS)[0] == _host_limits.lowest
        _host_limits.ours.remove(limit)
        if is_ours:  # else other code has changed it
            resource.setrlimit(resource.RLIMIT_AS, (_host_limits.lowest, hard))

    if not _host_limits.ours:
        _host_limits.original = now
    _host_limits.ours.append(limit)
    resource.setrlimit(resource.RLIMIT_AS, (_host_limits.lowest, hard))
    return end


def torch_cuda() -> Any:
    """Return ``torch.cuda`` if it has a device, else None; import torch if needed, since the user
    named a device.
    """
    torch: Any = None
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return torch.cuda


def _set_fraction(cuda: Any, index: int, fraction: float) -> None:
    with cuda.device(index):  # older versions of torch change the current device
        cuda.set_per_process_memory_fraction(fraction, index)
    fractions[index] = fraction
