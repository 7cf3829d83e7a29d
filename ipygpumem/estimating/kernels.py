"""The order in which CUDA kernels allocate their results and their intermediate blocks.

The order decides where the allocator places blocks, and so how much memory it reserves. Each rule
was read off the history of torch 2.11's allocator on a simulated card. An operator without a rule
allocates its results, then a workspace of cuBLAS, then all its intermediate blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ipygpumem.estimating.storages import TEMPORARIES, StorageLog
from ipygpumem.estimating.transients import (
    FEW_INDICES,
    is_contiguous,
    is_matrix_of_cublas,
    laid_out,
)
from ipygpumem.units import KIB


class Kernel:
    """Logs what one operation allocates on a device, in the order in which its rule says so."""

    def __init__(
        self,
        log: StorageLog,
        place: str,
        results: list[Any],
        log_result: Callable[[Any], object],
        keep_workspaces: Callable[[], object],
    ) -> None:
        self._log = log
        self._place = place
        self._results = results
        self._log_result = log_result
        self._logged: set[int] = set()
        """Numbers of the results that are logged or have no memory on the device."""
        self.workspace = keep_workspaces
        """Logs the workspace of cuBLAS, unless the thread has it."""

    def result(self, number: int) -> None:
        """Log a result, unless the operation does not have it."""
        if number < len(self._results) and number not in self._logged:
            self._logged.add(number)
            self._log_result(self._results[number])

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
        lives = [self._log.hold(size, self._place, TEMPORARIES) for size in sizes if size]
        yield
        for life in lives:
            self._log.free(life)

    @contextmanager
    def copies(self, *tensors: Any) -> Iterator[None]:
        """Copy the tensors that are not contiguous, and free the copies at the end."""
        with self.blocks([tensor.nbytes for tensor in tensors if not is_contiguous(tensor)]):
            yield


_PAIRS_OF_TILE = 4608
"""Pairs that one block of a card's threads sorts, with torch 2.11 on a Hopper."""
Order = Callable[[Kernel, Any], None]
"""Logs what an operator with some arguments allocates."""
ORDERS: dict[str, Order] = {}
"""Orders by operator."""


def _order_of(*names: str) -> Callable[[Order], Order]:
    """Return a decorator that makes a function the order of some operators."""

    def register(order: Order) -> Order:
        ORDERS.update(dict.fromkeys(names, order))
        return order

    return register


@_order_of("native_dropout")
def _dropout(kernel: Kernel, _: Any) -> None:
    kernel.result(1)  # the mask
    kernel.result(0)


@_order_of("native_layer_norm")
def _layer_norm(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0]):
        kernel.results()


@_order_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0], args[1]):
        kernel.results()


@_order_of("col2im")
def _fold(kernel: Kernel, args: Any) -> None:
    with kernel.copies(args[0]):
        kernel.results()


@_order_of("mm", "bmm")
def _product(kernel: Kernel, args: Any) -> None:
    _multiply(kernel, args[0], args[1])


@_order_of("addmm", "baddbmm")
def _sum_of_product(kernel: Kernel, args: Any) -> None:
    _multiply(kernel, args[1], args[2])


def _multiply(kernel: Kernel, *matrices: Any) -> None:
    kernel.results()
    copied = [matrix.nbytes for matrix in matrices if not is_matrix_of_cublas(matrix)]
    with kernel.blocks(copied):
        kernel.workspace()


# -- sparse gradients -----------------------------------------------------------------------------


