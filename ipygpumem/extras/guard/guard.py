"""Raises ``MemoryError`` in a cell before the system ends the kernel's process.

While a cell runs, a soft ``RLIMIT_DATA`` refuses allocations beyond the memory left. It counts
memory from its allocation. A job in the meter's thread watches all other use: pages allocated
earlier and used now, child processes, other programs. It interrupts the cell's Python code, but no
long call into C.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

from ipygpumem.extras.guard.headroom import Figures, Headroom
from ipygpumem.extras.guard.limit import NO_LIMIT, SMALL_BYTES, AllocationLimit
from ipygpumem.extras.guard.raising import raise_around
from ipygpumem.extras.guard.refusal import Refusal, refusal_in
from ipygpumem.extras.guard.replacing import Around, replace
from ipygpumem.heap.bulk import OBSERVERS
from ipygpumem.interrupts import original_handler
from ipygpumem.introspect import is_instance, text_of
from ipygpumem.inventory.top import LargestNames, select
from ipygpumem.magics.tensors import largest
from ipygpumem.probes import own_limits
from ipygpumem.probes.host import free_heap_bytes, malloc_trim
from ipygpumem.probes.own_limits import resource
from ipygpumem.reclaim import tracebacks
from ipygpumem.report.inventory import top_report
from ipygpumem.report.layout import Report, clean
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.context import ShellContext
from ipygpumem.units import MIB, format_bytes

_LEAST_ROOM, _LAST_ROOM = 32 * MIB, 4 * MIB
"""Bytes that a cell may allocate, however little is left: ``del`` must work. At most half of what
is left above half of the reserve, but an eighth of the memory left, because cells that keep what
they take come one after the other. Once ``--limit`` is reached half of what is left of the first,
but at least the second.
"""
_TICK_SECONDS, _TOUCHED_TICK_SECONDS, _LONG_TICK_SECONDS = 0.05, 0.002, 1.0
"""Shortest time between two looks, the same where the limit on allocations does not help, and the
longest.
"""
_SEARCH_TICK_SECONDS = 0.001
"""Shortest time between two looks while objects are examined."""
_IDLE_SECONDS = 0.1
"""Shortest time between two looks between cells; with less time the next cell wakes the thread."""
_BYTES_PER_SECOND = 4 << 30
"""Speed at which a cell may use memory."""
_GRACE_SECONDS = 1.0
"""Time that a cell has to free memory after an error before the next one."""
_ABORT = ("polars",)
"""Libraries that end the process if an allocation fails, so that allocations are not limited where
they are loaded.
"""
_SPARE_BYTES = 8 * MIB
"""Address space, which takes no RAM. Not ``malloc``'s, which would keep larger blocks after it was
freed.
"""
_STORE = "_format_exception_for_storage"
"""IPython's method that formats each error of a cell for the history; since IPython 9."""
_ROWS = 5
_ENTRIES = 25
"""Entries shown at either end of a traceback."""
_COUNTED = (
    "The guard counts memory from its allocation, even if it is never used: %gpumem guard on "
    "--touched counts only "
    "memory in use, %gpumem guard off turns it off"
)
_LIFT = "%gpumem guard off turns the guard off"
_WITHOUT_LIMIT = (
    *(
        ("_posixsubprocess", "fork_exec"),
        ("subprocess", "_fork_exec"),
        ("os", "posix_spawn"),
        ("os", "system"),
    ),
    *(("_imp", "create_dynamic"), ("ctypes", "_dlopen")),
)
"""Functions that start processes without ``os.fork``, or load libraries: OpenBLAS ends the process
where its large buffers, hardly used, are refused. An audit hook could not be removed, and misses
some of them.
"""
_BUFFERED: dict[str, Callable[[Any], object]] = {
    "numpy": lambda numpy: numpy.dot(*[numpy.ones((128, 128))] * 2),
    "scipy.linalg.blas": lambda blas: blas.dgemm(1.0, *[sys.modules["numpy"].ones((256, 256))] * 2),
}
"""Modules → a call that allocates the buffer of their OpenBLAS, which ends the process if it is
refused later. OpenMP's threads end it, too, but forked children would hang once they have been
started.
"""


