"""Re-raises a KeyboardInterrupt that CPython would swallow: raised while objects die, it is only printed.

So is any exception of a finaliser, a weak reference's callback or a callback of the collector. They are the first
Python code to run after a long collection, so a Ctrl-C during the collection is raised in them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from opcode import opmap
from typing import Any


class reraise_swallowed:  # noqa: N801  # reads as part of the "with" statement
    """A ``with`` block that re-raises such a Ctrl-C at its end; for our own work, not for user code.

    Raises:
        KeyboardInterrupt: one was raised where CPython would have swallowed it.
    """

    def __enter__(self) -> None:
        self._struck = False
        self._own: Any = None
        self._earlier: Any = None
        if threading.get_ident() == threading.main_thread().ident:  # Python raises it in no other thread
            self._earlier, self._own = sys.unraisablehook, self._note
            sys.unraisablehook = self._own

    def _note(self, unraisable: Any) -> None:
        is_interrupt = type.__subclasscheck__(KeyboardInterrupt, unraisable.exc_type)
        here = threading.get_ident() == threading.main_thread().ident
        if here and is_interrupt and not _is_of_its_own(unraisable.exc_value):
            self._struck = True
        else:
            self._earlier(unraisable)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if self._earlier is None:
            return
        if sys.unraisablehook is self._own:  # else a user's finaliser has installed another hook
            sys.unraisablehook = self._earlier
        self._own = self._earlier = None  # otherwise this object would be garbage itself
        if self._struck and (kind is None or not issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt


def _is_of_its_own(error: BaseException) -> bool:
    """Return True if ``raise`` or a generator's ``throw`` made the error: no signal arrives at their instructions."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or isinstance(
        error.__context__, KeyboardInterrupt
    ):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and (trace.tb_lasti < 0 or trace.tb_frame.f_code.co_code[trace.tb_lasti] in _OWN)


_OWN = {opmap[name] for name in ("RAISE_VARARGS", "YIELD_VALUE", "RETURN_GENERATOR") if name in opmap}


class _Noting:
    """A signal handler that records interrupts."""

    def __init__(self) -> None:
        self.struck: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.struck.append(number)


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Record interrupts in a list during work that must not be interrupted; the caller handles them.

    A nested block shares the outer block's list.
    """
    here = threading.current_thread() is threading.main_thread()
    handler, own = signal.getsignal(signal.SIGINT), _Noting()
    if not here or handler is not signal.default_int_handler:
        yield handler.struck if here and isinstance(handler, _Noting) else own.struck
        return
    signal.signal(signal.SIGINT, own)
    try:
        yield own.struck
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
