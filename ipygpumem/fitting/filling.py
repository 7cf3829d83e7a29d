"""Fills a device, or limits the host's part of this process, so that an out-of-memory error can be made again."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import mmap
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from ipygpumem.errors import DeviceError, said
from ipygpumem.fitting.device_limits import torch_allows
from ipygpumem.probes import host, own_limits
from ipygpumem.probes.allocator import Snapshot, snapshots
from ipygpumem.units import MIB, format_bytes

_GRANULE = 2 * MIB
"""What torch's allocator asks the driver for in multiples of."""
_SMALL = MIB
"""Tensors up to this size share segments of their own, and get no larger gap."""
_HOST_SHARE = 0.95
"""Of the available memory: where the last of it is used, the system ends somebody."""
_LEAST_HOST = 32 * MIB
"""Python and IPython need some memory to go on and say so."""


class Filler:
    """Memory that is held, or kept from use, until ``free()``, the end of ``with``, or its own end."""

    def __init__(self, device: str, size_bytes: int, text: str, release: Callable[[], None]) -> None:
        self.device = device
        self.size_bytes = size_bytes
        """What it holds; 0 where a limit was set instead."""
        self._text = text
        self._release: Callable[[], None] | None = release

    def free(self) -> None:
        """Give it back; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __repr__(self) -> str:
        return f"<{self.device}: {self._text if self._release is not None else 'given back'}>"

    def __enter__(self) -> Filler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def __del__(self) -> None:
        self.free()

    def __getstate__(self) -> NoReturn:  # the end of a copy would free what this one holds
        raise DeviceError("what holds memory cannot be copied: call allocate or leave_free again")


def hold(size_bytes: int, name: str) -> Filler:
    """Hold ``size_bytes`` on a device (``DeviceError`` if it has not so much); on the host they are written to."""
    text = f"{format_bytes(size_bytes)} held; free() gives them back"
    if name == "cpu":
        pages = _written(size_bytes)
        return Filler("cpu", size_bytes, text, pages.close if pages is not None else lambda: None)
    torch = _torch(name)
    return Filler(name, size_bytes, text, _dropper(torch, [_tensor(torch, size_bytes, name)]))


def fill(leave_bytes: int, name: str) -> Filler:
    """Leave ``leave_bytes`` to be had on a device (``DeviceError`` if it has not so much)."""
    if name == "cpu":
        limit = _HostLimit(leave_bytes)
        text = f"{format_bytes(leave_bytes)} were left to this process; free() ends that"
        return Filler("cpu", 0, text, limit.end)
    torch = _torch(name)
    torch.empty(0, device=name)  # the context must be there before what is free is read
    with torch.cuda.device(name):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    held = _in_gaps(torch, name)
    free = min(int(torch.cuda.mem_get_info(name)[0]), torch_allows(torch.cuda, int(name[5:])))
    if free < leave_bytes:
        raise DeviceError(f"{name} has only {format_bytes(free)} free: {format_bytes(leave_bytes)} cannot stay free")
    rest = (free - leave_bytes) // _GRANULE * _GRANULE
    # Below 10 MiB torch takes 20 MiB at once; two requests of 1 MiB share one segment of 2 MiB.
    held += [_tensor(torch, size, name) for size in ([rest] if rest >= 10 * MIB else [MIB] * (rest // MIB))]
    text = f"{format_bytes(rest)} held, so that {format_bytes(leave_bytes)} stay free; free() gives them back"
    return Filler(name, rest, text, _dropper(torch, held))


def _in_gaps(torch: Any, name: str) -> list[Any]:
    """Return tensors that fill the gaps between others in torch's cache, which ``empty_cache`` cannot give back."""
    try:
        found = snapshots("cuda").get(name, Snapshot(()))
    except RuntimeError:  # cudaMallocAsync has no gaps to tell of
        return []
    gaps = [block for segment in found.segments if not segment.private for block in segment.blocks]
    sizes = sorted((block.size_bytes for block in gaps if block.state == "inactive"), reverse=True)
    held, reserved = [], torch.cuda.memory_reserved(name)
    for size in itertools.takewhile(_SMALL.__lt__, sizes):
        held.append(_tensor(torch, size, name))
        if torch.cuda.memory_reserved(name) > reserved:  # a gap of another stream, which nobody gets here
            held.pop()
            torch.cuda.empty_cache()
    return held


def _written(size_bytes: int) -> mmap.mmap | None:
    available = int(host.available_bytes() * _HOST_SHARE)
    if size_bytes > available:
        raise DeviceError(f"the host can spare {format_bytes(available)}, and not {format_bytes(size_bytes)}")
    if not size_bytes:
        return None
    # Pages of this process's own: shared ones would be another's as well after a fork.
    own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, size_bytes, **own)
    except (OSError, OverflowError) as error:
        why = said(error)
    else:
        return _touched(pages)
    raise DeviceError(f"the host does not give {format_bytes(size_bytes)} ({why})")


def _touched(pages: mmap.mmap) -> mmap.mmap:
    for offset in range(0, len(pages), mmap.PAGESIZE):
        pages[offset] = 1
    return pages


class _HostLimit:
    """A limit on the address space of this process (``RLIMIT_AS``): no memory is filled, and others notice nothing."""

    _active: ClassVar[dict[_HostLimit, int]] = {}
    """All that hold now: the system has one limit for the whole process, the least of these."""
    _earlier: ClassVar[int] = 0
    """The limit before the first of them."""

    def __init__(self, leave_bytes: int) -> None:
        available = host.available_bytes()
        if leave_bytes < _LEAST_HOST:
            raise DeviceError(f"leave the host {format_bytes(_LEAST_HOST)} at least: Python itself needs some to go on")
        if leave_bytes > available:
            text = f"{format_bytes(leave_bytes)} cannot stay free"
            raise DeviceError(f"the host has only {format_bytes(available)} available: {text}")
        try:
            used = own_limits.used_bytes("RLIMIT_AS")
        except (OSError, ValueError):
            raise DeviceError("this system cannot limit a process's memory: leave_free needs Linux here") from None
        if not self._active:
            _HostLimit._earlier = _limits()[0]
        self._active[self] = used + leave_bytes
        self._set()

    def end(self) -> None:
        """Let the limits of others hold, or the one of before; one that somebody has set meanwhile stays."""
        is_ours = _limits()[0] == min(self._active.values())
        del self._active[self]
        if is_ours:
            self._set()

    def _set(self) -> None:
        resource: Any = own_limits.resource
        resource.setrlimit(resource.RLIMIT_AS, (min(self._active.values(), default=self._earlier), _limits()[1]))


def _limits() -> tuple[int, int]:
    resource: Any = own_limits.resource
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    return soft, hard


def _tensor(torch: Any, size_bytes: int, name: str) -> Any:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=name)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        why = said(error)  # raised below: as its context it would be taken for the user's
    raise DeviceError(f"{name} does not give {format_bytes(size_bytes)} ({why})")


def _dropper(torch: Any, held: list[Any]) -> Callable[[], None]:
    def drop() -> None:
        held.clear()
        torch.cuda.empty_cache()  # else it stays reserved, and other processes cannot have it

    return drop


def _torch(name: str) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise DeviceError(f"{name} needs torch, which is not installed")
    torch: Any = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(name[5:]) >= count:
        raise DeviceError(f"there is no {name} here")
    return torch
