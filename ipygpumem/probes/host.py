"""Reads host memory: RSS, and its exact peak through the kernel's high-water mark on Linux.

Writing ``5`` to ``/proc/self/clear_refs`` resets the peak RSS that ``/proc/self/status`` shows as
``VmHWM`` (proc(5), Linux 4.0 and later). It needs no thread and misses no spike, however short. It
also lowers ``resource.getrusage().ru_maxrss``, so ``exact=False`` can switch it off.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ipygpumem.introspect import loaded
from ipygpumem.probes import Probe, cgroup, own_limits
from ipygpumem.records import Method, Reading
from ipygpumem.units import KIB, MIB

T = TypeVar("T")
_MARK = re.compile(rb"\nVmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB")
"""The two consecutive lines of ``/proc/self/status`` that every boundary reads."""
_MAPPED = re.compile(rb"\nVmSize:\s*(\d+) kB")
_TRIES = 3
"""Attempts; another thread may allocate between a reset of the mark and the reading."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class HostFigures:
    """The system's figures of host memory, and this process's share."""

    ram_bytes: int
    free_bytes: int
    available_bytes: int
    """Free, or reclaimable by the kernel when needed."""
    private_bytes: int
    """Pages of this process alone; the whole RSS if the system does not distinguish them."""
    shared_bytes: int = 0
    file_bytes: int = 0
    children_bytes: int | None = None
    """None if unknown."""
    group: cgroup.Group | None = None
    """The control group with the tightest limit on this process, if any."""
    limit: own_limits.Limit | None = None
    """The tightest of the process's own limits, if any."""
    own: OwnPages | None = None
    """Parts of its private pages, if the system lists them."""

    @property
    def rss_bytes(self) -> int:
        """RSS of this process."""
        return self.private_bytes + self.shared_bytes + self.file_bytes


class HostProbe(Probe):
    """RSS of this process; with ``exact``, peaks by the kernel's high-water mark if
    there is one.
    """

    _with_mark: ClassVar[weakref.WeakSet[HostProbe]] = weakref.WeakSet()
    """All probes that use the mark: the kernel has one per process, which any of them resets."""

    def __init__(self, *, exact: bool = True) -> None:
        self._total = total_bytes()
        self._mark_is_low = False
        """True if the last reading found the mark at the RSS, so that there is nothing to reset."""
        self._lost_peak = 0
        """The highest mark reset by other probes since our own ``rearm``."""
        self._mapped: int | None = None
        self._pid = os.getpid()
        self._open(exact=exact)

    def use_mark(self, *, exact: bool) -> None:
        """Switch between the kernel's mark and sampling."""
        self.close()
        self._open(exact=exact)

    def _open(self, *, exact: bool) -> None:
        forked = self._pid != os.getpid()
        self._exact, self._pid = exact, os.getpid()
        self._status = _open("/proc/self/status", os.O_RDONLY)
        self._marks = _open("/proc/self/clear_refs", os.O_WRONLY) if exact else None
        self.note = (
            ""
            if self._marks is not None
            else "the peak is sampled: no kernel high-water mark in use"
        )
        if self._marks is not None:
            # A span opened in the parent continues: the kernel starts a new mark in the child.
            lost = max(self._lost_peak, self._rss_and_peak()[1]) if forked else 0
            if any(self._can_reset() for _ in range(_TRIES)):
                self._lost_peak = lost
                self._with_mark.add(self)
                return
            os.close(self._marks)
            self._marks = None
            self.note = "the peak is sampled: the kernel's high-water mark cannot be reset here"

    def _can_reset(self) -> bool:
        """Return True if a reset lowers the mark: some sandboxes accept the write and ignore it."""
        self._mark_is_low = False
        try:
            self.rearm()
            rss, peak = self._rss_and_peak()
        except OSError:
            return False
        return peak <= rss + 16 * MIB

    @property
    def sampled(self) -> bool:
        return self._marks is None

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        if os.getpid() != self._pid:  # after a fork the descriptors name the parent process
            self.use_mark(exact=self._exact)
        if detail:
            self._total = total_bytes()  # a container's limit may change at run time
        rss, highest = self._rss_and_peak()
        method: Method = "sampled" if self._marks is None else "kernel"
        self._mark_is_low = highest <= rss
        highest = rss if self._marks is None else max(highest, self._lost_peak)
        bound = own_limits.bound("RLIMIT_AS")  # code may set it at any time
        total = self._total if bound is None else min(self._total, bound)
        return (
            Reading("cpu", rss, highest, method, total, None, None, None, self.note, self._mapped),
        )

    def _rss_and_peak(self) -> tuple[int, int]:
        if self._status is not None:
            status = os.pread(self._status, 4096, 0)
            mapped, found = _MAPPED.search(status), _MARK.search(status)
            self._mapped = None if mapped is None else int(mapped[1]) * KIB
            if found is not None:  # some systems' status lacks these lines
                return int(found[2]) * KIB, int(found[1]) * KIB
        rss = rss_bytes()
        return rss, rss

    def rearm(self) -> None:
        if self._marks is not None and not self._mark_is_low:
            if len(self._with_mark) > (self in self._with_mark):
                peak = self._rss_and_peak()[1]
                for probe in self._with_mark:
                    probe._lost_peak = max(probe._lost_peak, peak)
            os.write(self._marks, b"5")
        self._lost_peak = 0

    def close(self) -> None:
        self._with_mark.discard(self)
        for descriptor in (self._status, self._marks):
            if descriptor is not None:
                os.close(descriptor)
        self._status = self._marks = None


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags) if hasattr(os, "pread") else None  # not on Windows
    except OSError:
        return None


