"""Reads which processes the Linux kernel's OOM killer ended: counted per control group, and named in the system log.

Kills are counted for each control group (``memory.events`` in version 2 of the interface, ``memory.oom_control`` in
version 1) and for the whole machine (``/proc/vmstat``). Records of the log (``/dev/kmsg``, where it may be read) are
``priority,number,microseconds,flags;text`` (Documentation/ABI/testing/dev-kmsg), with the time since the boot.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from ipygpumem.probes import cgroup

_KILLS = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)
_OOM = re.compile(r"[Oo]ut of memory.*?: Kill(?:ed)? process (\d+) ")
_FAULT = re.compile(r"(?:^|: )[^\[\]]+\[(\d+)\]:? (?:segfault|general protection|trap|bad frame|unhandled signal)")
_MOST_RECORDS = 100_000


def counter(root: Path = cgroup.ROOT) -> str:
    """Return a name for the counter of this process's control group, else of the machine; empty without either."""
    for path in (*cgroup.event_files(root), root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            name = f"{path}:{path.parent.stat().st_ino}"  # a new group of the same path has another folder
            if counted(name) is not None:
                return name
    return ""


def counted(name: str) -> int | None:
    """Return the value of a counter; None if there is no such counter now."""
    path = Path(name.rpartition(":")[0])
    with contextlib.suppress(OSError, ValueError):  # the name may come from a damaged file
        if path.name in ("memory.events", "memory.oom_control", "vmstat") and path.is_file():
            found = _KILLS.search(path.read_bytes())
            if found and name == f"{path}:{path.parent.stat().st_ino}":
                return int(found[1])
    return None


class Death(NamedTuple):
    """A process that the kernel ended."""

    time: float
    pid: int
    """In the machine's own process namespace."""
    oom: bool
    """By the OOM killer; else by a fatal signal, such as a segmentation fault."""
    text: str


def deaths(path: Path = Path("/dev/kmsg")) -> list[Death]:
    """Return the deaths in the system log, oldest first; none where it may not be read."""
    found = []
    boot = time.time() - time.monotonic()
    for record in _records(path):
        head, _, text = record.partition(";")
        match = _OOM.search(text) or _FAULT.search(text)
        fields = head.split(",")
        if match and len(fields) > 2 and fields[2].isdigit():
            line = text.split("\n")[0]
            found.append(Death(boot + int(fields[2]) / 1e6, int(match[1]), match.re is _OOM, line))
    return found


def _records(path: Path) -> list[str]:
    records: list[str] = []
    with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=_nonblocking) as log:
        while len(records) < _MOST_RECORDS:
            with contextlib.suppress(BrokenPipeError):  # older records were overwritten while we read
                data = log.read(8192)
                if not data:
                    break
                records.append(data.decode("utf-8", "replace"))
    return records


def _nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
