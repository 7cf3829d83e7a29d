"""Stops an estimate that takes too long or too much memory."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import psutil

from ipygpumem import interrupts
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.user_lines import user_line, user_line_of
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import format_bytes

_TICK_SECONDS = 0.1
"""Time between two checks."""
_REPEAT_SECONDS = 1.0
"""Time between two signals, which are repeated because the code may catch the exception."""


def _stop_signal() -> Any:
    """Return the signal that interrupts the code, for which users' code rarely has a handler.

    None on Windows, where no thread can send a signal to another one.
    """
    if not hasattr(signal, "pthread_kill"):
        return None
    fallback = getattr(signal, "SIGUSR2", None)
    return getattr(signal, "SIGRTMIN", fallback)


_STOP = _stop_signal()


class RunLimits:
    """A ``with`` block that interrupts its code when it takes too much time or memory.

    That is after the timeout, or when the code has taken 3/4 of the free host memory. A thread
    watches both, and then sends a signal to the main thread, whose handler raises a
    KeyboardInterrupt. Python calls it between two bytecode instructions: a call into C++ returns
    first. Code in another thread, and on Windows, is only interrupted by ``check``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._has_ended = threading.Event()
        self.why = ""
        """Reason of the interruption; empty if there was none."""
        self._interrupted_line = ""
        """The line at which the code was first interrupted; empty if it was not, or is unknown."""

    def __enter__(self) -> None:
        """Start the thread that watches time and memory; in the main thread, handle its signal."""
        self._deadline = time.monotonic() + self._timeout_seconds
        self._process = psutil.Process()
        rss_bytes = self._process.memory_info().rss
        self._most_bytes = rss_bytes + available_bytes() * 3 // 4
        self._handlers: dict[int, Any] = {}
        """Handlers of all signals before the block; empty outside the main thread. All, because the
        code may change them, too.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        if _STOP is not None and is_main_thread:
            signals = signal.valid_signals()
            self._handlers = {number: signal.getsignal(number) for number in signals}
            signal.signal(_STOP, self._interrupt)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Check the limits until the block ends; then interrupt the main thread, repeatedly."""
        wait_seconds = _TICK_SECONDS
        while not self._has_ended.wait(wait_seconds):
            self.why = self.why or self._limit_exceeded()
            if not self.why:
                continue
            wait_seconds = _REPEAT_SECONDS
            if self._handlers:
                main_thread = threading.main_thread()
                signal.pthread_kill(main_thread.ident or 0, _STOP)

    def _limit_exceeded(self) -> str:
        """Return the limit that the code exceeds, as a reason; empty if there is none."""
        if time.monotonic() > self._deadline:
            return f"after {self._timeout_seconds:g} s"
        rss_bytes = self._process.memory_info().rss
        if rss_bytes > self._most_bytes:
            size = format_bytes(rss_bytes)
            return f"because it took most of the host memory that was free ({size} now)"
        return ""

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Raise a KeyboardInterrupt in the main thread: handles the watching thread's signal."""
        if frame is None or self._has_ended.is_set():
            return
        # An exception in this file makes torch's C++ code abort the process; another signal follows
        # soon.
        if not frame.f_code.co_filename.endswith("simple_registry.py"):
            self._interrupted_line = self._interrupted_line or user_line(frame)
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise an EstimateError if the code must stop; called for each operation on tensors."""
        if self.why:
            self._interrupted_line = self._interrupted_line or user_line()
            raise self.error()

    def error(self) -> EstimateError:
        """Return the error that names the limit, and the line at which the code was interrupted."""
        line = self._interrupted_line or "an unknown line"
        return EstimateError(f"the estimate was stopped {self.why} in {line}")

    def __exit__(self, kind: object, error: BaseException | None, traceback: Any) -> None:
        """End the watching thread, and restore the handlers of all signals."""
        self._has_ended.set()
        if self.why and error is not None:
            self._interrupted_line = self._interrupted_line or user_line_of(traceback)
        # Before ``deferred``, which sets a handler of its own for Ctrl-C.
        changed = self._changed_handlers()
        with interrupts.deferred() as struck:
            self._thread.join()
            if changed:
                # A system call: a pending signal arrives before its handler is removed.
                signal.sigpending()
            for number, handler in changed.items():
                signal.signal(number, handler)
        if struck:
            raise KeyboardInterrupt

    def _changed_handlers(self) -> dict[int, Any]:
        """Return the handlers to restore: of signals whose handlers the code or we have changed."""
        changed = dict[int, Any]()
        for number, handler in self._handlers.items():
            if handler is None:  # not installed from Python
                continue
            if signal.getsignal(number) is not handler:
                changed[number] = handler
        return changed
