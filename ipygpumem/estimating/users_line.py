"""Names the line of the user's code that runs now."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path

from ipygpumem.introspect import is_users
from ipygpumem.objects.holders.frames import stack, steps


def users_line(frame: types.FrameType | None = None) -> str:
    """Return where the user's code is now: the innermost line that is no library's, if there is one."""
    first = frame or sys._getframe(1)
    here = next((caller for caller in stack(first) if is_users(caller.f_code.co_filename)), first)
    return line_text(here.f_code.co_filename, here.f_lineno)


def users_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, as ``users_line`` does."""
    lines = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in steps(traceback)]
    innermost = ([line for line in lines if is_users(line[0])] or lines[:1])[-1:]
    return line_text(*innermost[0]) if innermost else ""


def line_text(name: str, number: int) -> str:
    """Return how a line is named: its file, if it has one, its number and what stands there."""
    source = linecache.getline(name, number).strip()
    # A cell's file, where it has one, has a name that says nothing.
    has_file = Path(name).is_file() and "ipykernel" not in Path(name).parent.name
    place = f"{Path(name).name}, line {number}" if has_file else f"line {number}"
    return f"{place}: {source}" if source else place
