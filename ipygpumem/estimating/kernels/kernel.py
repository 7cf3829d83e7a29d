"""A kernel of a card, which logs what it allocates, and the table of the orders of all kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.card import Card, Operation
from ipygpumem.estimating.cublas import CublasWorkspaces
from ipygpumem.estimating.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.transients import is_contiguous


class Kernel:
    """Logs what one operation allocates on a card, in the order in which its rule says so.

    Args:
        operation: the operation.
        card: the card on which it runs.
        log: the log of storages.
        workspaces: the workspaces of cuBLAS that the code has.
        log_result: logs one of the operation's results.
    """

    def __init__(
        self,
        operation: Operation,
        card: Card,
        log: StorageLog,
        workspaces: CublasWorkspaces,
        log_result: Callable[[Any], object],
    ) -> None:
        self._operation = operation
        self.card = card
        self._log = log
        self._workspaces = workspaces
        self._log_result = log_result
        self._logged: set[int] = set()
        """Numbers of the results that are logged or have no memory on the card."""

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

    def result(self, number: int) -> None:
        """Log a result, unless the operation does not have it."""
        results = self._operation.results
        if number in self._logged or number >= len(results):
            return
        self._logged.add(number)
        self._log_result(results[number])

    def part(self, tensor: Any) -> None:
        """Log a part of a sparse result."""
        self._log_result(tensor)

    def results(self) -> None:
        """Log the results that are not logged yet."""
        for number in range(len(self._operation.results)):
            self.result(number)

    def on_host(self, *numbers: int) -> None:
        """Leave out results that the kernel allocates in RAM."""
        self._logged.update(numbers)

    def workspace(self) -> None:
        """Log the workspaces of cuBLAS that the operation needs, unless its thread has them."""
        self._workspaces.log_missing(self._operation, self.card)

    @contextmanager
    def blocks(self, sizes: Iterable[int]) -> Iterator[None]:
        """Allocate blocks, and free them at the end of the ``with`` block."""
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
    def resized(self, source: Any) -> Iterator[None]:
        """Log a result that torch makes as large as a tensor at first. If it must be larger, the
        first block is freed after the result is allocated.

        The tensor is copied unless it is contiguous; the copy is freed at the end of the ``with``
        block.
        """
        first_bytes = source.nbytes
        if self.result_bytes <= first_bytes:
            self.results()
            first_bytes = 0
        with ExitStack() as copies:
            with self.blocks([first_bytes]):
                copies.enter_context(self.copies(source))
                self.results()
            yield


Order = Callable[[Kernel, Any], None]
"""Logs what an operator with some arguments allocates."""
ORDERS: dict[str, Order] = {}
"""Orders by operator."""


def order_of(*names: str) -> Callable[[Order], Order]:
    """Return a decorator that registers a function in ``ORDERS`` for the operators with these
    names.
    """

    def register(order: Order) -> Order:
        ORDERS.update(dict.fromkeys(names, order))
        return order

    return register


def number_of_positions(tensor: Any, dims: Iterable[int]) -> int:
    """Return the number of positions of some dimensions together."""
    return math.prod(tensor.shape[dim] for dim in dims)


def copy_bytes(reshaped: Any, tensor: Any) -> list[int]:
    """Return the bytes of a reshaped tensor if it is a copy."""
    if reshaped.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return []
    return [reshaped.nbytes]
