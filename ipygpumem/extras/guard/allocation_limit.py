"""Limits what this process may allocate while a cell runs, with a soft ``RLIMIT_DATA``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ipygpumem.extras.guard.cell_threads import CellThreads
from ipygpumem.extras.guard.soft_limit import NO_LIMIT, SoftLimit
from ipygpumem.probes.own_limits import resource
from ipygpumem.units import MIB

SMALL_BYTES = 2 * MIB
"""Memory for a call that starts no thread: Python asks the system for 1 MiB at once."""

_LEAST_RAISE_BYTES = MIB // 4
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


class _RaisedLimit:
    """The calls around which the limit is raised now, such as a socket's ``send``, and how far.

    Calls of several threads overlap: the highest of their limits is in force until the last one
    ends.
    """

    def __init__(self) -> None:
        self.calls = 0
        """Number of calls that are under way."""
        self._limit_bytes = 0
        """The limit while they run, if so much memory is left."""
        self._least_bytes = 0
        """The limit while they run, however little memory is left."""
        self._until = 0.0
        """Time at which the limit falls even if the calls have not ended."""

    def forget_limit(self) -> None:
        """End the raise for the calls that are under way."""
        self._until = 0.0

    def end_call(self) -> bool:
        """Note the end of a call, and return True if it was the last one."""
        self.calls = max(0, self.calls - 1)
        if self.calls:
            return False
        self._limit_bytes = 0
        return True

    def raise_to(self, size_bytes: int, least_bytes: int) -> None:
        """Raise the limit to ``size_bytes``, and at least to ``least_bytes``, for a short time."""
        self._least_bytes = least_bytes
        self._limit_bytes = max(self._limit_bytes, size_bytes, least_bytes)
        self._until = time.monotonic() + _RAISED_SECONDS

    def limit_now(self, highest_bytes: int) -> int:
        """Return the limit of the calls that are under way; 0 without one.

        Args:
            highest_bytes: the memory left now, which other threads may have used up since the call
                began. The raised limit must fall with it. Otherwise calls of 40 threads, of which
                one is always under way, would keep it high.
        """
        if not self.calls or time.monotonic() >= self._until:
            return 0
        return min(self._limit_bytes, max(highest_bytes, self._least_bytes))


class AllocationLimit:
    """Refuses allocations beyond ``wanted_bytes`` while ``is_on``, in all threads and in native
    code.

    The limit cannot tell the user's code from the code around it, and some native code ends the
    process where an allocation is refused: libzmq, when a thread prints for the first time. So the
    limit is raised for a moment around such calls (``begin_raise`` and ``end_raise``), and absent
    while a process is started (``without_limit``). Other threads may use up what is added in this
    moment, so it is a part of the memory that is really left.

    Its words (raise, cushion, lift) are explained in ``guard/__init__``.

    Args:
        data_bytes: returns the process's private address space now; None if it is unknown.
        renew: measures the memory left and calls ``set_bounds``, if there is memory to measure it.
    """

    def __init__(self, data_bytes: Callable[[], int | None], renew: Callable[[], None]) -> None:
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
        self._soft_limit = SoftLimit()
        self._error_bytes = 0
        """The room for an error: bytes added to the limit while IPython shows it."""
        self._cushion_bytes = 0
        """Bytes by which a raise may exceed the limit."""
        self._raised = _RaisedLimit()
        """The limit while code around the user's runs."""
        self._lifts = 0
        """Number of calls for which the limit is absent now."""

    def is_set_by_user(self) -> bool:
        """Return True if other code has set a limit since this guard was switched on."""
        return self._soft_limit.is_set_by_user()

    def switch_on(self) -> None:
        """Begin to limit a cell's code at the next ``set_bounds``."""
        with self.lock:
            self.is_on = True
            self.is_failing = False
            self._error_bytes = 0
            self._raised.forget_limit()

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
        """Set the limit for the cell's code, and the bytes that a raise may add to it."""
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
        """Raise the limit by ``room_bytes`` until the next ``set_bounds``, or after ``begin_error``
        until the error was shown.
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
        self._raised.calls = 0
        self.switch_off()

    @contextlib.contextmanager
    def limited_to(self, size_bytes: int) -> Iterator[None]:
        """Limit our own work between cells to ``size_bytes`` of private address space."""
        self._soft_limit.set(size_bytes)
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
            # An interrupt right here leaves a call too many, and the limit too large, but not for
            # long: see _RAISED_SECONDS.
            self._raised.calls += 1
            if not self.is_on or self.wanted_bytes == NO_LIMIT:
                return
            try:
                data_bytes = self._data_bytes() or 0
            except MemoryError:
                # Not even our own code can run: no limit while it reads one number.
                self._soft_limit.set(NO_LIMIT)
                data_bytes = self._data_bytes() or 0
            if data_bytes + needed_bytes > self._highest_bytes():
                self._renew()  # other threads have used up the cushion since the last check
            self._raised.raise_to(data_bytes + needed_bytes, data_bytes + _LEAST_RAISE_BYTES)
            self._apply()

    def is_used_up(self, needed_bytes: int) -> bool:
        """Return True if ``needed_bytes`` cannot be allocated, not even where the
        limit is raised.
        """
        if not self.is_on or self.wanted_bytes == NO_LIMIT:
            return False
        return (self._data_bytes() or 0) + needed_bytes > self._highest_bytes()

    def end_raise(self, *, renew: bool) -> None:
        """Undo ``begin_raise``.

        Args:
            renew: measure the memory left again, because the call has taken address space for long,
                of which it hardly uses any: the stack of a new thread.
        """
        with self.lock:
            if self._raised.end_call():
                self._apply()
        if renew and self.is_on:
            self._renew()

    def _highest_bytes(self) -> int:
        """Return the highest limit of a raise, except for the little that each call gets."""
        return self.wanted_bytes + self._error_bytes + self._cushion_bytes

    def _limit_now(self) -> int:
        """Return the limit that should be in force now, or ``NO_LIMIT``."""
        if not self.is_on or self._lifts or self.wanted_bytes == NO_LIMIT:
            return NO_LIMIT
        for_cell = self.wanted_bytes + self._error_bytes
        return max(for_cell, self._raised.limit_now(self._highest_bytes()))

    def _apply(self) -> None:
        """Set the limit that should be in force now."""
        self._soft_limit.set(self._limit_now())
