"""Examines exceptions: detects out-of-memory errors, reads the locals of their frames, and releases
them.

An exception keeps its traceback, the traceback its frames, and each frame its locals: after an
error in a training loop, the model, the batch and every activation. No user code runs: exceptions
are read through the descriptors of ``BaseException``.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import errno
import gc
import inspect
import itertools
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    TracebackType,
)
from typing import Any, Literal

from ipygpumem.errors import UnitError
from ipygpumem.heap.holders.frames import peek, stack, steps
from ipygpumem.introspect import is_exactly, is_instance, is_users, module_of, name_of, type_name
from ipygpumem.probes.outside import MOUNT
from ipygpumem.units import MIB, bytes_in_message

# torch, CuPy; MemoryError and NumPy's subclass of it
_OOM_TYPES = {
    "OutOfMemoryError",
    "MemoryError",
}
_OOM_TEXT = re.compile(
    r"out of memory|can't allocate memory|not enough "
    r"memory|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|(DEVICE|HOST)_ALLOCATION_FAILED",
    re.IGNORECASE,
)
_SHM_REFUSED = re.compile(r"unable to allocate shared memory|unable to write to file </torch_")
_TEXT_TYPES = {
    *("RuntimeError", "AcceleratorError", "XlaRuntimeError", "JaxRuntimeError"),
    *("CUDARuntimeError", "CUDNNError", "CUBLASError"),
}
"""Types whose message decides; a ValueError about memory is the user's own."""

_POISON_TEXT = re.compile(
    r"device-side assert(ion failures)?\b|illegal memory access|illegal instruction|misaligned "
    r"address"
    r"|unspecified launch failure|hardware stack error|invalid program counter|uncorrectable ECC"
    r"|CUDA error: unknown error|launch timed out|operation not supported on global/shared address "
    r"space"
    r"|CUDA_ERROR_(ASSERT|ILLEGAL_ADDRESS)",
    re.IGNORECASE,
)
"""Marks a CUDA error after which no later call works. torch mentions "device-side assertions" below
each of them.
"""
_SIZE = r"([\d.,]+ ?(?:[kmgtp]?i?b|bytes))"
_REQUESTED = re.compile(
    rf"tried to allocate {_SIZE}|trying to allocate {_SIZE}|unable to allocate {_SIZE}|allocating "
    rf"{_SIZE}"
    rf"|^requested +: {_SIZE}",  # cudaMallocAsync
    re.IGNORECASE | re.MULTILINE,
)