def rss_bytes() -> int:
    """Return this process's RSS; on Linux without the builtin ``open``, which code may have
    replaced.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return int(_psutil().Process().memory_info().rss)
    try:
        return int(os.read(file, 200).split()[1]) * PAGE_BYTES
    finally:
        os.close(file)


_TEXT = ctypes.c_char * 200
"""Kept, because a type made for each call would be garbage that the next collection finds."""


@functools.cache  # each makes garbage
def _pread() -> Callable[..., object]:
    return ctypes.PyDLL(None).pread


def fall_during(call: functools.partial[T]) -> tuple[T, int | None]:
    """Call a function written in C; return its result, and how far RSS fell in it, None if unknown.

    No other Python thread runs between the two readings, because none of the three calls releases
    the GIL.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return call(), None
    try:
        texts = [_TEXT() for _ in range(2)]
        first, last = (
            functools.partial(_pread(), file, text, len(text), ctypes.c_long()) for text in texts
        )
        run: Any = functools.partial.__call__  # in C, as map is
        _, result, _ = map(run, (first, call, last))
    finally:
        os.close(file)
    before, after = (int(text.value.split()[1]) * PAGE_BYTES for text in texts)
    return result, before - after


def _psutil() -> Any:
    """Import psutil late: IPython in a terminal has not loaded it, and loading the extension must
    stay fast.
    """
    import psutil

    return psutil


def total_bytes(root: Path = cgroup.ROOT) -> int:
    """Return the maximum memory of this process: the machine's, or its container's
    if that is less.
    """
    knows = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())
    total = (
        os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES if knows else int(_psutil().virtual_memory().total)
    )
    group = cgroup.tightest(root)
    return total if group is None else min(total, group.limit_bytes)


def available_bytes(root: Path = cgroup.ROOT) -> int:
    """Return the host memory that this process can still allocate, by the system, its containers
    and its own limits.
    """
    available = int(_psutil().virtual_memory().available)
    groups = [group.available_bytes for group in cgroup.limits(root)]
    return min([available, *groups, *(limit.available_bytes for limit in own_limits.limits())])


def host_figures(children_bytes: int | None, segments_bytes: int = 0) -> HostFigures:
    """Return the system's figures of host memory, with those of child processes and of shared
    memory segments.
    """
    memory, group = _psutil().virtual_memory(), cgroup.tightest()
    try:
        status = Path("/proc/self/status").read_bytes()
        private, shared, file = (
            own_limits.figure(status, b"\nRss%b:" % kind) for kind in (b"Anon", b"Shmem", b"File")
        )
    except (OSError, ValueError):  # not Linux, or before 4.5
        private, shared, file = int(_psutil().Process().memory_info().rss), 0, 0
    shared = max(shared, segments_bytes)  # whose pages this process need not have touched
    available = int(memory.available)
    free, limit = int(getattr(memory, "free", available)), own_limits.nearest()
    pages = own_pages()
    return HostFigures(
        int(memory.total),
        free,
        available,
        private,
        shared,
        file,
        children_bytes,
        group,
        limit,
        pages,
    )


# -- what this process's own pages hold ---------------------------------------------------------


_BLOCK_BYTES = 48
"""Typical size of a block of Python's allocator."""


