"""cuBLAS's workspaces: memory that a thread gets with its first product on a card, and keeps."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ipygpumem.estimating.memory.storages import WORKSPACES, StorageLog
from ipygpumem.estimating.operators.card import Card, Operation
from ipygpumem.estimating.records import Note
from ipygpumem.heap.bulk import of_types
from ipygpumem.probes.allocator import Snapshot, SnapshotBlock, snapshots
from ipygpumem.units import KIB, MIB, format_bytes

_POSITIONS_OF_BIAS = {"addmm": 0, "_addmm_activation": 0, "linear": 2}
"""Operators that may add a bias with cublasLt, and the bias's position among the arguments."""
_HOPPER = (9, 0)
_HOPPER_BYTES = 32 * MIB
_USUAL_BYTES = 8320 * KIB
"""cuBLAS workspaces on a Hopper and on other GPUs, measured with torch 2.11 on simulated cards."""


def workspace_sizes(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the bytes of a cuBLAS and of a cublasLt workspace for a compute capability.

    An unknown capability, None, counts as that of a Hopper, which takes the most: an estimate that
    is too low would be worse. Environment variables of cuBLAS and of torch can set the sizes.
    """
    cublas_bytes = _USUAL_BYTES
    if capability in (None, _HOPPER):
        cublas_bytes = _HOPPER_BYTES
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    buffers = re.findall(r":(\d+):(\d+)", config)  # their size in KiB, and their number
    if buffers:
        cublas_bytes = sum(int(size) * int(count) for size, count in buffers) * KIB
    return cublas_bytes, _cublaslt_bytes(cublas_bytes)


def _cublaslt_bytes(cublas_bytes: int) -> int:
    """Return the bytes of cublasLt's workspace; 0 if it uses the workspace of cuBLAS."""
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


def all_workspace_sizes() -> set[int]:
    """Return the bytes of the workspaces of all cards: of a Hopper, and of any other card."""
    return {*workspace_sizes(_HOPPER), *workspace_sizes((0, 0))}


class _Workspace(NamedTuple):
    """A workspace that a thread of the code has."""

    device_name: str
    """The device in the log."""
    thread: object
    is_cublaslt: bool
    """True for one of cublasLt, False for one of cuBLAS."""


class CublasWorkspaces:
    """Logs the workspaces that threads get from cuBLAS, and cublasLt, while the code runs."""

    def __init__(self, log: StorageLog, note: Note) -> None:
        self._log = log
        self._note = note
        self._unassigned = _blocks_like_workspaces()
        """Sizes, by device and address, of existing blocks that may be workspaces, and that no
        thread of the code has used yet.
        """
        self._logged: set[_Workspace] = set()
        """The workspaces that the code has."""

    def log_missing(self, operation: Operation, card: Card) -> None:
        """Log the workspaces that an operation needs, unless its thread has them on the card."""
        self._log_if_missing(operation, card, is_cublaslt=False)
        if _adds_bias(operation):
            self._log_if_missing(operation, card, is_cublaslt=True)

    def _log_if_missing(self, operation: Operation, card: Card, *, is_cublaslt: bool) -> None:
        """Log one of the two kinds of workspaces, unless the operation's thread has it."""
        workspace = _Workspace(card.name_in_log, _thread_of(operation), is_cublaslt)
        if workspace not in self._logged:
            self._logged.add(workspace)
            self._log_workspace(card, is_cublaslt=is_cublaslt)

    def _log_workspace(self, card: Card, *, is_cublaslt: bool) -> None:
        """Log a workspace of cuBLAS, or of cublasLt.

        If an existing block on the card is probably this workspace, it is logged as that block.
        """
        cublas_bytes, cublaslt_bytes = workspace_sizes(card.capability)
        size_bytes = cublas_bytes
        if is_cublaslt:
            size_bytes = cublaslt_bytes
        elif card.capability is None:
            self._note_assumed_hopper(card)
        address = self._assign_existing_block(card.name_in_log, size_bytes)
        life = self._log.log_block(
            size_bytes, card.name_in_log, WORKSPACES, existed_before=address is not None
        )
        life.address = address or 0

    def _note_assumed_hopper(self, card: Card) -> None:
        """Note that the size of a workspace is a guess, because the kind of the GPU is unknown."""
        if "CUBLAS_WORKSPACE_CONFIG" in os.environ:  # the size does not depend on the GPU
            return
        hopper = format_bytes(_HOPPER_BYTES)
        usual = format_bytes(_USUAL_BYTES)
        self._note(
            f"{card.name} is assumed to be a Hopper: {hopper} of cuBLAS workspace for each thread "
            f"that multiplies ({usual} on other GPUs)"
        )

    def _assign_existing_block(self, device_name: str, size_bytes: int) -> int | None:
        """Assign an existing block that is probably a workspace of this size, and return its
        address; None if there is no further such block.
        """
        sizes_by_address = self._unassigned.get(device_name, {})
        for address, block_bytes in sizes_by_address.items():
            if block_bytes == size_bytes:
                del sizes_by_address[address]
                return address
        return None


def _thread_of(operation: Operation) -> object:
    """Return the thread that multiplies: autograd has one thread for each device."""
    if operation.in_backward:
        return "autograd"
    return threading.get_ident()


def _adds_bias(operation: Operation) -> bool:
    """Return True if an operation adds a bias in the kernel of its product, which is cublasLt's.

    torch uses cuBLAS if a matrix is a vector, such as the weight of a layer with one output, and if
    the bias is scaled or is not a single row.
    """
    args = operation.args
    position = _POSITIONS_OF_BIAS.get(operation.name)
    if position is None or len(args) <= position:
        return False
    is_scaled = operation.kwargs.get("beta", 1) != 1
    if is_scaled:
        return False
    bias = args[position]
    if not isinstance(bias, torch.Tensor):
        return False
    weight = args[1] if operation.name == "linear" else args[2]
    is_row = bias.ndim == 1 or (bias.ndim == 2 and bias.shape[0] == 1)
    return bool(is_row and min(weight.shape) > 1)


def _blocks_like_workspaces() -> dict[str, dict[int, int]]:
    """Return the existing blocks that may be workspaces: their sizes by device and address.

    These are the blocks of a workspace's size in which no plain tensor is. The notebook's threads
    have made them, so that the estimated code need not allocate them.
    """
    if not torch.cuda.is_initialized():
        return {}
    try:
        snapshots_by_device = snapshots("cuda")
    except RuntimeError:  # another allocator
        return {}
    sizes_of_workspaces = all_workspace_sizes()
    blocks_by_device = _blocks_of_sizes(snapshots_by_device, sizes_of_workspaces)
    addresses_of_tensors = set[int]()
    if any(blocks_by_device.values()):
        addresses_of_tensors = _addresses_of_tensors()
    sizes_by_device = dict[str, dict[int, int]]()
    for device, blocks in blocks_by_device.items():
        sizes_by_address = dict[int, int]()
        for block in blocks:
            if block.address not in addresses_of_tensors:
                sizes_by_address[block.address] = block.requested_bytes
        sizes_by_device[device] = sizes_by_address
    return sizes_by_device


def _blocks_of_sizes(
    snapshots_by_device: Mapping[str, Snapshot], sizes: set[int]
) -> dict[str, list[SnapshotBlock]]:
    """Return each device's blocks in use whose requested bytes are among ``sizes``."""
    blocks_by_device = dict[str, list[SnapshotBlock]]()
    for device, snapshot in snapshots_by_device.items():
        blocks_in_use = snapshot.blocks_in_use
        blocks = [block for block in blocks_in_use if block.requested_bytes in sizes]
        blocks_by_device[device] = blocks
    return blocks_by_device


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
