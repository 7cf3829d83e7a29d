"""Runs jobs when they are due, in our only thread, which ends with the last job."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable

Job = Callable[[], "float | None"]
"""Returns the seconds until the next run; None waits for ``wake``. A job must not raise."""

_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP"}
"""Signals that a thread's own fault raises in it. If it blocked them, the process would end without
the report of ``faulthandler``.
"""
_CLOSE_SECONDS = 5.0
"""Seconds to wait for the thread to end."""
_NOT_DUE = math.inf
"""The time of a job that is running, or waits for ``wake``."""


class Worker:
    """Runs jobs, one at a time.

    A forked child inherits neither its jobs nor its thread: there, the first job added starts a new
    thread.
    """

    def __init__(self) -> None:
        self._start_empty()

    def _start_empty(self) -> None:
        """Begin without jobs and without a thread, as a new worker or in a forked child."""
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        """Held to read or change the attributes below; notified when they change."""
        self._next_times: dict[Job, float] = {}
        """The time, on the monotonic clock, at which each job is to run next."""
        self._thread: threading.Thread | None = None
        """The thread that runs the jobs; None while there are none."""

    def add(self, job: Job) -> None:
        """Run ``job`` as soon as possible, and again when it asks to; adding a job twice changes
        nothing.
        """
        # In a forked child, the thread and the lock's owner have stayed in the parent process.
        if os.getpid() != self._pid:
            self._start_empty()
        with self._changed:
            if job in self._next_times:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ipygpumem-sampler", daemon=True)
                thread.start()
                # After the start, which fails without memory for a stack: the next job tries again.
                self._thread = thread
            self._next_times[job] = 0.0
            self._changed.notify()

    def wake(self, job: Job) -> None:
        """Run ``job`` as soon as possible, unless it was removed; if it is running, run it once
        again.
        """
        if os.getpid() == self._pid:
            with self._changed:
                if job in self._next_times:
                    self._next_times[job] = 0.0
                    self._changed.notify()

    def remove(self, job: Job) -> None:
        """Remove ``job``, without waiting for a run of it that has begun."""
        if os.getpid() == self._pid:
            with self._changed:
                self._next_times.pop(job, None)
                self._changed.notify()

    def close(self) -> None:
        """Remove all jobs, and wait for the thread to end unless a job itself closes the worker."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._next_times.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)  # a job that hangs in a driver must not hang the shell

    def _run(self) -> None:
        """Run the jobs in the thread, until there are none."""
        block_signals()
        while (job := self._next_due_job()) is not None:
            pause = job()
            with self._changed:
                was_woken_or_removed = self._next_times.get(job) != _NOT_DUE  # while it ran
                if pause is not None and not was_woken_or_removed:
                    self._next_times[job] = time.monotonic() + pause

    def _next_due_job(self) -> Job | None:
        """Wait until a job is due, mark it as running, and return it; None once there are no jobs,
        and then the caller must end the thread.
        """
        with self._changed:
            while self._next_times:
                job, next_time = min(self._next_times.items(), key=lambda item: item[1])
                wait_seconds = next_time - time.monotonic()
                if wait_seconds <= 0:
                    # Until it has run. A ``wake`` in between sets another time, so it is not lost.
                    self._next_times[job] = _NOT_DUE
                    return job
                timeout = None if next_time == _NOT_DUE else wait_seconds
                self._changed.wait(timeout)
            self._thread = None
            return None


def block_signals() -> None:
    """Block signals in this thread, so that the system gives them to the main thread: a Ctrl-C has
    to interrupt its wait.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not supported on Windows
        faults = {getattr(signal, name) for name in _FAULTS if hasattr(signal, name)}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
