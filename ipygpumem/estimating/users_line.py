"""Names the line of the user's code that runs now."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path

from ipygpumem.introspect import is_users


def users_line(frame: types.FrameType | None = None) -> str:
    """Return where the user's code is now: the innermost line that is no library's, if there is one."""
    first = here = frame or sys._getframe(1)
    while not is_users(here.f_code.co_filename):
        if here.f_back is None:
            here = first
            break
        here = here.f_back
    return line_text(here.f_code.co_filename, here.f_lineno)


def users_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, as ``users_line`` does."""
    line = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        line = line_text(name, traceback.tb_lineno) if is_users(name) or not line else line
        traceback = traceback.tb_next
    return line


def line_text(name: str, number: int) -> str:
    """Return how a line is named: its file, if it has one, its number and what stands there."""
    source = linecache.getline(name, number).strip()
    # A cell's file, where it has one, has a name that says nothing.
    has_file = Path(name).is_file() and "ipykernel" not in Path(name).parent.name
    place = f"{Path(name).name}, line {number}" if has_file else f"line {number}"
    return f"{place}: {source}" if source else place
