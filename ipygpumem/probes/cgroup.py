"""Reads this process's control groups: memory limits, and a container's share of the host.

Limits nest: a group has no more than any enclosing group. Versions 1 and 2 of the kernel's
interface and mixtures of both are supported (cgroups(7), and the kernel's cgroup-v2 and
cgroup-v1/memory documents).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
"""The root of the file system; tests use a folder of theirs instead."""
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page, beyond any real memory."""


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a limit, and the memory charged to it by all its processes."""

    limit_bytes: int
    used_bytes: int
    """Memory of all processes of the group, caches included."""
    cache_bytes: int = 0
    """Page cache and kernel caches that the kernel reclaims before the group runs out of memory."""
    mapped_bytes: int = 0
    """The part of the page cache mapped by processes: libraries, and files read through ``mmap``.
    """

    @property
    def available_bytes(self) -> int:
        """Memory that the group's processes can still allocate; caches count as free, because the
        kernel reclaims them first.
        """
        return max(0, self.limit_bytes - self.used_bytes + self.cache_bytes)


class Version(NamedTuple):
    """Names of files and figures in one version of the kernel's interface."""

    limit: str
    """The file of the limit."""
    used: str
    """The file of the memory charged to the group."""
    cache: tuple[str, ...]
    """Figures in ``memory.stat`` whose sum is the cache that can be reclaimed."""
    mapped: str
    """The figure in ``memory.stat`` for the mapped part of the page cache."""
    events: str
    """The file of the counter of OOM kills."""


V1 = Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "total_mapped_file",
    "memory.oom_control",
)
V2 = Version(
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
    "file_mapped",
    "memory.events",
)


def limits(root: Path = ROOT) -> list[ControlGroup]:
    """Return the groups of this process that have a limit, the innermost first; none except on
    Linux.
    """
    groups = list[ControlGroup]()
    for version, folder in folders(root):
        # A group without a limit has the text "max" (ValueError), or no such file.
        with contextlib.suppress(OSError, ValueError):
            limit_bytes = int((folder / version.limit).read_text())
            if limit_bytes < UNLIMITED:
                groups.append(_group_with_figures(version, folder, limit_bytes))
    return groups


def folders(root: Path = ROOT) -> Iterator[tuple[Version, Path]]:
    """Yield the folder of each group of this process, and the version of its files.

    They come from the innermost group outwards, one tree of groups after the other.
    """
    for version, path in memberships(root):
        for folder in groups_around(root, version, path):
            yield version, folder


def tightest(root: Path = ROOT) -> ControlGroup | None:
    """Return the group of this process with the smallest limit, or None without a limit."""
    return min(limits(root), key=lambda group: group.limit_bytes, default=None)


def _group_with_figures(version: Version, folder: Path, limit_bytes: int) -> ControlGroup:
    """Return the group of a folder; OSError or ValueError if its usage cannot be read."""
    used_bytes = int((folder / version.used).read_text())
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # without the file no caches are assumed
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            figures[name] = int(value)
    cache_bytes = sum(figures.get(name, 0) for name in version.cache)
    mapped_bytes = figures.get(version.mapped, 0)
    return ControlGroup(limit_bytes, used_bytes, min(cache_bytes, used_bytes), mapped_bytes)


def groups_around(root: Path, version: Version, path: str) -> Iterator[Path]:
    """Yield the folder of the group ``path``, and those of the groups around it, outwards as far as
    they are visible.

    For the group ``/user.slice/jupyter`` these are ``/sys/fs/cgroup/user.slice/jupyter``,
    ``/sys/fs/cgroup/user.slice`` and ``/sys/fs/cgroup``.

    Args:
        root: the root of the file system.
        version: the version of the group's tree.
        path: the path of a group within its tree, as in ``memberships``.
    """
    for top_group, mounted_at in mounts(root, version):
        mount = root / mounted_at.lstrip("/")
        group = PurePosixPath(path)
        if ".." in group.parts:  # the process was moved out of its visible part of the tree
            yield mount
            continue
        # In a container without a namespace for groups, the path is the host's, as
        # /docker/1f2e/jupyter, and /docker/1f2e is mounted: only the end /jupyter has a folder.
        visible_path = PurePosixPath()
        if group.is_relative_to(top_group):
            visible_path = group.relative_to(top_group)
        for folder in [visible_path, *visible_path.parents]:
            yield mount / folder


def memberships(root: Path) -> Iterator[tuple[Version, str]]:
    """Yield, for each tree of groups that may limit memory, its version and the path of this
    process's group in it, such as ``/user.slice``.
    """
    for line in _lines(root / "proc/self/cgroup"):
        # 4:memory:/user.slice in version 1, 0::/user.slice in version 2
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if "memory" in controllers.split(","):
            yield V1, path
        elif not controllers and path:
            yield V2, path


def mounts(root: Path, version: Version) -> Iterator[tuple[str, str]]:
    """Yield each mount of a tree of groups: the path of the group at its top (``/`` outside of
    containers), and the folder, such as ``/sys/fs/cgroup``.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        # number, parent, device, top, folder, options ... " - " kind, source, options
        mount, _, file_system = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) >= 5 and _limits_memory(file_system, version):
            yield fields[3], fields[4]


def _limits_memory(file_system: str, version: Version) -> bool:
    """Return True for a mounted tree of groups that can limit memory; ``file_system`` has its kind,
    its source and its options.
    """
    kind, _, source_and_options = file_system.partition(" ")
    if version is V2:
        return kind == "cgroup2"
    _, _, options = source_and_options.partition(" ")
    return kind == "cgroup" and "memory" in options.replace(" ", ",").split(",")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it is not readable."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
