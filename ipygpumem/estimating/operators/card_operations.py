"""Logs all memory that operations on a card allocate: results, workspaces, and transient blocks.

cuBLAS keeps its workspaces; the other blocks are freed before the operation returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipygpumem.estimating.devices.devices import Devices
from ipygpumem.estimating.memory.storages import StorageLog
from ipygpumem.estimating.operators.card import Card, Operation
from ipygpumem.estimating.operators.convolutions import Convolution, takes_cudnn
from ipygpumem.estimating.operators.cublas import CublasWorkspaces
from ipygpumem.estimating.operators.kernels.kernel import Kernel
from ipygpumem.estimating.operators.kernels.orders import ORDERS
from ipygpumem.estimating.operators.transients import has_rule, has_unknown_memory, transient_sizes
from ipygpumem.estimating.records import Note

_PRODUCTS = frozenset(
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
"""Operators that always call cuBLAS.

A few more call it for some shapes only, which their order knows (``kernels/``).
"""
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_CUDNN = (
    "convolutions: cuDNN's workspaces are not counted. cuDNN chooses them; if memory is short, "
    "torch tries a way that needs less"
)


class CardOperations:
    """Logs the memory that operations allocate: their results, and on a card also its kernels'
    workspaces and transient blocks.

    Args:
        log: the log of storages.
        devices: the devices of the estimate.
        known_properties: returns the properties of a device, None if they are unknown.
        note: adds a line to the notes.
    """

    def __init__(
        self, log: StorageLog, devices: Devices, known_properties: Callable[[Any], Any], note: Note
    ) -> None:
        self._log = log
        self._devices = devices
        self._known_properties = known_properties
        self._note = note
        self._workspaces = CublasWorkspaces(log, note)
        self.unknown_operators: dict[str, None] = {}
        """Operators that ran on CUDA with memory that cannot be derived from shapes, in order; a
        set.
        """

    def log(self, operation: Operation, log_result: Callable[[Any], object]) -> None:
        """Log the memory that an operation allocates on its assumed device.

        ``log_result`` logs one of the results. On a card, the operation's other memory is logged,
        too; an operator of which that is unknown is added to ``unknown_operators``.
        """
        is_on_card = self._assumed_device(operation).startswith("cuda")
        if is_on_card and has_unknown_memory(operation.name):
            self.unknown_operators.setdefault(operation.name)
        if not is_on_card or not _takes_more_than_results(operation.name):
            for tensor in operation.results:
                log_result(tensor)
            return
        card = self._card_of(operation)
        kernel = Kernel(operation, card, self._log, self._workspaces, log_result)
        if operation.name in _CONVOLUTIONS:
            self._log_convolution(kernel, operation)
        else:
            _log_in_order(kernel, operation)

    def _assumed_device(self, operation: Operation) -> str:
        """Return the device on which an operation is assumed to run: that of its first result."""
        if not operation.results:
            return "cpu"
        return self._devices.assumed_for(operation.results[0].device)

    def _card_of(self, operation: Operation) -> Card:
        """Return the card on which an operation is assumed to run."""
        assumed_device = torch.device(self._assumed_device(operation))
        return Card(
            f"cuda:{assumed_device.index or 0}",
            self._devices.name_in_log(operation.results[0].device),
            self._known_properties(assumed_device),
        )

    def _log_convolution(self, kernel: Kernel, operation: Operation) -> None:
        """Log the memory of a convolution, without the workspaces of cuDNN, which are noted."""
        if takes_cudnn():
            self._note(_CUDNN)
        else:
            convolution = Convolution.of(operation.name, operation.args, kernel.first_result)
            convolution.log(kernel)
        kernel.log_results()


def _takes_more_than_results(name: str) -> bool:
    """Return True if an operator's kernel on a card may allocate blocks besides its results, such
    as a workspace.
    """
    return name in _PRODUCTS or name in _CONVOLUTIONS or name in ORDERS or has_rule(name)


def _log_in_order(kernel: Kernel, operation: Operation) -> None:
    """Log the results, workspaces and transient blocks of an operation that is no convolution.

    The order is that of its operator, if there is one in ``ORDERS``; otherwise, as for the rest
    after such an order, the results come first, then the workspaces.
    """
    order = ORDERS.get(operation.name)
    if order is not None:
        order(kernel, operation.args)
    kernel.log_results()
    if operation.name in _PRODUCTS:
        kernel.log_workspaces()
    sizes = transient_sizes(
        operation.name, operation.args, kernel.first_result, kernel.card.processors
    )
    kernel.allocate_briefly(*sizes)
