"""Reads the process's own limits on memory (``ulimit``, ``setrlimit``), and how near it is to them.

They bound its address space (``RLIMIT_AS``) or its private pages that can be written (``RLIMIT_DATA``). Memory counts
from the moment that it is asked for, in RAM or not. ``RLIMIT_RSS`` bounds nothing on Linux.
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

WHAT = {"RLIMIT_AS": "address space", "RLIMIT_DATA": "data"}
"""What each limit bounds, in words."""
_USED = {"RLIMIT_AS": b"\nVmSize:", "RLIMIT_DATA": b"\nVmData:"}


@dataclass(frozen=True)
class Limit:
    """A limit that is set, and how much of it is used."""

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What the process can still get."""
        return max(0, self.limit_bytes - self.used_bytes)


def bound(name: str) -> int | None:
    """Return the limit ``name`` in bytes; None where it is not set, or where there is none."""
    if resource is None or not hasattr(resource, name):
        return None
    size = int(resource.getrlimit(getattr(resource, name))[0])
    return None if size in (resource.RLIM_INFINITY, -1) else size


def used_bytes(name: str) -> int:
    """Return how much of the limit ``name`` this process uses (``OSError`` or ``ValueError`` if it cannot be read)."""
    return figure(Path("/proc/self/status").read_bytes(), _USED[name])


def figure(status: bytes, label: bytes) -> int:
    """Return the figure of one line of ``/proc/self/status`` in bytes; ValueError if there is no such line."""
    start = status.index(label) + len(label)
    return int(status[start : status.index(b"kB", start)]) * KIB


def limits() -> list[Limit]:
    """Return the limits that are set; none where their use cannot be read."""
    set_here = [(name, size) for name in WHAT if (size := bound(name)) is not None]
    try:
        return [Limit(name, size, used_bytes(name)) for name, size in set_here]
    except (OSError, ValueError):  # no Linux
        return []


def nearest() -> Limit | None:
    """Return the limit that leaves least, or None where none is set."""
    return min(limits(), key=lambda limit: limit.available_bytes, default=None)
