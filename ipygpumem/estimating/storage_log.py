"""Logs when each storage is made and freed while code runs, and what it is for."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.objects.arrays import SPARSE_PARTS

BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""

ROLES = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "cuBLAS workspaces", "other")
"""In the order of the reports; ``other`` is what was there before: inputs, buffers, tensors of the notebook."""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, WORKSPACES, OTHER = ROLES


@dataclass(slots=True)
class StorageLife:
    """One storage: its size as the allocator rounds it, when it came and went, and what is known of its purpose."""

    device: str
    size_bytes: int
    born: int
    before: bool
    """Whether it is there from the start, as a copy of a tensor of the notebook."""
    recorded: bool = False
    """Whether a forward pass made it that autograd records: backward may need it."""
    in_backward: bool = False
    role: str = ""
    died: int | None = None


@dataclass
class StorageLog:
    """The storages that a run has seen; time counts births and deaths."""

    lives: list[StorageLife] = field(default_factory=list)
    clock: int = 0
    backwards: list[int] = field(default_factory=list)
    """When each backward pass began."""
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes alive by device, and the most so far."""
    _alive: dict[int, tuple[StorageLife, Any]] = field(default_factory=dict)

    def see(
        self, tensor: Any, device: str, *, before: bool = False, recorded: bool = False, in_backward: bool = False
    ) -> StorageLife | None:
        """Note the storage of ``tensor``, and return its life if it is new; a sparse one's has several."""
        life = None
        for storage in storages_of(tensor):
            key = storage._cdata
            if key in self._alive:
                continue
            life = self._born(storage.nbytes(), device, before=before)
            life.recorded, life.in_backward = recorded, in_backward
            # The object in Python lives as long as the storage, whoever holds it: autograd's C++, too.
            self._alive[key] = life, weakref.ref(storage, functools.partial(self._gone, key))
        return life

    def hold(self, size_bytes: int, device: str, role: str, *, before: bool = False) -> StorageLife:
        """Note memory that no tensor has, and that stays."""
        life = self._born(size_bytes, device, before=before)
        life.role = role
        return life

    def pass_by(self, size_bytes: int, device: str) -> None:
        """Note memory that an operation takes while it runs."""
        self._died(self.hold(size_bytes, device, TEMPORARIES))

    def _born(self, size_bytes: int, device: str, *, before: bool) -> StorageLife:
        self.clock += not before
        life = StorageLife(device, rounded(size_bytes), 0 if before else self.clock, before)
        self.lives.append(life)
        self.now[device] = now = self.now.get(device, 0) + life.size_bytes
        self.peak[device] = max(self.peak.get(device, 0), now)
        return life

    def _gone(self, key: int, _: Any) -> None:
        self._died(self._alive.pop(key)[0])

    def _died(self, life: StorageLife) -> None:
        self.clock += 1
        life.died = self.clock
        self.now[life.device] -= life.size_bytes

    def mark(self, tensor: Any, role: str) -> None:
        """Note what a storage that was seen is for; the first word counts, but parameters are always parameters."""
        for storage in storages_of(tensor):
            life, _ = self._alive.get(storage._cdata, (None, None))
            if life is not None and (not life.role or role == PARAMETERS):
                life.role = role

    def close(self) -> None:
        """Note no deaths from now on: what is alive is what the run kept."""
        self._alive.clear()


def storages_of(tensor: Any) -> list[Any]:
    """Return the storages of a tensor: one, or those of a sparse one's indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    parts = SPARSE_PARTS.get(str(tensor.layout).removeprefix("torch."), ())  # none: oneDNN's, only its kernels read it
    return [getattr(tensor, name)().untyped_storage() for name in parts]


def rounded(size_bytes: int) -> int:
    """Return what the CUDA caching allocator takes for ``size_bytes``."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
