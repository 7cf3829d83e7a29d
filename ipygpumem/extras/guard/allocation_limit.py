"""Limits what this process may allocate while a cell runs, with a soft ``RLIMIT_DATA``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ipygpumem.extras.guard.cell_threads import CellThreads
from ipygpumem.probes.own_limits import resource
from ipygpumem.probes.pages import PAGE_BYTES
from ipygpumem.units import MIB

NO_LIMIT = -1
SMALL_BYTES = 2 * MIB
"""Memory that a call needs that starts no thread: Python asks the system for 1 MiB at once."""

_MARK = 1907
"""Our limits, divided by the page size, have this remainder. Linux ignores it; code may save and
restore them.
"""
_LEAST_BYTES = MIB // 4
"""Memory that such a call gets, however little is left: ``malloc`` asks the system for 128 KiB more
than it needs.
"""
_RAISED_SECONDS = 1.0
"""Longest time for which one call raises the limit: a socket may wait for a message for hours."""
_STACK_BYTES = 8 * MIB
"""A thread's stack where the system does not limit it."""


def stack_bytes() -> int:
    """Return the address space of a new thread's stack, which ``RLIMIT_DATA`` counts whether it is
    used or not.
    """
    chosen = threading.stack_size()
    if chosen or resource is None:
        return chosen or _STACK_BYTES
    soft = int(resource.getrlimit(resource.RLIMIT_STACK)[0])
    return _STACK_BYTES if soft == NO_LIMIT else soft


