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
"""The quantity that each limit limits, in words."""
_LABELS = {"RLIMIT_AS": b"\nVmSize:", "RLIMIT_DATA": b"\nVmData:"}
"""Each limit's line of ``/proc/self/status``, with the bytes in use."""


@dataclass(frozen=True)
class Limit:
    """A limit that is set, and the bytes used of it."""

    name: str
    """Its name in ``resource``, such as ``RLIMIT_AS``."""
    limit_bytes: int
    used_bytes: int
    """The process's use of what the limit limits."""

    @property
    def available_bytes(self) -> int:
        """Bytes that the process can still allocate."""
        return max(0, self.limit_bytes - self.used_bytes)


def bytes_of_limit(name: str) -> int | None:
    """Return the limit ``name`` (``RLIMIT_AS``) in bytes; None if it is not set, or if the system
    has no such limit.
    """
    if resource is None or not hasattr(resource, name):
        return None
    size = int(resource.getrlimit(getattr(resource, name))[0])
    if size in (resource.RLIM_INFINITY, -1):
        return None
    return size


def used_bytes(name: str) -> int:
    """Return the bytes of the limit ``name`` that are in use now.

    Raises:
        OSError, ValueError: they cannot be read, as on other systems than Linux.
    """
    return figure(Path("/proc/self/status").read_bytes(), _LABELS[name])


def figure(status: bytes, label: bytes) -> int:
    r"""Return the bytes in one line of the text of ``/proc/self/status``.

    Args:
        status: the text.
        label: the line's beginning and the line end before it, such as ``\nVmSize:``.

    Raises:
        ValueError: there is no such line.
    """
    start = status.index(label) + len(label)
    return int(status[start : status.index(b"kB", start)]) * KIB


def limits() -> list[Limit]:
    """Return the limits that are set; none if the bytes in use cannot be read."""
    limits_set = list[Limit]()
    for name in QUANTITIES:
        size = bytes_of_limit(name)
        if size is None:
            continue
        try:
            limits_set.append(Limit(name, size, used_bytes(name)))
        except (OSError, ValueError):  # not Linux
            return []
    return limits_set


def nearest() -> Limit | None:
    """Return the limit that leaves the fewest bytes available, or None if none is set."""
    return min(limits(), key=lambda limit: limit.available_bytes, default=None)


def remedy(name: str) -> str:
    """Return the line that raises the limit ``name`` as far as this process may raise it: to its
    hard limit. If it is there already, return advice in words.
    """
    if resource is None:
        return ""
    soft, hard = resource.getrlimit(getattr(resource, name))
    if soft == hard:
        return "raise it where the kernel is started (ulimit)"
    return f"import resource; resource.setrlimit(resource.{name}, ({hard}, {hard}))"
