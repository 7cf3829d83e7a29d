"""Ends what a forked child still shares with its parent: open files and shared memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path

from ipygpumem.units import MIB

_LARGEST_COPY = 256 * MIB
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ (\d+) *(.*)")
_MEMORY = ("/dev/shm/", "/dev/zero")  # noqa: S108  # what mappings are called there
_FIXED = 0x10
"""MAP_FIXED: in the place of what is there."""


def unshare() -> None:
    """Give this process its own places in open files, and its own memory."""
    if Path("/proc/self/maps").exists():
        _reopen_files()
        _copy_shared_memory()


def _reopen_files() -> None:
    """Open each file anew at its place, which would be shared. What is only written goes nowhere."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # numbers, and no files
        descriptor = int(name)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                continue
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            only_written = flags & os.O_ACCMODE == os.O_WRONLY
            place = os.lseek(descriptor, 0, os.SEEK_CUR)
            own = os.open(os.devnull if only_written else f"/proc/self/fd/{descriptor}", flags & ~os.O_APPEND)
            if not only_written:
                os.lseek(own, place, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(own)
        except OSError:  # closed by now (that of the folder), or not ours to open
            continue


def _copy_shared_memory() -> None:
    """Replace each mapping that other processes see by a private one with the same contents.

    One that is too large to be copied stays as it is, if it has no file any more.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        match = _MAPPING.fullmatch(line)
        if match is None or match[3][:2] != "rw" or match[3][3] != "s":
            continue
        start, end, path = int(match[1], 16), int(match[2], 16), match[6]
        if path.startswith("/dev/") and not path.startswith(_MEMORY):
            continue  # a device's
        file = _opened(path, int(match[5]))
        if file is not None:  # a private mapping copies what is written, when it is
            library.mmap(start, end - start, access, mmap.MAP_PRIVATE | _FIXED, file, int(match[4], 16))
            os.close(file)
        elif end - start <= _LARGEST_COPY:
            contents = ctypes.string_at(start, end - start)
            library.mmap(start, end - start, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
            ctypes.memmove(start, contents, len(contents))


def _opened(path: str, number: int) -> int | None:
    """Return a descriptor of the file at ``path``, if it is the one with that inode."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # it has no name any more
        return None
    if os.fstat(file).st_ino == number:
        return file
    os.close(file)
    return None
