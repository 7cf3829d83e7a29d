"""Names the recordings of a profile, and finds out which of them are still written.

A recording has two segments at most: ``NAME.jsonl``, which is written, and ``NAME.jsonl.1`` from before it. The name
begins with the time, so that names sort by age, and ends in random digits: process ids come again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ipygpumem.flight_recorder.entries import Header
from ipygpumem.flight_recorder.machine import Machine, State, process_started

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Segments:
    """The files of one recording."""

    current: Path

    @property
    def name(self) -> str:
        """How the recording is called."""
        return self.current.name

    @property
    def older(self) -> Path:
        """The segment from before the current one."""
        return self.current.with_name(self.current.name + ".1")

    @property
    def size_bytes(self) -> int:
        """Bytes of both."""
        return sum(_stat(path, "st_size") for path in (self.older, self.current))

    @property
    def written_at(self) -> float:
        """Unix time of the last write; 0 where it is not known."""
        return max(_stat(path, "st_mtime") for path in (self.older, self.current))

    @property
    def current_number(self) -> int:
        """The file system's number of the current one; another after each rotation."""
        return _stat(self.current, "st_ino")

    def delete(self) -> None:
        """Delete both; whichever is gone already, or may not be deleted, is left."""
        for path in (self.current, self.older):
            with contextlib.suppress(OSError):
                path.unlink()


def _stat(path: Path, name: str) -> int:
    try:
        return int(getattr(path.stat(), name))
    except OSError:
        return 0


def new(folder: Path) -> Segments:
    """Return where a recording that begins now goes; the folder is made if need be (``OSError``)."""
    _make_private(folder)
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Segments(folder / f"{started}-{os.getpid()}-{secrets.token_hex(3)}{_SUFFIX}")


def _make_private(folder: Path) -> None:
    """Make ``folder`` and what is above it, and leave only its owner a right to it (``OSError``).

    Where the file system knows no such rights, it stays as it is.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # it was there before
        with contextlib.suppress(PermissionError):
            folder.chmod(0o700)


def listed(folder: Path) -> list[Segments]:
    """Return the recordings of a folder, the newest first; none if there is no such folder."""
    try:
        names = {path.name.removesuffix(".1") for path in folder.iterdir()}
    except OSError:
        return []
    return [Segments(folder / name) for name in sorted(names, reverse=True) if name.endswith(_SUFFIX)]


def lock(descriptor: int) -> None:
    """Lock an open file for as long as this process has it open; where that is not to be had, do nothing."""
    if fcntl is not None:
        for _ in range(3):
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.001)  # a reader that just asks holds it for microseconds


def is_locked(path: Path) -> bool | None:
    """Whether somebody holds the lock of a recording; None where that is not known."""
    if fcntl is None:
        return None
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return False


def state(header: Header, path: Path, here: Machine) -> State:
    """Return whether the kernel of a recording still runs.

    Processes that are seen from here are known by their ids and times of start. For another container or machine
    there is the file's lock, which the system gives up with the process.
    """
    if (header.boot, header.namespace) == (here.boot, here.namespace):
        return "alive" if process_started(header.pid) == header.process_started else "dead"
    locked = is_locked(path)
    return "unknown" if locked is None else "alive" if locked else "dead"
