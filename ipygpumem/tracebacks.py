"""Exceptions that pin memory: is it an out-of-memory error, what do its frames hold, and their release.

An exception keeps its traceback, the traceback its frames, and each frame its locals: after an error in a
training loop that is the model, the batch and every activation. Nothing here asks a user's object for
anything: exceptions are read through ``BaseException``'s own descriptors.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, MemberDescriptorType, TracebackType
from typing import Any, Literal

from ipygpumem.arrays import ArraySearch
from ipygpumem.errors import UnitError
from ipygpumem.kinds import is_atom, is_kind, name_of, type_name
from ipygpumem.model import Held
from ipygpumem.standins import stand_in_for
from ipygpumem.units import parse_bytes

_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}  # torch, CuPy; MemoryError and NumPy's subclass of it
_OOM_TEXT = re.compile(
    r"out of memory|can't allocate memory|not enough memory|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|(DEVICE|HOST)_ALLOCATION_FAILED",
    re.IGNORECASE,
)
_TEXT_TYPES = {
    "RuntimeError",
    "AcceleratorError",
    "XlaRuntimeError",
    "JaxRuntimeError",
    "CUDARuntimeError",
    "CUDNNError",
    "CUBLASError",
}
"""Types whose message decides; a ValueError about memory is somebody's own."""

