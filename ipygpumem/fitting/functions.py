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
    _checked_parameters(function, fit.plan.values)  # raises now, not in the first try
    try:
        while True:
            result = _run_try(function, fit)
            if fit.has_next or fit.plan.best is None:  # else the last result is the one to return
                with interrupts.reraise_swallowed():
                    result = None
                    fit.free_memory()
            if not fit.has_next:
                break
    finally:
        fit.abandon()
    fit.raise_if_nothing_fits()
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
    fit.end(error=None, result=result)
    return result


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that a call may pass by position."""


def _name_of_function(function: Callable[..., Any]) -> str:
    """Return a function's name, or its type's if it has none."""
    return text_of(getattr(function, "__qualname__", None)) or type_name(function)


def _checked_parameters(
    function: Callable[..., Any], names: Mapping[str, Any]
) -> Sequence[inspect.Parameter]:
    """Return the parameters of a function that is to take variables with these ``names``.

    Built-in functions may have no signature: then they are unknown, and none is returned.

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
    except (TypeError, ValueError):
        return ()
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    for name in names:
        if name not in parameters and not takes_all:
            raise AutofitError(f"{_name_of_function(function)} takes no argument {quoted(name)}")
    return tuple(parameters.values())


def searching_function(
    function: Callable[..., Any], start: Mapping[str, Any], run: Callable[..., AutofitResult]
) -> Callable[..., Any]:
    """Return a function whose calls run ``function`` with values that fit: ``@autofit(batch=64)``.

    A call omits the variables, wherever they are among the function's parameters. To start from
    another value, pass a variable by name. The attribute ``fitted`` has the last call's values.

    Args:
        function: the user's function.
        start: the first value of each variable.
        run: searches for the values with which a function of the variables alone fits.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        variables = {name: options.pop(name, value) for name, value in start.items()}
        parameters = _checked_parameters(function, variables)
        _refuse_values_of_variables(args, function, parameters, variables)

        def call_with_values(**values: Any) -> Any:
            __tracebackhide__ = True
            positional, named = _arguments_with_values(args, parameters, values)
            return function(*positional, **named, **options)

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
    """Raise ``AutofitError`` for a call that passes the value of a variable by position.

    For ``def train(data, batch_size)`` and the variable ``batch_size``, such a call is
    ``train(data, 64)``: it has more arguments than there are parameters without the variables.
    """
    __tracebackhide__ = True
    is_unlimited = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    if not parameters or is_unlimited:
        return
    by_position = [item for item in parameters if item.kind in _BY_POSITION]
    without_variables = [item for item in by_position if item.name not in variables]
    if len(args) > len(without_variables):
        name = next(iter(variables))
        words = f"leave it out, or write {name}=NUMBER to start from that"
        raise AutofitError(f"{_name_of_function(function)}: autofit gives {name}: {words}")


def _arguments_with_values(
    args: tuple[Any, ...], parameters: Sequence[inspect.Parameter], values: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments by position and by name, with the values of the variables.

    A value is passed by name if that is possible. For ``def train(batch_size, data)`` and the call
    ``train(images)`` it is not: the value goes before the images.
    """
    positional = list(args)
    named = dict(values)
    for position, item in enumerate(parameters):
        if item.name not in named or item.kind not in _BY_POSITION:
            continue
        if position < len(positional) or item.kind is item.POSITIONAL_ONLY:
            value = named.pop(item.name)
            positional.insert(position, value)
    return positional, named
