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
    here = _innermost(first, is_users)
    if here is None:
        ours = str(Path(__file__).with_name("running.py"))
        tops = sys._current_frames().values()
        threads = (
            top for top in tops if any(frame.f_code.co_filename == ours for frame in stack(top))
        )
        found = (_innermost(thread, is_users) for thread in threads)
        here = next(filter(None, found), None) or _innermost(first, lambda name: not is_ours(name))
    return "an unknown line" if here is None else line_text(here.f_code.co_filename, here.f_lineno)


def _innermost(first: types.FrameType, is_wanted: Callable[[str], bool]) -> types.FrameType | None:
    return next((frame for frame in stack(first) if is_wanted(frame.f_code.co_filename)), None)


def user_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, or else its first line in a
    library.
    """
    lines = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in steps(traceback)]
    users, foreign = (
        [line for line in lines if keep(line[0])]
        for keep in (is_users, lambda name: not is_ours(name))
    )
    here = users[-1:] or foreign[:1]
    return line_text(*here[0]) if here else ""


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
    every = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in every]
    users = max((number for number, name in enumerate(files) if is_users(name)), default=len(files))
    end = next(
        (number for number, name in enumerate(files) if number > users and is_ours(name)),
        len(files),
    )
    kept = None
    for step, name in zip(every[:end][::-1], files[:end][::-1], strict=True):
        if not is_ours(name):
            kept = types.TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept
