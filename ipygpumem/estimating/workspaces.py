"""Logs the memory that operators allocate on a card next to their results.

cuBLAS keeps its workspaces; the other blocks are freed before the operator returns.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ipygpumem.estimating.convolutions import Convolution
from ipygpumem.estimating.devices import Devices
from ipygpumem.estimating.kernels.kernel import Kernel
from ipygpumem.estimating.kernels.orders import ORDERS
from ipygpumem.estimating.records import Note
from ipygpumem.estimating.storages import WORKSPACES, StorageLog
from ipygpumem.estimating.transients import (
    HOPPERS_PROCESSORS,
    has_rule,
    is_unknown,
    transient_sizes,
)
from ipygpumem.heap.bulk import of_types
from ipygpumem.probes.allocator import Snapshot, SnapshotBlock, snapshots
from ipygpumem.units import KIB, MIB, format_bytes

_MAY_MULTIPLY = frozenset({"linalg_lu_factor_ex"})
"""Operators that call cuBLAS only for some shapes, which their order knows."""
_MULTIPLY = frozenset(
    {
        "_addmm_activation",
        "_euclidean_dist",
        "_int_mm",
        "_linalg_solve_ex",
        "_native_multi_head_attention",
        "_scaled_mm",
        "_transformer_encoder_layer_fwd",
        "_trilinear",
        "addbmm",
        "addmm",
        "addmv",
        "affine_grid_generator",
        "baddbmm",
        "bmm",
        "dot",
        "linalg_inv_ex",
        "linalg_lu_solve",
        "linalg_solve_triangular",
        "linear",
        "matmul",
        "mm",
        "mv",
        "vdot",
    }
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
    cublas_bytes = _OTHERS_BYTES
    if capability in (None, _HOPPER):
        cublas_bytes = _HOPPER_BYTES
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    buffers = re.findall(r":(\d+):(\d+)", config)  # their size in KiB, and their number
    if buffers:
        cublas_bytes = sum(int(size) * int(count) for size, count in buffers) * KIB
    return cublas_bytes, _cublaslt_bytes(cublas_bytes)


def _cublaslt_bytes(cublas_bytes: int) -> int:
    """Return the bytes of cuBLASLt's own workspace; 0 if it takes that of cuBLAS."""
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if unified == "1":
        return 0
    size_bytes = MIB
    size_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    if size_kib.isdigit():
        size_bytes = int(size_kib) * KIB
    if unified == "0":
        return size_bytes
    return min(cublas_bytes, size_bytes)


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

    def log_operation(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        results: list[Any],
        log_result: Callable[[Any], object],
        *,
        in_backward: bool,
    ) -> None:
        """Log the results and other memory of an operation that this thread, or autograd's, ran.

        Args:
            name: of the operator.
            args: its arguments.
            kwargs: those that it gets by name.
            results: the tensors that it returned.
            log_result: logs one of them.
            in_backward: if autograd ran it.
        """
        assumed_on = "cpu"
        if results:
            assumed_on = self._devices.assumed_for(results[0].device)
        is_on_card = assumed_on.startswith("cuda")
        if is_on_card and is_unknown(name):
            self.unknown.setdefault(name)
        if not is_on_card or not _takes_more(name):
            for tensor in results:
                log_result(tensor)
            return
        device = torch.device(assumed_on)
        device_name = self._devices.log_name(results[0].device)

        def keep_workspaces() -> None:
            """Log the workspaces of cuBLAS, if the operator calls it and its thread has none."""
            if not _may_call_cublas(name):
                return
            thread = _thread(in_backward=in_backward)
            adds_bias = _adds_bias(name, args, kwargs)
            self._keep_workspaces(device, device_name, thread, adds_bias=adds_bias)

        kernel = Kernel(
            self._log,
            device_name,
            results,
            log_result,
            keep_workspaces,
            self._processors(device),
            kwargs,
        )
        if name in _CONVOLVE:
            self._log_convolution(kernel, name, args)
        else:
            _log_in_order(kernel, name, args)

    def _processors(self, device: Any) -> int:
        """Return the number of a device's multiprocessors; an unknown one counts as a Hopper."""
        properties = self._known_properties(device)
        if properties is None:
            return HOPPERS_PROCESSORS
        return int(properties.multi_processor_count)

    def _log_convolution(self, kernel: Kernel, name: str, args: Any) -> None:
        """Log what a convolution allocates, without the workspaces of cuDNN."""
        if takes_cudnn():
            self._note(_CUDNN)
        else:
            convolution = Convolution.of(name, args, kernel.first_result)
            convolution.log(kernel)
        kernel.results()

    def _keep_workspaces(
        self, device: Any, device_name: str, thread: object, *, adds_bias: bool
    ) -> None:
        """Log the workspaces of a thread, if it multiplies for the first time on a device."""
        kinds = [False]
        if adds_bias:
            kinds.append(True)
        for is_cublaslt in kinds:
            key = (device_name, thread, is_cublaslt)
            if key not in self._logged:
                self._logged.add(key)
                self._log_workspace(device, device_name, is_cublaslt=is_cublaslt)

    def _log_workspace(self, device: Any, device_name: str, *, is_cublaslt: bool) -> None:
        """Log a workspace of cuBLAS, or of cublasLt, as the block that it already has, if any."""
        capability = self._capability(device)
        size_bytes, light_bytes = workspace_sizes(capability)
        if is_cublaslt:
            size_bytes = light_bytes
        elif capability is None:
            self._note_assumed_hopper(device)
        address = self._take_existing(device_name, size_bytes)
        life = self._log.hold(size_bytes, device_name, WORKSPACES, existed_before=bool(address))
        life.address = address

    def _capability(self, device: Any) -> tuple[int, int] | None:
        """Return a device's compute capability; None if it is unknown."""
        properties = self._known_properties(device)
        if properties is None:
            return None
        return properties.major, properties.minor

    def _note_assumed_hopper(self, device: Any) -> None:
        if "CUBLAS_WORKSPACE_CONFIG" in os.environ:  # the size does not depend on the GPU
            return
        name = f"{device.type}:{device.index or 0}"
        hopper = format_bytes(_HOPPER_BYTES)
        usual = format_bytes(_OTHERS_BYTES)
        self._note(
            f"{name} is assumed to be a Hopper: {hopper} of cuBLAS workspace for each thread that "
            f"multiplies ({usual} on other GPUs)"
        )

    def _take_existing(self, device_name: str, size_bytes: int) -> int:
        """Return the address of an existing block that is probably a workspace of this size, which
        then counts as assigned; 0 if there is none.
        """
        existing = self._unassigned.get(device_name, {})
        for address, block_bytes in existing.items():
            if block_bytes == size_bytes:
                del existing[address]
                return address
        return 0


