"""Defragments a device: moves a model and its optimizer's state to the host, empties the caches, moves them back.

``offload`` keeps a model on the host for a while.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from ipygpumem.errors import GpuMemError
from ipygpumem.freeing import moving
from ipygpumem.freeing.moving import Moving
from ipygpumem.freeing.reclaim import run_steps, steps_that_free
from ipygpumem.freeing.records import PurgeRecord, Room
from ipygpumem.introspect import type_name
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import ReclaimStep
from ipygpumem.objects import interrupts
from ipygpumem.objects.arrays import describe, is_of_library
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.traced import refuse_while_transformed
from ipygpumem.probes.allocator import snapshots
from ipygpumem.units import format_bytes

_BOUND = ("DistributedDataParallel", "FullyShardedDataParallel")


def purge(
    model: object,
    optimizer: object | None,
    meter: Meter,
    garbage: Garbage,
    *,
    keep_optimizer: bool = True,
    devices: tuple[str, ...] = moving.DEVICES,
) -> PurgeRecord:
    """Move a model and an optimizer's state off their devices, empty the caches, and move them back in place.

    Raises:
        GpuMemError: it makes no sense, torch traces or transforms the code that asks, or the host has no room: then
            nothing was moved.
    """
    refuse_while_transformed("purge")
    optimizers = [] if optimizer is None else [optimizer]
    _check("purge", [model, *optimizers], modules=1)
    if not keep_optimizer and optimizer is None:
        raise GpuMemError("there is no optimizer whose state could be dropped: name it after the model")
    struck: list[int]
    with interrupts.noted() as struck, moving.quiet():
        work = Moving([model], optimizers if keep_optimizer else [], garbage, devices)
        names = work.devices
        before = tuple(map(_room, names))
        notes = _left_notes(work) + _left_by_graphs(work, names)
        work.copy_out()
        stays, dropped = "", 0
        if not struck:
            dropped = 0 if keep_optimizer else _drop(optimizer)
            stays = _away_and_back(work, meter, garbage) if work.pieces or dropped else ""
            notes += [f"it did not fit back, and stays on the host: {stays}"] * bool(stays)
        after = tuple(map(_room, names))
    if struck:
        raise KeyboardInterrupt
    if not names and not notes:
        notes = ["no parameter, buffer or gradient of it is on a device"]
    return PurgeRecord(work.size_bytes, dropped, bool(stays), before, after, tuple(notes))


def _away_and_back(work: Moving, meter: Meter, garbage: Garbage) -> str:
    """Empty the storages, give memory back, and fill them; return why that failed: then the host has all of it."""
    steps: list[ReclaimStep] = []
    try:
        work.empty()
        run_steps(meter, steps_that_free(garbage), steps)
    finally:
        if stays := work.fill():
            work.use_host()
    return stays


def _check(what: str, given: Iterable[object], modules: int) -> None:
    if sys.modules.get("torch") is None:
        raise GpuMemError(f"{what} moves torch's modules, and torch is not loaded")
    for place, item in enumerate(given):
        wanted = ("torch.nn", "Module") if place < modules else ("torch.optim", "Optimizer")
        if not is_of_library(item, *wanted):
            example = f"{what}(learner.model, learner.optimizer)"
            word = "a torch module" if place < modules else "an optimizer of torch's"
            raise GpuMemError(f"{what} takes {word} here, and not {type_name(item)}: {example}")


def _drop(optimizer: Any) -> int:
    """Empty an optimizer's state, and return what it had on devices."""
    arrays = [array for array in map(describe, moving.state_tensors(optimizer)) if array is not None]
    optimizer.state.clear()
    return sum(array.size_bytes for array in arrays if array.device != "cpu")


def _left_notes(work: Moving) -> list[str]:
    """Leave what cannot be moved where it is, and say so."""
    notes = []
    if work.odd:
        notes.append(f"tensors that stay where they are ({moving.KINDS}): {len(work.odd)}")
    if left := work.leave(piece for piece in work.pieces if piece.is_shared):
        notes.append(f"{format_bytes(left)} stay where they are: a graph or another library uses that memory too")
    return notes


def _left_by_graphs(work: Moving, names: Sequence[str]) -> list[str]:
    """Leave what is on a device where a captured CUDA graph may have addresses built in, and say so."""
    notes = []
    for name in names:
        if _may_have_graphs(name):
            work.leave(piece for piece in work.pieces if str(piece.storage.device) == name)
            notes.append(f"{name} is left alone: a captured CUDA graph may use its addresses")
    return notes