_PLAIN_SHOWN, _PLAIN_LENGTH = 12, 40
"""Maximum number of frames with plain locals to show, of locals in each, and of letters of a text.
"""
_SECRET = re.compile(
    r"passw|credential|token|secret_|_secret|(api|access|private)_?key", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """Kind of failure of an exception and its chain."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    message: str
    requested_bytes: int | None = None
    poisoned: bool = False
    place: Literal["host", "shm", ""] = ""
    """The memory used up, if the error tells: RAM (no Python code raised the error) or shared
    memory.
    """


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all exceptions that it keeps alive, each once: members of groups, causes
    and contexts.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        linked = field(current, "__cause__"), field(current, "__context__"), *members(current)
        waiting.extend(item for item in linked if item is not None)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error``, bypassing any user-defined ``__getattribute__``."""
    found: TracebackType | None = field(error, "__traceback__")
    return found


def field(error: BaseException, name: str) -> Any:
    """Return a field that every exception has, without running user code."""
    return BaseException.__dict__[name].__get__(error)


def members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; none for any other exception."""
    group = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
    return (
        group.__dict__["exceptions"].__get__(error)
        if group is not None and is_instance(error, group)
        else ()
    )


def _text(error: BaseException) -> str:
    """Return the exception's message if it is plain text; never calls the user's ``__str__``."""
    if is_instance(error, MemoryError) and module_of(error).partition(".")[0] == "numpy":
        return str(error)  # written from a shape and a dtype
    return " ".join(part for part in field(error, "args") if type(part) is str)


def classify(error: BaseException) -> Failure:
    """Return the kind of failure of ``error``, by its whole chain: trainers turn a Ctrl-C into
    ``SystemExit``.
    """
    items = list(chain(error))
    interrupts = [item for item in items if is_instance(item, KeyboardInterrupt)] or [
        error
    ] * _is_cancelled(error)
    # A Ctrl-C may come while an OOM is handled, which is then its context.
    behind = {id(item) for interrupt in interrupts for item in chain(interrupt)} - {id(error)}
    ooms = [item for item in items if is_oom(item) and id(item) not in behind]
    found = [*ooms, *interrupts, error][0]
    kind: Literal["oom", "interrupt", "error"] = (
        "oom" if ooms else "interrupt" if interrupts else "error"
    )
    poisoned = any(
        _names(item) & _TEXT_TYPES and _POISON_TEXT.search(_text(item)) for item in items
    )
    place = _place(found) if ooms else ""
    return Failure(
        kind, type_name(found), _text(found), _requested(found) if ooms else None, poisoned, place
    )


def _place(error: BaseException) -> Literal["host", "shm", ""]:
    """Return the memory that an out-of-memory error says was used up."""
    if _fills_shm(error):
        return "shm"
    is_hosts = is_instance(error, MemoryError) and "OutOfMemoryError" not in _names(error)  # CuPy's
    is_hosts |= "DefaultCPUAllocator" in _text(error) or "bad_alloc" in _text(error)
    return "host" if is_hosts and not is_raised(error) else ""


def _fills_shm(error: BaseException) -> bool:
    """Return True if an error says that shared memory was refused, or may come from it and it is
    full.
    """
    if is_instance(error, RuntimeError):
        if _SHM_REFUSED.search(_text(error)):
            return True
        if "killed by signal: Bus error" not in _text(error):
            return False
    elif type(error) is not OSError or error.errno != errno.ENOSPC or is_raised(error):
        return False
    with contextlib.suppress(OSError):  # there is no such mount
        path, places = error.filename if type(error) is OSError else MOUNT, list[str]()
        if path is None:  # the disk may be full instead
            path, places = MOUNT, [str(Path.cwd()), tempfile.gettempdir()]
        usage = shutil.disk_usage(MOUNT)
        is_here = type(path) is str and f"{path}/".startswith(f"{MOUNT}/")
        return (
            is_here
            and usage.free <= usage.total // 16
            and all(shutil.disk_usage(one).free > MIB for one in places)
        )
    return False


def is_raised(error: BaseException) -> bool:
    """Return True if Python code raised ``error``, the first time or again, or nothing did."""
    found = [
        dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]]
        for step in steps(traceback_of(error))
    ]
    return not found or "RAISE_VARARGS" in found


def _is_cancelled(error: BaseException) -> bool:
    """Return True if the kernel may have cancelled the cell; behind other errors it is a timeout or
    a group.
    """
    names = _names(error)
    return "CancelledError" in names and "Exception" not in names


def is_oom(error: BaseException) -> bool:
    """Return True if ``error`` itself means that memory ran out: host, CUDA, ROCm, XPU, MPS, CuPy
    or JAX.
    """
    names = _names(error)
    if names & _OOM_TYPES:
        return True
    return (bool(names & _TEXT_TYPES) and _OOM_TEXT.search(_text(error)) is not None) or _fills_shm(
        error
    )


def _names(error: BaseException) -> set[str]:
    """Return the names of the exception's type and of its bases."""
    return {name_of(kind) for kind in type.mro(type(error))}


def _requested(error: BaseException) -> int | None:
    match = _REQUESTED.search(_text(error))
    with contextlib.suppress(UnitError):
        return match and bytes_in_message(next(filter(None, match.groups())).replace(",", ""))
    return None


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of ``error`` and its chain with their lines, outermost first, each once."""
    seen: set[int] = set()
    for item in chain(error):
        for step in steps(traceback_of(item)):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def cells_line(error: BaseException) -> int | None:
    """Return the line of a cell at which ``error`` ended it, if any."""
    own = (step.tb_lineno for step in steps(traceback_of(error)) if not is_shells(step.tb_frame))
    return next(own, None)


def finished(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that ``release`` clears, with their lines; not IPython's own."""
    in_use = _in_use([frame for frame, _ in frames(error)]) - running_here()
    for frame, line in frames(error):
        if not is_shells(frame) and id(frame) not in in_use:
            yield frame, line


def plain_locals(error: BaseException) -> tuple[str, ...]:
    """Return the numbers and short texts among the locals of the innermost user frames, one line
    per frame.
    """
    lines = list[str]()
    for frame, line in reversed(list(finished(error))):
        if len(lines) == _PLAIN_SHOWN:  # a deep recursion has many thousand frames
            break
        if not is_users(frame.f_code.co_filename):
            continue
        shown = list[str]()
        for name, value in names_in(frame).items():
            if len(shown) < _PLAIN_SHOWN and type(name) is str and name.isidentifier():
                text = _plain(name, value)
                if text:
                    shown.append(f"{name} = {text}")
        if shown:
            lines.append(f"{frame.f_code.co_name}, line {line}: {', '.join(shown)}")
    return tuple(reversed(lines))


def _plain(name: str, value: object) -> str:
    """Return the source text of a number or a text, without secrets; empty for any other object."""
    if type(value) is str:
        cut = value[:_PLAIN_LENGTH]
        return "…" if _SECRET.search(name) else repr(cut) + "…" * (cut != value)
    if type(value) is int and value.bit_length() > 128:
        return ""
    return repr(value) if is_exactly(value, int, float, bool, type(None)) else ""


def incomplete_optimizer(error: BaseException) -> tuple[str, weakref.ref[Any]] | None:
    """Return the type of and a reference to the optimizer whose state ``error`` left incomplete;
    None if there is none.

    torch first records that a parameter has state, and then fills it in. If memory runs out in
    between, the next step relies on the record and raises a ``KeyError``.
    """
    for frame, _ in frames(error):
        module = frame.f_globals.get("__name__")
        if (
            frame.f_code.co_name == "_init_group"
            and type(module) is str
            and module.startswith("torch.optim.")
        ):
            names = names_in(frame)
            if type(names.get("state")) is dict and names["state"]:
                return type_name(names["self"]), weakref.ref(names["self"])
    return None


def names_in(frame: FrameType) -> dict[str, object]:
    """Return the locals of a function's frame; of any other frame its names if only the frame keeps
    them.
    """
    if _is_function(frame):
        return peek(frame)
    own = _kept_by_frames_alone([frame.f_locals]) if frame.f_locals is not frame.f_globals else []
    return dict(own[0]) if own else {}


def _kept_by_frames_alone(mappings: list[Any]) -> list[dict[str, object]]:
    """Return the locals dicts referenced only by their frame."""
    # The first one is new: it gives the count of references that this expression itself adds.
    counts = [
        sys.getrefcount(item) - sum(value is item for value in list(item.values()))
        if type(item) is dict
        else sys.maxsize
        for item in [{}, *mappings]
    ]
    # Referenced by the list and the frame.
    return [
        item for item, count in zip(mappings, counts[1:], strict=True) if count <= counts[0] + 2
    ]


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_shells(frame: FrameType) -> bool:
    """Return True for a frame of IPython or ours, whose locals lead to everything."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.split(".")[0] in ("IPython", "ipykernel", "ipygpumem")


def running_here() -> set[int]:
    """Return the identities of the frames running in this thread."""
    return {id(frame) for frame in stack(sys._getframe(1))}


_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OWNERS = (
    (GeneratorType, "gi_frame"),
    (CoroutineType, "cr_frame"),
    (AsyncGeneratorType, "ag_frame"),
)


def is_resumed(frame: FrameType) -> bool:
    """Return True for the frame of a generator or coroutine."""
    return bool(frame.f_code.co_flags & _RESUMED)


def frame_of(item: object) -> FrameType | None:
    """Return the frame of a generator or coroutine that has not finished; None for any other
    object.
    """
    name = next((name for kind, name in _OWNERS if type(item) is kind), None)
    return getattr(item, name) if name is not None else None


def _in_use(candidates: list[FrameType]) -> set[int]:
    """Return the identities of the frames that run, in any thread, or wait in a generator or
    coroutine.
    """
    if sys.version_info >= (3, 11):
        return {id(frame) for frame in candidates if not _refers_to_its_code(frame)}
    running = {id(frame) for top in sys._current_frames().values() for frame in stack(top)}
    made = list[FrameType]()
    for frame in candidates:
        # A search for the owner passes over the heap. Each traceback has IPython's frames, and the
        # frame of a stand-in, which never starts, holds nothing.
        if is_resumed(frame) and (is_shells(frame) or frame.f_lasti < 0):
            running.add(id(frame))
        elif is_resumed(frame):
            made.append(frame)
    return running | {id(frame_of(item)) for item in (gc.get_referrers(*made) if made else ())}


def _refers_to_its_code(frame: FrameType) -> bool:
    """Return True for a finished frame of Python 3.11; before its end, its generator or its thread
    does so.
    """
    code = frame.f_code
    for item in gc.get_referents(frame):  # noqa: SIM110  # a generator would make this loop five times as slow
        if item is code:
            return True
    return False


def release(error: BaseException) -> int:
    """Drop the objects held by the frames of ``error`` and its chain; return the number of frames
    cleared.

    The traceback can still be shown, without its locals. The frames are cleared even if other
    objects reference them, and the exceptions get stand-ins for their tracebacks. An
    ``AttributeError`` loses its object, too. Frames in use are not changed: clearing the frame of a
    waiting generator would close the generator.
    """
    _clear_functions(traceback_of(error))
    for item in chain(error):
        _clear_functions(traceback_of(item))
    cleared = 0
    own = running_here()
    all_frames = [frame for frame, _ in frames(error)]
    in_use = _in_use(all_frames)
    for frame in all_frames:
        if id(frame) not in in_use:
            with _STILL_RUNS:
                cleared += _clear(frame)
    for item in list(chain(error)):
        if is_instance(item, AttributeError):
            AttributeError.__dict__["obj"].__set__(item, None)  # such as a model
        with contextlib.suppress(
            MemoryError
        ):  # the real one stays, with hardly any objects in its frames
            _detach_frames(item, own)
    return cleared


_STILL_RUNS = contextlib.suppress(RuntimeError)


def _clear_functions(traceback: TracebackType | None) -> None:
    """Clear the frames of functions that have ended; needs no memory, because none
    may be left yet.
    """
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_flags & _RESUMED:
            with _STILL_RUNS:
                traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _clear(frame: FrameType) -> bool:
    """Clear a finished frame (RuntimeError if it is not), and return True if it had names of its
    own.

    Clearing alone is not enough: up to Python 3.12 a frame keeps a copy of every local once its
    ``f_locals`` was read, and the frame of a class body keeps its names. A dict that user code
    refers to is not changed.
    """
    frame.clear()
    kept = [
        item
        for item in gc.get_referents(frame)
        if type(item) is dict and item is not frame.f_globals and item is not frame.f_builtins
    ]
    alone = _kept_by_frames_alone(kept)
    for names in alone:
        names.clear()
    return _is_function(frame) or bool(alone)


def _detach_frames(error: BaseException, running: set[int]) -> None:
    """Replace the traceback of ``error`` with copies, except the frames that still run in this
    thread.
    """
    last_running: TracebackType | None = None
    traceback = traceback_of(error)
    while traceback is not None and id(traceback.tb_frame) in running:
        last_running, traceback = traceback, traceback.tb_next
    if last_running is None:
        BaseException.__dict__["__traceback__"].__set__(error, copy_without_frames(traceback))
    else:
        last_running.tb_next = copy_without_frames(traceback)


# -- stand-ins for tracebacks, which show the same lines and keep nothing alive -----------------
#
# Clearing a frame's locals does not free everything that a traceback keeps alive: from Python 3.11
# on, a frame refers to its function, and so to its closure, such as the model that a nested
# ``step()`` uses. Hence each entry is replaced by one with the same file, function and position,
# whose frame belongs to a generator that never starts. Such a frame has no callers; any other would
# keep the frames that made it alive, and with them the real traceback.

_Position = tuple[int, int | None, int | None, int | None]
"""Line, end line, column and end column of an expression, as far as known."""


def _never_starts() -> Iterator[None]:
    yield


_NEVER_STARTS = _never_starts.__code__
_FAILING = len(_NEVER_STARTS.co_code)
"""Offset of the instruction that a stand-in shows as the failing one; it does nothing."""


def copy_without_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that shows the same entries as ``traceback`` and refers to none of its
    frames.
    """
    codes: dict[tuple[int, int, int], CodeType] = {}  # a recursion has a thousand equal entries
    made: TracebackType | None = None
    for entry in reversed(list(steps(traceback))):
        frame, position = entry.tb_frame, _position(entry)
        key = (id(frame.f_code), entry.tb_lasti, position[0])
        if key not in codes:
            codes[key] = _like(frame.f_code, position)
        # Debuggers tell by the module's name and file whose code it is.
        names = {name: frame.f_globals.get(name) for name in ("__name__", "__file__")}
        texts = {name: value for name, value in names.items() if type(value) is str}
        generator = FunctionType(codes[key], texts)()
        made = TracebackType(made, generator.gi_frame, _FAILING, position[0])
    return made


def _position(traceback: TracebackType) -> _Position:
    """Return the position of the expression that failed."""
    positions = getattr(traceback.tb_frame.f_code, "co_positions", None)  # Python 3.11
    if positions is not None and traceback.tb_lasti >= 0:
        line, *rest = next(
            itertools.islice(positions(), traceback.tb_lasti // 2, None), (None, None, None, None)
        )
        if line is not None and line == traceback.tb_lineno:
            return (line, *rest)
    return max(traceback.tb_lineno or 1, 1), None, None, None  # generated code may have no lines


def _like(code: CodeType, position: _Position) -> CodeType:
    """Return code with the name of ``code`` that starts at ``position`` and does nothing."""
    instructions = _NEVER_STARTS.co_code + bytes([dis.opmap["NOP"], 0])
    first = position[0]
    newer: dict[str, Any] = {}
    if hasattr(
        code, "co_qualname"
    ):  # Python 3.11; before, a frame that never starts is on its first line
        first = code.co_firstlineno
        table = _location(first, *position) + _location(position[0], *position) * (
            len(instructions) // 2 - 1
        )
        newer = {"co_qualname": code.co_qualname, "co_exceptiontable": b"", "co_linetable": table}
    return _NEVER_STARTS.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_firstlineno=first,
        co_code=instructions,
        **newer,
    )


def _location(
    before: int, line: int, end_line: int | None, column: int | None, end_column: int | None
) -> bytes:
    """Return the entry in a location table (CPython's locations.md) for an instruction after one on
    line ``before``.
    """
    step = (line - before) << 1 if line >= before else (before - line) << 1 | 1
    if end_line is None or column is None or end_column is None:
        return bytes([0x80 | 13 << 3, *_number(step)])
    span = (step, end_line - line, column + 1, end_column + 1)
    return bytes([0x80 | 14 << 3, *(byte for value in span for byte in _number(value))])


def _number(value: int) -> list[int]:
    """Return ``value`` in groups of six bits, the lowest first."""
    return [value] if value < 64 else [0x40 | value & 63, *_number(value >> 6)]
