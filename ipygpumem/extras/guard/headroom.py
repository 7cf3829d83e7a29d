"""Reads the memory left to this process often: 30 us, where parsing all control groups takes 300
us.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import psutil

from ipygpumem.probes import cgroup
from ipygpumem.probes.cgroup import Version
from ipygpumem.probes.pages import PAGE_BYTES
from ipygpumem.units import KIB, format_bytes

_LINE_BYTES, _FILE_BYTES = 1 << 8, 1 << 12
"""Sizes of buffers, for one line and for the figures in a file. Python needs no new memory for the
first.
"""


class Figures(NamedTuple):
    """The memory left to this process."""

    available_bytes: int
    """Memory that its processes can use before the system ends one."""
    private_bytes: int
    """Private pages in RAM; the whole RSS where the system does not distinguish them."""
    data_bytes: int | None
    """Private writable address space, counted by ``RLIMIT_DATA``, used or not; None except on
    Linux.
    """


class Headroom:
    """Reads the memory left, through descriptors that stay open until ``close``."""

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        self._files = contextlib.ExitStack()
        self._groups: list[tuple[Version, int, int, int]] = []
        """Each group with a limit: its limit, use and caches."""
        self._statm = self._meminfo = None
        with contextlib.suppress(OSError):  # not Linux: psutil reads both
            self._statm, self._meminfo = (
                self._open(root / "proc/self/statm"),
                self._open(root / "proc/meminfo"),
            )
        for version, folder in cgroup.folders(root):
            with contextlib.suppress(
                OSError, ValueError
            ):  # "max", or no such file: this group has no limit
                if int((folder / version.limit).read_text()) < cgroup.UNLIMITED:
                    limit, used, stat = (
                        self._open(folder / name)
                        for name in (version.limit, version.used, "memory.stat")
                    )
                    self._groups.append((version, limit, used, stat))
        sizes = [
            (int(_read(limit, _LINE_BYTES)), "the control group") for _, limit, _, _ in self._groups
        ]
        self.machine_bytes = int(psutil.virtual_memory().total + psutil.swap_memory().total)
        """A larger request is refused by Linux itself."""
        self.total_bytes, name = min([*sizes, (int(psutil.virtual_memory().total), "the machine")])
        self.name = f"{name}'s {format_bytes(self.total_bytes)}"
        """The memory that may run out, in words."""

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        self._files.callback(os.close, descriptor)
        return descriptor

    def now(self) -> Figures:
        """Return the current figures."""
        if self._statm is None or self._meminfo is None:
            memory = psutil.virtual_memory()
            swap = psutil.swap_memory()
            return Figures(
                int(memory.available + swap.free), int(psutil.Process().memory_info().rss), None
            )
        _, rss, shared, _, _, data = _read(self._statm, _LINE_BYTES).split()[:6]
        machine = _read(self._meminfo)
        free = [sum(_figure(machine, name) for name in (b"\nMemAvailable:", b"\nSwapFree:")) * KIB]
        with contextlib.suppress(OSError, ValueError):  # a group without its limit now
            for version, limit, used, stat in self._groups:
                caches = _read(stat)
                size = sum(
                    _figure(b"\n" + caches, b"\n%b " % name.encode()) for name in version.cache
                )
                free.append(
                    max(0, int(_read(limit, _LINE_BYTES)) - int(_read(used, _LINE_BYTES)) + size)
                )
        return Figures(min(free), (int(rss) - int(shared)) * PAGE_BYTES, int(data) * PAGE_BYTES)

    def data_bytes(self) -> int | None:
        """Return the private address space alone, in a tenth of the time."""
        if self._statm is None:
            return None
        pages = _read(self._statm, _LINE_BYTES).split()[5]
        return int(pages) * PAGE_BYTES

    def close(self) -> None:
        """Close the descriptors."""
        self._files.close()


def _read(descriptor: int, most_bytes: int = _FILE_BYTES) -> bytes:
    return os.pread(descriptor, most_bytes, 0)


def _figure(lines: bytes, label: bytes) -> int:
    """Return the number behind a label; 0 without it."""
    return int((lines.partition(label)[2].split(None, 1) or (0,))[0])
