"""Writes the steps of paths through suspended code, ``: suspended generator read, local batch``:
generators, coroutines and tasks, and the frames that the tracebacks of exceptions keep.
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

from ipygpumem.heap.kinds.arrays import is_of_library
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
"""The description of each type, and the statement that ends its object."""


def append_suspended_step(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the step through suspended code, a task or an exception; return the number of its
    references, 0 for any other object.

    Args:
        path: the path to the object.
        steps: the object, and the objects after it.
        cell_of: returns the number of the cell with a code's file name.
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


def line_that_removes(item: object, path: Path) -> str:
    """Return the line that removes a path's target, and ends it first if deleting it is not enough:
    ``task.cancel(); del task``.

    Args:
        item: the target.
        path: the path.
    """
    removal = path.removal
    call = ending_of(item)
    if not call or f".{call}" in removal:
        return removal
    return in_sequence([path.statement(f"{{}}.{call}"), removal])


def _append_suspended(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the step from a generator or coroutine to the object of one of its local names; return
    the number of references.
    """
    suspended = steps[0]
    kind, ending = _SUSPENSIONS[type(suspended)]
    # In Python 3.13, a generator that has not started keeps its arguments when it is closed: it is
    # deleted instead.
    statement = path.statement(ending) if is_started(suspended) else path.removal
    path.advise(statement, words=f"close() the {kind} when it is done")
    # Up to Python 3.10, a generator refers to its frame, and the frame to the objects.
    number = 2 if type(steps[1]) is FrameType and len(steps) > 2 else 1
    name = name_of_code(code_of(suspended), cell_of)
    local = _words_for_local(frame_of(suspended), steps[number])
    path.append_words(f": suspended {kind} {name}{local}")
    return number


def _append_task(path: Path, task: object, child: object) -> None:
    """Append the step from a task to its result, ``task.result()``.

    From a task that is pending or has failed, the step leads to anything that it holds, and the
    advice is the line that cancels or deletes the task.
    """
    is_failure = is_exactly(child, CoroutineType, TracebackType) or is_instance(
        child, BaseException
    )
    if not is_pending(task) and not is_failure:
        path.append_fixed(".result()", path.code and f"{path.code}.result()")
        return
    path.advise(line_that_removes(task, path))
    path.append_words(": asyncio task")


def _append_traceback(path: Path, steps: Sequence[object], cell_of: CellOf) -> int:
    """Append the steps through exceptions and tracebacks as one, up to the object of a local name
    in a frame, or to an object of an exception; return the number of references.

    The text is ``: saved traceback, train line 3, local batch``, or ``: exception.args``.
    """
    path.advise(path.removal, words=_OR_EXCEPTION, comment="once you have read it")
    line = 0
    for position, item in enumerate(steps):
        if type(item) is TracebackType:
            line = item.tb_lineno
        elif type(item) is FrameType:
            return position + _append_frame(path, item, line, steps[position:], cell_of)
        elif not is_instance(item, BaseException):
            if path.root.is_freed_by_command:
                path.replace_advised(Remedy(FORGET_LAST_ERROR))
            path.append_words(f": exception{attribute_text(steps[position - 1], item)}")
            return position
    path.append_words(": exception")
    return len(steps) - 1


def _append_frame(
    path: Path, frame: FrameType, line: int, steps: Sequence[object], cell_of: CellOf
) -> int:
    """Append the step from a traceback's frame to the object of a local name; return the number of
    references, 0 if the path ends at the frame.

    Args:
        path: the path to the frame.
        frame: the frame.
        line: the number of the traceback's line; 0 if no traceback leads to the frame.
        steps: the frame, and the objects after it.
        cell_of: returns the number of the cell with a code's file name.
    """
    if len(steps) == 1:
        path.append_words(": saved traceback")
        return 0
    number = 1
    if type(steps[1]) is dict and len(steps) > 2:
        number = 2  # up to Python 3.12, the dict that shows its local names
    where = f"{name_of_code(frame.f_code, cell_of)} line {line or frame.f_lineno}"
    path.append_words(f": saved traceback, {where}{_words_for_local(frame, steps[number])}")
    return number


def _words_for_local(frame: FrameType | None, child: object) -> str:
    """Return ``, local batch`` for the local name of a frame that refers to an object; empty if no
    name does.
    """
    names = peek(frame) if frame is not None else {}
    return next((f", local {name}" for name, value in names.items() if value is child), "")
