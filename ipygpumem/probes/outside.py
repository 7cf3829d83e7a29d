"""Reads host memory outside this process's RSS: shared memory segments and child processes, on
Linux.

Both are devices of their own, ``shm`` and ``children``, and exist once there are any. At every
boundary of a span a few system calls find out whether something may have changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ipygpumem.probes import Probe
from ipygpumem.probes.host import PAGE_BYTES, rss_bytes
from ipygpumem.records import Reading
from ipygpumem.units import KIB, MIB, format_bytes

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

MOUNT = "/dev/shm"  # noqa: S108  # nothing is written there
BLOCK_BYTES = 512
"""Unit of ``st_blocks``; see inode(7)."""
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT if hasattr(os, "waitid") else 0
"""How ``waitid`` looks at a child and leaves it as it is."""
NOT_SHARED_OUT = "RSS, in which shared pages count fully: PSS cannot be read"
"""Note on a figure of processes whose PSS cannot be read."""


_STARTUP_BYTES = 4 * MIB
"""Maximum growth of this process between a measurement and the start of a child."""
_CLOCK_SECONDS = 0.1
"""The clock of files may be as much behind."""
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
        self._mount, self._device = _open_mount()
        self._memfds = _device_of_memfds()
        self._lists_children = Path(f"/proc/self/task/{os.getpid()}/children").exists()
        self._began, self._named = time.time() - _CLOCK_SECONDS, dict[int, str]()
        """Names by inode of the segments that this process has opened and that may outlive it."""
        self._left: dict[str, int] = {}
        """Bytes by name of the closed ones that are not unlinked."""
        self._state: _State | None = None
        self._children_state: list[object] = []
        self._shm: tuple[Reading, ...] = ()
        self._children: tuple[Reading, ...] = ()

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        # The screens are here, because every boundary of a span takes them.
        if self._mount is not None:
            mount = os.fstatvfs(self._mount)
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

    # -- shared memory ---------------------------------------------------------------------------

    def _read_segments(self, mount: os.statvfs_result, state: _State) -> None:
        limit, used = mount.f_blocks * mount.f_frsize, state[0] * mount.f_frsize
        size, in_memfds = self._scan(used)
        self._state = None if in_memfds else state  # memfds grow unseen
        if size or self._shm:
            self._shm = (
                Reading("shm", size, size, "sampled", limit or None, note=_left_note(self._left)),
            )

    def _scan(self, used: int) -> tuple[int, int]:
        """Return the bytes of all segments, and those of memfds among them."""
        files: dict[int, int] = {}
        memfds: dict[int, int] = {}
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed, such as the one that listed the folder
                found = os.fstat(int(entry.name))
                if stat.S_ISREG(found.st_mode) and found.st_dev in (self._device, self._memfds):
                    kind = files if found.st_dev == self._device else memfds
                    kind[found.st_ino] = found.st_blocks * BLOCK_BYTES
                    if kind is files and found.st_nlink and found.st_ctime >= self._began:
                        self._named[found.st_ino] = str(Path(entry.path).readlink()).removeprefix(
                            f"{MOUNT}/"
                        )
        closed = {
            inode: name
            for inode, name in self._named.items()
            if inode not in files and "/" not in name
        }
        left = {inode: linked_bytes(name, inode) for inode, name in closed.items()}
        self._named = {inode: name for inode, name in self._named.items() if left.get(inode, 1)}
        mapped = self._mapped() if any(left.values()) else {}
        self._left = {
            closed[inode]: size for inode, size in left.items() if size and inode not in mapped
        }
        files.update({inode: size for inode, size in left.items() if size})
        in_files, in_memfds = sum(files.values()), sum(memfds.values())
        rest = used - in_files
        if rest > 0:  # other processes', or mapped ones whose file is closed
            rest = min(
                rest, sum(size for inode, size in self._mapped().items() if inode not in files)
            )
        return in_files + in_memfds + max(0, rest), in_memfds

    def _mapped(self) -> dict[int, int]:
        """Return the bytes of each mapped file in /dev/shm; its address space if it has no name any
        more.
        """
        device = f"{os.major(self._device):02x}:{os.minor(self._device):02x}".encode()
        names: dict[int, Path] = {}
        sizes: dict[int, int] = {}
        for line in Path("/proc/self/maps").read_bytes().splitlines():
            fields = line.split(None, 5)
            if fields[3] == device and len(fields) > 5:  # a line with a path
                start, _, end = fields[0].partition(b"-")
                inode = int(fields[4])
                names[inode] = Path(os.fsdecode(fields[5]))
                sizes[inode] = sizes.get(inode, 0) + int(end, 16) - int(start, 16)
        for inode, name in names.items():
            with contextlib.suppress(OSError):
                found = name.stat()
                if (found.st_dev, found.st_ino) == (self._device, inode):
                    sizes[inode] = found.st_blocks * BLOCK_BYTES
        return sizes

    # -- child processes -------------------------------------------------------------------------

    def _read_children(self) -> None:
        pids = descendants()
        # PSS takes long for large processes: it is read again if one of them, or this one, has
        # changed.
        state = [rss_bytes() // MIB, *((pid, _pages(pid)) for pid in pids)]
        if state != self._children_state:
            self._children_state = state
            self._note_children([size for pid in pids if (size := size_of(pid)) is not None])

    def _note_children(self, sizes: list[tuple[int, bool]]) -> None:
        total = sum(size for size, _ in sizes)
        note = "" if all(is_shared_out for _, is_shared_out in sizes) else NOT_SHARED_OUT
        if total or self._children:
            self._children = (Reading("children", total, total, "sampled", note=note),)

    def close(self) -> None:
        if self._mount is not None:
            os.close(self._mount)
        self._mount = None


def linked_bytes(segment: str, inode: int | None = None) -> int | None:
    """Return the bytes of shared memory that has not been unlinked; None where the system does not
    show them.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        found = Path(MOUNT, segment).stat()
        return found.st_blocks * BLOCK_BYTES if inode in (None, found.st_ino) else 0
    return 0


