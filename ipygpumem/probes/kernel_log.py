"""Reads in the kernel's log which processes it ended, where it may be read (``/dev/kmsg``, Linux).

Each record is ``priority,number,microseconds,flags;text`` (Documentation/ABI/testing/dev-kmsg); the time counts from
the start of the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_OOM = re.compile(r"[Oo]ut of memory.*?: Kill(?:ed)? process (\d+) ")
_FAULT = re.compile(r"(?:^|: )[^\[\]]+\[(\d+)\]:? (?:segfault|general protection|trap|bad frame|unhandled signal)")
_MOST_RECORDS = 100_000


class Death(NamedTuple):
    """A process that the kernel ended."""

    time: float
    pid: int
    """As the kernel counts: in a container the process itself has another one."""
    oom: bool
    """By the OOM killer; else by a fault of its own, such as a segmentation fault."""
    text: str


def deaths(path: Path = Path("/dev/kmsg")) -> list[Death]:
    """Return the deaths in the kernel's log, oldest first; none where it may not be read."""
    found = []
    began = time.time() - time.monotonic()
    for record in _records(path):
        head, _, text = record.partition(";")
        fields = head.split(",")
        for pattern in (_OOM, _FAULT):
            match = pattern.search(text)
            if match and len(fields) > 2 and fields[2].isdigit():
                line = text.split("\n")[0]
                found.append(Death(began + int(fields[2]) / 1e6, int(match[1]), pattern is _OOM, line))
                break
    return found


def _records(path: Path) -> list[str]:
    records: list[str] = []
    with contextlib.suppress(OSError):  # not there, or not for everybody
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            while len(records) < _MOST_RECORDS:
                try:
                    data = os.read(descriptor, 8192)
                except BrokenPipeError:  # older records were overwritten meanwhile
                    continue
                if not data:
                    break
                records.append(data.decode("utf-8", "replace"))
        finally:
            os.close(descriptor)
    return records
