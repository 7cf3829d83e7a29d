"""Finds the error of a cell: in its result, or where IPython and ``sys`` keep it."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.introspect import is_instance


def error_of(result: Any) -> BaseException | None:
    """Return the error that ended the cell of ``result``."""
    return getattr(result, "error_before_exec", None) or getattr(result, "error_in_exec", None)


def last_error() -> int:
    """Return the identity of the last error that was shown."""
    return id(getattr(sys, "last_value", None))


def shown_since(earlier: int) -> BaseException | None:
    """Return an error that was shown after ``earlier`` and then swallowed, as %run does with those of its script."""
    return None if last_error() == earlier else stored_error("last_value")


def stored_error(name: str) -> BaseException | None:
    """Return an error that ``sys`` keeps; None if there is none, or if the user put something else there."""
    value = getattr(sys, name, None)
    return value if is_instance(value, BaseException) else None
