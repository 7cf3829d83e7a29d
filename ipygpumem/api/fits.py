"""``ipygpumem.autofit`` and ``budget``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ipygpumem.api.shell import current_shell
from ipygpumem.errors import NotLoadedError
from ipygpumem.fitting import budgets, functions
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import AutofitResult, Options


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
    options = Options(min, step, headroom, max_tries)

    def run(function: Callable[..., Any], start: Mapping[str, Any]) -> AutofitResult:
        __tracebackhide__ = True
        shell = current_shell()
        if shell is None:
            return functions.autofit(function, start, options)

        from ipygpumem.notebook.commands.autofit import fit_function  # no script needs IPython

        return fit_function(shell, function, start, options)

    if function is None:
        return lambda decorated: functions.decorated(decorated, start, run)
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
    if current_shell() is not None:
        from ipygpumem.notebook.python import notebook_budget  # as above

        with contextlib.suppress(NotLoadedError):
            return notebook_budget(sizes)
    return Budget(sizes)
