"""Reads host memory outside this process's RSS: shared memory segments and child processes, on
Linux.

Both are devices of their own, ``shm`` and ``children``, and exist once there are any. At every
boundary of a span a few system calls find out whether something may have changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ipygpumem.probes import Probe
from ipygpumem.probes.children import (
    NOT_SHARED_OUT,
    ProcessSize,
    children,
    descendants,
    pages,
    size_of,
)
from ipygpumem.probes.host import rss_bytes
from ipygpumem.probes.segments import Segments
from ipygpumem.records import Reading
from ipygpumem.units import MIB

_WITHOUT_WAITING = os.WEXITED | os.WNOHANG | os.WNOWAIT if hasattr(os, "waitid") else 0
"""Options with which ``waitid`` returns at once, and leaves an ended child to the user's code."""


class _SharedMemoryState(NamedTuple):
    """Figures that are quick to read. While they stay the same, so do this process's segments,
    except memfds.
    """

    used_blocks: int
    """Blocks of /dev/shm that any process uses."""
    address_space_pages: bytes
    """The size of this process's address space, as text: a segment may be mapped whose file is
    closed. Empty if no blocks are used.
    """
    open_files: int
    """The size of the folder of open files, which is their number since Linux 6.2."""


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
        self._kernel_lists_children = Path(f"/proc/self/task/{os.getpid()}/children").exists()
        self._shm_state: _SharedMemoryState | None = None
        """The state at the last scan of the segments; None if they are to be scanned again."""
        self._children_state: list[object] = []
        """This process's RSS in MiB, and the PID and the pages of each child, when the children
        were last read: while it stays the same, so do their sizes.
        """
        self._shm: tuple[Reading, ...] = ()
        """The last reading of ``shm``; empty as long as there were no segments."""
        self._children: tuple[Reading, ...] = ()
        """The last reading of ``children``; empty as long as there were none."""

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return the readings of both devices, as in ``Probe``, without one that was never in use.

        The kernel has no high-water mark for them, so their peaks are their current values. They
        are not sampled either, because a scan takes too long for that.
        """
        if self._segments.descriptor is not None:
            self._update_shm(self._segments.descriptor)
        if self._children or _may_have_child():
            self._update_children(detail=detail)
        return self._shm + self._children

    def _update_shm(self, descriptor: int) -> None:
        """Scan the segments if they may have changed; ``descriptor`` is that of /dev/shm."""
        mount = os.fstatvfs(descriptor)
        used_blocks = mount.f_blocks - mount.f_bfree
        address_space_pages = b""
        if used_blocks:
            statm = os.open("/proc/self/statm", os.O_RDONLY)
            address_space_pages = os.read(statm, 200).partition(b" ")[0]
            os.close(statm)
        open_files = os.stat("/proc/self/fd").st_size  # noqa: PTH116  # slower
        state = _SharedMemoryState(used_blocks, address_space_pages, open_files)
        if state == self._shm_state:
            return
        size_bytes, memfd_bytes = self._segments.scan(used_blocks * mount.f_frsize)
        self._shm_state = state
        if memfd_bytes:  # memfds grow without a change of the state
            self._shm_state = None
        if size_bytes or self._shm:  # a device that was in use stays, with 0 bytes
            limit_bytes = mount.f_blocks * mount.f_frsize or None
            note = self._segments.note
            self._shm = (Reading("shm", size_bytes, size_bytes, "sampled", limit_bytes, note=note),)

    def _update_children(self, *, detail: bool) -> None:
        """Read the child processes.

        Where the kernel does not list them, as on macOS, psutil has to walk over all processes of
        the system: then they are read only with ``detail``.
        """
        if self._kernel_lists_children:
            self._update_listed_children()
        elif detail:
            sizes = [ProcessSize(child.memory_bytes, child.is_shared_out) for child in children()]
            self._set_children(sizes)

    def _update_listed_children(self) -> None:
        """Read the child processes that the kernel lists, if one has started, ended or changed its
        size.
        """
        pids = descendants()
        # PSS takes long for large processes, so it is read again only if a child has changed; or
        # this process, with which a forked child shares pages.
        state = [rss_bytes() // MIB, *((pid, pages(pid)) for pid in pids)]
        if state == self._children_state:
            return
        self._children_state = state
        sizes = map(size_of, pids)
        self._set_children([size for size in sizes if size is not None])

    def _set_children(self, sizes: list[ProcessSize]) -> None:
        """Make the reading of ``children`` from the sizes of all child processes."""
        total_bytes = sum(size.size_bytes for size in sizes)
        if not total_bytes and not self._children:
            return
        note = ""
        if not all(size.is_shared_out for size in sizes):
            note = NOT_SHARED_OUT
        self._children = (Reading("children", total_bytes, total_bytes, "sampled", note=note),)

    def close(self) -> None:
        """Close the descriptor of /dev/shm."""
        self._segments.close()


def _may_have_child() -> bool:
    """Return False if no thread of this process has a child process; True if that is unknown."""
    try:
        os.waitid(os.P_ALL, 0, _WITHOUT_WAITING)
    except ChildProcessError:
        return False
    except AttributeError:  # Windows
        return True
    return True
