"""Knows the threads that cells have started, and waits for them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from ipygpumem.heap.knowledge.frames import frames_of_other_threads

_LONGEST_WAIT_SECONDS = 1.0
"""Longest wait for a cell's threads."""
_CHECK_SECONDS = 0.02
"""Time between two checks."""
_CHECKS_WITHOUT_CHANGE = 3
"""Number of equal checks after which the threads allocate nothing."""


class _ThreadsState(NamedTuple):
    """One check of a cell's threads."""

    threads: int
    """Number of threads that run code."""
    data_bytes: int
    """Memory that the process has allocated."""


_UNKNOWN_STATE = _ThreadsState(threads=-1, data_bytes=-1)


class CellThreads:
    """The threads that were started under a guard's limit.

    Args:
        data_bytes: returns the memory that this process has allocated; None if it is unknown.
    """

    def __init__(self, data_bytes: Callable[[], int | None]) -> None:
        self._data_bytes = data_bytes
        self._running = set[int]()
        """Threads that run, by identity. They add themselves: ``start`` may be interrupted, and
        until Python 3.13 a thread whose ``join`` was is not alive for ``is_alive``, although it
        runs.
        """

    def begin(self) -> None:
        """Note that the calling thread, which was started under the limit, runs.

        Without a lock, which the thread that starts it may hold; adding an item needs none.
        """
        self._running.add(threading.get_ident())

    def end(self) -> None:
        """Note that the calling thread ends."""
        self._running.discard(threading.get_ident())

    def are_busy(self) -> bool:
        """Return True if a thread that was started in a cell still runs code."""
        return bool(self._busy_threads())

    def _busy_threads(self) -> set[int]:
        """Return the running threads that were started in a cell, without a pool's idle workers.

        ``asyncio.to_thread`` keeps its workers for good; they allocate nothing until the next call.
        """
        pool: Any = sys.modules.get("concurrent.futures.thread")
        if pool is None or not self._running:
            return self._running
        try:
            frames = frames_of_other_threads().items()
            idle_workers = {thread for thread, frame in frames if _waits_for_work(frame, pool)}
            return self._running - idle_workers
        except MemoryError:
            return self._running

    def wait(self) -> None:
        """Wait a moment until a cell's threads have ended or allocate nothing: they would use up
        what is added next.

        Threads that fill the memory end at their next allocation, because it is refused.
        """
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        last_state = _ThreadsState(threads=0, data_bytes=0)
        unchanged_checks = 0
        while unchanged_checks < _CHECKS_WITHOUT_CHANGE and time.monotonic() < end:
            try:
                state = _ThreadsState(
                    threads=len(self._busy_threads()), data_bytes=self._data_bytes() or 0
                )
            except MemoryError:  # they still allocate
                state = _UNKNOWN_STATE
            if state.threads == 0:
                return
            if state == last_state:
                unchanged_checks += 1
            else:
                unchanged_checks = 0
            last_state = state
            time.sleep(_CHECK_SECONDS)

    def forget_all(self) -> None:
        """Forget all threads: a forked child has none of them."""
        self._running.clear()


def _waits_for_work(frame: FrameType, pool: Any) -> bool:
    """Return True if the innermost frame of a thread is that of a pool's worker between two calls:
    its queue is written in C and has no frame.
    """
    return frame.f_code is getattr(getattr(pool, "_worker", None), "__code__", None)
