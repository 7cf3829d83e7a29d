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
_OOM = re.compile(r"[Oo]ut of memory.*?: Kill(?:ed)? process (\d+) ")
_FAULT = re.compile(
    r"(?:^|: )[^\[\]]+\[(\d+)\]:? (?:segfault|general protection|trap|bad frame|unhandled signal)"
)
_MOST_RECORDS = 100_000


def kill_counter_name(root: Path = cgroup.ROOT) -> str:
    """Return the name of the counter of OOM kills: that of this process's control group, else the
    machine's; empty without either.

    A name is a path and the number of its folder: ``/proc/vmstat:1``.
    """
    paths = list[Path]()
    for version, group in cgroup.memberships(root):
        for folder in islice(cgroup.groups_around(root, version, group), 1):
            paths.append(folder / version.events)
    for path in (*paths, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            name = _counter_name(path)
            if kill_count(name) is not None:
                return name
    return ""


def _counter_name(path: Path) -> str:
    """Return the name of the counter in a file: a new group of the same path has another
    folder.
    """
    return f"{path}:{path.parent.stat().st_ino}"


def kill_count(name: str) -> int | None:
    """Return the number of kills by a counter's name; None if the counter does not exist now."""
    path = Path(name.rpartition(":")[0])
    if path.name not in ("memory.events", "memory.oom_control", "vmstat"):
        return None
    with contextlib.suppress(OSError, ValueError):  # a recording may be damaged
        kills = _KILLS.search(path.read_bytes())
        if kills and name == _counter_name(path):
            return int(kills[1])
    return None


def kill_count_in_recording(name: str, root: Path = cgroup.ROOT) -> int | None:
    """Return the number of kills by the counter that a recording names; only the kernel's own files
    are read for it.
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
    """Counts processes ended by the OOM killer in this process's control group, else on the
    machine.
    """

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        name = kill_counter_name(root)
        self.of_machine = "/vmstat:" in name
        self._file: int | None = None
        if name and hasattr(os, "pread"):
            # every cell reads it, and opening takes longest
            self._file = os.open(name.rpartition(":")[0], os.O_RDONLY)
            weakref.finalize(self, os.close, self._file).atexit = False
        self._count = self._read()

    def _read(self) -> int | None:
        """Return the kernel's count; None if there is none."""
        if self._file is None:
            return None
        content = b""
        try:
            while True:
                part = os.pread(self._file, 1 << 16, len(content))
                if not part:
                    break
                content += part
            kills = _KILLS.search(content)
        except OSError:  # the group is gone
            return None
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
    pid: int
    """In the machine's own PID namespace."""
    oom: bool
    """True for the OOM killer; False for a fatal signal, such as a segmentation fault."""
    text: str


def deaths(path: Path = Path("/dev/kmsg")) -> list[Death]:
    """Return the deaths in the system log, oldest first; none if it is not readable."""
    in_log = list[Death]()
    boot = time.time() - time.monotonic()
    for record in _system_log(path):
        head, _, text = record.partition(";")
        match = _OOM.search(text) or _FAULT.search(text)
        fields = head.split(",")
        if match and len(fields) > 2 and fields[2].isdigit():
            died_at = boot + int(fields[2]) / 1e6
            line = text.split("\n")[0]
            in_log.append(Death(died_at, int(match[1]), match.re is _OOM, line))
    return in_log


def _system_log(path: Path) -> list[str]:
    """Return the last records of the system log; none if it is not readable."""
    records: list[str] = []
    with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=without_waiting) as log:
        while len(records) < _MOST_RECORDS:
            # Older records may be overwritten during the read.
            with contextlib.suppress(BrokenPipeError):
                data = log.read(8192)
                if not data:
                    break
                records.append(data.decode("utf-8", "replace"))
    return records
