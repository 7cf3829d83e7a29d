"""``ipygpumem.release``, ``purge`` and ``offload``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from ipygpumem.api.shell import current_shell, current_traces, loaded_app
from ipygpumem.errors import GpuMemError
from ipygpumem.extras.moving import moving, releasing
from ipygpumem.extras.moving.moving import Offload, PurgeRecord
from ipygpumem.extras.moving.releasing import ReleaseRecord
from ipygpumem.heap.garbage import Garbage
from ipygpumem.heap.holders.search import Roots
from ipygpumem.introspect import type_name
from ipygpumem.inventory import survey
from ipygpumem.scope.scope import is_ownable


def release(*objects: object) -> ReleaseRecord:
    """Empty objects, such as a model, an optimizer or a trainer, and free the memory that only they hold.

    Use it when other names or libraries still refer to an object that you no longer need. Memory that something else
    holds too stays, and the record names the holder. Using an emptied object raises an error that says where it was
    released. It works in scripts, too. Tensors, lists and built-in objects have nothing to empty: delete their names.

    Args:
        objects: pass objects that refer to each other, such as a model and its optimizer, together.

    Raises:
        GpuMemError: one of them cannot be released; then none is.

    >>> class Trainer:
    ...     pass
    >>> trainer = Trainer()
    >>> trainer.batch = numpy.ones(2**20)
    >>> ipygpumem.release(trainer).freed_bytes
    8388608
    """
    if not objects:
        raise GpuMemError("release needs at least one object: release(learner)")
    frame = sys._getframe(1)
    known = {id(value): name for name, value in reversed(list(survey.names_in(frame))) if is_ownable(name)}
    named = [(known.get(id(item), type_name(item)), item) for item in objects]
    del objects, known
    shell, app = current_shell(), loaded_app()
    where = f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
    if shell is not None:
        where = f"cell {shell.execution_count}"
    roots = Roots if app is None else app.experiments.survivors.roots
    return releasing.release(named, where, current_traces().meter, _garbage(), roots)


def purge(model: object, optimizer: object = None) -> PurgeRecord:
    """Defragment a device: move a model off it, empty the caches, and move it back in place.

    Use it when an allocation fails although much memory is free in fragments. Parameters, buffers, gradients and the
    optimizer's state keep their values and identities, including views and tied weights. Tensors that do not fit back
    stay on the host, with a warning. Only CUDA, ROCm and XPU devices are supported.

    Args:
        model: a torch module; its tensors on the host are not moved.
        optimizer: its optimizer.

    Raises:
        GpuMemError: they cannot be moved, or the host has too little memory; then nothing was moved.

    >>> ipygpumem.purge(torch.nn.Linear(2, 2)).moved_bytes  # it is on the host
    0
    """
    record = moving.purge(model, optimizer, current_traces().meter, _garbage())
    if record.is_on_host:
        warnings.warn(f"ipygpumem: {record.notes[-1]}", RuntimeWarning, stacklevel=2)
    return record


def offload(*given: object) -> Offload:
    """Return a ``with`` block during which a model is on the host; at its end, also after an error, it is moved back.

    Use it to give another model the device for a while. Tensors that do not fit back stay on the host, with a warning.

    Args:
        given: modules, and optimizers whose state is moved with them.

    Raises:
        GpuMemError: one of them cannot be moved.

    >>> model = torch.nn.Linear(2, 2)
    >>> with ipygpumem.offload(model):
    ...     model.weight.device
    device(type='cpu')
    """
    return Offload(given, _garbage())


def _garbage() -> Garbage:
    app = loaded_app()
    return Garbage() if app is None else app.context.garbage
