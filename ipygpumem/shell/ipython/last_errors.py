"""Finds and releases the last errors, which ``sys`` and IPython keep for %debug and %tb."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.reclaim.exceptions import traceback_of
from ipygpumem.reclaim.tracebacks import release


def error_of(result: Any) -> BaseException | None:
    """Return the error that ended the cell with IPython's ``result``; None if there is none."""
    return getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)


def last_error_id() -> int:
    """Return the identity of the last error shown: a reference would keep its frames alive."""
    return id(getattr(sys, "last_value", None))


def shown_since(earlier_id: int) -> BaseException | None:
    """Return the error that was shown last, if it was shown after the moment at which
    ``last_error_id()`` was ``earlier_id``; else None.

    The cell need not have failed: ``%run`` shows errors of scripts without raising them.
    """
    if last_error_id() == earlier_id:
        return None
    return stored_error("last_value")


def stored_error(name: str) -> BaseException | None:
    """Return the error stored in ``sys`` under this name, or None; the user may have stored another
    object.
    """
    value = getattr(sys, name, None)
    return value if is_instance(value, BaseException) else None


def stored_errors(shell: Any | None) -> list[BaseException]:
    """Return the errors that ``sys`` and IPython (if any) keep for %debug and %tb, each once."""
    of_result = error_of(getattr(shell, "last_execution_result", None))
    errors = dict[int, BaseException]()
    for error in (stored_error("last_exc"), stored_error("last_value"), of_result):
        if error is not None:
            errors[id(error)] = error
    return list(errors.values())


def release_stored(error: BaseException, shell: Any | None) -> int:
    """Release the frames of ``error``, and return their number.

    In ``sys`` and IPython, the error's traceback is replaced by a copy without frames, which shows
    the same lines.
    """
    traceback_with_frames = traceback_of(error)
    frames_cleared = release(error)
    if getattr(sys, "last_traceback", None) is traceback_with_frames:
        sys.last_traceback = traceback_of(error)
    shown = getattr(shell, "InteractiveTB", None)
    # It has a ``tb`` once a traceback was shown.
    if getattr(shown, "tb", None) is traceback_with_frames:
        shown.tb = traceback_of(error)  # type: ignore[union-attr]  # the line above says so
    return frames_cleared


def forget_older_shown(shell: Any | None) -> None:
    """Drop the traceback that IPython's formatter keeps, if it belongs to none of the stored
    errors, but to an older one.

    IPython shows an ExceptionGroup without that formatter, which then keeps the traceback that it
    has shown before.
    """
    shown = getattr(shell, "InteractiveTB", None)
    traceback = getattr(shown, "tb", None)
    stored = list(map(traceback_of, stored_errors(shell)))
    if traceback is not None and not any(traceback is latest for latest in stored):
        shown.tb = None  # type: ignore[union-attr]  # it has one
