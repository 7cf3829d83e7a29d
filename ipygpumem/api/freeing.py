"""``ipygpumem.release``, ``purge``, ``offload`` and ``clear_tracebacks``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import overload

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook
from ipygpumem.api.traces import F, can_decorate, run_inside
from ipygpumem.errors import GpuMemError
from ipygpumem.freeing import moving, tracebacks
from ipygpumem.freeing import release as releasing
from ipygpumem.freeing.moving import Offload, PurgeRecord
from ipygpumem.freeing.release import ReleaseRecord
from ipygpumem.introspect import type_name
from ipygpumem.notebook.ipython.stored_errors import release_stored, stored_errors
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.search import Roots
from ipygpumem.objects.inventory import survey


def release(*objects: object) -> ReleaseRecord:
    """Empty objects, such as a model, an optimizer or a trainer, and free what only they hold.

    What something else holds too stays, and the record says what that is. Each object itself is empty then: using it
    raises an error that says where it was released. It works in scripts, too.

    Args:
        objects: several that lead to each other, as a model and its optimizer, go together.

    Raises:
        GpuMemError: one of them cannot be released, such as a list, or a part of a model that stays; then none is.
    """
    if not objects:
        raise GpuMemError("release takes the objects that are to go: release(learner)")
    frame = sys._getframe(1)
    known = {id(value): name for name, value in reversed(list(survey.names_in(frame)))}
    named = [(known.get(id(item), type_name(item)), item) for item in objects]
    del objects, known
    shell, notebook = current_shell(), loaded_notebook()
    where = f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    if shell is not None:
        where = f"cell {shell.execution_count}"
    roots = Roots if notebook is None else notebook.experiments.survivors.roots
    return releasing.release(named, where, current_traces().meter, _garbage(), roots)


def purge(model: object, optimizer: object = None) -> PurgeRecord:
    """Defragment a device: move a model off it, empty the caches, and move it back in place.

    Parameters, buffers, gradients and the optimizer's state keep their values, and stay the same objects: views and
    tied weights stay so. What does not fit back stays on the host, and a warning says so.

    Args:
        model: a torch module; what of it is on the host stays there.
        optimizer: its optimizer.

    Raises:
        GpuMemError: they cannot be moved, or the host has no room: then nothing was moved.
    """
    record = moving.purge(model, optimizer, current_traces().meter, _garbage())
    if record.is_on_host:
        warnings.warn(f"ipygpumem: {record.notes[-1]}", RuntimeWarning, stacklevel=2)
    return record


def offload(*given: object) -> Offload:
    """Return a ``with`` block in which a model is on the host; after it, also after an error, it is back.

    What does not fit back stays on the host, and a warning says so.

    Args:
        given: modules, and optimizers whose state is to go along.

    Raises:
        GpuMemError: one of them cannot be moved.
    """
    return Offload(given, _garbage())


def _garbage() -> Garbage:
    notebook = loaded_notebook()
    return Garbage() if notebook is None else notebook.context.garbage


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
