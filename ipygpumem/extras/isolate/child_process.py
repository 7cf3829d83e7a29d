"""The child process of an isolated cell, as seen from the kernel's process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from typing import NamedTuple

from IPython.core.error import UsageError

from ipygpumem.errors import describe_error
from ipygpumem.extras.isolate import child
from ipygpumem.extras.isolate.openmp import pause_openmp
from ipygpumem.extras.isolate.packets import Connection
from ipygpumem.units import KIB


class EndOfProcess(NamedTuple):
    """The end of a child process."""

    status: int
    """Its wait status; 0 if it is not known."""
    highest_rss_bytes: int
    """Its highest RSS; 0 if it is not known."""


class ChildProcess:
    """The child process and the processes that it has started: they are one process group."""

    def __init__(self) -> None:
        self._pid = 0
        """The number of the child process; 0 before it is started."""
        self._interrupts = 0
        """Number of Ctrl-Cs so far."""

    @property
    def is_given_up(self) -> bool:
        """True from the second Ctrl-C on."""
        return self._interrupts > 1

    def fork(self, task: child.Task, connection: Connection) -> None:
        """Start the child process, which never returns from here.

        Args:
            task: the cell, with the child's end of the connection, which is closed here.
            connection: the kernel's end of the connection, which is closed in the child process.

        Raises:
            UsageError: the system starts no process.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's own
                stream.flush()
        without_pause = pause_openmp()
        parent = os.getpid()
        # A Ctrl-C waits until the child process has its own handler.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about threads
                pid = os.fork()
        except OSError as error:
            raise UsageError(
                f"%%isolate: the system starts no child process: {describe_error(error)}"
            ) from None
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid == 0:
            for library in without_pause:
                library.omp_set_num_threads(1)
            connection.socket.close()
            child.run(task, parent)
        task.connection.socket.close()
        with contextlib.suppress(OSError):  # it may have done so itself, and even have ended
            os.setpgid(pid, pid)
        self._pid = pid
        if self._interrupts:  # a Ctrl-C came before the number was known
            self._send_signal(signal.SIGINT)

    def interrupt(self) -> None:
        """Pass a Ctrl-C on; the second one ends the process."""
        self._interrupts += 1
        if self._pid:
            self._send_signal(signal.SIGKILL if self.is_given_up else signal.SIGINT)

    def _send_signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def has_ended(self) -> bool:
        """Return True if the process has ended; its status can still be read."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def end(self) -> EndOfProcess:
        """End the whole group, and return the end of the child process."""
        self._send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # other code has read its status
            _, status, usage = os.wait4(self._pid, 0)
            return EndOfProcess(status, highest_rss_bytes=usage.ru_maxrss * KIB)
        return EndOfProcess(status=0, highest_rss_bytes=0)
