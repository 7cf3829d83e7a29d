"""Reads the process's own memory limits (``ulimit``, ``setrlimit``), and its use of them.

They limit its address space (``RLIMIT_AS``) or its private writable pages (``RLIMIT_DATA``). Memory
counts from its allocation, in RAM or not. ``RLIMIT_RSS`` has no effect on Linux.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ipygpumem.units import KIB

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

QUANTITIES = {"RLIMIT_AS": "address space", "RLIMIT_DATA": "data"}
"""Names of the limited quantities."""
_USED = {"RLIMIT_AS": b"\nVmSize:", "RLIMIT_DATA": b"\nVmData:"}


@dataclass(frozen=True)
class Limit:
    """A limit that is set, and the bytes used of it."""

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """Bytes that the process can still allocate."""
        return max(0, self.limit_bytes - self.used_bytes)


def bound(name: str) -> int | None:
    """Return the limit ``name`` in bytes; None if it is unset or unlimited."""
    if resource is None or not hasattr(resource, name):
        return None
    size = int(resource.getrlimit(getattr(resource, name))[0])
    if size in (resource.RLIM_INFINITY, -1):
        return None
    return size


def used_bytes(name: str) -> int:
    """Return the used bytes of the limit ``name`` (``OSError`` or ``ValueError`` if they cannot be
    read).
    """
    return figure(Path("/proc/self/status").read_bytes(), _USED[name])


def figure(status: bytes, label: bytes) -> int:
    """Return the figure in one line of ``/proc/self/status`` in bytes; ValueError without such a
    line.
    """
    start = status.index(label) + len(label)
    return int(status[start : status.index(b"kB", start)]) * KIB


def limits() -> list[Limit]:
    """Return the limits that are set; none if their use cannot be read."""
    set_limits = list[Limit]()
    for name in QUANTITIES:
        size = bound(name)
        if size is None:
            continue
        try:
            set_limits.append(Limit(name, size, used_bytes(name)))
        except (OSError, ValueError):  # not Linux
            return []
    return set_limits


def nearest() -> Limit | None:
    """Return the limit with the least bytes left, or None if none is set."""
    return min(limits(), key=lambda limit: limit.available_bytes, default=None)


def remedy(name: str) -> str:
    """Return the line that raises the limit ``name`` as far as this process may; in words if it may
    not.
    """
    if resource is None:
        return ""
    soft, hard = resource.getrlimit(getattr(resource, name))
    if soft == hard:
        return "raise it where the kernel is started (ulimit)"
    return f"import resource; resource.setrlimit(resource.{name}, ({hard}, {hard}))"