class AllocationLimit:
    """Refuses allocations beyond ``wanted_bytes`` while ``is_on``, in all threads and in native
    code.

    The limit cannot tell the user's code from the code around it, and some native code ends the
    process where an allocation is refused: libzmq, when a thread prints for the first time. So the
    limit is raised for a moment around such calls (``begin_raise`` and ``end_raise``), and absent
    while a process is started (``without_limit``). Other threads may use up what is added in this
    moment, so it is a part of the memory that is really left.
    """

    def __init__(self, data_bytes: Callable[[], int | None], renew: Callable[[], None]) -> None:
        """``renew`` measures the memory left and calls ``set_bounds``, if there is memory to
        measure it.
        """
        self.lock = threading.RLock()
        """Reentrant: the garbage collector may close a socket while it is held."""
        self.is_on = False
        """True while a cell's code runs."""
        self.is_failing = False
        """True from an error of the cell until it was shown; the room for it stays until then."""
        self.wanted_bytes = NO_LIMIT
        """The limit for the cell's code."""
        self._data_bytes = data_bytes
        self._renew = renew
        self.threads = CellThreads(data_bytes)
        if resource is None:
            self._users_limit = NO_LIMIT
        else:
            self._users_limit = int(resource.getrlimit(resource.RLIMIT_DATA)[0])
        """The user's own limit, which was in force before ours."""
        self._error_bytes = 0
        """Bytes added to the limit for an error and its traceback."""
        self._cushion_bytes = 0
        """Bytes that may be added while the limit is raised."""
        self._raised_bytes = 0
        """The limit while it is raised, if so much is left."""
        self._least_bytes = 0
        """The limit while it is raised, however little is left."""
        self._lifts = 0
        """Number of calls for which the limit is lifted now."""
        self._raises = 0
        """Number of calls for which it is raised now."""
        self._raised_until = 0.0

    def is_set_by_user(self) -> bool:
        """Return True if other code has set a limit since this guard was switched on.

        That code may also have lifted the user's limit, which is then forgotten.
        """
        soft = (
            self._users_limit
            if resource is None
            else int(resource.getrlimit(resource.RLIMIT_DATA)[0])
        )
        if soft == NO_LIMIT:
            self._users_limit = NO_LIMIT
        return soft != self._users_limit and soft % PAGE_BYTES != _MARK

    def switch_on(self) -> None:
        """Begin to limit a cell's code at the next ``set_bounds``."""
        with self.lock:
            self.is_on = True
            self.is_failing = False
            self._error_bytes = 0
            self._raised_until = 0.0

    def switch_off(self) -> None:
        """Restore the user's limit: our own work, and callbacks between cells, are not limited."""
        with self.lock:
            self.is_on = False
            self._apply()

    def begin_error(self) -> None:
        """Keep the room added from now on, until ``end_error`` or the next ``switch_on``."""
        self.is_failing = True

    def end_error(self) -> None:
        """Take back the room for an error at the next ``set_bounds``."""
        self.is_failing = False

    def set_bounds(self, wanted_bytes: int, cushion_bytes: int) -> None:
        """Set the limit for the cell's code, and what is added while the limit is raised."""
        with self.lock:
            self.wanted_bytes = wanted_bytes
            self._cushion_bytes = cushion_bytes
            if not self.is_failing:
                self._error_bytes = 0
            if self.is_on:
                self._apply()

    def raise_to_allocated(self) -> None:
        """Raise the limit to the memory allocated now: threads may have gone on since the last
        check.
        """
        with self.lock:
            self.wanted_bytes = max(self.wanted_bytes, self._data_bytes() or 0)
            self._apply()

    def lower_by(self, size_bytes: int) -> None:
        """Lower the limit until the next check: address space was returned to the system."""
        with self.lock:
            if self.wanted_bytes != NO_LIMIT:
                self.wanted_bytes -= size_bytes
                self._apply()

    def add_room(self, room_bytes: int) -> None:
        """Raise the limit by ``room_bytes``, until the next ``set_bounds`` that does
        not keep it.
        """
        with self.lock:
            self._error_bytes = room_bytes
            self._apply()

    def reset_in_child(self) -> None:
        """Restore the user's limit in a forked child, where another thread may have
        held the lock.
        """
        self.lock = threading.RLock()
        self.threads.forget_all()
        self._lifts = 0
        self._raises = 0
        self.switch_off()

    @contextlib.contextmanager
    def limited_to(self, size_bytes: int) -> Iterator[None]:
        """Limit our own work between cells."""
        self._set(size_bytes)
        try:
            yield
        finally:
            self._apply()  # threads of a cell may go on under their limit

    @contextlib.contextmanager
    def without_limit(self) -> Iterator[None]:
        """Restore the user's limit, which a started process inherits."""
        with self.lock:
            self._lifts += 1
            self._apply()
        try:
            yield
        finally:
            with self.lock:
                self._lifts -= 1
            self._renew()  # a library may have allocated much that it does not use

    def begin_raise(self, needed_bytes: int) -> None:
        """Raise the limit so that ``needed_bytes`` can be allocated, until ``end_raise``."""
        with self.lock:
            # an interrupt right here leaves it too large, but not for long: see _RAISED_SECONDS
            self._raises += 1
            if not self.is_on or self.wanted_bytes == NO_LIMIT:
                return
            try:
                data_bytes = self._data_bytes() or 0
            except MemoryError:
                # Not even our own code can run: no limit while it reads one number.
                self._set(NO_LIMIT)
                data_bytes = self._data_bytes() or 0
            self._raise(data_bytes, needed_bytes)

    def is_used_up(self, needed_bytes: int) -> bool:
        """Return True if ``needed_bytes`` cannot be allocated, not even where the
        limit is raised.
        """
        if not self.is_on or self.wanted_bytes == NO_LIMIT:
            return False
        return (self._data_bytes() or 0) + needed_bytes > self._highest_bytes()

    def end_raise(self, *, renew: bool) -> None:
        """Undo ``begin_raise``; ``renew`` where the call has taken address space for long, which it
        hardly uses.
        """
        with self.lock:
            self._raises = max(0, self._raises - 1)
            if self._raises == 0:
                self._raised_bytes = 0
                self._apply()
        if renew and self.is_on:
            self._renew()

    def _raise(self, data_bytes: int, needed_bytes: int) -> None:
        """Raise the limit by ``needed_bytes`` above ``data_bytes``, the memory allocated now."""
        if data_bytes + needed_bytes > self._highest_bytes():
            self._renew()  # other threads have used up the cushion since the last check
        self._least_bytes = data_bytes + _LEAST_BYTES
        self._raise_to(max(data_bytes + needed_bytes, self._least_bytes))

    def _raise_to(self, size_bytes: int) -> None:
        self._raised_bytes = max(self._raised_bytes, size_bytes)
        self._raised_until = time.monotonic() + _RAISED_SECONDS
        self._apply()

    def _highest_bytes(self) -> int:
        """Return the highest limit of a raise; only ``_least_bytes`` may be above it."""
        return self.wanted_bytes + self._error_bytes + self._cushion_bytes

    def _limit_now(self) -> int:
        """Return the limit that should be in force now, or ``NO_LIMIT``."""
        if not self.is_on or self._lifts or self.wanted_bytes == NO_LIMIT:
            return NO_LIMIT
        size = self.wanted_bytes + self._error_bytes
        if self._raises and time.monotonic() < self._raised_until:
            # Other threads may have used up the memory since: the raised limit must fall with it.
            # Otherwise calls of 40 threads, of which one is always under way, would keep it high.
            most_bytes = max(self._highest_bytes(), self._least_bytes)
            size = max(size, min(self._raised_bytes, most_bytes))
        return size

    def _apply(self) -> None:
        self._set(self._limit_now())

    def _set(self, size_bytes: int) -> None:
        """Set the limit, or restore the user's with ``NO_LIMIT``; the user's is never exceeded."""
        if resource is None or self.is_set_by_user():
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bounds = [bound for bound in (self._users_limit, hard) if bound != NO_LIMIT]
        if size_bytes != NO_LIMIT:
            bounds.append(size_bytes // PAGE_BYTES * PAGE_BYTES + _MARK)
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds, default=NO_LIMIT), hard))
