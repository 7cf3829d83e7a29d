"""Logs when each storage is allocated and freed while code runs."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.estimating.memory.caching_allocator import rounded_to_blocks
from ipygpumem.introspect import is_atom

ROLES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "cuBLAS workspaces",
    "other",
)
"""Purposes, in the order of the reports.

``other`` covers existing inputs, buffers and tensors of the notebook.
"""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, WORKSPACES, OTHER = ROLES


@dataclass(slots=True)
class StorageLife:
    """One storage: its size, its life on the log's clock, and its role."""

    device: str
    size_bytes: int
    """Its size as the allocator rounds it."""
    born: int
    """When it was allocated; 0 if it existed before."""
    existed_before: bool
    """True if it exists from the start, as a copy of one of the notebook's tensors."""
    recorded: bool = False
    """True if a recorded forward pass allocated it: backward may need it."""
    in_backward: bool = False
    """True if a backward pass allocated it."""
    role: str = ""
    """The role that a hook has marked; empty if none has. ``StorageLog.role`` finds the role."""
    died: int | None = None
    """When it was freed; None while it is alive."""
    address: int = 0
    """Address of the original tensor's storage on a CUDA device; 0 if there is none.

    In RAM, it is the address of a large storage whose pages the owner of the log counts.
    """
    origin: Any = None
    """Where it was allocated, for the owner of the log."""
    reserved_bytes: int = 0
    """Further bytes, which are reserved and not used, if the log's owner has counted the pages."""


