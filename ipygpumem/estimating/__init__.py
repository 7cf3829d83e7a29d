"""Estimates the memory that code would take on a device: runs it on fake tensors and logs their
storages.
"""

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
FOR_FAKES = "torch's fake tensors"
"""Label of the modules that an estimate imports."""


def user_line(frame: types.FrameType | None = None) -> str:
    """Return the line that the user's code is executing: the innermost one outside libraries, if
    there is one.

    Autograd's thread has no such line; there, it is the line that waits for the backward pass.
    """
    first = frame or sys._getframe(1)
    here = _innermost_frame(first, is_users)
    if here is None:
        here = _innermost_frame_of_estimates()
    if here is None:
        here = _innermost_frame(first, _is_not_ours)
    if here is None:
        return "an unknown line"
    return line_text(here.f_code.co_filename, here.f_lineno)


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
        here = _innermost_frame(top, is_users)
        if here is None:
            continue
        if any(frame.f_code.co_filename == _RUNNER for frame in stack(top)):
            return here
    return None


def user_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, or else its first line in a
    library.
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
    """Return the label of a line: its file or its cell, unless it is of the running cell, its
    number and its source.
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
    """Return a traceback without our frames, and without the frames of libraries
    that ours called.
    """
    entries = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in entries]
    end = _end_of_users_part(files)
    users_steps = [step for step in entries[:end] if not is_ours(step.tb_frame.f_code.co_filename)]
    return traceback_of_steps(users_steps)


def _end_of_users_part(files: list[str]) -> int:
    """Return the number of a traceback's entries before the libraries that we call in turn."""
    users_entries = [number for number, name in enumerate(files) if is_users(name)]
    if not users_entries:
        return len(files)
    innermost = users_entries[-1]
    for number, name in enumerate(files):
        if number > innermost and is_ours(name):
            return number
    return len(files)
