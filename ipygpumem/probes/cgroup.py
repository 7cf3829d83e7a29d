"""Reads this process's control groups: memory limits, a container's share of the host, and OOM
kills.

Limits nest: a group has no more than any enclosing group. Versions 1 and 2 of the kernel's
interface and mixtures of both are supported (cgroups(7), and the kernel's cgroup-v2 and
cgroup-v1/memory documents). Kills are counted per group and for the whole machine
(``/proc/vmstat``), and named in the system log (``/dev/kmsg``, where readable) as
``priority,number,microseconds,flags;text``, with the time since boot.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ipygpumem.records import without_waiting

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page, beyond any real memory."""
_KILLS = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)
_OOM = re.compile(r"[Oo]ut of memory.*?: Kill(?:ed)? process (\d+) ")
_FAULT = re.compile(
    r"(?:^|: )[^\[\]]+\[(\d+)\]:? (?:segfault|general protection|trap|bad frame|unhandled signal)"
)
_MOST_RECORDS = 100_000


@dataclass(frozen=True)
class Group:
    """A control group with a limit, and the memory charged to it by all its processes."""

    limit_bytes: int
    used_bytes: int
    cache_bytes: int = 0
    """Page cache and kernel caches that the kernel reclaims before the group runs out of memory."""
    mapped_bytes: int = 0
    """The part of the page cache mapped by processes: libraries, and files read through ``mmap``.
    """

    @property
    def available_bytes(self) -> int:
        """Memory that the group's processes can still allocate."""
        return max(0, self.limit_bytes - self.used_bytes + self.cache_bytes)


class Version(NamedTuple):
    """File and figure names of one version of the interface."""

    limit: str
    used: str
    cache: tuple[str, ...]
    mapped: str
    events: str


_V1 = Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "total_mapped_file",
    "memory.oom_control",
)
_V2 = Version(
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
    "file_mapped",
    "memory.events",
)


def limits(root: Path = ROOT) -> list[Group]:
    """Return the groups of this process that have a limit, the innermost first; none except on
    Linux.
    """
    groups = list[Group]()
    for version, folder in folders(root):
        # "max", or no such file: this group has no limit.
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / version.limit).read_text())
            if limit < UNLIMITED:
                groups.append(_group(version, folder, limit))
    return groups


def folders(root: Path = ROOT) -> Iterator[tuple[Version, Path]]:
    """Yield the folders of this process's groups with their files' names, from the innermost
    outwards.
    """
    for version, path in _memberships(root):
        for folder in _around(root, version, path):
            yield version, folder


def tightest(root: Path = ROOT) -> Group | None:
    """Return the group of this process with the smallest limit, or None without a limit."""
    return min(limits(root), key=lambda group: group.limit_bytes, default=None)


def _group(version: Version, folder: Path, limit: int) -> Group:
    """Return a group with its figures."""
    used = int((folder / version.used).read_text())
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # without the file no caches are assumed
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            figures[name] = int(value)
    cache = sum(figures.get(name, 0) for name in version.cache)
    return Group(limit, used, min(cache, used), figures.get(version.mapped, 0))


def _around(root: Path, version: Version, path: str) -> Iterator[Path]:
    """Yield the folder of each group of this process, from the innermost to the outermost visible
    one.
    """
    for top, mounted in _mounts(root, version):
        mount = root / mounted.lstrip("/")
        group = PurePosixPath(path)
        if ".." in group.parts:  # the process was moved out of its visible part of the tree
            yield mount
            continue
        # In a container without a namespace for groups, the path is the host's and only its end is
        # mounted.
        end = PurePosixPath()
        if group.is_relative_to(top):
            end = group.relative_to(top)
        for folder in [end, *end.parents]:
            yield mount / folder


def _memberships(root: Path) -> Iterator[tuple[Version, str]]:
    """Yield the paths of this process's groups in the trees that may limit memory."""
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if "memory" in controllers.split(","):
            yield _V1, path
        elif not controllers and path:
            yield _V2, path


def _mounts(root: Path, version: Version) -> Iterator[tuple[str, str]]:
    """Yield the mounts of a tree: the group at its top, and the folder."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) >= 5 and _is_tree(file_system, version):
            yield fields[3], fields[4]


def _is_tree(file_system: str, version: Version) -> bool:
    """Return True if a mount's file system (its kind, source and options) is a tree of groups that
    limits memory.
    """
    kind, _, source_and_options = file_system.partition(" ")
    if version is _V2:
        return kind == "cgroup2"
    _, _, options = source_and_options.partition(" ")
    return kind == "cgroup" and "memory" in options.replace(" ", ",").split(",")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it is not readable."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


# -- processes that the kernel ended ------------------------------------------------------------


def counter(root: Path = ROOT) -> str:
    """Return a name for the counter of this process's control group, else of the machine; empty
    without either.
    """
    paths = list[Path]()
    for version, group in _memberships(root):
        for folder in islice(_around(root, version, group), 1):
            paths.append(folder / version.events)
    for path in (*paths, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            name = _counter_name(path)
            if counted(name) is not None:
                return name
    return ""


def _counter_name(path: Path) -> str:
    """Return the name of the counter in a file: a new group of the same path has another
    folder.
    """
    return f"{path}:{path.parent.stat().st_ino}"


def counted(name: str) -> int | None:
    """Return the value of a counter; None if it does not exist now."""
    path = Path(name.rpartition(":")[0])
    if path.name not in ("memory.events", "memory.oom_control", "vmstat"):
        return None
    with contextlib.suppress(OSError, ValueError):  # the name may come from a damaged file
        kills = _KILLS.search(path.read_bytes())
        if kills and name == _counter_name(path):
            return int(kills[1])
    return None


def recorded(name: str, root: Path = ROOT) -> int | None:
    """Return the value of a counter named in a file; only the kernel's own files are
    read for it.
    """
    path = Path(name.rpartition(":")[0])
    if ".." in path.parts:
        return None
    if path == root / "proc/vmstat":
        return counted(name)
    for _, mounted in (*_mounts(root, _V1), *_mounts(root, _V2)):
        if path.is_relative_to(root / mounted.lstrip("/")):
            return counted(name)
    return None


class Kills:
    """Counts processes ended by the OOM killer in this process's control group, else on the
    machine.
    """

    def __init__(self, root: Path = ROOT) -> None:
        name = counter(root)
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

    def new(self) -> int:
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
    for record in _records(path):
        head, _, text = record.partition(";")
        match = _OOM.search(text) or _FAULT.search(text)
        fields = head.split(",")
        if match and len(fields) > 2 and fields[2].isdigit():
            died_at = boot + int(fields[2]) / 1e6
            line = text.split("\n")[0]
            in_log.append(Death(died_at, int(match[1]), match.re is _OOM, line))
    return in_log


def _records(path: Path) -> list[str]:
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
