"""Logs the memory that operators allocate on a card next to their results.

cuBLAS keeps its workspaces; the other blocks are freed before the operator returns.
"""

from __future__ import annotations

import gc
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import WORKSPACES, StorageLog
from ipygpumem.estimating.transients import HOPPERS_PROCESSORS, is_unknown, transient_sizes
from ipygpumem.introspect import is_exactly
from ipygpumem.probes.allocator import Block, Snapshot, snapshots
from ipygpumem.units import KIB, MIB, format_bytes

_MULTIPLY = frozenset(
    (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
        *("matmul", "_addmm_activation", "_scaled_mm", "_int_mm", "_transformer_encoder_layer_fwd"),
        *("_native_multi_head_attention", "_linalg_solve_ex", "linalg_solve_triangular"),
        *("linalg_inv_ex", "_euclidean_dist", "_trilinear", "affine_grid_generator"),
    )
)
"""Operators that call cuBLAS."""
_BIASES = {"addmm": 0, "_addmm_activation": 0, "linear": 2}
"""Operators that may add a vector with cublasLt, and its number among the arguments."""
_CONVOLVE = frozenset({"convolution", "convolution_backward"})
_CUDNN = (
    "convolutions: cuDNN's workspaces are not counted. cuDNN chooses them; if memory is short, "
    "torch tries a way that needs less"
)
_HOPPER = (9, 0)
_HOPPER_BYTES = 32 * MIB
_OTHERS_BYTES = 8320 * KIB
"""cuBLAS workspaces on a Hopper and on other GPUs, measured with torch 2.11 on simulated cards."""


