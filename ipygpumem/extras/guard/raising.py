"""Raises the limit on allocations while code around the user's runs: output, sockets, the start and
the end of threads.

The memory that a thread may use can be used up at any time, by this thread or by another one. Then
libzmq ends the process (``zmq_assert``), a new thread ends before ``Thread.start`` knows that it
runs, so that it waits forever, and ipykernel's thread loses messages.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ipygpumem.extras.guard.limit import SMALL_BYTES, AllocationLimit, stack_bytes
from ipygpumem.extras.guard.replacing import install

_STREAMS = (
    (
        "ipykernel.iostream",
        "IOPubThread",
        "schedule",
    ),  # opens a socket in each thread that prints or displays
    (
        "ipykernel.iostream",
        "OutStream",
        "_flush",
    ),  # called in ipykernel's own thread, like the next one
    ("zmq.eventloop.zmqstream", "ZMQStream", "_run_callback"),
)
"""ipykernel's output: if one of its steps fails, later outputs are lost, too."""

_SOCKETS = (
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
)
_OPTIONS = ("get", "set", "getsockopt", "setsockopt")
"""libzmq handles what other threads have sent to a socket when one of its options is read."""

_NO_THREAD = "can't start new thread"
"""Python's own words."""
_START_SECONDS = 0.05
"""Time between two looks whether a new thread still exists."""
_STACKS_OF_CONTEXT = 2
"""Number of threads that the first socket of a ``zmq.Context`` starts."""


def raise_around(limit: AllocationLimit) -> list[Callable[[], None]]:
    """Raise the limit around these calls from now on, and return functions that undo this."""
    sockets = [("zmq", "Socket", name) for name in (*_SOCKETS, *_OPTIONS)]
    context = ("zmq", "Context", "__init__")
    undo = [_replace(limit, place, stacks=0) for place in (*_STREAMS, *sockets, context)]
    undo.append(_replace(limit, ("zmq", "Socket", "__init__"), stacks=_STACKS_OF_CONTEXT))
    undo.append(_replace(limit, ("threading", "", "excepthook"), stacks=0))
    undo.append(_replace_start(limit))
    return undo


class _Started(threading.Event):
    """Tells ``Thread.start`` that a thread runs, or that it never will."""

    def __init__(self, thread: threading.Thread, limit: AllocationLimit) -> None:
        super().__init__()
        bootstrap = functools.partial(_run, thread._bootstrap, limit)  # type: ignore[attr-defined]
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
            if self._bootstrap() is None and not self.is_set():
                raise RuntimeError(_NO_THREAD)
        return True


def _run(bootstrap: Callable[[], None], limit: AllocationLimit) -> None:
    """Run a thread. Its stack goes back to the system afterwards, and other threads must not use as
    much instead.
    """
    try:
        bootstrap()
    finally:
        limit.lower(stack_bytes())


def _replace_start(limit: AllocationLimit) -> Callable[[], None]:
    """Raise the limit while a thread starts, and refuse threads for which no memory is left."""
    earlier = threading.Thread.start

    @functools.wraps(earlier)
    def start(thread: threading.Thread) -> None:
        __tracebackhide__ = True
        if not limit.is_on:
            earlier(thread)
            return
        needed = SMALL_BYTES + stack_bytes()
        limit.enter(needed)
        try:
            if limit.is_used_up(needed):
                raise RuntimeError(_NO_THREAD)
            started = getattr(thread, "_started", None)
            if type(started) is threading.Event and not started.is_set():
                thread._started = _Started(thread, limit)  # type: ignore[attr-defined]
            earlier(thread)
            limit.add_thread(thread)
        finally:
            limit.leave(renew=True)

    return install(threading.Thread, "start", start)


def _replace(
    limit: AllocationLimit, place: tuple[str, str, str], *, stacks: int
) -> Callable[[], None]:
    """Raise the limit around one function, if its module is loaded, and return a function that
    undoes this.
    """
    module, class_name, name = place
    owner: Any = sys.modules.get(module)
    if class_name:
        owner = getattr(owner, class_name, None)
    function = getattr(owner, name, None)
    if function is None:
        return lambda: None

    @functools.wraps(function)
    def call_raised(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        limit.enter(SMALL_BYTES + stacks * stack_bytes())
        try:
            return function(*args, **options)
        finally:
            limit.leave(renew=stacks > 0)

    return install(owner, name, call_raised)
