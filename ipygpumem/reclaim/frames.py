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
    """Yield the frames of ``error`` and its chain, each once and with its line."""
    yielded: set[int] = set()
    for item in chain(error):
        for step in steps(traceback_of(item)):
            if id(step.tb_frame) not in yielded:
                yielded.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def cells_line(error: BaseException) -> int | None:
    """Return the line of a cell at which ``error`` ended it, if any."""
    for step in steps(traceback_of(error)):
        if not is_shells(step.tb_frame):
            return step.tb_lineno
    return None


def finished_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that ``tracebacks.release`` clears, with their lines; not IPython's own."""
    busy = unfinished_frames(frames_of(error)) - running_here()
    for frame, line in _frames_and_lines(error):
        if not is_shells(frame) and id(frame) not in busy:
            yield frame, line


def is_shells(frame: FrameType) -> bool:
    """Return True for a frame of IPython or ours, whose locals lead to everything."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.split(".")[0] in ("IPython", "ipykernel", "ipygpumem")


def is_function(frame: FrameType) -> bool:
    """Return True for a function's frame, False for that of a cell, a module or a class body."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


# -- frames that still run ----------------------------------------------------------------------

_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_resumed(frame: FrameType) -> bool:
    """Return True for the frame of a generator or coroutine."""
    return bool(frame.f_code.co_flags & _RESUMED)


def running_here() -> set[int]:
    """Return the identities of the frames running in this thread."""
    return {id(frame) for frame in stack(sys._getframe(1))}


def unfinished_frames(candidates: Sequence[FrameType]) -> set[int]:
    """Return the identities of the frames that run, in any thread, or wait in a generator or
    coroutine.
    """
    if sys.version_info >= (3, 11):
        return {id(frame) for frame in candidates if not _has_ended(frame)}
    busy = running_ids()
    generators_frames = list[FrameType]()
    for frame in candidates:
        if not is_resumed(frame):
            continue
        # A search for the owner passes over the heap. Each traceback has IPython's frames, and the
        # frame of a stand-in, which never starts, holds nothing.
        if is_shells(frame) or frame.f_lasti < 0:
            busy.add(id(frame))
        else:
            generators_frames.append(frame)
    if generators_frames:
        owners = gc.get_referrers(*generators_frames)
        suspended = [owner for owner in owners if is_exactly(owner, *SUSPENDED)]
        busy.update(map(id, map(frame_of, suspended)))
    return busy


def _has_ended(frame: FrameType) -> bool:
    """Return True for a frame that has ended, from Python 3.11 on: then the frame refers to its
    code. Before, its generator or its thread does.
    """
    code = frame.f_code
    for item in gc.get_referents(frame):  # noqa: SIM110  # a generator would make this loop five times as slow
        if item is code:
            return True
    return False


# -- their names --------------------------------------------------------------------------------


def names_in(frame: FrameType) -> dict[str, object]:
    """Return the locals of a function's frame; of any other frame its names if only the frame keeps
    them.
    """
    if is_function(frame):
        return peek(frame)
    if frame.f_locals is frame.f_globals:
        return {}
    for names in kept_by_frames_alone([frame.f_locals]):
        return dict(names)
    return {}


def kept_by_frames_alone(mappings: Sequence[Any]) -> list[dict[str, object]]:
    """Return the locals dicts referenced only by their frame."""
    # The first one is new: it gives the count of references that this loop itself adds.
    counts = list[int]()
    for item in [{}, *mappings]:
        if type(item) is dict:
            counts.append(sys.getrefcount(item) - _references_to_itself(item))
        else:
            counts.append(sys.maxsize)
    most = counts[0] + 2  # the list of the mappings refers to it, and the frame
    alone = list[dict[str, object]]()
    for item, count in zip(mappings, counts[1:], strict=True):
        if count <= most:
            alone.append(item)
    return alone


def _references_to_itself(names: dict[str, object]) -> int:
    """Return how many of the names refer to their own dict, as in ``names = locals()``."""
    return sum(value is names for value in list(names.values()))


# -- an optimizer that they left incomplete --------------------------------------------------------


def find_incomplete_optimizer(error: BaseException) -> tuple[str, weakref.ref[Any]] | None:
    """Return the type of and a reference to the optimizer whose state ``error`` left incomplete;
    None if there is none.

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
