"""Runs a function with the values of an autofit's tries until they fit."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipygpumem import interrupts
from ipygpumem.errors import AutofitError, quoted
from ipygpumem.fitting.fit import AutofitResult, Fit
from ipygpumem.introspect import text_of, type_name


def run_tries(function: Callable[..., Any], fit: Fit) -> AutofitResult:
    """Call ``function`` with the values of each try until they fit.

    Raises:
        AutofitError: no values fit, or the function does not take the variables.
    """
    __tracebackhide__ = True
    _parameters_to_try(function, fit.plan.values)
    try:
        while True:
            result = _run_try(function, fit)
            if fit.more or fit.plan.best is None:
                with interrupts.reraise_swallowed():
                    result = None
                    fit.free_memory()
            if not fit.more:
                break
    finally:
        fit.abandon()
    fit.check()
    return AutofitResult(dict(fit.plan.values), result, tuple(fit.tries))


def _run_try(function: Callable[..., Any], fit: Fit) -> Any:
    """Run one try; return the function's return value, None after an out-of-memory error."""
    __tracebackhide__ = True
    fit.begin()
    try:
        result = function(**fit.plan.values)
    except BaseException as error:
        if not fit.end(error):
            raise
        return None
    fit.end(None, result)
    return result


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _name_of_function(function: Callable[..., Any]) -> str:
    """Return a function's name, or its type's if it has none."""
    return text_of(getattr(function, "__qualname__", None)) or type_name(function)


def _parameters_to_try(
    function: Callable[..., Any], names: Mapping[str, Any]
) -> Sequence[inspect.Parameter]:
    """Return the parameters of the function to try; none if they are unknown.

    Raises:
        AutofitError: a call of the function would run nothing, or it does not take the variables.
    """
    __tracebackhide__ = True
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if is_generator or inspect.iscoroutinefunction(function):
        raise AutofitError(
            f"{_name_of_function(function)} runs nothing when it is called: pass a plain function"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions need not have one
        return ()
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    for name in names:
        if name not in parameters and not takes_all:
            raise AutofitError(f"{_name_of_function(function)} takes no argument {quoted(name)}")
    return tuple(parameters.values())


def decorated(
    function: Callable[..., Any], start: Mapping[str, Any], run: Callable[..., AutofitResult]
) -> Callable[..., Any]:
    """Return ``function`` wrapped: each call searches for fitting values; ``fitted`` is the last
    result.

    A call omits the variables, wherever they are among the function's parameters. To start from
    another value, pass a variable by name.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        variables = {name: options.pop(name, value) for name, value in start.items()}
        parameters = _parameters_to_try(function, variables)
        _refuse_values_of_variables(args, function, parameters, variables)

        def call_with_values(**values: Any) -> Any:
            __tracebackhide__ = True
            positional = _with_values_inserted(args, parameters, values)
            return function(*positional, **values, **options)

        fitted = run(call_with_values, variables)
        # The return value may be large: only the caller keeps it.
        call.fitted = dataclasses.replace(fitted, result=None)  # type: ignore[attr-defined]  # any attribute will do
        return fitted.result

    call.fitted = None  # type: ignore[attr-defined]  # as above
    return call


def _refuse_values_of_variables(
    args: tuple[Any, ...],
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    variables: Mapping[str, Any],
) -> None:
    """Raise ``AutofitError`` if the call ``train(data, 64)`` has values of variables, too."""
    __tracebackhide__ = True
    if not parameters or any(item.kind is item.VAR_POSITIONAL for item in parameters):
        return
    by_position = [item for item in parameters if item.kind in _BY_POSITION]
    free = [item for item in by_position if item.name not in variables]
    if len(args) > len(free):
        name = next(iter(variables))
        words = f"leave it out, or write {name}=NUMBER to start from that"
        raise AutofitError(f"{_name_of_function(function)}: autofit gives {name}: {words}")


def _with_values_inserted(
    args: tuple[Any, ...], parameters: Sequence[inspect.Parameter], values: dict[str, Any]
) -> list[Any]:
    """Return the arguments by position, with the variables among them, which are removed from
    ``values``.
    """
    positional = list(args)
    for position, item in enumerate(parameters):
        if item.name not in values or item.kind not in _BY_POSITION:
            continue
        if position < len(positional) or item.kind is item.POSITIONAL_ONLY:
            positional.insert(position, values.pop(item.name))
    return positional