def _may_have_graphs(name: str) -> bool:
    cuda = getattr(sys.modules["torch"], name.partition(":")[0], None)
    if name == "cpu" or cuda is None:
        return False
    try:
        found = snapshots(name.partition(":")[0]).get(name)
    except RuntimeError:  # an allocator without snapshots
        return False
    return found is not None and any(segment.private for segment in found.segments)


def _room(name: str) -> Room:
    """Return what the allocator has of a device, and the largest block that it could hand out."""
    torch: Any = sys.modules["torch"]
    backend = name.partition(":")[0]
    module = getattr(torch, backend)
    if backend == "cpu":
        return Room(name, 0, None)
    reserved = int(module.memory_reserved(name))
    try:
        snapshot = snapshots(backend)[name]
        free, total = module.mem_get_info(name)
    except (RuntimeError, AttributeError, KeyError):
        return Room(name, reserved, None)
    limit = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)(name) * total
    new = min(free, limit - reserved) + snapshot.cached_bytes  # cached segments are given back for it if need be
    return Room(name, reserved, max(int(new), snapshot.largest_fragment_bytes, 0))


class Offload:
    """A ``with`` block in which models and optimizers' states are on the host.

    Args:
        given: modules, and optimizers.
        garbage: knows the tensors.
        devices: the kinds of devices from which to move.

    Raises:
        GpuMemError: one of them cannot be moved.
    """

    def __init__(self, given: Sequence[Any], garbage: Garbage, devices: tuple[str, ...] = moving.DEVICES) -> None:
        refuse_while_transformed("offload")
        modules = [item for item in given if is_of_library(item, "torch.nn", "Module")]
        others = [item for item in given if not is_of_library(item, "torch.nn", "Module")]
        _check("offload", [*modules, *others] or [None], modules=max(1, len(modules)))
        for module in (inner for model in modules for inner in model.modules()):
            if type_name(module) in _BOUND:
                raise GpuMemError(f"offload cannot move what {type_name(module)} works on: it keeps addresses")
        self._modules, self._optimizers, self._garbage, self._devices = modules, others, garbage, devices
        self._work: Moving | None = None

    def __enter__(self) -> Offload:
        """Move all of it to the host; after an error nothing has been moved."""
        refuse_while_transformed("offload")
        if self._work is not None:
            raise GpuMemError("this offload is open already: call ipygpumem.offload(model) for another")
        with interrupts.noted() as struck, moving.quiet():
            work = Moving(self._modules, self._optimizers, self._garbage, self._devices)
            if work.odd:
                text = f"offload cannot move {len(work.odd)} of its tensors ({moving.KINDS}): nothing was moved"
                raise GpuMemError(text)
            if bound := [name for name in work.devices if _may_have_graphs(name)]:
                raise GpuMemError(f"a captured CUDA graph may use addresses of {bound[0]}: nothing was moved")
            self._host_bytes = moving.host_bytes(self._modules)
            work.copy_out()
            if not struck:
                try:
                    work.use_host()
                except Exception:
                    work.use_home()
                    raise
                self._work = work
                work.empty()
        if struck:
            self.__exit__(None, None, None)
            raise KeyboardInterrupt
        if shared := sum(piece.size_bytes for piece in work.pieces if piece.is_shared):
            text = f"{format_bytes(shared)} stay on the device as well: a graph or another library uses that memory"
            warnings.warn(f"ipygpumem: {text}", RuntimeWarning, stacklevel=2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Move all of it back; if it does not fit, it stays on the host, and a warning says so."""
        work, self._work = self._work, None
        if work is None:
            return
        with interrupts.noted() as struck, moving.quiet():
            work.add_what_was_made()
            size, error_text = work.size_bytes, work.fill()
            why = f"they did not fit back ({error_text})"
            if not error_text:
                work.use_home()
                size = moving.host_bytes(self._modules) - self._host_bytes
                why = "they were made or replaced there"
        if size > 0:
            text = f"{format_bytes(size)} stay on the host: {why}. To move them, call model.to(device)"
            warnings.warn(f"ipygpumem: {text}", RuntimeWarning, stacklevel=2)
        if struck:
            raise KeyboardInterrupt
