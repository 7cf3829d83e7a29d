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


class MemoryLeft:
    """Reads the memory left, through descriptors that stay open until ``close``."""

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        self._files = contextlib.ExitStack()
        self._groups: list[tuple[Version, int, int, int]] = []
        """Each group with a limit: its limit, use and caches."""
        self._statm: int | None = None
        self._meminfo: int | None = None
        with contextlib.suppress(OSError):  # not Linux: psutil reads both
            statm = self._open(root / "proc/self/statm")
            self._meminfo = self._open(root / "proc/meminfo")
            self._statm = statm
        for version, folder in cgroup.folders(root):
            # "max", or no such file: this group has no limit.
            with contextlib.suppress(OSError, ValueError):
                if int((folder / version.limit).read_text()) < cgroup.UNLIMITED:
                    limit = self._open(folder / version.limit)
                    used = self._open(folder / version.used)
                    stat = self._open(folder / "memory.stat")
                    self._groups.append((version, limit, used, stat))
        ram_bytes = int(psutil.virtual_memory().total)
        self.machine_bytes = ram_bytes + int(psutil.swap_memory().total)
        """A larger request is refused by Linux itself."""
        owners_by_size = [(ram_bytes, "the machine")]
        for _, limit, _, _ in self._groups:
            owners_by_size.append((_number_in_file(limit), "the control group"))
        self.total_bytes, name = min(owners_by_size)
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
            rss_bytes = int(psutil.Process().memory_info().rss)
            return Figures(int(memory.available + swap.free), rss_bytes, None)
        _, rss, shared, _, _, data = _read(self._statm, _LINE_BYTES).split()[:6]
        machine = _read(self._meminfo)
        available_kib = _figure(machine, b"\nMemAvailable:") + _figure(machine, b"\nSwapFree:")
        free = [available_kib * KIB]
        for version, limit, used, stat in self._groups:
            # "max", since the limit was lifted: the outer groups still count.
            with contextlib.suppress(OSError, ValueError):
                caches = b"\n" + _read(stat)
                cache_bytes = 0
                for name in version.cache:
                    cache_bytes += _figure(caches, b"\n%b " % name.encode())
                free.append(max(0, _number_in_file(limit) - _number_in_file(used) + cache_bytes))
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


def _number_in_file(descriptor: int) -> int:
    """Return the number that is a file's only line."""
    return int(_read(descriptor, _LINE_BYTES))


def _figure(lines: bytes, label: bytes) -> int:
    """Return the number behind a label; 0 without it."""
    _, _, after = lines.partition(label)
    words = after.split(None, 1)
    if not words:
        return 0
    return int(words[0])
