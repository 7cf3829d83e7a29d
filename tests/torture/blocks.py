"""Runs inside the kernel: makes the blocks of memory of a scenario, and says which of them have died.

Only the storage of a block counts: a view, a gradient node or a traceback that keeps it alive keeps its bytes.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

_WATCHED: list[tuple[int, Callable[[], bool]]] = []
_NAMES: set[str] = set()
MIB = 1 << 20


def array(mib: int = 64) -> Any:
    """Return a NumPy array of ``mib`` MiB of float32, watched."""
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


def watch(*things: Any) -> None:
    """Count the storages of tensors and of arrays as the scenario's blocks."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    for thing in things:
        if torch is not None and isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
            _WATCHED.append((storage.nbytes(), reference.expired))
        else:
            assert numpy is not None
            owner = thing
            while isinstance(owner.base, numpy.ndarray):
                owner = owner.base
            _WATCHED.append((owner.nbytes, _expired(weakref.ref(owner))))


def _expired(reference: weakref.ref[Any]) -> Callable[[], bool]:
    return lambda: reference() is None


def report() -> dict[str, int]:
    """Return the bytes that were made, those whose storage has died, and the RSS."""
    made = sum(size for size, _ in _WATCHED)
    dead = sum(size for size, is_dead in _WATCHED if is_dead())
    with open("/proc/self/statm") as file:  # noqa: PTH123  # read while nothing else may be imported or made
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"made": made, "dead": dead, "rss": rss}


def begin(namespace: dict[str, Any]) -> None:
    """Forget all blocks, and note which names there are."""
    _WATCHED.clear()
    _NAMES.clear()
    _NAMES.update(namespace)


def clean_plainly(namespace: dict[str, Any]) -> None:
    """Do what people do by hand: ``del`` of the new names, ``gc.collect()``, ``torch.cuda.empty_cache()``."""
    for name in [name for name in namespace if name not in _NAMES and not name.startswith("_")]:
        del namespace[name]
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
