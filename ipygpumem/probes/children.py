"""Reads this process's child processes, live and ended ones."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ipygpumem.probes.pages import PAGE_BYTES
from ipygpumem.units import KIB, MIB

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
NOT_SHARED_OUT = "RSS, in which shared pages count fully: PSS cannot be read"
"""Note on a figure of processes whose PSS cannot be read."""
_STARTUP_BYTES = 4 * MIB
"""Maximum growth of this process between a measurement and the start of a child."""


def descendants() -> list[int]:
    """Return the PIDs of the processes that this process has started, and of those that these have
    started in turn; on Linux only, where the kernel lists them by thread.
    """
    pids: list[int] = []
    pids_to_follow = ["self"]
    while pids_to_follow:
        folder = f"/proc/{pids_to_follow.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(folder).iterdir():
                with contextlib.suppress(OSError):
                    started_by_thread = (thread / "children").read_text().split()
                    pids_to_follow += started_by_thread
                    pids += map(int, started_by_thread)
    return pids


def pages(pid: int) -> list[bytes]:
    """Return the figures of a process in ``/proc/PID/statm``, as text; none if it has ended.

    They are its number of pages in the address space, then in RAM, then by kind.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/statm").read_bytes().split()
    return []


class ProcessSize(NamedTuple):
    """The memory of a process in RAM."""

    size_bytes: int
    """PSS or RSS."""
    is_shared_out: bool
    """True for PSS, which divides shared pages among their processes; False for RSS."""


def size_of(pid: int) -> ProcessSize | None:
    """Return the PSS of a process, or its RSS if only that is readable; None if it has ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        pss = _PSS.search(rollup)
        if pss:
            return ProcessSize(int(pss[1]) * KIB, is_shared_out=True)
    with contextlib.suppress(OSError, IndexError):
        pages_in_ram = int(pages(pid)[1])
        if pages_in_ram:
            return ProcessSize(pages_in_ram * PAGE_BYTES, is_shared_out=False)
    return None


class EndedChildren(NamedTuple):
    """The kernel's figures of all child processes that have ended and were waited for, and of their
    descendants.
    """

    peak_bytes: int
    """The largest RSS that any of them has had."""
    touched_bytes: int
    """The size of the pages that they have touched: a page counts each time that it was mapped, and
    a huge page counts as one.
    """

    @classmethod
    def now(cls) -> EndedChildren | None:
        """Return the figures of this moment; None where the system has none."""
        if resource is None:
            return None
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        unit = 1 if sys.platform == "darwin" else KIB
        return cls(usage.ru_maxrss * unit, usage.ru_minflt * PAGE_BYTES)

    def peak_since(self, before: EndedChildren, own_peak_bytes: int) -> int | None:
        """Return the peak of the largest child that has ended since ``before``; None if it is not
        known.

        The kernel reports one peak for all children ever. It is that of a new child only if it
        exceeds the peak before, and this process's own (``own_peak_bytes``): until a child executes
        its program, it has this process's pages.
        """
        largest_other_peak = max(before.peak_bytes, own_peak_bytes + _STARTUP_BYTES)
        if self.peak_bytes > largest_other_peak:
            return self.peak_bytes
        return None


class Child(NamedTuple):
    """A descendant of this process."""

    pid: int
    name: str
    """The name of its program."""
    started_at: float
    """Unix time, on Linux to 1/200 s; for an indirect child the start of the direct child above it.
    """
    memory_bytes: int
    """Its memory in RAM."""
    is_shared_out: bool
    """True if shared pages are divided among their processes (PSS); False if they count fully
    (RSS).
    """
    on_devices: tuple[tuple[str, int], ...] = ()
    """Memory on each device, as far as it was asked for and is known."""
    ends_by: str = ""
    """The line that ends it, if one is known."""


def children() -> list[Child]:
    """Return the live descendants of this process, the largest first."""
    import psutil  # IPython in a terminal has not loaded it

    live = list[Child]()
    by_pid = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in by_pid.values():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            size = size_of(process.pid)
            if size is None:  # no /proc
                size = ProcessSize(int(process.memory_info().rss), is_shared_out=False)
            # The start of the direct child counts, because a report names the cell that started it:
            # torchrun starts its workers seconds after the cell that has started torchrun.
            direct_child = process
            parent = by_pid.get(process.ppid())
            while parent is not None:
                direct_child, parent = parent, by_pid.get(parent.ppid())
            started_at = _started_at(direct_child.pid) or direct_child.create_time()
            live.append(Child(process.pid, process.name(), started_at, *size))
    live.sort(key=attrgetter("memory_bytes"), reverse=True)
    return live


def _started_at(pid: int) -> float | None:
    """Return the Unix time at which a process started; None without /proc.

    psutil's ``create_time()`` may be a second off on Linux.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        _, _, fields = status.rpartition(")")  # the name before may have spaces
        ticks = int(fields.split()[19])  # since boot; field 22 in proc_pid_stat(5)
        # The shortest of several readings: other processes may run between the two clocks.
        boot = min(-time.clock_gettime(time.CLOCK_BOOTTIME) + time.time() for _ in range(3))
        # the middle of the tick in which it started
        return boot + (ticks + 0.5) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
