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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ipygpumem.introspect import loaded
from ipygpumem.probes import Probe, cgroup, own_limits
from ipygpumem.probes.malloc import free_blocks_bytes, free_heap_bytes
from ipygpumem.probes.mappings import OwnPages, own_pages
from ipygpumem.probes.pages import PAGE_BYTES, open_file
from ipygpumem.records import Method, Reading
from ipygpumem.units import KIB, MIB

T = TypeVar("T")
_MARK_AND_RSS = re.compile(rb"\nVmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB")
"""The two consecutive lines of ``/proc/self/status`` that every boundary reads."""
_ADDRESS_SPACE = re.compile(rb"\nVmSize:\s*(\d+) kB")
_RESETS = 3
"""Number of resets that are tried before the mark counts as fixed: another thread may allocate
between a reset and the reading after it.
"""


@dataclass(frozen=True)
class HostFigures:
    """The system's figures of host memory, and this process's share."""

    ram_bytes: int
    """RAM of the machine."""
    free_bytes: int
    """RAM that nothing uses."""
    available_bytes: int
    """Free, or reclaimable by the kernel when needed."""
    private_bytes: int
    """Pages of this process alone; the whole RSS if the system does not distinguish them."""
    shared_bytes: int = 0
    """Shared memory segments, also pages of them that this process has not touched."""
    file_bytes: int = 0
    """Pages of mapped files in RAM."""
    children_bytes: int | None = None
    """Memory of the child processes; None if unknown."""
    group: cgroup.ControlGroup | None = None
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
    """The RSS of this process.

    With ``exact``, its peaks are those of the kernel's high-water mark, if there is one and it can
    be reset; else they are sampled.
    """

    _probes_with_mark: ClassVar[weakref.WeakSet[HostProbe]] = weakref.WeakSet()
    """All probes that use the mark: the kernel has one per process, which any of them resets."""

    def __init__(self, *, exact: bool = True) -> None:
        self._total_bytes = total_bytes()
        self._mark_is_at_rss = False
        """True if the last reading found the mark at the RSS, so that there is nothing to reset."""
        self._peak_before_resets = 0
        """The highest mark that other probes have reset since our own ``rearm``."""
        self._mapped_bytes: int | None = None
        """The size of the address space at the last reading."""
        self._pid = os.getpid()
        """The process in which the files were opened."""
        self._open_files(exact=exact)

    def use_mark(self, *, exact: bool) -> None:
        """Use the kernel's mark if ``exact``, else sampling."""
        self.close()
        self._open_files(exact=exact)

    def _open_files(self, *, exact: bool) -> None:
        """Open the file with the RSS, and with ``exact`` the file that resets the mark, if a reset
        has an effect here; ``note`` says why the mark is not used.
        """
        forked = self._pid != os.getpid()
        self._exact = exact
        self._pid = os.getpid()
        self._status = open_file("/proc/self/status", os.O_RDONLY)
        self._clear_refs = open_file("/proc/self/clear_refs", os.O_WRONLY) if exact else None
        self.note = ""
        if self._clear_refs is None:
            self.note = "the peak is sampled: no kernel high-water mark in use"
            return
        peak_in_parent = 0
        if forked:  # a span opened in the parent continues, and the child has a new mark
            _, peak = self._rss_and_peak()
            peak_in_parent = max(self._peak_before_resets, peak)
        if any(self._can_reset() for _ in range(_RESETS)):
            self._peak_before_resets = peak_in_parent
            self._probes_with_mark.add(self)
            return
        os.close(self._clear_refs)
        self._clear_refs = None
        self.note = "the peak is sampled: the kernel's high-water mark cannot be reset here"

    def _can_reset(self) -> bool:
        """Reset the mark, and return True if that has lowered it: some sandboxes accept the write
        and ignore it.
        """
        self._mark_is_at_rss = False  # else ``rearm`` has nothing to do
        try:
            self.rearm()
            rss, peak = self._rss_and_peak()
        except OSError:
            return False
        return peak <= rss + 16 * MIB  # other threads may free memory in between

    @property
    def sampled(self) -> bool:
        """True if the kernel's mark is not used."""
        return self._clear_refs is None

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return the reading of the host, as in ``Probe``; the peak takes no extra time.

        The total is the RAM of the machine or the container, or the limit on the address space if
        that is lower.
        """
        if os.getpid() != self._pid:  # after a fork the descriptors name the parent process
            self.use_mark(exact=self._exact)
        if detail:
            self._total_bytes = total_bytes()  # a container's limit may change at run time
        rss, mark = self._rss_and_peak()
        self._mark_is_at_rss = mark <= rss
        method: Method
        if self._clear_refs is None:
            method = "sampled"
            highest = rss
        else:
            method = "kernel"
            highest = max(mark, self._peak_before_resets)
        total = self._total_bytes
        address_limit = own_limits.bytes_of_limit("RLIMIT_AS")  # code may set it at any time
        if address_limit is not None:
            total = min(total, address_limit)
        # By position, which is faster: every cell makes two.
        reading = Reading(
            "cpu", rss, highest, method, total, None, None, None, self.note, self._mapped_bytes
        )
        return (reading,)

    def _rss_and_peak(self) -> tuple[int, int]:
        """Read the RSS and the kernel's mark, and return both; without a mark the RSS twice.

        Also store the size of the address space in ``_mapped_bytes``, which the same file has.
        """
        if self._status is not None:
            status = os.pread(self._status, 4096, 0)
            address_space = _ADDRESS_SPACE.search(status)
            self._mapped_bytes = None if address_space is None else int(address_space[1]) * KIB
            mark_and_rss = _MARK_AND_RSS.search(status)
            if mark_and_rss is not None:  # some systems' status lacks these lines
                return int(mark_and_rss[2]) * KIB, int(mark_and_rss[1]) * KIB
        rss = rss_bytes()
        return rss, rss

    def rearm(self) -> None:
        """Begin a new peak: reset the kernel's mark to the RSS.

        The process has one mark, so its peak is stored for the other probes that read it first.
        """
        if self._clear_refs is not None and not self._mark_is_at_rss:
            other_probes = [probe for probe in self._probes_with_mark if probe is not self]
            if other_probes:
                _, peak = self._rss_and_peak()
                for probe in other_probes:
                    probe._peak_before_resets = max(probe._peak_before_resets, peak)
            os.write(self._clear_refs, b"5")
        self._peak_before_resets = 0

    def close(self) -> None:
        """Close the files; a later ``read`` would sample."""
        self._probes_with_mark.discard(self)
        for descriptor in (self._status, self._clear_refs):
            if descriptor is not None:
                os.close(descriptor)
        self._status = self._clear_refs = None


def rss_bytes() -> int:
    """Return this process's RSS."""
    # Without the builtin ``open``, which the user's code may have replaced.
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return int(_psutil().Process().memory_info().rss)
    try:
        return _rss_in(os.read(file, 200))
    finally:
        os.close(file)


