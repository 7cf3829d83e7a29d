"""A kernel of a card, which logs what it allocates, and the table of the orders of all kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.memory.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.operators.card import Card, Operation
from ipygpumem.estimating.operators.cublas import CublasWorkspaces
from ipygpumem.estimating.operators.transients import is_contiguous


class Kernel:
    """Logs the memory that one operation allocates on a card.

    The order of an operator (a function with the decorator ``order_of``) calls these methods as the
    CUDA kernel allocates. ``with kernel.blocks([...])`` is a block that the kernel frees after the
    steps inside, so nested ``with`` blocks show which allocations are alive at once.

    Args:
        operation: the operation.
        card: the card on which it runs.
        log: the log of storages.
        workspaces: the workspaces of cuBLAS that the code has.
        log_result_tensor: logs one of the operation's results.
    """

    def __init__(
        self,
        operation: Operation,
        card: Card,
        log: StorageLog,
        workspaces: CublasWorkspaces,
        log_result_tensor: Callable[[Any], object],
    ) -> None:
        self._operation = operation
        self.card = card
        self._log = log
        self._workspaces = workspaces
        self._log_result_tensor = log_result_tensor
        self._logged: set[int] = set()
        """Indices of the results that are logged already, or that are not to be logged because the
        kernel allocates them in RAM.
        """

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments that the operation gets by name."""
        return self._operation.kwargs

    @property
    def first_result(self) -> Any:
        """The first tensor that the operation returns."""
        return self._operation.results[0]

    @property
    def result_bytes(self) -> int:
        """The bytes of the first result."""
        return int(self.first_result.nbytes)

    def log_result(self, *, index: int) -> None:
        """Log the result at an index, such as 1 for the mask that dropout returns second.

        Nothing is logged if it is logged already, or if the operation has fewer results.
        """
        results = self._operation.results
        if index in self._logged or index >= len(results):
            return
        self._logged.add(index)
        self._log_result_tensor(results[index])

    def log_part(self, tensor: Any) -> None:
        """Log the indices or the values of a sparse result, before the rest of it."""
        self._log_result_tensor(tensor)

    def log_results(self) -> None:
        """Log all results that are not logged yet, in order."""
        for index in range(len(self._operation.results)):
            self.log_result(index=index)

    def skip_results(self, *, indices: Iterable[int]) -> None:
        """Do not log the results at these indices: the kernel allocates them in RAM."""
        self._logged.update(indices)

    def log_workspaces(self) -> None:
        """Log the workspaces of cuBLAS that the operation needs, unless its thread has them."""
        self._workspaces.log_missing(self._operation, self.card)

    @contextmanager
    def blocks(self, sizes: Iterable[int]) -> Iterator[None]:
        """Allocate a block of each size, and free all of them at the end of the ``with`` block.

        A size of 0 allocates nothing.
        """
        lives = [
            self._log.log_block(size, self.card.name_in_log, TEMPORARIES) for size in sizes if size
        ]
        yield
        for life in lives:
            self._log.free(life)

    def allocate_briefly(self, *sizes: int) -> None:
        """Allocate blocks, and free them again: a step of the kernel needs them together."""
        with self.blocks(sizes):
            pass

    @contextmanager
    def copies(self, *tensors: Any) -> Iterator[None]:
        """Copy the tensors that are not contiguous, and free the copies at the end."""
        sizes = [tensor.nbytes for tensor in tensors if not is_contiguous(tensor)]
        with self.blocks(sizes):
            yield

    @contextmanager
    def resized_result(self, source: Any) -> Iterator[None]:
        """Log a result that torch first makes as large as ``source``, and then resizes.

        If the result must be larger, torch allocates it while the first block is still alive.
        ``source`` is copied unless it is contiguous; the copy is freed at the end of the ``with``
        block.
        """
        first_bytes = source.nbytes
        if self.result_bytes <= first_bytes:  # the first block becomes the result
            self.log_results()
            first_bytes = 0
        with ExitStack() as copies:
            with self.blocks([first_bytes]):
                copies.enter_context(self.copies(source))
                self.log_results()
            yield


Order = Callable[[Kernel, Any], None]
"""Logs the allocations of an operator's kernel, which is called with some arguments."""
ORDERS: dict[str, Order] = {}
"""The order of each operator that has one, by the operator's name, such as ``addmm``."""


def order_of(*names: str) -> Callable[[Order], Order]:
    """Return a decorator that registers a function in ``ORDERS`` for the operators with these
    names.
    """

    def register(order: Order) -> Order:
        ORDERS.update(dict.fromkeys(names, order))
        return order

    return register


def number_of_positions(tensor: Any, dims: Iterable[int]) -> int:
    """Return the product of a tensor's sizes in some dimensions."""
    return math.prod(tensor.shape[dim] for dim in dims)


def copy_bytes(reshaped: Any, tensor: Any) -> list[int]:
    """Return the bytes of a reshaped tensor, in a list; an empty one if it is a view."""
    if reshaped.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return []
    return [reshaped.nbytes]
