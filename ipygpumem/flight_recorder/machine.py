"""Identifies a machine's run and a process: enough to tell a dead process from one that still runs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

State = Literal["alive", "dead", "unknown"]

_ROOT_NAMESPACE = "pid:[4026531836]"
"""The kernel's own, PROC_PID_INIT_INO: here process ids are those of the kernel's log."""


@dataclass(frozen=True)
class Machine:
    """One run of one machine, as a container sees it."""

    boot: str
    namespace: str
    host: str

    @property
    def sees_all_processes(self) -> bool:
        """Whether process ids here are those that the kernel itself uses."""
        return self.namespace == _ROOT_NAMESPACE


def this_machine() -> Machine:
    """Return where this process runs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux
        boot, namespace = str(round(psutil.boot_time(), -1)), ""
    return Machine(boot, namespace, socket.gethostname())


def process_started(pid: int) -> float | None:
    """Return when a process was started, in a unit of the system's own; None if there is no such process.

    On Linux these are ticks since the machine was started: a clock that is set does not change them.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else float(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