@_order_of("_coalesce")
def _coalesced(kernel: Kernel, args: Any) -> None:
    """Log a sort by index, which keeps two copies of the indices until the values are added up."""
    count = args[0]._nnz()
    with kernel.blocks([8 * count, 8 * count]):
        with kernel.blocks([16 * count + count // 500 + 767]):
            pass
        kernel.results()


@_order_of("sparse_mask")
def _values_at_indices(kernel: Kernel, args: Any) -> None:
    """Log the entries of a dense tensor, which the kernel multiplies by one."""
    dense, mask = args
    with kernel.blocks([dense.itemsize, mask._values().numel() * dense.itemsize]):
        kernel.results()


# -- attention -------------------------------------------------------------------------------------


@_order_of("_scaled_dot_product_efficient_attention")
def _efficient_attention(kernel: Kernel, args: Any) -> None:
    """Log attention; outside of graphs, the state of its random numbers is in RAM.

    Wide heads of 16 bits are summed up in float32.
    """
    kernel.on_host(2, 3)
    kernel.results()
    query, _, value = args[:3]
    if query.itemsize == 2 and max(query.shape[-1], value.shape[-1]) > 128:
        batch, heads, length, _ = query.shape
        with kernel.blocks([batch * heads * length * value.shape[-1] * 4]):
            pass


@_order_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradients, then the sums of the gradient's products with the output, then a buffer.

    Only the kernels of 16 bits compute these products themselves.
    """
    gradient, query = args[:2]
    batch, heads, length, _ = query.shape
    sums_bytes = batch * heads * length * 4
    kernel.results()
    with ExitStack() as stack:
        stack.enter_context(kernel.blocks(laid_out(gradient)))
        if query.itemsize == 2:
            stack.enter_context(kernel.blocks([sums_bytes]))
        else:
            with kernel.blocks([gradient.nbytes, sums_bytes]):
                sums = stack.enter_context  # the sums outlive the products
                sums(kernel.blocks([sums_bytes]))
        with kernel.blocks([_buffer_bytes(args)]):
            pass


def _buffer_bytes(args: Any) -> int:
    """Return the bytes of float32 sums for tiles of the query's gradient, with 16 bytes each."""
    _, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    rows, keys, width_of_value = batch * heads, key.shape[-2], value.shape[-1]
    widest = max(width, width_of_value)
    is_half = query.itemsize == 2
    sums = _up(length, 64) * _up(width, 128 if 64 < widest <= 128 else 64)
    if widest > 128 and is_half:
        parts = max(1, min(_up(keys, 64) // 64, 200 // rows))
        sums += parts * 64 * (_up(width, 128) + _up(width_of_value, 128))
    tile_rows = 64 if widest <= 64 else 128
    tile_columns = 128 if is_half and 64 < widest <= 128 else 64
    tiles = _up(length, tile_rows) // tile_rows * (_up(width, tile_columns) // tile_columns)
    return int(rows * (sums * 4 + tiles * 16))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# -- embeddings ------------------------------------------------------------------------------------


@_order_of("embedding_dense_backward")
def _embedding_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table: many indices are sorted before it is allocated."""
    gradient, indices, rows, _, by_frequency = args[:5]
    with kernel.copies(gradient):
        if indices.numel() <= FEW_INDICES and not by_frequency:
            kernel.results()
        else:
            _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


def _log_sorted_sums(
    kernel: Kernel, gradient: Any, indices: Any, rows: int, *, by_frequency: bool
) -> None:
    """Log the kernels that sort indices, and add up the rows of the gradient for each one."""
    count, width = indices.numel(), gradient.shape[-1]
    segments = min(count, rows)
    parts = -(-count // 10) + segments  # of ten indices, or of one row's
    with kernel.blocks([8 * count] * 2):
        with kernel.blocks([8 * count, _sort_bytes(count)]):
            pass
        kernel.results()
        begins = [8 * count] * (3 if by_frequency else 1)
        with kernel.blocks(begins):
            with kernel.blocks([8 * count]):  # while it finds where each row begins
                pass
            with kernel.blocks([8 * segments, 8 * segments, 8 * parts, 4 * parts * width]):
                pass


def _sort_bytes(count: int) -> int:
    """Return the bytes with which a kernel sorts pairs of integers: copies, and 1 KiB a tile."""
    tiles = -(-count // _PAIRS_OF_TILE)
    return 16 * count + tiles * KIB + 16 * KIB + 512


@_order_of("_embedding_bag", "_embedding_bag_forward_only")
def _bags(kernel: Kernel, _: Any) -> None:
    """Log the sizes of the bags, each index's bag, the sums, and the largest values' positions."""
    for number in (2, 1, 0, 3):
        kernel.result(number)


@_order_of("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _bags_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table that is read in bags."""
    gradient, indices = args[:2]
    # The first of these operators gets the offsets, too.
    rows, by_frequency, mode = args[6:9] if len(args) > 10 else args[5:8]
    takes_maximum = mode == 2
    if takes_maximum:
        kernel.results()
        return
    _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


# -- losses ----------------------------------------------------------------------------------------


@_order_of("huber_loss")
def _huber_loss(kernel: Kernel, args: Any) -> None:
    """Log the losses of all elements, which are then reduced."""
    given, _, reduction = (*args, 1)[:3]
    sizes = [given.nbytes] if reduction else []
    with kernel.blocks(sizes):
        kernel.results()
