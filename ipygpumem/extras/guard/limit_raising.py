"""Raises the limit on allocations while code around the user's runs: output, sockets, the start and
the end of threads.

The memory that a thread may use can be used up at any time, by this thread or by another one. Then
libzmq ends the process (``zmq_assert``), a new thread ends before ``Thread.start`` knows that it
runs, so that it waits forever, and ipykernel's thread loses messages.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ipygpumem.extras.guard.allocation_limit import SMALL_BYTES, AllocationLimit, stack_bytes
from ipygpumem.extras.guard.replacing import install

_STREAMS = (
    # opens a socket in each thread that prints or displays
    ("ipykernel.iostream", "IOPubThread", "schedule"),
    # called in ipykernel's own thread, like the next one
    ("ipykernel.iostream", "OutStream", "_flush"),
    ("zmq.eventloop.zmqstream", "ZMQStream", "_run_callback"),
)
"""ipykernel's output: if one of its steps fails, later outputs are lost, too."""

_SOCKET_METHODS = (
    "close",
    "bind",
    "unbind",
    "connect",
    "disconnect",
    "monitor",
    "send",
    "recv",
    "recv_into",
    "poll",
    # libzmq handles what other threads have sent to a socket when one of its options is read
    "get",
    "set",
    "getsockopt",
    "setsockopt",
)
_SOCKETS = tuple(("zmq", "Socket", name) for name in _SOCKET_METHODS)
_FIRST_SOCKET = ("zmq", "Socket", "__init__")
_STACKS_OF_CONTEXT = 2
"""Number of threads that the first socket of a ``zmq.Context`` starts."""

_NO_THREAD = "can't start new thread"
"""Python's own words."""
_START_SECONDS = 0.05
"""Time between two looks whether a new thread still exists."""
_Place = tuple[str, str, str]
"""A module, a class in it (empty: the module itself), and a function of it."""


class RaisedCalls:
    """Raises the limit around the calls listed above, from ``install`` to ``undo``."""

    def __init__(self, limit: AllocationLimit) -> None:
        self._limit = limit
        self._replaced_places: set[_Place] = set()
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """Raise the limit from now on around calls into modules that are loaded.

        Each cell calls this again, because earlier cells may have imported some of them.
        """
        for place in (*_STREAMS, *_SOCKETS, ("zmq", "Context", "__init__")):
            self._replace(place, stacks=0)
        self._replace(_FIRST_SOCKET, stacks=_STACKS_OF_CONTEXT)
        self._replace(("threading", "", "excepthook"), stacks=0)
        start = ("threading", "Thread", "start")
        if start not in self._replaced_places:
            self._replaced_places.add(start)
            self._undo.callback(_replace_start(self._limit))

    def undo(self) -> None:
        """Put the original functions back."""
        self._undo.close()

    def _replace(self, place: _Place, *, stacks: int) -> None:
        """Raise the limit around one function, once, if its module is loaded: a terminal has no
        zmq, until the user imports it.

        Args:
            place: the function.
            stacks: number of threads that a call of it starts; each needs memory for its stack.
        """
        if place in self._replaced_places:
            return
        module, class_name, name = place
        owner: Any = sys.modules.get(module)
        if class_name:
            owner = getattr(owner, class_name, None)
        if owner is None or not hasattr(owner, name):
            return
        self._replaced_places.add(place)
        with_raise = _with_raise(getattr(owner, name), self._limit, stacks)
        self._undo.callback(install(owner, name, with_raise))


def _with_raise(
    function: Callable[..., Any], limit: AllocationLimit, stacks: int
) -> Callable[..., Any]:
    """Return a function that raises the limit while it calls ``function``.

    Args:
        function: code around the user's, such as a socket's ``send``.
        limit: the limit on allocations.
        stacks: number of threads that a call starts.
    """

    @functools.wraps(function)
    def call_with_raise(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        limit.begin_raise(SMALL_BYTES + stacks * stack_bytes())
        try:
            return function(*args, **options)
        finally:
            limit.end_raise(renew=stacks > 0)

    return call_with_raise


class _StartedEvent(threading.Event):
    """Tells ``Thread.start`` that a thread runs, or that it never will.

    It replaces ``Thread._started``, for which ``start`` waits. A new thread without memory for its
    first step ends and sets no event. But then it also drops the function that it was to call,
    which this event notices by a weak reference.
    """

    def __init__(self, thread: threading.Thread, limit: AllocationLimit) -> None:
        super().__init__()
        bootstrap = functools.partial(_run_thread, thread._bootstrap, limit)  # type: ignore[attr-defined]
        thread._bootstrap = bootstrap  # type: ignore[attr-defined]  # the function that the new thread calls
        self._bootstrap = weakref.ref(bootstrap)
        self._thread = weakref.ref(thread)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the thread.

        Raises:
            RuntimeError: the thread has ended before its first step, because its memory was
                refused. Without this ``Thread.start`` would wait forever.
        """
        if timeout is not None:
            return super().wait(timeout)
        if thread := self._thread():
            vars(thread).pop("_bootstrap", None)  # from now on only the new thread refers to it
        while not super().wait(_START_SECONDS):
            has_ended = self._bootstrap() is None
            if has_ended and not self.is_set():  # it may have run and ended since the wait
                raise RuntimeError(_NO_THREAD)
        return True


def _run_thread(bootstrap: Callable[[], None], limit: AllocationLimit) -> None:
    """Run a new thread's code, then lower the limit by its stack's bytes: the stack is returned to
    the system, and other threads must not allocate as much instead.

    Args:
        bootstrap: Python's function that the thread would have called.
        limit: the limit on allocations.
    """
    limit.threads.begin()
    try:
        bootstrap()
    finally:
        limit.threads.end()
        limit.lower_by(stack_bytes())


def _replace_start(limit: AllocationLimit) -> Callable[[], None]:
    """Raise the limit while a thread starts, and refuse threads for which no memory is left.

    Return a function that undoes this.
    """
    earlier = threading.Thread.start

    @functools.wraps(earlier)
    def start(thread: threading.Thread) -> None:
        __tracebackhide__ = True
        if not limit.is_on:
            earlier(thread)
            return
        needed = SMALL_BYTES + stack_bytes()
        limit.begin_raise(needed)
        try:
            if limit.is_used_up(needed):
                raise RuntimeError(_NO_THREAD)
            started = getattr(thread, "_started", None)
            # not for a thread that has started: Python refuses to start it again
            if type(started) is threading.Event and not started.is_set():
                thread._started = _StartedEvent(thread, limit)  # type: ignore[attr-defined]
            earlier(thread)
        finally:
            limit.end_raise(renew=True)

    return install(threading.Thread, "start", start)
