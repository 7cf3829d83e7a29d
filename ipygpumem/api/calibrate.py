"""``ipygpumem.estimate``, ``summary``, ``autofit`` and ``budget``: what code would take, and what of it fits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ipygpumem import estimating
from ipygpumem.api.shell import loaded_notebook
from ipygpumem.errors import EstimateError, UnitError
from ipygpumem.fitting import budgets
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import AutofitResult, Fit, decorated, run_tries
from ipygpumem.fitting.plan import Plan
from ipygpumem.measuring.meter import Meter
from ipygpumem.objects.traced import refuse_while_traced
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import finder
from ipygpumem.units import MIB, checked_bytes, finite

if TYPE_CHECKING:
    from ipygpumem.estimating.records import Estimate, ModelSummary


def estimate(
    function: Callable[..., object],
    /,
    *args: object,
    device: str | None = None,
    device_memory: float | str | None = None,
    timeout: float = 300.0,
    **kwargs: object,
) -> Estimate:
    """Estimate the memory that ``function(*args, **kwargs)`` would allocate, without running it on a device.

    Its Python runs, on fake tensors without values. What it changes is put back. Where that cannot be done, or the
    function needs the values of tensors, it raises ``EstimateError``.

    Args:
        function: what to estimate, such as a training step.
        args: its arguments.
        device: take all tensors to be on this device, such as ``cuda:0``, which need not be here.
        device_memory: what the device has, such as ``"24GiB"``; without it, what each device here has free.
        timeout: seconds, after which the estimate is stopped.
        kwargs: its further arguments; for one of its own called ``device``, take ``functools.partial``.
    """
    __tracebackhide__ = True  # of the function's errors
    refuse_while_traced("estimate")
    room_bytes = None if device_memory is None else checked_bytes(device_memory, least=MIB)
    try:
        seconds = finite(timeout)
    except UnitError as error:
        raise EstimateError(f"timeout: {error}") from None
    estimation = estimating.loaded().Estimation(device, room_bytes, seconds)
    namespaces = (vars(sys.modules["__main__"]), sys._getframe(1).f_globals)
    found: Estimate = estimation.of_call(function, args, kwargs, namespaces)
    return found


def summary(model: object, /, *inputs: object, **kwargs: object) -> ModelSummary:
    """Return a table of a model's modules: parameters, output shapes and what a forward pass keeps for backward.

    ``model(*inputs, **kwargs)`` runs on fake tensors: nothing is computed, and the model stays as it is. Where that
    cannot be done, it raises ``EstimateError``.
    """
    __tracebackhide__ = True  # of the model's errors
    refuse_while_traced("ask for a summary")
    found: ModelSummary = estimating.loaded().summarize(model, inputs, kwargs)
    return found


def autofit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    min: float | Mapping[str, float] | None = None,  # noqa: A002  # as the magic's --min; the built-in is not used
    step: str | float = "halve",
    headroom: str | float | None = None,
    max_tries: int = 10,
    **start: float,
) -> AutofitResult | Callable[..., Any]:
    """Call a function with smaller and smaller values until it fits in memory, and return what fits.

    ``autofit(train, batch_size=1024)`` calls ``train(batch_size=1024)``, then, each time that memory runs out, gives
    back what the call held and halves the value; if nothing fits, it raises ``AutofitError``. Any other error is
    raised as it is. It works in scripts, too.

    Without a function it is a decorator: each call of the decorated function looks for what fits and returns what
    the function returns; ``train.fitted`` has what was found.

    Args:
        function: takes the variables by name.
        min: the smallest value, for all variables or for each by name; by default 1, for floats 0.
        step: ``halve``, a factor such as 0.9, or ``search``: by halves, then up to the largest that fits.
        headroom: share of the device's memory that must stay free at the peak; by default ``5%`` for a search.
        max_tries: the most tries after the first.
        **start: the variables, whole numbers or floats, and what to try first; several are reduced in turn.
    """
    __tracebackhide__ = True  # of the user's errors, and ours

    def run(function: Callable[..., Any], start: Mapping[str, Any]) -> AutofitResult:
        __tracebackhide__ = True
        plan = Plan(start, smallest=min, step=step, headroom=headroom, max_tries=max_tries)
        if (notebook := loaded_notebook()) is not None:
            context = notebook.context
            return run_tries(function, Fit(plan, context.meter, notebook.experiments.ran_out_in_try, context.garbage))
        meter = Meter([HostProbe()], find_more=finder())
        try:
            return run_tries(function, Fit(plan, meter))
        finally:
            meter.close()

    if function is None:
        return lambda function: decorated(function, start, run)
    return run(function, start)


def budget(*, gpu: int | str | None = None, **devices: int | str) -> Budget:
    """Return a budget to use in ``with``: torch's allocator refuses more, as if the GPU were smaller.

    It works in scripts, too. The previous limit is back at the end.

    Args:
        gpu: for each CUDA device that the process uses, and the current one: ``"8GiB"`` or bytes.
        **devices: single devices: ``**{"cuda:1": "8GiB"}``.
    """
    sizes = budgets.checked({"gpu": gpu, **devices})
    notebook = loaded_notebook()
    return Budget(sizes) if notebook is None else Budget(sizes, leaving=notebook.recovery.leaves_budget)
