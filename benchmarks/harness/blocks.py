"""Runs inside the kernel: makes the blocks of memory of a scenario, and says which of them have
died.

Only the storage of a block counts: a view, a gradient node or a traceback that keeps it alive keeps
its bytes.
"""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

_WATCHED: list[tuple[int, Callable[[], bool], bool]] = []
"""Size, whether it is dead, whether it is on a GPU."""
_NAMES: set[str] = set()
MIB = 1 << 20


def array(mib: int = 64) -> Any:
    """Return a NumPy array of ``mib`` MiB of float32, watched; a tensor on the GPU where
    TORTURE_GPU is set.
    """
    if "TORTURE_GPU" in os.environ:
        return tensor(mib)
    import numpy

    made = numpy.ones(mib * MIB // 4, dtype=numpy.float32)
    watch(made)
    return made


def tensor(mib: int = 64, **options: Any) -> Any:
    """Return a torch tensor of ``mib`` MiB of float32, on the GPU where there is one, watched."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.ones(mib * MIB // 4, device=device, **options)
    watch(made)
    return made


def to_gpu(thing: Any) -> Any:
    """Return a tensor or a module on the GPU where there is one, else as it is."""
    import torch

    return thing.cuda() if torch.cuda.is_available() else thing


def watch(*things: Any) -> None:
    """Count the storages of tensors and of arrays as the scenario's blocks."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    for thing in things:
        if torch is not None and isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
            _WATCHED.append((storage.nbytes(), reference.expired, thing.is_cuda))
        else:
            assert numpy is not None
            owner = thing
            while isinstance(owner.base, numpy.ndarray):
                owner = owner.base
            reference = weakref.ref(owner)
            _WATCHED.append((owner.nbytes, lambda reference=reference: reference() is None, False))


def report() -> dict[str, int]:
    """Return the bytes that were made, those of them on a GPU, those whose storage has died, GPU in
    use.
    """
    made = sum(size for size, _, _ in _WATCHED)
    on_gpu = sum(size for size, _, is_on_gpu in _WATCHED if is_on_gpu)
    dead = sum(size for size, is_dead, _ in _WATCHED if is_dead())
    torch = sys.modules.get("torch")
    gpu = torch.cuda.memory_allocated() if torch is not None else 0
    return {"made": made, "on_gpu": on_gpu, "dead": dead, "gpu": gpu}


def begin(namespace: dict[str, Any]) -> None:
    """Forget all blocks, and note which names there are."""
    _WATCHED.clear()
    _NAMES.clear()
    _NAMES.update(namespace)


def clean_plainly(namespace: dict[str, Any]) -> None:
    """Do what people do by hand: ``del`` of the new names, ``gc.collect()``,
    ``torch.cuda.empty_cache()``.
    """
    for name in [name for name in namespace if name not in _NAMES and not name.startswith("_")]:
        del namespace[name]
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
