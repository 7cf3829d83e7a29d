"""``ipygpumem.release``, ``purge`` and ``offload``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ipygpumem.api.shell import current_shell, current_traces, loaded_notebook
from ipygpumem.errors import GpuMemError
from ipygpumem.freeing import moving
from ipygpumem.freeing import release as releasing
from ipygpumem.freeing.moving import Offload, PurgeRecord
from ipygpumem.freeing.release import ReleaseRecord
from ipygpumem.introspect import type_name
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.holders.search import Roots
from ipygpumem.objects.inventory import survey
from ipygpumem.reports.freeing import ShownPurge, ShownRelease


def release(*objects: object) -> ReleaseRecord:
    """Empty objects, such as a model, an optimizer or a trainer, and free what only they hold.

    What something else holds too stays, and the record says what that is. Of each object a shell is left: whatever is
    done with it raises an error that says where it was released. It works in scripts, too.

    Args:
        objects: several that lead to each other, as a model and its optimizer, go together.

    Raises:
        GpuMemError: one of them cannot be released, such as a list, or a part of a model that stays; then none is.
    """
    if not objects:
        raise GpuMemError("release takes the objects that are to go: release(learner)")
    frame = sys._getframe(1)
    named = list(zip(_names(objects, frame), objects, strict=True))
    del objects
    notebook = loaded_notebook()
    roots = Roots if notebook is None else notebook.experiments.survivors.roots
    record = releasing.release(named, _where(frame), current_traces().meter, _garbage(), roots)
    return ShownRelease(**vars(record))


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
    return ShownPurge(**vars(record))


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


def _where(frame: FrameType) -> str:
    shell = current_shell()
    if shell is not None:
        return f"cell {shell.execution_count}"
    return f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"


def _names(objects: tuple[object, ...], frame: FrameType) -> Iterator[str]:
    """Yield what code at ``frame`` calls each object; its type if it has no name there."""
    known = {id(value): name for name, value in reversed(list(survey.names_in(frame)))}
    yield from (known.get(id(item), type_name(item)) for item in objects)
