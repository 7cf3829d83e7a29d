"""Reads how near the machine is to the end of its memory: what it could still give, and OOM kills.

The kernel counts the processes that its OOM killer has killed: for each control group (``memory.events`` in version
2 of the interface, ``memory.oom_control`` in version 1), and for the machine (``/proc/vmstat``). Kills for want of
memory in the whole machine count in the victim's group, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from ipygpumem.probes import cgroup

_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_COUNTERS = ("memory.events", "memory.oom_control", "vmstat")


class KillCounter:
    """How many processes the kernel's OOM killer has killed: of this process's group, else of the machine.

    ``name`` names the counter for ``kills_counted`` of a later process; it is None where there is none.
    """

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        self.name: str | None = None
        self._descriptor: int | None = None
        for path in (*cgroup.event_files(root), root / "proc/vmstat"):
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY)
                if self.read() is not None:
                    self.name = _name(path)
                    return
            self.close()

    def read(self) -> int | None:
        """Return the count; None where there is none."""
        if self._descriptor is None:
            return None
        try:
            return _kills(os.pread(self._descriptor, 1 << 16, 0))
        except OSError:  # the group is gone
            return None

    def close(self) -> None:
        """Close the counter's file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def kills_counted(name: str) -> int | None:
    """Return what the counter that another process named says now; None if it is gone, or there is a new one."""
    path = Path(name.rpartition(":")[0])
    try:
        return _kills(path.read_bytes()) if path.name in _COUNTERS and _name(path) == name else None
    except OSError:
        return None


def _name(path: Path) -> str:
    # The folder's number: a new group of the same path has another one.
    return f"{path}:{path.parent.stat().st_ino}"


def _kills(text: bytes) -> int | None:
    found = _KILLS.search(text)
    return None if found is None else int(found[1])


def ram_bytes() -> int:
    """Return the machine's memory, groups' limits apart."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """Return what the system could still give to any process, groups' limits apart."""
    return int(psutil.virtual_memory().available)