class _HeapFigures(ctypes.Structure):
    """glibc's ``struct mallinfo2``; see mallinfo(3)."""

    _fields_: ClassVar = [
        ("arena_to_fsmblks", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


@functools.cache
def _mallinfo() -> Any:
    # glibc 2.33
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if ask is not None:
        ask.restype = _HeapFigures
    return ask


@functools.cache
def malloc_trim() -> Callable[[int], object] | None:
    """Return glibc's function that frees unused heap pages; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def free_heap_bytes() -> int | None:
    """Return the free bytes in the heap of glibc's malloc, with or without pages in RAM; None if
    unknown.
    """
    ask = _mallinfo()
    return None if ask is None else int(ask().fordblks)


def allocated_bytes() -> int:
    """Return roughly the bytes in use from Python's allocator, glibc's malloc and pyarrow's pool.

    New objects may fill pages that earlier ones have left, which RSS does not show.
    """
    ask, arrow = _mallinfo(), getattr(loaded("pyarrow"), "total_allocated_bytes", None)
    figures = ask() if ask is not None else None
    in_malloc = 0 if figures is None else int(figures.arena_to_fsmblks[4] + figures.uordblks)
    return in_malloc + sys.getallocatedblocks() * _BLOCK_BYTES + (arrow() if arrow else 0)


_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *([^\n]*)\n"
    rb".*?^Rss: +(\d+) kB\n.*?^Anonymous: +(\d+) kB\n",
    re.MULTILINE | re.DOTALL,
)
"""Addresses, permissions, inode, name, RSS and private pages of a mapping in smaps; see
proc_pid_smaps(5).
"""
_ARENA_BYTES = 64 * MIB
"""Alignment of the arenas that malloc makes for threads (``HEAP_MAX_SIZE`` on 64 bits)."""


class RamFigures(NamedTuple):
    """Figures of a span's start, with which its end is compared. Reading them takes
    microseconds.
    """

    file_bytes: int
    """Pages of mapped files in RAM, code mostly; 0 if the system does not report them."""
    free_bytes: int
    """Free bytes in the heap of glibc's malloc, with or without pages in RAM."""
    modules: int
    """Number of imported modules."""
    arrow_peak_bytes: int = 0
    """The most that pyarrow's pool has ever had allocated: what it has freed since may stay there
    as free pages.
    """

    @classmethod
    def now(cls) -> RamFigures:
        """Return the figures of this moment."""
        file_bytes = 0
        with contextlib.suppress(OSError, ValueError):
            file = os.open("/proc/self/status", os.O_RDONLY)
            try:
                file_bytes = own_limits.figure(os.read(file, 4096), b"\nRssFile:")
            finally:
                os.close(file)
        pool = getattr(loaded("pyarrow"), "default_memory_pool", None)
        peak = 0 if pool is None else pool().max_memory() or 0
        return cls(file_bytes, free_heap_bytes() or 0, len(sys.modules), peak)


class OwnPages(NamedTuple):
    """Parts of the private pages of this process in RAM."""

    data_bytes: int
    """Written pages of mapped files: the data of libraries and extension modules."""
    stack_bytes: int
    """Stacks of all threads, as far as their guard pages show them."""
    free_heap_bytes: int
    """Free pages in the heap of glibc's malloc."""


def own_pages() -> OwnPages:
    """Return parts of this process's private pages, as the kernel lists its mappings; all 0 if it
    does not.
    """
    data = stacks = heap = arena = arena_end = 0
    guard = b""
    try:
        mappings = _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
    except OSError:
        return OwnPages(0, 0, 0)
    for start, end, allowed, inode, name, resident, private in mappings:
        if inode != b"0":
            data += int(private) * KIB
        elif name == b"[stack]" or (not name and start == guard and allowed == b"rw-p"):
            stacks += int(resident) * KIB
        elif name == b"[heap]":
            heap += int(resident) * KIB
        elif allowed == b"---p" and int(start, 16) < arena_end <= int(
            end, 16
        ):  # the rest that malloc has reserved
            heap += arena
        is_first = (
            inode == b"0" and not name and allowed == b"rw-p" and int(start, 16) % _ARENA_BYTES == 0
        )
        arena, arena_end = (
            (int(resident) * KIB, int(start, 16) + _ARENA_BYTES) if is_first else (0, 0)
        )
        is_guard = allowed == b"---p" and int(end, 16) - int(start, 16) == PAGE_BYTES
        guard = end if is_guard else b""
    ask = _mallinfo()
    if ask is None:
        return OwnPages(data, stacks, 0)
    figures = ask()
    return OwnPages(data, stacks, max(0, min(figures.fordblks, heap - figures.uordblks)))


_LEAST_UNUSED_BYTES = 16 * MIB
"""Bytes of the smallest unused part of a mapping that counts: a thread's stack has 8 MiB, and uses
a few pages.
"""


def unused_mappings() -> dict[tuple[int, int], int]:
    """Return the bytes without a page in RAM of the large mappings, by first and last address; none
    if unknown.

    These are ``np.zeros``, libraries' pools, mapped files and the like. Code and constant data of
    libraries, which are private and cannot be written to, do not count.
    """
    try:
        mappings = _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
    except OSError:
        return {}
    found = dict[tuple[int, int], int]()
    for first, last, allowed, _, name, resident, _ in mappings:
        start, end = int(first, 16), int(last, 16)
        unused = end - start - int(resident) * KIB
        is_data = allowed.startswith(b"rw") or allowed.endswith(b"s")
        if is_data and name != b"[stack]" and unused >= _LEAST_UNUSED_BYTES:
            found[start, end] = unused
    return found


_LINE_OF_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)
"""A line of ``/proc/self/maps`` whose mapping has a file: it has an inode."""
_IN_MEMORY = (b"/dev/shm/", b"/memfd:", b"/SYSV", b"/dev/zero")  # nothing is written there
"""Starts of the names of files that are memory themselves."""


def mapped_files() -> list[tuple[int, int]]:
    """Return the first and last addresses of all mapped files, in this order; none if the kernel
    lists none.
    """
    try:
        lines = _LINE_OF_FILE.findall(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    return [
        (int(start, 16), int(end, 16))
        for start, end, name in lines
        if not name.startswith(_IN_MEMORY)
    ]


_ENTRY = 8
_AT_ONCE = 1 << 17
"""Number of pages to read at once: 1 MiB of entries for 512 MiB of memory."""
_PRESENT, _FILE_OR_SHARED = 0x80, 0x20
"""Bits 63 and 61 of an entry, in its highest byte."""
_ANONYMOUS = bytes(
    int(value & _PRESENT != 0 and value & _FILE_OR_SHARED == 0) for value in range(256)
)
_RESIDENT = bytes(int(value & _PRESENT != 0) for value in range(256))
_SMALL = 16 * PAGE_BYTES
"""Smaller ranges count as present: reading the entries of many small ones would cost too much."""


def anonymous_bytes(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the private bytes in RAM of each range (address, size in bytes).

    The rest are pages never written to, of a mapped file, or swapped out. The kernel reports each
    page in ``/proc/self/pagemap`` (see admin-guide/mm/pagemap); ``OSError`` if it cannot be read.
    """
    return _in_pagemap(ranges, _ANONYMOUS)


def resident_bytes(address: int, size: int) -> int:
    """Return the bytes in RAM of a range, also those of a mapped file; ``OSError`` if they cannot
    be read.
    """
    return _in_pagemap([(address, size)], _RESIDENT)[0]


def _in_pagemap(ranges: Iterable[tuple[int, int]], wanted: bytes) -> list[int]:
    descriptor = _open("/proc/self/pagemap", os.O_RDONLY)
    if descriptor is None:
        raise OSError("/proc/self/pagemap cannot be read")
    try:
        return [
            size if size < _SMALL else _present(descriptor, address, size, wanted)
            for address, size in ranges
        ]
    finally:
        os.close(descriptor)


def _present(descriptor: int, address: int, size: int, table: bytes) -> int:
    first, last = address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES)
    pages = 0
    for start in range(first, last, _AT_ONCE):
        wanted = min(_AT_ONCE, last - start)
        highest = os.pread(descriptor, wanted * _ENTRY, start * _ENTRY)[_ENTRY - 1 :: _ENTRY]
        pages += highest.translate(table).count(1)
    return min(size, pages * PAGE_BYTES)


# -- other processes ----------------------------------------------------------------------------

_SAME_START_SECONDS = 60.0
"""Maximum difference of a process's start time, which follows the system's clock."""


def process_space() -> str:
    """Return the boot and the process namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return str(round(_psutil().boot_time(), -2))


def is_running(pid: int, started: float | None = None) -> bool:
    """Return True if a process with this PID runs here, and was started about then."""
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        is_same = started is None or abs(process.create_time() - started) < _SAME_START_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError):
        return False