_POISON_TEXT = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|misaligned address|unspecified launch failure"
    r"|hardware stack error|invalid program counter|uncorrectable ECC|CUDA error: unknown error"
    r"|launch timed out|operation not supported on global/shared address space|CUDA_ERROR_(ASSERT|ILLEGAL_ADDRESS)",
    re.IGNORECASE,
)
_SIZE = r"([\d.,]+ ?(?:[kmgtp]?i?b|bytes))"
_REQUESTED = re.compile(
    rf"tried to allocate {_SIZE}|trying to allocate {_SIZE}|unable to allocate {_SIZE}|allocating {_SIZE}",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """What kind of failure an exception and its chain are."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    message: str
    requested_bytes: int | None = None
    poisoned: bool = False


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all that it keeps alive: causes, contexts and members of groups, each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        linked = (_field(current, "__cause__"), _field(current, "__context__"))
        waiting.extend(item for item in (*linked, *_members(current)) if item is not None)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error``, past any ``__getattribute__`` of the user's."""
    found: TracebackType | None = _field(error, "__traceback__")
    return found


def _field(error: BaseException, name: str) -> Any:
    return BaseException.__dict__[name].__get__(error)


def _set(error: BaseException, name: str, value: object) -> None:
    BaseException.__dict__[name].__set__(error, value)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    group = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
    return group.__dict__["exceptions"].__get__(error) if group is not None and is_kind(error, group) else ()


def _text(error: BaseException) -> str:
    """Return the exception's message where that is plain text already; never calls the user's ``__str__``."""
    return " ".join(part for part in _field(error, "args") if type(part) is str)


def classify(error: BaseException) -> Failure:
    """Return what kind of failure ``error`` is; an OOM anywhere in its chain makes it one."""
    poisoned = any(_names(item) & _TEXT_TYPES and _POISON_TEXT.search(_text(item)) for item in chain(error))
    for item in chain(error):
        if is_oom(item):
            requested = _requested(item)
            return Failure("oom", type_name(item), _text(item), requested, poisoned)
    # The kernel ends a cell that awaits by cancelling its task.
    interrupted = any(_names(item) & {"KeyboardInterrupt", "CancelledError"} for item in chain(error))
    return Failure("interrupt" if interrupted else "error", type_name(error), _text(error), None, poisoned)


def is_oom(error: BaseException) -> bool:
    """Whether ``error`` itself says that memory ran out: host, CUDA, ROCm, XPU, MPS, CuPy or JAX."""
    names = _names(error)
    if names & _OOM_TYPES:
        return True
    return bool(names & _TEXT_TYPES) and _OOM_TEXT.search(_text(error)) is not None


def _names(error: BaseException) -> set[str]:
    """Return the names of the exception's type and of its bases."""
    return {name_of(kind) for kind in type.mro(type(error))}


def _requested(error: BaseException) -> int | None:
    match = _REQUESTED.search(_text(error))
    if match is None:
        return _requested_array(error)
    try:
        return parse_bytes(next(group for group in match.groups() if group).replace(",", ""))
    except UnitError:
        return None


def _requested_array(error: BaseException) -> int | None:
    """NumPy's error carries the shape and dtype that it could not allocate instead of a text."""
    args = _field(error, "args")
    if len(args) != 2 or type(args[0]) is not tuple or not all(type(size) is int for size in args[0]):
        return None
    dtype_type = getattr(sys.modules.get("numpy"), "dtype", None)
    if dtype_type is None or not is_kind(args[1], dtype_type):
        return None
    return math.prod(args[0]) * int(dtype_type.itemsize.__get__(args[1]))


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of ``error`` and of its chain with their lines, outermost first, each once."""
    seen: set[int] = set()
    for item in chain(error):
        traceback = traceback_of(item)
        while traceback is not None:
            if id(traceback.tb_frame) not in seen:
                seen.add(id(traceback.tb_frame))
                yield traceback.tb_frame, traceback.tb_lineno
            traceback = traceback.tb_next


def held(error: BaseException) -> tuple[Held, ...]:
    """Return which function's locals hold tensors or arrays, largest first, each storage once.

    The notebook's own names are left out: they are no more pinned than before the error.
    """
    search = ArraySearch()
    found: list[Held] = []
    for frame, line in frames(error):
        if _is_shells(frame) or not (_is_function(frame) or _is_class_body(frame)):
            continue
        for name, value in list(frame.f_locals.items()):
            entry = search.held(name, value, function=frame.f_code.co_name, line=line)
            if entry is not None:
                found.append(entry[0])
    return tuple(sorted(found, key=lambda item: -item.size_bytes))


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _is_class_body(frame: FrameType) -> bool:
    """Whether the frame runs the body of a class, whose names only the class would have kept."""
    names = frame.f_locals
    return not _is_function(frame) and type(names) is dict and names is not frame.f_globals and "__qualname__" in names


def _is_shells(frame: FrameType) -> bool:
    """Whether the frame is IPython's own, whose locals lead to everything."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.split(".")[0] in ("IPython", "ipykernel", "ipygpumem")


def release(error: BaseException) -> int:
    """Drop what the frames of ``error`` and its chain hold, and return how many frames were cleared.

    The traceback can still be shown; its locals are gone. The frames are cleared, for whoever else holds them, and
    the exceptions get stand-ins for their tracebacks. ``traceback.clear_frames`` alone would not be enough: up to
    Python 3.12 a frame whose ``f_locals`` was ever read keeps a copy of every local, which only another read after the
    clearing empties; later ones keep their function.
    """
    cleared = 0
    running = set()
    for frame, _ in list(frames(error)):
        try:
            cleared += _clear(frame)
        except RuntimeError:  # noqa: PERF203  # still running: its locals are in use
            running.add(id(frame))
    for item in chain(error):
        _strip(item)
        _let_go_of_frames(item, running)
    return cleared


def _clear(frame: FrameType) -> bool:
    """Clear a finished frame (RuntimeError if it is not), and return whether it had names of its own."""
    frame.clear()
    if _is_function(frame):
        frame.f_locals  # noqa: B018  # refreshes the copy, see above
        return True
    if _is_class_body(frame):
        frame.f_locals.clear()
        return True
    return False


def _let_go_of_frames(error: BaseException, running: set[int]) -> None:
    """Put stand-ins into the traceback of ``error``, behind the frames that still run."""
    last_running: TracebackType | None = None
    traceback = traceback_of(error)
    while traceback is not None and id(traceback.tb_frame) in running:
        last_running, traceback = traceback, traceback.tb_next
    if last_running is None:
        _set(error, "__traceback__", stand_in_for(traceback))
    else:
        last_running.tb_next = stand_in_for(traceback)


def _strip(error: BaseException) -> None:
    """Remove the tensors, arrays and objects that the exception itself carries."""
    args = _field(error, "args")
    if any(_carries_arrays(part) for part in args):
        _set(error, "args", tuple(f"<{type_name(p)}, released>" if _carries_arrays(p) else p for p in args))
    attributes = _field(error, "__dict__")
    for name in [name for name, value in attributes.items() if _carries_arrays(value)]:
        del attributes[name]
    for slot in _slots(error):
        with contextlib.suppress(AttributeError, TypeError):  # empty, or read-only
            if _carries_arrays(slot.__get__(error)):
                slot.__set__(error, None)


def _slots(error: BaseException) -> list[MemberDescriptorType]:
    """Return the fields that the exception's classes declare: ``AttributeError.obj``, ``__slots__`` and their like."""
    fields = [field for kind in type.mro(type(error)) for field in type.__dict__["__dict__"].__get__(kind).values()]
    return [field for field in fields if type(field) is MemberDescriptorType]


def _carries_arrays(value: object) -> bool:
    return not is_atom(value) and ArraySearch().held("", value) is not None
