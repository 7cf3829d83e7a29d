"""Reads exceptions that pin memory: is it an out-of-memory error, what do its frames hold? Releases them.

An exception keeps its traceback, the traceback its frames, and each frame its locals: after an error in a
training loop that is the model, the batch and every activation. Nothing here asks a user's object for
anything: exceptions are read through ``BaseException``'s own descriptors.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import gc
import inspect
import itertools
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any, Literal

from ipygpumem.errors import UnitError
from ipygpumem.introspect import is_atom, is_exactly, is_instance, is_users, name_of, type_name
from ipygpumem.model import Held
from ipygpumem.objects import interrupts
from ipygpumem.objects.arrays import slot_descriptors, slots
from ipygpumem.objects.holders.frames import peek, running_locals, stack, steps
from ipygpumem.objects.walk import MOST_AT_START, MOST_OBJECTS, ArraySearch
from ipygpumem.units import bytes_in_message

_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}  # torch, CuPy; MemoryError and NumPy's subclass of it
_OOM_TEXT = re.compile(
    r"out of memory|can't allocate memory|not enough memory|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|(DEVICE|HOST)_ALLOCATION_FAILED",
    re.IGNORECASE,
)
_TEXT_TYPES = {
    *("RuntimeError", "AcceleratorError", "XlaRuntimeError", "JaxRuntimeError"),
    *("CUDARuntimeError", "CUDNNError", "CUBLASError"),
}
"""Types whose message decides; a ValueError about memory is somebody's own."""

_POISON_TEXT = re.compile(
    r"device-side assert(ion failures)?\b|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|hardware stack error|invalid program counter|uncorrectable ECC"
    r"|CUDA error: unknown error|launch timed out|operation not supported on global/shared address space"
    r"|CUDA_ERROR_(ASSERT|ILLEGAL_ADDRESS)",
    re.IGNORECASE,
)
"""Says of a CUDA error that no later call can work. Below each of them torch advises about "device-side assertions"."""
_SIZE = r"([\d.,]+ ?(?:[kmgtp]?i?b|bytes))"
_REQUESTED = re.compile(
    rf"tried to allocate {_SIZE}|trying to allocate {_SIZE}|unable to allocate {_SIZE}|allocating {_SIZE}"
    rf"|^requested +: {_SIZE}",  # cudaMallocAsync
    re.IGNORECASE | re.MULTILINE,
)

