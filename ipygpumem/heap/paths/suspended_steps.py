"""Steps of paths through suspended code: generators, coroutines and tasks, and the frames that the
tracebacks of exceptions keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    GeneratorType,
    TracebackType,
)

from ipygpumem.heap.arrays import is_of_library
from ipygpumem.heap.knowledge.frames import FORGET_LAST_ERROR, code_of, frame_of, is_started, peek
from ipygpumem.heap.knowledge.tasks import is_pending
from ipygpumem.heap.paths.cuts import in_sequence
from ipygpumem.heap.paths.function_steps import CellOf, name_of_code
from ipygpumem.heap.paths.items_and_attributes import attribute_text
from ipygpumem.heap.paths.path_state import Path
from ipygpumem.heap.paths.remedies import REMOVE, Remedy
from ipygpumem.heap.paths.task_endings import ending_of
from ipygpumem.introspect import is_exactly, is_instance

_OR_EXCEPTION = f"{REMOVE.line}, or delete the exception once you have read it"
_SUSPENSIONS = {
    GeneratorType: ("generator", "{}.close()"),
    CoroutineType: ("coroutine", "{}.close()"),
    AsyncGeneratorType: ("async generator", "await {}.aclose()"),
}
"""The description of each kind, and the statement that ends it."""


def append_suspended_step(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Write the step through suspended code, a task or an exception; return the number of its
    references, 0 for anything else.
    """
    parent, child = steps[0], steps[1]
    if is_exactly(parent, *_SUSPENSIONS):
        return _append_suspended(path, steps, cell_of)
    if is_exactly(parent, TracebackType, FrameType) or is_instance(parent, BaseException):
        return _append_traceback(path, steps, cell_of)
    if is_of_library(parent, "asyncio", "Task"):
        _append_task(path, parent, child)
        return 1
    return 0


def line_that_ends(item: object, path: Path) -> str:
    """Return the line that ends an object, the path's target, if something must, and removes it."""
    removal = path.removal
    call = ending_of(item)
    if not call or f".{call}" in removal:
        return removal
    return in_sequence([path.statement(f"{{}}.{call}"), removal])


def _append_suspended(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Write the steps through a generator or coroutine, up to the name that its frame holds."""
    suspended = steps[0]
    what, ending = _SUSPENSIONS[type(suspended)]
    # Python 3.13 keeps the arguments of one that has not started when it is closed.
    advice = path.statement(ending) if is_started(suspended) else path.removal
    path.advise(advice, f"close() the {what} when it is done")
    taken = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
    name = name_of_code(code_of(suspended), cell_of)
    local = _local(frame_of(suspended), steps[taken])
    path.append_words(f": suspended {what} {name}{local}")
    return taken


def _append_task(path: Path, task: object, child: object) -> None:
    """Write the step through a task: to its result, or through a task that is not done."""
    is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(
        child, BaseException
    )
    if not is_pending(task) and not is_failure:
        path.append_fixed(".result()", path.code and f"{path.code}.result()")
        return
    path.advise(line_that_ends(task, path), "")
    path.append_words(": asyncio task")


def _append_traceback(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Write the steps through exceptions and tracebacks, up to the name that a frame holds."""
    path.advise(path.removal, _OR_EXCEPTION, "once you have read it")
    line = 0
    for position, item in enumerate(steps):
        if type(item) is TracebackType:
            line = item.tb_lineno
        elif type(item) is FrameType:
            return position + _append_frame(path, item, line, steps[position:], cell_of)
        elif not is_instance(item, BaseException):
            if path.is_freed_by_command:
                path.remedy = Remedy(FORGET_LAST_ERROR)
            path.append_words(f": exception{attribute_text(steps[position - 1], item)}")
            return position
    path.append_words(": exception")
    return len(steps) - 1


def _append_frame(
    path: Path, frame: FrameType, line: int, steps: Sequence[object], cell_of: CellOf
) -> int:
    """Write the step through a traceback's frame, the first of ``steps``; return the number of its
    references.

    ``line`` is the number of the traceback's line; 0 if no traceback leads to the frame.
    """
    if len(steps) == 1:
        path.append_words(": saved traceback")
        return 0
    taken = 1
    if type(steps[1]) is dict and len(steps) > 2:
        taken = 2  # up to Python 3.12, the dict that shows its local names
    where = f"{name_of_code(frame.f_code, cell_of)} line {line or frame.f_lineno}"
    path.append_words(f": saved traceback, {where}{_local(frame, steps[taken])}")
    return taken


def _local(frame: FrameType | None, child: object) -> str:
    """Return the local name of ``frame`` that refers to ``child``."""
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")
