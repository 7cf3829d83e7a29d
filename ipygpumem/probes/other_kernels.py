"""Finds the other Jupyter kernels of this user, on Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ipygpumem.probes.children import descendants, size_of

_SESSION = b"JPY_SESSION_NAME="
"""Variable in which Jupyter's server gives a kernel the path of its notebook."""


class OtherKernel(NamedTuple):
    """Another Jupyter kernel of this user."""

    pid: int
    memory_bytes: int
    """Its memory in RAM."""
    is_shared_out: bool
    """True if shared pages are divided among their processes (PSS); False if they count fully
    (RSS).
    """
    notebook: str
    """The path of its notebook; empty if the kernel's environment does not have it."""


def other_kernels() -> list[OtherKernel]:
    """Return the other Jupyter kernels of this user, the largest first; none without /proc.

    Kernels that this kernel's own code has started do not count: they are its child processes.
    """
    try:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    except OSError:
        return []
    ours = {os.getpid(), *descendants()}
    kernels = list[OtherKernel]()
    for pid in pids:
        if pid in ours or not is_kernel(_command_words(pid)) or not _is_same_user(pid):
            continue
        size = size_of(pid)
        if size is not None:
            kernels.append(OtherKernel(pid, *size, notebook_of(pid)))
    kernels.sort(key=attrgetter("memory_bytes"), reverse=True)
    return kernels


def is_kernel(words: Sequence[str]) -> bool:
    """Return True for the command line of a Jupyter kernel, in which Python runs ipykernel.

    ``words`` are as in ``python -m ipykernel_launcher -f kernel-1.json``.
    """
    for word in words:
        if word == "ipykernel" or word.endswith(("kernel_launcher", "kernel_launcher.py")):
            return True
    return False


def notebook_of(pid: int) -> str:
    """Return the path of the notebook that a kernel of this user runs; empty if it is not known."""
    if not _is_same_user(pid):
        return ""
    with contextlib.suppress(OSError):  # it has ended
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        for variable in environment.split(b"\0"):
            if variable.startswith(_SESSION):
                return os.fsdecode(variable.removeprefix(_SESSION))
    return ""


def _is_same_user(pid: int) -> bool:
    """Return True for a process of this user.

    Root may read any process's environment; this check keeps it to its own processes.
    """
    with contextlib.suppress(OSError, AttributeError):  # it has ended; Windows
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    return False


def _command_words(pid: int) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    with contextlib.suppress(OSError):
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return os.fsdecode(command_line).split("\0")
    return []
