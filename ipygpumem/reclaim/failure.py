"""Classifies exceptions: out of memory, interrupted, or any other error, and what the message says
about it.
"""

from __future__ import annotations

import dis
import errno
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ipygpumem.errors import UnitError
from ipygpumem.heap.knowledge.frames import steps
from ipygpumem.introspect import is_instance, type_name
from ipygpumem.oom_texts import (
    NATIVE_HOST_WORDS,
    OOM_TEXT,
    OOM_TYPES,
    REQUESTED,
    SHM_REFUSED,
    TEXT_TYPES,
)
from ipygpumem.probes.segments import MOUNT
from ipygpumem.reclaim.exceptions import chain, class_names, message_of, traceback_of
from ipygpumem.units import MIB, bytes_in_message

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
_FULL_SHARE = 16
"""A mount counts as full if at most one part in so many of its size is free."""

_Place = Literal["host", "shm", ""]


@dataclass(frozen=True)
class Failure:
    """Kind of failure of an exception and its chain."""

    kind: Literal["oom", "interrupt", "error"]
    error: str
    """The name of the exception's type."""
    message: str
    requested_bytes: int | None = None
    """Bytes that an out-of-memory error says were asked for; None if it does not say."""
    poisoned: bool = False
    """True if no later call to the device works, until the kernel is restarted."""
    place: _Place = ""
    """The memory used up, if the error tells: RAM (no Python code raised the error) or shared
    memory.
    """


def classify(error: BaseException) -> Failure:
    """Return the kind of failure of ``error``.

    It goes by the whole chain of causes and contexts: trainers turn a Ctrl-C into ``SystemExit``,
    and code wraps out-of-memory errors in its own (``raise TrainingFailed from error``).
    """
    errors = list(chain(error))
    poisoned = any(map(_poisons_device, errors))
    interrupts = [item for item in errors if is_instance(item, KeyboardInterrupt)]
    if not interrupts and _is_cancelled(error):
        interrupts = [error]
    oom_errors = _ending_oom_errors(errors, error, interrupts)
    if oom_errors:
        oom_error = oom_errors[0]
        return Failure(
            "oom",
            type_name(oom_error),
            message_of(oom_error),
            _requested_bytes_in(oom_error),
            poisoned,
            _memory_used_up(oom_error),
        )
    if interrupts:
        interrupt = interrupts[0]
        return Failure("interrupt", type_name(interrupt), message_of(interrupt), poisoned=poisoned)
    return Failure("error", type_name(error), message_of(error), poisoned=poisoned)


def _ending_oom_errors(
    errors: Iterable[BaseException], error: BaseException, interrupts: Iterable[BaseException]
) -> list[BaseException]:
    """Return the out-of-memory errors in a chain that ended the code.

    A Ctrl-C may come while an out-of-memory error is handled: then the chain of the interrupt
    contains that error, and the code was interrupted.

    Args:
        errors: the chain of ``error``.
        error: the error that left the code; it counts in any case.
        interrupts: the interrupts in the chain.
    """
    before_interrupts = set[int]()
    for interrupt in interrupts:
        before_interrupts.update(map(id, chain(interrupt)))
    before_interrupts.discard(id(error))
    return [item for item in errors if is_oom(item) and id(item) not in before_interrupts]


def _is_cancelled(error: BaseException) -> bool:
    """Return True if ``error`` may mean that the kernel has cancelled the cell, as it does on a
    Ctrl-C in a cell with a top-level ``await``.

    Only the error that left the cell is asked: in the chain of another one, a ``CancelledError``
    comes from a timeout or a task group.
    """
    names = class_names(error)
    # asyncio's derives from BaseException; that of ``concurrent.futures`` is an Exception.
    return "CancelledError" in names and "Exception" not in names


def _poisons_device(error: BaseException) -> bool:
    """Return True for a CUDA error after which no later call works."""
    if class_names(error).isdisjoint(TEXT_TYPES):
        return False
    return _POISON_TEXT.search(message_of(error)) is not None


def is_oom(error: BaseException) -> bool:
    """Return True if ``error`` itself means that memory ran out: host, CUDA, ROCm, XPU, MPS, CuPy
    or JAX.
    """
    names = class_names(error)
    if names & OOM_TYPES:
        return True
    if names & TEXT_TYPES and OOM_TEXT.search(message_of(error)):
        return True
    return _fills_shm(error)


def _requested_bytes_in(error: BaseException) -> int | None:
    """Return the bytes that the message says were asked for; None if it does not."""
    match = REQUESTED.search(message_of(error))
    if match is None:
        return None
    size = next(text for text in match.groups() if text)
    try:
        return bytes_in_message(size.replace(",", ""))
    except UnitError:
        return None


# -- which memory was used up -------------------------------------------------------------------


def _memory_used_up(error: BaseException) -> _Place:
    """Return the memory that was used up, as far as an out-of-memory error tells; empty for that of
    a device, or if it is unknown.
    """
    if _fills_shm(error):
        return "shm"
    if is_about_host(error) and not passed_a_raise(error):
        return "host"
    return ""


def is_about_host(error: BaseException) -> bool:
    """Return True if an out-of-memory error is about RAM, not about a device's memory."""
    # CuPy's OutOfMemoryError, which is about a device, derives from MemoryError.
    is_about_device = "OutOfMemoryError" in class_names(error)
    if is_instance(error, MemoryError) and not is_about_device:
        return True
    message = message_of(error)
    return any(word in message for word in NATIVE_HOST_WORDS)


def passed_a_raise(error: BaseException) -> bool:
    """Return True if Python code raised ``error``, the first time or again: one of the functions in
    its traceback stopped at a ``raise``. Also without a traceback: the error was never raised.

    An error that the interpreter or a C function raised itself, for lack of memory, passes none.
    """
    operations = list[str]()
    for step in steps(traceback_of(error)):
        instruction = step.tb_frame.f_code.co_code[step.tb_lasti]
        operations.append(dis.opname[instruction])
    return not operations or "RAISE_VARARGS" in operations


def _fills_shm(error: BaseException) -> bool:
    """Return True if an error means that shared memory is used up: the error says so, or it may be
    about shared memory, which is full now.
    """
    if is_instance(error, RuntimeError):
        message = message_of(error)
        if SHM_REFUSED.search(message):
            return True
        # A worker of torch's DataLoader is killed by this signal if it writes beyond the mount.
        return "killed by signal: Bus error" in message and _shm_is_full()
    if type(error) is not OSError or error.errno != errno.ENOSPC or passed_a_raise(error):
        return False
    if error.filename is not None:
        return _is_in_shm(error.filename) and _shm_is_full()
    # The error names no file, so the disk may be full instead.
    return _shm_is_full() and _disks_have_space()


def _is_in_shm(path: Any) -> bool:
    """Return True for the path of a file in shared memory."""
    return type(path) is str and f"{path}/".startswith(f"{MOUNT}/")


def _shm_is_full() -> bool:
    """Return True if hardly any shared memory is free; False where there is no such mount."""
    try:
        usage = shutil.disk_usage(MOUNT)
    except OSError:
        return False
    return usage.free <= usage.total // _FULL_SHARE


def _disks_have_space() -> bool:
    """Return True if more than a MiB is free on the disks of the current and the temporary
    folder.
    """
    try:
        folders = str(Path.cwd()), tempfile.gettempdir()
        return all(shutil.disk_usage(folder).free > MIB for folder in folders)
    except OSError:  # such as a current folder that was deleted
        return False
