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
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page, beyond any real memory."""


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
                groups.append(_group_with_figures(version, folder, limit))
    return groups


def folders(root: Path = ROOT) -> Iterator[tuple[Version, Path]]:
    """Yield the folders of this process's groups with their files' names, from the innermost
    outwards.
    """
    for version, path in memberships(root):
        for folder in groups_around(root, version, path):
            yield version, folder


def tightest(root: Path = ROOT) -> Group | None:
    """Return the group of this process with the smallest limit, or None without a limit."""
    return min(limits(root), key=lambda group: group.limit_bytes, default=None)


def _group_with_figures(version: Version, folder: Path, limit: int) -> Group:
    """Return a group with its figures."""
    used = int((folder / version.used).read_text())
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # without the file no caches are assumed
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            figures[name] = int(value)
    cache = sum(figures.get(name, 0) for name in version.cache)
    return Group(limit, used, min(cache, used), figures.get(version.mapped, 0))


def groups_around(root: Path, version: Version, path: str) -> Iterator[Path]:
    """Yield the folder of each group of this process, from the innermost to the outermost visible
    one.
    """
    for top, mounted in mounts(root, version):
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


def memberships(root: Path) -> Iterator[tuple[Version, str]]:
    """Yield the path of this process's group in each tree that may limit memory, such as
    ``/user.slice``.
    """
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if "memory" in controllers.split(","):
            yield V1, path
        elif not controllers and path:
            yield V2, path


def mounts(root: Path, version: Version) -> Iterator[tuple[str, str]]:
    """Yield each mount of a tree: the path of the group at its top, and the folder."""
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
    if version is V2:
        return kind == "cgroup2"
    _, _, options = source_and_options.partition(" ")
    return kind == "cgroup" and "memory" in options.replace(" ", ",").split(",")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it is not readable."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
