"""Reads host memory outside this process's RSS: shared memory segments and child processes, on
Linux.

Both are devices of their own, ``shm`` and ``children``, and exist once there are any. At every
boundary of a span a few system calls find out whether something may have changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ipygpumem.probes import Probe
from ipygpumem.probes.children import NOT_SHARED_OUT, children, descendants, pages, size_of
from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.segments import Segments
from ipygpumem.records import Reading
from ipygpumem.units import MIB

_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT if hasattr(os, "waitid") else 0
"""How ``waitid`` looks at a child and leaves it as it is."""
_State = tuple[int, bytes, int]
"""Used blocks of the mount, pages of address space if there are any, and number of open files."""


class OutsideProbe(Probe):
    """Shared memory segments of this process, ``shm``, and the PSS of all its descendants,
    ``children``.

    Segments are files in /dev/shm and memfds that the process has mapped or open. Their pages count
    whether the process has touched them or not; touched ones are part of its RSS, too. A segment
    made since the probe was, and seen open at a boundary of a span, counts until it is unlinked.
    """

    sampled = False

    def __init__(self) -> None:
        self._segments = Segments()
        self._lists_children = Path(f"/proc/self/task/{os.getpid()}/children").exists()
        self._state: _State | None = None
        self._children_state: list[object] = []
        self._shm: tuple[Reading, ...] = ()
        self._children: tuple[Reading, ...] = ()

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        # The screens are here, because every boundary of a span takes them.
        if self._segments.descriptor is not None:
            mount = os.fstatvfs(self._segments.descriptor)
            used = mount.f_blocks - mount.f_bfree
            size = b""
            if used:  # a mapping need not leave an open file
                file = os.open("/proc/self/statm", os.O_RDONLY)
                size = os.read(file, 200).partition(b" ")[0]
                os.close(file)
            # The size of the folder is the number of open files, since Linux 6.2.
            state = (used, size, os.stat("/proc/self/fd").st_size)  # noqa: PTH116  # slower
            if state != self._state:
                self._read_segments(mount, state)
        try:
            os.waitid(os.P_ALL, 0, _LOOK)
        except ChildProcessError:  # no thread of this process has a child
            if not self._children:
                return self._shm
        except AttributeError:  # Windows
            pass
        if self._lists_children:
            self._read_children()
        elif detail:  # a walk over all processes
            self._note_children([(child.memory_bytes, child.is_shared_out) for child in children()])
        return self._shm + self._children

    def _read_segments(self, mount: os.statvfs_result, state: _State) -> None:
        """Read the segments, because ``state`` has changed since they were last read."""
        used_blocks, _, _ = state
        limit_bytes = mount.f_blocks * mount.f_frsize
        used_bytes = used_blocks * mount.f_frsize
        size, in_memfds = self._segments.scan(used_bytes)
        self._state = None if in_memfds else state  # memfds grow unseen
        if size or self._shm:
            note = self._segments.note
            self._shm = (Reading("shm", size, size, "sampled", limit_bytes or None, note=note),)

    def _read_children(self) -> None:
        """Read the child processes of Linux, if one has started, ended or changed its size."""
        pids = descendants()
        # PSS takes long for large processes: it is read again if one of them, or this one, has
        # changed.
        state = [rss_bytes() // MIB, *((pid, pages(pid)) for pid in pids)]
        if state == self._children_state:
            return
        self._children_state = state
        sizes = map(size_of, pids)
        self._note_children([size for size in sizes if size is not None])

    def _note_children(self, sizes: list[tuple[int, bool]]) -> None:
        """Make one reading of the sizes of all child processes; each says if it is their PSS."""
        total = sum(size for size, _ in sizes)
        if not total and not self._children:
            return
        are_shared_out = all(is_shared_out for _, is_shared_out in sizes)
        note = "" if are_shared_out else NOT_SHARED_OUT
        self._children = (Reading("children", total, total, "sampled", note=note),)

    def close(self) -> None:
        self._segments.close()
