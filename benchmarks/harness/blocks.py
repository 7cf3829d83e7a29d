"""Makes a scenario's blocks of memory inside the kernel, and counts the bytes that are freed.

Only the storage of a block counts: a view, a gradient node or a traceback that keeps it alive keeps
its bytes.
"""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class _Block(NamedTuple):
    """A storage that a scenario made."""

    size: int
    is_dead: Callable[[], bool]
    is_on_gpu: bool


_BLOCKS: list[_Block] = []
_NAMES: set[str] = set()
MIB = 1 << 20


def array(mib: int = 64) -> Any:
    """Return a NumPy array of ``mib`` MiB of float32, watched; a tensor on the GPU where
    TORTURE_GPU is set.
    """
    if "TORTURE_GPU" in os.environ:
        return tensor(mib)
    import numpy

    values = numpy.ones(mib * MIB // 4, dtype=numpy.float32)
    watch(values)
    return values


def tensor(mib: int = 64, **options: Any) -> Any:
    """Return a torch tensor of ``mib`` MiB of float32, on the GPU where there is one, watched."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.ones(mib * MIB // 4, device=device, **options)
    watch(values)
    return values


def to_gpu(thing: Any) -> Any:
    """Return a tensor or a module on the GPU where there is one, else as it is."""
    import torch

    if not torch.cuda.is_available():
        return thing
    return thing.cuda()


def watch(*things: Any) -> None:
    """Count the storages of tensors and of arrays as the scenario's blocks."""
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    for thing in things:
        if torch is not None and isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
            _BLOCKS.append(_Block(storage.nbytes(), reference.expired, thing.is_cuda))
        else:
            assert numpy is not None
            owner = thing
            while isinstance(owner.base, numpy.ndarray):
                owner = owner.base
            reference = weakref.ref(owner)
            is_dead = partial(_has_died, reference)
            _BLOCKS.append(_Block(owner.nbytes, is_dead, is_on_gpu=False))


def _has_died(reference: Callable[[], Any]) -> bool:
    return reference() is None


def report() -> dict[str, int]:
    """Return the bytes of all blocks (``made``), of blocks on a GPU (``on_gpu``), of freed blocks
    (``dead``), and those that torch has allocated on the GPU (``gpu``).
    """
    made = sum(block.size for block in _BLOCKS)
    on_gpu = sum(block.size for block in _BLOCKS if block.is_on_gpu)
    dead = sum(block.size for block in _BLOCKS if block.is_dead())
    torch = sys.modules.get("torch")
    gpu = 0
    if torch is not None:
        gpu = torch.cuda.memory_allocated()
    return {"made": made, "on_gpu": on_gpu, "dead": dead, "gpu": gpu}


def begin(namespace: dict[str, Any]) -> None:
    """Forget all blocks, and note which names there are."""
    _BLOCKS.clear()
    _NAMES.clear()
    _NAMES.update(namespace)


def clean_plainly(namespace: dict[str, Any]) -> None:
    """Do what people do by hand: ``del`` of the new names, ``gc.collect()``,
    ``torch.cuda.empty_cache()``.
    """
    for name in list(namespace):
        if name not in _NAMES and not name.startswith("_"):
            del namespace[name]
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