@dataclass
class StorageLog:
    """The storages of a run; the clock counts how many of them were allocated or freed."""

    lives: list[StorageLife] = field(default_factory=list)
    """The storages in the order of their allocation."""
    clock: int = 0
    """Number of allocations and frees so far."""
    backwards: list[int] = field(default_factory=list)
    """Clock at the start of each backward pass."""
    now: dict[str, int] = field(default_factory=dict)
    """Bytes alive by device."""
    peak: dict[str, int] = field(default_factory=dict)
    """Maximum so far of the bytes alive, by device."""
    erased: set[int] = field(default_factory=set)
    """Addresses of storages that are to count as freed before the start."""
    alive: dict[int, tuple[StorageLife, Any]] = field(default_factory=dict)
    """The storages that are alive, by their identities: their lives, and weak references."""

    def log_tensor(
        self,
        tensor: Any,
        device: str,
        *,
        least_bytes: int = 0,
        existed_before: bool = False,
        recorded: bool = False,
        in_backward: bool = False,
    ) -> StorageLife | None:
        """Log the storage of ``tensor``, and return its life; None if the log has it already.

        Args:
            tensor: the tensor. One with several storages, such as a sparse one, returns the last
                new life.
            device: the name of the device in the log.
            least_bytes: the storage counts as at least so large.
            existed_before: True if it exists before the run.
            recorded: True if autograd records the operation that has made it.
            in_backward: True if a backward pass has made it.
        """
        life = None
        for storage in storages_of(tensor):
            if storage._cdata not in self.alive:
                size_bytes = max(least_bytes, storage.nbytes())
                life = self.log_storage(storage, size_bytes, device, existed_before=existed_before)
                life.recorded = recorded
                life.in_backward = in_backward
        return life

    def log_storage(
        self, storage: Any, size_bytes: int, device: str, *, existed_before: bool = False
    ) -> StorageLife:
        """Log a storage that the log does not have yet until it is freed, and return its life."""
        key = storage._cdata
        life = self._log_birth(size_bytes, device, existed_before=existed_before)
        # The Python object lives as long as the storage, even if only autograd's C++ code refers to
        # the storage.
        self.alive[key] = life, weakref.ref(storage, functools.partial(self._log_death, key))
        return life

    def log_growth(self, tensor: Any, device: str) -> StorageLife | None:
        """Log each storage of ``tensor`` that has grown as a new one; return the last new life,
        or None if none has.
        """
        life = None
        for storage in storages_of(tensor):
            key = storage._cdata
            if key not in self.alive:
                continue
            earlier, reference = self.alive[key]
            size_bytes = storage.nbytes()
            if size_bytes > earlier.size_bytes:
                self.free(earlier)
                life = self._log_birth(size_bytes, device, existed_before=False)
                life.role = earlier.role
                self.alive[key] = life, reference
        return life

    def log_block(
        self, size_bytes: int, device: str, role: str, *, existed_before: bool = False
    ) -> StorageLife:
        """Log memory that belongs to no tensor; it is alive until ``free``."""
        life = self._log_birth(size_bytes, device, existed_before=existed_before)
        life.role = role
        return life

    def _log_birth(self, size_bytes: int, device: str, *, existed_before: bool) -> StorageLife:
        """Log memory that is allocated now, and raise the peak of its device."""
        born = 0
        if not existed_before:
            self.clock += 1
            born = self.clock
        life = StorageLife(device, rounded_to_blocks(size_bytes), born, existed_before)
        self.lives.append(life)
        now = self.now.get(device, 0) + life.size_bytes
        self.now[device] = now
        if now > self.peak.get(device, 0):
            self.peak[device] = now
        return life

    def _log_death(self, key: int, _: Any) -> None:
        """Log that a storage was freed: the callback of its weak reference."""
        life, _ = self.alive.pop(key)
        self.free(life)
        if life.address:
            self.note_freed(life)

    def note_freed(self, life: StorageLife) -> None:
        """Do nothing; a subclass notes what it wants to know of a freed storage with an address."""

    def free(self, life: StorageLife) -> None:
        """Log that memory is freed now."""
        self.clock += 1
        life.died = self.clock
        self.now[life.device] -= life.size_bytes

    def mark(self, tensor: Any, role: str, origin: Any = None) -> None:
        """Set role and origin of a tensor's storages in the log, unless these have another role.

        PARAMETERS replaces any role.
        """
        # Without this, each attribute that is read would call the estimate's mode of functions.
        with torch._C.DisableTorchFunction():
            storages = list(storages_of(tensor))
        for storage in storages:
            life = self.life(storage._cdata)
            if life is None:
                continue
            if role == PARAMETERS or life.role in ("", role):
                life.role = role
                life.origin = origin or life.origin

    def erase(self, tensors: Iterable[Any]) -> None:
        """Log the storages of tensors as if they had been freed before the start."""
        erased_lives = set[int]()
        for tensor in tensors:
            for storage in storages_of(tensor):
                life = self.life(storage._cdata)
                if life is not None and life.existed_before:
                    del self.alive[storage._cdata]
                    self.now[life.device] -= life.size_bytes
                    erased_lives.add(id(life))
                    self.erased.add(life.address)
        self.lives = [life for life in self.lives if id(life) not in erased_lives]

    def life(self, key: int) -> StorageLife | None:
        """Return the life of a storage that is alive, by its identity."""
        entry = self.alive.get(key)
        if entry is None:
            return None
        life, _ = entry
        return life

    def change_device(self, device: str, new_device: str) -> None:
        """Let all logged storages of a device count as storages of another one."""
        for life in self.lives:
            if life.device == device:
                life.device = new_device

    def close(self) -> None:
        """Log no deaths from now on: a storage that is alive now counts as kept by the run."""
        self.alive.clear()

    def role(self, life: StorageLife) -> str:
        """Return the role of a storage: the first one in this table whose condition is true.

        ===============================================  ===========================
        a hook has marked it                             the mark, such as gradients
        it existed before the run                        other
        autograd recorded it for backward, see below     activations
        a backward pass allocated it                     temporaries
        it lives on until a backward pass, or the end    other
        all else: it dies in its forward pass            temporaries
        ===============================================  ===========================

        A recorded storage is an activation if a backward pass may still use it: one has begun while
        it was alive, one is running, or none has begun in this run.
        """
        if life.role:
            return life.role
        if life.existed_before:
            return OTHER
        lives_into_backward = self._lives_into_backward(life)
        has_backward = bool(self.backwards)
        if life.recorded and (lives_into_backward or life.in_backward or not has_backward):
            return ACTIVATIONS
        if life.in_backward:
            return TEMPORARIES
        if lives_into_backward or life.died is None:
            return OTHER
        return TEMPORARIES

    def _lives_into_backward(self, life: StorageLife) -> bool:
        """Return True if a backward pass has begun while a storage was alive."""
        number = bisect_left(self.backwards, life.born)
        if number == len(self.backwards):
            return False
        if life.died is None:
            return True
        return self.backwards[number] < life.died


def storages_of(tensor: Any) -> Iterator[Any]:
    """Yield the storage of a tensor, or the storages of its inner tensors or sparse parts."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                yield from storages_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif tensor.layout is torch.strided:  # oneDNN's layout has no storage
        yield tensor.untyped_storage()


def tensors_in(value: Any) -> Iterator[Any]:
    """Return an iterator over the tensors in an operation's arguments or results, also those in
    nested lists, tuples and mappings.
    """
    tensors: list[Any] = []
    _append_tensors(value, tensors)
    return iter(tensors)


def _append_tensors(value: Any, tensors: list[Any]) -> None:
    """Append the tensors in a value to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _append_tensors(item, tensors)
    elif not is_atom(value) and isinstance(value, Mapping):
        for item in value.values():
            _append_tensors(item, tensors)
