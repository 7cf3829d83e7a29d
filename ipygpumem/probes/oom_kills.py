"""Counts the processes that the kernel's OOM killer ended, and reads how processes died.

Kills are counted per control group and for the whole machine (``/proc/vmstat``), and named in the
system log (``/dev/kmsg``, where readable) as ``priority,number,microseconds,flags;text``, with the
time since boot.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ipygpumem.probes import cgroup
from ipygpumem.records import without_waiting

_KILLS = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)
"""The line with the number of kills, in each of the kernel's files that has one."""
_OOM = re.compile(r"[Oo]ut of memory.*?: Kill(?:ed)? process (\d+) ")
"""The system log's text about a kill, with the PID: ``Out of memory: Killed process 12 (python3)``,
or ``Memory cgroup out of memory: ...``.
"""
_FAULT = re.compile(
    r"(?:^|: )[^\[\]]+\[(\d+)\]:? (?:segfault|general protection|trap|bad frame|unhandled signal)"
)
"""The system log's text about a fatal signal, with the PID: ``python3[12]: segfault at 0 ...``."""
_MOST_RECORDS = 100_000
"""Maximum number of records to read from the system log."""


def kill_counter_name(root: Path = cgroup.ROOT) -> str:
    """Return the name of the counter of OOM kills in this process's control group; without one the
    machine's; empty without either.

    A name is the path of the kernel's file and, after a colon, the inode number of its folder:
    ``/proc/vmstat:1``. A recording stores it, so that a later process can read the same counter.
    """
    paths = list[Path]()
    for version, group in cgroup.memberships(root):
        # Only the innermost group: kills in a group around it may be other containers'.
        for folder in islice(cgroup.groups_around(root, version, group), 1):
            paths.append(folder / version.events)
    for path in (*paths, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            name = _counter_name(path)
            if kill_count(name) is not None:
                return name
    return ""


def _counter_name(path: Path) -> str:
    """Return the name of the counter in a file.

    The folder's inode number is part of it, because a container that is started again may have a
    new group of the same path, whose counter starts from 0.
    """
    return f"{path}:{path.parent.stat().st_ino}"


def kill_count(name: str) -> int | None:
    """Return the number of kills that the counter ``name`` shows; None if it does not exist now."""
    path = Path(name.rpartition(":")[0])
    if path.name not in ("memory.events", "memory.oom_control", "vmstat"):
        return None
    with contextlib.suppress(OSError, ValueError):  # a recording may be damaged
        kills = _KILLS.search(path.read_bytes())
        if kills and name == _counter_name(path):
            return int(kills[1])
    return None


def kill_count_in_recording(name: str, root: Path = cgroup.ROOT) -> int | None:
    """Return the number of kills that the counter named in a recording shows; None if it does not
    exist now.

    A recording may come from another machine and say anything, so only the kernel's own files are
    read: the machine's counter, and those in the folders where groups are mounted.
    """
    path = Path(name.rpartition(":")[0])
    if ".." in path.parts:
        return None
    if path == root / "proc/vmstat":
        return kill_count(name)
    for _, mounted in (*cgroup.mounts(root, cgroup.V1), *cgroup.mounts(root, cgroup.V2)):
        if path.is_relative_to(root / mounted.lstrip("/")):
            return kill_count(name)
    return None


class Kills:
    """Counts processes ended by the OOM killer in this process's control group, or on the whole
    machine if the group has no counter.
    """

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        name = kill_counter_name(root)
        self.of_machine = "/vmstat:" in name
        """True if the kills are those of the whole machine."""
        self._file: int | None = None
        """A descriptor of the kernel's file, kept because every cell reads it and opening takes
        longest.
        """
        if name and hasattr(os, "pread"):
            self._file = os.open(name.rpartition(":")[0], os.O_RDONLY)
            weakref.finalize(self, os.close, self._file).atexit = False
        self._count = self._read()
        """The kernel's count at the last call."""

    def _read(self) -> int | None:
        """Return the kernel's count; None if there is none."""
        if self._file is None:
            return None
        content = b""
        try:
            # To the end of the file: the kernel may return less of it than was asked for.
            while part := os.pread(self._file, 1 << 16, len(content)):
                content += part
        except OSError:  # the group is gone
            return None
        kills = _KILLS.search(content)
        if kills is None:
            return None
        return int(kills[1])

    def since_last_call(self) -> int:
        """Return the number of kills since the last call."""
        before, self._count = self._count, self._read()
        if before is None or self._count is None:
            return 0
        return max(0, self._count - before)


class Death(NamedTuple):
    """A process ended by the kernel."""

    time: float
    """Unix time."""
    pid: int
    """In the machine's own PID namespace."""
    oom: bool
    """True for the OOM killer; False for a fatal signal, such as a segmentation fault."""
    text: str
    """The first line of the record in the system log."""


def deaths(path: Path = Path("/dev/kmsg")) -> list[Death]:
    """Return the deaths that the system log names, oldest first; none if it is not readable."""
    logged_deaths = list[Death]()
    boot_time = time.time() - time.monotonic()
    for record in _system_log(path):
        # priority,number,microseconds,flags;text
        head, _, text = record.partition(";")
        match = _OOM.search(text) or _FAULT.search(text)
        fields = head.split(",")
        if match and len(fields) > 2 and fields[2].isdigit():
            died_at = boot_time + int(fields[2]) / 1e6
            line = text.split("\n")[0]
            logged_deaths.append(Death(died_at, pid=int(match[1]), oom=match.re is _OOM, text=line))
    return logged_deaths


def _system_log(path: Path) -> list[str]:
    """Return the records of the system log, oldest first; none if it is not readable."""
    records: list[str] = []
    with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=without_waiting) as log:
        while len(records) < _MOST_RECORDS:
            # Each read returns one record. It raises BrokenPipeError if newer records have
            # overwritten the next one, and the read after it returns the oldest that is left.
            with contextlib.suppress(BrokenPipeError):
                data = log.read(8192)
                if not data:
                    break
                records.append(data.decode("utf-8", "replace"))
    return records
