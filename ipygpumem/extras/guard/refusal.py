"""Recognises the errors by which a refused allocation shows itself."""

from __future__ import annotations

import dis
import errno
from dataclasses import dataclass
from typing import Literal

from ipygpumem.heap.knowledge.frames import last_step
from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import field, traceback_of
from ipygpumem.reclaim.failure import classify, is_about_host, is_oom

_INTERNAL = (
    "error return without exception set",  # 3.11: no memory for the frame of a call
    "without setting an exception",  # "<function> returned NULL without setting an exception"
    "with an exception set",  # "<function> returned a result with an exception set"
    "deallocated bytearray object has exported buffers",  # no memory for a new bytearray
)
"""Parts of the messages of a SystemError that CPython raises after it has lost a MemoryError."""


@dataclass(frozen=True)
class Refusal:
    """An error that may come from a refused allocation."""

    kind: Literal["refused", "system", "internal", "raised"]
    """The way in which the error was created:

    - ``refused``: CPython or a library, when memory was refused.
    - ``system``: the system refused a thread or a map, perhaps for another reason.
    - ``internal``: CPython lost the MemoryError and raised a SystemError in its place.
    - ``raised``: a ``raise`` statement, such as a library's own check of a size.
    """
    asked_bytes: int | None = None
    """Bytes that were requested, if the error says so."""


def refusal_in(error: BaseException) -> Refusal | None:
    """Return the refusal that an error tells of; None if it is another kind of error.

    Errors in its chain (``__cause__``, ``__context__``) are not examined.
    """
    args = field(error, "args")
    message = " ".join(part for part in args if type(part) is str)
    if is_instance(error, SystemError):
        is_internal = any(text in message for text in _INTERNAL)
        return Refusal("internal") if is_internal else None
    if is_instance(error, OSError):
        # not error.errno, which may be a property of the user's class
        number = vars(OSError)["errno"].__get__(error)
        if number == errno.ENOMEM and not _was_created_by_raise(error):
            return Refusal("system")
        return None
    if args == ("can't start new thread",):
        return Refusal("system")
    if not is_oom(error) or not is_about_host(error):
        return None
    if "stack overflow" in message:  # of the parser, for deeply nested source text
        return None
    asked_bytes = classify(error).requested_bytes
    if not _was_created_by_raise(error):
        return Refusal("refused", asked_bytes)
    if asked_bytes is None:
        return None  # "raise MemoryError" of the user
    return Refusal("raised", asked_bytes)


def _was_created_by_raise(error: BaseException) -> bool:
    """Return True if a ``raise`` statement created the error.

    Then the innermost step of its traceback is that statement. A ``raise`` that only raises it
    again is an outer step. An error without traceback was created by hand and never raised.
    """
    traceback = traceback_of(error)
    if traceback is None:
        return True
    step = last_step(traceback)
    instruction = step.tb_frame.f_code.co_code[step.tb_lasti]
    return dis.opname[instruction] == "RAISE_VARARGS"
