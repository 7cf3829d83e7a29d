"""Decorates functions of every kind with a block that they run in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def can_decorate(function: object) -> bool:
    """Whether ``function`` is one, and neither a class nor an async generator."""
    return callable(function) and not inspect.isclass(function) and not inspect.isasyncgenfunction(function)


def run_inside(function: F, new: Callable[[], AbstractContextManager[object]]) -> F:
    """Return ``function`` so that each call runs in a block of its own, until what it returns is done."""

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with new():
            return await function(*args, **kwargs)

    def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with new():
            return (yield from function(*args, **kwargs))

    def called(*args: Any, **kwargs: Any) -> Any:
        with new():
            return function(*args, **kwargs)

    is_awaited, is_generator = inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function)
    decorated = awaited if is_awaited else generated if is_generator else called
    return functools.wraps(function)(decorated)  # type: ignore[return-value]  # it takes and gives the same
