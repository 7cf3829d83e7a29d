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
    """Unix time, on Linux to half a hundredth of a second; of what a child has started, the start of that child."""
    memory_bytes: int
    is_shared_out: bool
    """Whether pages that processes share count for each by its share (PSS); else they count fully (RSS)."""
    on_devices: tuple[tuple[str, int], ...] = ()
    """What it has on each device, as far as somebody has asked and can tell."""


def children() -> list[Child]:
    """Return the processes below this one that are alive, the largest first."""
    import psutil

    found = []
    below = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in below.values():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            memory = process.memory_full_info()
            size, is_shared_out = getattr(memory, "pss", 0), hasattr(memory, "pss")
            first = process  # torchrun starts its workers seconds after the cell that has started torchrun
            while (parent := below.get(first.ppid())) is not None:
                first = parent
            started = _started_at(first.pid) or first.create_time()
            found.append(Child(process.pid, process.name(), started, int(size or memory.rss), is_shared_out))
    return sorted(found, key=lambda child: -child.memory_bytes)


def _started_at(pid: int) -> float | None:
    """Return when a process was started; None where there is no /proc. psutil's figure is a second off on Linux."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        # Of the tick in which it was started, the middle.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 0.5) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age
