"""Finds the error of a cell in its result, in ``sys`` and in IPython, and releases it there."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.reclaim import tracebacks


def error_of(result: Any) -> BaseException | None:
    """Return the error that ended the cell of ``result``."""
    return getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)


def last_error() -> int:
    """Return the identity of the last error shown."""
    return id(getattr(sys, "last_value", None))


def shown_since(earlier: int) -> BaseException | None:
    """Return an error shown after ``earlier`` and then swallowed, as by %run."""
    return None if last_error() == earlier else stored_error("last_value")


def stored_error(name: str) -> BaseException | None:
    """Return the error stored in ``sys`` under this name, or None; the user may have stored another object."""
    value = getattr(sys, name, None)
    return value if is_instance(value, BaseException) else None


def stored_errors(shell: Any | None) -> list[BaseException]:
    """Return the errors that ``sys`` and IPython (if any) keep for %debug and %tb, each once."""
    stored = [
        stored_error("last_exc"),
        stored_error("last_value"),
        error_of(getattr(shell, "last_execution_result", None)),
    ]
    return list({id(error): error for error in stored if error is not None}.values())


def release_stored(error: BaseException, shell: Any | None) -> int:
    """Release ``error``, and replace its real traceback in ``sys`` and IPython by its stand-in.

    Return the number of frames cleared.
    """
    real = tracebacks.traceback_of(error)
    cleared = tracebacks.release(error)
    if getattr(sys, "last_traceback", None) is real:
        sys.last_traceback = tracebacks.traceback_of(error)
    shown = getattr(shell, "InteractiveTB", None)
    if getattr(shown, "tb", None) is real:  # set by the first traceback that is shown
        shown.tb = tracebacks.traceback_of(error)  # type: ignore[union-attr]  # the line above says so
    return cleared
