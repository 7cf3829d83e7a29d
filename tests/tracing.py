"""A Ctrl-C at a line of our own code, line by line."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Ours = Callable[[FrameType], bool]


def interrupted_at(
    line: int, action: Callable[[], object], is_ours: Ours, *, events: Any = ("line",)
) -> bool:
    """Run ``action`` with a Ctrl-C at the ``line``-th line of our code that it runs; return whether
    it came so far.
    """
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        if not is_ours(frame):
            return None
        if event in events:
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(earlier)
    return False


def is_called_by_others(frame: FrameType) -> bool:
    """Return True if IPython or a cell calls our function: no ``try`` of ours is around the very
    call.
    """
    caller = frame.f_back
    return caller is not None and (
        "<ipython-input" in caller.f_code.co_filename or "/IPython/" in caller.f_code.co_filename
    )
