"""Estimates the memory that code would take on a device: runs it on fake tensors and logs their
storages.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path

from ipygpumem.heap.holders.frames import stack, steps
from ipygpumem.introspect import is_ours, is_users

FOR_FAKES = "torch's fake tensors"
"""Label of the modules that an estimate imports."""


def user_line(frame: types.FrameType | None = None) -> str:
    """Return the line that the user's code is executing: the innermost one outside libraries, if
    there is one.

    Autograd's thread has no such line; there, it is the line that waits for the backward pass.
    """
    first = frame or sys._getframe(1)
    here = (
        _innermost(first, is_users)
        or _innermost_of_estimates()
        or _innermost(first, lambda name: not is_ours(name))
    )
    if here is None:
        return "an unknown line"
    return line_text(here.f_code.co_filename, here.f_lineno)


def _innermost(first: types.FrameType, is_wanted: Callable[[str], bool]) -> types.FrameType | None:
    for frame in stack(first):
        if is_wanted(frame.f_code.co_filename):
            return frame
    return None


def _innermost_of_estimates() -> types.FrameType | None:
    """Return the innermost frame of the user's code in a thread that runs an estimate."""
    runner = str(Path(__file__).with_name("running.py"))
    for top in sys._current_frames().values():
        here = _innermost(top, is_users)
        if here is not None and any(frame.f_code.co_filename == runner for frame in stack(top)):
            return here
    return None


def user_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, or else its first line in a
    library.
    """
    lines = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in steps(traceback)]
    users_lines = [line for line in lines if is_users(line[0])]
    if users_lines:
        return line_text(*users_lines[-1])
    for name, number in lines:
        if not is_ours(name):
            return line_text(name, number)
    return ""


def line_text(name: str, number: int) -> str:
    """Return the label of a line: its file, if it has one, its number and its source."""
    source = linecache.getline(name, number).strip()
    # ipykernel's temporary file for a cell has a meaningless name.
    has_file = Path(name).is_file() and "ipykernel" not in Path(name).parent.name
    place = f"{Path(name).name}, line {number}" if has_file else f"line {number}"
    return f"{place}: {source}" if source else place


def users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without our frames, and without the frames of libraries
    that ours called.
    """
    entries = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in entries]
    end = _end_of_users_part(files)
    part = None
    for step, name in zip(entries[:end][::-1], files[:end][::-1], strict=True):
        if not is_ours(name):
            part = types.TracebackType(part, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return part


def _end_of_users_part(files: list[str]) -> int:
    """Return the number of a traceback's entries before the libraries that we call in turn."""
    users = [number for number, name in enumerate(files) if is_users(name)]
    if users:
        for number in range(users[-1] + 1, len(files)):
            if is_ours(files[number]):
                return number
    return len(files)
