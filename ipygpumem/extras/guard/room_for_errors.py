"""Makes room for the errors of a cell that has used up its memory, while IPython shows and stores
them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ipygpumem.errors import describe_error
from ipygpumem.extras.guard.causes import Causes
from ipygpumem.extras.guard.interrupt import HANDLER_CODE
from ipygpumem.extras.guard.memory import GuardedMemory
from ipygpumem.extras.guard.replacing import install, replace
from ipygpumem.extras.guard.shares import LAST_ROOM_BYTES
from ipygpumem.extras.guard.soft_limit import NO_LIMIT
from ipygpumem.extras.guard.watch import Watch
from ipygpumem.heap.knowledge.frames import steps
from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import chain, traceback_of
from ipygpumem.shell.cell import Cell, GuardAction
from ipygpumem.shell.error_isolation import ErrorIsolation

_STORE = "_format_exception_for_storage"
"""IPython's method that formats each error of a cell for the history; since IPython 9."""
_STOP_WITHOUT_FIGURES = GuardAction("stopped the cell")
_REFUSAL_IN_THREAD = GuardAction("perhaps refused a request of a thread", is_sure=False)
"""Explanations for which no memory is left to read the figures."""
_WITHOUT_TRACEBACK = "too little memory is left for the traceback"
_ENTRIES_AT_END = 25
"""Entries shown at either end of a traceback."""


