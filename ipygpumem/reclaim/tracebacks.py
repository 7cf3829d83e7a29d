"""Releases the objects that the frames of tracebacks hold; the tracebacks can still be shown."""

from __future__ import annotations

import contextlib
import gc
from types import FrameType, TracebackType
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import chain, traceback_of
from ipygpumem.reclaim.frames import (
    frames_of,
    is_function,
    is_resumable,
    kept_by_frames_alone,
    running_here,
    unfinished_frames,
)
from ipygpumem.reclaim.traceback_copies import copy_without_frames

_STILL_RUNS = contextlib.suppress(RuntimeError)
"""Ignores the error with which a frame that still runs refuses to be cleared."""


def release(error: BaseException) -> int:
    """Free the objects held by the frames of ``error`` and its chain, and return the number of
    frames cleared.

    The traceback can still be shown, without its locals. The frames are cleared even if other
    objects reference them, and the exceptions get stand-ins for their tracebacks. An
    ``AttributeError`` loses its object, too. Frames in use are not changed: clearing the frame of a
    waiting generator would close the generator.
    """
    # The error's own functions first: following its chain takes memory, which they may hold.
    _clear_functions(traceback_of(error))
    for item in chain(error):
        _clear_functions(traceback_of(item))
    running = running_here()
    cleared = _clear_finished(frames_of(error))
    for item in list(chain(error)):
        if is_instance(item, AttributeError):
            # The object without the attribute, such as the model of ``model.wieght``.
            AttributeError.__dict__["obj"].__set__(item, None)
        # Without memory for a copy the real one stays, with hardly any objects in its frames.
        with contextlib.suppress(MemoryError):
            _replace_traceback(item, running)
    return cleared


def _clear_functions(traceback: TracebackType | None) -> None:
    """Clear the frames of a traceback's functions that have ended.

    It takes no memory, of which none may be left: so there is no list, and no question whether a
    frame still runs, which answers ``clear()`` with an error.
    """
    while traceback is not None:
        if not is_resumable(traceback.tb_frame):
            with _STILL_RUNS:
                traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _clear_finished(frames: list[FrameType]) -> int:
    """Clear the frames that are not in use; return the number of cleared frames that had local
    names.
    """
    cleared_frames = 0
    busy_ids = unfinished_frames(frames)
    for frame in frames:
        if id(frame) not in busy_ids:
            with _STILL_RUNS:
                cleared_frames += _clear_frame(frame)
    return cleared_frames


def _clear_frame(frame: FrameType) -> bool:
    """Clear a frame that has ended (RuntimeError if it has not), and return True if it had names of
    its own.

    Clearing alone is not enough: up to Python 3.12 a frame keeps a copy of every local once its
    ``f_locals`` was read, and the frame of a class body keeps its names. A dict that user code
    refers to is not changed.
    """
    frame.clear()
    namespaces = kept_by_frames_alone(_own_dicts_of(frame))
    for names in namespaces:
        names.clear()
    return is_function(frame) or bool(namespaces)


def _own_dicts_of(frame: FrameType) -> list[Any]:
    """Return the dicts that a frame refers to, without those of its module."""
    return [
        item
        for item in gc.get_referents(frame)
        if type(item) is dict and item is not frame.f_globals and item is not frame.f_builtins
    ]


def _replace_traceback(error: BaseException, running: set[int]) -> None:
    """Replace the traceback of ``error`` with a copy without frames.

    Its first entries stay as they are, as far as their frames still run in this thread, whose
    identities ``running`` has.
    """
    last_running: TracebackType | None = None
    traceback = traceback_of(error)
    while traceback is not None and id(traceback.tb_frame) in running:
        last_running, traceback = traceback, traceback.tb_next
    if last_running is None:
        BaseException.__dict__["__traceback__"].__set__(error, copy_without_frames(traceback))
    else:
        last_running.tb_next = copy_without_frames(traceback)
