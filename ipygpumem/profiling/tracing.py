"""Watches the lines that one thread runs: by ``sys.monitoring``, or by a trace function before Python 3.12."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ipygpumem.profiling.account import Account

Follow = Callable[[CodeType], "int | None"]
"""Returns the number of the block that some code belongs to; None for code that is not followed."""

_NAME = "ipygpumem"
_SUSPENDS = 0x20 | 0x80 | 0x200  # inspect's CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


def watcher(account: Account, follow: Follow, codes: list[CodeType]) -> Watcher:
    """Return what this Python has: ``sys.monitoring`` with a free tool, else a trace function.

    Args:
        account: what adds up the costs.
        follow: says which code is followed.
        codes: code that is followed and exists already.
    """
    monitoring = getattr(sys, "monitoring", None)
    free = [tool for tool in (3, 4, 2, 1, 5) if monitoring is not None and monitoring.get_tool(tool) is None]
    return Monitor(account, follow, codes, free[0]) if free else Tracer(account, follow)


class Watcher(ABC):
    """Watches lines between ``start`` and ``stop``; stops at its own first error, so that the user's code goes on."""

    def __init__(self, account: Account, follow: Follow) -> None:
        self._account = account
        self._follow = follow
        self._thread = threading.get_ident()
        self._on = False
        self.error = ""
        """Why it gave up before its end; empty if it did not."""

    @abstractmethod
    def start(self) -> None:
        """Begin with the frames that start from now on."""

    @abstractmethod
    def stop(self) -> None:
        """Put everything back as it was; may be called again."""

    def _guarded(self, action: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            action(*arguments, **options)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.stop()


class Tracer(Watcher):
    """A trace function; one that was there rests meanwhile."""

    def start(self) -> None:
        """Trace the calls of this thread."""
        self._before = sys.gettrace()
        self._on = True
        sys.settrace(self._call)

    def stop(self) -> None:
        """Put the trace function back that was there, unless somebody has set another meanwhile."""
        if self._on:
            self._on = False
            if sys.gettrace() == self._call:
                sys.settrace(self._before)
            elif threading.get_ident() == self._thread:
                self.error = self.error or "the code has set another trace function (sys.settrace)"

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        block = self._follow(frame.f_code) if self._on and event == "call" else None
        if block is None:
            return None
        goes_on = frame.f_code.co_flags & _SUSPENDS and frame.f_lineno > frame.f_code.co_firstlineno
        self._guarded(self._account.enter, frame, block, line=frame.f_lineno if goes_on else None)
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._on:
            return None
        if event == "line":
            self._guarded(self._account.line, frame, frame.f_lineno)
        elif event == "return":
            self._guarded(self._account.leave, frame)
        return self._line


class Monitor(Watcher):
    """A tool of ``sys.monitoring`` (Python 3.12 and later): code that is not followed pays once."""

    def __init__(self, account: Account, follow: Follow, codes: list[CodeType], tool: int) -> None:
        super().__init__(account, follow)
        self._tool = tool
        self._codes = list(codes)
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]  # from 3.12 on
        self._events = events = self._monitoring.events
        self._callbacks = {
            events.PY_START: self._started,
            events.LINE: self._lined,
            **dict.fromkeys((events.PY_RESUME, events.PY_THROW), self._resumed),
            **dict.fromkeys((events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND), self._left),
        }

    def start(self) -> None:
        """Take the tool and watch."""
        monitoring, events = self._monitoring, self._events
        monitoring.use_tool_id(self._tool, _NAME)
        self._on = True
        for event, callback in self._callbacks.items():
            monitoring.register_callback(self._tool, event, callback)
        monitoring.restart_events()  # what an earlier user of this tool has switched off
        for code in self._codes:
            self._watch(code)
        # Errors cannot be watched for single codes.
        monitoring.set_events(self._tool, events.PY_START | events.PY_UNWIND | events.PY_THROW)

    def stop(self) -> None:
        """Give the tool back."""
        if not self._on:
            return
        self._on = False
        monitoring = self._monitoring
        if monitoring.get_tool(self._tool) != _NAME:
            self.error = self.error or "the code has taken the tool away (sys.monitoring)"
            return
        monitoring.set_events(self._tool, 0)
        for code in self._codes:
            monitoring.set_local_events(self._tool, code, 0)
        for event in self._callbacks:
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)

    def _watch(self, code: CodeType) -> None:
        events = self._events
        local = events.LINE | events.PY_RESUME | events.PY_RETURN | events.PY_YIELD
        self._monitoring.set_local_events(self._tool, code, local)

    def _is_watched(self) -> bool:
        """Whether it is on and this is its thread."""
        return self._on and threading.get_ident() == self._thread

    def _started(self, code: CodeType, _: int) -> Any:
        block = self._follow(code)
        if block is None:
            return self._monitoring.DISABLE
        if self._is_watched():
            if all(code is not known for known in self._codes):
                self._codes.append(code)
                self._watch(code)
            self._guarded(self._account.enter, sys._getframe(1), block)
        return None

    def _resumed(self, code: CodeType, *_: Any) -> None:
        block = self._follow(code) if self._is_watched() else None
        if block is not None:
            frame = sys._getframe(1)
            self._guarded(self._account.enter, frame, block, line=frame.f_lineno)

    def _lined(self, _: CodeType, line: int) -> None:
        if self._is_watched():
            self._guarded(self._account.line, sys._getframe(1), line)

    def _left(self, code: CodeType, *_: Any) -> None:
        if self._is_watched() and self._follow(code) is not None:
            self._guarded(self._account.leave, sys._getframe(1))