_UNINTERRUPTED = tuple(f"ipygpumem.extras.guard.{name}" for name in ("guard", "limit", "replacing"))
"""Modules in which no error is raised: the cell is failing already, or its process is being
started.
"""


class MemoryGuardError(MemoryError):
    """Raised in a cell when memory is nearly used up."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or ("memory is nearly used up: the guard stopped this cell",)))


class MemoryGuard:
    """Guards the cells of one shell until ``close``."""

    observed_for = "the memory guard"

    _in_force: ClassVar[weakref.WeakSet[MemoryGuard]] = weakref.WeakSet()
    """Guards of this process, whose limit its forked children must not keep."""

    def __init__(self, context: ShellContext, most_bytes: int | None, *, touched: bool) -> None:
        self._context, self._most = context, most_bytes
        self._headroom = headroom = Headroom()
        self._whose = (
            headroom.name if most_bytes is None else f"the limit of {format_bytes(most_bytes)}"
        )
        total = (
            headroom.total_bytes if most_bytes is None else min(most_bytes, headroom.total_bytes)
        )
        self._reserve = min(max(total // 16, 32 * MIB), 512 * MIB)
        self._kept = self._reserve * 3 // 2
        """Memory left at which a cell is interrupted, and at which an allocation is refused."""
        self._touched = headroom.now().data_bytes is None or resource is None or touched
        self._limit = AllocationLimit(headroom.data_bytes, self._measure)
        self._lock = threading.Lock()
        """Protects the files and the cell. The limit's lock is taken inside it, never the other way
        round.
        """
        self._cell: Cell | None = None
        self._is_failing = self._struck = False
        self._sleeps = False
        """True while the thread does not look."""
        self._room = self._floor = self._least = 0
        self._most_private = 0
        """Private pages at which the cell is interrupted; allocations should reach ``--limit``
        before.
        """
        self._left = -1
        """Memory left when the cell was interrupted, or was refused new memory with ``--touched``;
        -1 before that.
        """
        self._struck_at = 0.0
        """Time of that interrupt; 0 once enough is left again."""
        self._given = self._private = 0
        """Bytes that the cell could allocate at its start, and the private pages then."""
        self._looked_at = 0.0
        """Time of the last look while objects are examined."""
        self._refused = ""
        """How the guard caused an error of the cell."""
        self._buffered: set[str] = set()
        self._spare: object = None
        """Small objects of all sizes and one large one, freed when nothing can be allocated."""
        self._undo = contextlib.ExitStack()
        self._undo.callback(headroom.close)
        self._allocate_buffers()
        self._join()

    def _join(self) -> None:
        _observe_forks()
        self._in_force.add(self)
        worker = self._context.meter.worker
        worker.add(self._tick)
        self._undo.callback(worker.remove, self._tick)
        OBSERVERS.append(self._look)
        self._undo.callback(OBSERVERS.remove, self._look)
        self._replace(self._context.shell, "showtraceback", self._failing)
        if hasattr(self._context.shell, _STORE):
            self._replace(self._context.shell, _STORE, self._storing)
        if history := getattr(
            self._context.shell, "history_manager", None
        ):  # starts its thread again after a fork
            self._replace(history, "store_inputs", self._lifted)
        self._replace_custom_exceptions(self._context.shell)
        self._replace(threading, "excepthook", self._thread_failing)
        for undo in raise_around(self._limit):
            self._undo.callback(undo)
        for module, name in _WITHOUT_LIMIT:
            if hasattr(sys.modules.get(module), name):
                self._replace(sys.modules[module], name, self._lifted)
        here = threading.current_thread() is threading.main_thread()
        if here and hasattr(signal, "SIGURG") and signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
            signal.signal(signal.SIGURG, self._raise)
            self._undo.callback(
                lambda: self._can_wake() and signal.signal(signal.SIGURG, signal.SIG_DFL)
            )

    def _can_wake(self) -> bool:
        """Return True if the signal is still ours; by default it is ignored. Our commands listen to
        its handler.
        """
        return (
            hasattr(signal, "SIGURG")
            and original_handler(signal.getsignal(signal.SIGURG)) == self._raise
        )

    def _replace(self, owner: Any, name: str, around: Around) -> None:
        """Call a function inside ``around``, which gets its arguments, until ``close``."""
        self._undo.callback(replace(owner, name, around))

    def _replace_custom_exceptions(self, shell: Any) -> None:
        """Raise the limit when IPython looks for the handlers of an error: it stores the error
        next, in new memory.
        """
        name, kind = "custom_exceptions", type(shell)
        if name not in vars(shell) or hasattr(kind, name):
            return

        def find(this: Any) -> Any:
            self._spare = None  # nothing can be created before this
            if this is shell and self._cell is not None:
                self._make_room()
            return vars(this)[name]

        setattr(kind, name, property(find, lambda this, value: vars(this).__setitem__(name, value)))
        self._undo.callback(delattr, kind, name)

    def close(self) -> None:
        """Undo everything."""
        self._code_ended()
        with self._lock:  # the thread may be reading the files that are closed next
            self._in_force.discard(self)
        self._limit.end()
        self._undo.close()

    @property
    def state(self) -> str:
        """The memory left, and how it is guarded."""
        room = format_bytes(self._room_in(self._trimmed()))
        how = "allocations are limited (RLIMIT_DATA), and memory in use is watched"
        if self._touched:
            how = "only memory in use is watched"
        elif aborting := self._aborting():
            how = (
                f"only memory in use is watched: {aborting} ends the process if an allocation fails"
            )
        elif self._limit.is_users():
            how = "only memory in use is watched: other code has set RLIMIT_DATA, which is kept"
        return f"the guard is on: a cell can use {room} of {self._whose} · {how}"

    # -- the limit -------------------------------------------------------------------------------

    @staticmethod
    def _aborting() -> str:
        return next((name for name in _ABORT if name in sys.modules), "")

    def _trimmed(self) -> Figures:
        """Return the current figures; if little is left, free heap, which counts as used, is
        returned before.
        """
        figures = self._headroom.now()
        left = self._left_in(figures, self._kept)
        if (
            left < 4 * self._reserve
            and left < (free_heap_bytes() or 0)
            and (trim := malloc_trim()) is not None
        ):
            trim(0)
            figures = self._headroom.now()
        return figures

    def _room_in(self, figures: Figures) -> int:
        """Return the bytes that a cell that begins now may allocate."""
        return max(self._left_in(figures, self._kept), self._least_in(figures))

    def _least_in(self, figures: Figures) -> int:
        """Return the bytes that it may allocate even if nothing is left."""
        left = figures.available_bytes
        room = min(_LEAST_ROOM, max((left - min(self._reserve // 2, _LEAST_ROOM)) // 2, left // 8))
        if (
            self._most is not None
        ):  # else cells that keep what they take would exceed it step by step
            room = min(
                room, max((self._most + _LEAST_ROOM - figures.private_bytes) // 2, _LAST_ROOM)
            )
        return room

    def _left_in(self, figures: Figures, reserve: int = 0) -> int:
        left = figures.available_bytes - reserve
        return max(0, left if self._most is None else min(left, self._most - figures.private_bytes))

    def _slack_in(self, figures: Figures) -> int:
        """Return the bytes that stay free although the cell has used up its memory.

        libzmq's own threads allocate a few KiB when a front-end sends a message, and end the
        process where that is refused. A loop that tries again and again uses the slack up, an
        eighth of the rest at each look, but never the reserve.
        """
        left = figures.available_bytes - self._reserve * 5 // 4
        if self._most is not None:
            left = min(left, self._most + _LEAST_ROOM // 4 - figures.private_bytes)
        return max(0, left // 8)

    def _cushion_in(self, figures: Figures) -> int:
        """Return the bytes that may be added to the limit while code around the user's runs.

        It is half of what is left above half of the reserve, so that other threads get less each
        time that they use it.
        """
        left = figures.available_bytes - self._reserve // 2
        if self._most is not None:
            left = min(left, self._most_private + self._kept - figures.private_bytes)
        return max(0, left // 2)

    def _spare_in(self, figures: Figures) -> int:
        """Return the bytes that the cell may still use before it is interrupted."""
        left = figures.available_bytes - self._least
        return left if self._most is None else min(left, self._most_private - figures.private_bytes)

    def _renew(self, figures: Figures) -> None:
        """Limit the process to the memory left now; with ``--touched`` only once none is left."""
        if figures.data_bytes is None:
            return
        left = self._left_in(figures, self._kept)
        wanted = max(figures.data_bytes + max(left, self._slack_in(figures)), self._floor)
        if self._aborting() or (self._touched and left):
            wanted = NO_LIMIT
        with self._limit.lock:
            if self._touched and not left:
                self._left = self._left_in(figures)
            self._limit.set_bounds(wanted, self._cushion_in(figures), keep_room=self._is_failing)

    def _measure(self) -> None:
        """Renew the limit after a call that took memory for long.

        It stays until the next look if another thread has closed the files, or if no memory is left
        to read them: this runs inside the user's calls, which must not fail by it.
        """
        with contextlib.suppress(OSError, ValueError, MemoryError):
            self._renew(self._headroom.now())

    def _lifted(self, arguments: object, options: object) -> AbstractContextManager[None]:
        return self._limit.lifted()

    def abandon(self) -> None:
        """End the guard in a forked child: the watching thread stayed in the parent process."""
        self._cell, self._struck = None, False
        self._lock = threading.Lock()
        self._limit.abandon()

    # -- a cell ----------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Guard the cell."""
        if (
            cell.nested
            or (self._cell is not None and not self._cell.over)
            or self not in self._in_force
        ):
            return
        if text_of(getattr(cell.info, "raw_cell", None)).startswith("%gpumem guard off"):
            return  # threads of the user may be using up the memory
        if self._spare is None:
            with contextlib.suppress(
                MemoryError, OSError
            ):  # threads of an earlier cell have used up the memory
                self._spare = _spare_memory()
        figures = self._trimmed()
        left = figures.available_bytes
        room = self._least_in(figures)
        self._floor = (figures.data_bytes or 0) + room
        self._least = min(self._reserve, max(left // 2, left - 2 * room))
        self._most_private = max((self._most or 0) + _LEAST_ROOM // 2, figures.private_bytes + room)
        self._room = min(self._reserve, (left - room) // 2)
        self._cell, self._is_failing, self._refused, self._struck_at, self._left = (
            cell,
            False,
            "",
            0.0,
            -1,
        )
        cell.closers.append(self._code_ended)
        self._limit.begin()
        self._renew(figures)
        self._given, self._private = (
            self._limit.wanted_bytes - (figures.data_bytes or 0),
            figures.private_bytes,
        )
        if self._sleeps:  # waking the thread takes 100 us
            self._context.meter.worker.wake(self._tick)

    def _tick(self) -> float | None:
        """Look at the memory left, and return the seconds until the next look; called in the
        meter's thread.
        """
        if self._is_failing:
            return _TICK_SECONDS
        try:
            return self._watch_with_memory()
        except MemoryError:  # other threads were faster
            return _TOUCHED_TICK_SECONDS
        except Exception as error:
            self._context.guard.failed(
                "the memory guard", error, "memory in use is watched no longer"
            )
            return None

    def _watch_with_memory(self) -> float | None:
        """Look; if the limit refuses memory to this thread, too, raise it: else the cell would
        never be interrupted.
        """
        try:
            return self._watch()
        except MemoryError:
            self._limit.enter(SMALL_BYTES)
            try:
                return self._watch()
            finally:
                self._limit.leave(renew=False)

    def _watch(self) -> float | None:
        cell = self._cell
        least = _TOUCHED_TICK_SECONDS
        with self._lock:
            if self not in self._in_force:
                return None
            figures = self._headroom.now()
        self._renew(figures)
        left = self._spare_in(figures)
        if (
            not (self._touched or self._aborting())
            and (figures.data_bytes or 0) - figures.private_bytes < left
        ):
            # else pages allocated earlier could use up the memory without meeting the limit
            least = _TICK_SECONDS
        pause = min((left + self._least // 2) / _BYTES_PER_SECOND, _LONG_TICK_SECONDS)
        self._sleeps = cell is None and pause < _IDLE_SECONDS and not self._limit.is_on
        if cell is None and self._limit.is_on and not self._limit.has_threads():
            self._threads_ended()
        if left > 0:
            self._struck_at = 0.0
        elif cell is not None and time.monotonic() - self._struck_at > _GRACE_SECONDS:
            self._strike_unless_trimming_helps(cell)
        # a cell may have begun
        return None if self._sleeps and self._cell is None else max(pause, least)

    def _strike_unless_trimming_helps(self, cell: Cell) -> None:
        """Interrupt the cell, unless enough is left without the pages that ended threads have left
        in their heaps.
        """
        with self._lock:
            figures = self._trimmed()
        if self._spare_in(figures) <= 0:
            self._struck_at = time.monotonic()
            self._strike(cell, self._left_in(figures))

    def _look(self) -> None:
        """End our own search after the cell before it uses up the memory: the limit does not count
        free heap.
        """
        is_after = self._cell is None or self._is_failing
        if is_after and time.monotonic() - self._looked_at > _SEARCH_TICK_SECONDS:
            left, self._looked_at = self._headroom.now().available_bytes, time.monotonic()
            if left < self._least // 2:
                raise MemoryError("too little memory is left to examine objects")

    def _strike(self, cell: Cell, left: int) -> None:
        """Raise the error in the cell's thread; a signal also ends its wait for threads and
        processes.
        """
        with self._lock:
            if cell is not self._cell:  # its code has ended
                return
            self._struck, self._left = True, left
            if self._can_wake() and cell.thread == threading.main_thread().ident:
                signal.pthread_kill(cell.thread, signal.SIGURG)
            elif _runs_code(sys._current_frames().get(cell.thread)):
                error = ctypes.py_object(MemoryGuardError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(cell.thread), error)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        struck, self._struck = self._struck, False
        if (
            struck and _runs_code(frame) and self._spare_in(self._headroom.now()) <= 0
        ):  # it may have freed some since
            raise MemoryGuardError

    def _make_room(self) -> None:
        """Raise the limit, for an error and its traceback; in another thread than the cell's until
        the next look.
        """
        cell = self._cell
        with self._limit.lock:
            if cell is None or cell.thread != threading.get_ident():
                if not self._is_failing:
                    room = min(self._room // 4, self._room_for_error())
                    self._limit.add_room(room)  # other threads may use it up
                return
            was_failing, self._is_failing, self._struck = self._is_failing, True, False
            self._limit.add_room(min(self._room, _LAST_ROOM))
            if not was_failing and self._limit.wanted_bytes != NO_LIMIT:
                with contextlib.suppress(MemoryError, OSError, ValueError):
                    self._limit.follow()
            self._limit.add_room(self._room_for_error())

    def _room_for_error(self) -> int:
        """Return the bytes for an error and its traceback; threads of the cell that go on may use
        them up.
        """
        try:
            figures = self._headroom.now()
        except (MemoryError, OSError, ValueError):
            return min(self._room, _LAST_ROOM)
        room = (
            self._cushion_in(figures) if self._limit.has_threads() else figures.available_bytes // 2
        )
        return min(self._room, room)

    @contextlib.contextmanager
    def _failing(self, arguments: object, options: dict[str, Any]) -> Iterator[None]:
        """Make room for the error that IPython shows, and find out why it came."""
        if self._cell is not None:
            self._limit.wait_for_threads()
            self._make_room()
        if self._is_failing:
            try:
                explained = self._explained(sys.exc_info()[1])
                self._refused = explained or self._refused
                if self._cell is not None:
                    self._cell.guarded = explained
            except MemoryError:
                self._refused = "stopped the cell"
            except Exception as error:  # IPython must show the user's error
                self._context.guard.failed("the memory guard", error, "its report may be missing")
        with _shortened(sys.exc_info()[1] if self._is_failing else None):
            yield
        # else the cell goes on, as after %run
        self._is_failing &= options.get("running_compiled_code", False)

    @contextlib.contextmanager
    def _thread_failing(self, arguments: tuple[Any, ...], options: object) -> Iterator[None]:
        """Find out why an error ends a thread: the report comes with the cell, which goes on."""
        if self._limit.is_on:
            try:
                error = getattr(next(iter(arguments), None), "exc_value", None)
                self._refused = self._explained(error) or self._refused
            except Exception as failure:  # Python must show the thread's error
                self._context.guard.failed("the memory guard", failure, "its report may be missing")
        yield

    @contextlib.contextmanager
    def _storing(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        """Shorten an error's traceback while IPython formats it for its history."""
        error = next(iter(arguments), None)
        with _shortened(error if is_instance(error, BaseException) and self._is_failing else None):
            yield

    def _explained(self, error: BaseException | None) -> str:
        """Return how the guard caused an error, or one that led to it; empty if it did not."""
        if error is None:
            return ""
        errors = list(tracebacks.chain(error))
        if any(is_instance(item, MemoryGuardError) for item in errors):
            return self._stopped_text()
        if self._aborting() or self._limit.is_users():
            return ""
        refusals = (refusal_in(item) for item in errors)
        for refusal in refusals:
            if refusal is not None and (text := self._refused_text(refusal)):
                return text
        return ""

    def _stopped_text(self) -> str:
        left = format_bytes(max(0, self._left))
        return f"stopped the cell: only {left} of {self._whose} were left. {_LIFT}"

    def _refused_text(self, refusal: Refusal) -> str:
        """Return the text for a request that the limit refused; empty if something
        else refused it.
        """
        figures = self._headroom.now()
        asked = refusal.asked_bytes
        if figures.data_bytes is None or (asked or 0) > self._headroom.machine_bytes:
            return ""  # no limit, or the request cannot be met without it either
        if self._touched:  # the limit is in force only once nothing is left
            return "" if self._left < 0 or refusal.kind == "raised" else self._stopped_text()
        left = self._left_at_refusal(figures.data_bytes)
        is_plenty = left > max(_LEAST_ROOM, self._given // 8)
        if asked is not None and asked <= left - _LEAST_ROOM:
            return ""
        if asked is None and is_plenty and refusal.kind in ("raised", "internal"):
            return ""
        is_sure = refusal.kind in ("refused", "internal") and not (asked is None and is_plenty)
        what = "a request" if asked is None else format_bytes(asked)
        perhaps = "" if is_sure else "perhaps "
        remaining = f"{format_bytes(max(0, left))} of {self._whose} were left for this cell"
        return f"{perhaps}refused {what}: {remaining}. {_COUNTED}"

    def _left_at_refusal(self, data_bytes: int) -> int:
        """Return the bytes left at a failed allocation: unwinding may have freed much, but the peak
        is known.
        """
        left = self._limit.wanted_bytes - data_bytes - _SPARE_BYTES * (self._spare is None)
        if self._context.config.host_peak == "kernel":
            status = Path("/proc/self/status").read_bytes()
            shared = own_limits.figure(status, b"\nRssFile:") + own_limits.figure(
                status, b"\nRssShmem:"
            )
            left = min(
                left,
                self._given - (own_limits.figure(status, b"\nVmHWM:") - shared - self._private),
            )
        return left

    def _code_ended(self) -> list[Report]:
        """Restore the user's limit, unless threads of the cell go on: our own work and callbacks
        have none.
        """
        with self._lock:
            cell, self._cell = self._cell, None
            if not self._limit.has_threads():
                self._limit.end()
            if self._struck and cell is not None:  # it may not have been raised yet
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(cell.thread), None)
            self._struck = False
        return []

    def _threads_ended(self) -> None:
        """Restore the user's limit after the last thread of a cell, if no other cell has begun."""
        with self._limit.lock:
            if self._cell is None:
                self._limit.end()

    def cell_ended(self, cell: Cell) -> Sequence[Report]:
        """Return the report of an error that the guard caused."""
        self._is_failing = False
        if cell.nested or self._cell is not None:
            return ()
        self._allocate_buffers()
        refused, self._refused = self._refused, ""
        return [self._report(refused)] if refused else ()

    def _allocate_buffers(self) -> None:
        for name, allocate in _BUFFERED.items():
            if name in sys.modules and name not in self._buffered:
                self._buffered.add(name)
                allocate(sys.modules[name])

    def _report(self, refused: str) -> Report:
        """Return why the guard acted, what is free now, and the largest names with the lines that
        free them.
        """
        figures, names = self._headroom.now(), None
        try:
            with self._limit.bounded((figures.data_bytes or 0) + figures.available_bytes // 2):
                names = select(largest(self._context.shell), min_bytes=MIB)
        except MemoryError:
            refused += ". Too little memory is left to measure the names"
        return guard_report(refused, self._room_in(self._trimmed()), names)

    def shown(self) -> None:
        """Do nothing."""


def guard_report(refused: str, room_bytes: int, names: LargestNames | None) -> Report:
    """Return why the guard acted, then remarks, what the next cell can use, and the
    largest names.
    """
    refused, *remarks = map(clean, refused.split(". "))
    found = (
        top_report(dataclasses.replace(names, used_bytes={}), top=_ROWS).tables
        if names is not None
        else ()
    )
    tables = [dataclasses.replace(table, title="the largest names") for table in found]
    head = [f"the memory guard {refused}", f"the next cell can use {format_bytes(room_bytes)}"]
    return Report("guard", head, remarks, tables, is_trouble=True)


@contextlib.contextmanager
def _shortened(error: BaseException | None) -> Iterator[None]:
    """Leave out the middle of long tracebacks while IPython shows them: a deep recursion would use
    up the reserve.

    The signal handler's frame at the end is removed for good.
    """
    removed = list[tuple[TracebackType, TracebackType]]()
    for one in () if error is None else tracebacks.chain(error):
        entries, trace = [], tracebacks.traceback_of(one)
        while trace is not None:
            entries.append(trace)
            trace = trace.tb_next
        if entries[1:] and entries[-1].tb_frame.f_code is MemoryGuard._raise.__code__:
            entries.pop()
            entries[-1].tb_next = None
        if len(entries) > 2 * _ENTRIES:
            removed.append((entries[_ENTRIES - 1], entries[_ENTRIES]))
            entries[_ENTRIES - 1].tb_next = entries[-_ENTRIES]
    try:
        yield
    finally:
        for last, following in removed:
            last.tb_next = following


def _spare_memory() -> object:
    small: list[object] = [bytes(size) for size in range(1, 480, 16) for _ in range(100)]
    small += [*map(float, range(100)), *(object() for _ in range(100))]
    return small, mmap(-1, _SPARE_BYTES, access=ACCESS_COPY)


def _runs_code(frame: FrameType | None) -> bool:
    """Return True if a cell's code runs at ``frame``: an error in the kernel's event loop would end
    the kernel.

    While ``%%isolate`` waits for its child process, an error would lose a message; the system ends
    the child first.
    """
    if frame is not None and text_of(frame.f_globals.get("__name__")) in _UNINTERRUPTED:
        return False
    while frame is not None and frame.f_code.co_name != "run_code":
        if text_of(frame.f_globals.get("__name__")).startswith("ipygpumem.extras.isolate."):
            return False
        frame = frame.f_back
    return frame is not None


@functools.cache
def _observe_forks() -> None:
    """Register the hook once: it cannot be removed."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    guards = list(MemoryGuard._in_force)
    MemoryGuard._in_force.clear()
    for guard in guards:
        guard.abandon()
