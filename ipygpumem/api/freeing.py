"""``ipygpumem.clear_tracebacks``; the functions that move or release objects are an extra."""

from __future__ import annotations

from typing import overload

from ipygpumem.api.traces import F, apply_decorator, can_decorate, run_inside
from ipygpumem.errors import GpuMemError
from ipygpumem.failures import GuardedBlock, failures_told
from ipygpumem.notebook import current_shell
from ipygpumem.reclaim.tracebacks import release
from ipygpumem.shell.ipython.last_errors import release_stored, stored_errors

# -- tracebacks ----------------------------------------------------------------------------------


class Clearing(GuardedBlock):
    """A ``with`` block that releases the locals of functions whose error leaves the block.

    The functions have ended when the error leaves it; the code around the block still runs, and
    keeps its names.
    """

    _block_name = "clear_tracebacks"
    _lost_at_end = "the locals of its error stay in memory"

    def __repr__(self) -> str:
        return "<released the locals in tracebacks of stored errors>"

    def _close_block(self, error: BaseException | None) -> None:
        """Release the locals of an error that leaves the block."""
        if error is not None:
            release(error)  # running frames are kept: the block's, and its callers'


@overload
def clear_tracebacks() -> Clearing: ...


@overload
def clear_tracebacks(function: F, /) -> F: ...


def clear_tracebacks(function: F | None = None, /) -> Clearing | F:
    """Release the locals in the tracebacks of stored errors; as a block, also those of an error
    that leaves it.

    Use it to free a model that a traceback keeps alive. Write ``clear_tracebacks()``, ``with
    clear_tracebacks():`` or, above a function, ``@clear_tracebacks``. Errors keep their type,
    message and the lines of their traceback. Only the locals of ended functions are released, so
    ``%debug`` cannot show them.

    Raises:
        GpuMemError: the decorated object is not a function, or is an async generator.

    >>> @ipygpumem.clear_tracebacks
    ... def train(steps):
    ...     return steps
    >>> train(3)
    3
    """
    if function is not None:
        return apply_decorator(function, lambda: _with_clearing(function), "clear_tracebacks")
    lost = "the locals of stored errors stay in memory"
    with failures_told("clear_tracebacks", lost, asked=True):
        shell = current_shell()
        for error in stored_errors(shell):
            release_stored(error, shell)
    return Clearing()


def _with_clearing(function: F) -> F:
    """Return ``function`` changed so that an error which leaves a call of it keeps no locals.

    Raises:
        GpuMemError: it is a class or an async generator.
    """
    if not can_decorate(function):
        raise GpuMemError(
            "clear_tracebacks cannot decorate classes or async generators: "
            "write with ipygpumem.clear_tracebacks(): inside"
        )
    return run_inside(function, Clearing)
