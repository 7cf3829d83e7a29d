"""Raises ``MemoryGuardError`` in the thread of a cell that has used up the memory."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from ipygpumem.interrupts import original_handler
from ipygpumem.introspect import text_of

_WAITS_FOR_CHILD = "ipygpumem.extras.isolate."
"""Modules of ``%%isolate``: while it waits for its child process, an error would lose a message,
for which both would wait forever. The system ends the child first."""


class MemoryGuardError(MemoryError):
    """Raised in a cell when memory is nearly used up."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or ("memory is nearly used up: the guard stopped this cell",)))


class CellInterrupt:
    """Interrupts a cell from another thread.

    ``strike`` sends the cell's thread a signal or an asynchronous error; Python raises the error
    in that thread a little later, before its next bytecode instructions.

    Args:
        is_needed: returns True if memory is still used up: the cell may have freed some since.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed
        self.is_pending = False
        """True from the strike until its error is raised or cancelled."""
        self.left_bytes = -1
        """Memory left at the last strike of this cell; -1 before it."""

    def listen(self) -> Callable[[], None] | None:
        """Handle SIGURG, which also ends waits for threads and processes.

        Return a function that undoes this; None if the signal is not available, because Windows has
        none, only the main thread may set handlers, and the user may have a handler already.
        """
        if not hasattr(signal, "SIGURG"):
            return None
        if threading.current_thread() is not threading.main_thread():
            return None
        if signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
            return None
        signal.signal(signal.SIGURG, self._raise)
        return self._stop_listening

    def _stop_listening(self) -> None:
        if self._listens():
            signal.signal(signal.SIGURG, signal.SIG_DFL)

    def _listens(self) -> bool:
        """Return True if SIGURG still calls ``_raise``: a program ignores this signal by default.

        While one of our commands runs, it has wrapped the handler (``interrupts``).
        """
        return (
            hasattr(signal, "SIGURG")
            and original_handler(signal.getsignal(signal.SIGURG)) == self._raise
        )

    def begin_cell(self) -> None:
        """Forget the strike of the last cell."""
        self.left_bytes = -1

    def strike(self, thread: int, left_bytes: int) -> None:
        """Raise the error in a cell's thread, by a signal if that is possible: it also ends a wait
        for threads and processes.

        Args:
            thread: the identity of the cell's thread.
            left_bytes: the memory left now, for the report.
        """
        self.is_pending = True
        self.left_bytes = left_bytes
        if self._listens() and thread == threading.main_thread().ident:
            signal.pthread_kill(thread, signal.SIGURG)
        elif _runs_code(sys._current_frames().get(thread)):
            error = ctypes.py_object(MemoryGuardError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    def cancel(self, thread: int | None) -> None:
        """Take back a strike whose error was not raised yet: the cell has ended, or fails already.

        ``thread`` is the identity of the cell's thread; None in a forked child, which has none.
        """
        if self.is_pending and thread is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
        self.is_pending = False

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGURG at ``frame``, where the main thread was: raise the error if the strike was
        not cancelled and is still needed. Otherwise the next check strikes again.
        """
        was_pending = self.is_pending
        self.is_pending = False
        if was_pending and _runs_code(frame) and self._is_needed():
            raise MemoryGuardError


HANDLER_CODE = CellInterrupt._raise.__code__
"""The code of the last frame in the traceback of an error that a signal has raised."""


def _runs_code(frame: FrameType | None) -> bool:
    """Return True if a cell's code runs at ``frame``, where an error may be raised.

    IPython runs a cell in its function ``run_code``. Outside of it, in the kernel's event loop, an
    error would end the kernel.
    """
    if frame is not None:
        package, _, _ = _module_of(frame).rpartition(".")
        if package == __package__:
            return False  # it would leave the guard half changed; the next check strikes again
    while frame is not None and frame.f_code.co_name != "run_code":
        if _module_of(frame).startswith(_WAITS_FOR_CHILD):
            return False
        frame = frame.f_back
    return frame is not None


def _module_of(frame: FrameType) -> str:
    return text_of(frame.f_globals.get("__name__"))
