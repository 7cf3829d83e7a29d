"""Keeps a Ctrl-C that strikes while objects die: CPython prints it and goes on.

It does so with whatever a finaliser, the callback of a weak reference or one of the collector's raises. These are the
first code in Python that runs after a long collection, so that is where a Ctrl-C that came during it is raised.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from opcode import opmap
from typing import Any


class kept:  # noqa: N801  # read as a word of the "with" statement
    """A ``with`` block after which such a Ctrl-C is raised: for our own work, and not for code of the user's.

    Raises:
        KeyboardInterrupt: one struck where CPython would have lost it.
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
        if sys.unraisablehook is self._own:  # else somebody's finaliser has put another one there
            sys.unraisablehook = self._earlier
        self._own = self._earlier = None  # or this would be garbage itself
        if self._struck and (kind is None or not issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt


def _is_of_its_own(error: BaseException) -> bool:
    """Whether a ``raise`` of the callback's has made it, and no Ctrl-C: Python's own handler has no such statement."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or isinstance(
        error.__context__, KeyboardInterrupt
    ):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


class _Noting:
    """A handler of interrupts that notes them."""

    def __init__(self) -> None:
        self.struck: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.struck.append(number)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Note interrupts in a list while something is done that must not be broken off; the caller sees to them.

    Inside another such block, it is that one's list.
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
