"""Finds the shared memory segments of this process: files in /dev/shm and memfds, on Linux."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ipygpumem.units import format_bytes

MOUNT = "/dev/shm"  # noqa: S108  # nothing is written there
BLOCK_BYTES = 512
"""Unit of ``st_blocks``; see inode(7)."""
_CLOCK_SECONDS = 0.1
"""Seconds by which the clock of the file system may be behind that of ``time.time``."""


class SegmentsSize(NamedTuple):
    """The size of shared memory segments."""

    size_bytes: int
    """All segments."""
    memfd_bytes: int
    """Memfds among them."""


class Segments:
    """The segments that this process has mapped or open, or has made and not unlinked.

    A segment made since this object was, and seen open at a scan, counts until it is unlinked.
    """

    def __init__(self) -> None:
        self.descriptor, self._device = _open_mount()
        """A descriptor of the folder; None if there is none."""
        self._device_of_memfds = _device_of_memfds()
        self._made_after = time.time() - _CLOCK_SECONDS
        """Files changed later may have been made by this process since this object was."""
        self._names: dict[int, str] = {}
        """Names by inode of the segments that this process has opened and that may outlive it."""
        self._abandoned_sizes: dict[str, int] = {}
        """Bytes by name of the segments that nothing of this process maps or has open, and that are
        not unlinked; as of the last scan.
        """

    @property
    def note(self) -> str:
        """The line that frees segments to which no object refers; empty if there are none."""
        return _line_that_unlinks(self._abandoned_sizes)

    def scan(self, used_bytes: int) -> SegmentsSize:
        """Return the size of all segments, and update ``note``.

        Args:
            used_bytes: the bytes of all files in the folder, other processes' too.
        """
        file_sizes, memfd_sizes = self._open_sizes()
        closed_sizes = self._closed_sizes(file_sizes)
        mapped_sizes: dict[int, int] | None = None  # reading them takes long
        if closed_sizes:
            mapped_sizes = self._mapped_sizes()
        self._abandoned_sizes = {}
        for inode, size in closed_sizes.items():
            if mapped_sizes is not None and inode not in mapped_sizes:
                self._abandoned_sizes[self._names[inode]] = size
        file_sizes.update(closed_sizes)
        bytes_in_files = sum(file_sizes.values())
        bytes_in_memfds = sum(memfd_sizes.values())
        # The remaining files of the folder are other processes', or mapped here with a closed file.
        other_bytes = max(0, used_bytes - bytes_in_files)
        if other_bytes:
            if mapped_sizes is None:
                mapped_sizes = self._mapped_sizes()
            only_mapped = [size for inode, size in mapped_sizes.items() if inode not in file_sizes]
            other_bytes = min(other_bytes, sum(only_mapped))
        return SegmentsSize(bytes_in_files + bytes_in_memfds + other_bytes, bytes_in_memfds)

    def _open_sizes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes by inode of the open files in the folder, and of the open memfds.

        Also store the names of files that this process may have made.
        """
        file_sizes: dict[int, int] = {}
        memfd_sizes: dict[int, int] = {}
        for entry in os.scandir("/proc/self/fd"):
            try:  # no ``suppress``, which calls three functions for each open file
                file = os.fstat(int(entry.name))
                if not stat.S_ISREG(file.st_mode):
                    continue
                if file.st_dev == self._device:
                    file_sizes[file.st_ino] = file.st_blocks * BLOCK_BYTES
                    # A new file that has a name: it stays when this process has closed it.
                    if file.st_nlink and file.st_ctime >= self._made_after:
                        target = str(Path(entry.path).readlink())
                        self._names[file.st_ino] = target.removeprefix(f"{MOUNT}/")
                elif file.st_dev == self._device_of_memfds:
                    memfd_sizes[file.st_ino] = file.st_blocks * BLOCK_BYTES
            except OSError:  # closed, such as the one that listed the folder
                continue
        return file_sizes, memfd_sizes

    def _closed_sizes(self, open_sizes: Mapping[int, int]) -> dict[int, int]:
        """Return the bytes by inode of the segments that this process has closed and not unlinked,
        and forget the unlinked ones.

        ``open_sizes`` are the open segments, by inode.
        """
        closed_sizes = dict[int, int]()
        for inode, name in list(self._names.items()):
            if inode in open_sizes or "/" in name:
                continue
            size = linked_bytes(name, inode)
            if size:
                closed_sizes[inode] = size
            else:
                del self._names[inode]
        return closed_sizes

    def _mapped_sizes(self) -> dict[int, int]:
        """Return the bytes by inode of each mapped file in /dev/shm: its pages in memory, or the
        size of its mappings if the file was unlinked, so that its pages cannot be counted.
        """
        device = f"{os.major(self._device):02x}:{os.minor(self._device):02x}".encode()
        paths: dict[int, Path] = {}
        file_sizes: dict[int, int] = {}
        # Line by line: the whole text takes 1 MiB with torch, which the next reading of RSS would
        # show as growth of the user's code.
        with Path("/proc/self/maps").open("rb") as maps:
            for line in maps:
                # addresses, permissions, offset, device, inode, path
                fields = line.rstrip(b"\n").split(None, 5)
                if fields[3] != device or len(fields) < 6:  # a line without a path
                    continue
                start, _, end = fields[0].partition(b"-")
                inode = int(fields[4])
                paths[inode] = Path(os.fsdecode(fields[5]))
                file_sizes[inode] = file_sizes.get(inode, 0) + int(end, 16) - int(start, 16)
        for inode, path in paths.items():
            with contextlib.suppress(OSError):
                file = path.stat()
                if (file.st_dev, file.st_ino) == (self._device, inode):
                    file_sizes[inode] = file.st_blocks * BLOCK_BYTES
        return file_sizes

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None


def linked_bytes(segment: str, inode: int | None = None) -> int | None:
    """Return the bytes of a shared memory segment; 0 if it has been unlinked, and None on systems
    that do not show it.

    Args:
        segment: its name, as in ``SharedMemory.name``.
        inode: its inode number: another segment that now has the name does not count.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        file = Path(MOUNT, segment).stat()
        if inode is None or inode == file.st_ino:
            return file.st_blocks * BLOCK_BYTES
    return 0


def _line_that_unlinks(segments: Mapping[str, int]) -> str:
    """Return the note with the line that unlinks segments, given as sizes by name; empty without
    any.
    """
    if not segments:
        return ""
    lines = "; ".join(f"SharedMemory({name!r}).unlink()" for name in segments)
    size = format_bytes(sum(segments.values()))
    module = "multiprocessing.shared_memory"
    return f"{size} stay until you unlink them: from {module} import SharedMemory; {lines}"


def _open_mount() -> tuple[int | None, int]:
    """Return a descriptor of the folder and its device number; None and 0 if there is none."""
    try:
        mount = os.open(MOUNT, os.O_RDONLY)
        os.fstatvfs(mount)  # every scan needs it
    except (OSError, AttributeError):  # not Linux
        return None, 0
    return mount, os.fstat(mount).st_dev


@functools.cache
def _device_of_memfds() -> int | None:
    """Return the device number of the kernel's own mount, on which all memfds are; None if the
    system has no memfds.
    """
    create = getattr(os, "memfd_create", None)
    if create is None:
        return None
    with contextlib.suppress(OSError):
        file = create("ipygpumem")
        try:
            return os.fstat(file).st_dev
        finally:
            os.close(file)
    return None
