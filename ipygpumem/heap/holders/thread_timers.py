"""Reads the timers of ``threading``: a thread keeps each one until it runs or is cancelled."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from ipygpumem.introspect import text_of


def is_waiting_thread(item: object) -> bool:
    """Return True for a ``threading.Timer`` that has started, and not yet called its function.

    ``cancel()`` ends such a timer. It does not end the function.
    """
    if type(item) is not threading.Timer:
        return False
    frame = sys._current_frames().get(item.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Event.wait.__code__ and _is_in_timer(frame.f_back):
            return True
        frame = frame.f_back
    return False


def _is_in_timer(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code is threading.Timer.run.__code__


def waiting_timers() -> list[threading.Timer]:
    """Return the timers that have started, and not yet called their functions."""
    timers = list[threading.Timer]()
    for thread in threading.enumerate():
        if type(thread) is threading.Timer and is_waiting_thread(thread):
            timers.append(thread)
    return timers


def cancelling_timer(timer: threading.Timer) -> str:
    """Return the line that cancels a timer and waits until its thread has ended."""
    name = text_of(timer.name)
    names = [thread.name for thread in threading.enumerate()]
    condition = f"timer.name == {name!r}" if names.count(name) == 1 else f"id(timer) == {id(timer)}"
    timers = f"timer in threading.enumerate() if {condition}"
    return f"import threading; [(timer.cancel(), timer.join()) for {timers}];"
