"""``ipygpumem.release``, ``purge``, ``offload`` and ``clear_tracebacks``."""

from __future__ import annotations

from typing import overload

from ipygpumem.api.shell import current_shell
from ipygpumem.api.traces import F, can_decorate, run_inside
from ipygpumem.errors import GpuMemError
from ipygpumem.freeing import tracebacks
from ipygpumem.notebook.ipython.stored_errors import release_stored, stored_errors

# -- tracebacks -----------------------------------------------------------------------------------------------


class Clearing:
    """Releases what the functions that an error has left hold in their locals, when it leaves the block."""

    def __repr__(self) -> str:
        return "<what the tracebacks of stored errors held is released>"

    def __enter__(self) -> Clearing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            tracebacks.release(error)  # frames that run are left alone: that of the block, and those that called it


@overload
def clear_tracebacks() -> Clearing: ...


@overload
def clear_tracebacks(function: F, /) -> F: ...


def clear_tracebacks(function: F | None = None, /) -> Clearing | F:
    """Release what the tracebacks of stored errors hold; with ``with``, also those of an error that leaves the block.

    Write ``clear_tracebacks()``, ``with clear_tracebacks():`` or, above a function, ``@clear_tracebacks``. Errors stay
    the same objects, with their type, message and the lines of their traceback. Only the locals of functions that have
    ended go, and with them what ``%debug`` could show.

    Raises:
        GpuMemError: what is decorated is no function, or an async generator.
    """
    if function is not None:
        if not can_decorate(function):
            raise GpuMemError(
                "clear_tracebacks decorates functions, and no classes or async generators: "
                "write with ipygpumem.clear_tracebacks(): inside"
            )
        return run_inside(function, Clearing)
    shell = current_shell()
    for error in stored_errors(shell):
        release_stored(error, shell)
    return Clearing()