def _takes_more(name: str) -> bool:
    """Return True if an operator on a card may take more memory than its results, or other ones
    first.
    """
    return _may_call_cublas(name) or name in ORDERS or has_rule(name)


def _log_in_order(kernel: Kernel, name: str, args: Any) -> None:
    """Log what an operator that is no convolution allocates: its results, workspaces and transient
    blocks, in the order of its own rule if it has one.
    """
    order = ORDERS.get(name)
    if order is not None:
        order(kernel, args)
    kernel.results()
    if name not in _MAY_MULTIPLY:
        kernel.workspace()
    sizes = transient_sizes(name, args, kernel.first_result, kernel.processors)
    kernel.allocate_briefly(*sizes)


def _may_call_cublas(name: str) -> bool:
    return name in _MULTIPLY or name in _MAY_MULTIPLY or name in _CONVOLVE


def _thread(*, in_backward: bool) -> object:
    """Return the thread that multiplies: autograd has one thread for each device."""
    if in_backward:
        return "autograd"
    return threading.get_ident()


def _adds_bias(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operator adds a row in its product's kernel, which is cublasLt's.

    torch uses cuBLAS if a matrix is a vector, as the weight of a layer with one output, and if the
    row is scaled.
    """
    number = _BIASES.get(name)
    if number is None or len(args) <= number or kwargs.get("beta", 1) != 1:
        return False
    bias = args[number]
    if not isinstance(bias, torch.Tensor):
        return False
    weight = args[1] if name == "linear" else args[2]
    is_row = bias.ndim == 1 or (bias.ndim == 2 and bias.shape[0] == 1)
    return bool(is_row and min(weight.shape) > 1)


def takes_cudnn() -> bool:
    """Return True if convolutions use cuDNN, which is assumed if torch is built without CUDA."""
    cudnn = torch.backends.cudnn
    if not cudnn.enabled:
        return False
    return not torch.backends.cuda.is_built() or bool(cudnn.is_available())


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
    occupied = set[int]()
    if any(likely.values()):
        occupied = _addresses_of_tensors()
    sizes = dict[str, dict[int, int]]()
    for device, blocks in likely.items():
        free = [block for block in blocks if block.address not in occupied]
        sizes[device] = {block.address: block.requested_bytes for block in free}
    return sizes


def _blocks_of_sizes(
    devices: Mapping[str, Snapshot], sizes: set[int]
) -> dict[str, list[SnapshotBlock]]:
    """Return the blocks in use of each device for which one of some sizes was requested."""
    blocks = dict[str, list[SnapshotBlock]]()
    for device, snapshot in devices.items():
        in_use = snapshot.blocks_in_use
        blocks[device] = [block for block in in_use if block.requested_bytes in sizes]
    return blocks


def _addresses_of_tensors() -> set[int]:
    """Return the addresses of the storages of all plain CUDA tensors, and of their gradients."""
    addresses = set[int]()
    plain_types = {id(torch.Tensor), id(torch.nn.Parameter)}
    for value in of_types(plain_types, gc.get_objects()):
        if value.device.type != "cuda":
            continue
        tensors = [value]
        if value.is_leaf and value.grad is not None:
            tensors.append(value.grad)
        for tensor in tensors:
            if tensor.layout is torch.strided:
                addresses.add(tensor.untyped_storage().data_ptr())
    return addresses
