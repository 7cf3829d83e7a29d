"""Running functions: which there are, and what their names refer to, without leaving anything behind."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ipygpumem.kinds import text_of

_TOOLS = {"IPython", "ipykernel", "ipygpumem", "traitlets", "tornado", "asyncio", "jupyter_client"}


def running_frames() -> Iterator[tuple[FrameType, str]]:
    """Yield each running frame of every thread, and the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        current: FrameType | None = frame
        while current is not None:
            yield current, names.get(ident, str(ident))
            current = current.f_back


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs a function of the user's, and not IPython's or ours, whose names lead to everything."""
    name = text_of(frame.f_globals.get("__name__"))
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and name.split(".")[0] not in _TOOLS


def peek(frame: FrameType) -> dict[str, object]:
    """Return what the local names of a function's frame refer to now.

    Up to Python 3.12 reading ``f_locals`` leaves a copy in the frame that keeps all of it alive until the function
    returns. It is emptied again, unless the user's code has asked for it too (``locals()``), or a debugger.
    """
    names = frame.f_locals
    found = dict(names)
    only_ours = 3  # the frame's reference, the one in ``names``, and getrefcount's own
    if type(names) is dict and frame.f_trace is None and sys.getrefcount(names) == only_ours:
        names.clear()
    return found
