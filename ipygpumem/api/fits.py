"""``ipygpumem.autofit`` and ``budget``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ipygpumem.api.shell import loaded_notebook
from ipygpumem.fitting import budgets
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import AutofitResult, Fit, decorated, run_tries
from ipygpumem.fitting.plan import Plan
from ipygpumem.measuring.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.pools import finder


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
    back what the call held and halves the value. Any other error is raised as it is. It works in scripts, too.

    Without a function it is a decorator: each call of the decorated function looks for what fits and returns what
    the function returns; ``train.fitted`` has what was found.

    Args:
        function: takes the variables by name.
        min: the smallest value, for all variables or for each by name; by default 1, for floats 0.
        step: ``halve``, a factor such as 0.9, or ``search``: by halves, then up to the largest that fits.
        headroom: share of the device's memory that must stay free at the peak; by default ``5%`` for a search.
        max_tries: the most tries after the first.
        **start: the variables, whole numbers or floats, and what to try first; several are reduced in turn.

    Raises:
        AutofitError: nothing fits, or what is asked for makes no sense.
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

    Raises:
        BudgetError: it names no device or no size.
    """
    sizes = budgets.checked({"gpu": gpu, **devices})
    notebook = loaded_notebook()
    return Budget(sizes) if notebook is None else Budget(sizes, leaving=notebook.recovery.leaves_budget)
