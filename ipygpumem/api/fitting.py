"""``ipygpumem.estimate``, ``summary``, ``autofit`` and ``budget``: predict memory, and fit code
into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ipygpumem.api.shell import loaded_app
from ipygpumem.errors import CallError, EstimateError, UnitError
from ipygpumem.estimating import loading
from ipygpumem.failures import failures_told
from ipygpumem.fitting import budgets
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import AutofitResult, Fit
from ipygpumem.fitting.functions import run_tries, searching_function
from ipygpumem.fitting.plan import Plan
from ipygpumem.heap.live.heap import refuse_while_traced
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import finder_of_probes
from ipygpumem.report import estimate as _reports  # noqa: F401  # registers how records are shown
from ipygpumem.units import MIB, checked_bytes, checked_number

if TYPE_CHECKING:
    from ipygpumem.estimating.records import Estimate, ModelSummary


def estimate(
    function: Callable[..., object],
    /,
    *args: object,
    device: str | None = None,
    device_memory: float | str | None = None,
    timeout: float = 300.0,
    assume: Mapping[str | int, float] | None = None,
    **kwargs: object,
) -> Estimate:
    """Estimate the memory that ``function(*args, **kwargs)`` would allocate, without running it on
    a device.

    Use it before you run a step that may not fit. The function's Python code runs at once, in this
    process and thread, on fake tensors without values, and its changes to objects are undone. If
    that is impossible, or the function needs values of tensors, it raises ``EstimateError``. Build
    large models inside the function: their weights take no memory there. Memory that C++ code
    allocates past torch is not included.

    Args:
        function: the code to estimate, such as a training step.
        args: its arguments.
        device: treat all tensors as if on this device, such as ``cuda:0``; the device need not
            exist here.
        device_memory: the device's memory, such as ``"24GiB"``; by default the free memory of each
            device.
        timeout: seconds after which the estimate is stopped.
        assume: the share of all values, from 0 to 1, that a line such as ``x[x > 0]`` selects, by
            the line as the report names it: ``5`` in the running cell, ``"3:5"`` in cell 3,
            ``"model.py:5"`` in a file. Without it, the line selects all that it can.
        kwargs: its keyword arguments; for one called ``device``, use ``functools.partial``.

    >>> def train():
    ...     model = torch.nn.Linear(65536, 65536)  # 16 GiB, and no memory here
    ...     model(torch.ones(8, 65536)).sum().backward()
    >>> found = ipygpumem.estimate(train, device="cuda", device_memory="24GiB")
    >>> found.verdict, found.devices[0].parts["parameters"] == 2**34 + 2**18
    ('does not fit', True)
    """
    __tracebackhide__ = True  # of the function's errors
    if not callable(function):
        kind = type(function).__name__
        raise CallError(f"estimate takes a function and its arguments, not {kind}")
    refuse_while_traced("estimate")
    room_bytes = None if device_memory is None else checked_bytes(device_memory, minimum=MIB)
    try:
        seconds = checked_number(timeout)
    except UnitError as error:
        raise EstimateError(f"timeout: {error}") from None
    assumed = [_assumption(line, share) for line, share in (assume or {}).items()]
    estimation = loading.new_estimation(device, room_bytes, seconds, assumed)
    # Names of the function's code are looked up there, and copied: the script's, and the caller's.
    namespaces = (vars(sys.modules["__main__"]), sys._getframe(1).f_globals)
    result: Estimate = estimation.of_call(function, args, kwargs, namespaces)
    return result


def _assumption(line: str | int, share: float) -> str:
    """Return an item of ``assume`` in the form of ``%%estimate --assume``, such as ``3:5=0.25``.

    Raises:
        EstimateError: the share is not a number from 0 to 1.
    """
    try:
        return f"{line}={checked_number(share, minimum=0, maximum=1):.15f}"
    except UnitError as error:
        raise EstimateError(f"assume: {line}: {error}") from None


def summary(model: object, /, *inputs: object, **kwargs: object) -> ModelSummary:
    """Return a table of a model's modules: parameters, output shapes, and activations kept for
    backward.

    Use it to find the modules with most activations. ``model(*inputs, **kwargs)`` runs on fake
    tensors: nothing is computed, and the model is not changed. If that is impossible, it raises
    ``EstimateError``.

    >>> ipygpumem.summary(torch.nn.Linear(8, 4), torch.zeros(2, 8)).total.parameters
    36
    """
    __tracebackhide__ = True  # of the model's errors
    refuse_while_traced("ask for a summary")
    result: ModelSummary = loading.import_summaries().summarize(model, inputs, kwargs)
    return result


def autofit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    min: float | Mapping[str, float] | None = None,  # noqa: A002  # as the magic's --min; the built-in is not used
    step: str | float | None = None,
    headroom: str | float | None = None,
    max_tries: int | None = None,
    **start: float,
) -> AutofitResult | Callable[..., Any]:
    """Call a function with smaller and smaller values until it fits in memory, and return the
    values that fit.

    Use it to find a batch size. ``autofit(train, batch_size=1024)`` calls
    ``train(batch_size=1024)``; whenever memory runs out, it frees the memory of the call, halves
    the value and tries again. If nothing fits, it raises ``AutofitError``; any other error is
    raised unchanged. It works in scripts, too.

    If the function returns an ``Estimate``, its verdict decides, and nothing runs on a device:
    ``autofit(lambda n: estimate(train, n, device_memory="24GiB"), n=1024)`` finds the largest batch
    for a card that need not be here.

    Without a function it is a decorator: each call of the decorated function searches for a fitting
    value, and returns the function's result; ``train.fitted`` has the values.

    Args:
        function: takes the variables by name.
        min: the smallest value, for all variables or for each by name; by default 1, for floats 0.
        step: ``halve``, a factor such as 0.9, or ``search``: by halves, then up to the largest that
            fits; by default ``halve``, for estimates ``search``.
        headroom: share of the device's memory that must stay free at the peak; by default ``5%``
            for a search, none for estimates.
        max_tries: maximum number of tries after the first; by default 10, for estimates 100.
        **start: the variables with their first values, integers or floats; several are reduced in
            turn.

    >>> def train(batch_size):
    ...     if batch_size > 300:
    ...         raise MemoryError
    >>> ipygpumem.autofit(train, batch_size=1024).values
    {'batch_size': 256}
    """
    __tracebackhide__ = True  # of the user's errors, and ours

    def run(function: Callable[..., Any], start: Mapping[str, Any]) -> AutofitResult:
        __tracebackhide__ = True
        plan = Plan(start, smallest=min, step=step, headroom=headroom, max_tries=max_tries)
        return _fit_function(function, plan)

    if function is None:
        return lambda function: searching_function(function, start, run)
    return run(function, start)


def _fit_function(function: Callable[..., Any], plan: Plan) -> AutofitResult:
    """Call a function with the values of a plan until they fit, with the notebook's services or, in
    a script, with a meter of its own.
    """
    __tracebackhide__ = True
    app = loaded_app()
    if app is not None:
        context = app.context
        fit = Fit(plan, context.meter, app.experiments.ran_out_in_try, context.garbage)
        return run_tries(function, fit)
    meter = Meter([HostProbe()], find_more=finder_of_probes())
    try:
        return run_tries(function, Fit(plan, meter))
    finally:
        meter.close()


def budget(*, gpu: int | str | None = None, **devices: int | str) -> Budget:
    """Return a budget, a ``with`` block in which torch's allocator refuses more memory, as if the
    GPU were smaller.

    Use it to test code for a smaller GPU, or to share one. It works in scripts, too, and restores
    the previous limit at its end. It limits only torch's allocator, neither other libraries nor the
    CUDA context.

    Args:
        gpu: for each CUDA device that the process uses, and the current one: ``"8GiB"`` or bytes.
        **devices: single devices: ``**{"cuda:1": "8GiB"}``.

    >>> ipygpumem.budget(gpu="8GiB").sizes
    {'gpu': 8589934592}
    """
    with failures_told("a budget", Budget._lost_at_start, asked=True):
        sizes = budgets.checked_budget({"gpu": gpu, **devices})
        app = loaded_app()
        if app is None:
            return Budget(sizes)
        return Budget(sizes, before_end=app.recovery.end_budget)
    return Budget({})
