"""A kernel of a card, which logs what it allocates, and the table of the orders of all kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.transients import (
    is_contiguous,
)


class Kernel:
    """Logs what one operation allocates on a device, in the order in which its rule says so.

    Args:
        log: the log of storages.
        device: the device's name in the log.
        results: the tensors that the operation returns.
        log_result: logs one of them.
        keep_workspaces: logs the workspace of cuBLAS, unless the thread has it.
        processors: the number of the device's multiprocessors.
        options: the arguments that the operation gets by name.
    """

    def __init__(
        self,
        log: StorageLog,
        device: str,
        results: list[Any],
        log_result: Callable[[Any], object],
        keep_workspaces: Callable[[], object],
        processors: int,
        options: Mapping[str, Any],
    ) -> None:
        self._log = log
        self._device = device
        self._results = results
        self._log_result = log_result
        self._logged: set[int] = set()
        """Numbers of the results that are logged or have no memory on the device."""
        self.workspace = keep_workspaces
        """Logs the workspace of cuBLAS, unless the thread has it."""
        self.processors = processors
        """The number of the device's multiprocessors."""
        self.options = options
        """The arguments that the operation gets by name."""

    @property
    def first_result(self) -> Any:
        """The first tensor that the operation returns."""
        return self._results[0]

    @property
    def result_bytes(self) -> int:
        """The bytes of the first result."""
        return int(self.first_result.nbytes)

    def result(self, number: int) -> None:
        """Log a result, unless the operation does not have it."""
        if number in self._logged or number >= len(self._results):
            return
        self._logged.add(number)
        self._log_result(self._results[number])

    def part(self, tensor: Any) -> None:
        """Log a part of a sparse result."""
        self._log_result(tensor)

    def results(self) -> None:
        """Log the results that are not logged yet."""
        for number in range(len(self._results)):
            self.result(number)

    def on_host(self, *numbers: int) -> None:
        """Leave out results that the kernel allocates in RAM."""
        self._logged.update(numbers)

    @contextmanager
    def blocks(self, sizes: Iterable[int]) -> Iterator[None]:
        """Allocate blocks, and free them at the end of the ``with`` block."""
        lives = [self._log.hold(size, self._device, TEMPORARIES) for size in sizes if size]
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
    """Return a decorator that makes a function the order of some operators."""

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
