"""Decorates functions of every kind with a block that they run in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def can_decorate(function: object) -> bool:
    """Whether ``function`` is one, or a method as ``staticmethod`` makes it, and no class or async generator."""
    if isinstance(function, staticmethod | classmethod):
        return can_decorate(function.__func__)
    return callable(function) and not inspect.isclass(function) and not inspect.isasyncgenfunction(function)


def run_inside(function: F, new: Callable[[], AbstractContextManager[object]]) -> F:
    """Return ``function`` so that each call runs in a block of its own, until what it returns is done."""
    method: Any = function
    if isinstance(function, staticmethod | classmethod):
        return type(method)(run_inside(method.__func__, new))  # type: ignore[no-any-return]  # of the same type

    # An error that leaves takes these frames along: what was passed must not stay alive with it.
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        try:
            with new():
                return await function(*args, **kwargs)
        finally:
            del args, kwargs

    def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        try:
            with new():
                return (yield from function(*args, **kwargs))
        finally:
            del args, kwargs

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            with new():
                return function(*args, **kwargs)
        finally:
            del args, kwargs

    is_awaited, is_generator = inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function)
    decorated = awaited if is_awaited else generated if is_generator else called
    return functools.wraps(function)(decorated)  # type: ignore[return-value]  # it takes and gives the same