def _left_note(segments: Mapping[str, int]) -> str:
    """Return the line that frees segments to which no object refers; empty if there are none."""
    lines = "; ".join(f"SharedMemory({name!r}).unlink()" for name in segments)
    size = format_bytes(sum(segments.values()))
    module = "multiprocessing.shared_memory"
    return (
        f"{size} stay until you unlink them: from {module} import SharedMemory; {lines}"
        if segments
        else ""
    )


def _open_mount() -> tuple[int | None, int]:
    try:
        mount = os.open(MOUNT, os.O_RDONLY)
        os.fstatvfs(mount)
    except (OSError, AttributeError):  # not Linux
        return None, 0
    return mount, os.fstat(mount).st_dev


@functools.cache
def _device_of_memfds() -> int | None:
    """Return the device number of the kernel's own mount, on which all memfds are."""
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


def descendants() -> list[int]:
    """Return the processes that this process has started, and those that these have started in
    turn.
    """
    found: list[int] = []
    waiting = ["self"]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(folder).iterdir():
                with contextlib.suppress(OSError):
                    below = (thread / "children").read_text().split()
                    waiting += below
                    found += map(int, below)
    return found


def _pages(process: object) -> list[bytes]:
    """Return the pages of a process, of its address space and then in RAM; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/statm").read_bytes().split()
    return []


def size_of(pid: int) -> tuple[int, bool] | None:
    """Return the PSS of a process and True; its RSS and False if only that is readable; None if it
    has ended.
    """
    with contextlib.suppress(OSError):
        if found := _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes()):
            return int(found[1]) * KIB, True
    with contextlib.suppress(OSError, IndexError):
        pages = int(_pages(pid)[1])
        return (pages * PAGE_BYTES, False) if pages else None
    return None


class EndedChildren(NamedTuple):
    """The kernel's figures of all child processes that have ended and were waited for, and of their
    descendants.
    """

    peak_bytes: int
    """The largest RSS that any of them has had."""
    touched_bytes: int
    """Pages that they have touched, each time that one was mapped; fewer with huge pages."""

    @classmethod
    def now(cls) -> EndedChildren | None:
        """Return the figures of this moment; None where the system has none."""
        if resource is None:
            return None
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        unit = 1 if sys.platform == "darwin" else KIB
        return cls(usage.ru_maxrss * unit, usage.ru_minflt * PAGE_BYTES)

    def peak_since(self, before: EndedChildren, own_peak_bytes: int) -> int | None:
        """Return the peak of the largest child that has ended since ``before``; None if it is not
        known.

        It is known only of a child larger than all that ended earlier, and larger than this process
        was: until a child executes its program, it has this process's pages.
        """
        if (
            self.peak_bytes <= before.peak_bytes
            or self.peak_bytes <= own_peak_bytes + _STARTUP_BYTES
        ):
            return None
        return self.peak_bytes


class Child(NamedTuple):
    """A descendant of this process."""

    pid: int
    name: str
    started_at: float
    """Unix time, on Linux to 1/200 s; for an indirect child the start of the direct child above it.
    """
    memory_bytes: int
    is_shared_out: bool
    """True if shared pages are divided among their processes (PSS); False if they count fully
    (RSS).
    """
    on_devices: tuple[tuple[str, int], ...] = ()
    """Memory on each device, as far as it was asked for and is known."""
    ends_by: str = ""
    """The line that ends it, if one is known."""


def children() -> list[Child]:
    """Return the live descendants of this process, the largest first."""
    import psutil  # IPython in a terminal has not loaded it

    found = []
    below = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in below.values():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            size, is_shared_out = size_of(process.pid) or (int(process.memory_info().rss), False)
            first = (
                process  # torchrun starts its workers seconds after the cell that started torchrun
            )
            while (parent := below.get(first.ppid())) is not None:
                first = parent
            started = _started_at(first.pid) or first.create_time()
            found.append(Child(process.pid, process.name(), started, size, is_shared_out))
    return sorted(found, key=lambda child: -child.memory_bytes)


def _started_at(pid: int) -> float | None:
    """Return the start time of a process; None without /proc. psutil's figure is a second off on
    Linux.
    """
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        # The shortest of several readings: other processes may run between the two clocks.
        boot = min(-time.clock_gettime(time.CLOCK_BOOTTIME) + time.time() for _ in range(3))
        # the middle of the tick in which it started
        return boot + (ticks + 0.5) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


# -- other kernels ------------------------------------------------------------------------------

_SESSION = b"JPY_SESSION_NAME="
"""Variable in which Jupyter's server gives a kernel the path of its notebook."""


