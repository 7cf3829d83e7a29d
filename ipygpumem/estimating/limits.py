"""Interrupts an estimate that takes too long or too much host memory, and names the line that ran."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import psutil

from ipygpumem.errors import EstimateError
from ipygpumem.estimating.users_line import users_line, users_line_of
from ipygpumem.objects import interrupts
from ipygpumem.probes.host import available_bytes
from ipygpumem.units import format_bytes

_TICK_SECONDS, _AGAIN_SECONDS = 0.1, 1.0
_STOP: Any = getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", None))
"""A signal for which users' code has no handler; None on Windows."""


class Limits:
    """A ``with`` block that interrupts its code after the timeout, or when it has taken 3/4 of the free host memory.

    The main thread gets a KeyboardInterrupt, which Python raises between two bytecode instructions: a call into C++
    returns first. Other threads, and Windows, are only interrupted by ``check``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._ended = threading.Event()
        self._line = self.why = ""
        """Why the code was interrupted; empty if it was not."""

    def __enter__(self) -> None:
        self._until = time.monotonic() + self._timeout_seconds
        self._process = psutil.Process()
        self._most_bytes = self._process.memory_info().rss + available_bytes() * 3 // 4
        self._handlers: dict[int, Any] = {}
        if _STOP is not None and threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
            signal.signal(_STOP, self._interrupt)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_AGAIN_SECONDS if self.why else _TICK_SECONDS):
            if not self.why and time.monotonic() > self._until:
                self.why = f"after {self._timeout_seconds:g} s"
            elif not self.why and (took := self._process.memory_info().rss) > self._most_bytes:
                self.why = f"because it took most of the host memory that was free ({format_bytes(took)} now)"
            if self.why and self._handlers:  # again and again: the code may catch it
                signal.pthread_kill(threading.main_thread().ident or 0, _STOP)

    def _interrupt(self, _: int, frame: Any) -> None:
        if not self._ended.is_set():
            self._line = self._line or users_line(frame)
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise an EstimateError if the code is to stop: called for each operation on tensors."""
        if self.why:
            raise self.error(users_line())

    def error(self, line: str = "") -> EstimateError:
        """Return the error that names the line at which the code was interrupted."""
        return EstimateError(f"the estimate was stopped {self.why} in {self._line or line or 'an unknown line'}")

    def __exit__(self, kind: object, error: BaseException | None, traceback: Any) -> None:
        self._ended.set()
        if self.why and error is not None:
            self._line = self._line or users_line_of(traceback)
        handlers = self._handlers.items()  # the code may have changed others than ours
        changed = [(number, old) for number, old in handlers if old is not None and signal.getsignal(number) is not old]
        with interrupts.noted() as struck:
            self._thread.join()
            if changed:
                signal.sigpending()  # a system call: a signal that is on its way arrives before its handler goes
            for number, old in changed:
                signal.signal(number, old)
        if struck:
            raise KeyboardInterrupt