_TEXT = ctypes.c_char * 200
"""The type of a buffer for ``/proc/self/statm``. It is made once, because a type made for each call
would be garbage that the next collection finds.
"""


@functools.cache  # each lookup makes garbage, as for ``_TEXT``
def _c_pread() -> Callable[..., object]:
    """Return the C library's ``pread``, called without releasing the GIL."""
    return ctypes.PyDLL(None).pread


def decrease_during(call: functools.partial[T]) -> tuple[T, int | None]:
    """Call a function written in C; return its result, and the bytes by which RSS fell during the
    call; None if unknown.

    No other Python thread runs between the two readings, because none of the three calls releases
    the GIL: so the bytes are the call's own.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return call(), None
    try:
        text_before = _TEXT()
        text_after = _TEXT()
        read_before = _call_that_reads(file, text_before)
        read_after = _call_that_reads(file, text_after)
        # A ``for`` loop could switch threads between two calls. Here, all of it runs in C.
        run: Any = functools.partial.__call__
        _, result, _ = map(run, (read_before, call, read_after))
    finally:
        os.close(file)
    return result, _rss_in(text_before.value) - _rss_in(text_after.value)


def _call_that_reads(file: int, text: ctypes.Array[ctypes.c_char]) -> functools.partial[object]:
    """Return a call in C that reads the file with the descriptor ``file`` into ``text``."""
    return functools.partial(_c_pread(), file, text, len(text), ctypes.c_long())


def _rss_in(statm: bytes) -> int:
    """Return the RSS in bytes from the text of ``/proc/self/statm``, which counts pages."""
    return int(statm.split()[1]) * PAGE_BYTES


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
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    else:
        total = int(_psutil().virtual_memory().total)
    group = cgroup.tightest(root)
    if group is None:
        return total
    return min(total, group.limit_bytes)


def available_bytes(root: Path = cgroup.ROOT) -> int:
    """Return the host memory that this process can still allocate: the smallest of the figures of
    the system, of its containers and of its own limits.
    """
    by_own_limits = [limit.available_bytes for limit in own_limits.limits()]
    return min([available_on_machine(root), *by_own_limits])


def available_on_machine(root: Path = cgroup.ROOT) -> int:
    """Return the host memory that the system and the containers still have, without the process's
    own limits.
    """
    available = int(_psutil().virtual_memory().available)
    by_containers = [group.available_bytes for group in cgroup.limits(root)]
    return min([available, *by_containers])


def host_figures(children_bytes: int | None, segments_bytes: int) -> HostFigures:
    """Return the system's figures of host memory.

    Args:
        children_bytes: memory of the child processes; None if unknown.
        segments_bytes: memory of this process's shared memory segments.
    """
    memory = _psutil().virtual_memory()
    rss = _rss_by_kind()
    available = int(memory.available)
    return HostFigures(
        ram_bytes=int(memory.total),
        free_bytes=int(getattr(memory, "free", available)),
        available_bytes=available,
        private_bytes=rss.private_bytes,
        # The process need not have touched all of the segments.
        shared_bytes=max(rss.shared_bytes, segments_bytes),
        file_bytes=rss.file_bytes,
        children_bytes=children_bytes,
        group=cgroup.tightest(),
        limit=own_limits.nearest(),
        own=own_pages(),
    )


class _RssByKind(NamedTuple):
    """RSS of this process by the kinds of its pages."""

    private_bytes: int
    shared_bytes: int = 0
    file_bytes: int = 0
    """Pages of mapped files."""


def _rss_by_kind() -> _RssByKind:
    """Return the RSS by kind; all of it as private if the system does not distinguish them."""
    try:
        status = Path("/proc/self/status").read_bytes()
        private_bytes = own_limits.figure(status, b"\nRssAnon:")
        shared_bytes = own_limits.figure(status, b"\nRssShmem:")
        file_bytes = own_limits.figure(status, b"\nRssFile:")
    except (OSError, ValueError):  # not Linux, or before 4.5
        return _RssByKind(int(_psutil().Process().memory_info().rss))
    return _RssByKind(private_bytes, shared_bytes, file_bytes)


class RamFigures(NamedTuple):
    """Figures of the host's memory at a span's start, to compare with those at its end: they show
    which part of the growth are modules, and which are free pages. Reading them takes microseconds.
    """

    file_bytes: int
    """Pages of mapped files in RAM, code mostly; 0 if the system does not report them."""
    free_bytes: int
    """Free bytes in the heap of glibc's malloc, with or without pages in RAM."""
    modules: int
    """Number of imported modules."""
    arrow_peak_bytes: int = 0
    """The highest allocation of pyarrow's pool ever: memory that it has freed since may stay there
    as free pages.
    """
    free_blocks_bytes: int = 0
    """Free blocks in the arenas of Python's allocator: a fragmented arena keeps its RAM."""

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
        arrow_peak = 0
        pool = getattr(loaded("pyarrow"), "default_memory_pool", None)
        if pool is not None:
            arrow_peak = pool().max_memory() or 0
        return cls(
            file_bytes, free_heap_bytes() or 0, len(sys.modules), arrow_peak, free_blocks_bytes()
        )


# -- other processes ----------------------------------------------------------------------------

_SAME_START_SECONDS = 60.0
"""Maximum difference between two readings of a process's start time, which changes if the system's
clock is set.
"""


SYSTEMS_PID_NAMESPACE = "pid:[4026531836]"
"""The system's own PID namespace, whose PIDs the drivers and the system log report
(PROC_PID_INIT_INO in Linux's proc_ns.h).
"""


def process_space() -> str:
    """Return a text that identifies the boot of the machine and the PID namespace of this process:
    a PID means the same process only where it is equal.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return str(round(_psutil().boot_time(), -2))


def is_running(pid: int, started: float | None = None) -> bool:
    """Return True if the process ``pid`` runs here, and it is the one started at the Unix time
    ``started``, if that is given: a PID may have been used again.
    """
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        is_same = started is None or abs(process.create_time() - started) < _SAME_START_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError):  # there is none, or it is no possible PID
        return False