class OtherKernel(NamedTuple):
    """Another Jupyter kernel of this user."""

    pid: int
    memory_bytes: int
    is_shared_out: bool
    """True if shared pages are divided among their processes (PSS); False if they count fully
    (RSS).
    """
    notebook: str
    """The path of its notebook, if the kernel's environment has it."""


def other_kernels() -> list[OtherKernel]:
    """Return the other Jupyter kernels of this user, the largest first; none where there is no
    /proc.
    """
    found = list[OtherKernel]()
    own = {os.getpid(), *descendants()}
    try:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    except OSError:
        return found
    for pid in pids:
        if pid in own or not is_kernel(_words_of(pid)) or not _is_own(pid):
            continue
        size = size_of(pid)
        if size is not None:
            found.append(OtherKernel(pid, *size, notebook_of(pid)))
    return sorted(found, key=lambda kernel: -kernel.memory_bytes)


def is_kernel(words: Sequence[str]) -> bool:
    """Return True for the command line of a Jupyter kernel, in which Python runs ipykernel."""
    return any(
        word == "ipykernel" or word.endswith(("kernel_launcher", "kernel_launcher.py"))
        for word in words
    )


def notebook_of(pid: int) -> str:
    """Return the path of the notebook that a kernel of this user runs; empty if it is not known."""
    if not _is_own(pid):
        return ""
    with contextlib.suppress(OSError):  # it has ended
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(_SESSION):
                return os.fsdecode(variable.removeprefix(_SESSION))
    return ""


def _is_own(pid: int) -> bool:
    """Return True for a process of this user; root may read the environment of any process, and
    does not.
    """
    with contextlib.suppress(OSError, AttributeError):  # it has ended; Windows
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
    return False


def _words_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    return []
