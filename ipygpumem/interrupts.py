"""Passes on exceptions of signal handlers: a Ctrl-C, or any exception that a user's handler of an
alarm raises.

Python calls a handler between two bytecode instructions of the main thread, so its exception may be
raised anywhere in our code. There it would look like our own failure. CPython itself swallows it in
a finaliser, a weak reference's callback or a callback of the collector, which are the first Python
code to run after a long collection.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its functions make no enums: 2 us for all signals instead of 40
import contextlib
import functools
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

_OUR_FOLDER = __file__.removesuffix("interrupts.py")
"""The beginning of the names of this package's files."""
_SIGNALS = [int(number) for number in signal.valid_signals()]
"""The numbers of all signals."""


class _Listener:
    """A signal handler that calls another one, and records its exceptions."""

    __slots__ = ("_raised", "handler")

    def __init__(self, handler: Callable[..., object], raised: list[BaseException]) -> None:
        self.handler = handler
        self._raised = raised

    def __call__(self, number: int, frame: object) -> object:
        __tracebackhide__ = True
        try:
            return self.handler(number, frame)
        except BaseException as error:
            self._raised.append(error)
            raise


class reraise_swallowed:  # noqa: N801  # reads as part of the "with" statement
    """A ``with`` block that raises at its end what a signal handler has raised inside, if that did
    not leave the block.

    It replaces the handlers in force by listeners while it runs. Code of the user may look at its
    handlers, or handle their exceptions. So around such code, the handlers stay, and only
    exceptions that CPython swallows are raised.

    Args:
        around_users_code: the block runs code of the user.
    """

    def __init__(self, *, around_users_code: bool = False) -> None:
        self._around_users_code = around_users_code
        self._listeners: list[tuple[int, _Listener]] = []
        self._raised: list[BaseException] = []
        self._hook: Any = None
        self._earlier_hook: Any = None

    def __enter__(self) -> None:
        # Python calls handlers in no other thread.
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            self._earlier_hook = sys.unraisablehook
            self._hook = self._note
            sys.unraisablehook = self._hook
            if not self._around_users_code:
                self._listen()
        except BaseException:  # a signal may arrive right here
            self._stop()
            raise

    def _listen(self) -> None:
        """Replace each handler that is a function by a listener, which calls it."""
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                listener = _Listener(handler, self._raised)
                self._listeners.append((number, listener))
                _signal.signal(number, listener)

    def _note(self, unraisable: Any) -> None:
        """Record an exception that CPython swallows, instead of printing it."""
        error = unraisable.exc_value
        # Without the user's code, a listener has recorded it already.
        if self._around_users_code and error is not None and is_from_signal(error):
            self._raised.append(error)
        if not any(error is raised for raised in self._raised):
            self._earlier_hook(unraisable)  # another error, such as one of a finaliser

    def _stop(self) -> None:
        """Restore the handlers and the hook, unless other code has replaced them."""
        while self._listeners:
            number, listener = self._listeners[-1]
            if _signal.getsignal(number) is listener:
                _signal.signal(number, listener.handler)
            self._listeners.pop()
        if sys.unraisablehook is self._hook and self._hook is not None:
            sys.unraisablehook = self._earlier_hook
        self._hook = None  # otherwise this object would be garbage itself

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        __tracebackhide__ = True
        try:
            self._stop()
        except BaseException:  # a signal may arrive right here
            self._stop()
            raise
        if not self._raised:
            return
        pending = _most_urgent(self._raised)
        if not self._around_users_code:
            for raised in self._raised:
                forget_our_frames(raised)
        self._raised.clear()  # each of their tracebacks refers to this list
        if kind is not None and error is not pending:
            # Code in the block has caught it, and raised it again with another text: such as "the
            # experiment is still open". That error goes on.
            is_same_with_other_text = type.__subclasscheck__(type(pending), kind)
            if is_same_with_other_text:
                return
        try:
            raise BaseException.with_traceback(pending, _handlers_part(pending.__traceback__))
        finally:
            del pending, error  # no cycle: the traceback refers to this frame


