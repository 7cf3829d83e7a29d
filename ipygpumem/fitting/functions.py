"""Fits functions into memory, in scripts as in notebooks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ipygpumem.errors import AutofitError, quoted
from ipygpumem.fitting.fit import AutofitResult, Fit, Options
from ipygpumem.fitting.room import Limits
from ipygpumem.introspect import text_of, type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.objects import interrupts
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.frames import stack
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import finder

Run = Callable[[Callable[..., Any], Mapping[str, Any]], AutofitResult]


def autofit(
    function: Callable[..., Any],
    start: Mapping[str, Any],
    options: Options,
    *,
    meter: Meter | None = None,
    limits: Callable[[], Limits] = dict,
    ran_out: Callable[[BaseException], object] = id,
    garbage: Garbage | None = None,
) -> AutofitResult:
    """Return the values that fit and what ``function`` gives with them.

    Args:
        function: called with the variables by name.
        start: the variables, and what to try first.
        options: how to look.
        meter: measures the tries; by default one of our own, for as long as that takes.
        limits: gives the budgets by device.
        ran_out: is called with each out-of-memory error before anything that it holds is released.
        garbage: collects it.

    Raises:
        AutofitError: nothing fits, or what is asked for makes no sense.
    """
    __tracebackhide__ = True
    own = Meter([HostProbe()], find_more=finder()) if meter is None else None
    meter = meter or own
    assert meter is not None
    try:
        plan = options.plan(dict(start))
        fit = Fit(plan, meter, headroom=options.share, limits=limits, ran_out=ran_out, garbage=garbage)
        try:
            return run_tries(function, fit)
        finally:
            fit.abandon()
    finally:
        if own is not None:
            own.close()


def run_tries(function: Callable[..., Any], fit: Fit) -> AutofitResult:
    """Call ``function`` with the values of each try, until ``fit`` has found what fits.

    Raises:
        AutofitError: nothing fits, the function does not take the variables, or it runs inside another autofit.
    """
    __tracebackhide__ = True
    _check_parameters(function, fit.plan.values)
    if any(frame.f_code is run_tries.__code__ for frame in stack(sys._getframe(1))):
        raise AutofitError("an autofit is running already: give it both variables, and they are reduced in turn")
    while True:
        result = _try(function, fit)
        if fit.more or fit.plan.best is None:
            with interrupts.kept():
                result = None
                fit.give_back()
        if not fit.more:
            break
    fit.check()
    return AutofitResult(dict(fit.plan.values), result, tuple(fit.tries))


def _try(function: Callable[..., Any], fit: Fit) -> Any:
    """Return what the function gives; None after an out-of-memory error."""
    __tracebackhide__ = True
    fit.begin()
    try:
        result = function(**fit.plan.values)
    except BaseException as error:
        if not fit.end(error):
            raise
        return None
    fit.end(None)
    return result


def _check_parameters(function: Callable[..., Any], names: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(asks(function) for asks in later):
        raise AutofitError(f"{name_of_function(function)} runs nothing when it is called: pass a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions need not have one
        return
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name in names:
        if name not in signature.parameters:
            raise AutofitError(f"{name_of_function(function)} takes no argument {quoted(name)}")


def name_of_function(function: Callable[..., Any]) -> str:
    """Return the function's qualified name, or that of its type."""
    return text_of(getattr(function, "__qualname__", None)) or type_name(function)


def decorated(function: Callable[..., Any], start: Mapping[str, Any], run: Run) -> Callable[..., Any]:
    """Return ``function`` wrapped: each call searches for what fits, and ``fitted`` is the last result.

    A call that gives one of the variables starts from that value.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        own = {name: options.pop(name, value) for name, value in start.items()}
        fitted = run(functools.partial(function, *args, **options), own)
        # What the function returned may be large: it is the caller's alone.
        call.fitted = dataclasses.replace(fitted, result=None)  # type: ignore[attr-defined]  # any attribute will do
        return fitted.result

    call.fitted = None  # type: ignore[attr-defined]  # as above
    return call
