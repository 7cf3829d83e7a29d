"""Lists the processes that this one has started, and those that these have started."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple


class Child(NamedTuple):
    """A process below this one."""

    pid: int
    name: str
    started_at: float
    """Unix time, to some hundredths of a second."""
    memory_bytes: int
    is_shared_out: bool
    """Whether pages that processes share count for each by its share (PSS); else they count fully (RSS)."""


def children() -> list[Child]:
    """Return the processes below this one that are alive, the largest first."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            memory = process.memory_full_info()
            size, is_shared_out = getattr(memory, "pss", 0), hasattr(memory, "pss")
            started = _started_at(process.pid) or process.create_time()
            found.append(Child(process.pid, process.name(), started, int(size or memory.rss), is_shared_out))
    return sorted(found, key=lambda child: -child.memory_bytes)


def _started_at(pid: int) -> float | None:
    """Return when a process was started; None where there is no /proc. psutil's figure is a second off on Linux."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age