def stop_listening() -> None:
    """Restore the user's handlers and hook after an exception of a signal, which may have arrived
    in ``__exit__`` of a block, where it has stopped that from restoring them.
    """
    for number in _SIGNALS:
        handler = _signal.getsignal(number)
        if type(handler) is _Listener:
            _signal.signal(number, original_handler(handler))
    hook: Any = sys.unraisablehook
    while type(hook) is MethodType and hook.__func__ is reraise_swallowed._note:
        block: Any = hook.__self__
        hook = block._earlier_hook
    sys.unraisablehook = hook


def _most_urgent(raised: list[BaseException]) -> BaseException:
    """Return the last exception, but a Ctrl-C rather than any other."""
    interrupts = [error for error in raised if _is_interrupt(error)]
    return (interrupts or raised)[-1]


def _handlers_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from the signal handler on, or the traceback itself if there
    is no handler in it.

    The frames of our work before that tell the user nothing, and would keep its objects alive.
    """
    part = trace
    while part is not None and part.tb_frame.f_code is not _LISTENER:
        part = part.tb_next
    return part or trace


def is_from_signal(error: BaseException) -> bool:
    """Return True for a Ctrl-C, and for an exception that a handler of a signal has raised: its
    traceback has a frame of the handler. Such an exception is the user's, not our failure.
    """
    if _is_interrupt(error):
        return True
    codes = _codes_of_handlers()
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def forget_our_frames(error: BaseException) -> None:
    """Cut the traceback of a signal's exception to the part from its handler on.

    Our work goes on while the exception waits to be raised, and the frames of the functions that it
    has left would keep their objects alive: these would neither be freed nor be garbage.
    """
    codes = _codes_of_handlers()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        frame = trace.tb_frame
        if frame.f_code.co_filename.startswith(_OUR_FOLDER):
            # The handler's frame leads to it, also without this part of the traceback.
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
        trace = trace.tb_next
    is_listener_first = trace is not None and trace.tb_frame.f_code is _LISTENER
    if trace is not None and is_listener_first and _is_interrupt(error):
        trace = trace.tb_next  # our listener's frame leads back to the interrupted functions
    BaseException.with_traceback(error, trace)


def _codes_of_handlers() -> set[CodeType | None]:
    """Return the code that each signal's handler runs."""
    codes: set[CodeType | None] = {_LISTENER}
    for number in _SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler):
            codes.add(_code_of_handler(handler))
    return codes


_LISTENER: CodeType = _Listener.__call__.__code__


def _is_interrupt(error: BaseException) -> bool:
    """Return True for a KeyboardInterrupt, also of a user's subclass; runs no code of that."""
    return type.__subclasscheck__(KeyboardInterrupt, type(error))


def is_listener(item: object) -> bool:
    """Return True for a handler of ours that calls another one."""
    return type(item) is _Listener


def original_handler(handler: Any) -> Any:
    """Return the handler that listeners call."""
    while is_listener(handler):
        handler = handler.handler
    return handler


def _code_of_handler(handler: Any) -> CodeType | None:
    """Return the code that a call of ``handler`` runs; None if it is written in C."""
    handler = original_handler(handler)
    while type(handler) is functools.partial:
        handler = handler.func
    if type(handler) is not FunctionType and type(handler) is not MethodType:
        handler = inspect.getattr_static(type(handler), "__call__", None)
    if type(handler) is MethodType:
        handler = handler.__func__
    if type(handler) is FunctionType:
        return handler.__code__
    return None


class _InterruptRecorder:
    """A signal handler that records interrupts.

    Attributes:
        signals: the numbers of the signals that have arrived.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.signals.append(number)


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Record interrupts in a list during work that must not be interrupted; if the list is not
    empty after the block, the caller raises a ``KeyboardInterrupt``.

    A nested block shares the outer block's list. In other threads, and with a handler of the user,
    nothing is deferred, and the list stays empty.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    handler = signal.getsignal(signal.SIGINT)
    original = original_handler(handler)
    if isinstance(original, _InterruptRecorder):  # of a block around this one
        yield original.signals
        return
    if original is not signal.default_int_handler:
        yield []
        return
    recorder = _InterruptRecorder()
    signal.signal(signal.SIGINT, recorder)
    try:
        yield recorder.signals
    finally:
        signal.signal(signal.SIGINT, handler)
