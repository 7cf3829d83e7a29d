"""Limits what this process may allocate while a cell runs, with a soft ``RLIMIT_DATA``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ipygpumem.probes.host import PAGE_BYTES
from ipygpumem.probes.own_limits import resource

NO_LIMIT = -1

_MARK = 1907
"""Our limits, divided by the page size, have this remainder. Linux ignores it; code may save and restore them."""


class AllocationLimit:
    """Refuses allocations beyond ``wanted_bytes`` while ``is_on``, in all threads and in native code."""

    def __init__(self, renew: Callable[[], None]) -> None:
        """``renew`` measures the memory left and calls ``set_bounds``."""
        self.lock = threading.RLock()
        """Reentrant: the garbage collector may close a socket while it is held."""
        self.is_on = False
        """True while a cell's code runs."""
        self.wanted_bytes = NO_LIMIT
        """The limit for the cell's code."""
        self._renew = renew
        self._users = NO_LIMIT if resource is None else int(resource.getrlimit(resource.RLIMIT_DATA)[0])
        """The limit before ours."""
        self._room_bytes = 0
        """Added for an error and its traceback."""
        self._lifts = 0
        """Number of calls for which the limit is lifted now."""

    def is_users(self) -> bool:
        """Return True if other code has set a limit since this guard was switched on; it may also lift the user's."""
        soft = self._users if resource is None else int(resource.getrlimit(resource.RLIMIT_DATA)[0])
        if soft == NO_LIMIT:
            self._users = NO_LIMIT
        return soft != self._users and soft % PAGE_BYTES != _MARK

    def begin(self) -> None:
        """Begin to limit a cell's code at the next ``set_bounds``."""
        with self.lock:
            self.is_on, self._room_bytes = True, 0

    def end(self) -> None:
        """Restore the user's limit: our own work, and callbacks between cells, have none of ours."""
        with self.lock:
            self.is_on = False
            self._apply()

    def set_bounds(self, wanted_bytes: int, *, keep_room: bool) -> None:
        """Set the limit for the cell's code."""
        with self.lock:
            self.wanted_bytes = wanted_bytes
            if not keep_room:
                self._room_bytes = 0
            self._apply()

    def add_room(self, room_bytes: int) -> None:
        """Raise the limit by ``room_bytes``, until the next ``set_bounds`` that does not keep it."""
        with self.lock:
            self._room_bytes = room_bytes
            self._apply()

    def abandon(self) -> None:
        """Restore the user's limit in a forked child, where another thread may have held the lock."""
        self.lock = threading.RLock()
        self._lifts = 0
        self.end()

    @contextlib.contextmanager
    def bounded(self, size_bytes: int) -> Iterator[None]:
        """Limit our own work between cells."""
        self._set(size_bytes)
        try:
            yield
        finally:
            self._set(NO_LIMIT)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
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

    def _size(self) -> int:
        """Return the limit that is right now."""
        if not self.is_on or self._lifts or self.wanted_bytes == NO_LIMIT:
            return NO_LIMIT
        return self.wanted_bytes + self._room_bytes

    def _apply(self) -> None:
        self._set(self._size())

    def _set(self, size_bytes: int) -> None:
        """Set the limit, or restore the user's, which is never exceeded."""
        if resource is None or self.is_users():
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bounds = [bound for bound in (self._users, hard) if bound != NO_LIMIT]
        if size_bytes != NO_LIMIT:
            bounds.append(size_bytes // PAGE_BYTES * PAGE_BYTES + _MARK)
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds, default=NO_LIMIT), hard))