_PLAIN_SHOWN, _PLAIN_LENGTH = 12, 40
"""Maximum number of frames with plain locals to show, of locals in each, and of letters of a text."""
_SECRET = re.compile(r"passw|credential|token|secret_|_secret|(api|access|private)_?key", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """What kind of failure an exception and its chain are."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    message: str
    requested_bytes: int | None = None
    poisoned: bool = False


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all that it keeps alive, each once: the members of groups, and causes and contexts."""
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
    """Return the traceback of ``error``, past any ``__getattribute__`` of the user's."""
    found: TracebackType | None = field(error, "__traceback__")
    return found


def field(error: BaseException, name: str) -> Any:
    """Return a field that every exception has, past any code of the user's."""
    return BaseException.__dict__[name].__get__(error)


def members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of a group of exceptions; no other has any."""
    group = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
    return group.__dict__["exceptions"].__get__(error) if group is not None and is_instance(error, group) else ()


def _text(error: BaseException) -> str:
    """Return the exception's message where that is plain text already; never calls the user's ``__str__``."""
    return " ".join(part for part in field(error, "args") if type(part) is str)


def classify(error: BaseException) -> Failure:
    """Return what kind of failure ``error`` is, by its whole chain: trainers turn a Ctrl-C into ``SystemExit``."""
    items = list(chain(error))
    interrupts = [item for item in items if is_instance(item, KeyboardInterrupt)] or [error] * _is_cancelled(error)
    # A Ctrl-C may strike while an OOM is handled, which is its context then.
    behind = {id(item) for interrupt in interrupts for item in chain(interrupt)} - {id(error)}
    ooms = [item for item in items if is_oom(item) and id(item) not in behind]
    found = [*ooms, *interrupts, error][0]
    kind: Literal["oom", "interrupt", "error"] = "oom" if ooms else "interrupt" if interrupts else "error"
    poisoned = any(_names(item) & _TEXT_TYPES and _POISON_TEXT.search(_text(item)) for item in items)
    return Failure(kind, type_name(found), _text(found), _requested(found) if ooms else None, poisoned)


def _is_cancelled(error: BaseException) -> bool:
    """Return True if the kernel may have cancelled the cell; behind other errors it is a timeout or a group."""
    names = _names(error)
    return "CancelledError" in names and "Exception" not in names


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
        return bytes_in_message(next(group for group in match.groups() if group).replace(",", ""))
    except UnitError:
        return None


def _requested_array(error: BaseException) -> int | None:
    """Return the bytes by the shape and dtype in NumPy's error: it has these instead of a text."""
    args = field(error, "args")
    if len(args) != 2 or type(args[0]) is not tuple or not all(type(size) is int for size in args[0]):
        return None
    dtype_type = getattr(sys.modules.get("numpy"), "dtype", None)
    if dtype_type is None or not is_instance(args[1], dtype_type):
        return None
    return math.prod(args[0]) * int(dtype_type.itemsize.__get__(args[1]))


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of ``error`` and of its chain with their lines, outermost first, each once."""
    seen: set[int] = set()
    for item in chain(error):
        for step in steps(traceback_of(item)):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def _finished(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that ``release`` clears, and their lines; not IPython's own."""
    in_use = _in_use([frame for frame, _ in frames(error)]) - running_here()
    for frame, line in frames(error):
        if not is_shells(frame) and id(frame) not in in_use:
            yield frame, line


def plain_locals(error: BaseException) -> tuple[str, ...]:
    """Return the numbers and short texts among the locals of each frame of the user's code, one line for each frame."""
    lines = []
    for frame, line in _finished(error):
        if is_users(frame.f_code.co_filename):
            found = [(name, _plain(name, value)) for name, value in names_in(frame).items() if type(name) is str]
            shown = [f"{name} = {text}" for name, text in found if text and name.isidentifier()][:_PLAIN_SHOWN]
            lines += [f"{frame.f_code.co_name}, line {line}: {', '.join(shown)}"] if shown else []
    return tuple(lines[-_PLAIN_SHOWN:])


def _plain(name: str, value: object) -> str:
    """Return how a number or a text is written, which may be a secret; empty for all other objects."""
    if type(value) is str:
        cut = value[:_PLAIN_LENGTH]
        return "…" if _SECRET.search(name) else repr(cut) + "…" * (cut != value)
    if type(value) is int and value.bit_length() > 128:
        return ""
    return repr(value) if is_exactly(value, int, float, bool, type(None)) else ""


def held(error: BaseException, own: Mapping[str, object] | None = None) -> tuple[Held, ...]:
    """Return which function's locals hold tensors or arrays, largest first, each storage once.

    What autograd keeps behind tensors has a row of its own. The memory of ``own``, the notebook's names, is left out:
    it is no more pinned than before the error. So are the frames of generators and threads that go on.
    """
    if own and not (found := held(error)):
        return found  # most errors: the notebook's names need not be looked into
    search = _FrameSearch()
    search.pass_over(*chain(error), *(frame for frame, _ in frames(error)))  # the notebook may keep them, too
    kept = list((own or {}).values())
    search.left = MOST_AT_START
    search.add("", kept)
    search.look_behind()
    search.left = MOST_OBJECTS
    for frame, line in _finished(error):
        for name, value in names_in(frame).items():
            search.add(name, value, function=frame.f_code.co_name, line=line)
    search.look_behind()
    return tuple(sorted(search.found, key=lambda item: -item.size_bytes))


class _FrameSearch(ArraySearch):
    """Finds what names hold, and then what autograd keeps in C++ behind all tensors of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Held] = []
        self._tensors: list[Any] = []
        self._names: list[tuple[str, dict[str, Any], list[Any]]] = []
        self._nodes: dict[int, Any] = {}
        self._alive: list[list[Any]] = []
        """The search knows objects by identity."""

    def that_lead_on(self, arrays: list[Any]) -> list[Any]:
        """Note the tensors: one without memory of its own may have a graph."""
        self._tensors += self.of_kind("tensor", arrays)
        return super().that_lead_on(arrays)

    def add(self, name: str, value: object, **place: Any) -> None:
        """Note what a name holds that no earlier one does; one without a place is only looked into."""
        self._tensors = []
        entry = self.held(name, value, **place)
        if entry is not None and place:
            self.found.append(entry[0])
        if self._tensors:
            self._names.append((name, place, self._tensors))

    def look_behind(self) -> None:
        """Note the gradients behind the leaves of the names so far, then what is in the graphs of other tensors."""
        from ipygpumem.objects.holders.graphs import kept_behind  # loading the extension must stay fast

        names, self._names = self._names, []
        for leaves, title in ((True, "gradients of"), (False, "autograd graph of")):
            for name, place, tensors in names:
                self._alive.append(kept_behind(tensors, self._nodes, leaves=leaves))
                entry = self.held(f"{title} {name}", self._alive[-1], **place)
                if entry is not None and place:
                    self.found.append(replace(entry[0], type_name=""))


def half_made(error: BaseException) -> tuple[str, weakref.ref[Any]] | None:
    """Return the optimizer whose state ``error`` has left half made, and its type; None if there is none.

    torch notes first that a parameter has state, and fills it in then. If memory runs out between the two, the next
    step relies on the note and ends with a ``KeyError``.
    """
    for frame, _ in frames(error):
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "_init_group" and type(module) is str and module.startswith("torch.optim."):
            names = names_in(frame)
            if type(names.get("state")) is dict and names["state"]:
                return type_name(names["self"]), weakref.ref(names["self"])
    return None


def names_in(frame: FrameType) -> dict[str, object]:
    """Return the locals of a function's frame, and other names if nothing but the frame keeps them."""
    if _is_function(frame):
        return peek(frame)
    own = _kept_by_frames_alone([frame.f_locals]) if frame.f_locals is not frame.f_globals else []
    return dict(own[0]) if own else {}


def _kept_by_frames_alone(mappings: list[Any]) -> list[dict[str, object]]:
    """Return those of ``mappings``, the locals of frames, that are dicts to which nothing else refers."""
    # The first is nobody's: it shows what this very line refers to.
    counts = [
        sys.getrefcount(item) - sum(value is item for value in list(item.values()))
        if type(item) is dict
        else sys.maxsize
        for item in [{}, *mappings]
    ]
    # The list itself, and the frame.
    return [item for item, count in zip(mappings, counts[1:], strict=True) if count <= counts[0] + 2]


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def is_shells(frame: FrameType) -> bool:
    """Whether the frame is IPython's own, whose locals lead to everything."""
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.split(".")[0] in ("IPython", "ipykernel", "ipygpumem")


def running_here() -> set[int]:
    """Return the identities of the frames that run in this thread."""
    return {id(frame) for frame in stack(sys._getframe(1))}


def is_frozen() -> bool:
    """Whether the heap was frozen (``gc.freeze``): nobody can be asked then who refers to what.

    Python 3.12 freezes some hundreds of objects itself when it starts.
    """
    return gc.get_freeze_count() > 10_000


_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OWNERS = ((GeneratorType, "gi_frame"), (CoroutineType, "cr_frame"), (AsyncGeneratorType, "ag_frame"))


def frame_of(item: object) -> FrameType | None:
    """Return the frame of a generator or coroutine that has not finished; None for all other objects."""
    name = next((name for kind, name in _OWNERS if type(item) is kind), None)
    return getattr(item, name) if name is not None else None


def _in_use(candidates: list[FrameType]) -> set[int]:
    """Return the identities of those frames that run, in any thread, or wait in a generator or coroutine."""
    if sys.version_info >= (3, 11):
        # A frame that has finished refers to its code; until then it is its generator or its thread that does.
        return {id(frame) for frame in candidates if not any(item is frame.f_code for item in gc.get_referents(frame))}
    running = {id(frame) for top in sys._current_frames().values() for frame in stack(top)}
    made = [frame for frame in candidates if frame.f_code.co_flags & _RESUMED]
    if is_frozen():
        return running | {id(frame) for frame in made}
    return running | {id(frame_of(item)) for item in (gc.get_referrers(*made) if made else ())}


def release(error: BaseException) -> int:
    """Drop what the frames of ``error`` and its chain hold, and return how many frames were cleared.

    The traceback can still be shown; its locals are gone. The frames are cleared, for whoever else holds them, and
    the exceptions get stand-ins for their tracebacks. Frames that are in use are left alone: clearing that of a
    generator that waits would close it.
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
        with contextlib.suppress(MemoryError):  # then the real one stays, with little left in its frames
            _let_go_of_frames(item, own)
    return cleared


_STILL_RUNS = contextlib.suppress(RuntimeError)


def _clear_functions(traceback: TracebackType | None) -> None:
    """Clear the frames of functions that have ended. It needs no memory: there may be none before."""
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_flags & _RESUMED:
            with _STILL_RUNS:
                traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _clear(frame: FrameType) -> bool:
    """Clear a finished frame (RuntimeError if it is not), and return whether it had names of its own.

    Clearing alone is not enough: up to Python 3.12 a frame whose ``f_locals`` was ever read keeps a copy of every
    local, and the frame of a class's body its names. Where these are a dict of the user's, they are left as they are.
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


def _let_go_of_frames(error: BaseException, running: set[int]) -> None:
    """Put copies into the traceback of ``error``, behind the frames that still run in this thread."""
    last_running: TracebackType | None = None
    traceback = traceback_of(error)
    while traceback is not None and id(traceback.tb_frame) in running:
        last_running, traceback = traceback, traceback.tb_next
    if last_running is None:
        BaseException.__dict__["__traceback__"].__set__(error, copy_without_frames(traceback))
    else:
        last_running.tb_next = copy_without_frames(traceback)


# -- arrays that exceptions carry themselves ---------------------------------------------------------------------------
#
# Python puts objects there (``AttributeError.obj``), and so do users, who may come back for them. Hence they are taken
# off only where nothing of the user's refers to the exceptions any more, and what was taken is reported.


def remove_attributes(
    error: BaseException, *, roots: Iterable[object], through: Iterable[object], least_bytes: int
) -> tuple[Held, ...]:
    """Remove what holds ``least_bytes`` from ``error`` and its chain, unless they are the user's; return what it was.

    ``roots`` may refer to exceptions without making them the user's; ``through`` do so if only ``roots`` refer to them.
    """
    errors = list(chain(error))
    if not any(True for item in errors for _ in _carried(item, least_bytes)):
        return ()
    if running_here() & {id(frame) for frame, _ in frames(error)}:
        return ()  # on its way to somebody who may catch it
    with interrupts.kept():
        gc.collect()  # what is garbage refers to nothing
    if _are_users(errors, list(roots), list(through)):
        return ()
    # Groups come after their members, which then carry nothing that a group would have to let go of.
    return tuple(held for item in reversed(errors) for held in _taken_off(item, least_bytes))


def _are_users(errors: list[BaseException], roots: list[object], through: list[object]) -> bool:
    """Whether anything but ``roots`` refers to the exceptions, directly or through lists, tuples and ``through``."""
    if is_frozen():
        return True
    parts = [part for error in errors for part in (field(error, "args"), field(error, "__dict__"), members(error))]
    known = {id(item) for item in (*errors, *roots, *parts, errors, roots, through, parts)}
    passing = {id(item) for item in through}
    levels: list[tuple[object, ...]] = [tuple(errors)]
    while levels[-1]:
        known.add(id(levels[-1]))
        level = []
        for item in gc.get_referrers(*levels[-1]):
            frame = item if type(item) is FrameType else frame_of(item)
            if id(item) in known or (frame is not None and is_shells(frame)):
                continue
            if type(item) is not list and type(item) is not tuple and id(item) not in passing:
                return True
            known.add(id(item))
            level.append(item)
        levels.append(tuple(level))
        del level
    reached = {id(item) for level in levels for item in level}
    return any(id(value) in reached for value in running_locals())


def _carried(error: BaseException, least_bytes: int) -> Iterator[tuple[str, Held]]:
    """Yield the attributes of ``error`` that hold ``least_bytes`` or more, with what they hold."""
    attributes = {name: value for name, value in list(field(error, "__dict__").items()) if type(name) is str}
    places = {**attributes, **slots(error), "args": field(error, "args")}
    for name, value in places.items():
        held = _carries(f"{type_name(error)}.{name}", value, least_bytes)
        if held is not None:
            yield name, held


def _taken_off(error: BaseException, least_bytes: int) -> Iterator[Held]:
    attributes = field(error, "__dict__")
    for name, held in list(_carried(error, least_bytes)):
        if name == "args":
            args = [(part, _carries("", part, least_bytes)) for part in field(error, "args")]
            kept = tuple(part if held is None else f"<{held.type_name}, released>" for part, held in args)
            BaseException.__dict__["args"].__set__(error, kept)
        elif name in attributes:
            del attributes[name]
        else:
            try:
                slot_descriptors(type(error))[name].__set__(error, None)
            except (AttributeError, TypeError):  # read-only
                continue
        yield held


def _carries(name: str, value: object, least_bytes: int) -> Held | None:
    found = None if is_atom(value) else ArraySearch().held(name, value)
    return found[0] if found is not None and found[0].size_bytes >= least_bytes else None


# -- stand-ins for tracebacks: they show the same lines as the real ones, and hold nothing -----------------------------
#
# Clearing a frame's locals does not free all that a traceback pins: from Python 3.11 on a frame keeps its function too,
# and that its closure, so the model that a nested ``step()`` uses would stay. Hence each entry is replaced by one with
# the same file, function and position, whose frame is that of a generator which never starts. Such a frame has no
# callers; every other would keep those that made it, with the real traceback in their hands.

_Position = tuple[int, int | None, int | None, int | None]
"""Line, end line, column and end column of an expression, as far as they are known."""


def _never_starts() -> Iterator[None]:
    yield


_NEVER_STARTS = _never_starts.__code__
_FAILING = len(_NEVER_STARTS.co_code)
"""Where the instruction is that a stand-in shows as the one that failed; it does nothing."""


def copy_without_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that shows what ``traceback`` shows and refers to none of its frames."""
    codes: dict[tuple[int, int, int], CodeType] = {}  # a recursion has a thousand entries that are alike
    made: TracebackType | None = None
    for entry in reversed(list(steps(traceback))):
        frame, position = entry.tb_frame, _position(entry)
        key = (id(frame.f_code), entry.tb_lasti, position[0])
        if key not in codes:
            codes[key] = _like(frame.f_code, position)
        # The module's name and file are those by which debuggers tell whose code it is.
        names = {name: frame.f_globals.get(name) for name in ("__name__", "__file__")}
        texts = {name: value for name, value in names.items() if type(value) is str}
        generator = FunctionType(codes[key], texts)()
        made = TracebackType(made, generator.gi_frame, _FAILING, position[0])
    return made


def _position(traceback: TracebackType) -> _Position:
    """Return the position of the expression that failed."""
    positions = getattr(traceback.tb_frame.f_code, "co_positions", None)  # Python 3.11
    if positions is not None and traceback.tb_lasti >= 0:
        line, *rest = next(itertools.islice(positions(), traceback.tb_lasti // 2, None), (None, None, None, None))
        if line is not None and line == traceback.tb_lineno:
            return (line, *rest)
    return max(traceback.tb_lineno or 1, 1), None, None, None  # generated code may have no lines


def _like(code: CodeType, position: _Position) -> CodeType:
    """Return code that bears the name of ``code``, stands at ``position``, and does nothing."""
    instructions = _NEVER_STARTS.co_code + bytes([dis.opmap["NOP"], 0])
    first = position[0]
    newer: dict[str, Any] = {}
    if hasattr(code, "co_qualname"):  # Python 3.11; before, a frame that never starts stands on its first line
        first = code.co_firstlineno
        table = _location(first, *position) + _location(position[0], *position) * (len(instructions) // 2 - 1)
        newer = {"co_qualname": code.co_qualname, "co_exceptiontable": b"", "co_linetable": table}
    return _NEVER_STARTS.replace(
        co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=first, co_code=instructions, **newer
    )


def _location(before: int, line: int, end_line: int | None, column: int | None, end_column: int | None) -> bytes:
    """Return what a table of locations (CPython's locations.md) has for an instruction after one on line ``before``."""
    step = (line - before) << 1 if line >= before else (before - line) << 1 | 1
    if end_line is None or column is None or end_column is None:
        return bytes([0x80 | 13 << 3, *_number(step)])
    span = (step, end_line - line, column + 1, end_column + 1)
    return bytes([0x80 | 14 << 3, *(byte for value in span for byte in _number(value))])


def _number(value: int) -> list[int]:
    """Return ``value`` in groups of six bits, the lowest first."""
    return [value] if value < 64 else [0x40 | value & 63, *_number(value >> 6)]