class ErrorRoom:
    """Raises the limit for an error and its traceback, explains the error, and shortens the
    traceback.

    An error of a cell passes through these steps: IPython asks for its handlers
    (``custom_exceptions``), formats it for the history (``_format_exception_for_storage``) and
    shows it (``showtraceback``, which calls ``structured_traceback``). Each of them needs memory.

    Args:
        memory: the memory left, with the limit to raise.
        watch: the thread that would interrupt the cell.
        causes: explains errors.
        isolation: tells the user once that the guard itself has failed.
    """

    def __init__(
        self, memory: GuardedMemory, watch: Watch, causes: Causes, isolation: ErrorIsolation
    ) -> None:
        self._memory = memory
        self._watch = watch
        self._causes = causes
        self._isolation = isolation

    def install(self, shell: Any) -> Iterator[Callable[[], None]]:
        """Make room in IPython's and Python's functions for errors, and yield functions that undo
        this.
        """
        yield replace(shell, "showtraceback", self._showing)
        if hasattr(shell, _STORE):
            yield replace(shell, _STORE, self._storing)
        yield self._format_again(getattr(shell, "InteractiveTB", None))
        yield replace(threading, "excepthook", self._ending_thread)
        yield from self._install_at_first_step(shell)

    def _install_at_first_step(self, shell: Any) -> Iterator[Callable[[], None]]:
        """Make room when IPython looks for the handlers of an error: it stores the error next, in
        new memory.
        """
        name = "custom_exceptions"
        kind = type(shell)
        if name not in vars(shell) or hasattr(kind, name):
            return
        reserve = self._memory.reserve
        watch = self._watch

        # ``custom_exceptions`` is an attribute of the shell. A property of the shell's class comes
        # before it, so that reading it runs our code.
        def find(this: Any) -> Any:
            reserve.blocks = None  # nothing can be created before this
            if this is shell and watch.cell is not None:
                self._make_room()
            return vars(this)[name]

        def store(this: Any, value: object) -> None:
            vars(this)[name] = value

        setattr(kind, name, property(find, store))
        yield lambda: delattr(kind, name)

    def _make_room(self) -> None:
        """Raise the limit so that the error of this thread and its traceback fit."""
        cell = self._watch.cell
        with self._memory.limit.lock:
            if cell is not None and cell.thread == threading.get_ident():
                self._make_room_for_cell(cell)
            elif not self._memory.limit.is_failing:
                self._make_room_for_thread()

    def _make_room_for_cell(self, cell: Cell) -> None:
        """Raise the limit for an error of the cell, until it was shown."""
        limit = self._memory.limit
        was_failing = limit.is_failing
        limit.begin_error()
        self._watch.interrupt.cancel(cell.thread)
        # First a little without a measurement, which needs memory itself.
        limit.add_room(min(self._memory.shares.error_bytes, LAST_ROOM_BYTES))
        if not was_failing and limit.wanted_bytes != NO_LIMIT:
            with contextlib.suppress(MemoryError, OSError, ValueError):
                limit.raise_to_allocated()
        limit.add_room(self._memory.room_for_error_bytes())

    def _make_room_for_thread(self) -> None:
        """Raise the limit for an error of a thread, until the next check: it gets a quarter of a
        cell's room, because other threads may use it up.
        """
        quarter_bytes = self._memory.shares.error_bytes // 4
        room_bytes = min(quarter_bytes, self._memory.room_for_error_bytes())
        self._memory.limit.add_room(room_bytes)

    @contextlib.contextmanager
    def _showing(self, arguments: object, options: dict[str, Any]) -> Iterator[None]:
        """Make room for the error that IPython shows, and find out why it came."""
        limit = self._memory.limit
        if self._watch.cell is not None:
            limit.threads.wait()
            self._make_room()
        shown_error = None
        if limit.is_failing:
            shown_error = sys.exc_info()[1]
            self._explain(shown_error)
        with shortened(shown_error):
            yield
        if not options.get("running_compiled_code", False):  # else the cell goes on, as after %run
            limit.end_error()

    def _format_again(self, formatter: Any) -> Callable[[], None]:
        """Format a traceback a second time from now on if threads have used up the room for it, and
        return a function that undoes this.

        An error in here could leave the cell without a reply: the front-end would wait for good.

        Args:
            formatter: IPython's ``InteractiveTB``; None if the shell has none.
        """
        name = "structured_traceback"
        if not hasattr(formatter, name):
            return lambda: None  # nothing was changed
        format_once = getattr(formatter, name)

        @functools.wraps(format_once)
        def format_traceback(*args: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            try:
                return format_once(*args, **options)
            except Exception:  # a library may replace a refusal by an error of its own
                if not self._memory.limit.is_failing:
                    raise
            self._make_room_again()
            try:
                return format_once(*args, **options)
            except Exception:  # as above
                return [_WITHOUT_TRACEBACK, *map(describe_error, args[1:2])]

        return install(formatter, name, format_traceback)

    def _make_room_again(self) -> None:
        """Raise the limit again once the threads that have used up the room have ended."""
        limit = self._memory.limit
        limit.threads.wait()
        with contextlib.suppress(MemoryError, OSError, ValueError):
            limit.raise_to_allocated()
        self._make_room()

    def _explain(self, error: BaseException | None) -> None:
        """Note how the guard has caused the error that is shown, if it has."""
        try:
            action = self._causes.explain(error)
            self._causes.note(action)
            if self._watch.cell is not None:
                self._watch.cell.errors.guard_action = action
        except MemoryError:
            self._causes.note(_STOP_WITHOUT_FIGURES)
        except Exception as failure:  # IPython must show the user's error
            self._isolation.failed("the memory guard", failure, "its report may be missing")

    @contextlib.contextmanager
    def _ending_thread(self, arguments: tuple[Any, ...], options: object) -> Iterator[None]:
        """Find out why an error ends a thread: the report comes with the cell, which goes on.

        ``arguments`` are those of ``threading.excepthook``: an object with ``exc_value``.
        """
        if self._memory.limit.is_on:
            try:
                error = getattr(next(iter(arguments), None), "exc_value", None)
                self._causes.note(self._causes.explain(error))
            except MemoryError:  # the other threads have used up what this one has freed
                self._causes.note(_REFUSAL_IN_THREAD)
            except Exception as failure:  # Python must show the thread's error
                self._isolation.failed("the memory guard", failure, "its report may be missing")
        yield

    @contextlib.contextmanager
    def _storing(self, arguments: tuple[Any, ...], options: object) -> Iterator[None]:
        """Shorten an error's traceback while IPython formats it for its history.

        ``arguments`` are those of IPython's method: the error is the first one.
        """
        error = next(iter(arguments), None)
        if self._memory.limit.is_failing and is_instance(error, BaseException):
            with shortened(error):
                yield
        else:
            yield


@contextlib.contextmanager
def shortened(error: BaseException | None) -> Iterator[None]:
    """Leave out the middle of long tracebacks while IPython shows them: a deep recursion would use
    up the reserve.

    The frame of the guard's signal handler, which may be the last one, is removed for good.

    Args:
        error: an error, whose chain is shown with it; None leaves everything as it is.
    """
    shortened_at = list[tuple[TracebackType, TracebackType]]()
    """Last entry of each beginning that is shown, and the entry that followed it."""
    errors = () if error is None else chain(error)
    for item in errors:
        entries = list(steps(traceback_of(item)))
        if len(entries) > 1 and entries[-1].tb_frame.f_code is HANDLER_CODE:
            entries.pop()
            entries[-1].tb_next = None
        if len(entries) > 2 * _ENTRIES_AT_END:
            last = entries[_ENTRIES_AT_END - 1]
            shortened_at.append((last, entries[_ENTRIES_AT_END]))
            last.tb_next = entries[-_ENTRIES_AT_END]
    try:
        yield
    finally:
        for last, following in shortened_at:
            last.tb_next = following