def workspace_sizes(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the bytes of a cuBLAS and of a cublasLt workspace for a compute capability.

    An unknown one, None, counts as a Hopper, which takes the most, because a too low estimate would
    be worse.
    """
    cublas_bytes = _HOPPER_BYTES if capability in (None, _HOPPER) else _OTHERS_BYTES
    config = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if config:
        cublas_bytes = sum(int(size) * KIB * int(count) for size, count in config)
    return cublas_bytes, _cublaslt_bytes(cublas_bytes)


def _cublaslt_bytes(cublas_bytes: int) -> int:
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if unified == "1":
        return 0
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    size_bytes = int(given) * KIB if given.isdigit() else MIB
    return size_bytes if unified == "0" else min(cublas_bytes, size_bytes)


class Workspaces:
    """Logs the memory that operators on CUDA devices allocate next to their results.

    ``known_properties`` returns the properties of a device, None if they are unknown.
    """

    def __init__(
        self, log: StorageLog, devices: Devices, known_properties: Callable[[Any], Any], note: Note
    ) -> None:
        self._log = log
        self._devices = devices
        self._known_properties = known_properties
        self._note = note
        self._unassigned = blocks_in_use()
        """Existing blocks that may be workspaces, and that the code has not used yet."""
        self._logged: set[tuple[str, object, bool]] = set()
        """Devices, threads and kinds that have their workspace."""
        self.unknown: dict[str, None] = {}
        """Operators that ran on CUDA with memory that cannot be derived from shapes, in order."""

    def see(self, name: str, args: Any, results: list[Any], *, in_backward: bool) -> None:
        """Log the memory of an operation that this thread, or autograd's, has run."""
        if not results:
            return
        there = self._devices.assumed(results[0].device)
        if not there.startswith("cuda"):
            return
        if is_unknown(name):
            self.unknown.setdefault(name)
        device, place = torch.device(there), self._devices.name(results[0].device)
        if name not in _CONVOLVE:
            if name in _MULTIPLY:
                thread = _thread(in_backward=in_backward)
                self._keep_workspaces(device, place, thread, adds_bias=_adds_bias(name, args))
            known = self._known_properties(device)
            processors = known.multi_processor_count if known else HOPPERS_PROCESSORS
            self._log.pass_by(transient_sizes(name, args, results[0], processors), place)
        elif takes_cudnn():
            self._note(_CUDNN)
        else:
            convolution = Convolution.of(name, args, results[0])
            if not convolution.is_by_depth:
                thread = _thread(in_backward=in_backward)
                self._keep_workspaces(device, place, thread, adds_bias=False)
            for sizes in convolution.rounds():
                self._log.pass_by([size for size in sizes if size], place)

    def _keep_workspaces(self, device: Any, place: str, thread: object, *, adds_bias: bool) -> None:
        """Log the workspaces of a thread, if it multiplies for the first time on a device."""
        for is_light in (False, True) if adds_bias else (False,):
            key = (place, thread, is_light)
            if key not in self._logged:
                self._logged.add(key)
                self._log_workspace(device, place, is_light=is_light)

    def _log_workspace(self, device: Any, place: str, *, is_light: bool) -> None:
        """Log a workspace of cuBLAS, or of cublasLt, as the block that it already has, if any."""
        known = self._known_properties(device)
        capability = None if known is None else (known.major, known.minor)
        size_bytes = workspace_sizes(capability)[is_light]
        is_configured = "CUBLAS_WORKSPACE_CONFIG" in os.environ
        if capability is None and not is_light and not is_configured:
            hopper, usual = format_bytes(_HOPPER_BYTES), format_bytes(_OTHERS_BYTES)
            self._note(
                f"{device.type}:{device.index or 0} is assumed to be a Hopper: {hopper} of cuBLAS "
                f"workspace for each thread that multiplies ({usual} on other GPUs)"
            )
        existing = self._unassigned.get(place, {})
        address = next((at for at, block_bytes in existing.items() if block_bytes == size_bytes), 0)
        life = self._log.hold(size_bytes, place, WORKSPACES, before=bool(address))
        life.address = address
        existing.pop(address, None)


def _thread(*, in_backward: bool) -> object:
    """Return the thread that multiplies: autograd has one thread for each device."""
    return "autograd" if in_backward else threading.get_ident()


def _adds_bias(name: str, args: Any) -> bool:
    number = _BIASES.get(name)
    if number is None or len(args) <= number:
        return False
    return getattr(args[number], "ndim", 0) == 1


def takes_cudnn() -> bool:
    """Return True if convolutions use cuDNN, which is assumed if torch is built without CUDA."""
    cudnn = torch.backends.cudnn
    return bool(cudnn.enabled and (not torch.backends.cuda.is_built() or cudnn.is_available()))


@dataclass(frozen=True)
class Convolution:
    """A convolution without cuDNN, or its backward pass."""

    is_backward: bool
    outer: Any
    """Its result; in the backward pass, the result's gradient."""
    given: Any
    weight: Any
    stride: Any
    padding: Any
    is_transposed: bool
    groups: int
    needs_gradient: bool
    """True if the backward pass computes the gradient of ``given``."""

    @classmethod
    def of(cls, name: str, args: Any, result: Any) -> Convolution:
        """Return the convolution of an operator's arguments and first result."""
        if name == "convolution_backward":
            outer, given, weight, _, stride, padding, _, transposed, _, groups, wanted = args[:11]
            return cls(
                True, outer, given, weight, stride, padding, transposed, groups, bool(wanted[0])
            )
        given, weight, _, stride, padding, _, transposed, _, groups = args[:9]
        return cls(False, result, given, weight, stride, padding, transposed, groups, False)

    @property
    def is_by_depth(self) -> bool:
        """True if it is depthwise, for which torch has a kernel of its own."""
        return bool(not self.is_transposed and self.groups == self.given.shape[1] > 1)

    def rounds(self) -> list[list[int]]:
        """Return the blocks that it allocates, in rounds: those of a round are alive at once."""
        if self.is_by_depth:
            return [[self._of_depth()]]
        blocks = [*self._copies(), self._unfolded()]
        if self.groups > 1:
            blocks = self._of_groups()
        # The gradients of the input and of the weight are computed one after the other.
        number = 2 if self.is_backward and self.is_transposed else 1
        return [blocks] * number

    def _operands(self) -> list[Any]:
        return [self.outer, self.given] if self.is_backward else [self.given]

    def _copies(self) -> list[int]:
        """Return the bytes of the copies of the operands that are not contiguous."""
        return [tensor.nbytes for tensor in self._operands() if not tensor.is_contiguous()]

    def _of_depth(self) -> int:
        """Return the bytes of the copies for the kernel of a depthwise convolution.

        In the backward pass, the weight's gradient comes first: with its copies, the memory of the
        input's gradient is not yet in use.
        """
        copies = sum(self._copies())
        if not self.is_backward:
            return copies
        if self.needs_gradient:
            copies -= int(self.given.nbytes)
        copy_of_outer = 0 if self.outer.is_contiguous() else int(self.outer.nbytes)
        return max(copies, copy_of_outer)

    def _unfolded(self) -> int:
        """Return the bytes of one unfolded sample, with a column for each position of the kernel.

        0 if the convolution is a plain product of matrices.
        """
        kernel = self.weight.shape[2:]
        is_plain = (
            not self.is_backward
            and len(kernel) <= 2
            and all(size == 1 for size in (*kernel, *self.stride))
            and not any(self.padding)
        )
        if is_plain and not self.is_transposed:
            return 0
        if self.is_transposed:
            rows, places = self.weight.shape[1], self.given
        else:
            rows, places = self.given.shape[1] // self.groups, self.outer
        columns = math.prod((*kernel, *places.shape[2:]))
        return int(rows * columns * self.given.element_size())

    def _of_groups(self) -> list[int]:
        """Return the blocks of groups, which are convolved one by one, and joined at the end."""
        one_group = sum(tensor.nbytes for tensor in self._operands()) // self.groups
        joined = self.outer.nbytes
        if self.is_backward:
            joined = self.given.nbytes + self.weight.nbytes
        copies = [] if self.given.is_contiguous() else [self.given.nbytes]
        return [*copies, max(one_group + self._unfolded(), joined)]


def blocks_in_use() -> dict[str, dict[int, int]]:
    """Return each CUDA device's blocks that may be workspaces: sizes by address.

    These are the blocks of a workspace's size in which no plain tensor is.
    """
    if not torch.cuda.is_initialized():
        return {}
    try:
        devices = snapshots("cuda")
    except RuntimeError:  # another allocator
        return {}
    right_sizes = {*workspace_sizes(None), *workspace_sizes((0, 0))}
    likely = _blocks_of_sizes(devices, right_sizes)
    occupied = _addresses_of_tensors() if any(likely.values()) else set[int]()
    return {
        device: {
            block.address: block.requested_bytes
            for block in blocks
            if block.address not in occupied
        }
        for device, blocks in likely.items()
    }


def _blocks_of_sizes(devices: Mapping[str, Snapshot], sizes: set[int]) -> dict[str, list[Block]]:
    """Return the blocks in use of each device for which one of some sizes was requested."""
    return {
        device: [block for block in snapshot.blocks_in_use if block.requested_bytes in sizes]
        for device, snapshot in devices.items()
    }


def _addresses_of_tensors() -> set[int]:
    """Return the addresses of the storages of all plain CUDA tensors, and of their gradients."""
    addresses = set[int]()
    for value in gc.get_objects():
        if not is_exactly(value, torch.Tensor, torch.nn.Parameter) or value.device.type != "cuda":
            continue
        tensors = [value]
        if value.is_leaf and value.grad is not None:
            tensors.append(value.grad)
        for tensor in tensors:
            if tensor.layout is torch.strided:
                addresses.add(tensor.untyped_storage().data_ptr())
    return addresses
