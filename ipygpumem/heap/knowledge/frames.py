"""Reads running functions and their local names, without leaving references behind."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Container, Iterator, Sequence
from itertools import compress, repeat
from operator import is_not
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    GeneratorType,
    TracebackType,
)
from typing import Any

from ipygpumem import introspect
from ipygpumem.introspect import text_of

FORGET_LAST_ERROR = "import sys; sys.last_value = sys.last_exc = None"
"""The line that drops the last error, which %debug and %tb show, with its arguments and attributes.
"""
_LIBRARIES_OF_KERNELS = {
    "IPython",
    "asyncio",
    "ipykernel",
    "ipygpumem",
    "jupyter_client",
    "selectors",
    "tornado",
    "traitlets",
}
"""Libraries whose functions run below each cell, in the kernel."""


def running_frames(without: Container[int] = ()) -> Iterator[tuple[FrameType, str]]:
    """Yield the frame of each running function, except the kernel's, with the name of its thread.

    Args:
        without: the identities of threads to leave out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread_id, frame in _all_frames():
        if thread_id not in without and is_not_of_kernel(frame):
            yield frame, names.get(thread_id, str(thread_id))


def background_frames() -> Iterator[tuple[FrameType, str]]:
    """Yield the frame of each running function of the user's files in the other threads, with the
    thread's name.
    """
    frames_of_this_thread = set(map(id, stack(sys._getframe(1))))
    for frame, thread in running_frames():
        if id(frame) not in frames_of_this_thread and introspect.is_users(frame.f_code.co_filename):
            yield frame, thread


def running_locals(without: Container[int] = ()) -> Iterator[object]:
    """Yield the objects to which local names of running functions refer, except the kernel's.

    Args:
        without: the identities of threads to leave out.
    """
    for frame, _ in running_frames(without):
        yield from peek(frame).values()


def users_locals() -> Iterator[object]:
    """Yield the objects that local names of the user's running functions refer to."""
    for frame, _ in running_frames():
        if introspect.is_users(frame.f_code.co_filename):
            yield from peek(frame).values()


def running_ids() -> set[int]:
    """Return the identities of the frames that run in any thread, our own included."""
    return {id(current) for _, current in _all_frames()}


def emptied_locals() -> set[int]:
    """Empty the dicts that show the locals of the ``running_frames``, and return their identities.

    Up to Python 3.12 each frame keeps such a dict. Another reference to it would stop ``peek`` from
    emptying it again.
    """
    dict_ids = set()
    for frame, _ in running_frames():
        names = frame.f_locals
        if _is_unused_by_others(frame, names):
            names.clear()
            dict_ids.add(id(names))
    return dict_ids


def frames_of_other_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each other thread, by the thread's identity.

    This thread's own one would be a cycle in a variable of its function, which would keep all
    objects of our callers alive.
    """
    this_thread = threading.get_ident()
    # No variable may refer to the whole dict, not even for a moment.
    return {key: frame for key, frame in sys._current_frames().items() if key != this_thread}


def names_in_threads(namespace: dict[str, Any]) -> set[str]:
    """Return the names of a namespace that the code of functions running in other threads may
    use.
    """
    names = set[str]()
    for innermost in frames_of_other_threads().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_globals is namespace:
                names.update(frame.f_code.co_names)
            frame = frame.f_back
    return names


def _all_frames() -> Iterator[tuple[int, FrameType]]:
    """Yield the identity of each thread with each of its frames, the innermost first."""
    # A frame stored in one of its own variables is a cycle, which would keep all objects of our
    # callers alive.
    stacks = sys._current_frames()
    current: FrameType | None
    while stacks:
        ident, current = stacks.popitem()
        while current is not None:
            yield ident, current
            current = current.f_back


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, the outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def last_step(traceback: TracebackType) -> TracebackType:
    """Return the innermost entry of a traceback."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def is_not_of_kernel(frame: FrameType) -> bool:
    """Return True for the frame of a function, of the user or of any library except those of the
    kernel: the local names of the kernel's functions lead to everything.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return False
    library, _, _ = text_of(frame.f_globals.get("__name__")).partition(".")
    return library not in _LIBRARIES_OF_KERNELS


def peek(frame: FrameType) -> dict[str, object]:
    """Return the objects that the local names of a function's frame refer to now.

    Up to Python 3.12, reading ``f_locals`` leaves a copy in the frame that keeps all objects alive
    until the function returns. It is emptied again, unless user code (``locals()``) or a debugger
    has a reference to it too.
    """
    names = frame.f_locals
    values = dict(names)
    if _is_unused_by_others(frame, names):
        names.clear()
    return values


_SUSPENDED: dict[type, str] = {GeneratorType: "gi", CoroutineType: "cr", AsyncGeneratorType: "ag"}
SUSPENDED = tuple(_SUSPENDED)
"""Types of generators and coroutines."""


def code_of(suspended: Any) -> CodeType:
    """Return the code of a generator or coroutine."""
    return getattr(suspended, f"{_SUSPENDED[type(suspended)]}_code")  # type: ignore[no-any-return]  # every one has it


def frame_of(suspended: Any) -> FrameType | None:
    """Return the frame of a generator or coroutine, running or not; None once it has ended."""
    frame: FrameType | None = getattr(suspended, f"{_SUSPENDED[type(suspended)]}_frame")
    return frame


def is_started(suspended: Any) -> bool:
    """Return True for a generator or coroutine that waits at a ``yield`` or ``await``."""
    frame = frame_of(suspended)
    has_begun = frame is not None and frame.f_lasti >= 0
    return bool(getattr(suspended, f"{_SUSPENDED[type(suspended)]}_suspended", has_begun))


def locals_of(suspended: Any) -> dict[str, object]:
    """Return the objects that the local names of a generator or coroutine refer to; none once it
    has ended.
    """
    frame = frame_of(suspended)
    return {} if frame is None else peek(frame)


_traceback_of = BaseException.__dict__["__traceback__"].__get__
"""Returns the traceback of an exception; runs no code of its class."""


def with_tracebacks(errors: Sequence[BaseException]) -> list[BaseException]:
    """Return the exceptions that have a traceback; a loop in C over many."""
    return list(compress(errors, map(is_not, map(_traceback_of, errors), repeat(None))))


def locals_in_traceback(error: BaseException) -> list[tuple[str, object]]:
    """Return the local names of ended functions in the traceback of an exception, with the objects
    that they keep alive.
    """
    ids_of_running = running_ids()
    variables = list[tuple[str, object]]()
    for step in steps(_traceback_of(error)):
        if id(step.tb_frame) not in ids_of_running and is_not_of_kernel(step.tb_frame):
            variables += peek(step.tb_frame).items()
    return variables


def _is_unused_by_others(frame: FrameType, names: object) -> bool:
    """Return True if no code but ours refers to the dict with a frame's locals: no code of the user
    loses anything if the dict is emptied.
    """
    # The frame's reference, the caller's, the one in ``names``, getrefcount's own, and until 3.10
    # the caller's stack's.
    only_ours = 4 if sys.version_info >= (3, 11) else 5
    return type(names) is dict and frame.f_trace is None and sys.getrefcount(names) == only_ours
