"""Reads exceptions and those linked to them, through the descriptors of ``BaseException``: no user
code runs.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ipygpumem.introspect import is_instance, module_of, name_of


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all exceptions that it keeps alive, each once: members of groups, causes
    and contexts.
    """
    visited_ids: set[int] = set()
    to_visit = [error]
    while to_visit:
        current = to_visit.pop()
        if id(current) in visited_ids:
            continue
        visited_ids.add(id(current))
        yield current
        linked = field(current, "__cause__"), field(current, "__context__"), *members(current)
        to_visit.extend(item for item in linked if item is not None)


def field(error: BaseException, name: str) -> Any:
    """Return a field that every exception has, such as ``args``, without running code of a user's
    class, as its ``__getattribute__``.
    """
    return BaseException.__dict__[name].__get__(error)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of ``error``, bypassing any user-defined ``__getattribute__``."""
    traceback: TracebackType | None = field(error, "__traceback__")
    return traceback


def members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; none for any other exception."""
    group_type = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
    if group_type is None or not is_instance(error, group_type):
        return ()
    errors: tuple[BaseException, ...] = group_type.__dict__["exceptions"].__get__(error)
    return errors


def message_of(error: BaseException) -> str:
    """Return the texts among the exception's arguments, joined; the user's ``__str__`` is never
    called.
    """
    if is_instance(error, MemoryError) and module_of(error).partition(".")[0] == "numpy":
        return str(error)  # its arguments are a shape and a dtype, from which NumPy writes a text
    return " ".join(part for part in field(error, "args") if type(part) is str)


def class_names(error: BaseException) -> set[str]:
    """Return the names of the exception's type and of its bases."""
    return {name_of(kind) for kind in type.mro(type(error))}
