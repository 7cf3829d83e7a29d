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
_CLOSE_SECONDS = 5.0
_NOT_DUE = math.inf
"""The time of a job that is running, or waits for ``wake``."""


class Worker:
    """Runs jobs, one at a time. In a forked child it starts empty, and restarts with the first job
    added.
    """

    def __init__(self) -> None:
        self._start_empty()

    def _start_empty(self) -> None:
        """Begin without jobs and without a thread, as a new worker or in a forked child."""
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._due: dict[Job, float] = {}
        """The time at which each job is to run next."""
        self._thread: threading.Thread | None = None

    def add(self, job: Job) -> None:
        """Run ``job`` as soon as possible, and again when it asks to; adding a job twice changes
        nothing.
        """
        # In a forked child, the thread and the lock's owner have stayed in the parent process.
        if os.getpid() != self._pid:
            self._start_empty()
        with self._changed:
            if job in self._due:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ipygpumem-sampler", daemon=True)
                thread.start()
                # After the start, which fails without memory for a stack: the next job tries again.
                self._thread = thread
            self._due[job] = 0.0
            self._changed.notify()

    def wake(self, job: Job) -> None:
        """Run ``job`` as soon as possible, unless it was removed."""
        if os.getpid() == self._pid:
            with self._changed:
                if job in self._due:
                    self._due[job] = 0.0
                    self._changed.notify()

    def remove(self, job: Job) -> None:
        """Remove ``job``; it may be running for the last time."""
        if os.getpid() == self._pid:
            with self._changed:
                self._due.pop(job, None)
                self._changed.notify()

    def close(self) -> None:
        """Remove all jobs and wait for the thread to end."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)  # a job that hangs in a driver must not hang the shell

    def _run(self) -> None:
        """Run the jobs in the thread, until there are none."""
        leave_signals_to_others()
        while (job := self._next_due_job()) is not None:
            pause = job()
            with self._changed:
                was_woken_or_removed = self._due.get(job) != _NOT_DUE  # while it ran
                if pause is not None and not was_woken_or_removed:
                    self._due[job] = time.monotonic() + pause

    def _next_due_job(self) -> Job | None:
        """Wait until a job is due and return it; None without jobs."""
        with self._changed:
            while self._due:
                job, due = min(self._due.items(), key=lambda item: item[1])
                wait = due - time.monotonic()
                if wait <= 0:
                    self._due[job] = _NOT_DUE  # until it has run; a wake in between is not lost
                    return job
                timeout = None if due == _NOT_DUE else wait
                self._changed.wait(timeout)
            self._thread = None
            return None


def leave_signals_to_others() -> None:
    """Block signals in this thread: a Ctrl-C has to interrupt the main thread's wait."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not supported on Windows
        faults = {getattr(signal, name) for name in _FAULTS if hasattr(signal, name)}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
