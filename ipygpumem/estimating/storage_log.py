"""Logs when each storage is made and freed while code runs, and what operations take beside their results."""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import Note
from ipygpumem.introspect import is_exactly
from ipygpumem.objects.arrays import SPARSE_PARTS
from ipygpumem.probes.allocator import snapshots
from ipygpumem.units import KIB, MIB, format_bytes

_BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""

ROLES = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "cuBLAS workspaces", "other")
"""In the order of the reports; ``other`` is what was there before: inputs, buffers, tensors of the notebook."""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, WORKSPACES, OTHER = ROLES


_MULTIPLY = frozenset(
    [
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"),
        *("_addmm_activation", "_scaled_mm", "_int_mm", "_transformer_encoder_layer_fwd"),
        "_native_multi_head_attention",
    ]
)
_BIASES = {"addmm": 0, "_addmm_activation": 0, "linear": 2}
"""Where their sum with a vector is among the arguments."""
_CONVOLVE = frozenset({"convolution", "convolution_backward"})
_LARGE_BYTES, _SMALL_BYTES = 32 * MIB, 8320 * KIB
"""On a Hopper, and on other cards."""
_HOPPER, _LIGHT = (9, 0), MIB
_CUDNN = (
    "convolutions: the workspaces of cuDNN are not counted. cuDNN chooses them; without memory for one, torch tries a "
    "way that needs less"
)


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
        """Note the storage of ``tensor``, and return its life if it is new; a sparse one has several."""
        life = None
        for storage in _storages_of(tensor):
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
        rounded = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        life = StorageLife(device, rounded, 0 if before else self.clock, before)
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
        for storage in _storages_of(tensor):
            life, _ = self._alive.get(storage._cdata, (None, None))
            if life is not None and (not life.role or role == PARAMETERS):
                life.role = role

    def close(self) -> None:
        """Note no deaths from now on: what is alive is what the run kept."""
        self._alive.clear()


def _storages_of(tensor: Any) -> list[Any]:
    """Return the storages of a tensor: one, or those of a sparse one's indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    parts = SPARSE_PARTS.get(str(tensor.layout).removeprefix("torch."), ())  # none: oneDNN's, only its kernels read it
    return [getattr(tensor, name)().untyped_storage() for name in parts]


class Workspaces:
    """Logs the memory that operations on CUDA devices need beside their results."""

    def __init__(
        self, log: StorageLog, devices: Devices, capability_of: Callable[[Any], tuple[int, int] | None], note: Note
    ) -> None:
        self._log, self._devices, self._capability_of, self._note = log, devices, capability_of, note
        self._taken = blocks_in_use()
        self._held: set[tuple[object, ...]] = set()

    def see(self, func: Any, args: Any, results: list[Any], *, in_backward: bool) -> None:
        """Look at an operation that this thread, or autograd's own, has run."""
        name = func.__name__.partition(".")[0].rstrip("_")
        convolves = name in _CONVOLVE
        if not convolves and name not in _MULTIPLY:
            return
        there = self._devices.named or str(results[0].device) if results else "cpu"
        if not there.startswith("cuda"):
            return
        device, place = torch.device(there), self._devices.name(results[0].device)
        cudnn = torch.backends.cudnn  # without CUDA here, convolutions are assumed to go through it
        if convolves and cudnn.enabled and (not torch.backends.cuda.is_built() or cudnn.is_available()):
            self._note(_CUDNN)
            return
        number = _BIASES.get(name)
        biased = number is not None and len(args) > number and getattr(args[number], "ndim", 0) == 1
        thread = "autograd" if in_backward else threading.get_ident()
        for light in (False, True)[: 1 + biased]:
            if (place, thread, light) not in self._held:
                self._held.add((place, thread, light))
                self._hold(device, place, light=light)
        for size in _columns(name, args, results[0]) if convolves else ():
            self._log.pass_by(size, place)

    def _hold(self, device: Any, place: str, *, light: bool) -> None:
        capability = self._capability_of(device)
        size = workspace_sizes(capability)[light]
        if capability is None and not light and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            self._note(
                f"{device.type}:{device.index or 0} is taken to be a Hopper: torch takes {format_bytes(_LARGE_BYTES)} "
                f"for cuBLAS there for each thread that multiplies, and {format_bytes(_SMALL_BYTES)} on other cards"
            )
        taken = self._taken.get(place, [])
        self._log.hold(size, place, WORKSPACES, before=size in taken)
        if size in taken:
            taken.remove(size)


def workspace_sizes(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return what a workspace of cuBLAS and of cublasLt takes on a device of this capability, as with torch 2.11.

    The most is taken where it is not known (None): an estimate that is too high by that is no false hope.
    """
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    usual = _LARGE_BYTES if capability in (None, _HOPPER) else _SMALL_BYTES
    full = sum(int(size) * KIB * int(count) for size, count in config) if config else usual
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    light = int(given) * KIB if given.isdigit() else _LIGHT
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return full, 0 if unified == "1" else light if unified == "0" else min(full, light)


def _columns(name: str, args: Any, result: Any) -> list[int]:
    """Return what a convolution without cuDNN takes for a while: one sample's input, laid out for a matrix product."""
    backward = name == "convolution_backward"
    outer, given, weight = args[:3] if backward else (result, *args[:2])
    stride, padding, _, transposed, _, groups = args[4:10] if backward else args[3:9]
    kernel = weight.shape[2:]
    as_it_is = not transposed and all(size == 1 for size in (*kernel, *stride)) and not any(padding)
    if as_it_is or groups == given.shape[1] > 1:  # a product of matrices, or one that has a kernel of its own
        return []
    rows, places = (weight.shape[1], given) if transposed else (given.shape[1] // groups, outer)
    size = rows * math.prod((*kernel, *places.shape[2:])) * given.element_size()
    return [size] * (1 + (backward and transposed))


def blocks_in_use() -> dict[str, list[int]]:
    """Return the sizes of blocks in use on each CUDA device that may be workspaces: no plain tensor lies in them."""
    if not torch.cuda.is_initialized():
        return {}
    try:
        used = {place: snapshot.blocks_in_use for place, snapshot in snapshots("cuda").items()}
    except RuntimeError:  # another allocator
        return {}
    right = {*workspace_sizes(None), *workspace_sizes((0, 0))}
    likely = {block.address for blocks in used.values() for block in blocks if block.requested_bytes in right}
    for value in gc.get_objects() if likely else ():
        if is_exactly(value, torch.Tensor, torch.nn.Parameter) and value.device.type == "cuda":
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided:
                    likely.discard(tensor.untyped_storage().data_ptr())
    return {
        place: [block.requested_bytes for block in blocks if block.address in likely] for place, blocks in used.items()
    }
