"""Reads the frames of tracebacks, and finds those that nothing runs any more.

An exception keeps its traceback, the traceback its frames, and each frame its locals: after an
error in a training loop, the model, the batch and every activation.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from ipygpumem.heap.knowledge.frames import (
    SUSPENDED,
    frame_of,
    peek,
    running_ids,
    stack,
    steps,
)
from ipygpumem.introspect import is_exactly, type_name
from ipygpumem.reclaim.exceptions import chain, traceback_of


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames of ``error`` and its chain, outermost first, each once."""
    return [frame for frame, _ in _frames_and_lines(error)]


def _frames_and_lines(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of ``error`` and its chain, outermost first, each once and with its line."""
    yielded_ids: set[int] = set()
    for item in chain(error):
        for step in steps(traceback_of(item)):
            if id(step.tb_frame) not in yielded_ids:
                yielded_ids.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def cells_line(error: BaseException) -> int | None:
    """Return the line of the cell at which ``error`` ended it: that of the first frame that is not
    IPython's. None if there is no such frame.
    """
    for step in steps(traceback_of(error)):
        if not is_shells(step.tb_frame):
            return step.tb_lineno
    return None


def finished_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of ``error`` that ``tracebacks.release`` will clear, with their lines, but
    not IPython's own.

    Frames that run in this thread are among them: the cell that calls us will have ended when its
    frames are cleared.
    """
    busy_ids = unfinished_frames(frames_of(error)) - running_here()
    for frame, line in _frames_and_lines(error):
        if not is_shells(frame) and id(frame) not in busy_ids:
            yield frame, line


def is_shells(frame: FrameType) -> bool:
    """Return True for a frame of IPython or of this package, whose locals lead to everything."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.split(".")[0] in ("IPython", "ipykernel", "ipygpumem")


def is_function(frame: FrameType) -> bool:
    """Return True for a function's frame, False for that of a cell, a module or a class body."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


# -- frames that still run ----------------------------------------------------------------------

_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_resumable(frame: FrameType) -> bool:
    """Return True for the frame of a generator or coroutine, which may stop and run again."""
    return bool(frame.f_code.co_flags & _RESUMABLE)


def running_here() -> set[int]:
    """Return the identities of the frames running in this thread."""
    return {id(frame) for frame in stack(sys._getframe(1))}


def unfinished_frames(candidates: Sequence[FrameType]) -> set[int]:
    """Return the identities of the frames that run, in any thread, or wait in a generator or
    coroutine.

    Before Python 3.11, they are the running ones of all frames, and of the ``candidates`` the
    waiting ones.
    """
    if sys.version_info >= (3, 11):
        return {id(frame) for frame in candidates if not _has_ended(frame)}
    busy_ids = running_ids()
    frames_of_generators = list[FrameType]()
    for frame in candidates:
        if not is_resumable(frame):
            continue
        # A search for a frame's generator passes over the heap. It is left out for IPython's
        # frames, which each traceback has, and for frames that never started, as in our stand-ins
        # for tracebacks: they hold nothing.
        if is_shells(frame) or frame.f_lasti < 0:
            busy_ids.add(id(frame))
        else:
            frames_of_generators.append(frame)
    if frames_of_generators:
        referrers = gc.get_referrers(*frames_of_generators)
        suspended = [owner for owner in referrers if is_exactly(owner, *SUSPENDED)]
        busy_ids.update(map(id, map(frame_of, suspended)))
    return busy_ids


def _has_ended(frame: FrameType) -> bool:
    """Return True for a frame that has ended, from Python 3.11 on.

    As long as a frame runs or waits, its variables belong to the thread or the generator. When it
    ends, the frame object takes them over, and the collector reports that it refers to its code.
    """
    code = frame.f_code
    for item in gc.get_referents(frame):  # noqa: SIM110  # a generator would make this loop five times as slow
        if item is code:
            return True
    return False


# -- their names --------------------------------------------------------------------------------


def names_in(frame: FrameType) -> dict[str, object]:
    """Return the objects that a frame keeps alive, by name.

    They are the locals of a function. The frame of a class body has its names in a dict, which
    counts only if nothing else refers to it; that of a module or cell has none of its own.
    """
    if is_function(frame):
        return peek(frame)
    if frame.f_locals is frame.f_globals:
        return {}
    for names in kept_by_frames_alone([frame.f_locals]):
        return dict(names)
    return {}


def kept_by_frames_alone(mappings: Sequence[Any]) -> list[dict[str, object]]:
    """Return the dicts among frames' mappings to which only their frame refers, apart from
    themselves and from the argument ``mappings``.
    """
    # The first one is new: it gives the count of references that this loop itself adds.
    counts = list[int]()
    for item in [{}, *mappings]:
        if type(item) is dict:
            counts.append(sys.getrefcount(item) - _references_to_itself(item))
        else:
            counts.append(sys.maxsize)
    highest_count = counts[0] + 2  # the list of the mappings refers to it, and the frame
    kept_by_frames = list[dict[str, object]]()
    for item, count in zip(mappings, counts[1:], strict=True):
        if count <= highest_count:
            kept_by_frames.append(item)
    return kept_by_frames


def _references_to_itself(names: dict[str, object]) -> int:
    """Return how many of the names refer to their own dict, as in ``names = locals()``."""
    return sum(value is names for value in list(names.values()))


# -- an optimizer with incomplete state ---------------------------------------------------------


def find_incomplete_optimizer(error: BaseException) -> tuple[str, weakref.ref[Any]] | None:
    """Return the optimizer whose state ``error`` left incomplete, as its type's name and a weak
    reference; None if there is none.

    torch first records that a parameter has state, and then fills it in. If memory runs out in
    between, the next step relies on the record and raises a ``KeyError``.
    """
    for frame in frames_of(error):
        if not _initialises_optimizer(frame):
            continue
        names = names_in(frame)
        state = names.get("state")
        if type(state) is dict and state:
            optimizer = names["self"]
            return type_name(optimizer), weakref.ref(optimizer)
    return None


def _initialises_optimizer(frame: FrameType) -> bool:
    """Return True for the frame of the method in which torch's optimizers create their state."""
    if frame.f_code.co_name != "_init_group":
        return False
    module = frame.f_globals.get("__name__")
    return type(module) is str and module.startswith("torch.optim.")
