"""``ipygpumem.release``, ``purge`` and ``offload``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook
from ipygpumem.errors import GpuMemError
from ipygpumem.extras.moving import moving, releasing
from ipygpumem.extras.moving.moving import Offload, PurgeRecord
from ipygpumem.extras.moving.releasing import ReleaseRecord
from ipygpumem.introspect import type_name
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
