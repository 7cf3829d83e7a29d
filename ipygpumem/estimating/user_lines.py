"""Finds the user's line that runs, and the user's part of a traceback."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path

from ipygpumem.errors import traceback_of_steps
from ipygpumem.heap.knowledge.frames import frames_of_other_threads, stack, steps
from ipygpumem.introspect import is_ours, is_users
from ipygpumem.notebook import cell_of_file, current_shell, running_cell

_RUNNER = str(Path(__file__).with_name("running.py"))
"""The file whose functions call the code of an estimate: the only sign of it in another thread's
frames.
"""


def user_line(frame: types.FrameType | None = None) -> str:
    """Return the line that the user's code is executing, as text.

    It is the innermost line outside libraries in the stack of ``frame``, by default the caller's.
    Autograd's thread has no such line; then it is the line that waits for the backward pass, or
    else the innermost one that is not ours.
    """
    first = frame or sys._getframe(1)
    users_frame = _innermost_frame(first, is_users)
    if users_frame is None:
        users_frame = _innermost_frame_of_estimates()
    if users_frame is None:
        users_frame = _innermost_frame(first, _is_not_ours)
    if users_frame is None:
        return "an unknown line"
    return line_text(users_frame.f_code.co_filename, users_frame.f_lineno)


def _innermost_frame(
    first: types.FrameType, is_wanted: Callable[[str], bool]
) -> types.FrameType | None:
    """Return the innermost frame, from ``first`` on, whose file is wanted."""
    for frame in stack(first):
        if is_wanted(frame.f_code.co_filename):
            return frame
    return None


def _is_not_ours(name: str) -> bool:
    """Return True for a file that is not one of ipygpumem's."""
    return not is_ours(name)


def _innermost_frame_of_estimates() -> types.FrameType | None:
    """Return the innermost frame of the user's code in another thread, which runs an estimate."""
    for top in frames_of_other_threads().values():
        users_frame = _innermost_frame(top, is_users)
        if users_frame is None:
            continue
        if any(frame.f_code.co_filename == _RUNNER for frame in stack(top)):
            return users_frame
    return None


def user_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, or else the outermost line that
    is not ours; empty for a traceback of our code alone.
    """
    entries = list(steps(traceback))
    for step in reversed(entries):
        name = step.tb_frame.f_code.co_filename
        if is_users(name):
            return line_text(name, step.tb_lineno)
    for step in entries:
        name = step.tb_frame.f_code.co_filename
        if not is_ours(name):
            return line_text(name, step.tb_lineno)
    return ""


def line_text(name: str, number: int) -> str:
    """Return the label of a line with its source: ``model.py, line 5: x = y * 2``.

    A line of another cell begins with ``cell 3,``, and one of the running cell with ``line``.
    """
    source = linecache.getline(name, number).strip()
    text = f"line {number}"
    shell = current_shell()
    cell = None if shell is None else cell_of_file(shell, name)
    if cell is None and Path(name).is_file():
        text = f"{Path(name).name}, {text}"
    elif cell is not None and cell != running_cell(shell):
        text = f"cell {cell}, {text}"
    if source:
        text = f"{text}: {source}"
    return text


def users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without our frames, and without the frames of libraries that ours have
    called from within the user's code.
    """
    entries = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in entries]
    end = _end_of_users_part(files)
    users_steps = [step for step in entries[:end] if not is_ours(step.tb_frame.f_code.co_filename)]
    return traceback_of_steps(users_steps)


def _end_of_users_part(files: list[str]) -> int:
    """Return the number of a traceback's entries before the libraries that our code calls.

    It is the position of our first frame after the user's innermost one; without the user's code,
    or without our frames inside it, the number of all entries.
    """
    users_entries = [number for number, name in enumerate(files) if is_users(name)]
    if not users_entries:
        return len(files)
    innermost = users_entries[-1]
    for number, name in enumerate(files):
        if number > innermost and is_ours(name):
            return number
    return len(files)
