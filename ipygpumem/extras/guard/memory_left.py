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

_LINE_BYTES = 1 << 8
"""Size of the buffer for one line: so small that Python needs no new memory for it."""
_FILE_BYTES = 1 << 12
"""Size of the buffer for a file of figures."""


class MemoryFigures(NamedTuple):
    """The memory left to this process."""

    available_bytes: int
    """Memory that its processes can use before the system ends one."""
    private_bytes: int
    """Private pages in RAM; the whole RSS where the system does not distinguish them."""
    data_bytes: int | None
    """Private writable address space, counted by ``RLIMIT_DATA``, used or not; None except on
    Linux.
    """


class _ProcFiles(NamedTuple):
    """Descriptors of Linux's files on this process and on the machine."""

    statm: int
    """``/proc/self/statm``: the pages of this process."""
    meminfo: int
    """``/proc/meminfo``: the memory of the machine."""


class _GroupFiles(NamedTuple):
    """Descriptors of the files of a control group that has a limit.

    ``version`` has the names of these files: ``limit``, ``used`` and ``stat``.
    """

    version: Version
    limit: int
    used: int
    stat: int

    def limit_bytes(self) -> int:
        """Return the group's limit.

        Raises:
            ValueError: it is "max": the limit was lifted after the file was opened.
        """
        return _number_in_file(self.limit)

    def available_bytes(self) -> int:
        """Return the memory left below the limit; caches count as left, because Linux frees them.

        Raises:
            ValueError: the limit was lifted.
        """
        figures = b"\n" + _read(self.stat)
        cache_bytes = 0
        for name in self.version.cache:
            cache_bytes += _figure(figures, b"\n%b " % name.encode())
        return max(0, self.limit_bytes() - _number_in_file(self.used) + cache_bytes)


class MemoryLeft:
    """Reads the memory left, through descriptors that stay open until ``close``.

    Args:
        root: the folder that contains ``proc`` and ``sys``; another one in tests.
    """

    def __init__(self, root: Path = cgroup.ROOT) -> None:
        self._files = contextlib.ExitStack()
        self._proc = self._open_proc(root)
        self._groups = self._open_groups(root)
        ram_bytes = int(psutil.virtual_memory().total)
        self.machine_bytes = ram_bytes + int(psutil.swap_memory().total)
        """A larger request is refused by Linux itself."""
        totals = [(group.limit_bytes(), "the control group") for group in self._groups]
        self.total_bytes, owner = min([(ram_bytes, "the machine"), *totals])
        self.name = f"{owner}'s {format_bytes(self.total_bytes)}"
        """The memory that may run out, in words: ``the machine's 16 GiB``."""

    def _open_proc(self, root: Path) -> _ProcFiles | None:
        """Open Linux's files on this process and the machine; None on other systems."""
        try:
            return _ProcFiles(
                self._open(root / "proc/self/statm"), self._open(root / "proc/meminfo")
            )
        except OSError:
            return None

    def _open_groups(self, root: Path) -> list[_GroupFiles]:
        """Open the files of each control group that limits this process."""
        groups = list[_GroupFiles]()
        for version, folder in cgroup.folders(root):
            # "max", or no such file: this group has no limit.
            with contextlib.suppress(OSError, ValueError):
                if int((folder / version.limit).read_text()) < cgroup.UNLIMITED:
                    limit = self._open(folder / version.limit)
                    used = self._open(folder / version.used)
                    stat = self._open(folder / "memory.stat")
                    groups.append(_GroupFiles(version, limit, used, stat))
        return groups

    def _open(self, path: Path) -> int:
        """Return a descriptor that ``close`` closes."""
        descriptor = os.open(path, os.O_RDONLY)
        self._files.callback(os.close, descriptor)
        return descriptor

    def now(self) -> MemoryFigures:
        """Return the current figures."""
        if self._proc is None:
            return _figures_of_psutil()
        # pages: address space, RSS, shared, code, libraries, data
        _, rss, shared, _, _, data = _read(self._proc.statm, _LINE_BYTES).split()[:6]
        machine = _read(self._proc.meminfo)
        available_kib = _figure(machine, b"\nMemAvailable:") + _figure(machine, b"\nSwapFree:")
        available_bytes = available_kib * KIB
        for group in self._groups:
            # A group whose limit was lifted since has "max" there; the outer groups still count.
            with contextlib.suppress(OSError, ValueError):
                available_bytes = min(available_bytes, group.available_bytes())
        private_bytes = (int(rss) - int(shared)) * PAGE_BYTES
        return MemoryFigures(available_bytes, private_bytes, int(data) * PAGE_BYTES)

    def data_bytes(self) -> int | None:
        """Return ``MemoryFigures.data_bytes`` alone, in a tenth of the time."""
        if self._proc is None:
            return None
        pages = _read(self._proc.statm, _LINE_BYTES).split()[5]  # data, as in ``now``
        return int(pages) * PAGE_BYTES

    def close(self) -> None:
        """Close the descriptors."""
        self._files.close()


def _figures_of_psutil() -> MemoryFigures:
    """Return the current figures of a system without Linux's files."""
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    rss_bytes = int(psutil.Process().memory_info().rss)
    return MemoryFigures(
        available_bytes=int(memory.available + swap.free),
        private_bytes=rss_bytes,
        data_bytes=None,
    )


def _read(descriptor: int, size_bytes: int = _FILE_BYTES) -> bytes:
    """Return the first ``size_bytes`` of an open file, from its beginning at each call."""
    return os.pread(descriptor, size_bytes, 0)


def _number_in_file(descriptor: int) -> int:
    """Return the number that is a file's only line."""
    return int(_read(descriptor, _LINE_BYTES))


def _figure(lines: bytes, label: bytes) -> int:
    """Return the number after a label such as ``SwapFree:``; 0 if the label is not there."""
    _, _, after = lines.partition(label)
    words = after.split(None, 1)
    if not words:
        return 0
    return int(words[0])
