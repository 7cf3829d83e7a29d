"""``ipygpumem.estimate`` and ``summary``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipygpumem import estimating
from ipygpumem.errors import EstimateError
from ipygpumem.objects.traced import refuse_while_transformed
from ipygpumem.reports.estimate import ShownEstimate, ShownSummary
from ipygpumem.units import checked_bytes

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
    """Return what ``function(*args, **kwargs)`` would take, without running it on a device.

    Its Python runs, on fake tensors without values. What it changes is put back.

    Args:
        function: what to estimate, such as a training step.
        args: its arguments.
        device: take all tensors to be on this device, such as ``cuda:0``, which need not be here.
        device_memory: what the device has, such as ``"24GiB"``; without it, what each device here has free.
        timeout: seconds, after which the estimate is stopped.
        kwargs: its further arguments; for one of its own called ``device``, take ``functools.partial``.

    Raises:
        EstimateError: torch is missing or too old, the function needs the values of tensors, did not end, or
            ``timeout`` is no time.
        GpuMemError: torch traces or transforms the code that asks.
        UnitError: ``device_memory`` is not a size.
    """
    __tracebackhide__ = True  # of the function's errors
    refuse_while_transformed("estimate")
    room_bytes = None if device_memory is None else checked_bytes(device_memory)
    if type(timeout) not in (int, float) or not timeout > 0:
        raise EstimateError("timeout must be a number of seconds above zero")
    estimation = estimating.loaded().Estimation(device, room_bytes, timeout)
    namespaces = (vars(sys.modules["__main__"]), sys._getframe(1).f_globals)
    return ShownEstimate(**vars(estimation.of_call(function, args, kwargs, namespaces)))


def summary(model: object, /, *inputs: object, **kwargs: object) -> ModelSummary:
    """Return a table of a model's modules: parameters, output shapes and what a forward pass keeps for backward.

    ``model(*inputs, **kwargs)`` runs on fake tensors: nothing is computed, and the model stays as it is.

    Raises:
        EstimateError: torch is missing or too old, ``model`` is not a module, or it needs the values of tensors.
        GpuMemError: torch traces or transforms the code that asks.
    """
    __tracebackhide__ = True  # of the model's errors
    refuse_while_transformed("ask for a summary")
    return ShownSummary(**vars(estimating.loaded().summarize(model, inputs, kwargs)))
