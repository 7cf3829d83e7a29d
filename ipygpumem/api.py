"""What users call from Python, in scripts too: each function is ``ipygpumem.NAME``. What a notebook adds comes last."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ipygpumem import estimating
from ipygpumem.errors import NotLoadedError
from ipygpumem.fitting import budgets, functions
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import AutofitResult, Options
from ipygpumem.model import SessionRecord
from ipygpumem.objects.inventory import selection, survey
from ipygpumem.objects.inventory.records import Inventory, InventoryDiff
from ipygpumem.reports.estimate import ShownEstimate, ShownSummary
from ipygpumem.reports.export import formats
from ipygpumem.units import parse_bytes

if TYPE_CHECKING:
    from ipygpumem.estimating.records import Estimate, ModelSummary


def load(path: str | os.PathLike[str]) -> SessionRecord:
    """Return what was exported to a .json file; it needs neither IPython nor the extension.

    Raises:
        FileError: the file cannot be read, was not exported by ipygpumem, or was written by a newer ipygpumem.
    """
    return formats.load(path)


def tensors(*names: str, device: str | None = None, kind: str | None = None, min_bytes: int = 0) -> Inventory:
    """Return the tensors and arrays that are alive, each storage once, the largest first.

    It works in a script as well. In IPython it lists the notebook's names and cells too, even without the extension.

    Args:
        names: globs, of which one must fit a tensor's name: ``"model.*"``; none: also tensors without a name.
        device: ``cpu``, ``cuda:0``, or ``cuda`` for all of its kind.
        kind: ``parameter``, ``gradient``, ``optimizer state``, ``buffer`` or ``other``.
        min_bytes: the smallest size.
    """
    frame = sys._getframe(1)
    shell = _shell()
    if shell is None:
        code = frame.f_code
        found = survey.take(survey.names_in(frame), file=code.co_filename, line=frame.f_lineno)
    else:
        from ipygpumem.notebook.commands.tensors import asked_by  # no script needs IPython

        found = asked_by(frame, shell)
    return selection.select(found, names, device=device, kind=kind, min_bytes=min_bytes)


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Return what came and what went between two inventories of ``tensors``."""
    return selection.difference(before, after)


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
    options = Options(min, step, headroom, max_tries)

    def run(function: Callable[..., Any], start: Mapping[str, Any]) -> AutofitResult:
        shell = _shell()
        if shell is None:
            return functions.autofit(function, start, options)

        from ipygpumem.notebook.commands.autofit import fit_function  # as above

        return fit_function(shell, function, start, options)

    if function is None:
        return lambda decorated: functions.decorated(decorated, start, run)
    return run(function, start)


def budget(*, gpu: int | str | None = None, ram: int | str | None = None, **devices: int | str) -> Budget:
    """Return a budget to use in ``with``: pretend to have less memory meanwhile. It works in scripts, too.

    torch's allocator refuses what the accelerator's part does not allow, as if the card were smaller. The host's part
    limits nothing: you are told when the process goes above it, while the cell runs, at its end, and in ``record``
    when the block is over; in a script by a ``ResourceWarning``.

    Args:
        gpu: for each CUDA device that the process uses, and the current one: ``"8GiB"`` or bytes.
        ram: for the RSS of this process.
        **devices: single devices: ``**{"cuda:1": "8GiB"}``.

    Raises:
        BudgetError: it names no device or no size.
    """
    sizes = budgets.checked({"gpu": gpu, "ram": ram, **devices})
    if _shell() is not None:
        with contextlib.suppress(NotLoadedError):
            from ipygpumem.notebook.experiments.budget import NotebookBudget  # as above
            from ipygpumem.notebook.notebook import current_notebook

            return NotebookBudget(current_notebook().budgets, sizes)
    return budgets.ScriptBudget(sizes)


def _shell() -> Any | None:
    """Return IPython's shell; None in a script."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def estimate(
    function: Callable[..., object],
    /,
    *args: object,
    device: str | None = None,
    device_memory: int | str | None = None,
    timeout: float = 300.0,
    **kwargs: object,
) -> Estimate:
    """Return what ``function(*args, **kwargs)`` would take, without running it on a device.

    Its Python runs, on fake tensors without values: in a forked child process, so that nothing here is changed. Where
    there can be none (on Windows, or once a backward pass ran where torch sees a device), it runs here, and what it
    changed is put back; ``found.forked`` says which.

    Args:
        function: what to estimate, such as a training step.
        args: its arguments.
        device: take all tensors to be on this device, such as ``cuda:0``, which need not be here.
        device_memory: what the device has, such as ``"24GiB"``; without it, what each device here has free.
        timeout: seconds, after which the estimate is stopped.
        kwargs: its further arguments; for one of its own called ``device``, take ``functools.partial``.

    Raises:
        EstimateError: torch is missing or too old, the function needs the values of tensors, or it did not end.
        UnitError: ``device_memory`` is not a size.
    """
    __tracebackhide__ = True  # of the function's errors
    room_bytes = parse_bytes(device_memory) if isinstance(device_memory, str) else device_memory
    estimation = estimating.loaded("running").Estimation(device, room_bytes, timeout, _front())
    namespaces = (vars(sys.modules["__main__"]), sys._getframe(1).f_globals)
    return ShownEstimate(**vars(estimation.of_call(function, args, kwargs, namespaces)))


def summary(model: object, /, *inputs: object, **kwargs: object) -> ModelSummary:
    """Return a table of a model's modules: parameters, output shapes and what a forward pass keeps for backward.

    ``model(*inputs, **kwargs)`` runs on fake tensors: nothing is computed, and the model stays as it is.

    Raises:
        EstimateError: torch is missing or too old, ``model`` is not a module, or it needs the values of tensors.
    """
    __tracebackhide__ = True  # of the model's errors
    return ShownSummary(**vars(estimating.loaded("modules").summarize(model, inputs, kwargs, _front())))


def _front() -> Any | None:
    """Return what takes a child process off IPython; None in a script."""
    shell = _shell()
    if shell is None:
        return None

    from ipygpumem.notebook.commands.estimate import ShellFront  # as above

    return ShellFront(shell)
