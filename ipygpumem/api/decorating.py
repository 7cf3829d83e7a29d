"""Decorates functions of every kind with a block that they run in."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ipygpumem.introspect import is_instance

F = TypeVar("F", bound=Callable[..., Any])


def can_decorate(function: object) -> bool:
    """Whether ``function`` is one, or a method as ``staticmethod`` makes it, and no class or async generator."""
    if isinstance(function, staticmethod | classmethod):
        return can_decorate(function.__func__)
    return callable(function) and not inspect.isclass(function) and not inspect.isasyncgenfunction(_code_of(function))


def _code_of(function: Any) -> Any:
    """Return the function that runs when ``function`` is called, maybe its class's ``__call__``."""
    while is_instance(function, functools.partial):
        function = function.func
    call = function if inspect.isroutine(function) else inspect.getattr_static(type(function), "__call__", function)
    return getattr(call, "__func__", call)  # of a method, also a static one


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

    code = _code_of(function)
    is_awaited = any(map(inspect.iscoroutinefunction, (function, code)))  # the object may be marked as one
    decorated = awaited if is_awaited else generated if inspect.isgeneratorfunction(code) else called
    if decorated is generated and code.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:
        decorated = types.coroutine(generated)  # its generators can be awaited, too
    return functools.wraps(function)(decorated)  # type: ignore[return-value]  # it takes and gives the same
